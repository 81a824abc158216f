//! Hands of a runner that is not root: in its own user namespace, as a rule without control groups.
//!
//! A process must enter its namespaces before it starts a thread, which the usual test harness does: so this is a program of
//! its own that runs each case in a child, and lists its cases as the harness would.

#![allow(clippy::unwrap_used, reason = "a test")]

mod kit;

use std::future::Future;
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

use kit::{Kit, run, sh};
use policy::Config;
use proto::verify::LimitsAsked;
use testkit::process::{binary, command};
use testkit::user::{as_other_user, give_to_other_user};
use testkit::{Need, have_all, temp_dir};

const CASES: [&str; 2] = ["a_user_without_privileges_boots_hands", "a_cache_of_the_user_is_copied_on_write"];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let has = |flag: &str| args.iter().any(|arg| arg == flag);
    if has("--list") {
        let lines = CASES.iter().filter(|_| !has("--ignored")).map(|case| format!("{case}: test\n"));
        let _ = std::io::stdout().write_all(lines.collect::<String>().as_bytes());
        return;
    }
    match args.iter().find_map(|arg| arg.strip_prefix("case:")) {
        Some("a_user_without_privileges_boots_hands") => in_private(boots()),
        Some("a_cache_of_the_user_is_copied_on_write") => in_private(copies()),
        Some(other) => panic!("no case is called {other}"),
        None => {
            let wanted =
                |case: &&str| args.iter().all(|arg| arg.starts_with("--") || case.contains(arg.as_str()));
            if have_all(&[Need::Bwrap, Need::UserNs, Need::RootlessOverlay]) {
                CASES.iter().filter(|case| wanted(case)).for_each(|case| in_child(case));
            }
        }
    }
}

/// Runs a case in a copy of this program that belongs to a user without privileges.
fn in_child(case: &str) {
    let dir = temp_dir("rootless");
    let copy = |from: &std::path::Path, name: &str| {
        std::fs::copy(from, dir.path().join(name)).unwrap();
        std::fs::set_permissions(dir.path().join(name), std::fs::Permissions::from_mode(0o755)).unwrap();
    };
    copy(&std::env::current_exe().unwrap(), "test");
    copy(&binary("hand"), "hand");
    give_to_other_user(dir.path());
    let mut child = command(dir.path().join("test"));
    child
        .arg(format!("case:{case}"))
        .env("TMPDIR", dir.path())
        .env("HOME", dir.path())
        .current_dir(dir.path());
    let status = as_other_user(&mut child).status().unwrap();
    assert!(status.success(), "{case}: {status}");
}

fn in_private(case: impl Future<Output = ()>) {
    assert!(!rustix::process::geteuid().is_root());
    assert_eq!(sys::ns::enter_private().unwrap(), sys::ns::Private::UserAndMount);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(case);
}

async fn boots() {
    let kit = Kit::new().await;
    let caps = kit.hands.caps();
    let hand = kit.boot().await;
    let script = "id -u; pwd; echo x > f; cat f; stat -c %u f";
    assert_eq!(sh(&hand, script).await.ok(), "1000\n/work\nx\n1000\n");
    assert!(!sh(&hand, "cat /etc/shadow").await.outcome.passed());
    let owner = kit.branch.path().join("f").metadata().unwrap().uid();
    assert_eq!(owner, rustix::process::getuid().as_raw());
    if caps.memory_by.is_none() {
        let asked = LimitsAsked { memory_bytes_max: Some(1 << 30), ..Default::default() };
        let refusal = policy::grant(&asked, &Config::default(), &caps).unwrap_err();
        assert!(refusal.reason.contains("can't be enforced"), "{refusal}");
    }
    assert_eq!(hand.confinement().degraded, Vec::<String>::new());
    hand.stop().await;
    let again = kit.boot().await;
    assert_eq!(run(&again, &["echo", "again"]).await.ok(), "again\n");
}

async fn copies() {
    let home = temp_dir("home");
    let registry = home.path().join(".cargo/registry/cache");
    std::fs::create_dir_all(&registry).unwrap();
    std::fs::write(registry.join("crate"), "as it was").unwrap();
    std::fs::write(home.path().join(".cargo/credentials.toml"), "token").unwrap();
    let at = home.path().to_owned();
    let kit = Kit::with(|options| options.home = Some(at)).await;
    assert_eq!(kit.hands.toolchains(), ["cargo"]);
    let hand = kit.boot().await;
    let script = "cd $CARGO_HOME && cat registry/cache/crate && echo changed > registry/cache/crate && touch lock && ls -A";
    assert_eq!(sh(&hand, script).await.ok(), "as it waslock\nregistry\n");
    assert_eq!(std::fs::read_to_string(registry.join("crate")).unwrap(), "as it was");
}
