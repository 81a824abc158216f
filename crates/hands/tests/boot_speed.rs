//! How long a cold boot takes beside bubblewrap running `true`, and an exec beside a plain spawn. Ratios, within one run;
//! `BOOT_SPEED_PAIRS` sets how many. The bound asserted is loose: the machine that runs the tests may be busy.

mod kit;

use std::time::{Duration, Instant};

use kit::{Kit, possible, run};
use testkit::process::{command, variable};

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cold_boot_is_a_few_times_bwrap_true() {
    if !possible() {
        return;
    }
    let pairs = variable("BOOT_SPEED_PAIRS").and_then(|text| text.parse().ok()).unwrap_or(10);
    for home in [None, variable("HOME")] {
        let kit = Kit::with(|options| options.home = home.clone().map(Into::into)).await;
        let (mut bare, mut boots, mut stops, mut plain, mut execs) = (vec![], vec![], vec![], vec![], vec![]);
        for _ in 0..pairs {
            let start = Instant::now();
            let mut bwrap = command("bwrap");
            bwrap.args(["--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true"]);
            testkit::process::run(testkit::user::as_other_user(&mut bwrap));
            bare.push(start.elapsed());
            let start = Instant::now();
            let hand = kit.boot().await;
            boots.push(start.elapsed());
            run(&hand, &["/bin/true"]).await.ok();
            let start = Instant::now();
            run(&hand, &["/bin/true"]).await.ok();
            execs.push(start.elapsed());
            let start = Instant::now();
            testkit::process::run(&mut command("/bin/true"));
            plain.push(start.elapsed());
            let start = Instant::now();
            hand.stop().await;
            stops.push(start.elapsed());
        }
        let (bare, boot, stop) = (median(bare), median(boots), median(stops));
        let (plain, exec) = (median(plain), median(execs));
        let ratio = boot.as_secs_f64() / bare.as_secs_f64();
        eprintln!(
            "toolchains {}: boot {boot:?}, bwrap true {bare:?}, ratio {ratio:.2}; stop {stop:?}; exec {exec:?}, spawn {plain:?}",
            home.is_some()
        );
        assert!(ratio < 10.0, "{ratio}");
    }
}
