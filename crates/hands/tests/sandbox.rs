//! Real hands in real sandboxes: what they see, what limits them, how they end.

#![allow(clippy::unwrap_used, reason = "a test")]

mod kit;

use std::path::Path;
use std::time::{Duration, Instant};

use kit::{Kit, finish, id, possible, run, run_for, sh};
use proto::verify::{LimitsAsked, Outcome};

#[tokio::test]
async fn a_hand_boots_proves_its_confinement_and_runs_commands() {
    if !possible() {
        return;
    }
    let kit = Kit::new().await;
    let hand = kit.boot().await;
    assert_eq!(run(&hand, &["echo", "hello"]).await.ok(), "hello\n");
    let seen =
        sh(&hand, "id -u; id -g; hostname; pwd; echo $HOME; touch here && ls; cat /etc/hostname").await.ok();
    assert_eq!(seen, "1000\n1000\ntendon\n/work\n/home/agent\nhere\ntendon\n");
    assert!(kit.branch.path().join("here").exists());
    let confinement = hand.confinement();
    assert_eq!(confinement.tier, "sandbox");
    assert_eq!(confinement.degraded, Vec::<String>::new());
    hand.stop().await;
    assert_eq!(hand.lost().as_deref(), Some("it was stopped"));
}

#[tokio::test]
async fn a_machine_is_as_large_as_its_limits() {
    if !possible() {
        return;
    }
    let kit = Kit::new().await;
    let asked = LimitsAsked {
        cpu_milli: Some(1000),
        memory_bytes_max: Some(256 << 20),
        pids_max: Some(50),
        ..Default::default()
    };
    let hand = kit.boot_with(&asked).await;
    let seen = sh(
        &hand,
        "nproc; grep -c ^processor /proc/cpuinfo; head -1 /proc/meminfo; cat /sys/fs/cgroup/memory.max",
    )
    .await;
    assert_eq!(seen.ok(), "1\n1\nMemTotal:         262144 kB\n268435456\n");
    if testkit::have(testkit::Need::Python) {
        let count = run(
            &hand,
            &[
                "/usr/bin/python3",
                "-c",
                "import os; print(os.cpu_count(), os.sched_getaffinity(0).__len__())",
            ],
        );
        assert_eq!(count.await.ok(), "1 1\n");
    }
}

#[tokio::test]
async fn nothing_of_the_environment_comes_in() {
    if !possible() {
        return;
    }
    let kit = Kit::with(|options| {
        options.env = [("SECRET".to_owned(), "s".to_owned()), ("WANTED".to_owned(), "w".to_owned())].into();
        options.config.env_pass = vec!["WANTED".into()];
    })
    .await;
    let hand = kit.boot().await;
    let env = run(&hand, &["/usr/bin/env"]).await.ok();
    assert!(env.contains("WANTED=w\n") && !env.contains("SECRET"), "{env}");
    assert!(env.contains("LANG=C.UTF-8\n") && env.contains("CARGO_NET_OFFLINE=true\n"), "{env}");
    let own = sh(&hand, "tr '\\0' '\\n' </proc/1/environ | sort").await;
    // The first process can't be looked at; if it could, it would have nothing to show.
    assert!(!own.stdout.contains("SECRET") && !own.stdout.contains("HOME=/root"), "{own:?}");
}

#[tokio::test]
async fn memory_over_the_limit_is_named_and_the_hand_lives_on() {
    if !possible() || !testkit::have_all(&[testkit::Need::Cgroup, testkit::Need::Python]) {
        return;
    }
    let kit = Kit::new().await;
    let hand = kit.boot_with(&LimitsAsked { memory_bytes_max: Some(128 << 20), ..Default::default() }).await;
    let hog = run(&hand, &["/usr/bin/python3", "-c", "x = bytearray(512 << 20); print(len(x))"]).await;
    assert_eq!(hog.outcome, Outcome::LimitExceeded { limit: "memory".into() }, "{hog:?}");
    // A child of a child, whose parent reports the failure in its own way.
    let nested = sh(&hand, "/usr/bin/python3 -c 'x = bytearray(512 << 20)' || exit 7").await;
    assert_eq!(nested.outcome, Outcome::LimitExceeded { limit: "memory".into() }, "{nested:?}");
    // Files in memory count, too.
    let tmp = sh(&hand, "head -c 500M /dev/zero > /tmp/big").await;
    assert!(!tmp.outcome.passed(), "{tmp:?}");
    assert_eq!(sh(&hand, "rm -f /tmp/big; echo alive").await.ok(), "alive\n");
    hand.memory_peak_reset();
    run(&hand, &["/usr/bin/python3", "-c", "x = bytearray(40 << 20)"]).await.ok();
    let peak = hand.memory_peak().unwrap();
    assert!((40 << 20..128 << 20).contains(&peak), "{peak}");
    hand.memory_peak_reset();
    run(&hand, &["true"]).await.ok();
    assert!(hand.memory_peak().unwrap() < peak - (20 << 20), "{peak} {:?}", hand.memory_peak());
    // What one command read and wrote stays cached, and is not the next one's.
    sh(&hand, "head -c 60M /dev/zero > file; cat file > /dev/null").await.ok();
    hand.memory_peak_reset();
    run(&hand, &["true"]).await.ok();
    assert!(hand.memory_peak().unwrap() < 20 << 20, "{:?}", hand.memory_peak());
    hand.memory_peak_reset();
    run(&hand, &["/usr/bin/python3", "-c", "x = bytearray(40 << 20)"]).await.ok();
    let peak = hand.memory_peak().unwrap();
    assert!((40 << 20..60 << 20).contains(&peak), "{peak}");
}

#[tokio::test]
async fn processes_are_counted_and_a_fork_storm_leaves_the_hand_alive() {
    if !possible() || !testkit::have(testkit::Need::Cgroup) {
        return;
    }
    let kit = Kit::new().await;
    let hand = kit.boot_with(&LimitsAsked { pids_max: Some(64), ..Default::default() }).await;
    let storm = run_for(&hand, &["/bin/sh", "-c", "f() { f | f & }; f; sleep 60"], 2000).await;
    assert!(matches!(storm.outcome, Outcome::TimedOut { .. } | Outcome::Exited { .. }), "{storm:?}");
    hand.link().kill_all().await.unwrap();
    assert_eq!(run(&hand, &["echo", "alive"]).await.ok(), "alive\n");
    let many = sh(&hand, "for i in $(seq 200); do sleep 5 & done; echo all").await;
    assert!(!many.outcome.passed() || many.stderr.contains("fork"), "{many:?}");
}

#[tokio::test]
async fn a_cpu_quota_slows() {
    if !possible() || !testkit::have(testkit::Need::Cgroup) {
        return;
    }
    let kit = Kit::new().await;
    let hand = kit.boot_with(&LimitsAsked { cpu_milli: Some(200), ..Default::default() }).await;
    let start = Instant::now();
    let spin = run_for(&hand, &["/bin/sh", "-c", "while :; do :; done"], 1500).await;
    assert_eq!(spin.outcome, Outcome::TimedOut { wall_ms_max: 1500 });
    let wall = start.elapsed().as_millis() as u64;
    assert!(spin.cpu_ms < wall / 2, "{spin:?} of {wall} ms");
}

#[tokio::test]
async fn a_file_beyond_the_disk_limit_ends_its_writer() {
    if !possible() {
        return;
    }
    let kit = Kit::new().await;
    let hand = kit.boot_with(&LimitsAsked { disk_bytes_max: Some(1 << 20), ..Default::default() }).await;
    let writer = run(&hand, &["/usr/bin/dd", "if=/dev/zero", "of=big", "bs=64k", "count=100"]).await;
    assert_eq!(writer.outcome, Outcome::LimitExceeded { limit: "disk".into() }, "{writer:?}");
    assert!(kit.branch.path().join("big").metadata().unwrap().len() <= 1 << 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_hand_stands_still() {
    if !possible() || !testkit::have(testkit::Need::Cgroup) {
        return;
    }
    let kit = Kit::new().await;
    let hand = kit.boot().await;
    let spec = hands::ExecSpec {
        argv: ["/bin/sh", "-c", "i=0; while :; do i=$((i+1)); echo $i > count; done"]
            .map(|arg| arg.as_bytes().to_vec())
            .into(),
        ..Default::default()
    };
    let exec = hand.exec(id(), spec).await.unwrap();
    let count = || std::fs::read_to_string(kit.branch.path().join("count")).unwrap_or_default();
    testkit::wait_until("counting", Duration::from_secs(10), || count().len() > 1);
    hand.freeze().await.unwrap();
    let before = count();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(count(), before);
    // It can't answer meanwhile, however long that is, and goes on as if nothing had been.
    tokio::time::sleep(hands::link::PING_INTERVAL + hands::link::PING_PATIENCE + Duration::from_secs(2))
        .await;
    hand.thaw().await.unwrap();
    testkit::wait_until("counting on", Duration::from_secs(10), || count() != before && !count().is_empty());
    exec.cancel().await.unwrap();
    assert_eq!(finish(exec).await.outcome, Outcome::Cancelled);
    // A frozen hand can be ended, too.
    hand.freeze().await.unwrap();
    hand.stop().await;
    assert!(hand.lost().is_some());
}

/// Directories of control groups that a runner on this state directory has.
fn groups(kit: &Kit) -> Vec<std::path::PathBuf> {
    fn below(dir: &Path, depth: u32, found: &mut Vec<std::path::PathBuf>) {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if entry.file_name().to_string_lossy().starts_with("hand-") {
                found.push(path);
            } else if depth > 0 && path.is_dir() {
                below(&path, depth - 1, found);
            }
        }
    }
    let mut found = Vec::new();
    below(Path::new("/sys/fs/cgroup"), 6, &mut found);
    let name = format!(
        "tendon-{}",
        &blake3::hash(kit.state.path().canonicalize().unwrap().as_os_str().as_encoded_bytes()).to_hex()[..16]
    );
    found.retain(|path| path.to_string_lossy().contains(&name));
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_left_of_a_hand_that_ended() {
    if !possible() || !testkit::have(testkit::Need::Cgroup) {
        return;
    }
    let kit = Kit::new().await;
    let hand = kit.boot().await;
    assert!(!groups(&kit).is_empty());
    let marker = format!("sleep 98{}", std::process::id());
    let lingering = sh(&hand, &format!("setsid {marker} >/dev/null 2>&1 & echo started")).await;
    assert_eq!(lingering.ok(), "started\n");
    testkit::wait_until("the background process", Duration::from_secs(10), || running(&marker));
    hand.stop().await;
    assert!(!running(&marker));
    assert_eq!(groups(&kit), Vec::<std::path::PathBuf>::new());
    // Dropping the last handle is as good.
    let hand = kit.boot().await;
    sh(&hand, &format!("setsid {marker} >/dev/null 2>&1 & echo started")).await.ok();
    drop(hand);
    testkit::wait_until("the dropped hand's end", Duration::from_secs(10), || {
        !running(&marker) && groups(&kit).is_empty()
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_boot_that_is_given_up_at_any_moment_leaves_nothing() {
    if !possible() || !testkit::have(testkit::Need::Cgroup) {
        return;
    }
    let kit = Kit::new().await;
    for moment in 0..60 {
        let _ = tokio::time::timeout(Duration::from_micros(moment * 400), kit.boot()).await;
    }
    testkit::wait_until("the end of what was begun", Duration::from_secs(20), || {
        groups(&kit).is_empty() && children().is_empty()
    });
}

/// This process's children, ended ones included.
fn children() -> Vec<String> {
    let me = std::process::id();
    let tasks = std::fs::read_dir(format!("/proc/{me}/task")).unwrap().flatten();
    tasks
        .map(|task| std::fs::read_to_string(task.path().join("children")).unwrap_or_default())
        .filter(|children| !children.is_empty())
        .collect()
}

/// Whether a process of the host has this command line.
fn running(command: &str) -> bool {
    let wanted = command.replace(' ', "\0");
    std::fs::read_dir("/proc").unwrap().flatten().any(|entry| {
        std::fs::read(entry.path().join("cmdline"))
            .is_ok_and(|text| String::from_utf8_lossy(&text).trim_end_matches('\0') == wanted)
    })
}

#[tokio::test]
async fn a_hand_that_is_killed_says_so() {
    if !possible() {
        return;
    }
    let kit = Kit::new().await;
    let hand = kit.boot().await;
    let spec = hands::ExecSpec { argv: vec![b"sleep".to_vec(), b"60".to_vec()], ..Default::default() };
    let exec = hand.exec(id(), spec).await.unwrap();
    let first = first_process_of(&kit).expect("the hand's first process");
    testkit::process::run(testkit::process::command("kill").args(["-9", &first.to_string()]));
    let ran = finish(exec).await;
    assert_eq!(ran.outcome, Outcome::HandLost { reason: "it was killed by signal 9".into() }, "{ran:?}");
    assert_eq!(hand.ended().await, "it was killed by signal 9");
}

/// The process with the agent's name in the group of the only hand.
fn first_process_of(kit: &Kit) -> Option<i32> {
    let group = groups(kit).into_iter().next()?;
    let procs = std::fs::read_to_string(group.join("cgroup.procs")).ok()?;
    procs.lines().filter_map(|pid| pid.parse().ok()).find(|pid| {
        std::fs::read_to_string(format!("/proc/{pid}/status"))
            .is_ok_and(|text| text.lines().any(|line| line.starts_with("NSpid:") && line.ends_with("\t1")))
    })
}

#[tokio::test]
async fn a_hand_that_cannot_start_tells_why() {
    if !possible() {
        return;
    }
    let kit = Kit::with(|options| options.hand_binary = "/bin/false".into()).await;
    let error = kit.hands.boot(kit.spec(&LimitsAsked::default())).await.unwrap_err();
    assert_eq!(error.to_string(), "the sandbox ended while it started: it exited with status 1");
    assert_eq!(groups(&kit), Vec::<std::path::PathBuf>::new());
}

#[tokio::test]
async fn what_is_left_of_an_earlier_runner_is_swept_and_a_neighbour_is_not_touched() {
    if !possible() || !testkit::have(testkit::Need::Cgroup) {
        return;
    }
    let kit = Kit::new().await;
    let neighbour = Kit::new().await;
    let other = neighbour.boot().await;
    let hand = kit.boot().await;
    let before = groups(&kit);
    assert!(!before.is_empty());
    // A second runner on the same state directory, as after a crash: what it finds is nobody's.
    let _again =
        hands::Hands::new(hands::HandsOptions::new(testkit::binary("hand"), kit.state.path())).await.unwrap();
    assert_eq!(groups(&kit), Vec::<std::path::PathBuf>::new());
    assert!(!hand.ended().await.is_empty());
    assert_eq!(run(&other, &["echo", "alive"]).await.ok(), "alive\n");
}

#[tokio::test]
async fn hands_boot_side_by_side() {
    if !possible() {
        return;
    }
    let kit = Kit::new().await;
    for _ in 0..10 {
        let (a, b) = tokio::join!(kit.boot(), kit.boot());
        run(&a, &["true"]).await.ok();
        run(&b, &["true"]).await.ok();
        tokio::join!(a.stop(), b.stop());
    }
}

#[tokio::test]
async fn doctor_tries_everything_and_leaves_nothing() {
    if !possible() {
        return;
    }
    let kit = Kit::new().await;
    let checks = kit.hands.probe().await;
    let state =
        |name: &str| checks.iter().find(|check| check.name == name).unwrap_or_else(|| panic!("{name}")).state;
    for name in ["tier sandbox", "bubblewrap", "namespaces", "seccomp"] {
        assert_eq!(state(name), proto::http::DoctorState::Works, "{checks:#?}");
    }
    // What does not work says what to do about it.
    assert!(
        checks.iter().all(|check| check.fix.is_some() == (check.state != proto::http::DoctorState::Works)),
        "{checks:#?}"
    );
    assert_eq!(std::fs::read_dir(kit.state.path()).unwrap().count(), 0);
    let caps = kit.hands.caps();
    assert_eq!(caps.memory_by.is_some(), state("limit memory") == proto::http::DoctorState::Works);

    let broken = Kit::with(|options| options.hand_binary = "/nowhere/hand".into()).await;
    let checks = broken.hands.probe().await;
    assert_eq!(checks[0].state, proto::http::DoctorState::Broken);
    assert!(checks[0].detail.contains("/nowhere/hand does not exist"), "{:?}", checks[0]);
}
