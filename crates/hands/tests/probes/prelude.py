# Runs before every Python probe. A malicious program calls `attempt`; each attempt must be held. A harmless one calls `must`.
import ctypes, errno, fcntl, mmap, os, platform, resource, signal, socket, stat, struct, subprocess, sys, threading, time

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

NAMES = (
    "ptrace process_vm_readv process_vm_writev kcmp syslog reboot settimeofday clock_settime adjtimex swapon swapoff quotactl "
    "unshare setns clone clone3 mount umount2 pivot_root chroot add_key request_key keyctl bpf perf_event_open userfaultfd "
    "io_uring_setup kexec_load kexec_file_load init_module finit_module delete_module personality seccomp name_to_handle_at "
    "open_by_handle_at open_tree move_mount fsopen fsmount fspick mount_setattr pidfd_getfd pidfd_open pidfd_send_signal "
    "fanotify_init sethostname setdomainname acct process_madvise memfd_create capset capget openat2 getpid move_pages "
    "migrate_pages lookup_dcookie nfsservctl vhangup iopl ioperm uselib modify_ldt "
    "prlimit64 sched_setaffinity sched_setscheduler sched_setparam sched_setattr ioprio_set setpriority"
).split()
X86 = (
    101, 310, 311, 312, 103, 169, 164, 227, 159, 167, 168, 179,
    272, 308, 56, 435, 165, 166, 155, 161, 248, 249, 250, 321, 298, 323,
    425, 246, 320, 175, 313, 176, 135, 317, 303,
    304, 428, 429, 430, 432, 433, 442, 438, 434, 424,
    300, 170, 171, 163, 440, 319, 126, 125, 437, 39, 279,
    256, 212, 180, 153, 172, 173, 134, 154,
    302, 203, 144, 142, 314, 251, 141,
)
ARM = (
    117, 270, 271, 272, 116, 142, 170, 112, 171, 224, 225, 60,
    97, 268, 220, 435, 40, 39, 41, 51, 217, 218, 219, 280, 241, 282,
    425, 104, 294, 105, 273, 106, 92, 277, 264,
    265, 428, 429, 430, 432, 433, 442, 438, 434, 424,
    262, 161, 162, 89, 440, 279, 91, 90, 437, 172, 239,
    238, 18, 42, 58, None, None, None, None,
    261, 122, 119, 118, 274, 30, 140,
)
NR = dict(zip(NAMES, X86 if platform.machine() == "x86_64" else ARM))
harms = 0


def call(name, *args):
    """A raw system call: what it returned, or OSError."""
    number = NR[name]
    if number is None:
        raise OSError(errno.ENOSYS, name)
    ctypes.set_errno(0)
    got = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    if got == -1:
        raise OSError(ctypes.get_errno(), name)
    return got


def ok(name, *args):
    """Whether a raw system call succeeded: true also for a 0."""
    call(name, *args)
    return True


def tell(word, what, why):
    print(f"{word}: {what}: {why}", flush=True)


def attempt(what, action):
    """Harm is done if `action` returns something true. An OSError is what should happen."""
    global harms
    try:
        got = action()
    except OSError as error:
        return tell("held", what, errno.errorcode.get(error.errno, error))
    except (MemoryError, ValueError, RuntimeError) as error:
        return tell("held", what, repr(error)[:100])
    if not got:
        return tell("held", what, "nothing came of it")
    harms += 1
    tell("HARM", what, repr(got)[:200])


def must(condition, what="a harmless thing failed"):
    if not condition:
        raise SystemExit(f"must: {what}")


def refused(action, *errnos):
    """Whether `action` fails with one of these errnos."""
    try:
        action()
    except OSError as error:
        return not errnos or error.errno in errnos
    return False


def read(path, most=4096):
    with open(path, "rb") as file:
        return file.read(most)


def write(path, data=b"x", flags=os.O_WRONLY):
    fd = os.open(path, flags)
    try:
        return os.write(fd, data)
    finally:
        os.close(fd)


def create(path):
    """Makes a file. The return value says that it could."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    return path


def lines(path):
    return dict(line.split(":\t", 1) for line in read(path).decode().splitlines() if ":\t" in line)


def child(action):
    """Runs `action` in a child; returns how it ended as `wait` gives it."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if action() else 1)
        except OSError as error:
            os._exit(error.errno)
        except BaseException:
            os._exit(200)
    return os.waitpid(pid, 0)[1]


def in_child(action):
    """True if `action` returned something true in a child; OSError with the child's errno if it failed."""
    status = child(action)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) not in (0, 1, 200):
        raise OSError(os.WEXITSTATUS(status), "in a child")
    return status == 0


def buffer(size=4096):
    return ctypes.create_string_buffer(size)


def c(text):
    return ctypes.c_char_p(text.encode() if isinstance(text, str) else text)


def env(name):
    return os.environ["PROBE_" + name]


def keep(take):
    """Takes what it can in a process that lives on."""
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        try:
            take()
        except (OSError, RuntimeError, MemoryError) as error:
            tell("held", "took what there was", error)
        os.write(write_end, b"x")
        os.closerange(0, 3)
        time.sleep(600)
        os._exit(0)
    os.close(write_end)
    os.read(read_end, 1)
    tell("held", "what was taken is kept", "while others go on")


def finish():
    print("end", flush=True)
    sys.stdout.flush()
    os._exit(66 if harms else 0)
