//! The real tools of this machine in a hand without a network: cargo with a registry dependency, npm, pytest, pip, git.

#![allow(clippy::unwrap_used, reason = "a test")]

mod kit;

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};

use kit::{Kit, Ran, possible, run, sh};
use testkit::Need;
use testkit::process::{command, variable};

async fn kit() -> Kit {
    Kit::with(|options| {
        options.home = variable("HOME").map(PathBuf::from);
        for name in ["CARGO_HOME", "RUSTUP_HOME", "PYENV_ROOT", "NVM_DIR"] {
            options.env.extend(variable(name).map(|value| (name.to_owned(), value)));
        }
    })
    .await
}

fn write(kit: &Kit, path: &str, text: &str) {
    let path = kit.branch.path().join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, text).unwrap();
}

/// Gives the branch to the hand's user, as the store does.
fn own(dir: &Path) {
    chown(dir, Some(60600), Some(60600)).unwrap();
    for entry in fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if entry.file_type().unwrap().is_dir() {
            own(&path);
        } else {
            std::os::unix::fs::lchown(&path, Some(60600), Some(60600)).unwrap();
        }
    }
}

#[tokio::test]
async fn cargo_tests_a_crate_with_dependencies() {
    if !possible() || !testkit::have(Need::Registry) {
        return;
    }
    let kit = kit().await;
    write(
        &kit,
        "Cargo.toml",
        "[package]\nname='probe'\nversion='0.0.0'\nedition='2021'\n[dependencies]\nitoa='1'\n[workspace]\n",
    );
    write(&kit, "src/lib.rs", "#[test]\nfn works() { assert_eq!(itoa::Buffer::new().format(7), \"7\"); }\n");
    testkit::process::run(command("cargo").args(["fetch", "--quiet"]).current_dir(kit.branch.path()));
    own(kit.branch.path());
    let hand = kit.boot().await;
    let tested = run(&hand, &["cargo", "test"]).await;
    assert!(tested.outcome.passed() && tested.stdout.contains("1 passed"), "{tested:?}");
    // cargo's own locks and caches can be written, on the hand's copy.
    let wrote = sh(
        &hand,
        "touch $CARGO_HOME/registry/mark && ls $CARGO_HOME; ls $CARGO_HOME/credentials* 2>/dev/null; true",
    )
    .await
    .ok();
    assert!(wrote.contains("registry") && !wrote.contains("credentials"), "{wrote}");
    let home = PathBuf::from(variable("CARGO_HOME").unwrap_or(variable("HOME").unwrap() + "/.cargo"));
    assert!(!home.join("registry/mark").exists());
    // A crate that is in the cache but not unpacked is unpacked in the hand.
    let unpacked = sh(&hand, "rm -rf $CARGO_HOME/registry/src target && cargo test --quiet").await;
    assert!(unpacked.outcome.passed(), "{unpacked:?}");
    assert!(home.join("registry/src").exists());
}

#[tokio::test]
async fn python_runs_tests() {
    if !possible() || !testkit::have(Need::Python) {
        return;
    }
    let kit = kit().await;
    write(&kit, "test_it.py", "def test_it():\n    assert 1 + 1 == 2\n");
    own(kit.branch.path());
    let hand = kit.boot().await;
    let version = run(&hand, &["python3", "--version"]).await.ok();
    assert!(version.starts_with("Python 3"), "{version}");
    let has_pytest =
        command("python3").args(["-m", "pytest", "--version"]).output().is_ok_and(|out| out.status.success());
    if has_pytest {
        let tested = run(&hand, &["python3", "-m", "pytest", "-q"]).await;
        assert!(tested.stdout.contains("1 passed"), "{tested:?}");
    } else {
        run(&hand, &["python3", "-c", "import test_it; test_it.test_it()"]).await.ok();
    }
    let venv =
        sh(&hand, "python3 -m venv --without-pip env && env/bin/python -c 'import sys; print(sys.prefix)'")
            .await;
    assert_eq!(venv.ok(), "/work/env\n");
    let pip: Ran = run(&hand, &["python3", "-m", "pip", "install", "requests-that-is-nowhere"]).await;
    assert!(!pip.outcome.passed() && !pip.stderr.contains("Retrying"), "{pip:?}");
}

#[tokio::test]
async fn pip_installs_from_a_directory_of_wheels() {
    if !possible() || !testkit::have_all(&[Need::Python, Need::Pip]) {
        return;
    }
    let wheels = testkit::temp_dir("wheels");
    let make = "import sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1] + '/tiny_probe-1.0-py3-none-any.whl', 'w')
wheel.writestr('tiny_probe.py', 'print(\\'a wheel\\')\\n')
info = 'tiny_probe-1.0.dist-info/'
wheel.writestr(info + 'METADATA', 'Metadata-Version: 2.1\\nName: tiny-probe\\nVersion: 1.0\\n')
wheel.writestr(info + 'WHEEL', 'Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')
wheel.writestr(info + 'RECORD', '')
wheel.close()";
    testkit::process::run(command("python3").args(["-c", make]).arg(wheels.path()));
    let kit = Kit::with(|options| {
        let links = wheels.path().to_str().unwrap().to_owned();
        options.home = variable("HOME").map(PathBuf::from);
        options.env.insert("PIP_FIND_LINKS".into(), links);
        options.env.extend(variable("PYENV_ROOT").map(|value| ("PYENV_ROOT".to_owned(), value)));
    })
    .await;
    let hand = kit.boot().await;
    let installed =
        sh(&hand, "python3 -m pip install --quiet --target=lib tiny-probe && python3 lib/tiny_probe.py")
            .await;
    assert_eq!(installed.ok(), "a wheel\n");
}

#[tokio::test]
async fn npm_installs_from_the_cache() {
    if !possible() || !testkit::have_all(&[Need::Npm, Need::Registry]) {
        return;
    }
    let kit = kit().await;
    write(
        &kit,
        "package.json",
        r#"{"name":"probe","version":"1.0.0","dependencies":{"is-number":"7.0.0"},"scripts":{"test":"node test.js"}}"#,
    );
    write(&kit, "test.js", "if (!require('is-number')(7)) process.exit(1); console.log('numbers')\n");
    // Fills the host's cache, as an earlier install by the user would have.
    let dir = kit.branch.path();
    testkit::process::run(
        command("npm")
            .args(["install", "--silent", "--omit-lockfile-registry-resolved=false"])
            .current_dir(dir),
    );
    fs::remove_dir_all(dir.join("node_modules")).unwrap();
    own(dir);
    let hand = kit.boot().await;
    let installed = run(&hand, &["npm", "ci"]).await;
    assert!(installed.outcome.passed(), "{installed:?}");
    assert!(run(&hand, &["npm", "test"]).await.ok().contains("numbers"));
}

#[tokio::test]
async fn other_tools_start() {
    if !possible() {
        return;
    }
    let kit = kit().await;
    let hand = kit.boot().await;
    let git = sh(&hand, "git init -q . && git config user.email a@b && git config user.name n && echo x > f && git add f && git commit -qm m && git log --oneline | wc -l").await;
    assert_eq!(git.ok(), "1\n");
    for (program, argv) in [
        ("/usr/bin/node", vec!["node", "-e", "console.log(require('os').cpus().length > 0)"]),
        ("/usr/bin/java", vec!["java", "-version"]),
        ("/usr/bin/gcc", vec!["sh", "-c", "echo 'int main(){return 0;}' > a.c && gcc a.c && ./a.out"]),
        ("/usr/bin/perl", vec!["perl", "-e", "print 1"]),
        ("/usr/bin/make", vec!["make", "--version"]),
        ("/usr/bin/script", vec!["script", "-qc", "tty", "/dev/null"]),
    ] {
        if Path::new(program).exists() {
            let ran = run(&hand, &argv).await;
            assert!(ran.outcome.passed(), "{argv:?} {ran:?}");
        }
    }
}

#[tokio::test]
async fn credentials_in_what_is_shown_are_not() {
    if !possible() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let put = |path: &str, text: &str| {
        let path = home.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
    };
    put(
        ".cargo/git/db/r-1/config",
        "[core]\n\tbare = true\n[remote \"o\"]\n\turl = https://me:hunter2@host/r\n",
    );
    put(".cargo/git/db/r-1/FETCH_HEAD", "0123\t\tbranch 'main' of https://me:hunter2@host/r\n");
    put(".nvm/versions/node/v20.3.0/etc/npmrc", "//registry/:_authToken=hunter2\n");
    let kit = Kit::with(|options| options.home = Some(home.path().to_owned())).await;
    let hand = kit.boot().await;
    let home = home.path().display();
    let found =
        sh(&hand, &format!("cat {home}/.cargo/git/db/r-1/config; grep -r hunter2 {home} || true")).await.ok();
    assert_eq!(found, "[core]\n\tbare = true\n[remote \"o\"]\n");
    // What a tool writes later is seen at the next boot.
    fs::write(format!("{home}/.cargo/git/db/r-1/config"), "url = https://me:hunter2@host/other\n").unwrap();
    let hand = kit.boot().await;
    assert_eq!(sh(&hand, &format!("grep -r hunter2 {home} || true")).await.ok(), "");
}
