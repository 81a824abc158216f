//! Pairs of programs, one harmless and one malicious, in a hand: the harmless one lives, the malicious one does no harm to
//! the host or to the hand. Every tier runs the same pairs.

mod bare;
mod bombs;
mod filesystem;
mod host;
mod kernel;
mod probe;
mod proc;
mod processes;
mod sandbox;
mod sockets;

use bare::Bare;
use host::Host;
use probe::{Probe, Size, run_beside, run_controls, run_each, run_group};
use sandbox::Sandbox;

/// Every group, by name.
const GROUPS: &[(&str, &[Probe])] = &[
    ("filesystem", filesystem::PROBES),
    ("proc", proc::PROBES),
    ("environment", proc::ENVIRONMENT),
    ("processes", processes::PROBES),
    ("terminal", processes::TERMINAL),
    ("namespaces", kernel::NAMESPACES),
    ("powers", kernel::POWERS),
    ("sockets", sockets::PROBES),
    ("bombs", bombs::PROBES),
    ("neighbours", bombs::NEIGHBOURS),
    ("shared", bombs::SHARED),
];

/// The fewest pairs that the sandbox tier must stand.
const PROBES_MIN: usize = 60;

/// One hand for the whole group.
fn in_one_hand(probes: &[Probe]) {
    if sandbox::possible() {
        let host = Host::new();
        run_group(&Sandbox::new(&host), &host, Size::Usual, probes);
    }
}

#[test]
fn files_of_the_host_are_out_of_reach() {
    in_one_hand(filesystem::PROBES);
}

#[test]
fn proc_and_sys_tell_little_and_change_nothing() {
    in_one_hand(proc::PROBES);
}

#[test]
fn the_runners_environment_does_not_leak() {
    let name = "the_runners_environment_does_not_leak";
    if testkit::process::variable("TENDON_PROBE_PLANTED").is_some() {
        return in_one_hand(proc::ENVIRONMENT);
    }
    if sandbox::possible() {
        // The same test once more, in a process whose environment holds the secret.
        let own = std::env::current_exe().expect("a test knows its own path");
        let mut again = testkit::process::command(own);
        again.args(["--exact", name, "--nocapture"]).env("TENDON_PROBE_PLANTED", host::secret());
        let output = testkit::process::run(&mut again);
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
    }
}

#[test]
fn processes_can_neither_trace_nor_signal_nor_outlive() {
    in_one_hand(processes::PROBES);
}

#[test]
fn terminals_take_no_input_from_the_code() {
    in_one_hand(processes::TERMINAL);
}

#[test]
fn namespaces_and_mounts_can_not_be_made() {
    in_one_hand(kernel::NAMESPACES);
}

#[test]
fn the_kernels_powers_are_closed() {
    in_one_hand(kernel::POWERS);
}

#[test]
fn networks_and_sockets_of_the_host_are_out_of_reach() {
    in_one_hand(sockets::PROBES);
}

#[test]
fn bombs_hit_their_own_hand_only() {
    if sandbox::possible() {
        let host = Host::new();
        run_each(&Sandbox::new(&host), &host, Size::Small, bombs::PROBES);
    }
}

#[test]
fn a_hand_takes_nothing_from_its_neighbours() {
    if sandbox::possible() {
        let host = Host::new();
        let tier = Sandbox::new(&host);
        run_beside(&tier, &tier, &host, bombs::NEIGHBOURS);
    }
}

#[test]
fn what_hands_share_is_not_the_hosts() {
    if sandbox::possible() {
        let host = Host::new();
        run_beside(&Sandbox::new(&host), &Bare, &host, bombs::SHARED);
    }
}

#[test]
fn unconfined_the_malicious_programs_do_harm() {
    if testkit::have_all(&[testkit::Need::Root, testkit::Need::Python]) {
        let host = Host::new();
        GROUPS.iter().for_each(|(_, probes)| run_controls(&Bare, &host, probes));
    }
}

#[test]
fn there_are_enough_probes_and_each_has_its_own_name() {
    let names: Vec<_> = GROUPS
        .iter()
        .flat_map(|(group, probes)| probes.iter().map(move |probe| (group, probe.name)))
        .collect();
    let unique: std::collections::BTreeSet<_> = names.iter().collect();
    assert!(names.len() >= PROBES_MIN, "{}", names.len());
    assert_eq!(names.len(), unique.len());
}
