//! Installs the Debian packages that are missing, when it may; else says which command would.

use std::process::Stdio;

use testkit::Need;
use testkit::kernel::{self, Kernel};

use crate::shell::{Failure, capture, program, run, say, step};

/// What the machine is made ready for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum For {
    /// The demo: the sandbox and git.
    Demo,
    /// The whole test suite.
    Tests,
}

/// A need that a Debian package can serve.
struct Wanted {
    need: Need,
    packages: &'static [&'static str],
    why: &'static str,
    demo: bool,
}

const PYTHON: &str = "tests that verify Python projects";
const JAVASCRIPT: &str = "tests that verify JavaScript projects";

const QEMU: &[&str] = &["qemu-system-x86", "e2fsprogs", "kmod"];

const WANTED: &[Wanted] = &[
    Wanted {
        need: Need::Cc,
        packages: &["build-essential"],
        why: "building, and tests of Rust projects",
        demo: true,
    },
    Wanted { need: Need::Bwrap, packages: &["bubblewrap"], why: "the sandbox tier", demo: true },
    Wanted { need: Need::Git, packages: &["git"], why: "bases from repositories", demo: true },
    Wanted { need: Need::Python, packages: &["python3"], why: PYTHON, demo: false },
    Wanted { need: Need::Pip, packages: &["python3-pip"], why: PYTHON, demo: false },
    Wanted { need: Need::Openssl, packages: &["openssl"], why: "tests of https sources", demo: false },
    Wanted { need: Need::Node, packages: &["nodejs"], why: JAVASCRIPT, demo: false },
    Wanted { need: Need::Npm, packages: &["npm"], why: JAVASCRIPT, demo: false },
    Wanted { need: Need::Loop, packages: &["mount", "e2fsprogs"], why: "tests of power cuts", demo: false },
    Wanted { need: Need::Qemu, packages: QEMU, why: "tests on hosts of another kind", demo: false },
];

/// Makes the machine ready. Without the right to install, it fails with the command that would, or, when only tests would be
/// skipped, says so and goes on.
pub fn setup(purpose: For) -> Result<(), Failure> {
    step("Set-up");
    let mut missing = Vec::new();
    for wanted in WANTED.iter().filter(|wanted| wanted.demo || purpose == For::Tests) {
        match wanted.need.probe() {
            Ok(()) => say(format_args!("{}: works ({})", wanted.need, wanted.why)),
            Err(reason) => {
                say(format_args!("{}: missing, needed for {} ({reason})", wanted.need, wanted.why));
                missing.push(wanted);
            }
        }
    }
    install(&missing)?;
    if purpose == For::Tests && Kernel::find().is_err() {
        // A distribution may have no such package: then the tests that boot it are skipped, and say so.
        unpack_kernel().unwrap_or_else(|failure| say(format_args!("no kernel to boot in QEMU: {failure}")));
    }
    for wanted in WANTED.iter().filter(|wanted| wanted.demo) {
        wanted.need.probe().map_err(|reason| still_missing(wanted, &reason))?;
    }
    Ok(())
}

fn installed(package: &str) -> bool {
    capture(program("dpkg-query").args(["--show", "--showformat=${db:Status-Status}", package]))
        .is_ok_and(|status| status == "installed")
}

fn install(missing: &[&Wanted]) -> Result<(), Failure> {
    let absent = missing.iter().flat_map(|wanted| wanted.packages).filter(|package| !installed(package));
    let mut packages: Vec<&str> = absent.copied().collect();
    packages.sort_unstable();
    packages.dedup();
    if packages.is_empty() {
        return Ok(());
    }
    let apt_get = program("apt-get").arg("--version").stdout(Stdio::null()).status().is_ok();
    match privilege() {
        Some(sudo) if apt_get => {
            apt(sudo, &["update"])?;
            apt(sudo, &[&["install", "--yes", "--no-install-recommends"], &packages[..]].concat())
        }
        Some(_) | None => without(missing, &packages, apt_get),
    }
}

/// What is said where nothing can be installed: an error if nothing goes without it.
fn without(missing: &[&Wanted], packages: &[&str], apt_get: bool) -> Result<(), Failure> {
    let list = packages.join(" ");
    let how = if apt_get {
        format!("  sudo apt-get update && sudo apt-get install --yes --no-install-recommends {list}\n")
    } else {
        format!("  (this machine has no apt-get) what Debian calls {list}\n")
    };
    if missing.iter().any(|wanted| wanted.demo) {
        return Err(Failure::new(format!(
            "packages are missing that this user may not install; install them, and try again:\n\n{how}"
        )));
    }
    let mut skipped: Vec<&str> = missing.iter().map(|wanted| wanted.why).collect();
    skipped.dedup();
    say(format_args!(
        "\nThis user may not install packages. Skipped without them: {}. To have all:\n\n{how}",
        skipped.join(", ")
    ));
    Ok(())
}

fn apt(sudo: &[&str], args: &[&str]) -> Result<(), Failure> {
    let words: Vec<&str> =
        sudo.iter().chain(["env", "DEBIAN_FRONTEND=noninteractive", "apt-get"].iter()).copied().collect();
    let mut command = program(words[0]);
    command
        .args(&words[1..])
        .args(["-qq", "-o", "Dpkg::Use-Pty=0", "-o", "DPkg::Lock::Timeout=120"])
        .args(args);
    run(command.stdin(Stdio::null()))
}

/// Downloads the kernel that tests boot, and unpacks it without installing it.
fn unpack_kernel() -> Result<(), Failure> {
    let depends = || {
        let shown = capture(program("apt-cache").args(["show", "--no-all-versions", kernel::PACKAGE]))?;
        let package = shown.lines().find_map(|line| line.strip_prefix("Depends: ")?.split([' ', ',']).next());
        package.map(str::to_owned).ok_or_else(|| Failure::new(format!("there is no {}", kernel::PACKAGE)))
    };
    let package = match (depends(), privilege()) {
        (Err(_), Some(sudo)) => apt(sudo, &["update"]).and_then(|()| depends())?,
        (found, _) => found?,
    };
    let dir = kernel::dir();
    let unpacked = dir.with_extension("new");
    for old in [&dir, &unpacked] {
        match std::fs::remove_dir_all(old) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
            Ok(()) | Err(_) => {}
        }
    }
    std::fs::create_dir_all(&unpacked)?;
    run(program("apt-get").args(["-qq", "download", &package]).current_dir(&unpacked))?;
    let archive = std::fs::read_dir(&unpacked)?.flatten().map(|entry| entry.path()).next();
    let archive = archive.ok_or_else(|| Failure::new("nothing was downloaded"))?;
    run(program("dpkg-deb").arg("--extract").arg(&archive).arg(&unpacked))?;
    std::fs::remove_file(&archive)?;
    let version = package.trim_start_matches("linux-image-");
    run(program("/usr/sbin/depmod").arg("--basedir").arg(&unpacked).arg(version))?;
    Ok(std::fs::rename(&unpacked, &dir)?)
}

/// The words to put before a command that needs root, if this user has a way that asks for no password.
fn privilege() -> Option<&'static [&'static str]> {
    if testkit::user::is_root() {
        return Some(&[]);
    }
    capture(program("sudo").args(["--non-interactive", "true"]))
        .is_ok()
        .then_some(&["sudo", "--non-interactive"])
}

fn still_missing(wanted: &Wanted, reason: &str) -> Failure {
    let hint = if wanted.need == Need::Bwrap {
        "\nIf the kernel forbids user namespaces to programs without a profile (Ubuntu 24.04 does), allow them:\n\n  \
         sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0\n"
    } else {
        ""
    };
    Failure::new(format!("{} is installed and does not work: {reason}{hint}", wanted.need))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_not_install_is_told_the_command_and_what_is_skipped() {
        let of = |need: Need| WANTED.iter().find(|wanted| wanted.need == need).unwrap();
        let error = without(&[of(Need::Bwrap), of(Need::Npm)], &["bubblewrap", "npm"], true).unwrap_err();
        assert!(
            error.to_string().contains("sudo apt-get install --yes --no-install-recommends bubblewrap npm"),
            "{error}"
        );
        without(&[of(Need::Npm)], &["npm"], true).unwrap();
        without(&[of(Need::Npm)], &["npm"], false).unwrap();
    }
}
