//! The guest's first process: from the initial file system to the disk, then the cases, then off.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::mount::{MountFlags, mount, mount_move};
use rustix::process::{WaitId, WaitIdOptions, waitid};
use testkit::process::{command, wait_until};

use super::host::CGROUPS;

/// The first line that the guest writes.
pub const UP: &str = "the guest is up";

/// Boots, runs the cases and switches the machine off.
#[expect(clippy::zombie_processes, reason = "the loop waits for every process")]
pub fn run() {
    boot().expect("the guest boots");
    let _ = writeln!(io::stdout(), "{UP}");
    // A process of its own, so that this one can collect every orphan.
    let cases = command("/proc/self/exe").arg("cases").spawn().expect("the cases start");
    let place = PathBuf::from(format!("/proc/{}", cases.id()));
    while place.exists() && waitid(WaitId::All, WaitIdOptions::EXITED).is_ok() {}
    rustix::fs::sync();
    rustix::system::reboot(rustix::system::RebootCommand::Restart).expect("reboot");
}

fn boot() -> io::Result<()> {
    mount("dev", "/dev", "devtmpfs", MountFlags::empty(), None)?;
    let mut modules: Vec<_> = fs::read_dir("/modules")?.flatten().map(|entry| entry.path()).collect();
    modules.sort();
    for module in modules {
        rustix::system::finit_module(File::open(module)?, c"", 0)?;
    }
    wait_until("the disk", Duration::from_secs(30), || Path::new("/dev/vda").exists());
    mount("/dev/vda", "/root", "ext4", MountFlags::empty(), None)?;
    mount_move("/dev", "/root/dev")?;
    std::env::set_current_dir("/root")?;
    mount_move(".", "/")?;
    rustix::process::chroot(".")?;
    std::env::set_current_dir("/")?;
    let closed = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("proc", "/proc", "proc", closed, None)?;
    mount("sys", "/sys", "sysfs", closed, None)?;
    mount("run", "/run", "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, Some(c"mode=755"))?;
    // As systemd does.
    mount("cgroup2", CGROUPS, "cgroup2", closed, Some(c"nsdelegate,memory_recursiveprot"))?;
    Ok(())
}
