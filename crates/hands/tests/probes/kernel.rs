//! System calls that make, change or look into things of the kernel.

use crate::probe::{Control::*, Expect::*, Probe, Script::*};

pub const NAMESPACES: &[Probe] = &[
    Probe {
        name: "unshare",
        why: "in a namespace of one's own one has every capability, and the kernel's less tested parts",
        harmless: Py(
            r#"pid = os.fork(); pid or os._exit(7); must(os.WEXITSTATUS(os.waitpid(pid, 0)[1]) == 7)"#,
        ),
        malicious: Py(r#"
for name, flag in (("user", 0x10000000), ("mount", 0x20000), ("pid", 0x20000000), ("net", 0x40000000), ("ipc", 0x8000000), ("uts", 0x4000000), ("cgroup", 0x2000000), ("time", 0x80), ("user+mount", 0x10020000), ("user+net", 0x50000000)):
    attempt(f"unshare {name}", lambda: in_child(lambda: ok("unshare", flag)))
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "clone into a namespace",
        why: "clone and clone3 make namespaces too",
        harmless: Py(r#"
got = []
thread = threading.Thread(target=lambda: got.append(1)); thread.start(); thread.join(); must(got == [1])
must(subprocess.call(["true"]) == 0)
"#),
        malicious: Py(r#"
def clone(flags):
    pid = call("clone", flags | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return True
def clone3(flags):
    args = ctypes.create_string_buffer(struct.pack("QQQQQQQQ", flags, 0, 0, 0, signal.SIGCHLD, 0, 0, 0), 64)
    pid = call("clone3", ctypes.byref(args), 64)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return True
for name, flag in (("user", 0x10000000), ("mount", 0x20000), ("pid", 0x20000000), ("net", 0x40000000), ("ipc", 0x8000000), ("uts", 0x4000000), ("cgroup", 0x2000000), ("user+mount", 0x10020000)):
    attempt(f"clone {name}", lambda: clone(flag))
    attempt(f"clone3 {name}", lambda: clone3(flag))
attempt("clone3 into a time namespace", lambda: clone3(0x80))
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "setns",
        why: "entering another's namespaces",
        harmless: Py(r#"must(os.readlink("/proc/self/ns/net").startswith("net:"))"#),
        malicious: Py(r#"
for name in ("mnt", "net", "pid", "user", "uts", "ipc", "cgroup"):
    attempt(f"setns own {name}", lambda: in_child(lambda: ok("setns", os.open(f"/proc/self/ns/{name}", os.O_RDONLY), 0)))
    attempt(f"setns PID 1's {name}", lambda: in_child(lambda: ok("setns", os.open(f"/proc/1/ns/{name}", os.O_RDONLY), 0)))
attempt("setns by pidfd", lambda: in_child(lambda: ok("setns", os.pidfd_open(1), 0x20000)))
def parent():
    fd = os.open("/proc/self/ns/user", os.O_RDONLY)
    return fcntl.ioctl(fd, 0xb702)
attempt("the parent user namespace", parent)
attempt("the owner of a namespace", lambda: fcntl.ioctl(os.open("/proc/self/ns/net", os.O_RDONLY), 0xb701) and None)
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "mounts",
        why: "who mounts decides what paths mean",
        harmless: Py(
            r#"must(os.path.ismount("/work")); must(os.path.ismount("/proc")); must(not os.path.ismount("/work/nothing"))"#,
        ),
        malicious: Py(r#"
os.makedirs("/tmp/mnt", exist_ok=True)
for kind, source, flags, data in (("tmpfs", "none", 0, None), ("proc", "proc", 0, None), ("sysfs", "sysfs", 0, None), ("cgroup", "none", 0, c("memory")), ("cgroup2", "none", 0, None), ("devtmpfs", "dev", 0, None), ("overlay", "o", 0, c("lowerdir=/usr:/etc")),
                           (None, "/", 4096, None), (None, "/proc/1/root", 4096, None), ("ext4", "/dev/vda", 0, None), ("fuse", "fuse", 0, c("fd=0,rootmode=40000,user_id=0,group_id=0")), ("debugfs", "none", 0, None), ("bpf", "none", 0, None), (None, "none", 1 << 18, None), (None, "none", 1 << 20, None)):
    attempt(f"mount {kind} {source} {flags:x}", lambda: ok("mount", c(source), c("/tmp/mnt"), c(kind) if kind else None, flags, data))
for path in ("/proc", "/tmp", "/work", "/usr", "/dev", "/"):
    attempt(f"umount {path}", lambda: ok("umount2", c(path), 2))
attempt("pivot_root", lambda: ok("pivot_root", c("/tmp"), c("/tmp")))
attempt("chroot", lambda: ok("chroot", c("/tmp")))
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "the newer mount calls",
        why: "the same by fsopen, open_tree and move_mount",
        harmless: Py(r#"must(os.statvfs("/work").f_bsize > 0)"#),
        malicious: Py(r#"
for kind in ("tmpfs", "proc", "overlay", "cgroup2", "ext4"):
    attempt(f"fsopen {kind}", lambda: call("fsopen", c(kind), 0))
attempt("fspick", lambda: call("fspick", -100, c("/work"), 0))
attempt("open_tree", lambda: call("open_tree", -100, c("/work"), 0))
attempt("open_tree clone", lambda: call("open_tree", -100, c("/"), 1 | 0x8000))
fd = os.open("/work", os.O_PATH)
attempt("move_mount", lambda: ok("move_mount", fd, c(""), -100, c("/tmp"), 4))
attempt("fsmount", lambda: call("fsmount", fd, 0, 0))
"#),
        expect: Held,
        control: Harms,
    },
];

pub const POWERS: &[Probe] = &[
    Probe {
        name: "capabilities",
        why: "none, in any set, the bounding set included",
        harmless: Py(r#"must("CapEff" in lines("/proc/self/status")); must(call("getpid") == os.getpid())"#),
        malicious: Py(r#"
status = lines("/proc/self/status")
for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
    attempt(name, lambda: int(status[name], 16) and status[name])
header = ctypes.create_string_buffer(struct.pack("II", 0x20080522, 0), 8)
attempt("capset", lambda: ok("capset", ctypes.byref(header), ctypes.byref(ctypes.create_string_buffer(struct.pack("IIIIII", 1 << 21, 1 << 21, 0, 0, 0, 0), 24))))
PR_CAP_AMBIENT, PR_CAPBSET_READ, PR_SET_SECUREBITS = 47, 23, 28
attempt("ambient capability", lambda: libc.prctl(PR_CAP_AMBIENT, 2, 21, 0, 0) == 0)
attempt("bounding set", lambda: [cap for cap in range(41) if libc.prctl(PR_CAPBSET_READ, cap, 0, 0, 0) == 1])
attempt("securebits", lambda: libc.prctl(PR_SET_SECUREBITS, 0x2f, 0, 0, 0) == 0)
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "other ids",
        why: "no other user or group can be taken",
        harmless: Py(
            r#"os.setuid(os.getuid()); os.setgid(os.getgid()); must(os.getresuid() == (os.getuid(),) * 3)"#,
        ),
        malicious: Py(r#"
for uid in (0, 1, 999, 65534, 60600):
    if uid != os.getuid():
        for name in ("setuid", "setgid", "setegid", "seteuid"):
            attempt(f"{name} {uid}", lambda: in_child(lambda: getattr(os, name)(uid) is None))
        attempt(f"setgroups {uid}", lambda: in_child(lambda: os.setgroups([uid]) is None))
        open("/tmp/owned", "w").close()
        attempt(f"chown to {uid}", lambda: os.chown("/tmp/owned", uid, -1) is None)
        attempt(f"chgrp to {uid}", lambda: os.chown("/tmp/owned", -1, uid) is None)
attempt("setfsuid", lambda: (libc.setfsuid(0), libc.setfsuid(-1))[1] == 0)
attempt("KEEPCAPS helps", lambda: in_child(lambda: libc.prctl(8, 1, 0, 0, 0) == 0 and os.setuid(0) is None))
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "own restrictions",
        why: "no_new_privs and the filter stay; a process may only add to them",
        harmless: Py(r#"
must(libc.prctl(39, 0, 0, 0, 0) == 1, "no_new_privs")
def tighten():
    program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7fff0000), 8)
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 1, ctypes.addressof(program)), 16)
    return libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(head)), 0, 0) == 0
must(in_child(tighten), "a further filter")
"#),
        malicious: Py(r#"
status = lines("/proc/self/status")
attempt("unset no_new_privs", lambda: libc.prctl(38, 0, 0, 0, 0) == 0)
attempt("be without no_new_privs", lambda: status["NoNewPrivs"].strip() != "1")
attempt("be without a filter", lambda: status["Seccomp"].strip() != "2")
attempt("leave the filter", lambda: libc.prctl(22, 0, 0, 0, 0) == 0)
def listener():
    program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7fff0000), 8)
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 1, ctypes.addressof(program)), 16)
    return call("seccomp", 1, 8, ctypes.byref(head))
attempt("a filter with a listener", lambda: in_child(lambda: listener() and True))
attempt("suspend the filter", lambda: ok("ptrace", 0x4206, os.getppid(), None, 1 << 21))
def allow_all():
    program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7fff0000), 8)
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 1, ctypes.addressof(program)), 16)
    must(libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(head)), 0, 0) == 0)
    return ok("unshare", 0x10000000)
attempt("a filter that allows all loosens nothing", lambda: in_child(allow_all))
attempt("dumpable by force", lambda: libc.prctl(4, 2, 0, 0, 0) == 0)
attempt("memory layout", lambda: libc.prctl(35, 13, ctypes.c_void_p(0), 0, 0) == 0)
attempt("another's reaper", lambda: os.getppid() == 0)
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "the other system call tables",
        why: "a filter that forgets the 32-bit and x32 tables filters nothing",
        harmless: Py(r#"must(call("getpid") == os.getpid())"#),
        malicious: Py(r#"
x86 = platform.machine() == "x86_64"
attempt("x32 getpid", lambda: x86 and in_child(lambda: libc.syscall(ctypes.c_long(0x40000000 + 39)) > 0))
attempt("x32 unshare", lambda: x86 and in_child(lambda: libc.syscall(ctypes.c_long(0x40000000 + 272), ctypes.c_long(0x10000000)) == 0))
def int80(number, argument):
    """mov eax, number; mov ebx, argument; int 0x80; ret, with rbx kept."""
    code = b"\x53\xb8" + struct.pack("<I", number) + b"\xbb" + struct.pack("<I", argument) + b"\xcd\x80\x5b\xc3"
    area = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    area[: len(code)] = code
    function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(area)))
    return function()
if x86:
    attempt("int 0x80 unshare", lambda: in_child(lambda: int80(310, 0x10000000) == 0))
    attempt("int 0x80 getpid", lambda: in_child(lambda: int80(20, 0) > 0))
    attempt("int 0x80 ptrace", lambda: in_child(lambda: int80(26, 0) == 0))
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "the machine's state",
        why: "power, clocks, swap, quotas, accounting",
        harmless: Py(r#"must(time.time() > 1e9); must(time.clock_gettime(time.CLOCK_BOOTTIME) > 0)"#),
        malicious: Py(r#"
attempt("reboot (of the pid namespace)", lambda: ok("reboot", 0xfee1dead - (1 << 32), 672274793, 0x89abcdef - (1 << 32), None))
attempt("reboot (power off)", lambda: ok("reboot", 0xfee1dead - (1 << 32), 672274793, 0x4321fedc, None))
now = ctypes.create_string_buffer(struct.pack("qq", int(time.time()), 0), 16)
attempt("settimeofday", lambda: ok("settimeofday", ctypes.byref(now), None))
attempt("clock_settime", lambda: ok("clock_settime", 0, ctypes.byref(now)))
attempt("adjtimex", lambda: ok("adjtimex", ctypes.byref(ctypes.create_string_buffer(struct.pack("I", 1), 208))))
open("/tmp/swap", "wb").write(bytes(65536))
attempt("swapon", lambda: ok("swapon", c("/tmp/swap"), 0))
attempt("swapoff", lambda: ok("swapoff", c("/tmp/swap")))
attempt("quotactl", lambda: ok("quotactl", 0x800001 << 8, None, 0, None))
attempt("acct", lambda: ok("acct", c("/tmp/swap")))
attempt("iopl", lambda: ok("iopl", 3))
attempt("ioperm", lambda: ok("ioperm", 0x80, 1, 1))
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "loading code into the kernel",
        why: "modules, kexec, bpf",
        harmless: Py(r#"
code = b"\xb8\x07\0\0\0\xc3" if platform.machine() == "x86_64" else b"\xe0\0\x80\x52\xc0\x03\x5f\xd6"
area = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC); area[: len(code)] = code
must(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(area)))() == 7)
"#),
        malicious: Py(r#"
attempt("init_module", lambda: ok("init_module", ctypes.byref(buffer()), 4096, c("")))
attempt("finit_module", lambda: ok("finit_module", os.open("/usr/bin/env", os.O_RDONLY), c(""), 0))
attempt("delete_module", lambda: ok("delete_module", c("probe_none"), 0))
attempt("kexec_load", lambda: ok("kexec_load", 0, 0, None, 0))
attempt("kexec_file_load", lambda: ok("kexec_file_load", -1, -1, 0, c(""), 0))
attempt("bpf map", lambda: call("bpf", 0, ctypes.byref(ctypes.create_string_buffer(struct.pack("IIIII", 1, 4, 4, 1, 0), 72)), 72))
instructions = ctypes.create_string_buffer(struct.pack("<BBhi", 0xb7, 0, 0, 0) + struct.pack("<BBhi", 0x95, 0, 0, 0), 16)
licence = c("GPL")
program = ctypes.create_string_buffer(struct.pack("IIQQ", 1, 2, ctypes.addressof(instructions), ctypes.cast(licence, ctypes.c_void_p).value), 128)
attempt("bpf program", lambda: call("bpf", 5, ctypes.byref(program), 128))
def old_filter():
    one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.setsockopt(socket.SOL_SOCKET, 50, struct.pack("i", 3))
    return True
attempt("attach a bpf program", old_filter)
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "userfaultfd",
        why: "stopping the kernel in the middle of a copy makes its races winnable",
        harmless: Py(r#"area = mmap.mmap(-1, 1 << 20); area[0] = 1; area.madvise(mmap.MADV_DONTNEED)"#),
        malicious: Py(r#"
for flags in (0, 1, os.O_CLOEXEC):
    attempt(f"userfaultfd {flags}", lambda: call("userfaultfd", flags))
attempt("/dev/userfaultfd", lambda: os.open("/dev/userfaultfd", os.O_RDWR))
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "perf_event_open",
        why: "measuring others, and a large part of the kernel",
        harmless: Py(
            r#"must(time.process_time() >= 0); must(resource.getrusage(resource.RUSAGE_SELF).ru_utime >= 0)"#,
        ),
        malicious: Py(r#"
for kind, config in ((1, 0), (0, 0), (1, 9), (2, 1)):
    attributes = ctypes.create_string_buffer(struct.pack("IIQ", kind, 112, config), 112)
    for pid, cpu in ((0, -1), (-1, 0)):
        attempt(f"perf event {kind}:{config} of {pid} on {cpu}", lambda: call("perf_event_open", ctypes.byref(attributes), pid, cpu, -1, 0))
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "io_uring",
        why: "requests by io_uring pass no filter",
        harmless: Py(r#"
import select
read_end, write_end = os.pipe(); poll = select.epoll(); poll.register(read_end, select.EPOLLIN); os.write(write_end, b"x"); must(poll.poll(1))
"#),
        malicious: Py(r#"
for entries in (1, 8):
    attempt(f"io_uring_setup {entries}", lambda: call("io_uring_setup", entries, ctypes.byref(buffer(120))))
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "personality",
        why: "old personalities loosen the memory layout",
        harmless: Py(
            r#"must(call("personality", 0xffffffff) == 0); must(in_child(lambda: ok("personality", 0x40000)))"#,
        ),
        malicious: Py(r#"
for name, value in (("READ_IMPLIES_EXEC", 0x400000), ("MMAP_PAGE_ZERO", 0x100000), ("ADDR_COMPAT_LAYOUT", 0x200000), ("PER_LINUX32", 8), ("PER_BSD", 6), ("SVR4 with page zero", 0x100001)):
    attempt(name, lambda: in_child(lambda: ok("personality", value)))
attempt("map page zero", lambda: in_child(lambda: ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)(("mmap", libc))(0, 4096, 3, 0x32, -1, 0) in (None, 0)))
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "keyrings",
        why: "keyrings are not in a namespace: the host's session keyring holds its secrets",
        harmless: Py(r#"must(os.urandom(8)); must(refused(lambda: call("keyctl", 0, -3, 0)))"#),
        malicious: Py(r#"
attempt("join a session", lambda: call("keyctl", 1, c("probe")))
for name, number in (("thread", -1), ("process", -2), ("session", -3), ("user", -4), ("user session", -5)):
    attempt(f"{name} keyring", lambda: call("keyctl", 0, number, 1))
    attempt(f"read the {name} keyring", lambda: call("keyctl", 11, number, ctypes.byref(buffer()), 4096))
for name, number in (("process", -2), ("session", -3)):
    attempt(f"add a key to the {name} keyring", lambda: call("add_key", c("user"), c("probe"), c("x"), 1, number))
attempt("request a key", lambda: call("request_key", c("user"), c("tendon-probe"), None, 0))
attempt("keys of the host in /proc", lambda: read("/proc/keys"))
attempt("users of keys in /proc", lambda: read("/proc/key-users"))
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "fanotify and handles",
        why: "watching whole file systems",
        harmless: Py(r#"must(libc.inotify_init1(0) >= 0)"#),
        malicious: Py(r#"
for flags in (0, 4, 8, 0x200, 0x800):
    attempt(f"fanotify_init {flags:x}", lambda: call("fanotify_init", flags, 0))
attempt("lookup_dcookie", lambda: call("lookup_dcookie", 1, ctypes.byref(buffer()), 4096))
attempt("nfsservctl", lambda: ok("nfsservctl", 0, None, None))
attempt("uselib", lambda: ok("uselib", c("/usr/bin/env")))
attempt("modify_ldt", lambda: ok("modify_ldt", 1, ctypes.byref(buffer(16)), 16))
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "cgroup escape",
        why: "limits are only as good as the control group's walls",
        harmless: Py(r#"must(read("/proc/self/cgroup"))"#),
        malicious: Py(r#"
import glob
for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids", "/sys/fs/cgroup/unified", "/tmp/cgroup", "/cgroup", "/proc/1/root/sys/fs/cgroup"):
    for name in ("cgroup.procs", "release_agent", "notify_on_release", "memory.max", "memory.limit_in_bytes", "pids.max", "cgroup.freeze", "tasks", "cgroup.kill", "devices.allow"):
        attempt(f"open {root}/{name} for writing", lambda: os.close(os.open(f"{root}/{name}", os.O_WRONLY)) is None)
    attempt(f"make a group in {root}", lambda: os.mkdir(f"{root}/probe") is None)
os.makedirs("/tmp/cgroup", exist_ok=True)
for kind, data in (("cgroup", "memory"), ("cgroup", "rdma"), ("cgroup", "none,name=probe"), ("cgroup2", None)):
    attempt(f"mount {kind} {data}", lambda: ok("mount", c("none"), c("/tmp/cgroup"), c(kind), 0, c(data) if data else None))
attempt("see the path of the group", lambda: [line for line in read("/proc/self/cgroup").decode().splitlines() if line.split(":", 2)[2] not in ("/", "")])
attempt("clone into a group", lambda: call("clone3", ctypes.byref(ctypes.create_string_buffer(struct.pack("QQQQQQQQQQQ", 1 << 33, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0), 88)), 88))
"#),
        expect: Held,
        control: Skip,
    },
];
