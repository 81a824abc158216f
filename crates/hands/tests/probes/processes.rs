//! Signals, tracing, and the life of processes.

use crate::probe::{Control::*, Expect::*, Probe, Script::*};

/// PID 1, a supervisor and this program are all that is left, shortly.
const GONE: &str = r#"
def left():
    return [read(f"/proc/{name}/stat") for name in os.listdir("/proc") if name.isdigit()]
end = time.monotonic() + 3
while len(left()) > 3 and time.monotonic() < end:
    time.sleep(0.05)
must(len(left()) <= 3, f"what it started is gone: {left()}")
"#;

pub const PROBES: &[Probe] = &[
    Probe {
        name: "ptrace",
        why: "tracing PID 1 or a supervisor is being it",
        harmless: Py(r#"
process = subprocess.Popen(["sleep", "30"]); os.kill(process.pid, signal.SIGTERM); must(process.wait() == -15)
"#),
        malicious: Py(r#"
PTRACE_TRACEME, PTRACE_ATTACH, PTRACE_SEIZE = 0, 16, 0x4206
for pid in (1, os.getppid(), int(env("VICTIM"))):
    attempt(f"attach to {pid}", lambda: ok("ptrace", PTRACE_ATTACH, pid, None, None))
    attempt(f"seize {pid}", lambda: ok("ptrace", PTRACE_SEIZE, pid, None, None))
process = subprocess.Popen(["sleep", "30"])
attempt("attach to a child", lambda: ok("ptrace", PTRACE_ATTACH, process.pid, None, None))
libc.syscall(ctypes.c_long(NR["ptrace"]), 17, process.pid, None, None)
process.kill(); process.wait()
attempt("kcmp with PID 1", lambda: ok("kcmp", os.getpid(), 1, 0, 0, 3))
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "process_vm",
        why: "reading and writing another's memory",
        harmless: Py(
            r#"area = mmap.mmap(-1, 4096); area[:2] = b"ab"; must(in_child(lambda: area[:2] == b"ab"))"#,
        ),
        malicious: Py(r#"
data = buffer(64)
vector = ctypes.create_string_buffer(struct.pack("QQ", ctypes.addressof(data), 64), 16)
for pid in (1, os.getppid()):
    for name in ("process_vm_readv", "process_vm_writev"):
        attempt(f"{name} of {pid}", lambda: ok(name, pid, ctypes.byref(vector), 1, ctypes.byref(vector), 1, 0))
    attempt(f"/proc/{pid}/mem", lambda: os.open(f"/proc/{pid}/mem", os.O_RDWR))
    attempt(f"process_madvise of {pid}", lambda: ok("process_madvise", os.pidfd_open(pid), ctypes.byref(vector), 1, 21, 0))
    attempt(f"move_pages of {pid}", lambda: ok("move_pages", pid, 1, ctypes.byref(ctypes.c_void_p(ctypes.addressof(data))), None, ctypes.byref(ctypes.c_int()), 0))
    attempt(f"migrate_pages of {pid}", lambda: ok("migrate_pages", pid, 1, ctypes.byref(ctypes.c_ulong(1)), ctypes.byref(ctypes.c_ulong(1))))
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "signals to PID 1",
        why: "the hand must not be killed, stopped or terminated from inside",
        harmless: Py(r#"
got = []
signal.signal(signal.SIGUSR1, lambda *_: got.append(1)); os.kill(os.getpid(), signal.SIGUSR1); must(got == [1])
"#),
        malicious: Py(r#"
for number in range(1, 65):
    if number in (32, 33):
        continue
    try:
        os.kill(1, number)
    except OSError:
        pass
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV):
    try:
        call("pidfd_send_signal", os.pidfd_open(1), number, None, 0)
    except OSError:
        pass
time.sleep(0.2)
state = read("/proc/1/stat").rsplit(b") ", 1)[1][:1]
attempt("stop or kill PID 1", lambda: state in b"TtZX" and state)
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "signals to the host",
        why: "processes outside are not there",
        harmless: Py(
            r#"pid = os.fork(); pid or time.sleep(30); os.kill(pid, 9); must(os.waitpid(pid, 0)[1] == 9)"#,
        ),
        malicious: Py(r#"
for pid in (int(env("VICTIM")), int(env("RUNNER"))):
    if os.path.exists(f"/proc/{pid}") and pid < 1000:
        continue
    for number in (0, 15, 9, 19):
        attempt(f"signal {number} to {pid} of the host", lambda: os.kill(pid, number) is None)
    attempt(f"signal to the group of {pid}", lambda: os.killpg(pid, 9) is None)
    attempt(f"pidfd of {pid}", lambda: os.pidfd_open(pid))
def owner():
    read_end, write_end = os.pipe()
    fcntl.fcntl(read_end, fcntl.F_SETOWN, int(env("VICTIM")))
    return fcntl.fcntl(read_end, fcntl.F_GETOWN)
attempt("SIGIO to the host's process", owner)
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "kill everything",
        why: "kill -1 takes the caller's own processes and leaves the hand",
        harmless: Py(GONE),
        malicious: Py(r#"
print("held: kill -1 is tried", flush=True)
os.setsid() if os.getpid() != os.getsid(0) else None
try:
    os.kill(-1, signal.SIGSTOP)
    os.kill(-1, signal.SIGKILL)
except OSError:
    pass
time.sleep(0.5)
"#),
        expect: KillsItsExec,
        control: Skip,
    },
    Probe {
        name: "kill the supervisor",
        why: "code that kills what watches it must not get away from the time limit",
        harmless: Py(GONE),
        malicious: Py(r#"
print("held: the supervisor is to be killed", flush=True)
if os.fork():
    try:
        os.kill(os.getppid(), signal.SIGKILL)
    except OSError:
        pass
    time.sleep(3)
else:
    os.setsid()
    supervisor = os.getppid()
    for name in [name for name in os.listdir("/proc") if name.isdigit() and int(name) not in (1, os.getpid())]:
        try:
            os.kill(int(name), signal.SIGKILL)
        except OSError:
            pass
    time.sleep(20)
    open("/work/outlived", "w").write("x")
"#),
        expect: KillsItsExec,
        control: Skip,
    },
    Probe {
        name: "stop the supervisor",
        why: "a stopped supervisor must not hold up the hand",
        harmless: Py(GONE),
        malicious: Py(r#"
print("held: the supervisor is to be stopped", flush=True)
parent = os.getppid()
if parent != 1:
    os.kill(parent, signal.SIGSTOP)
time.sleep(0.2)
print("end", flush=True)
"#),
        expect: KillsItsExec,
        control: Skip,
    },
    Probe {
        name: "outlive the time limit",
        why: "a timeout kills the tree, with what left its session, its group and its parent",
        harmless: Py(GONE),
        malicious: Py(r#"
print("held: daemons are started", flush=True)
for depth in (1, 2, 3):
    if os.fork() == 0:
        for _ in range(depth):
            os.setsid() if os.getsid(0) != os.getpid() else None
            if os.fork():
                os._exit(0)
        for number in range(1, 32):
            if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
                signal.signal(number, signal.SIG_IGN)
        os.closerange(0, 16)
        time.sleep(60)
        open("/work/outlived", "w").write("x")
time.sleep(60)
"#),
        expect: KillsItsExec,
        control: Skip,
    },
    Probe {
        name: "zombies",
        why: "orphans must be reaped, or the process limit fills",
        harmless: Py(r#"must(subprocess.call(["sh", "-c", "(true &) ; true"]) == 0)"#),
        malicious: Py(r#"
def orphans(count):
    for _ in range(count):
        if os.fork() == 0:
            for _ in range(4):
                if os.fork() == 0:
                    os._exit(0)
            os._exit(0)
        os.wait()
orphans(200)
def zombies():
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if read(f"/proc/{name}/stat").rsplit(b") ", 1)[1].startswith(b"Z"):
                    found.append(name)
            except OSError:
                pass
    return found
deadline = time.monotonic() + 5
while zombies() and time.monotonic() < deadline:
    time.sleep(0.05)
attempt("leave zombies", lambda: len(zombies()) > 3 and len(zombies()))
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "sessions of others",
        why: "a session is the command's own",
        harmless: Py(r#"must(os.getsid(0) > 0); must(subprocess.call(["setsid", "true"]) == 0)"#),
        malicious: Py(r#"
attempt("a terminal by /dev/tty", lambda: os.open("/dev/tty", os.O_RDWR))
attempt("the session of PID 1", lambda: os.getsid(0) == os.getsid(1) and None)
attempt("move into PID 1's group", lambda: os.setpgid(0, os.getpgid(1)) is None)
attempt("a terminal of others", lambda: [name for name in os.listdir("/dev/pts") if name != "ptmx"])
attempt("a terminal in sight", lambda: [fd for fd in (0, 1, 2) if os.isatty(fd)])
attempt("hang up", lambda: ok("vhangup"))
"#),
        expect: Held,
        control: Skip,
    },
];

/// These run on a terminal.
pub const TERMINAL: &[Probe] = &[Probe {
    name: "TIOCSTI on a terminal",
    why: "input put into a terminal is read by whoever reads it next",
    harmless: Py(r#"
import termios
must(os.isatty(0)); must(len(termios.tcgetattr(0)) == 7); must(struct.unpack("HHHH", fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))[0] >= 0)
"#),
    malicious: Py(r#"
import termios
for request in (0x5412, 0x100005412, 0xffffffff00005412 - (1 << 64)):
    attempt(f"TIOCSTI {request:x}", lambda: libc.syscall(ctypes.c_long(16 if platform.machine() == "x86_64" else 29), ctypes.c_long(0), ctypes.c_long(request), c("x")) == 0)
for request in (0x541c, 0x10000541c):
    attempt(f"TIOCLINUX {request:x}", lambda: libc.syscall(ctypes.c_long(16 if platform.machine() == "x86_64" else 29), ctypes.c_long(0), ctypes.c_long(request), ctypes.byref(ctypes.create_string_buffer(b"\3", 64))) == 0)
attempt("TIOCCONS", lambda: fcntl.ioctl(0, 0x541d) == 0)
attempt("TIOCSETD", lambda: fcntl.ioctl(0, 0x5423, struct.pack("i", 3)) and None)
attempt("steal another's terminal", lambda: fcntl.ioctl(0, 0x540e, 1) == 0 and None)
"#),
    expect: Held,
    control: Skip,
}];
