//! What policy decides from: limits and what hands get to see. Read by `engine::config` from files that the operator owns.

use serde::{Deserialize, Serialize};

/// The part of the runner's configuration that policy owns.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Limits of a command for which the caller asks nothing else.
    pub limits: LimitsConfig,
    /// The most that a caller may ask for; 0: no bound.
    pub limits_max: MaxConfig,
    /// What a hand is made of.
    pub hand: HandConfig,
}

/// Default limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LimitsConfig {
    /// CPUs, in thousandths; 0: all that the host has.
    pub cpu_milli: u32,
    /// Memory of all processes of a hand, their tmpfs files included; 0: three quarters of the host's.
    pub memory_bytes_max: u64,
    /// Processes and threads of a hand.
    pub pids_max: u32,
    /// Bytes that the commands may add to the branch.
    pub disk_bytes_max: u64,
    /// Wall time of one command.
    pub wall_ms_max: u64,
}

impl Default for LimitsConfig {
    fn default() -> Self {
        LimitsConfig {
            cpu_milli: 0,
            memory_bytes_max: 0,
            pids_max: 4096,
            disk_bytes_max: 20 << 30,
            wall_ms_max: 60 * 60 * 1000,
        }
    }
}

/// Upper bounds of what a caller may ask for; 0: no bound.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are those of LimitsConfig")]
pub struct MaxConfig {
    pub cpu_milli: u32,
    pub memory_bytes_max: u64,
    pub pids_max: u32,
    pub disk_bytes_max: u64,
    pub wall_ms_max: u64,
}

/// What hands are made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HandConfig {
    /// The host's user id that code runs as when the runner is root. It must own nothing.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// What is copied from the host's `/etc`, read-only: names, the last part with `*`. Files that not everybody may read are left out.
    pub etc: Vec<String>,
    /// More of the host to show, read-only, at the same path.
    pub read_only: Vec<String>,
    /// Whether toolchains and package caches of the runner's home are found and shown.
    pub toolchains: bool,
    /// Variables of the runner's environment that commands get, too.
    pub env_pass: Vec<String>,
    /// Protections that may be missing on this host: `landlock`. Reports name them as degraded, and so a Landlock that is too old
    /// to enforce all that is asked of it, which may be in any case.
    pub tolerate: Vec<String>,
    /// Size of each private tmpfs (`/tmp`, home, package caches), which counts as memory; 0: half of the memory limit.
    pub tmp_bytes_max: u64,
}

impl Default for HandConfig {
    fn default() -> Self {
        HandConfig {
            uid: 60600,
            gid: 60600,
            etc: ETC.iter().map(|name| (*name).to_owned()).collect(),
            read_only: Vec::new(),
            toolchains: true,
            env_pass: Vec::new(),
            tolerate: vec!["landlock".into()],
            tmp_bytes_max: 0,
        }
    }
}

/// What programs need of `/etc` to start, find shared libraries, check certificates and name time zones and types.
const ETC: &[&str] = &[
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "ssl/certs",
    "ssl/openssl.cnf",
    "ca-certificates",
    "ca-certificates.conf",
    "pki/tls/certs",
    "alternatives",
    "localtime",
    "timezone",
    "os-release",
    "debian_version",
    "mime.types",
    "magic",
    "protocols",
    "services",
    "locale.alias",
    "fonts",
    "python3*",
    "java*",
    ".java",
    "perl",
    "terminfo",
    "inputrc",
    "profile",
    "bash.bashrc",
    "login.defs",
    "shells",
];
