//! bubblewrap's arguments. Sources are staged mounts (`/tmp/N`) and nothing else: no path of the host is resolved by
//! bubblewrap, and never `/proc/self/fd/N`, which version 0.8 silently turns into the host's `/`.

use std::ffi::{CString, NulError, OsStr};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use sys::spawn::{Kind, STAGING};

use crate::generated::{AGENT_ID, HOSTNAME};

/// Where Debian has it.
pub const BWRAP: &str = "/usr/bin/bwrap";

/// A mount that was staged, or something in it.
#[derive(Clone, Debug)]
pub struct Source(PathBuf);

impl Source {
    /// Something below it.
    pub fn join(&self, below: impl AsRef<Path>) -> Source {
        Source(self.0.join(below))
    }
}

/// A command line for bubblewrap, with the mounts that it refers to.
#[derive(Debug, Default)]
pub struct Bwrap {
    args: Vec<Vec<u8>>,
    staged: Vec<(OwnedFd, Kind)>,
}

impl Bwrap {
    /// All namespaces, no capability, tied to its parent, with nothing of the host in it.
    pub fn new() -> Self {
        let mut bwrap = Bwrap::default();
        bwrap.flags(&[
            "--unshare-user",
            "--unshare-pid",
            "--unshare-net",
            "--unshare-ipc",
            "--unshare-uts",
            "--unshare-cgroup",
            "--as-pid-1",
            "--die-with-parent",
            "--new-session",
            "--cap-drop",
            "ALL",
            "--clearenv",
            "--hostname",
            HOSTNAME,
        ]);
        for flag in ["--uid", "--gid"] {
            bwrap.flags(&[flag, &AGENT_ID.to_string()]);
        }
        bwrap
    }

    /// Takes a detached mount along.
    pub fn stage(&mut self, mount: OwnedFd, kind: Kind) -> Source {
        self.staged.push((mount, kind));
        Source(PathBuf::from(format!("{STAGING}/{}", self.staged.len() - 1)))
    }

    /// Shows a source, writable.
    pub fn bind(&mut self, from: &Source, to: impl AsRef<Path>) {
        self.push(&["--bind"], &[&from.0, to.as_ref()]);
    }

    /// Shows a source, read-only.
    pub fn ro_bind(&mut self, from: &Source, to: impl AsRef<Path>) {
        self.push(&["--ro-bind"], &[&from.0, to.as_ref()]);
    }

    /// An empty directory in memory.
    pub fn tmpfs(&mut self, mode: &str, bytes_max: u64, to: impl AsRef<Path>) {
        self.push(&["--perms", mode, "--size", &bytes_max.to_string(), "--tmpfs"], &[to.as_ref()]);
    }

    /// A symlink.
    pub fn symlink(&mut self, target: impl AsRef<Path>, at: impl AsRef<Path>) {
        self.push(&["--symlink"], &[target.as_ref(), at.as_ref()]);
    }

    /// A new `/proc` or `/dev`, or a remount: an option with one path.
    pub fn at(&mut self, option: &str, path: impl AsRef<Path>) {
        self.push(&[option], &[path.as_ref()]);
    }

    /// Plain options.
    pub fn flags(&mut self, flags: &[&str]) {
        self.push(flags, &[]);
    }

    fn push(&mut self, flags: &[&str], paths: &[&Path]) {
        self.args.extend(flags.iter().map(|flag| flag.as_bytes().to_vec()));
        self.args.extend(paths.iter().map(|path| path.as_os_str().as_bytes().to_vec()));
    }

    /// The whole command line, which ends with the program that runs inside.
    #[expect(clippy::type_complexity, reason = "the two halves of a spawn plan")]
    pub fn finish(self, command: &[&OsStr]) -> Result<(Vec<CString>, Vec<(OwnedFd, Kind)>), NulError> {
        let head = [BWRAP.as_bytes().to_vec()];
        let tail = command.iter().map(|part| part.as_bytes().to_vec());
        let all = head.into_iter().chain(self.args).chain([b"--".to_vec()]).chain(tail);
        Ok((all.map(CString::new).collect::<Result<_, _>>()?, self.staged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_staged_mounts_only() {
        let null = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let mut bwrap = Bwrap::new();
        let a = bwrap.stage(null(), Kind::Dir);
        let b = bwrap.stage(null(), Kind::File);
        bwrap.ro_bind(&a, "/usr");
        bwrap.bind(&b.join("below"), "/work");
        let (argv, staged) = bwrap.finish(&[OsStr::new("/bin/true")]).unwrap();
        let argv: Vec<&str> = argv.iter().map(|arg| arg.to_str().unwrap()).collect();
        assert_eq!(staged.len(), 2);
        let text = argv.join(" ");
        assert!(
            text.contains("--ro-bind /tmp/0 /usr") && text.contains("--bind /tmp/1/below /work"),
            "{text}"
        );
        assert!(
            text.ends_with("-- /bin/true") && text.contains("--cap-drop ALL") && text.contains("--clearenv")
        );
        assert!(
            !text.contains("/proc/self/fd") && !text.contains("--share") && !text.contains("try"),
            "{text}"
        );
    }
}
