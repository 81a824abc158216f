//! A hand as the first process of its own namespaces, without capabilities: what it can bear from the code that it runs.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test: it starts the hand, and panics when something is off"
)]

mod kit;

use std::time::{Duration, Instant};

use hands::link::{ExecEvent, ExecSpec};
use kit::{Kit, run, sh};
use proto::verify::Outcome;

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn it_is_process_one_without_privilege() {
    let Some(kit) = Kit::confined(&[]).await else { return };
    let findings = kit.link().self_test().await.unwrap();
    let value = |name: &str| findings.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str());
    for (name, want) in
        [("pid", "1"), ("uid", "1000"), ("caps.effective", "0000000000000000"), ("net.interfaces", "lo")]
    {
        assert_eq!(value(name), Some(want), "{name}");
    }
    for name in ["net.metadata", "net.host", "net.dns"] {
        assert!(value(name).unwrap().starts_with("closed"), "{name}: {:?}", value(name));
    }
    assert_eq!(value("oom_score_adj.raised"), Some("true"));
    assert_eq!(kit.sh("cat /proc/self/oom_score_adj /proc/1/oom_score_adj").await.text(), "1000\n0");
    // Its memory, environment and descriptors are closed to the code.
    let ran = kit.sh("cat /proc/1/environ; ls /proc/1/fd; cat /proc/1/maps; head -c1 /proc/1/mem; cat /proc/$PPID/environ").await;
    assert_eq!(ran.text(), "", "{ran:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn it_bears_signals_and_reaps_orphans() {
    let Some(kit) = Kit::confined(&[]).await else { return };
    let ran = kit.sh("for s in TERM KILL STOP INT HUP SEGV CHLD USR1; do kill -$s 1; done; (setsid sleep 0.1 &); echo fine").await;
    assert_eq!(ran.text(), "fine");
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(kit.sh("grep -l 'State:.Z' /proc/[0-9]*/status | wc -l").await.text(), "0");
    assert_eq!(kit.link().ping().await.unwrap().lingering, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn code_that_kills_everything_it_can_ends_only_itself() {
    let Some(kit) = Kit::confined(&[]).await else { return };
    let mut other = kit.exec(sh("echo up; sleep 60")).await;
    assert!(matches!(other.next_event().await, Some(ExecEvent::Output { .. })));
    // kill -1 reaches every process but process 1 and itself: supervisors, too.
    let ran = kit.sh("setsid sleep 60 & setsid sleep 60 & kill -9 -1; sleep 60").await;
    for outcome in [ran.outcome, run(other).await.outcome] {
        assert!(
            matches!(&outcome, Outcome::Killed { reason } if reason.contains("a supervisor process")),
            "{outcome:?}"
        );
    }
    // The hand, a supervisor, the shell, ls and wc; what was killed takes a moment to be gone.
    let since = Instant::now();
    while kit.sh("ls -d /proc/[0-9]* | wc -l").await.text() != "5" {
        assert!(since.elapsed() < Duration::from_secs(20), "something is left");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_process_limit_is_named() {
    // The hand, three times supervisor and command, and one more: a supervisor that can't start its command.
    let Some(kit) = Kit::confined(&["prlimit", "--nproc=8"]).await else { return };
    let mut running = Vec::new();
    for _ in 0..3 {
        // Waits for its first output: only then it takes all its places.
        let mut exec = kit.exec(sh("echo up; exec sleep 60")).await;
        assert!(matches!(exec.next_event().await, Some(ExecEvent::Output { .. })));
        running.push(exec);
    }
    let limit =
        Outcome::NotStarted { reason: "the hand's process limit is reached".into(), program_missing: false };
    assert_eq!(kit.sh("true").await.outcome, limit);
    // One less than that: not even a supervisor.
    let Some(kit) = Kit::confined(&["prlimit", "--nproc=1"]).await else { return };
    assert_eq!(kit.sh("true").await.outcome, limit);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_fork_bomb_ends_with_its_time() {
    let Some(kit) = Kit::confined(&[]).await else { return };
    let bombs = [
        "prlimit --nproc=300 sh -c 'b() { b | b & }; b'; sleep 60",
        // Each in a session of its own.
        "printf '#!/bin/sh\nwhile :; do setsid ./bomb & done' > bomb; chmod +x bomb; prlimit --nproc=300 ./bomb; sleep 60",
    ];
    for line in bombs {
        let since = Instant::now();
        let ran = run(kit.exec(ExecSpec { wall_ms_max: Some(1000), ..sh(line) }).await).await;
        println!("over after {:?}", since.elapsed());
        assert_eq!((ran.outcome, ran.lingering), (Outcome::TimedOut { wall_ms_max: 1000 }, false));
    }
    assert_eq!(kit.sh("echo fine").await.text(), "fine");
    let status = kit.link().ping().await.unwrap();
    assert_eq!((status.execs.len(), status.lingering), (0, 0));
}
