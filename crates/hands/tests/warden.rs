//! A runner that is killed leaves neither processes nor control groups. Its part is played by a copy of this program, and so is
//! its warden's; see `rootless.rs` for why this is no ordinary test.

#![allow(clippy::unwrap_used, reason = "a test")]

mod kit;

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use kit::{Kit, possible, sh};
use testkit::process::{command, wait_until};
use testkit::{Need, have};

const CASE: &str = "a_killed_runner_leaves_nothing";

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let has = |flag: &str| args.iter().any(|arg| arg == flag);
    if has("--list") {
        let line = if has("--ignored") { String::new() } else { format!("{CASE}: test\n") };
        let _ = std::io::stdout().write_all(line.as_bytes());
    } else if has("warden") {
        hands::warden::run();
    } else if has("runner") {
        runner();
    } else if args.iter().all(|arg| arg.starts_with("--") || CASE.contains(arg.as_str())) {
        a_killed_runner_leaves_nothing();
    }
}

/// Boots a hand with something running in it, tells, and waits to be killed.
fn runner() {
    let own = std::env::current_exe().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let kit =
            Kit::with(|options| options.warden = Some(vec![own.into(), OsString::from("warden")])).await;
        let hand = kit.boot().await;
        let marker = format!("sleep 97{}", std::process::id());
        sh(&hand, &format!("setsid {marker} >/dev/null 2>&1 & echo")).await.ok();
        wait_until("the background process", Duration::from_secs(10), || runs(&marker));
        let frozen = std::env::args().any(|arg| arg == "frozen");
        if frozen {
            hand.freeze().await.unwrap();
        }
        let _ = writeln!(std::io::stdout(), "{marker}");
        std::future::pending::<()>().await;
    });
}

fn a_killed_runner_leaves_nothing() {
    if !possible() || !have(Need::Cgroup) {
        return;
    }
    for how in ["running", "frozen"] {
        let before = groups();
        let mut runner = command(std::env::current_exe().unwrap());
        let mut runner = runner.args(["runner", how]).stdout(Stdio::piped()).spawn().unwrap();
        let mut marker = String::new();
        BufReader::new(runner.stdout.take().unwrap()).read_line(&mut marker).unwrap();
        let marker = marker.trim().to_owned();
        assert!(runs(&marker));
        assert!(groups().iter().any(|dir| !before.contains(dir)), "those of other tests may end meanwhile");
        runner.kill().unwrap();
        runner.wait().unwrap();
        wait_until("the end of what ran in the hand", Duration::from_secs(20), || !runs(&marker));
        wait_until("the warden's work", Duration::from_secs(20), || {
            groups().iter().all(|dir| before.contains(dir))
        });
    }
}

/// Whether a process of the host has this command line.
fn runs(marker: &str) -> bool {
    let wanted = marker.replace(' ', "\0");
    std::fs::read_dir("/proc").unwrap().flatten().any(|entry| {
        std::fs::read(entry.path().join("cmdline"))
            .is_ok_and(|text| String::from_utf8_lossy(&text).trim_end_matches('\0') == wanted)
    })
}

/// Control groups of hands that were started by this program's copies: by name of the run, others' included.
fn groups() -> Vec<PathBuf> {
    fn below(dir: &Path, depth: u32, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with("tendon-") && name != "tendon-aside" {
                found.push(entry.path());
            } else if depth > 0 && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                below(&entry.path(), depth - 1, found);
            }
        }
    }
    let mut found = Vec::new();
    below(Path::new("/sys/fs/cgroup"), 5, &mut found);
    found
}
