//! The kernel's interfaces in /proc and /sys, and what they tell of others.

use crate::probe::{Control::*, Expect::*, Probe, Script::*};

pub const PROBES: &[Probe] = &[
    Probe {
        name: "/proc/sys",
        why: "settings of the kernel are the whole machine's",
        harmless: Py(
            r#"must(int(read("/proc/sys/kernel/pid_max")) > 100); must(read("/proc/sys/kernel/ostype") == b"Linux\n")"#,
        ),
        malicious: Py(r#"
import glob
for path in ("kernel/core_pattern", "kernel/modprobe", "kernel/hostname", "kernel/domainname", "kernel/panic", "kernel/sysrq", "kernel/yama/ptrace_scope", "kernel/kptr_restrict",
             "kernel/printk", "kernel/randomize_va_space", "kernel/unprivileged_bpf_disabled", "kernel/threads-max", "kernel/keys/maxkeys",
             "vm/overcommit_memory", "vm/drop_caches", "vm/panic_on_oom", "fs/suid_dumpable", "fs/binfmt_misc/register", "fs/file-max", "fs/inotify/max_user_watches",
             "user/max_user_namespaces"):
    attempt(f"open {path} for writing", lambda: os.close(os.open("/proc/sys/" + path, os.O_WRONLY)) is None)
def any_writable():
    for directory, _, names in os.walk("/proc/sys"):
        for name in names:
            try:
                os.close(os.open(os.path.join(directory, name), os.O_WRONLY))
                yield os.path.join(directory, name)
            except OSError:
                pass
# These are the hand's own IPC, network and process id namespaces'.
own = ("/proc/sys/kernel/msg", "/proc/sys/kernel/shm", "/proc/sys/kernel/sem", "/proc/sys/kernel/auto_msgmni", "/proc/sys/kernel/ns_last_pid", "/proc/sys/kernel/pid_max", "/proc/sys/fs/mqueue/", "/proc/sys/net/")
attempt("find any setting of the machine that can be written", lambda: [path for path in any_writable() if not path.startswith(own)])
attempt("change a setting of the machine's network", lambda: [path for path in any_writable() if path.startswith("/proc/sys/net/core/") and not path.endswith(("somaxconn", "txrehash"))])
attempt("choose the next process id", lambda: write("/proc/sys/kernel/ns_last_pid", b"1000"))
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "/proc files of the kernel",
        why: "sysrq, memory, symbols and logs of the kernel",
        harmless: Py(
            r#"must(b"MemTotal" in read("/proc/meminfo")); must(read("/proc/cpuinfo")); must(read("/proc/version")); must(float(read("/proc/uptime").split()[0]) > 0)"#,
        ),
        malicious: Py(r#"
for path in ("sysrq-trigger", "kcore", "kmsg", "kpagecount", "kpageflags", "kpagecgroup", "mtrr", "acpi/wakeup", "bus/pci/00", "scsi/scsi", "irq/0/smp_affinity", "timer_list", "sched_debug", "keys", "key-users",
             "latency_stats", "slabinfo", "vmallocinfo", "config.gz.none", "fs/ext4", "asound", "driver/rtc"):
    attempt(f"read {path}", lambda: os.read(os.open("/proc/" + path, os.O_RDONLY | os.O_NONBLOCK), 64) if path not in ("bus/pci/00", "fs/ext4", "asound") else os.listdir("/proc/" + path))
    attempt(f"open {path} for writing", lambda: os.close(os.open("/proc/" + path, os.O_WRONLY)) is None)
def addresses():
    for line in read("/proc/kallsyms", 1 << 16).decode().splitlines():
        if int(line.split()[0], 16):
            yield line
attempt("addresses of the kernel", lambda: list(addresses())[:2])
attempt("syslog", lambda: call("syslog", 3, ctypes.byref(buffer()), 4096))
attempt("syslog's size", lambda: call("syslog", 10, None, 0))
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "/sys",
        why: "devices and settings of the machine",
        harmless: Py(r#"must(os.cpu_count() >= 1); must(os.sched_getaffinity(0))"#),
        malicious: Py(r#"
for path in ("/sys/kernel/debug", "/sys/kernel/tracing", "/sys/kernel/security", "/sys/fs/bpf", "/sys/fs/pstore", "/sys/firmware", "/sys/module", "/sys/block", "/sys/class/net", "/sys/kernel/config", "/sys/fs/selinux"):
    attempt(f"list {path}", lambda: os.listdir(path))
for path in ("/sys/power/state", "/sys/kernel/mm/ksm/run", "/sys/kernel/uevent_helper", "/sys/class/net/lo/mtu", "/sys/devices/system/cpu/cpu1/online", "/sys/kernel/profiling"):
    attempt(f"open {path} for writing", lambda: os.close(os.open(path, os.O_WRONLY)) is None)
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "processes of others",
        why: "code sees no process outside its hand",
        harmless: Py(r#"
process = subprocess.Popen(["sleep", "30"]); must(str(process.pid) in os.listdir("/proc")); process.kill(); must(process.wait() == -9)
"#),
        malicious: Py(r#"
names = [name for name in os.listdir("/proc") if name.isdigit()]
attempt("see many processes", lambda: len(names) > 12 and names)
def foreign():
    for name in names:
        try:
            command = read(f"/proc/{name}/cmdline").replace(b"\0", b" ")
        except OSError:
            continue
        if name != str(os.getpid()) and any(word in command for word in (b"tendond", b"systemd", b"init ", b"sshd", b"cargo", b"probes", b"bwrap")):
            yield name, command
attempt("see a process of the host", lambda: list(foreign()))
attempt("see the host's process", lambda: read(f"/proc/{env('VICTIM')}/cmdline"))
attempt("walk all ids", lambda: [pid for pid in range(1, 65536) if pid != os.getpid() and str(pid) not in names and os.path.exists(f"/proc/{pid}/stat") and str(pid) not in os.listdir(f"/proc/self/task")])
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "PID 1's secrets",
        why: "the hand holds the channel to the runner: no one in it may open, read or trace that process",
        harmless: Py(
            r#"must(lines("/proc/self/status")["Pid"].strip() == str(os.getpid())); must(read("/proc/1/stat").startswith(b"1 ")); must(os.readlink("/proc/self/cwd"))"#,
        ),
        malicious: Py(r#"
for pid in ("1", str(os.getppid())):
    for name in ("environ", "mem", "maps", "auxv", "fd/0", "fd/3", "fd/4", "fdinfo/3", "stack", "syscall", "io", "pagemap", "smaps", "timers", "personality", "mountstats"):
        attempt(f"read /proc/{pid}/{name}", lambda: os.open(f"/proc/{pid}/{name}", os.O_RDONLY) and f"opened {name}")
    for name in ("fd", "map_files", "task/1/fd", "fdinfo"):
        attempt(f"list /proc/{pid}/{name}", lambda: os.listdir(f"/proc/{pid}/{name}"))
    for name in ("exe", "root", "cwd", "fd/3", "ns/mnt", "ns/net", "ns/user"):
        attempt(f"follow /proc/{pid}/{name}", lambda: os.readlink(f"/proc/{pid}/{name}"))
        attempt(f"open /proc/{pid}/{name}", lambda: os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
    for name in ("mem", "oom_score_adj", "comm", "clear_refs", "coredump_filter", "uid_map", "gid_map", "setgroups", "loginuid", "autogroup", "sched", "cwd/x"):
        attempt(f"open /proc/{pid}/{name} for writing", lambda: os.close(os.open(f"/proc/{pid}/{name}", os.O_WRONLY)) is None)
attempt("timer slack of PID 1", lambda: write("/proc/1/timerslack_ns", b"1000000000"))
attempt("the security attributes of PID 1", lambda: write("/proc/1/attr/current", b"unconfined"))
attempt("take the channel by pidfd_getfd", lambda: call("pidfd_getfd", os.pidfd_open(1), 3, 0))
attempt("connect to the channel by /proc", lambda: os.open("/proc/1/fd/3", os.O_RDWR))
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "maps of ids",
        why: "a user namespace's maps decide who one is",
        harmless: Py(
            r#"must(len(read("/proc/self/uid_map").split()) == 3); must(os.getuid() == int(read("/proc/self/uid_map").split()[0]))"#,
        ),
        malicious: Py(r#"
for name in ("uid_map", "gid_map"):
    attempt(f"write {name}", lambda: write(f"/proc/self/{name}", b"0 0 1"))
attempt("allow setgroups", lambda: write("/proc/self/setgroups", b"allow"))
attempt("be root inside", lambda: os.getuid() == 0 or os.geteuid() == 0 or 0 in os.getgroups())
attempt("have more ids", lambda: int(read("/proc/self/uid_map").split()[2]) > 1)
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "own limits",
        why: "a process may lower its limits, never raise them, nor its protection from the memory killer",
        harmless: Py(r#"
must(in_child(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)) is None)); must(in_child(lambda: os.nice(5) >= 5))
must(in_child(lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)) is None));
must(in_child(lambda: os.setpriority(os.PRIO_PGRP, 0, 5) is None)); must(ok("ioprio_set", 1, 0, 3 << 13))
threading.Thread(target=lambda: os.sched_setaffinity(threading.get_native_id(), os.sched_getaffinity(0))).start()
"#),
        malicious: Py(r#"
attempt("oom_score_adj below", lambda: write("/proc/self/oom_score_adj", b"-1000"))
attempt("oom_adj below", lambda: write("/proc/self/oom_adj", b"-17"))
attempt("raise the hard limit of descriptors", lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 20, 1 << 20)) is None and resource.getrlimit(resource.RLIMIT_NOFILE)[1] > 1 << 19 and resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 0)
attempt("nice below 0", lambda: os.nice(-20) < 0)
attempt("real-time scheduling", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)) is None)
for pid in (1, 1 + (1 << 32)):
    new = ctypes.create_string_buffer(struct.pack("QQ", 20000, 20000), 16)
    attempt(f"limits of PID {pid:x}", lambda: ok("prlimit64", pid, resource.RLIMIT_NOFILE, ctypes.byref(new), None))
    attempt(f"affinity of PID {pid:x}", lambda: ok("sched_setaffinity", pid, 8, ctypes.byref(ctypes.c_ulong(1))))
    attempt(f"policy of PID {pid:x}", lambda: ok("sched_setscheduler", pid, 0, ctypes.byref(ctypes.c_int(0))))
    attempt(f"parameters of PID {pid:x}", lambda: ok("sched_setparam", pid, ctypes.byref(ctypes.c_int(0))))
    attempt(f"attributes of PID {pid:x}", lambda: ok("sched_setattr", pid, ctypes.byref(ctypes.create_string_buffer(struct.pack("IIQiIQQQ", 48, 0, 0, 0, 0, 0, 0, 0), 48)), 0))
    attempt(f"I/O priority of PID {pid:x}", lambda: ok("ioprio_set", 1, pid, 3 << 13))
    attempt(f"priority of PID {pid:x}", lambda: ok("setpriority", 0, pid, 1))
    attempt(f"priority of group {pid:x}", lambda: ok("setpriority", 1, pid, 1))
for who in (0, os.getuid()):
    attempt(f"priority of the user ({who})", lambda: ok("setpriority", 2, who, 1))
    attempt(f"I/O priority of the user ({who})", lambda: ok("ioprio_set", 3, who, 3 << 13))
attempt("limits of the host's process", lambda: resource.prlimit(int(env("VICTIM")), resource.RLIMIT_CPU, (1, 1)))
attempt("loginuid", lambda: write("/proc/self/loginuid", b"0"))
"#),
        expect: Held,
        control: Skip,
    },
];

/// These run in a runner whose environment holds the secret.
pub const ENVIRONMENT: &[Probe] = &[
    Probe {
        name: "environment",
        why: "the runner's environment is full of tokens",
        harmless: Sh(r#"PROBE_OWN=1 sh -c 'test "$PROBE_OWN" = 1' && test -n "$PATH""#),
        malicious: Py(r#"
known = {"PATH", "HOME", "LC_CTYPE", "LANG", "USER", "LOGNAME", "SHELL", "PWD", "TMPDIR", "TERM"}
# What makes package managers work without a network.
known |= {"CARGO_NET_OFFLINE", "npm_config_offline", "npm_config_audit", "npm_config_fund", "npm_config_update_notifier", "PIP_NO_INDEX", "PIP_DISABLE_PIP_VERSION_CHECK"}
attempt("find a variable that was not given", lambda: [name for name in os.environ if name not in known and not name.startswith("PROBE_")])
for pid in [name for name in os.listdir("/proc") if name.isdigit()]:
    try:
        print(read(f"/proc/{pid}/environ", 1 << 16).replace(b"\0", b"\n").decode(errors="replace"))
    except OSError:
        pass
print(read(f"/proc/self/auxv", 4096))
attempt("find the variable", lambda: os.environ.get("TENDON_PROBE_PLANTED"))
stack = [line for line in read("/proc/self/maps", 1 << 16).decode().splitlines() if "[stack]" in line][0].split()[0]
low, high = (int(part, 16) for part in stack.split("-"))
# Spelled backwards, since this text is on the stack too.
planted = b"=DETNALP_EBORP_NODNET"[::-1]
attempt("find it on the stack", lambda: planted in os.pread(os.open("/proc/self/mem", os.O_RDONLY), high - low, low))
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "names of the host",
        why: "the host's name and user names tell where code runs",
        harmless: Py(r#"must(socket.gethostname()); must(os.uname().sysname == "Linux")"#),
        malicious: Py(r#"
import pwd
attempt("the host's name by uname", lambda: os.uname().nodename == env("HOSTNAME"))
attempt("the host's name in /proc", lambda: read("/proc/sys/kernel/hostname").strip() == env("HOSTNAME").encode())
attempt("the host's name in /etc", lambda: read("/etc/hostname").strip() == env("HOSTNAME").encode())
attempt("the host's name in /etc/hosts", lambda: env("HOSTNAME") not in ("localhost", "") and env("HOSTNAME").encode() in read("/etc/hosts").split())
attempt("set the name", lambda: ok("sethostname", c("probe"), 5))
attempt("set the domain", lambda: ok("setdomainname", c("probe"), 5))
attempt("users of the host", lambda: [entry.pw_name for entry in pwd.getpwall() if 1000 <= entry.pw_uid < 60000 and entry.pw_name != "agent"])
attempt("the host's boot arguments", lambda: b"root=" in read("/proc/cmdline") and None)
"#),
        expect: Held,
        control: Skip,
    },
];
