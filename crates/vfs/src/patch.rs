//! Large files in a diff: git, which compares in memory, gets a small stand-in for each, and what it says of the
//! stand-ins is replaced by what holds for the files.
//!
//! A stand-in is as binary as its file is large, equal for equal files, and unlike anything that a guest can write:
//! git finds exact renames and new modes of large files without seeing them. The form that replaces it is git's own for
//! binary files: `literal SIZE`, and the deflated content in lines of base 85 (`apply.c`, `base85.c`).

use std::collections::BTreeMap;
use std::io::{self, Read, Write};

use flate2::Compression;
use flate2::write::ZlibEncoder;
use proto::path::TreePath;

use crate::content::{ContentError, Contents};
use crate::diff::DiffError;
use crate::entries::{Entry, Kind};
use crate::git::Git;
use crate::limits::DIFF_FILE_BYTES_MAX;

/// git's id of nothing.
const NO_ID: &str = "0000000000000000000000000000000000000000";
/// Bytes of deflated content in a line.
const LINE_BYTES: usize = 52;

/// The large files of a diff.
pub(crate) struct Large<'a> {
    contents: &'a Contents<'a>,
    /// Nobody else can make a stand-in.
    key: [u8; 32],
    /// By the git ids of the stand-ins.
    files: BTreeMap<String, LargeFile>,
}

struct LargeFile {
    path: TreePath,
    entry: Entry,
    /// git's id of the content.
    id: String,
}

impl<'a> Large<'a> {
    pub(crate) fn new(contents: &'a Contents<'a>) -> io::Result<Self> {
        let mut key = [0; 32];
        getrandom::fill(&mut key).map_err(|error| io::Error::other(error.to_string()))?;
        Ok(Self { contents, key, files: BTreeMap::new() })
    }

    /// What git gets in place of a file, if that is large.
    pub(crate) fn stand_in(&mut self, path: &TreePath, entry: &Entry) -> Result<Option<Vec<u8>>, DiffError> {
        if entry.size <= DIFF_FILE_BYTES_MAX || entry.kind != Kind::File {
            return Ok(None);
        }
        let hash = entry.hash.ok_or_else(|| ContentError::NotKept { path: path.clone() })?;
        let name = blake3::keyed_hash(&self.key, hash.as_bytes()).to_hex();
        // Shorter than what git compares at once, so that two of them have nothing in common.
        let stand_in = [b"\0", &name.as_bytes()[..60]].concat();
        let own = git_id(&mut stand_in.as_slice(), stand_in.len() as u64)?;
        if !self.files.contains_key(&own) {
            let id = git_id(&mut self.contents.open(path, entry)?, entry.size)
                .map_err(|source| ContentError::Io { path: path.clone(), source })?;
            self.files.insert(own, LargeFile { path: path.clone(), entry: entry.clone(), id });
        }
        Ok(Some(stand_in))
    }
}

/// git's id of a blob of `size` bytes.
fn git_id(content: &mut dyn Read, size: u64) -> io::Result<String> {
    let mut hasher = sha1_smol::Sha1::new();
    hasher.update(format!("blob {size}\0").as_bytes());
    let mut buffer = vec![0; 128 * 1024];
    loop {
        match content.read(&mut buffer)? {
            0 => return Ok(hasher.digest().to_string()),
            n => hasher.update(&buffer[..n]),
        }
    }
}

/// How the difference of a large file is told.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Telling {
    /// In one line, which makes `git apply` refuse the whole.
    Line,
    /// With both contents.
    Whole,
}

/// Passes on what `git diff --binary --full-index` writes, and tells of large files what holds for them.
pub(crate) struct Sections<'a> {
    pub(crate) large: &'a Large<'a>,
    /// Where git has the small files.
    pub(crate) git: &'a Git,
    pub(crate) telling: Telling,
    pub(crate) out: &'a mut dyn Write,
    /// Files that differ.
    pub(crate) files: u64,
    line: Vec<u8>,
    /// The names in the head of the file's section.
    names: Vec<u8>,
    /// Whether the rest of the section is about a stand-in.
    skip: bool,
}

impl<'a> Sections<'a> {
    pub(crate) fn new(large: &'a Large<'a>, git: &'a Git, telling: Telling, out: &'a mut dyn Write) -> Self {
        let (line, names) = (Vec::new(), Vec::new());
        Self { large, git, telling, out, files: 0, line, names, skip: false }
    }

    /// A line of git's. No line of a content can be taken for one of a head: it begins with a space, `+`, `-` or `\`, or
    /// is of base 85, which has no space.
    fn line(&mut self, line: &[u8]) -> Result<(), DiffError> {
        if let Some(names) = line.strip_prefix(b"diff --git ") {
            self.names = names.trim_ascii_end().to_vec();
            self.files += 1;
            self.skip = false;
        }
        if self.skip {
            return Ok(());
        }
        match line.strip_prefix(b"index ").and_then(ids) {
            Some((old, new, rest)) if self.is_large(old) || self.is_large(new) => {
                self.skip = true;
                let (old_id, new_id) = (self.id(old).to_owned(), self.id(new).to_owned());
                writeln!(self.out, "index {old_id}..{new_id}{rest}")?;
                if self.telling == Telling::Line {
                    self.out.write_all(b"Files ")?;
                    self.out.write_all(&self.names)?;
                    self.out.write_all(b" are too large to show and differ\n")?;
                    return Ok(());
                }
                self.out.write_all(b"GIT binary patch\n")?;
                self.literal(new)?;
                self.literal(old)
            }
            Some(_) | None => Ok(self.out.write_all(line)?),
        }
    }

    fn is_large(&self, id: &str) -> bool {
        self.large.files.contains_key(id)
    }

    fn id<'b>(&'b self, id: &'b str) -> &'b str {
        self.large.files.get(id).map_or(id, |file| &file.id)
    }

    /// One of the two contents.
    fn literal(&mut self, id: &str) -> Result<(), DiffError> {
        let small;
        let (mut content, size): (Box<dyn Read>, u64) = match self.large.files.get(id) {
            Some(file) => (Box::new(self.large.contents.open(&file.path, &file.entry)?), file.entry.size),
            None if id == NO_ID => (Box::new(io::empty()), 0),
            None => {
                small = self.git.run(&["cat-file", "blob", id])?;
                (Box::new(small.as_slice()), small.len() as u64)
            }
        };
        writeln!(self.out, "literal {size}")?;
        let lines = Base85 { out: &mut *self.out, line: Vec::with_capacity(LINE_BYTES) };
        let mut deflate = ZlibEncoder::new(lines, Compression::fast());
        io::copy(&mut content, &mut deflate)?;
        deflate.finish()?.end()?;
        Ok(self.out.write_all(b"\n")?)
    }
}

impl Write for Sections<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.line.extend_from_slice(part);
            if part.ends_with(b"\n") {
                let mut line = std::mem::take(&mut self.line);
                self.line(&line).map_err(|error| {
                    if let DiffError::Io(error) = error { error } else { io::Error::other(error) }
                })?;
                line.clear();
                self.line = line;
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// The ids of an `index` line, and what follows them.
fn ids(line: &[u8]) -> Option<(&str, &str, &str)> {
    let line = std::str::from_utf8(line).ok()?.trim_end();
    let (old, rest) = line.split_once("..")?;
    let (new, rest) = rest.split_at_checked(NO_ID.len())?;
    (old.len() == NO_ID.len()).then_some((old, new, rest))
}

/// Writes bytes as the lines of git's binary patches: how many they are as a letter, then five characters for four.
struct Base85<W: Write> {
    out: W,
    line: Vec<u8>,
}

const DIGITS: &[u8; 85] =
    b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~";

impl<W: Write> Base85<W> {
    fn end(mut self) -> io::Result<()> {
        if self.line.is_empty() { Ok(()) } else { self.put() }
    }

    fn put(&mut self) -> io::Result<()> {
        let count = self.line.len() as u8;
        let mut text = vec![if count <= 26 { b'A' + count - 1 } else { b'a' + count - 27 }];
        for four in self.line.chunks(4) {
            let mut word = [0; 4];
            word[..four.len()].copy_from_slice(four);
            let mut rest = u32::from_be_bytes(word);
            let mut five = [0; 5];
            for digit in five.iter_mut().rev() {
                *digit = DIGITS[rest as usize % 85];
                rest /= 85;
            }
            text.extend_from_slice(&five);
        }
        text.push(b'\n');
        self.line.clear();
        self.out.write_all(&text)
    }
}

impl<W: Write> Write for Base85<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let some = &bytes[..bytes.len().min(LINE_BYTES - self.line.len())];
        self.line.extend_from_slice(some);
        if self.line.len() == LINE_BYTES {
            self.put()?;
        }
        Ok(some.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
