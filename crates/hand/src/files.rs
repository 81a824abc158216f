//! One file in, one file out: below the branch's root, whatever symlinks, fifos and devices the code has laid there.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use proto::hand::{CHUNK_BYTES_MAX, GetChunk, GetRequest, PutOpen};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags};

use crate::limits::PATH_BYTES_MAX;

/// Why a file could not be moved.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// Not a relative path without `..`.
    #[error("`{path}` is not a path below the branch's root")]
    Path {
        /// The path.
        path: String,
    },
    /// A directory, a fifo, a device or a socket.
    #[error("`{path}` is not a regular file")]
    NotRegular {
        /// The path.
        path: String,
    },
    /// Larger than the hand takes.
    #[error("the file is larger than {bytes_max} bytes")]
    TooLarge {
        /// The limit.
        bytes_max: u64,
    },
    /// The kernel refused.
    #[error("`{path}` can't be {what}")]
    Io {
        /// The path.
        path: String,
        /// `opened`, `written`, …
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

fn failed(path: &Path, what: &'static str) -> impl FnOnce(rustix::io::Errno) -> FileError {
    let path = path.display().to_string();
    move |errno| FileError::Io { path, what, source: errno.into() }
}

/// Checks that a path is relative and goes down only.
fn below(path: &[u8]) -> Result<&Path, FileError> {
    let checked = Path::new(OsStr::from_bytes(path));
    let plain = checked.components().all(|part| matches!(part, Component::Normal(_)));
    if path.is_empty() || path.len() > PATH_BYTES_MAX || path.contains(&0) || path.ends_with(b"/") || !plain {
        return Err(FileError::Path { path: checked.display().to_string() });
    }
    Ok(checked)
}

/// Opens beneath `root`: no symlink leads out, no magic link is followed, a fifo does not hang.
fn open_beneath(root: impl AsFd, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    // With O_PATH nothing is opened that could hang.
    let careful =
        if flags.contains(OFlags::PATH) { OFlags::empty() } else { OFlags::NONBLOCK | OFlags::NOCTTY };
    let flags = flags | OFlags::CLOEXEC | careful;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    // The kernel answers EAGAIN when a rename raced with the walk.
    for _ in 0..16 {
        match rustix::fs::openat2(&root, path, flags, Mode::empty(), resolve) {
            Err(rustix::io::Errno::AGAIN) => {}
            other => return other,
        }
    }
    Err(rustix::io::Errno::AGAIN)
}

/// A file on its way in: written beside its place, renamed there at the end.
#[derive(Debug)]
pub struct Incoming {
    dir: OwnedFd,
    name: Vec<u8>,
    temporary: String,
    file: Option<OwnedFd>,
    bytes: u64,
    bytes_max: u64,
}

impl Incoming {
    /// Makes the temporary file. `serial` makes its name unique.
    pub fn open(root: impl AsFd, request: &PutOpen, bytes_max: u64, serial: u64) -> Result<Self, FileError> {
        let path = below(&request.path)?;
        let parent = path.parent().unwrap_or(Path::new(""));
        if request.parents {
            make_parents(&root, parent)?;
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let dir = open_beneath(&root, parent, flags).map_err(failed(parent, "opened"))?;
        let temporary = format!(".tendon-put-{}-{serial}", std::process::id());
        let mode = Mode::from_raw_mode(if request.mode == 0 { 0o644 } else { request.mode & 0o777 });
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&dir, &*temporary, flags, mode).map_err(failed(path, "made"))?;
        let name = path.file_name().unwrap_or_default().as_bytes().to_vec();
        let incoming = Incoming { dir, name, temporary, file: Some(file), bytes: 0, bytes_max };
        if let Some(file) = &incoming.file {
            rustix::fs::fchmod(file, mode).map_err(failed(path, "made"))?;
        }
        Ok(incoming)
    }

    /// Appends.
    pub fn write(&mut self, mut chunk: &[u8]) -> Result<(), FileError> {
        self.bytes += chunk.len() as u64;
        if self.bytes > self.bytes_max {
            return Err(FileError::TooLarge { bytes_max: self.bytes_max });
        }
        let Some(file) = &self.file else { return Ok(()) };
        while !chunk.is_empty() {
            let name = Path::new(OsStr::from_bytes(&self.name));
            let count = rustix::io::write(file, chunk).map_err(failed(name, "written"))?;
            chunk = &chunk[count..];
        }
        Ok(())
    }

    /// Puts it in its place and tells its size.
    pub fn finish(mut self) -> Result<u64, FileError> {
        self.file = None;
        let name = Path::new(OsStr::from_bytes(&self.name));
        rustix::fs::renameat(&self.dir, &*self.temporary, &self.dir, name)
            .map_err(failed(name, "put in its place"))?;
        self.temporary.clear();
        Ok(self.bytes)
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        if !self.temporary.is_empty() {
            let _ = rustix::fs::unlinkat(&self.dir, &*self.temporary, AtFlags::empty());
        }
    }
}

fn make_parents(root: impl AsFd, parent: &Path) -> Result<(), FileError> {
    let mut done = std::path::PathBuf::new();
    for part in parent.components() {
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let dir = open_beneath(&root, &done, flags).map_err(failed(&done, "opened"))?;
        match rustix::fs::mkdirat(&dir, part.as_os_str(), Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => done.push(part),
            Err(errno) => return Err(failed(parent, "made")(errno)),
        }
    }
    Ok(())
}

/// A file on its way out.
#[derive(Debug)]
pub struct Outgoing {
    file: OwnedFd,
    size: u64,
    mode: u32,
    offset: u64,
    end: u64,
    first: bool,
}

impl Outgoing {
    /// Opens it, and refuses everything that is not a regular file.
    pub fn open(root: impl AsFd, request: &GetRequest, bytes_max: u64) -> Result<Self, FileError> {
        let path = below(&request.path)?;
        let file = open_beneath(root, path, OFlags::RDONLY).map_err(failed(path, "opened"))?;
        let stat = rustix::fs::fstat(&file).map_err(failed(path, "read"))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(FileError::NotRegular { path: path.display().to_string() });
        }
        let size = stat.st_size.cast_unsigned();
        let most = if request.bytes_max == 0 { bytes_max } else { request.bytes_max.min(bytes_max) };
        let end = request.offset.saturating_add(most).min(size);
        let mode = stat.st_mode & 0o7777;
        Ok(Outgoing { file, size, mode, offset: request.offset, end, first: true })
    }

    /// The next chunk; the first comes also if it is empty.
    pub fn next_chunk(&mut self) -> Option<io::Result<GetChunk>> {
        let rest = usize::try_from(self.end.saturating_sub(self.offset)).unwrap_or(usize::MAX);
        let first = std::mem::replace(&mut self.first, false);
        if rest == 0 && !first {
            return None;
        }
        let mut buffer = vec![0; rest.min(CHUNK_BYTES_MAX)];
        match rustix::io::pread(&self.file, &mut buffer, self.offset) {
            Ok(0) if !first => None,
            Ok(count) => {
                buffer.truncate(count);
                self.offset += count as u64;
                let (size, mode) = if first { (self.size, self.mode) } else { (0, 0) };
                Some(Ok(GetChunk { chunk: buffer.into(), size, mode }))
            }
            Err(errno) => {
                self.end = self.offset;
                Some(Err(errno.into()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_that_go_down_are_taken() {
        for good in ["a", "a/b", "a\nb", "..a"] {
            assert!(below(good.as_bytes()).is_ok(), "{good}");
        }
        for bad in ["", "/a", "..", "a/../b", "./a", "a/", "a\0b"] {
            assert!(below(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
