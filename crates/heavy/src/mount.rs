//! Loop devices that are given back.

use std::io;
use std::path::{Path, PathBuf};

use testkit::process::command;

/// A loop device over a file; detached when dropped.
pub struct LoopDevice(PathBuf);

impl LoopDevice {
    /// Attaches a free device to `file`.
    pub fn attach(file: &Path) -> io::Result<Self> {
        let output = command("losetup").args(["--find", "--show"]).arg(file).output()?;
        if !output.status.success() {
            return Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned()));
        }
        Ok(Self(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())))
    }

    /// The device.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // What still has it mounted keeps it until then; the kernel detaches it after.
        let _ = command("losetup").arg("--detach").arg(&self.0).status();
    }
}
