//! Judging what a hand finds about its own confinement. Pure: findings in, problems out.

use crate::generated::AGENT_ID;

/// What the runner knows of itself and the host.
#[derive(Clone, Debug, Default)]
pub struct Expect {
    /// The runner's own namespaces, as `/proc/self/ns` shows them: a hand must have others.
    pub namespaces: Vec<(String, String)>,
    /// Protections that configuration lets be missing: `landlock`.
    pub tolerate: Vec<String>,
}

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Judgement {
    /// Reasons to destroy the hand.
    pub problems: Vec<String>,
    /// Protections that are missing, and may be.
    pub degraded: Vec<String>,
}

/// Namespaces that every hand has of its own.
pub const NAMESPACES: [&str; 7] = ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"];

/// Compares. A finding that is missing is a problem, too.
pub fn judge(findings: &[(String, String)], expect: &Expect) -> Judgement {
    let mut found = Judgement::default();
    let value = |name: &str| findings.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
    let mut check = |name: &str, good: &dyn Fn(&str) -> bool| {
        let value = value(name).unwrap_or("not reported");
        if !good(value) {
            found.problems.push(format!("{name} is {value}"));
        }
    };
    let id = AGENT_ID.to_string();
    for name in ["uid", "gid"] {
        check(name, &|value| value == id);
    }
    for name in ["caps.effective", "caps.permitted", "caps.bounding", "caps.ambient"] {
        check(name, &|value| !value.is_empty() && value.bytes().all(|digit| digit == b'0'));
    }
    check("pid", &|value| value == "1");
    check("no_new_privs", &|value| value == "1");
    check("seccomp", &|value| value == "2");
    check("net.interfaces", &|value| value == "lo");
    for kind in NAMESPACES {
        let name = format!("ns.{kind}");
        let own = expect.namespaces.iter().find(|(have, _)| *have == kind).map(|(_, value)| value.as_str());
        check(&name, &|value| value.starts_with(kind) && own.is_some_and(|own| own != value));
    }
    for name in ["net.metadata", "net.host", "net.dns", "syscall.mount", "syscall.bpf"] {
        check(name, &|value| value.starts_with("closed"));
    }
    for (name, value) in findings {
        let kind = name.split('.').next().unwrap_or_default();
        let problem = format!("{name} is {value}");
        let leaks = ["net", "path", "syscall"].contains(&kind) && value.starts_with("open");
        if leaks && !found.problems.contains(&problem) {
            found.problems.push(problem);
        }
    }
    let landlock = value("landlock").unwrap_or("not reported");
    let tolerated = || expect.tolerate.iter().any(|name| name == "landlock");
    if landlock.starts_with("partly enforced") || (!landlock.starts_with("enforced") && tolerated()) {
        found.degraded.push(format!("landlock: {landlock}"));
    } else if !landlock.starts_with("enforced") {
        found.problems.push(format!("landlock is {landlock}"));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Vec<(String, String)> {
        let mut findings: Vec<(String, String)> = [
            ("uid", "1000"),
            ("gid", "1000"),
            ("caps.effective", "0000000000000000"),
            ("caps.permitted", "0000000000000000"),
            ("caps.bounding", "0000000000000000"),
            ("caps.ambient", "0000000000000000"),
            ("pid", "1"),
            ("no_new_privs", "1"),
            ("seccomp", "2"),
            ("net.interfaces", "lo"),
            ("net.metadata", "closed (network is unreachable)"),
            ("net.host", "closed (network is unreachable)"),
            ("net.dns", "closed (network is unreachable)"),
            ("syscall.mount", "closed (function not implemented)"),
            ("syscall.bpf", "closed (function not implemented)"),
            ("path./root", "closed (no such file or directory)"),
            ("landlock", "enforced (abi 7)"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
        findings.extend(NAMESPACES.map(|kind| (format!("ns.{kind}"), format!("{kind}:[2]"))));
        findings
    }

    fn expect() -> Expect {
        let namespaces = NAMESPACES.map(|kind| (kind.to_owned(), format!("{kind}:[1]"))).into();
        Expect { namespaces, tolerate: Vec::new() }
    }

    #[test]
    fn a_confined_hand_has_no_problem() {
        assert_eq!(judge(&good(), &expect()), Judgement::default());
    }

    #[test]
    fn each_leak_is_a_problem() {
        for (name, value) in [
            ("uid", "0"),
            ("gid", "100"),
            ("caps.effective", "0000000000000400"),
            ("caps.bounding", ""),
            ("pid", "7"),
            ("no_new_privs", "0"),
            ("seccomp", "0"),
            ("net.interfaces", "lo eth0"),
            ("net.metadata", "open"),
            ("net.dns", "not tried"),
            ("ns.net", "net:[1]"),
            ("ns.user", "user:[1]"),
            ("syscall.bpf", "open (bad address)"),
            ("path./root", "open"),
            ("landlock", "missing (the host's kernel has none)"),
        ] {
            let mut findings = good();
            findings.iter_mut().find(|(have, _)| have == name).unwrap().1 = value.to_owned();
            let problems = judge(&findings, &expect()).problems;
            assert_eq!(problems, [format!("{name} is {value}")]);
            findings.retain(|(have, _)| have != name);
            let silent_is_fine = name.starts_with("path.");
            assert_eq!(judge(&findings, &expect()).problems.is_empty(), silent_is_fine, "{name}");
        }
    }

    #[test]
    fn a_landlock_that_knows_only_a_part_is_told() {
        let mut findings = good();
        findings.iter_mut().find(|(name, _)| name == "landlock").unwrap().1 =
            "partly enforced (abi 2)".into();
        let judgement = judge(&findings, &expect());
        assert_eq!(judgement.problems, Vec::<String>::new());
        assert_eq!(judgement.degraded, ["landlock: partly enforced (abi 2)"]);
    }

    #[test]
    fn a_missing_landlock_can_be_tolerated() {
        let mut findings = good();
        findings.retain(|(name, _)| name != "landlock");
        let expect = Expect { tolerate: vec!["landlock".into()], ..expect() };
        let judgement = judge(&findings, &expect);
        assert_eq!(
            (judgement.problems.len(), judgement.degraded),
            (0, vec!["landlock: not reported".to_owned()])
        );
    }
}
