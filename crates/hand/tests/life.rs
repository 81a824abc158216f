//! A hand's life: boot, death, silence, files, self-test.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test: it starts the hand, and panics when something is off"
)]

mod kit;

use std::time::{Duration, Instant};

use hands::link::LinkError;
use kit::{Kit, argv, ends_within, run, start};
use proto::hand::BootConfig;
use proto::verify::Outcome;
use rustix::process::{Pid, Signal, kill_process};

fn signal(kit: &Kit, signal: Signal) {
    kill_process(Pid::from_raw(kit.pid()).unwrap(), signal).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_idle_hand_is_small() {
    let kit = Kit::new().await;
    kit.sh("true").await;
    println!("idle: {} KiB", kit.rss_kb());
    assert!(kit.rss_kb() < 8192, "{} KiB", kit.rss_kb());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_dead_hand_is_known_at_once() {
    let kit = Kit::new().await;
    let exec = kit.exec(argv(&["sleep", "3"])).await;
    let since = Instant::now();
    signal(&kit, Signal::KILL);
    let outcome = run(exec).await.outcome;
    assert!(since.elapsed() < Duration::from_secs(1), "{:?}", since.elapsed());
    assert!(
        matches!(&outcome, Outcome::HandLost { reason } if reason.contains("its channel closed")),
        "{outcome:?}"
    );
    assert!(kit.link().lost().is_some());
    let error = kit.link().exec(kit::id(), argv(&["true"])).await.unwrap_err();
    assert!(
        matches!(&error, LinkError::Lost { reason } if reason.contains("its channel closed")),
        "{error:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_stuck_hand_is_known_within_seconds() {
    let kit = Kit::new().await;
    let exec = kit.exec(argv(&["sleep", "60"])).await;
    let since = Instant::now();
    signal(&kit, Signal::STOP);
    let outcome = run(exec).await.outcome;
    let took = since.elapsed();
    signal(&kit, Signal::CONT);
    assert!(
        matches!(&outcome, Outcome::HandLost { reason } if reason.contains("did not answer for 5 s")),
        "{outcome:?}"
    );
    assert!(took < Duration::from_millis(7800), "{took:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_hand_ends_with_its_channel() {
    let mut kit = Kit::new().await;
    let exec = kit.exec(argv(&["sleep", "60"])).await;
    drop(exec);
    kit.link = None;
    assert!(kit.ends_within(Duration::from_secs(3)));
}

#[test]
fn a_bad_configuration_is_refused() {
    let mut config = BootConfig::new("/");
    config.version = 99;
    for bad in [
        &config.to_json().unwrap()[..],
        b"",
        b"{}",
        &BootConfig::new("/no/such").to_json().unwrap(),
        &BootConfig::new("tmp").to_json().unwrap(),
    ] {
        let (mut child, _channel) = start(bad);
        assert!(ends_within(&mut child, Duration::from_secs(5)));
        assert_eq!(child.wait().unwrap().code(), Some(4));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn files_go_in_and_out() {
    let kit = Kit::new().await;
    let link = kit.link();
    let content: Vec<u8> = (0..1_000_000u32).map(|n| (n % 251) as u8).collect();
    assert_eq!(link.put(b"a/b/c.bin", 0o755, content.clone().into()).await.unwrap(), 1_000_000);
    let file = link.get(b"a/b/c.bin", 0).await.unwrap();
    assert!(file.bytes == content && file.size == 1_000_000 && file.mode == 0o755);
    assert_eq!(link.get(b"a/b/c.bin", 10).await.unwrap().bytes, content[..10]);
    assert_eq!(link.put(b"empty\n\xff", 0, Vec::new().into()).await.unwrap(), 0);
    assert_eq!(link.get(b"empty\n\xff", 0).await.unwrap().bytes, b"");
    assert!(matches!(link.get(b"missing", 0).await, Err(LinkError::NotFound { .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn no_file_leads_out() {
    let kit = Kit::with(|config| config.file_bytes_max = 1000).await;
    kit.sh("ln -s /etc out; ln -s /etc/passwd link; ln -s /proc/self/root magic; mkfifo fifo; mkdir dir; ln -s dir in").await;
    let link = kit.link();
    for path in ["out/passwd", "link", "magic/etc/passwd", "fifo", "dir", "../x", "/etc/passwd", "", "dir/"] {
        assert!(link.get(path.as_bytes(), 0).await.is_err(), "get {path}");
    }
    for path in ["out/x", "../x", "/tmp/x", "", "dir/", "magic/tmp/x"] {
        assert!(link.put(path.as_bytes(), 0, "x".into()).await.is_err(), "put {path}");
    }
    // A link at the end is replaced, not followed; one that stays inside may be on the way.
    assert_eq!(link.put(b"link", 0, "mine".into()).await.unwrap(), 4);
    assert_eq!(link.put(b"in/x", 0, "mine".into()).await.unwrap(), 4);
    assert_eq!(std::fs::read(kit.dir.path().join("link")).unwrap(), b"mine");
    let error = link.put(b"big", 0, vec![0; 1001].into()).await.unwrap_err();
    assert_eq!(error.to_string(), "the file is larger than 1000 bytes");
    let left = std::fs::read_dir(kit.dir.path()).unwrap().flatten();
    assert!(left.into_iter().all(|entry| !entry.file_name().to_string_lossy().starts_with(".tendon")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_self_test_tells_what_confines() {
    let kit = Kit::with(|config| config.denied_paths = vec!["/etc/passwd".into(), "/no/such".into()]).await;
    let findings = kit.link().self_test().await.unwrap();
    let value = |name: &str| findings.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str());
    assert_eq!(value("landlock"), Some("off (no path was given)"));
    assert_eq!(value("path./etc/passwd"), Some("open"));
    assert_eq!(value("path./no/such"), Some("closed (no such file or directory)"));
    assert_eq!(value("no_new_privs"), Some("0"));
    for name in [
        "pid",
        "uid",
        "caps.effective",
        "seccomp",
        "ns.net",
        "net.interfaces",
        "net.metadata",
        "syscall.keyctl",
    ] {
        assert!(value(name).is_some_and(|value| !value.is_empty()), "{name}");
    }
    println!("{findings:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn landlock_is_applied_and_inherited() {
    if !testkit::have(testkit::Need::Landlock) {
        return;
    }
    let kit = Kit::with(|config| {
        config.write_paths = vec![config.work_dir.clone(), "/dev".into(), "/no/such".into()];
        config.read_paths = ["/usr", "/bin", "/lib", "/lib64", "/proc"].map(String::from).to_vec();
        config.denied_paths = vec!["/etc/passwd".into()];
    })
    .await;
    let findings = kit.link().self_test().await.unwrap();
    let landlock = &findings.iter().find(|(name, _)| name == "landlock").unwrap().1;
    assert!(landlock.contains("enforced"), "{landlock}");
    assert!(findings.contains(&("path./etc/passwd".into(), "closed (permission denied)".into())));
    let ran =
        kit.sh("cat /etc/passwd; echo x > /usr/x; echo y > mine; cat mine; cat /dev/null && echo null").await;
    assert_eq!(ran.text(), "y\nnull");
    // Its own processes can still be killed.
    let ran =
        run(kit.exec(hands::link::ExecSpec { wall_ms_max: Some(200), ..argv(&["sleep", "60"]) }).await).await;
    assert_eq!(ran.outcome, Outcome::TimedOut { wall_ms_max: 200 });
}
