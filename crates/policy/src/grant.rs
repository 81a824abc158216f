//! The decision for one hand.

use std::fmt;

use proto::error::{Code, Coded};
use proto::units::{write_bytes, write_cpu_milli, write_millis};
use proto::verify::{LimitInForce, LimitsAsked, limit_word};
use serde::{Deserialize, Serialize};

use crate::Config;

/// The least that a hand can live with; less is refused, because the hand itself would be killed.
pub(crate) const MIN: Limits =
    Limits { cpu_milli: 10, memory_bytes_max: 32 << 20, pids_max: 16, disk_bytes_max: 1, wall_ms_max: 1 };

/// Linux's `PID_MAX_LIMIT`, less room for a hand's own processes: there are never more, and a control group takes no larger
/// number.
const PIDS_MOST: u64 = (4 << 20) - 4096;

/// The limits of one hand and its commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are those of LimitsAsked")]
pub struct Limits {
    pub cpu_milli: u32,
    pub memory_bytes_max: u64,
    pub pids_max: u32,
    pub disk_bytes_max: u64,
    pub wall_ms_max: u64,
}

/// What the host can enforce, as `hands` found by trying.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostCaps {
    /// CPUs that the runner may use.
    pub cpus: u32,
    /// Memory that the runner may use.
    pub memory_bytes: u64,
    /// What limits CPU time: `cgroup2`, `cgroup1`.
    pub cpu_by: Option<String>,
    /// What limits memory.
    pub memory_by: Option<String>,
    /// What limits processes.
    pub pids_by: Option<String>,
    /// Why there can be no sandbox on this host, if so, and what would help.
    pub sandbox_missing: Option<Missing>,
}

/// Something that the host lacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missing {
    /// What, and how it was found.
    pub what: String,
    /// What to install or set.
    pub fix: Option<String>,
}

/// Policy's decision for one hand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// `sandbox`.
    pub tier: String,
    /// The limits.
    pub numbers: Limits,
    /// The same, each with what enforces it, as reports show them.
    pub limits: Vec<LimitInForce>,
    /// BLAKE3 of the configuration's canonical JSON, in hex.
    pub digest: String,
}

/// Why policy says no, and what would make it say yes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Refusal {
    /// One sentence.
    pub reason: String,
    /// What would allow it.
    pub allow: Option<String>,
    /// [`Code::Refused`], or [`Code::HostBroken`] where this host can run nothing at all.
    pub code: Code,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl Coded for Refusal {
    fn code(&self) -> Code {
        self.code
    }
    fn hint(&self) -> Option<String> {
        self.allow.clone()
    }
}

impl Config {
    /// BLAKE3 of its canonical JSON (keys sorted, no spaces), in hex.
    pub fn digest(&self) -> String {
        // Maps of serde_json are sorted by key. A tree of numbers, texts and lists always serialises.
        let json = serde_json::to_value(self).map(|value| value.to_string()).unwrap_or_default();
        blake3::hash(json.as_bytes()).to_hex().to_string()
    }
}

/// Decides. What is asked for is never loosened: each limit in force is at most what was asked, and enforced.
pub fn grant(asked: &LimitsAsked, config: &Config, host: &HostCaps) -> Result<Grant, Refusal> {
    if let Some(missing) = &host.sandbox_missing {
        let reason = format!("this host has no sandbox: {}", missing.what);
        return Err(Refusal { reason, allow: missing.fix.clone(), code: Code::HostBroken });
    }
    let all_cpus = host.cpus.saturating_mul(1000);
    let default_cpu = if config.limits.cpu_milli == 0 { all_cpus } else { config.limits.cpu_milli };
    let default_memory = match config.limits.memory_bytes_max {
        0 => host.memory_bytes / 4 * 3,
        bytes => bytes,
    };
    let (most, defaults) = (&config.limits_max, &config.limits);
    // A quota is needed only below the whole machine.
    let cpu_needs = asked.cpu_milli.is_some_and(|milli| milli < all_cpus);
    let whole = || (asked.cpu_milli.is_some() && !cpu_needs).then(|| "host".to_owned());
    let cpu_by = host.cpu_by.clone().or_else(whole);
    let rules = [
        Rule::new("cpu_milli", asked.cpu_milli, default_cpu, MIN.cpu_milli, most.cpu_milli, cpu_by),
        Rule::new(
            "memory_bytes_max",
            asked.memory_bytes_max,
            default_memory,
            MIN.memory_bytes_max,
            most.memory_bytes_max,
            host.memory_by.clone(),
        ),
        Rule::new(
            "pids_max",
            asked.pids_max,
            defaults.pids_max,
            MIN.pids_max,
            most.pids_max,
            host.pids_by.clone(),
        ),
        Rule::new(
            "disk_bytes_max",
            asked.disk_bytes_max,
            defaults.disk_bytes_max,
            MIN.disk_bytes_max,
            most.disk_bytes_max,
            Some("watch".into()),
        ),
        Rule::new(
            "wall_ms_max",
            asked.wall_ms_max,
            defaults.wall_ms_max,
            MIN.wall_ms_max,
            most.wall_ms_max,
            Some("deadline".into()),
        ),
    ];
    let mut limits = rules.iter().map(Rule::decide).collect::<Result<Vec<_>, _>>()?;
    limits[0].value = limits[0].value.min(u64::from(all_cpus));
    limits[2].value = limits[2].value.min(PIDS_MOST);
    let small = |at: usize| u32::try_from(limits[at].value).unwrap_or(u32::MAX);
    let numbers = Limits {
        cpu_milli: small(0),
        memory_bytes_max: limits[1].value,
        pids_max: small(2),
        disk_bytes_max: limits[3].value,
        wall_ms_max: limits[4].value,
    };
    Ok(Grant { tier: "sandbox".into(), numbers, limits, digest: config.digest() })
}

/// One limit: what is asked, what stands in the configuration, and what the host has.
struct Rule {
    name: &'static str,
    asked: Option<u64>,
    default: u64,
    least: u64,
    most: u64,
    by: Option<String>,
}

impl Rule {
    fn new<N: Into<u64>>(
        name: &'static str,
        asked: Option<N>,
        default: N,
        least: N,
        most: N,
        by: Option<String>,
    ) -> Self {
        let asked = asked.map(Into::into);
        Rule { name, asked, default: default.into(), least: least.into(), most: most.into(), by }
    }

    /// A value as people give it.
    fn show(&self, value: u64) -> String {
        match self.name {
            "cpu_milli" => write_cpu_milli(value),
            "memory_bytes_max" | "disk_bytes_max" => write_bytes(value),
            "wall_ms_max" => write_millis(value),
            _ => value.to_string(),
        }
    }

    fn decide(&self) -> Result<LimitInForce, Refusal> {
        let Rule { name, least, most, .. } = *self;
        let word = limit_word(name);
        let refuse =
            |reason: String, allow: String| Err(Refusal { reason, allow: Some(allow), code: Code::Refused });
        if let Some(asked) = self.asked {
            let (shown, most_shown) = (self.show(asked), self.show(most));
            if asked < least {
                return refuse(
                    format!("the limit {word} = {shown} is less than the smallest, {}", self.show(least)),
                    format!("ask for {} or more, with --{word} or limits.{word} in a spec", self.show(least)),
                );
            }
            if most != 0 && asked > most {
                return refuse(
                    format!("the limit {word} = {shown} is more than the configuration allows, {most_shown}"),
                    format!(
                        "ask for {most_shown} or less, with --{word} or limits.{word} in a spec; or raise limits_max.{name} in the configuration"
                    ),
                );
            }
            if self.by.is_none() {
                return refuse(
                    format!("the limit {word} was asked for and can't be enforced on this host"),
                    format!(
                        "see what is missing with: tendon doctor; or leave out --{word}, or limits.{word} in a spec"
                    ),
                );
            }
        }
        // A bound is one for the default, too: who sets it need not set both.
        let default = if most == 0 { self.default } else { self.default.min(most) };
        // What is written somewhere is not less (see `Config::check`); a share of a tiny host may be.
        let value = self.asked.unwrap_or(default).max(least);
        Ok(LimitInForce { name: name.into(), value, enforced_by: self.by.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn host() -> HostCaps {
        let by = |text: &str| Some(text.to_owned());
        HostCaps {
            cpus: 2,
            memory_bytes: 8 << 30,
            cpu_by: by("cgroup1"),
            memory_by: by("cgroup1"),
            pids_by: by("cgroup1"),
            sandbox_missing: None,
        }
    }

    #[track_caller]
    fn check(asked: LimitsAsked, config: &Config, host: &HostCaps, want: &str) {
        let got = match grant(&asked, config, host) {
            Err(refusal) => format!("refused: {refusal}"),
            Ok(grant) => {
                let limit = |limit: &LimitInForce| {
                    format!("{}={}:{}", limit.name, limit.value, limit.enforced_by.as_deref().unwrap_or("-"))
                };
                grant.limits.iter().map(limit).collect::<Vec<_>>().join(" ")
            }
        };
        assert_eq!(got, want);
    }

    #[test]
    fn defaults() {
        check(
            LimitsAsked::default(),
            &Config::default(),
            &host(),
            "cpu_milli=2000:cgroup1 memory_bytes_max=6442450944:cgroup1 pids_max=4096:cgroup1 \
             disk_bytes_max=21474836480:watch wall_ms_max=3600000:deadline",
        );
    }

    #[test]
    fn a_default_that_cannot_be_enforced_is_named_and_one_asked_for_is_refused() {
        let host = HostCaps { cpu_by: None, memory_by: None, pids_by: None, ..host() };
        check(
            LimitsAsked::default(),
            &Config::default(),
            &host,
            "cpu_milli=2000:- memory_bytes_max=6442450944:- pids_max=4096:- disk_bytes_max=21474836480:watch \
             wall_ms_max=3600000:deadline",
        );
        let refused = |asked, word| {
            check(
                asked,
                &Config::default(),
                &host,
                &format!("refused: the limit {word} was asked for and can't be enforced on this host"),
            );
        };
        refused(LimitsAsked { cpu_milli: Some(1000), ..Default::default() }, "cpus");
        refused(LimitsAsked { memory_bytes_max: Some(1 << 30), ..Default::default() }, "memory");
        refused(LimitsAsked { pids_max: Some(100), ..Default::default() }, "pids");
    }

    #[test]
    fn bounds() {
        let config = Config {
            limits_max: crate::config::MaxConfig { pids_max: 100, ..Default::default() },
            ..Config::default()
        };
        check(
            LimitsAsked { pids_max: Some(101), ..Default::default() },
            &config,
            &host(),
            "refused: the limit pids = 101 is more than the configuration allows, 100",
        );
        check(
            LimitsAsked { memory_bytes_max: Some(1024), ..Default::default() },
            &config,
            &host(),
            "refused: the limit memory = 1KiB is less than the smallest, 32MiB",
        );
        let granted = grant(&LimitsAsked::default(), &config, &host()).unwrap();
        assert_eq!(granted.numbers.pids_max, 100, "a default never passes the bound");
    }

    #[test]
    fn a_refused_limit_is_named_and_written_as_people_give_it() {
        let config = Config {
            limits_max: crate::config::MaxConfig {
                cpu_milli: 1500,
                memory_bytes_max: 1 << 30,
                pids_max: 100,
                disk_bytes_max: 1 << 20,
                wall_ms_max: 60_000,
            },
            ..Config::default()
        };
        let many = u64::from(u32::MAX);
        for (asked, reason, allow) in [
            (
                LimitsAsked { cpu_milli: Some(1), ..Default::default() },
                "cpus = 0.001",
                "0.01 or more, with --cpus or limits.cpus",
            ),
            (
                LimitsAsked { cpu_milli: Some(2000), ..Default::default() },
                "cpus = 2",
                "1.5 or less, with --cpus",
            ),
            (
                LimitsAsked { memory_bytes_max: Some(1), ..Default::default() },
                "memory = 1B",
                "32MiB or more, with --memory",
            ),
            (
                LimitsAsked { memory_bytes_max: Some(2 << 30), ..Default::default() },
                "memory = 2GiB",
                "1GiB or less",
            ),
            (LimitsAsked { pids_max: Some(0), ..Default::default() }, "pids = 0", "16 or more, with --pids"),
            (
                LimitsAsked { disk_bytes_max: Some(0), ..Default::default() },
                "disk = 0B",
                "1B or more, with --disk",
            ),
            (
                LimitsAsked { disk_bytes_max: Some(many), ..Default::default() },
                "disk = 4294967295B",
                "1MiB or less",
            ),
            (
                LimitsAsked { wall_ms_max: Some(0), ..Default::default() },
                "timeout = 0ms",
                "1ms or more, with --timeout",
            ),
            (LimitsAsked { wall_ms_max: Some(90_000), ..Default::default() }, "timeout = 90s", "1m or less"),
        ] {
            let refusal = grant(&asked, &config, &host()).unwrap_err();
            assert!(refusal.reason.starts_with(&format!("the limit {reason} is ")), "{}", refusal.reason);
            assert!(refusal.hint().unwrap().starts_with(&format!("ask for {allow}")), "{:?}", refusal.allow);
        }
    }

    #[test]
    fn more_processes_than_there_can_be_are_as_many_as_there_can_be() {
        let asked = LimitsAsked { pids_max: Some(u32::MAX), ..Default::default() };
        assert_eq!(grant(&asked, &Config::default(), &host()).unwrap().numbers.pids_max, (4 << 20) - 4096);
    }

    #[test]
    fn no_sandbox_no_grant() {
        let missing =
            Missing { what: "bwrap is not installed".into(), fix: Some("apt-get install bubblewrap".into()) };
        let host = HostCaps { sandbox_missing: Some(missing), ..host() };
        let refusal = grant(&LimitsAsked::default(), &Config::default(), &host).unwrap_err();
        assert_eq!(refusal.to_string(), "this host has no sandbox: bwrap is not installed");
        assert_eq!(refusal.hint().as_deref(), Some("apt-get install bubblewrap"));
        assert_eq!(refusal.code(), Code::HostBroken);
    }

    #[test]
    fn the_digest_follows_the_configuration() {
        let mut config = Config::default();
        let before = config.digest();
        assert_eq!(before, Config::default().digest());
        config.hand.read_only.push("/opt".into());
        assert_ne!(before, config.digest());
    }

    #[test]
    fn unknown_keys_are_refused() {
        let error = serde_json::from_str::<Config>(r#"{"limits": {"pids_mx": 1}}"#).unwrap_err().to_string();
        assert!(error.contains("pids_mx") && error.contains("pids_max"), "{error}");
    }

    fn asked() -> impl Strategy<Value = LimitsAsked> {
        (
            proptest::option::of(0..u32::MAX),
            proptest::option::of(0..u64::MAX),
            proptest::option::of(0..u32::MAX),
            proptest::option::of(0..u64::MAX),
            proptest::option::of(0..u64::MAX),
        )
            .prop_map(|(cpu_milli, memory_bytes_max, pids_max, disk_bytes_max, wall_ms_max)| {
                LimitsAsked { cpu_milli, memory_bytes_max, pids_max, disk_bytes_max, wall_ms_max }
            })
    }

    proptest! {
        #[test]
        fn what_is_asked_is_never_loosened(
            asked in asked(), cpus in 1u32..256, memory in 0u64..1 << 45,
            by in proptest::collection::vec(proptest::option::of("cgroup2"), 3),
        ) {
            let host = HostCaps {
                cpus, memory_bytes: memory, cpu_by: by[0].clone(), memory_by: by[1].clone(), pids_by: by[2].clone(),
                sandbox_missing: None,
            };
            let Ok(grant) = grant(&asked, &Config::default(), &host) else { return Ok(()) };
            let wanted = [
                asked.cpu_milli.map(u64::from), asked.memory_bytes_max, asked.pids_max.map(u64::from),
                asked.disk_bytes_max, asked.wall_ms_max,
            ];
            for (limit, wanted) in grant.limits.iter().zip(wanted) {
                if let Some(wanted) = wanted {
                    prop_assert!(limit.value <= wanted, "{limit:?} {wanted}");
                    prop_assert!(limit.enforced_by.is_some(), "{limit:?}");
                }
            }
        }
    }
}
