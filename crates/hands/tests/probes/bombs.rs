//! Programs that take all they can get. Each runs in a small hand of its own.

use crate::probe::{Control::*, Expect::*, Probe, Script::*};

pub const PROBES: &[Probe] = &[
    Probe {
        name: "fork bomb",
        why: "the process limit holds, and the hand lives on",
        harmless: Sh(r#"for n in 1 2 3 4 5; do true & done; wait"#),
        malicious: Py(r#"
print("held: forks", flush=True)
end = time.monotonic() + 3
while time.monotonic() < end:
    try:
        os.fork()
    except OSError:
        pass
os._exit(0)
"#),
        expect: Contained,
        control: Skip,
    },
    Probe {
        name: "fork bomb of sessions",
        why: "processes that leave their session, group and parent are the hand's still, and end with their time",
        harmless: Sh(r#"setsid true"#),
        malicious: Py(r#"
print("held: forks into sessions", flush=True)
top = os.getpid()
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif os.getpid() != top and os.getpid() % 3 == 0:
            os._exit(0)
    except OSError:
        pass
"#),
        expect: KillsItsExec,
        control: Skip,
    },
    Probe {
        name: "thread bomb",
        why: "threads count as processes do",
        harmless: Py(r#"
threads = [threading.Thread(target=time.sleep, args=(0.01,)) for _ in range(8)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
"#),
        malicious: Py(r#"
threading.stack_size(65536)
event = threading.Event()
def many():
    count = 0
    try:
        while count < 4096:
            threading.Thread(target=event.wait, daemon=True).start()
            count += 1
    except RuntimeError:
        pass
    return count > 64 and count
attempt("more threads than the limit", many)
event.set()
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "memory bomb",
        why: "the memory limit holds; the program dies, not the hand",
        harmless: Py(r#"must(len(bytearray(16 << 20)) == 16 << 20)"#),
        malicious: Py(r#"
print("held: takes memory", flush=True)
def take():
    areas = []
    while len(areas) < 64:
        area = mmap.mmap(-1, 16 << 20)
        for at in range(0, len(area), 4096):
            area[at] = 1
        areas.append(area)
    return "1 GiB"
attempt("more memory than the limit", take)
"#),
        expect: Contained,
        control: Harms,
    },
    Probe {
        name: "memory bomb of many",
        why: "the limit is the hand's, not each process's",
        harmless: Py(r#"must(in_child(lambda: len(bytearray(8 << 20))))"#),
        malicious: Py(r#"
print("held: takes memory by many processes", flush=True)
def take():
    area = bytearray(48 << 20)
    for at in range(0, len(area), 4096):
        area[at] = 1
    time.sleep(2)
    return True
pids = []
for _ in range(16):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if take() else 1)
    pids.append(pid)
ends = [os.waitpid(pid, 0)[1] for pid in pids]
attempt("all of them together", lambda: all(end == 0 for end in ends))
"#),
        expect: Contained,
        control: Harms,
    },
    Probe {
        name: "files in memory",
        why: "files in memory are memory",
        harmless: Py(r#"
open("/tmp/small", "wb").write(bytes(1 << 20)); os.remove("/tmp/small"); os.close(os.memfd_create("small"))
"#),
        malicious: Py(r#"
print("held: fills files in memory", flush=True)
def fill(fd):
    block = bytes(1 << 20)
    count = 0
    while count < 1024:
        os.write(fd, block)
        count += 1
    return "1 GiB"
for path in ("/dev/shm/fill", "/tmp/fill", os.path.expanduser("~/fill")):
    def one():
        fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        try:
            return fill(fd)
        finally:
            os.remove(path)
            os.close(fd)
    attempt(f"fill {path}", lambda: in_child(one))
attempt("fill a memfd", lambda: in_child(lambda: fill(os.memfd_create("fill"))))
"#),
        expect: Contained,
        control: Skip,
    },
    Probe {
        name: "descriptor bomb",
        why: "descriptors are kernel memory",
        harmless: Py(
            r#"fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(100)]; [os.close(fd) for fd in fds]"#,
        ),
        malicious: Py(r#"
def many(make):
    fds = []
    try:
        while len(fds) < 1 << 20:
            fds.append(make())
    except OSError:
        pass
    return len(fds) >= 1 << 20
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
attempt("a million descriptors", lambda: many(lambda: os.open("/dev/null", os.O_RDONLY)))
"#),
        expect: Contained,
        control: Skip,
    },
    Probe {
        name: "pipe bomb",
        why: "full pipes are kernel memory",
        harmless: Py(
            r#"read_end, write_end = os.pipe(); os.write(write_end, bytes(4096)); must(len(os.read(read_end, 4096)) == 4096)"#,
        ),
        malicious: Py(r#"
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
def fill():
    total, ends = 0, []
    while total < 1 << 30:
        read_end, write_end = os.pipe2(os.O_NONBLOCK)
        ends.append((read_end, write_end))
        try:
            fcntl.fcntl(write_end, 1031, 1 << 20)
        except OSError:
            pass
        try:
            while True:
                total += os.write(write_end, bytes(65536))
        except BlockingIOError:
            pass
    return total
attempt("1 GiB in pipes", fill)
"#),
        expect: Contained,
        control: Skip,
    },
    Probe {
        name: "socket bomb",
        why: "so are descriptors that are in flight",
        harmless: Py(r#"
one, two = socket.socketpair(); socket.send_fds(one, [b"x"], [0]); must(socket.recv_fds(two, 1, 1)[1])
"#),
        malicious: Py(r#"
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
def flight():
    total = 0
    keep = []
    while total < 1 << 18:
        one, two = socket.socketpair()
        one.setblocking(False)
        keep.append((one, two))
        try:
            while True:
                socket.send_fds(one, [b"x"], [0] * 200)
                total += 200
        except BlockingIOError:
            pass
    return total
attempt("a quarter of a million descriptors in flight", flight)
"#),
        expect: Contained,
        control: Skip,
    },
    Probe {
        name: "inotify bomb",
        why: "watches and instances are counted per user of the host",
        harmless: Py(
            r#"fd = libc.inotify_init1(0); must(fd >= 0); must(libc.inotify_add_watch(fd, b"/work", 0x100) >= 0)"#,
        ),
        malicious: Py(r#"
def instances():
    count = 0
    while count < 100000:
        if libc.inotify_init1(0) < 0:
            return None
        count += 1
    return count
attempt("instances without end", instances)
"#),
        expect: Contained,
        control: Skip,
    },
    Probe {
        name: "System V memory bomb",
        why: "shared memory outlives its maker; it must be the hand's",
        harmless: Py(
            r#"ident = libc.shmget(0, 4096, 0o1600); must(ident >= 0); must(libc.shmctl(ident, 0, None) == 0)"#,
        ),
        malicious: Py(r#"
libc.shmat.restype = ctypes.c_void_p
libc.shmget.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]
print("held: takes shared memory", flush=True)
def take():
    for _ in range(64):
        ident = libc.shmget(0, 16 << 20, 0o1600)
        if ident < 0:
            return None
        at = libc.shmat(ident, None, 0)
        if at == ctypes.c_void_p(-1).value:
            return None
        ctypes.memset(at, 1, 16 << 20)
    return "1 GiB"
attempt("1 GiB of shared memory", take)
"#),
        expect: Contained,
        control: Skip,
    },
    Probe {
        name: "output bomb",
        why: "output is bounded and does not fill the runner",
        harmless: Sh(r#"echo some output; head -c 100000 /dev/zero | tr '\0' x"#),
        malicious: Sh(r#"
echo "held: writes without end"
timeout 3 cat /dev/zero
timeout 1 yes >&2
"#),
        expect: Contained,
        control: Skip,
    },
    Probe {
        name: "directory bomb",
        why: "deep and wide trees must not hang what walks them",
        harmless: Py(
            r#"os.makedirs("/work/a/b/c", exist_ok=True); os.removedirs("/work/a/b/c") if os.listdir("/work/a/b/c") == [] else None"#,
        ),
        malicious: Py(r#"
os.chdir("/work")
depth = 0
os.makedirs("deep", exist_ok=True); os.chdir("deep")
try:
    while depth < 3000:
        os.mkdir("d"); os.chdir("d"); depth += 1
except OSError:
    pass
os.chdir("/tmp")
tell("held", "a deep tree", depth)
for name in (b"new\nline", b"\xff\xfe", b"-rf", b"a" * 255):
    open(b"/work/" + name, "w").close()
os.symlink("loop", "/work/loop")
os.mkfifo("/work/fifo")
with open("/work/sparse", "wb") as file:
    file.truncate(5 << 30)
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "timer and signal bomb",
        why: "queued signals and timers are counted per user of the host",
        harmless: Py(r#"signal.setitimer(signal.ITIMER_REAL, 0)"#),
        malicious: Py(r#"
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
libc.sigqueue.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
def queue():
    for count in range(1 << 20):
        if libc.sigqueue(os.getpid(), signal.SIGRTMIN, None) < 0:
            return None
    return count
attempt("a million queued signals", queue)
def timers():
    ident = ctypes.c_void_p()
    for count in range(1 << 20):
        if libc.timer_create(0, None, ctypes.byref(ident)) < 0:
            return None
    return count
attempt("a million timers", timers)
"#),
        expect: Contained,
        control: Skip,
    },
];

/// Programs that take a thing of which the host, or the user that hands run as, has only so many, and keep it. The harmless one
/// runs in another hand meanwhile.
pub const NEIGHBOURS: &[Probe] = &[
    Probe {
        name: "queued signals and timers",
        why: "the kernel counts them by user of the host",
        harmless: Py(r#"
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
libc.sigqueue.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
must(libc.sigqueue(os.getpid(), signal.SIGRTMIN, None) == 0)
must(libc.timer_create(0, None, ctypes.byref(ctypes.c_void_p())) == 0)
"#),
        malicious: Py(r#"
libc.sigqueue.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
def take():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
    resource.setrlimit(resource.RLIMIT_SIGPENDING, (resource.getrlimit(resource.RLIMIT_SIGPENDING)[1],) * 2)
    while libc.sigqueue(os.getpid(), signal.SIGRTMIN, None) == 0:
        pass
keep(take)
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "native asynchronous I/O",
        why: "fs.aio-max-nr is the whole machine's: databases of the host would fail",
        harmless: Py(
            r#"must(not int(read("/proc/sys/fs/aio-nr")) or int(read("/proc/sys/fs/aio-nr")) < int(read("/proc/sys/fs/aio-max-nr")) // 2)"#,
        ),
        malicious: Py(r#"
def take():
    context = ctypes.c_ulong(0)
    number = 206 if platform.machine() == "x86_64" else 0
    for size in [8192] * 64 + [128] * 512:
        context = ctypes.c_ulong(0)
        libc.syscall(ctypes.c_long(number), ctypes.c_long(size), ctypes.byref(context))
keep(take)
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "pipe pages",
        why: "the kernel counts them by user of the host, beyond which pipes become small",
        harmless: Py(
            r#"read_end, write_end = os.pipe(); must(fcntl.fcntl(write_end, 1032) >= 65536, "a pipe of full size")"#,
        ),
        malicious: Py(r#"
def take():
    while True:
        fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)
keep(take)
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "locked memory",
        why: "the kernel counts some of it by user of the host",
        harmless: Py(
            r#"area = mmap.mmap(-1, 4096); must(libc.mlock(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(area))), 4096) == 0)"#,
        ),
        malicious: Py(r#"
def take():
    for _ in range(100):
        area = mmap.mmap(-1, 1 << 20)
        libc.mlock(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(area))), 1 << 20)
        held.append(area)
held = []
keep(take)
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "epoll watches",
        why: "the kernel counts them by user of the host",
        harmless: Py(
            r#"import select; poll = select.epoll(); poll.register(0 if stat.S_ISFIFO(os.fstat(0).st_mode) else os.pipe()[0], 1)"#,
        ),
        malicious: Py(r#"
import select
held = []
def take():
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    ends = [os.pipe()[0] for _ in range(400)]
    while True:
        poll = select.epoll()
        held.append(poll)
        for end in ends:
            poll.register(end, 1)
keep(take)
"#),
        expect: Contained,
        control: Skip,
    },
];

/// The same for what all hands of a runner still share, since they run as one user of the host (`THREATS.md` lists it): here the
/// harmless one runs on the host.
pub const SHARED: &[Probe] = &[
    Probe {
        name: "inotify instances",
        why: "the kernel counts them by user of the host, 128 as a rule",
        harmless: Py(
            r#"fd = libc.inotify_init1(0); must(fd >= 0); must(libc.inotify_add_watch(fd, b"/work", 0x100) >= 0)"#,
        ),
        malicious: Py(r#"
def take():
    while libc.inotify_init1(0) >= 0:
        pass
keep(take)
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "inotify watches",
        why: "likewise",
        harmless: Py(r#"fd = libc.inotify_init1(0); must(libc.inotify_add_watch(fd, b"/proc", 0x100) >= 0)"#),
        malicious: Py(r#"
os.makedirs("/tmp/many", exist_ok=True)
def take():
    fd = libc.inotify_init1(0)
    for number in range(200000):
        path = f"/tmp/many/{number}"
        create(path)
        if libc.inotify_add_watch(fd, path.encode(), 0x100) < 0:
            return
        os.link(path, path + "l"); os.remove(path)
keep(take)
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "terminals",
        why: "kernel.pty.max is the whole machine's",
        harmless: Py(r#"import pty; must(len(os.openpty()) == 2)"#),
        malicious: Py(r#"
def take():
    while True:
        os.open("/dev/ptmx", os.O_RDWR)
keep(take)
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "descriptors in flight",
        why: "the kernel counts them by user of the host",
        harmless: Py(
            r#"one, two = socket.socketpair(); socket.send_fds(one, [b"x"], [0]); must(socket.recv_fds(two, 1, 1)[1])"#,
        ),
        malicious: Py(r#"
held = []
def take():
    while True:
        one, two = socket.socketpair()
        one.setblocking(False)
        held.append((one, two))
        try:
            while True:
                socket.send_fds(one, [b"x"], [0] * 200)
        except BlockingIOError:
            pass
keep(take)
"#),
        expect: Held,
        control: Skip,
    },
];
