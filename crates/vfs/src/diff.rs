//! What a branch changed of its base, as git tells it: two trees of the changed files only, in a repository of their
//! own, compared by git. What is large git does not see: `patch` tells that.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use proto::error::{Code, Coded};
use proto::ids::{BranchId, LayerId};
use proto::path::TreePath;
use rusqlite::Connection;

use crate::base::some;
use crate::branch::MountError;
use crate::captured::{Uncaptured, is_unread};
use crate::content::{ContentError, Contents};
use crate::db::DbError;
use crate::entries::{self, Class, Entry, Kind};
use crate::git::{Git, GitError};
use crate::gitname;
use crate::limits::{DIFF_BYTES_MAX, DIFF_FILE_BYTES_MAX, PATCH_BYTES_MAX};
use crate::patch::{Large, Sections, Telling};
use crate::scan::{Layers, ScanError};
use crate::store::Store;

/// How a difference is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiffFormat {
    /// git's letters and paths, one line each, odd paths quoted as git does.
    NameStatus,
    /// A patch, binary files and modes included.
    Unified,
}

/// A difference that can't be told.
#[derive(Debug, thiserror::Error)]
pub enum DiffError {
    /// There is no such branch.
    #[error("there is no branch {0}")]
    NoBranch(BranchId),
    /// What is on the branch can't be looked at.
    #[error(transparent)]
    Scan(#[from] ScanError),
    /// What a killed runner left on it can't be looked at.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// It is too large to show.
    #[error("the diff of the branch {0} has more than {max} MiB", max = DIFF_BYTES_MAX >> 20)]
    TooLarge(BranchId),
    /// It is too large for git.
    #[error("the patch would have more than {max} MiB, which git does not apply", max = PATCH_BYTES_MAX >> 20)]
    PatchTooLarge,
    /// What changed has names that git takes nowhere.
    #[error("git takes no file of the name {}", some(.0))]
    Names(Vec<String>),
    /// Content can't be had.
    #[error("can't read a changed file")]
    Content(#[from] ContentError),
    /// git failed.
    #[error("can't compare the branch with its base")]
    Git(#[from] GitError),
    /// The comparison's own repository can't be written.
    #[error("can't write the files to compare")]
    Io(#[from] io::Error),
    /// The database failed.
    #[error("can't read what the branch holds")]
    Db(#[from] DbError),
}

impl Coded for DiffError {
    fn code(&self) -> Code {
        match self {
            DiffError::NoBranch(_) => Code::NotFound,
            DiffError::TooLarge(_) | DiffError::PatchTooLarge | DiffError::Names(_) => Code::BadInput,
            DiffError::Scan(error) => error.code(),
            DiffError::Mount(error) => error.code(),
            DiffError::Content(error) => error.code(),
            DiffError::Git(error) => error.code(),
            DiffError::Io(error) if error.kind() == io::ErrorKind::StorageFull => Code::NoSpace,
            DiffError::Io(_) => Code::HostBroken,
            DiffError::Db(error) => error.code(),
        }
    }
    fn hint(&self) -> Option<String> {
        match self {
            DiffError::TooLarge(branch) => Some(format!(
                "see which files: tendon branch diff {branch} --name-status; or save it: tendon branch export {branch} \
                 --patch FILE"
            )),
            DiffError::PatchTooLarge => Some("export it as a tar archive or to a git branch".into()),
            DiffError::Names(_) => Some(
                "some systems take it for `.git` or `.gitmodules`: remove it (tendon branch rm BRANCH PATH), or export a tar \
                 archive"
                    .into(),
            ),
            DiffError::Scan(error) => error.hint(),
            DiffError::Mount(error) => error.hint(),
            DiffError::Content(error) => error.hint(),
            DiffError::Git(error) => error.hint(),
            DiffError::NoBranch(_) | DiffError::Io(_) | DiffError::Db(_) => None,
        }
    }
}

impl Store {
    /// What the branch, as of its last scan, changed of its base, to be shown. Of a file above [`DIFF_FILE_BYTES_MAX`] it
    /// says only that it differs, and of what can't be captured that it is there; `git apply` refuses such a diff. See [`crate::ExportTarget::Patch`] for all of it.
    pub fn diff(&self, branch: &BranchId, format: DiffFormat) -> Result<Vec<u8>, DiffError> {
        let mut out = Bounded { bytes: Vec::new(), branch };
        self.recovered(branch)?;
        let uncaptured = self.uncaptured(branch)?;
        self.compared(branch, |compared| {
            match format {
                DiffFormat::NameStatus => compared.run(&["--name-status"], &mut out)?,
                DiffFormat::Unified => drop(compared.sections(Telling::Line, &mut out)?),
            }
            compared.refused.iter().try_for_each(|change| tell_refused(change, format, &mut out))
        })?;
        if let Some(uncaptured) = uncaptured {
            tell_uncaptured(&uncaptured, format, &mut out)?;
        }
        Ok(out.bytes)
    }

    /// Writes a patch that `git apply` turns the base into the branch with, and says of how many files. `out` gets nothing
    /// unless it gets all.
    pub(crate) fn patch(&self, branch: &BranchId, out: &mut dyn Write) -> Result<u64, DiffError> {
        let mut files = 0;
        self.compared(branch, |compared| {
            names_taken(&compared.refused)?;
            if let Some(change) = compared.unread.first() {
                return Err(ContentError::NotKept { path: change.path.clone() }.into());
            }
            let path = compared.scratch.dir.join("patch");
            let mut file = io::BufWriter::new(File::create_new(&path)?);
            let mut bounded = Upto { out: &mut file, left: PATCH_BYTES_MAX };
            files = compared.sections(Telling::Whole, &mut bounded)?;
            file.flush()?;
            io::copy(&mut File::open(&path)?, out)?;
            Ok(())
        })?;
        Ok(files)
    }

    /// Gives git the two sides, unless they are equal, and lets `tell` tell their difference.
    fn compared(
        &self,
        branch: &BranchId,
        tell: impl FnOnce(&Compared<'_>) -> Result<(), DiffError>,
    ) -> Result<(), DiffError> {
        let conn = self.inner.db.reader()?;
        let layers = Layers::of(&conn, branch)?.ok_or_else(|| DiffError::NoBranch(branch.clone()))?;
        let chain = layers.chain();
        let changes = changes(&conn, &chain)?;
        if changes.is_empty() {
            return Ok(());
        }
        let (refused, changes): (Vec<_>, Vec<_>) = changes.into_iter().partition(TreeChange::is_refused);
        let (unread, changes): (Vec<_>, Vec<_>) =
            changes.into_iter().partition(|change| change.after.as_ref().is_some_and(is_unread));
        let scratch = Scratch::new(self, "sha1")?;
        let contents = Contents::new(self, &conn, Some(branch), &chain);
        let mut large = Large::new(&contents)?;
        let mut stream = FastImport::new(&scratch, &contents)?;
        let mut put = |stream: &mut FastImport<'_>, path: &TreePath, entry: Option<&Entry>| match entry {
            Some(entry) => match large.stand_in(path, entry)? {
                Some(stand_in) => stream.put_bytes(path, git_mode(entry), &stand_in),
                None => stream.put(path, Some(entry)),
            },
            None => stream.put(path, None),
        };
        stream.commit("refs/heads/before", b"before", &[])?;
        for change in &changes {
            put(&mut stream, &change.path, change.before.as_ref())?;
        }
        stream.commit("refs/heads/after", b"after", b"from refs/heads/before\n")?;
        for change in changes.iter().filter(|change| change.after.is_none()) {
            put(&mut stream, &change.path, None)?;
        }
        for change in changes.iter().filter(|change| change.after.is_some()) {
            put(&mut stream, &change.path, change.after.as_ref())?;
        }
        stream.run(&scratch.git())?;
        tell(&Compared { scratch, large, refused, unread })
    }
}

/// Two sides in git's hands.
struct Compared<'a> {
    scratch: Scratch,
    large: Large<'a>,
    /// What git was not given.
    refused: Vec<TreeChange>,
    /// What nobody could read: [`Store::uncaptured`] tells it.
    unread: Vec<TreeChange>,
}

impl Compared<'_> {
    fn sections(&self, telling: Telling, out: &mut dyn Write) -> Result<u64, DiffError> {
        let git = self.scratch.git();
        let mut sections = Sections::new(&self.large, &git, telling, out);
        self.run(&["--binary", "--full-index"], &mut sections)?;
        Ok(sections.files)
    }

    fn run(&self, format: &[&str], out: &mut dyn Write) -> Result<(), DiffError> {
        let mut args = vec!["diff", "--no-ext-diff", "--no-textconv", "--no-color", "-M", "--src-prefix=a/"];
        args.extend(["--dst-prefix=b/", "--diff-algorithm=myers"]);
        args.extend(format);
        args.extend(["refs/heads/before", "refs/heads/after", "--"]);
        match self.scratch.git().run_into(&args, &[], out) {
            // What went wrong where the output went.
            Err(GitError::Io { command, source }) => Err(match source.downcast::<DiffError>() {
                Ok(error) => error,
                Err(source) => GitError::Io { command, source }.into(),
            }),
            done => Ok(done?),
        }
    }
}

/// A diff that is made in memory.
struct Bounded<'a> {
    bytes: Vec<u8>,
    branch: &'a BranchId,
}

impl Write for Bounded<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > DIFF_BYTES_MAX {
            return Err(io::Error::other(DiffError::TooLarge(self.branch.clone())));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A patch that is written to a file.
struct Upto<'a> {
    out: &'a mut dyn Write,
    left: u64,
}

impl Write for Upto<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.left = self
            .left
            .checked_sub(bytes.len() as u64)
            .ok_or_else(|| io::Error::other(DiffError::PatchTooLarge))?;
        self.out.write_all(bytes)?;
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// One path of the tree that a branch changed.
pub(crate) struct TreeChange {
    pub(crate) path: TreePath,
    pub(crate) before: Option<Entry>,
    pub(crate) after: Option<Entry>,
}

impl TreeChange {
    /// Whether git takes no file of that name.
    fn is_refused(&self) -> bool {
        [&self.before, &self.after].into_iter().flatten().any(|side| gitname::refused(&self.path, side.kind))
    }
}

/// Refuses changes that git would not take, by their names.
pub(crate) fn names_taken<'a>(refused: impl IntoIterator<Item = &'a TreeChange>) -> Result<(), DiffError> {
    let shown = |change: &TreeChange| String::from_utf8_lossy(&quoted(&change.path)).into_owned();
    let names: Vec<_> = refused.into_iter().map(shown).collect();
    if names.is_empty() { Ok(()) } else { Err(DiffError::Names(names)) }
}

/// Shows a change of a name that git takes nowhere, in a form that `git apply` refuses for that name.
fn tell_refused(change: &TreeChange, format: DiffFormat, out: &mut dyn Write) -> Result<(), DiffError> {
    let (letter, head) = match (&change.before, &change.after) {
        (None, Some(after)) => ("A", format!("new file mode {}\n", git_mode(after))),
        (Some(before), None) => ("D", format!("deleted file mode {}\n", git_mode(before))),
        (Some(before), Some(after)) => {
            ("M", format!("old mode {}\nnew mode {}\n", git_mode(before), git_mode(after)))
        }
        (None, None) => return Ok(()),
    };
    let path = quoted(&change.path);
    let lines = match format {
        DiffFormat::NameStatus => [letter.as_bytes(), b"\t", &path, b"\n"].concat(),
        DiffFormat::Unified => {
            let (a, b) = ([b"\"a/", &path[1..]].concat(), [b"\"b/", &path[1..]].concat());
            let head = head.as_bytes();
            [b"diff --git ", &a[..], b" ", &b, b"\n", head, b"git takes no file of that name\n"].concat()
        }
    };
    Ok(out.write_all(&lines)?)
}

/// Shows that the branch holds more, in a form that `git apply` refuses, whatever it is.
fn tell_uncaptured(
    uncaptured: &Uncaptured,
    format: DiffFormat,
    out: &mut dyn Write,
) -> Result<(), DiffError> {
    let line = uncaptured.to_string().replace('\n', " ");
    match format {
        // git's letter for what it does not know.
        DiffFormat::NameStatus => writeln!(out, "X\t{line}")?,
        DiffFormat::Unified => writeln!(out, "diff --git a/. b/.\nnew file mode 100644\n{line}")?,
    }
    Ok(())
}

/// What differs between the base and the top of `chain`, of the files and symlinks of the tree, by path.
pub(crate) fn changes(conn: &Connection, chain: &[LayerId]) -> Result<Vec<TreeChange>, DbError> {
    let Some((base, over)) = chain.split_last() else { return Ok(Vec::new()) };
    let mut tops = std::collections::BTreeMap::new();
    for layer in over {
        for (path, entry) in entries::of_layer(conn, layer, None)? {
            tops.entry(path).or_insert(entry);
        }
    }
    let mut out = Vec::new();
    for (path, entry) in tops {
        let before = entries::get(conn, base, &path)?.filter(in_tree);
        let after = Some(entry).filter(in_tree);
        let same = match (&before, &after) {
            (Some(before), Some(after)) => {
                before.kind == after.kind && before.hash == after.hash && git_mode(before) == git_mode(after)
            }
            (None, None) => true,
            _ => false,
        };
        if !same {
            out.push(TreeChange { path, before, after });
        }
    }
    Ok(out)
}

pub(crate) fn in_tree(entry: &Entry) -> bool {
    entry.class == Class::Tree && matches!(entry.kind, Kind::File | Kind::Symlink)
}

/// git's mode of a file or symlink.
pub(crate) fn git_mode(entry: &Entry) -> &'static str {
    match entry.kind {
        Kind::Symlink => "120000",
        Kind::File if entry.mode & 0o100 != 0 => "100755",
        Kind::File | Kind::Dir | Kind::Other | Kind::Whiteout => "100644",
    }
}

/// A bare repository of our own, gone when this is dropped.
pub(crate) struct Scratch {
    dir: PathBuf,
}

impl Scratch {
    /// `format` is git's object format: `sha1` or `sha256`.
    pub(crate) fn new(store: &Store, format: &str) -> Result<Self, DiffError> {
        let mut random = [0; 10];
        getrandom::fill(&mut random).map_err(|error| io::Error::other(error.to_string()))?;
        let dir = store.inner.layout.tmp().join(format!("git-{}", crate::sql::hex(&random)));
        let scratch = Self { dir };
        let format = format!("--object-format={format}");
        let args = ["init", "-q", "--bare", "--template=", &format].map(std::ffi::OsStr::new);
        Git::new().run(&args.into_iter().chain([scratch.dir.as_os_str()]).collect::<Vec<_>>())?;
        Ok(scratch)
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn git(&self) -> Git {
        Git::at(&self.dir)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// A stream for `git fast-import`, kept in a file: content may be large.
pub(crate) struct FastImport<'a> {
    out: io::BufWriter<File>,
    path: PathBuf,
    contents: &'a Contents<'a>,
}

impl<'a> FastImport<'a> {
    pub(crate) fn new(scratch: &Scratch, contents: &'a Contents<'a>) -> Result<Self, DiffError> {
        let path = scratch.dir.join("stream");
        let out = io::BufWriter::with_capacity(256 * 1024, File::create_new(&path)?);
        Ok(Self { out, path, contents })
    }

    /// Starts a commit; `lines` are further commands of its head, each with its newline.
    pub(crate) fn commit(&mut self, name: &str, message: &[u8], lines: &[u8]) -> Result<(), DiffError> {
        self.commit_by(name, "tendon <tendon@localhost> 0 +0000", message, lines)
    }

    pub(crate) fn commit_by(
        &mut self,
        name: &str,
        author: &str,
        message: &[u8],
        lines: &[u8],
    ) -> Result<(), DiffError> {
        write!(self.out, "commit {name}\nauthor {author}\ncommitter {author}\ndata {}\n", message.len())?;
        self.out.write_all(message)?;
        self.out.write_all(b"\n")?;
        self.out.write_all(lines)?;
        Ok(())
    }

    /// A line of the commit that was started.
    pub(crate) fn line(&mut self, line: &[u8]) -> Result<(), DiffError> {
        self.out.write_all(line)?;
        Ok(self.out.write_all(b"\n")?)
    }

    /// Puts what lies at `path` into the commit, or takes it out.
    pub(crate) fn put(&mut self, path: &TreePath, entry: Option<&Entry>) -> Result<(), DiffError> {
        let Some(entry) = entry else {
            return self.line(&[b"D ".as_slice(), &quoted(path)].concat());
        };
        let mut content = self.contents.open(path, entry)?;
        write!(self.out, "M {} inline ", git_mode(entry))?;
        self.out.write_all(&quoted(path))?;
        write!(self.out, "\ndata {}\n", entry.size)?;
        let copied = io::copy(&mut content, &mut self.out)?;
        if copied != entry.size {
            return Err(ContentError::Differs { path: path.clone() }.into());
        }
        self.line(b"")
    }

    /// Puts what git has as that object at `path`.
    pub(crate) fn put_object(&mut self, path: &TreePath, entry: &Entry, id: &str) -> Result<(), DiffError> {
        write!(self.out, "M {} {id} ", git_mode(entry))?;
        self.line(&quoted(path))
    }

    /// Puts these bytes at `path`.
    pub(crate) fn put_bytes(&mut self, path: &TreePath, mode: &str, bytes: &[u8]) -> Result<(), DiffError> {
        write!(self.out, "M {mode} inline ")?;
        self.out.write_all(&quoted(path))?;
        write!(self.out, "\ndata {}\n", bytes.len())?;
        self.line(bytes)
    }

    /// Gives the stream to git.
    pub(crate) fn run(mut self, git: &Git) -> Result<(), DiffError> {
        self.out.write_all(b"done\n")?;
        self.out.flush()?;
        let args = ["fast-import", "--quiet", "--done", "--date-format=raw"];
        // What is larger git does not hold in memory.
        let threshold = DIFF_FILE_BYTES_MAX.to_string();
        git.clone().config("core.bigFileThreshold", &threshold).input(File::open(&self.path)?).run(&args)?;
        Ok(std::fs::remove_file(&self.path)?)
    }
}

/// A path as fast-import takes it: in C quotes.
fn quoted(path: &TreePath) -> Vec<u8> {
    let mut out = vec![b'"'];
    for byte in path.as_path().as_os_str().as_bytes() {
        match byte {
            b'"' | b'\\' => out.extend([b'\\', *byte]),
            b' '..=b'~' => out.push(*byte),
            _ => out.extend(format!("\\{byte:03o}").bytes()),
        }
    }
    out.push(b'"');
    out
}
