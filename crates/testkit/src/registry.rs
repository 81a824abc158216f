//! Real projects from the public registries, fetched by their ordinary clients.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::fixtures::temp_dir;
use crate::process::command;

/// Puts the published files of a crate into `into`, which must not exist, and what its tests need into cargo's cache.
/// The crate becomes a workspace of its own, and `target` is ignored by git there.
pub fn fetch_crate(name: &str, version: &str, into: &Path) -> Result<(), String> {
    let carrier = temp_dir("carrier");
    let manifest = format!(
        "[package]\nname = \"carrier\"\nversion = \"0.0.0\"\nedition = \"2021\"\n[dependencies]\n{name} = \"={version}\"\n[workspace]\n"
    );
    write(&carrier.path().join("Cargo.toml"), &manifest)?;
    std::fs::create_dir(carrier.path().join("src")).map_err(|error| error.to_string())?;
    write(&carrier.path().join("src/lib.rs"), "")?;
    done(command("cargo").args(["vendor", "--quiet", "vendor"]).current_dir(carrier.path()))?;
    done(command("cp").arg("--recursive").arg(carrier.path().join("vendor").join(name)).arg(into))?;
    std::fs::remove_file(into.join(".cargo-checksum.json")).map_err(|error| error.to_string())?;
    write(&into.join(".gitignore"), "/target\n")?;
    let manifest = std::fs::read_to_string(into.join("Cargo.toml")).map_err(|error| error.to_string())?;
    write(&into.join("Cargo.toml"), &format!("{manifest}\n[workspace]\n"))?;
    done(command("cargo").args(["fetch", "--quiet"]).current_dir(into))
}

/// Puts the files of a Python wheel into `into`. `spec` is `name==version`.
pub fn fetch_wheel(spec: &str, into: &Path) -> Result<(), String> {
    let dir = temp_dir("wheel");
    let pip = [
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
    ];
    done(command("python3").args(pip).args([spec, "--dest", "."]).current_dir(dir.path()))?;
    let entries = std::fs::read_dir(dir.path()).map_err(|error| error.to_string())?;
    let wheel =
        entries.filter_map(Result::ok).map(|entry| entry.path()).next().ok_or("pip brought nothing")?;
    done(command("python3").args(["-m", "zipfile", "-e"]).arg(wheel).arg(into))
}

/// Puts the published files of an npm package into `into`, with `dev` as its only development dependency, and what
/// `npm ci --offline` needs into npm's cache.
pub fn fetch_npm(spec: &str, dev: &str, into: &Path) -> Result<(), String> {
    let dir = temp_dir("npm");
    let npm = |args: &[&str], at: &Path| {
        done(command("npm").args(args).args(["--silent", "--no-audit", "--no-fund"]).current_dir(at))
    };
    npm(&["pack", spec, "--pack-destination", "."], dir.path())?;
    done(command("sh").args(["-c", "tar xzf *.tgz"]).current_dir(dir.path()))?;
    done(command("cp").arg("--recursive").arg(dir.path().join("package")).arg(into))?;
    write(&into.join(".gitignore"), "node_modules\n")?;
    npm(&["pkg", "delete", "devDependencies", "scripts"], into)?;
    npm(&["install", "--save-dev", dev], into)?;
    // Installing from the lock file asks the registry for other documents than resolving does: have those cached too.
    npm(&["ci"], into)?;
    std::fs::remove_dir_all(into.join("node_modules")).map_err(|error| error.to_string())
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

fn done(command: &mut Command) -> Result<(), String> {
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{command:?}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{command:?}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim()))
}
