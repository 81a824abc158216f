//! Loop devices and mounts that are given back, also by a test that fails.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use testkit::process::{command, run};

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

/// A file system, mounted until dropped. It must be dropped before what serves its device: a process that ends with both
/// waits for itself, and no signal ends it.
pub struct Mounted(PathBuf);

impl Mounted {
    /// Mounts the file system of `device` at `place`.
    pub fn new(device: &Path, place: &Path) -> Self {
        run(command("mount").arg(device).arg(place));
        Self(place.to_owned())
    }

    /// Mounts the file system in a file at `place`.
    pub fn image(image: &Path, place: &Path) -> Self {
        run(command("mount").args(["-o", "loop"]).arg(image).arg(place));
        Self(place.to_owned())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // The namespaces of what was killed keep it for a moment.
        let unmounted = (0..200).any(|_| {
            let output = command("umount").arg(&self.0).output();
            let done = output.is_ok_and(|output| output.status.success());
            if !done {
                std::thread::sleep(Duration::from_millis(100));
            }
            done
        });
        assert!(unmounted || std::thread::panicking(), "{} stays mounted", self.0.display());
    }
}
