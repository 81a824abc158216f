//! What an exec of `true` costs, beside `posix_spawn` of it by a plain process, in the same run. Prints; asserts only what
//! would be a defect on any machine.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test: it starts the hand, and panics when something is off"
)]

mod kit;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kit::{Kit, argv, run};
use proto::verify::Outcome;

fn p50(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

/// std uses posix_spawn here: no directory, no user, no hook is set.
fn spawn_true() -> Duration {
    let since = Instant::now();
    let mut child = Command::new("/bin/true")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    assert!(child.wait().unwrap().success());
    since.elapsed()
}

#[tokio::test]
async fn exec_of_true_beside_posix_spawn() {
    let kit = Kit::new().await;
    let (mut ours, mut plain) = (Vec::new(), Vec::new());
    for _ in 0..500 {
        plain.push(spawn_true());
        let since = Instant::now();
        let ran = run(kit.exec(argv(&["/bin/true"])).await).await;
        ours.push(since.elapsed());
        assert_eq!(ran.outcome, Outcome::Exited { code: 0 });
    }
    let (ours, plain) = (p50(ours), p50(plain));
    let ratio = ours.as_secs_f64() / plain.as_secs_f64();
    println!(
        "exec true p50 {ours:?}, posix_spawn p50 {plain:?}, ratio {ratio:.2}; hand {} KiB",
        kit.rss_kb()
    );
    assert!(ratio < 30.0, "{ratio}");
}
