//! Commands in a real hand: outcomes, streams, terminals, killing.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test: it starts the hand, and panics when something is off"
)]

mod kit;

use std::time::{Duration, Instant};

use bytes::Bytes;
use hands::link::{ExecEvent, ExecSpec, Size, Stdin};
use kit::{Kit, Ran, argv, id, lives, run, sh, until};
use proto::hand::{EnvVar, Start};
use proto::verify::Outcome;

/// Runs a command that is given some bytes to read.
async fn fed(kit: &Kit, spec: ExecSpec, bytes: Bytes) -> Ran {
    let mut exec = kit.exec(ExecSpec { stdin: Stdin::Piped, ..spec }).await;
    let stdin = exec.take_stdin().unwrap();
    let feeder = tokio::spawn(async move { stdin.write(bytes).await });
    let ran = run(exec).await;
    let _ = feeder.await;
    ran
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_command_ends_with_its_status() {
    let kit = Kit::new().await;
    for code in [0, 1, 42, 255] {
        let ran = kit.sh(&format!("echo out; echo err >&2; exit {code}")).await;
        assert_eq!(ran.outcome, Outcome::Exited { code });
        assert_eq!((&ran.stdout[..], &ran.stderr[..], ran.lingering), (&b"out\n"[..], &b"err\n"[..], false));
    }
    assert_eq!(kit.sh("kill -SEGV $$").await.outcome, Outcome::Signalled { signal: 11 });
    assert_eq!(run(kit.exec(argv(&["true"])).await).await.outcome, Outcome::Exited { code: 0 });
    // Descriptors of the hand don't leak, signals are at their defaults, the parent is no stranger.
    assert_eq!(kit.sh("ls /proc/self/fd | wc -l").await.text(), "4");
    let masks = kit.sh("grep -E 'Sig(Blk|Ign)' /proc/self/status").await.text();
    assert_eq!(masks, "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000");
    assert_eq!(kit.sh("cat /proc/self/oom_score_adj").await.text(), "1000");
    assert_eq!(kit.sh("umask").await.text(), "0022");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn cpu_and_wall_time_are_told() {
    let kit = Kit::new().await;
    let ran = kit.sh("i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; sleep 0.2").await;
    assert!(ran.cpu_ms >= 20 && ran.wall_ms >= 200 && ran.wall_ms >= ran.cpu_ms, "{ran:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn ten_megabytes_go_through_cat() {
    let kit = Kit::new().await;
    let sent: Vec<u8> = (0..10_000_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let ran = fed(&kit, argv(&["cat"]), sent.clone().into()).await;
    assert_eq!(ran.outcome, Outcome::Exited { code: 0 });
    assert!(ran.stdout == sent, "{} bytes came back", ran.stdout.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn piped_stdin_ends_when_it_is_closed() {
    let kit = Kit::new().await;
    let mut exec = kit.exec(ExecSpec { stdin: Stdin::Piped, ..argv(&["cat"]) }).await;
    let stdin = exec.take_stdin().unwrap();
    assert!(stdin.write("one\n".into()).await);
    assert_eq!(exec.next_event().await.unwrap(), ExecEvent::Output { fd: 1, bytes: "one\n".into() });
    assert!(stdin.write("two\n".into()).await);
    drop(stdin);
    assert_eq!(run(exec).await.stdout, b"two\n");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn stdin_waits_for_the_command() {
    let kit = Kit::new().await;
    kit.sh("true").await;
    let before = kit.rss_kb();
    let mut exec = kit.exec(ExecSpec { stdin: Stdin::Piped, ..argv(&["sleep", "60"]) }).await;
    let stdin = exec.take_stdin().unwrap();
    let mut sent = 0u64;
    while tokio::time::timeout(Duration::from_millis(500), stdin.write(vec![7; 65_536].into())).await
        == Ok(true)
    {
        sent += 65_536;
        assert!(sent < 4 << 20, "nobody reads, and still more is taken");
    }
    assert!(kit.rss_kb() < before + 2048, "{} → {} KiB", before, kit.rss_kb());
    // A signal does not wait behind what is not read.
    assert!(exec.signal(15).await.unwrap());
    assert_eq!(run(exec).await.outcome, Outcome::Signalled { signal: 15 });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_command_that_closes_its_stdin_does_not_block_the_sender() {
    let kit = Kit::new().await;
    let ran = fed(&kit, sh("exec <&-; sleep 0.3; echo done"), vec![1; 3_000_000].into()).await;
    assert_eq!(ran.text(), "done");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_slow_reader_makes_the_command_wait() {
    let kit = Kit::new().await;
    kit.sh("true").await;
    let before = kit.rss_kb();
    let mut exec = kit.exec(sh("head -c 50000000 /dev/zero; echo end >&2")).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let (mut total, mut events, mut most) = (0, 0, 0);
    let mut stderr = Vec::new();
    while let Some(event) = exec.next_event().await {
        match event {
            ExecEvent::Output { fd: 1, bytes } => total += bytes.len(),
            ExecEvent::Output { bytes, .. } => stderr.extend_from_slice(&bytes),
            ExecEvent::Ended { outcome, .. } => assert_eq!(outcome, Outcome::Exited { code: 0 }),
        }
        events += 1;
        if events % 64 == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
            most = most.max(kit.rss_kb());
        }
    }
    assert_eq!((total, &stderr[..]), (50_000_000, &b"end\n"[..]));
    assert!(most < before + 2048, "the hand grew from {before} to {most} KiB");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_reader_that_stops_holds_up_nobody_else() {
    let kit = Kit::new().await;
    let mut stuck = Vec::new();
    for _ in 0..20 {
        stuck.push(kit.exec(argv(&["cat", "/dev/zero"])).await);
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(kit.sh("echo hello").await.text(), "hello");
    assert_eq!(kit.link().ping().await.unwrap().execs.len(), 20);
    assert!(kit.rss_kb() < 20_000, "{} KiB", kit.rss_kb());
    // The time limit holds although nobody reads.
    let mut exec = kit.exec(ExecSpec { wall_ms_max: Some(300), ..argv(&["cat", "/dev/zero"]) }).await;
    tokio::time::sleep(Duration::from_millis(700)).await;
    let commands = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", kit.pid())).unwrap();
    assert_eq!(commands.split_ascii_whitespace().count(), 20, "its supervisor is gone");
    while let Some(event) = exec.next_event().await {
        if let ExecEvent::Ended { outcome, .. } = event {
            assert_eq!(outcome, Outcome::TimedOut { wall_ms_max: 300 });
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn arguments_and_environment_may_be_any_bytes() {
    let kit = Kit::new().await;
    let start = Start {
        exec: id().to_string(),
        argv: vec![
            "sh".into(),
            "-c".into(),
            "printf '%s|%s' \"$1\" \"$V\"; env | wc -l".into(),
            "sh".into(),
            b"\xff\n\xfe"[..].into(),
        ],
        env: vec![EnvVar { name: "V".into(), value: b"\x80\x81"[..].into() }],
        ..Start::default()
    };
    let ran = run(kit.link().exec_start((start, Stdin::Null)).await.unwrap()).await;
    // The shell adds PWD by itself; nothing else is inherited.
    assert_eq!(ran.stdout, b"\xff\n\xfe|\x80\x812\n", "{ran:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_can_not_start_says_why() {
    let kit = Kit::new().await;
    let reason = async |spec| {
        let outcome = run(kit.exec(spec).await).await.outcome;
        let Outcome::NotStarted { reason, .. } = outcome else { panic!("{outcome:?}") };
        reason
    };
    assert_eq!(
        reason(argv(&["frobnicate"])).await,
        "`frobnicate` was not found in the sandbox: searched /usr/local/bin:/usr/bin:/bin; `hand.read_only` of tendon's \
         configuration shows more of the host"
    );
    assert_eq!(reason(argv(&[])).await, "the command is empty");
    assert_eq!(reason(argv(&["./missing"])).await, "`./missing` was not found in the sandbox");
    let missing = reason(argv(&["/opt/missing/tool"])).await;
    assert!(
        missing.starts_with("`/opt/missing/tool` was not found in the sandbox; `hand.read_only`"),
        "{missing}"
    );
    let there = reason(ExecSpec { cwd: Some(b"nowhere".to_vec()), ..argv(&["true"]) }).await;
    assert!(there.contains("nowhere can't be entered: No such file"), "{there}");
    std::fs::write(kit.dir.path().join("data"), "x").unwrap();
    assert!(reason(argv(&["./data"])).await.contains("can't be executed: Permission denied"));
    kit.sh("printf '#!/no/such\\n' > script; printf junk > junk; chmod +x script junk").await;
    assert!(reason(argv(&["./script"])).await.contains("the interpreter that it names"));
    assert!(reason(argv(&["./junk"])).await.contains("neither a program"));
    let long = "x".repeat(200_000);
    assert!(reason(argv(&["true", &long])).await.contains("Argument list too long"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_command_starts_in_its_directory() {
    let kit = Kit::new().await;
    std::fs::create_dir(kit.dir.path().join("sub")).unwrap();
    let root = kit.dir.path().to_str().unwrap();
    assert_eq!(kit.sh("pwd").await.text(), root);
    let ran = run(kit.exec(ExecSpec { cwd: Some(b"sub".to_vec()), ..sh("pwd") }).await).await;
    assert_eq!(ran.text(), format!("{root}/sub"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_terminal_has_a_size_and_can_be_resized() {
    let kit = Kit::new().await;
    let line = "tty >/dev/null && echo tty; stty size; read x; stty size; echo got $x; exec sleep 60";
    let spec = ExecSpec { pty: Some(Size { rows: 30, cols: 100 }), stdin: Stdin::Piped, ..sh(line) };
    let mut exec = kit.exec(spec).await;
    let stdin = exec.take_stdin().unwrap();
    let mut seen = String::new();
    let mut resized = false;
    loop {
        match tokio::time::timeout(Duration::from_millis(100), exec.next_event()).await {
            Ok(Some(ExecEvent::Output { bytes, .. })) => seen.push_str(&String::from_utf8_lossy(&bytes)),
            Ok(Some(ExecEvent::Ended { outcome, .. })) => {
                assert_eq!(outcome, Outcome::Signalled { signal: 2 }, "{seen}");
                break;
            }
            Ok(None) => panic!("no end: {seen}"),
            // Ctrl-C, as a terminal means it. Again, since the shell catches it until `sleep` has taken its place.
            Err(_) if seen.contains("got hello") => assert!(stdin.write("\x03".into()).await),
            Err(_) => {}
        }
        if !resized && seen.contains("30 100") {
            resized = true;
            assert!(exec.resize(Size { rows: 50, cols: 132 }).await.unwrap());
            assert!(stdin.write("hello\n".into()).await);
        }
    }
    assert!(seen.starts_with("tty\r\n30 100\r\n") && seen.contains("50 132"), "{seen}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn closing_stdin_of_a_terminal_is_its_end_of_file() {
    let kit = Kit::new().await;
    let spec = ExecSpec { pty: Some(Size { rows: 24, cols: 80 }), ..sh("stty -echo; cat; echo over") };
    let text = fed(&kit, spec, "hi\n".into()).await.text();
    assert!(text.ends_with("over"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn two_hundred_at_once() {
    let kit = Kit::new().await;
    let mut tasks = Vec::new();
    for n in 0..200 {
        let link = kit.link().clone();
        tasks.push(tokio::spawn(async move {
            let exec = link.exec(id(), sh(&format!("echo {n}; sleep 0.2; exit {}", n % 7))).await.unwrap();
            (n, run(exec).await)
        }));
    }
    for task in tasks {
        let (n, ran) = task.await.unwrap();
        assert_eq!((ran.text(), ran.outcome), (n.to_string(), Outcome::Exited { code: n % 7 }));
    }
    let status = kit.link().ping().await.unwrap();
    assert_eq!((status.execs.len(), status.lingering), (0, 0));
    println!("after 200 at once: {} KiB", kit.rss_kb());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_id_can_not_run_twice_at_once() {
    let kit = Kit::new().await;
    let id = id();
    let exec = kit.link().exec(id.clone(), argv(&["sleep", "60"])).await.unwrap();
    let error = kit.link().exec(id.clone(), argv(&["true"])).await.unwrap_err();
    assert_eq!(error.to_string(), "an exec of this id runs");
    drop(exec);
}

/// A line that leaves a process in every way there is, each writing its id to a file.
const RUNAWAYS: &str = "
    setsid sh -c 'echo $$ > p1; exec sleep 60' &
    sh -c '(setsid sh -c \"echo \\$\\$ > p2; exec sleep 60\" &) &'
    nohup sh -c 'trap \"\" TERM INT HUP; echo $$ > p3; while :; do sleep 1; done' >/dev/null 2>&1 &
    (exec </dev/null >/dev/null 2>&1; setsid setsid sh -c 'echo $$ > p4; exec sleep 60' &)
    while [ ! -s p1 ] || [ ! -s p2 ] || [ ! -s p3 ] || [ ! -s p4 ]; do sleep 0.01; done
";

fn runaways(kit: &Kit) -> Vec<i32> {
    let read = |name| std::fs::read_to_string(kit.dir.path().join(name)).ok()?.trim().parse().ok();
    ["p1", "p2", "p3", "p4"].into_iter().filter_map(read).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_timeout_kills_what_ran_away() {
    let kit = Kit::new().await;
    let since = Instant::now();
    let spec = ExecSpec { wall_ms_max: Some(1500), ..sh(&format!("{RUNAWAYS}\necho ready; sleep 60")) };
    let ran = run(kit.exec(spec).await).await;
    assert_eq!((ran.text().as_str(), ran.outcome), ("ready", Outcome::TimedOut { wall_ms_max: 1500 }));
    assert!(!ran.lingering && since.elapsed() < Duration::from_secs(3));
    let pids = runaways(&kit);
    assert_eq!(pids.len(), 4);
    assert!(pids.iter().all(|pid| !lives(*pid)), "killed when the end is told, not later");
    assert_eq!(kit.sh("echo fine").await.text(), "fine");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_fork_storm_is_killed() {
    let kit = Kit::new().await;
    let line = "f() { while :; do (sleep 5 & exec sleep 5) & sleep 0.005; done; }; f & f & f & wait";
    let ran = run(kit.exec(ExecSpec { wall_ms_max: Some(700), ..sh(line) }).await).await;
    assert_eq!((ran.outcome, ran.lingering), (Outcome::TimedOut { wall_ms_max: 700 }, false));
    let status = kit.link().ping().await.unwrap();
    assert_eq!((status.execs.len(), status.lingering), (0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn cancel_kills_and_says_so() {
    let kit = Kit::new().await;
    let mut exec = kit.exec(sh(&format!("{RUNAWAYS}\necho ready; sleep 60"))).await;
    assert!(matches!(exec.next_event().await, Some(ExecEvent::Output { .. })));
    let control = exec.control();
    assert!(control.cancel().await.unwrap());
    assert_eq!(run(exec).await.outcome, Outcome::Cancelled);
    assert!(runaways(&kit).iter().all(|pid| !lives(*pid)));
    assert!(!control.cancel().await.unwrap(), "it is over");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn dropping_the_exec_kills_it() {
    let kit = Kit::new().await;
    let mut exec = kit.exec(sh(&format!("{RUNAWAYS}\necho ready; sleep 60"))).await;
    assert!(matches!(exec.next_event().await, Some(ExecEvent::Output { .. })));
    let pids = runaways(&kit);
    assert!(pids.len() == 4 && pids.iter().all(|pid| lives(*pid)));
    drop(exec);
    until("the kill", || pids.iter().all(|pid| !lives(*pid))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn background_processes_live_on_and_are_counted() {
    let kit = Kit::new().await;
    let since = Instant::now();
    // It holds stdout open: the exec ends nevertheless.
    let ran = kit.sh("sleep 60 & echo started").await;
    assert_eq!((ran.text().as_str(), ran.outcome), ("started", Outcome::Exited { code: 0 }));
    assert!(ran.lingering && since.elapsed() < Duration::from_millis(1500), "{:?}", since.elapsed());
    // It writes for ever, and lives on although nobody hears it.
    assert!(kit.sh("cat /dev/zero & sleep 0.1").await.lingering);
    tokio::time::sleep(Duration::from_millis(200)).await;
    let status = kit.link().ping().await.unwrap();
    assert_eq!((status.execs.len(), status.lingering), (0, 2));
    assert_eq!(kit.link().kill_all().await.unwrap(), 2);
    until_idle(&kit).await;
}

async fn until_idle(kit: &Kit) {
    for _ in 0..200 {
        if kit.link().ping().await.unwrap().lingering == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("something lingers");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn kill_all_ends_what_runs() {
    let kit = Kit::new().await;
    let one = kit.exec(argv(&["sleep", "60"])).await;
    let two = kit.exec(sh("setsid sleep 60 & wait")).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(kit.link().kill_all().await.unwrap(), 2);
    assert_eq!(run(one).await.outcome, Outcome::Cancelled);
    assert_eq!(run(two).await.outcome, Outcome::Cancelled);
    assert_eq!(kit.sh("echo fine").await.text(), "fine");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn code_that_kills_its_supervisor_ends_everything() {
    let kit = Kit::new().await;
    let other = kit.exec(argv(&["sleep", "60"])).await;
    let ran = kit.sh("kill -STOP $PPID; kill -KILL $PPID; setsid sleep 60 & echo $! > p1; sleep 60").await;
    for outcome in [ran.outcome, run(other).await.outcome] {
        assert!(
            matches!(&outcome, Outcome::Killed { reason } if reason.contains("a supervisor process")),
            "{outcome:?}"
        );
    }
    assert!(runaways(&kit).iter().all(|pid| !lives(*pid)));
    assert_eq!(kit.sh("echo fine").await.text(), "fine", "the hand itself goes on");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_stopped_supervisor_does_not_save_the_command() {
    let kit = Kit::new().await;
    let spec = ExecSpec { wall_ms_max: Some(500), ..sh("kill -STOP $PPID; setsid sleep 60 & exit 0") };
    let ran = run(kit.exec(spec).await).await;
    assert_eq!((ran.outcome, ran.lingering), (Outcome::TimedOut { wall_ms_max: 500 }, false));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_supervisor_can_not_be_traced_nor_terminated() {
    let kit = Kit::new().await;
    let ran = kit.sh("kill -TERM $PPID; kill -INT $PPID; kill -HUP $PPID; kill -USR1 $PPID; stat -c %U /proc/$PPID/mem; echo fine").await;
    assert_eq!((ran.text().as_str(), ran.outcome), ("root\nfine", Outcome::Exited { code: 0 }));
}
