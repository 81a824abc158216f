//! What is made beside its place first and put there in one step, or taken out of its place before it is removed, so
//! that either can be taken back.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use proto::path::TreePath;
use rustix::fs::{AtFlags, Gid, Mode, RenameFlags, Uid};
use rustix::io::Errno;

use super::tree::remove_at;
use super::{BeneathError, NEW, OPEN_DIR, Owner, RESOLVE_TRIES, fail, own, parent};

/// What the names of files begin with that are about to replace others. Such names are ours: whatever has one after
/// the runner was killed is removed.
pub(crate) const STAGED: &str = ".tendon-edit-";

/// Something new that is not at its place yet.
pub(crate) struct Staged {
    parent: OwnedFd,
    name: CString,
    placed: bool,
}

impl Staged {
    /// A file beside `path` with this content, durable. Keeps the owner of what it will replace.
    pub(crate) fn file(
        root: BorrowedFd<'_>,
        path: &TreePath,
        content: &mut dyn Read,
        mode: u32,
        owner: Owner,
    ) -> Result<Self, BeneathError> {
        let fail = fail("write", path);
        let io_error = |source: io::Error| match source.raw_os_error() {
            Some(code) => fail(Errno::from_raw_os_error(code)),
            None => BeneathError::Io { what: "write", path: path.to_string(), source },
        };
        let parent = parent(root, path).map_err(&fail)?;
        let owner = match rustix::fs::statat(&parent, path.file_name(), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(old) if owner.is_some() => Some((old.st_uid, old.st_gid)),
            Ok(_) | Err(_) => owner,
        };
        let name = staged_name().map_err(io_error)?;
        let fd = rustix::fs::openat(&parent, &*name, NEW, Mode::from_raw_mode(0o600)).map_err(&fail)?;
        let staged = Self { parent, name, placed: false };
        let mut file = File::from(fd);
        io::copy(content, &mut file).map_err(io_error)?;
        file.flush().map_err(io_error)?;
        own(file.as_fd(), owner).map_err(&fail)?;
        // After the owner: a change of owner takes setuid bits away.
        rustix::fs::fchmod(&file, Mode::from_raw_mode(mode)).map_err(&fail)?;
        file.sync_all().map_err(io_error)?;
        Ok(staged)
    }

    /// A symbolic link beside `path`.
    pub(crate) fn symlink(
        root: BorrowedFd<'_>,
        path: &TreePath,
        target: &[u8],
        owner: Owner,
    ) -> Result<Self, BeneathError> {
        let fail = fail("write", path);
        let parent = parent(root, path).map_err(&fail)?;
        let name = staged_name().map_err(|source| BeneathError::Io {
            what: "write",
            path: path.to_string(),
            source,
        })?;
        rustix::fs::symlinkat(target, &parent, &*name).map_err(&fail)?;
        let staged = Self { parent, name, placed: false };
        if let Some((uid, gid)) = owner {
            let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
            rustix::fs::chownat(&staged.parent, &*staged.name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)
                .map_err(&fail)?;
        }
        Ok(staged)
    }

    /// An empty directory beside `path`.
    pub(crate) fn dir(root: BorrowedFd<'_>, path: &TreePath) -> Result<Self, BeneathError> {
        let parent = parent(root, path).map_err(fail("write", path))?;
        let name = staged_name().map_err(|source| BeneathError::Io {
            what: "write",
            path: path.to_string(),
            source,
        })?;
        rustix::fs::mkdirat(&parent, &*name, Mode::RWXU).map_err(fail("write", path))?;
        Ok(Self { parent, name, placed: false })
    }

    /// Gives the staged directory its permissions and its owner.
    pub(crate) fn look(&self, path: &TreePath, mode: u32, owner: Owner) -> Result<(), BeneathError> {
        let dir = self.open_dir().map_err(fail("write", path))?;
        own(dir.as_fd(), owner).map_err(fail("write", path))?;
        rustix::fs::fchmod(&dir, Mode::from_raw_mode(mode)).map_err(fail("write", path))
    }

    /// The staged directory.
    pub(super) fn open_dir(&self) -> Result<OwnedFd, Errno> {
        rustix::fs::openat(&self.parent, &*self.name, OPEN_DIR, Mode::empty())
    }

    /// Moves what lies at `path` out of its place; what is returned can put it back or remove it.
    pub(crate) fn take(root: BorrowedFd<'_>, path: &TreePath) -> Result<Self, Errno> {
        let parent = parent(root, path)?;
        let name = staged_name().map_err(|_| Errno::IO)?;
        rustix::fs::renameat_with(&parent, path.file_name(), &parent, &*name, RenameFlags::NOREPLACE)?;
        Ok(Self { parent, name, placed: false })
    }

    /// Puts it in the place of what lies at `path`, which then has the staged name; or where nothing is.
    pub(crate) fn place(&mut self, path: &TreePath) -> Result<Replaced, Errno> {
        let to = path.file_name();
        for _ in 0..RESOLVE_TRIES {
            let exchanged =
                rustix::fs::renameat_with(&self.parent, &*self.name, &self.parent, to, RenameFlags::EXCHANGE);
            match exchanged {
                Ok(()) => return Ok(Replaced::Staged),
                Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno),
            }
            let flags = RenameFlags::NOREPLACE;
            match rustix::fs::renameat_with(&self.parent, &*self.name, &self.parent, to, flags) {
                Ok(()) => {
                    self.placed = true;
                    return Ok(Replaced::Nothing);
                }
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
        }
        Err(Errno::AGAIN)
    }

    /// Takes back what [`Staged::place`] did.
    pub(crate) fn put_back(&mut self, path: &TreePath, replaced: Replaced) -> Result<(), Errno> {
        let at = path.file_name();
        match replaced {
            Replaced::Staged => {
                rustix::fs::renameat_with(&self.parent, at, &self.parent, &*self.name, RenameFlags::EXCHANGE)
            }
            Replaced::Nothing => {
                let back = rustix::fs::renameat_with(
                    &self.parent,
                    at,
                    &self.parent,
                    &*self.name,
                    RenameFlags::NOREPLACE,
                );
                self.placed = false;
                back
            }
        }
    }

    /// Puts what was taken away back at its place, where nothing is now.
    pub(crate) fn restore(&mut self, path: &TreePath) -> Result<(), Errno> {
        let flags = RenameFlags::NOREPLACE;
        rustix::fs::renameat_with(&self.parent, &*self.name, &self.parent, path.file_name(), flags)?;
        self.placed = true;
        Ok(())
    }

    /// Makes the change of names durable.
    pub(crate) fn sync(&self) -> Result<(), Errno> {
        let dir = rustix::fs::openat(&self.parent, ".", OPEN_DIR, Mode::empty())?;
        rustix::fs::fsync(dir)
    }

    /// Removes what has the staged name, whatever it is.
    pub(crate) fn discard(mut self, path: &TreePath) -> Result<(), BeneathError> {
        let staged = std::mem::replace(&mut self.placed, true);
        if staged { Ok(()) } else { remove_at(self.parent.as_fd(), &self.name, path) }
    }

    /// The staged name as a path beside `path`.
    pub(crate) fn path(&self, path: &TreePath) -> Option<TreePath> {
        match path.parent() {
            Some(dir) => dir.join(self.name.as_bytes()).ok(),
            None => TreePath::new(self.name.as_bytes()).ok(),
        }
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // Only what an error left: a test that kills the runner must find what a kill leaves.
        if !self.placed && !std::thread::panicking() {
            let _ = rustix::fs::unlinkat(&self.parent, &*self.name, AtFlags::empty());
        }
    }
}

/// What was at the place that something was put in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Replaced {
    /// Nothing.
    Nothing,
    /// What has the staged name now.
    Staged,
}

fn staged_name() -> io::Result<CString> {
    let id = proto::ids::LayerId::from_random(crate::branch::random()?);
    let digits = id.as_str().trim_start_matches(proto::ids::LayerId::PREFIX);
    Ok(CString::new(format!("{STAGED}{digits}"))?)
}

/// Whether a name is one that [`Staged`] gives.
pub(crate) fn is_staged(name: &[u8]) -> bool {
    name.strip_prefix(STAGED.as_bytes()).is_some_and(|digits| digits.len() == 16)
}
