//! `kill -9` of the runner at random moments of a mixed workload: nothing of it stays on the machine, and nothing that it
//! acknowledged is lost.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use heavy::acks::lost;
use heavy::leftovers::{adopt_orphans, cgroup_prefixes, cgroups, descendants, mounts_below, reap};
use heavy::random::Random;
use heavy::tendon::Tendon;
use heavy::workload::Workload;
use testkit::process::wait_until;
use testkit::{Need, have, have_all, temp_dir};

/// How often the runner is killed; `HEAVY_KILLS` raises it.
const KILLS: usize = 15;
/// The latest moment of a kill, after the workload's start.
const MOMENT_MS_MAX: usize = 2500;
/// The latest moment of the kill of a start.
const START_MS_MAX: usize = 300;
/// How long what a dead runner leaves may take to vanish.
const VANISH_MAX: Duration = Duration::from_secs(10);

#[test]
fn a_killed_runner_leaves_nothing_and_loses_nothing() {
    if !have_all(&[Need::Bwrap, Need::Git]) {
        return;
    }
    adopt_orphans();
    let seed = Random::seed();
    let mut random = Random::new(seed);
    let dir = temp_dir("killed");
    let state = dir.path().join("state");
    let tendon = Tendon::new(&state);
    let mut runner = tendon.start_runner();
    let workload = Workload::new(&tendon, &dir.path().join("repo"), seed);
    // A first command, to see which control groups are this runner's: others may run on this machine.
    tendon.text(&["branch", "exec", "executed", "--", "sh", "-c", "sleep 300 & exit 0"]);
    let groups = cgroup_prefixes();
    assert!(!groups.is_empty() || !have(Need::Cgroup), "the hand is in no control group");
    for round in 0..heavy::count("HEAVY_KILLS", KILLS) {
        let moment = Duration::from_millis(random.below(MOMENT_MS_MAX) as u64);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| workload.run(Duration::from_secs(60), &stop, &|| 0));
            std::thread::sleep(moment);
            runner.kill();
            stop.store(true, Ordering::Relaxed);
        });
        let context = format!("seed {seed}, round {round}, killed after {moment:?}");
        vanished(&context, &state, &groups);
        // Putting things in order may be cut short as well.
        let start = Duration::from_millis(random.below(START_MS_MAX) as u64);
        tendon.start_and_kill(start);
        let context = format!("{context}, and the next start after {start:?}");
        vanished(&context, &state, &groups);
        runner = tendon.start_runner();
        let lost = lost(&tendon, &workload.acks.until(0));
        assert!(lost.is_empty(), "{context}:\n{}\n--- the runner's log\n{}", lost.join("\n"), runner.log());
    }
    assert!(
        workload.acks.len() > 20,
        "the workload did next to nothing: {} acknowledgements",
        workload.acks.len()
    );
    runner.kill();
    vanished("at the end", &state, &groups);
}

/// Waits until nothing of the runner is left; panics with what is.
fn vanished(context: &str, state: &std::path::Path, groups: &BTreeSet<String>) {
    let left = || {
        reap();
        let processes = descendants().into_iter().map(|process| format!("process {process:?}"));
        let groups = cgroups(groups).into_iter().map(|group| format!("control group {}", group.display()));
        let mounts = mounts_below(state).into_iter().map(|mount| format!("mount {mount}"));
        processes.chain(groups).chain(mounts).collect::<Vec<_>>()
    };
    let start = std::time::Instant::now();
    while start.elapsed() < VANISH_MAX && !left().is_empty() {
        std::thread::sleep(Duration::from_millis(20));
    }
    let left = left();
    assert!(left.is_empty(), "{context}: left after {VANISH_MAX:?}:\n{}", left.join("\n"));
}

#[test]
fn a_leftover_is_seen() {
    adopt_orphans();
    // A grandchild whose parent is gone: only the adoption keeps it below this process.
    let status = testkit::process::command("sh").args(["-c", "setsid sleep 321 & exit 0"]).status();
    assert!(status.is_ok_and(|status| status.success()));
    let seen = || descendants().iter().find(|process| process.what == "sleep 321").map(|process| process.pid);
    wait_until("the orphan is seen", Duration::from_secs(5), || seen().is_some());
    let pid = seen().and_then(|pid| rustix::process::Pid::from_raw(pid as i32)).expect("a process id");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("kill");
    wait_until("the orphan is gone", Duration::from_secs(5), || seen().is_none());
}
