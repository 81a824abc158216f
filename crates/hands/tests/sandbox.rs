//! Real hands in real sandboxes: what they see, what limits them, how they end.

mod kit;

use kit::{Kit, possible, run, sh};
use proto::verify::{LimitsAsked, Outcome};

#[tokio::test]
async fn a_hand_boots_proves_its_confinement_and_runs_commands() {
    if !possible() {
        return;
    }
    let kit = Kit::new().await;
    let hand = kit.boot().await;
    assert_eq!(run(&hand, &["echo", "hello"]).await.ok(), "hello\n");
    let seen = sh(&hand, "id -u; id -g; hostname; pwd; echo $HOME; touch here && ls; cat /etc/hostname").await.ok();
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
    let asked =
        LimitsAsked { cpu_milli: Some(1000), memory_bytes_max: Some(256 << 20), pids_max: Some(50), ..Default::default() };
    let hand = kit.boot_with(&asked).await;
    let seen = sh(&hand, "nproc; grep -c ^processor /proc/cpuinfo; head -1 /proc/meminfo; cat /sys/fs/cgroup/memory.max").await;
    assert_eq!(seen.ok(), "1\n1\nMemTotal:         262144 kB\n268435456\n");
}
