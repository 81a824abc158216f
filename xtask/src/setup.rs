//! Installs the Debian packages that are missing, when it may; else says which command would.

use std::process::Stdio;

use testkit::Need;

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

const QEMU: &[&str] = &["qemu-system-x86", "linux-image-cloud-amd64", "e2fsprogs"];

const WANTED: &[Wanted] = &[
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

/// Makes the machine ready, or fails with the command that would.
pub fn setup(purpose: For) -> Result<(), Failure> {
    step("Set-up");
    let mut packages = Vec::new();
    for wanted in WANTED.iter().filter(|wanted| wanted.demo || purpose == For::Tests) {
        match wanted.need.probe() {
            Ok(()) => say(format_args!("{}: works ({})", wanted.need, wanted.why)),
            Err(reason) => {
                say(format_args!("{}: missing, needed for {} ({reason})", wanted.need, wanted.why));
                packages.extend(wanted.packages.iter().filter(|package| !installed(package)));
            }
        }
    }
    install(&packages)?;
    for wanted in WANTED.iter().filter(|wanted| wanted.demo) {
        wanted.need.probe().map_err(|reason| still_missing(wanted, &reason))?;
    }
    Ok(())
}

fn installed(package: &str) -> bool {
    capture(program("dpkg-query").args(["--show", "--showformat=${db:Status-Status}", package]))
        .is_ok_and(|status| status == "installed")
}

fn install(packages: &[&str]) -> Result<(), Failure> {
    if packages.is_empty() {
        return Ok(());
    }
    let list = packages.join(" ");
    if program("apt-get").arg("--version").stdout(Stdio::null()).status().is_err() {
        return Err(Failure::new(format!(
            "this machine has no apt-get: install what Debian calls {list}, and try again"
        )));
    }
    let Some(sudo) = privilege() else {
        return Err(Failure::new(format!(
            "packages are missing and this user may not install them; run this, and try again:\n\n  \
             sudo apt-get update && sudo apt-get install --yes --no-install-recommends {list}\n"
        )));
    };
    let apt = |args: &[&str]| {
        let words: Vec<&str> =
            sudo.iter().chain(["env", "DEBIAN_FRONTEND=noninteractive", "apt-get"].iter()).copied().collect();
        let mut command = program(words[0]);
        command
            .args(&words[1..])
            .args(["-qq", "-o", "Dpkg::Use-Pty=0", "-o", "DPkg::Lock::Timeout=120"])
            .args(args);
        command.stdin(Stdio::null());
        command
    };
    run(&mut apt(&["update"]))?;
    let args = [&["install", "--yes", "--no-install-recommends"], packages].concat();
    run(&mut apt(&args))
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
