//! What a test needs of the machine, found out by trying it.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::sync::Mutex;

use crate::fixtures::{temp_dir, write};
use crate::kernel::{Kernel, MODULES};
use crate::process::{command, variable};
use crate::user::{as_other_user, give_to_other_user, is_root};

/// Something that not every machine has or allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Need {
    /// Being root, with the right to give files away and to mount.
    Root,
    /// A user namespace made by a user without privileges.
    UserNs,
    /// Mounting overlayfs: as root, or in a user namespace when this process is not root.
    Overlay,
    /// Mounting overlayfs in a user namespace as a user without privileges, also when this process is root.
    RootlessOverlay,
    /// Landlock.
    Landlock,
    /// bubblewrap, with all the namespaces that the sandbox tier asks for.
    Bwrap,
    /// Making a control group with memory and process limits.
    Cgroup,
    /// A C compiler, which Rust links with.
    Cc,
    /// git.
    Git,
    /// Node.js.
    Node,
    /// npm.
    Npm,
    /// Python 3.
    Python,
    /// pip, Python's package client.
    Pip,
    /// openssl, to make certificates with.
    Openssl,
    /// cargo, and the crate registry that it is configured for.
    Registry,
    /// An ext4 image on a loop device.
    Loop,
    /// Serving a file system from this process, as root.
    Fuse,
    /// QEMU, and Debian's kernel for virtual machines to boot in it.
    Qemu,
}

/// Every need, in the order in which they are printed.
pub const ALL: &[Need] = &[
    Need::Root,
    Need::UserNs,
    Need::Overlay,
    Need::RootlessOverlay,
    Need::Landlock,
    Need::Bwrap,
    Need::Cgroup,
    Need::Cc,
    Need::Git,
    Need::Node,
    Need::Npm,
    Need::Python,
    Need::Pip,
    Need::Openssl,
    Need::Registry,
    Need::Loop,
    Need::Fuse,
    Need::Qemu,
];

impl Need {
    /// The word that `TEST_REQUIRE` names it by.
    pub fn word(self) -> &'static str {
        match self {
            Need::Root => "root",
            Need::UserNs => "userns",
            Need::Overlay => "overlay",
            Need::RootlessOverlay => "rootless-overlay",
            Need::Landlock => "landlock",
            Need::Bwrap => "bwrap",
            Need::Cgroup => "cgroup",
            Need::Cc => "cc",
            Need::Git => "git",
            Need::Node => "node",
            Need::Npm => "npm",
            Need::Python => "python",
            Need::Pip => "pip",
            Need::Openssl => "openssl",
            Need::Registry => "registry",
            Need::Loop => "loop",
            Need::Fuse => "fuse",
            Need::Qemu => "qemu",
        }
    }

    /// Tries it; the error says what happened.
    pub fn probe(self) -> Result<(), String> {
        match self {
            Need::Root => probe_root(),
            Need::UserNs => {
                try_run(as_other_user(command("unshare").args(["--user", "--map-root-user", "true"])))
            }
            Need::Overlay => probe_overlay(is_root()),
            Need::RootlessOverlay => probe_overlay(false),
            Need::Landlock => probe_landlock(),
            Need::Bwrap => try_run(as_other_user(command("bwrap").args([
                "--unshare-all",
                "--ro-bind",
                "/",
                "/",
                "--dev",
                "/dev",
                "--proc",
                "/proc",
                "true",
            ]))),
            Need::Cgroup => probe_cgroup(),
            Need::Cc => try_run(command("cc").arg("--version")),
            Need::Git => try_run(command("git").arg("--version")),
            Need::Node => try_run(command("node").args(["--eval", "0"])),
            Need::Npm => try_run(command("npm").arg("--version")),
            Need::Python => try_run(command("python3").args(["-c", "pass"])),
            Need::Pip => try_run(command("python3").args(["-m", "pip", "--version"])),
            Need::Openssl => try_run(command("openssl").arg("version")),
            Need::Registry => probe_registry(),
            Need::Loop => probe_loop(),
            Need::Fuse => probe_fuse(),
            Need::Qemu => probe_qemu(),
        }
    }
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// Whether this machine has `need`. If not, the test should return at once: it has been reported as skipped on
/// standard error and in the file that `TEST_SKIPS` names. Panics where `TEST_REQUIRE` (comma-separated words) promises it.
pub fn have(need: Need) -> bool {
    let Err(reason) = cached(need) else { return true };
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("test");
    assert!(!required(need), "TEST_REQUIRE promises `{need}`, and it does not work here: {reason}");
    let line = format!("SKIPPED {test}: needs {need}: {reason}");
    report(&line);
    false
}

/// [`have`] for several needs: all of them, or the test should return.
pub fn have_all(needs: &[Need]) -> bool {
    needs.iter().all(|need| have(*need))
}

fn cached(need: Need) -> Result<(), String> {
    static PROBED: Mutex<BTreeMap<Need, Result<(), String>>> = Mutex::new(BTreeMap::new());
    let mut probed = PROBED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    probed.entry(need).or_insert_with(|| need.probe()).clone()
}

fn required(need: Need) -> bool {
    let Some(list) = variable("TEST_REQUIRE") else { return false };
    let words: Vec<&str> = list.split(',').map(str::trim).filter(|word| !word.is_empty()).collect();
    for word in &words {
        assert!(ALL.iter().any(|known| known.word() == *word), "TEST_REQUIRE has the unknown word `{word}`");
    }
    words.contains(&need.word())
}

#[expect(clippy::print_stderr, reason = "a skipped test says so")]
fn report(line: &str) {
    eprintln!("{line}");
    // Test runners hide what a passing test prints, so the skip is also noted where the run's summary finds it.
    if let Some(path) = variable("TEST_SKIPS")
        && let Ok(mut file) = std::fs::File::options().append(true).create(true).open(path)
    {
        let _ = writeln!(file, "{line}");
    }
}

/// Runs a command without input; an error is its status and the last line that it wrote.
fn try_run(command: &mut Command) -> Result<(), String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(format!("{program}: {}: {}", output.status, text.trim().lines().last().unwrap_or("no message")))
}

fn probe_root() -> Result<(), String> {
    if !is_root() {
        return Err("not root".to_owned());
    }
    let dir = temp_dir("probe");
    std::os::unix::fs::chown(dir.path(), Some(1), Some(1)).map_err(|error| format!("chown: {error}"))?;
    try_run(command("unshare").args(["--mount", "true"]))
}

fn probe_overlay(root: bool) -> Result<(), String> {
    let dir = temp_dir("probe");
    give_to_other_user(dir.path());
    let script = "mkdir l u w m && mount -t overlay overlay -o \"$0lowerdir=l,upperdir=u,workdir=w\" m && echo x > m/f";
    let mut probe = command("unshare");
    if root {
        probe.args(["--mount", "sh", "-c", script, ""]);
    } else {
        probe.args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "userxattr,"]);
        as_other_user(&mut probe);
    }
    try_run(probe.current_dir(dir.path()))
}

fn probe_landlock() -> Result<(), String> {
    use landlock::{ABI, Access as _, AccessFs, CompatLevel, Compatible as _, Ruleset, RulesetAttr as _};
    let rules = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    let rules = rules.handle_access(AccessFs::from_all(ABI::V1)).and_then(Ruleset::create);
    rules.map(|_| ()).map_err(|error| error.to_string())
}

fn probe_cgroup() -> Result<(), String> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").map_err(|error| error.to_string())?;
    let own = std::fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
    let name = format!("testkit-{}", std::process::id());
    let mut reasons = Vec::new();
    for mount in mounts.lines() {
        let fields: Vec<&str> = mount.split(' ').collect();
        let (Some(place), Some(kind), Some(options)) = (fields.get(1), fields.get(2), fields.get(3)) else {
            continue;
        };
        let (key, limit) = match *kind {
            "cgroup2" => ("0::", "memory.max"),
            "cgroup" if options.split(',').any(|option| option == "memory") => {
                (":memory:", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        let line = own.lines().find(|line| line.starts_with(key) || (key != "0::" && line.contains(key)));
        let path = line.and_then(|line| line.splitn(3, ':').nth(2)).unwrap_or("/");
        for parent in [format!("{place}{path}"), (*place).to_owned()] {
            let group = std::path::Path::new(&parent).join(&name);
            let tried = std::fs::create_dir(&group)
                .and_then(|()| std::fs::metadata(group.join(limit)).map(|_| ()))
                .and_then(|()| std::fs::write(group.join(limit), "67108864"));
            let _ = std::fs::remove_dir(&group);
            match tried {
                Ok(()) => return Ok(()),
                Err(error) => reasons.push(format!("{}: {error}", group.join(limit).display())),
            }
        }
    }
    Err(if reasons.is_empty() { "no memory controller is mounted".to_owned() } else { reasons.join("; ") })
}

fn probe_registry() -> Result<(), String> {
    let dir = temp_dir("probe");
    write(
        &dir.path().join("Cargo.toml"),
        "[package]\nname = \"probe\"\nversion = \"0.0.0\"\nedition = \"2021\"\n[dependencies]\nitoa = \"1\"\n[workspace]\n",
    );
    write(&dir.path().join("src/lib.rs"), "");
    try_run(command("cargo").args(["fetch", "--quiet"]).current_dir(dir.path()))
}

fn probe_fuse() -> Result<(), String> {
    if !is_root() {
        return Err("not root".to_owned());
    }
    let device = std::fs::File::options().read(true).write(true).open("/dev/fuse");
    device.map(|_| ()).map_err(|error| format!("/dev/fuse: {error}"))
}

fn probe_qemu() -> Result<(), String> {
    Kernel::find()?.module_files(&MODULES)?;
    let mut qemu = command("qemu-system-x86_64");
    try_run(qemu.args(["-machine", "microvm", "-accel", "help"]))?;
    try_run(command("mkfs.ext4").arg("-V"))
}

fn probe_loop() -> Result<(), String> {
    if !is_root() {
        return Err("not root".to_owned());
    }
    let dir = temp_dir("probe");
    let script =
        "truncate -s 16M i && mkfs.ext4 -q i && mkdir m && mount -o loop i m && echo x > m/f && umount m";
    try_run(command("unshare").args(["--mount", "sh", "-c", script]).current_dir(dir.path()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_need_has_a_word_of_its_own() {
        let words: std::collections::BTreeSet<&str> = ALL.iter().map(|need| need.word()).collect();
        assert_eq!(words.len(), ALL.len());
    }

    #[test]
    fn a_probe_that_fails_says_what_failed() {
        let error = try_run(command("sh").args(["-c", "echo because >&2; exit 3"])).unwrap_err();
        assert!(error.contains("because") && error.contains('3'), "{error}");
        assert!(try_run(&mut command("there-is-no-such-program")).is_err());
    }

    #[test]
    fn what_is_required_works() {
        for need in ALL.iter().filter(|need| required(**need)) {
            assert_eq!(need.probe(), Ok(()), "{need}");
        }
    }
}
