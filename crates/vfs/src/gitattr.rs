//! What git keeps otherwise than it lies on the disk: line ends, encodings and `$Id$`, by the attributes of the exported
//! tree, and what it keeps elsewhere: submodules and files of filters, which no program of ours runs. Works in a repository
//! of ours, on copies.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use proto::path::TreePath;
use rusqlite::Connection;

use crate::content::Contents;
use crate::diff::{DiffError, Scratch, in_tree};
use crate::entries::{self, Entry, Kind};
use crate::git::Git;

/// The attributes that decide, and git's words for one that is not set.
const ATTRIBUTES: [&str; 6] = ["text", "crlf", "eol", "ident", "working-tree-encoding", "filter"];
const NOT_SET: [&str; 2] = ["unspecified", "unset"];

/// What the parent commit has beside plain files.
#[derive(Default)]
pub(crate) struct Special {
    submodules: BTreeSet<TreePath>,
    files: BTreeSet<TreePath>,
}

impl Special {
    pub(crate) fn of(git: &Git, commit: &str) -> Result<Self, DiffError> {
        let mut out = Self::default();
        let list = git.run(&["ls-tree", "-r", "-z", "--full-tree", commit])?;
        for line in list.split(|byte| *byte == 0) {
            let Some(tab) = line.iter().position(|byte| *byte == b'\t') else { continue };
            let Ok(path) = TreePath::new(&line[tab + 1..]) else { continue };
            if line.starts_with(b"160000 ") {
                out.submodules.insert(path);
            } else {
                out.files.insert(path);
            }
        }
        Ok(out)
    }

    /// Whether the commit has a file at the path.
    pub(crate) fn has(&self, path: &TreePath) -> bool {
        self.files.contains(path)
    }

    /// The submodule that the path lies in, or is.
    pub(crate) fn submodule_of(&self, path: &TreePath) -> Option<&TreePath> {
        self.submodules.iter().find(|submodule| path.starts_with(submodule))
    }
}

fn is_attributes(path: &TreePath) -> bool {
    path.file_name() == b".gitattributes"
}

/// Files by what git does with them.
#[derive(Default)]
pub(crate) struct Treated {
    /// Git's object of those that it keeps otherwise.
    pub(crate) converted: BTreeMap<TreePath, String>,
    /// Those whose attributes name a filter, which is not run.
    pub(crate) filtered: BTreeSet<TreePath>,
}

/// Where it is worked: our repository, and what it is told of.
pub(crate) struct Treatment<'a> {
    pub(crate) scratch: &'a Scratch,
    /// The commit below.
    pub(crate) head: &'a str,
    /// The base's git directory, which we made: its configuration says how line ends are kept.
    pub(crate) base_git: &'a Path,
    pub(crate) conn: &'a Connection,
    pub(crate) contents: &'a Contents<'a>,
}

impl Treatment<'_> {
    /// Looks at the files that are to be put into the commit.
    pub(crate) fn treat(&self, special: &Special, puts: &[(&TreePath, Entry)]) -> Result<Treated, DiffError> {
        let mut out = Treated::default();
        let keeps_line_ends = Git::at(self.base_git).ask(&["config", "--get", "core.autocrlf"])?;
        let autocrlf = keeps_line_ends.map(|value| String::from_utf8_lossy(value.trim_ascii()).into_owned());
        let autocrlf = autocrlf.filter(|value| value != "false");
        let all = special.files.iter().chain(puts.iter().map(|(path, _)| *path));
        let attributes: BTreeSet<&TreePath> = all.filter(|path| is_attributes(path)).collect();
        if attributes.is_empty() && autocrlf.is_none() {
            return Ok(out);
        }
        let work = self.scratch.dir().join("work");
        std::fs::create_dir(&work)?;
        for path in attributes {
            if let Some(entry) = entries::lookup(self.conn, self.contents.chain, path)?.filter(in_tree) {
                self.place(&work, path, &entry)?;
            }
        }
        let eol = Git::at(self.base_git).ask(&["config", "--get", "core.eol"])?.unwrap_or_default();
        let git = self.scratch.git().work_tree(&work);
        let git = git.config("core.autocrlf", autocrlf.as_deref().unwrap_or("false"));
        let git = match String::from_utf8_lossy(eol.trim_ascii()) {
            eol if eol.is_empty() => git,
            eol => git.config("core.eol", &*eol),
        };
        let files: BTreeMap<&TreePath, &Entry> = puts
            .iter()
            .filter(|(_, entry)| entry.kind == Kind::File)
            .map(|(path, entry)| (*path, entry))
            .collect();
        let mut converted = Vec::new();
        for (path, values) in attributes_of(&git, files.keys().copied())? {
            let set = |name| values.get(name).filter(|value| !NOT_SET.contains(&value.as_str()));
            if set("filter").is_some() {
                out.filtered.insert(path);
                continue;
            }
            let Some(entry) = files.get(&path) else { continue };
            let is_binary = values.get("text").is_some_and(|value| value == "unset");
            let by_lines = ["text", "crlf", "eol"].into_iter().any(|name| set(name).is_some());
            let by_lines = !is_binary && (by_lines || autocrlf.is_some());
            let otherwise = ["ident", "working-tree-encoding"].into_iter().any(|name| set(name).is_some());
            if otherwise || (by_lines && self.has_cr(&path, entry)?) {
                if !is_attributes(&path) {
                    self.place(&work, &path, entry)?;
                }
                converted.push(path);
            }
        }
        if converted.is_empty() {
            return Ok(out);
        }
        // As `git add` does it: what the commit below has of a file counts, too.
        git.run(&["read-tree", self.head])?;
        let names: Vec<u8> = converted.iter().flat_map(|path| [path.as_bytes(), b"\0"].concat()).collect();
        git.run_with(&["update-index", "--add", "--replace", "-z", "--stdin"], &names, &|_| ())?;
        let converted: BTreeSet<TreePath> = converted.into_iter().collect();
        for line in git.run(&["ls-files", "--stage", "-z"])?.split(|byte| *byte == 0) {
            let Some(tab) = line.iter().position(|byte| *byte == b'\t') else { continue };
            let (Ok(path), Some(object)) =
                (TreePath::new(&line[tab + 1..]), line[..tab].split(|b| *b == b' ').nth(1))
            else {
                continue;
            };
            if converted.contains(&path) {
                out.converted.insert(path, String::from_utf8_lossy(object).into_owned());
            }
        }
        Ok(out)
    }

    /// Writes a copy of the file below `work`, which holds only such copies.
    fn place(&self, work: &Path, path: &TreePath, entry: &Entry) -> Result<(), DiffError> {
        if entry.kind != Kind::File {
            return Ok(());
        }
        let at: PathBuf = work.join(path.as_path());
        if let Some(dir) = at.parent() {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        }
        let mut out = BufWriter::new(File::create_new(&at)?);
        io::copy(&mut self.contents.open(path, entry)?, &mut out)?;
        Ok(out.flush()?)
    }

    fn has_cr(&self, path: &TreePath, entry: &Entry) -> Result<bool, DiffError> {
        let mut content = BufReader::with_capacity(64 * 1024, self.contents.open(path, entry)?);
        loop {
            let bytes = content.fill_buf()?;
            if bytes.is_empty() || bytes.contains(&b'\r') {
                return Ok(!bytes.is_empty());
            }
            let seen = bytes.len();
            content.consume(seen);
        }
    }
}

/// The values of [`ATTRIBUTES`] for each path.
fn attributes_of<'p>(
    git: &Git,
    paths: impl Iterator<Item = &'p TreePath>,
) -> Result<BTreeMap<TreePath, BTreeMap<String, String>>, DiffError> {
    let names: Vec<u8> = paths.flat_map(|path| [path.as_bytes(), b"\0"].concat()).collect();
    let args: Vec<&str> = ["check-attr", "-z", "--stdin"].into_iter().chain(ATTRIBUTES).collect();
    let list = git.run_with(&args, &names, &|_| ())?;
    let words: Vec<&[u8]> = list.split(|byte| *byte == 0).collect();
    let mut out = BTreeMap::<_, BTreeMap<_, _>>::new();
    for three in words.chunks_exact(3) {
        let Ok(path) = TreePath::new(three[0]) else { continue };
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        out.entry(path).or_default().insert(text(three[1]), text(three[2]));
    }
    Ok(out)
}
