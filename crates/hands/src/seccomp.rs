//! The seccomp allow-list, read from its data file and compiled for bubblewrap.

use std::collections::BTreeSet;
use std::env::consts::ARCH;
use std::io::Write as _;
use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SealFlags, memfd_create};
use seccompiler::{TargetArch, compile_from_json};
use serde::Deserialize;
use serde_json::{Value, json};

/// The list.
const LIST: &str = include_str!("../data/seccomp.toml");
/// What a call that is not on the list fails with.
const ENOSYS: u32 = 38;

/// Why the list can't be used.
#[derive(Debug, thiserror::Error)]
pub enum SeccompError {
    /// The data file is not what it should be.
    #[error("the list of system calls can't be read")]
    List(#[from] toml::de::Error),
    /// A name that the kernel does not know, or a machine that the compiler does not.
    #[error("the list of system calls can't be compiled")]
    Compile(#[from] seccompiler::Error),
    /// A condition without meaning.
    #[error("the rule for {syscall} has the unknown condition `{op}`")]
    Op {
        /// The call.
        syscall: String,
        /// The condition.
        op: String,
    },
    /// No memory file.
    #[error("the filter can't be stored")]
    Memfd(#[from] std::io::Error),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    group: Vec<Group>,
    rule: Vec<Rule>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(
    not(test),
    expect(dead_code, reason = "name and reason are for readers, and for the test that they exist")
)]
struct Group {
    name: String,
    reason: String,
    arch: Option<String>,
    syscalls: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(
    not(test),
    expect(dead_code, reason = "the reason is for readers, and for the test that it exists")
)]
struct Rule {
    syscall: String,
    reason: String,
    args: Vec<Arg>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Arg {
    index: u8,
    op: String,
    value: u64,
    mask: Option<u64>,
}

/// The compiled filter: what the kernel takes, as bytes.
#[derive(Clone, Debug)]
pub struct Filter {
    bytes: Vec<u8>,
}

impl Filter {
    /// Compiles the built-in list for this machine.
    pub fn compile() -> Result<Self, SeccompError> {
        Self::from_toml(LIST)
    }

    fn from_toml(text: &str) -> Result<Self, SeccompError> {
        let list: List = toml::from_str(text)?;
        let target = TargetArch::try_from(ARCH).map_err(seccompiler::Error::from)?;
        let filter = json!({ "hand": {
            "mismatch_action": { "errno": ENOSYS },
            "match_action": "allow",
            "filter": rules(&list)?,
        }});
        let mut compiled = compile_from_json(filter.to_string().as_bytes(), target)?;
        let program = compiled.remove("hand").unwrap_or_default();
        let mut bytes = Vec::with_capacity(program.len() * 8);
        for instruction in &program {
            bytes.extend_from_slice(&instruction.code.to_ne_bytes());
            bytes.extend_from_slice(&[instruction.jt, instruction.jf]);
            bytes.extend_from_slice(&instruction.k.to_ne_bytes());
        }
        Ok(Filter { bytes })
    }

    /// A sealed memory file with the program, at its start: bubblewrap reads it once.
    pub fn memfd(&self) -> Result<OwnedFd, SeccompError> {
        Ok(sealed("seccomp", &self.bytes)?)
    }
}

/// A memory file that nobody can change, with its offset at the start.
pub(crate) fn sealed(name: &str, bytes: &[u8]) -> std::io::Result<OwnedFd> {
    let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut file = std::fs::File::from(fd);
    file.write_all(bytes)?;
    rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(0))?;
    rustix::fs::fcntl_add_seals(
        &file,
        SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL,
    )?;
    Ok(file.into())
}

fn rules(list: &List) -> Result<Vec<Value>, SeccompError> {
    let mut out = Vec::new();
    let here = list.group.iter().filter(|group| group.arch.as_deref().is_none_or(|arch| arch == ARCH));
    let plain: BTreeSet<&String> = here.flat_map(|group| &group.syscalls).collect();
    out.extend(plain.iter().map(|name| json!({ "syscall": name })));
    for rule in &list.rule {
        let args =
            rule.args.iter().map(|arg| condition(&rule.syscall, arg)).collect::<Result<Vec<_>, _>>()?;
        out.push(json!({ "syscall": rule.syscall, "args": args }));
    }
    Ok(out)
}

/// All compared values have 32 bits: for each of these calls the kernel looks at the lower half only.
fn condition(syscall: &str, arg: &Arg) -> Result<Value, SeccompError> {
    let op = match (arg.op.as_str(), arg.mask) {
        ("eq", None) => json!("eq"),
        ("ne", None) => json!("ne"),
        ("masked", Some(mask)) => json!({ "masked_eq": mask }),
        (op, _) => return Err(SeccompError::Op { syscall: syscall.into(), op: op.into() }),
    };
    Ok(json!({ "index": arg.index, "type": "dword", "op": op, "val": arg.value }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn list() -> List {
        toml::from_str(LIST).unwrap()
    }

    #[test]
    fn every_rule_says_why() {
        for group in list().group {
            assert!(!group.name.is_empty() && group.reason.len() > 10, "{group:?}");
        }
        for rule in list().rule {
            assert!(rule.reason.len() > 5 && !rule.args.is_empty(), "{rule:?}");
        }
    }

    #[test]
    fn no_call_stands_twice() {
        let mut seen: HashMap<String, &str> = HashMap::new();
        let list = list();
        for group in &list.group {
            for name in &group.syscalls {
                let before = seen.insert(name.clone(), &group.name);
                assert_eq!(before, None, "{name}");
            }
        }
        // An unconditional entry would make the conditions of a rule void.
        assert!(list.rule.iter().all(|rule| !seen.contains_key(&rule.syscall)));
    }

    #[test]
    fn what_must_never_be_allowed_is_not() {
        const NEVER: &[&str] = &[
            "mount",
            "umount2",
            "pivot_root",
            "chroot",
            "move_mount",
            "open_tree",
            "fsopen",
            "fsconfig",
            "fsmount",
            "fspick",
            "mount_setattr",
            "unshare",
            "setns",
            "clone3",
            "bpf",
            "perf_event_open",
            "userfaultfd",
            "io_uring_setup",
            "io_uring_enter",
            "io_uring_register",
            "keyctl",
            "add_key",
            "request_key",
            "ptrace",
            "process_vm_readv",
            "process_vm_writev",
            "process_madvise",
            "pidfd_getfd",
            "kcmp",
            "init_module",
            "finit_module",
            "delete_module",
            "kexec_load",
            "kexec_file_load",
            "reboot",
            "swapon",
            "swapoff",
            "quotactl",
            "open_by_handle_at",
            "name_to_handle_at",
            "acct",
            "settimeofday",
            "clock_settime",
            "adjtimex",
            "clock_adjtime",
            "syslog",
            "iopl",
            "ioperm",
            "modify_ldt",
            "lookup_dcookie",
            "fanotify_init",
            "vhangup",
            "sethostname",
            "setdomainname",
            "nfsservctl",
            "migrate_pages",
            "move_pages",
            "memfd_secret",
            "io_setup",
            "io_submit",
        ];
        let list = list();
        let groups = list.group.iter().flat_map(|group| &group.syscalls);
        let all: BTreeSet<&String> = groups.chain(list.rule.iter().map(|rule| &rule.syscall)).collect();
        for name in NEVER {
            assert!(!all.contains(&(*name).to_owned()), "{name}");
        }
    }

    #[test]
    fn it_compiles_here_and_every_name_is_known() {
        let filter = Filter::compile().unwrap();
        assert!(filter.bytes.len() > 1000 && filter.bytes.len().is_multiple_of(8));
        let typo = LIST.replacen("\"read\"", "\"raed\"", 1);
        assert!(matches!(Filter::from_toml(&typo), Err(SeccompError::Compile(_))));
    }

    #[test]
    fn the_general_part_is_known_on_other_machines() {
        let mut list = list();
        list.group.retain(|group| group.arch.is_none());
        for group in &mut list.group {
            // The oldest calls that newer machines never had.
            group.syscalls.retain(|name| !["getrlimit", "setrlimit"].contains(&name.as_str()));
        }
        let filter = json!({ "hand": {
            "mismatch_action": { "errno": ENOSYS }, "match_action": "allow", "filter": rules(&list).unwrap(),
        }});
        // The x86-64 group is dropped by `rules` there.
        compile_from_json(filter.to_string().as_bytes(), TargetArch::aarch64).unwrap();
    }
}
