//! Files of the host.

use crate::probe::{Control::*, Expect::*, Probe, Script::*};

pub const PROBES: &[Probe] = &[
    Probe {
        name: "read private files",
        why: "files of the host that no configuration listed",
        harmless: Py(r#"
must(read("/etc/passwd").count(b"\n") >= 1, "/etc/passwd")
os.makedirs("/tmp/own", exist_ok=True)
open("/tmp/own/secret", "w").write("mine")
must(read("/tmp/own/secret") == b"mine")
"#),
        malicious: Py(r#"
for path in ("/etc/shadow", "/etc/gshadow", "/etc/sudoers", "/etc/ssh/ssh_host_ed25519_key", "/root/.ssh/id_rsa", "/root/.bashrc",
             env("HOME_DIR") + "/secret", env("STATE") + "/secret", "/proc/1/root" + env("STATE") + "/secret",
             "/proc/self/root" + env("STATE") + "/secret", "/oldroot" + env("STATE") + "/secret", "/newroot/etc/shadow",
             "/.old/etc/shadow", "/etc/machine-id", "/var/lib/dbus/machine-id", "/var/log/wtmp", "/boot/vmlinuz", "/etc/hostname.host"):
    attempt(f"read {path}", lambda: read(path))
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "list private directories",
        why: "names in the host's directories tell much",
        harmless: Py(
            r#"must("bin" in os.listdir("/usr")); must(os.listdir("/proc")); must(isinstance(os.listdir("/tmp"), list))"#,
        ),
        malicious: Py(r#"
for path in (env("STATE"), env("HOME_DIR"), "/root", "/srv", "/media", "/mnt", "/boot", "/var/lib", "/var/spool", "/lost+found", "/sys/kernel", "/sys/class"):
    attempt(f"list {path}", lambda: os.listdir(path))
attempt("see others' homes", lambda: [name for name in os.listdir("/home") if name != "agent"])
attempt("see the host's /tmp", lambda: [name for name in os.listdir("/tmp") if name.startswith("tendon-")])
attempt("see the host's /dev/shm", lambda: [name for name in os.listdir("/dev/shm")])
attempt("see the host's /run", lambda: [name for name in os.listdir("/run") if name in ("systemd", "dbus", "user", "docker.sock", "lock", "udev", "sshd")])
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "write system files",
        why: "the host's programs and configuration, which every hand shares",
        harmless: Py(r#"
open("/work/own", "w").write("x"); os.remove("/work/own")
open("/tmp/own-file", "w").write("x"); os.remove("/tmp/own-file")
open(os.path.expanduser("~/own"), "w").write("x"); os.remove(os.path.expanduser("~/own"))
"#),
        malicious: Py(r#"
for path in ("/usr", "/usr/bin", "/usr/lib", "/usr/local/bin", "/etc", "/bin", "/lib", "/sbin", "/lib64", "/sys", "/proc", "/var/lib", "/opt", "/"):
    attempt(f"make a file in {path}", lambda: create(f"{path}/tendon-probe"))
for path in ("/usr/bin/env", "/etc/passwd", "/etc/ld.so.cache", "/lib64/ld-linux-x86-64.so.2", "/etc/hosts", "/etc/resolv.conf"):
    attempt(f"open {path} for writing", lambda: os.close(os.open(path, os.O_WRONLY)) is None)
    attempt(f"chmod {path}", lambda: os.chmod(path, 0o777) is None)
    attempt(f"rename {path}", lambda: os.rename(path, path + ".probe") is None)
    attempt(f"truncate {path}", lambda: os.truncate(path, 0) is None)
    attempt(f"utime {path}", lambda: os.utime(path) is None)
    attempt(f"setxattr {path}", lambda: os.setxattr(path, "user.probe", b"x") is None)
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "overwrite the hand",
        why: "the program of PID 1, which the next hand runs too",
        harmless: Py(
            r#"must(os.readlink("/proc/self/exe").endswith(os.path.basename(os.path.realpath(sys.executable))))"#,
        ),
        malicious: Py(r#"
for path in ("/proc/1/exe", "/run/tendon/hand", "/proc/self/exe", "/proc/%d/exe" % os.getppid()):
    attempt(f"open {path} for writing", lambda: os.close(os.open(path, os.O_WRONLY)) is None)
    attempt(f"truncate {path}", lambda: os.truncate(path, 0) is None)
attempt("replace the hand", lambda: os.rename("/usr/bin/env", "/run/tendon/hand") is None)
attempt("remove the hand", lambda: os.remove("/run/tendon/hand") is None)
attempt("plant beside the hand", lambda: create("/run/tendon/probe"))
def execute_writable():
    fd = os.open("/proc/1/exe", os.O_RDONLY)
    return write(f"/proc/self/fd/{fd}")
attempt("reopen the hand for writing", execute_writable)
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "device nodes",
        why: "a device node is the device",
        harmless: Py(r#"
must(len(read("/dev/urandom", 16)) == 16); write("/dev/null"); must(read("/dev/zero", 4) == bytes(4))
os.mkfifo("/tmp/fifo-own"); os.remove("/tmp/fifo-own")
"#),
        malicious: Py(r#"
for name, major, minor in (("mem", 1, 1), ("kmsg", 1, 11), ("sda", 8, 0), ("vda", 254, 0), ("vdb", 253, 0), ("loop0", 7, 0), ("fuse", 10, 229), ("kvm", 10, 232), ("zero", 1, 5)):
    for directory in ("/tmp", "/work", "/dev/shm", "/dev"):
        path = f"{directory}/node-{name}"
        for kind in (stat.S_IFCHR, stat.S_IFBLK):
            attempt(f"mknod {path}", lambda: os.mknod(path, kind | 0o666, os.makedev(major, minor)) is None)
    attempt(f"open a node {name}", lambda: read(f"/work/node-{name}", 1) or True)
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "devices",
        why: "memory, disks, virtual machines and loop devices of the host",
        harmless: Py(r#"
must(os.isatty(0) is False)
for name in ("null", "zero", "full", "random", "urandom", "tty"):
    must(os.path.exists(f"/dev/{name}"), name)
must(refused(lambda: write("/dev/full"), errno.ENOSPC))
"#),
        malicious: Py(r#"
import glob
for name in ("mem", "kmem", "port", "kmsg", "kvm", "vhost-net", "vhost-vsock", "fuse", "loop-control", "loop0", "sda", "vda", "nvme0n1", "dm-0", "mapper/control",
             "net/tun", "userfaultfd", "uinput", "input/event0", "cuse", "btrfs-control", "vfio/vfio", "dri/card0", "snapshot", "nbd0", "ppp", "rtc0", "hpet", "tty0", "tty1", "ttyS0", "console", "vcs", "cpu/0/msr", "watchdog", "binderfs", "hwrng"):
    path = "/dev/" + name
    if name == "console" and not os.path.exists(path):
        continue
    attempt(f"open {path}", lambda: os.open(path, os.O_RDONLY | os.O_NONBLOCK) if name != "console" else None)
known = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm", "fd", "stdin", "stdout", "stderr", "core", "console", "mqueue"}
attempt("find another device", lambda: [name for name in os.listdir("/dev") if name not in known])
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "setuid binaries",
        why: "programs of the host with the setuid bit must give nothing",
        harmless: Sh(r#"id -u >/dev/null && test "$(id -un)" != root"#),
        malicious: Sh(r#"
find /usr/bin /usr/sbin /usr/libexec /usr/lib -maxdepth 3 -xdev \( -perm -4000 -o -perm -2000 \) -type f 2>/dev/null > /tmp/setuid
cp /usr/bin/env /tmp/suid-env && chmod 6755 /tmp/suid-env
root() { "$@" 2>/dev/null | grep -qx 0; }
attempt "su" root su -c "id -u" root
attempt "sudo" root sudo -n id -u
attempt "mount by the setuid binary" mount -t tmpfs none /tmp
attempt "newgrp" sh -c 'echo "id -g" | newgrp root | grep -qx 0'
attempt "chfn" chfn -f probe agent
attempt "own setuid copy gives root" root /tmp/suid-env id -u
while read -r path; do
    attempt "$path runs with another uid" sh -c '"$0" --help >/dev/null 2>&1 & pid=$!; u=$(awk "/^Uid/{print \$2,\$3,\$4}" /proc/$pid/status 2>/dev/null); wait; case "$u" in *" 0"*|"0 "*) exit 0;; esac; exit 1' "$path"
done < /tmp/setuid
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "set the setuid bit",
        why: "a setuid file on a branch is a trap for whoever runs it on the host; in the hand it must be inert",
        harmless: Py(r#"
open("/work/tool", "w").write("\x23!/bin/sh\nexit 0\n"); os.chmod("/work/tool", 0o755)
must(subprocess.call(["/work/tool"]) == 0); os.remove("/work/tool")
"#),
        malicious: Py(r#"
import shutil
for directory in ("/work", "/tmp", "/dev/shm"):
    path = f"{directory}/suid"
    shutil.copy("/usr/bin/id", path)
    attempt(f"give {path} to root", lambda: os.chown(path, 0, 0) is None)
    os.chmod(path, 0o6755)
    attempt(f"{path} runs as another", lambda: subprocess.run([path, "-u"], capture_output=True).stdout not in (b"%d\n" % os.getuid(), b""))
    attempt(f"file capabilities on {path}", lambda: os.setxattr(path, "security.capability", struct.pack("<IIIII", 0x02000001, 0xffffffff, 0, 0xffffffff, 0)) is None)
    os.remove(path)
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "links to the host",
        why: "links at the edge of the mounts must not lead out",
        harmless: Py(r#"
open("/work/a", "w").write("x"); os.link("/work/a", "/work/b"); os.symlink("a", "/work/c")
must(read("/work/c") == b"x"); [os.remove("/work/" + n) for n in "abc"]
"#),
        malicious: Py(r#"
for number, target in enumerate((env("STATE") + "/secret", "/etc/shadow", "/proc/1/root/etc/shadow", "../" * 20 + env("STATE")[1:] + "/secret", "/proc/1/cwd/../etc/shadow", "/proc/self/fd/3")):
    path = f"/work/link{number}"
    os.symlink(target, path)
    attempt(f"read through a symlink to {target}", lambda: read(path))
    os.remove(path)
for path in ("/etc/passwd", "/usr/bin/env", "/run/tendon/hand"):
    for directory in ("/work", "/tmp", "/dev/shm"):
        attempt(f"hardlink {path} into {directory}", lambda: os.link(path, f"{directory}/hard") is None)
attempt("climb above the root", lambda: read("/work/" + "../" * 50 + env("STATE")[1:] + "/secret"))
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "races at the mount points",
        why: "swapping a directory for a link while paths are resolved must not lead out",
        harmless: Py(r#"
os.makedirs("/work/d/e", exist_ok=True); os.rename("/work/d/e", "/work/e2"); os.rmdir("/work/e2"); os.rmdir("/work/d")
"#),
        malicious: Py(r#"
os.makedirs("/work/race/in", exist_ok=True)
os.symlink("/", "/work/race/out")
stop = time.monotonic() + 1.0
libc.renameat2.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
def swap():
    while time.monotonic() < stop:
        libc.renameat2(-100, b"/work/race/in", -100, b"/work/race/out", 2)
thread = threading.Thread(target=swap); thread.start()
seen = set()
tail = "/.." * 6 + env("STATE") + "/secret"
while time.monotonic() < stop:
    for path in ("/work/race/in" + tail, "/work/race/in/../../.." + env("STATE") + "/secret"):
        try:
            seen.add(read(path))
        except OSError:
            pass
thread.join()
attempt("get out by a race", lambda: seen)
attempt("move a mount point", lambda: os.rename("/work", "/tmp/work") is None)
attempt("remove a mount point", lambda: os.rmdir("/work") is None)
attempt("replace a mount point", lambda: os.rename("/work/race", "/tmp") is None)
fd = os.open("/work/race", os.O_RDONLY | os.O_DIRECTORY)
attempt("climb from a descriptor", lambda: os.open("../" * 8 + env("STATE")[1:] + "/secret", os.O_RDONLY, dir_fd=fd))
attempt("climb from a moved descriptor", lambda: (os.rename("/work/race", "/work/race2"), os.open("../" * 8 + "root/.bashrc", os.O_RDONLY, dir_fd=fd))[1])
import shutil
shutil.rmtree("/work/race2", ignore_errors=True); shutil.rmtree("/work/race", ignore_errors=True)
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "open_by_handle_at",
        why: "file handles name any inode of a file system, also outside the mount (the shocker attack)",
        harmless: Py(r#"fd = os.open("/work", os.O_PATH); must(os.fstat(fd).st_ino > 0)"#),
        malicious: Py(r#"
handle = buffer(256); struct.pack_into("II", handle, 0, 128, 0)
mount_id = ctypes.c_int()
attempt("name_to_handle_at of what is bound", lambda: ok("name_to_handle_at", -100, c("/usr"), ctypes.byref(handle), ctypes.byref(mount_id), 0) and None)
fd = os.open("/usr", os.O_RDONLY)
for inode in (2, 128, 11):
    struct.pack_into("IiII", handle, 0, 8, 1, inode, 0)
    attempt(f"open inode {inode} by handle", lambda: ok("open_by_handle_at", fd, ctypes.byref(handle), 0))
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "O_PATH tricks",
        why: "a descriptor without rights must not be turned into one with rights",
        harmless: Py(r#"
fd = os.open("/etc/passwd", os.O_PATH); must(read(f"/proc/self/fd/{fd}")); must(refused(lambda: os.read(fd, 1), errno.EBADF))
"#),
        malicious: Py(r#"
fd = os.open("/usr/bin/env", os.O_PATH)
attempt("reopen a read-only file for writing", lambda: write(f"/proc/self/fd/{fd}"))
attempt("chmod by O_PATH", lambda: os.chmod(f"/proc/self/fd/{fd}", 0o777) is None)
attempt("linkat AT_EMPTY_PATH", lambda: libc.linkat(fd, b"", -100, b"/work/env", 0x1000) == 0)
attempt("linkat by /proc", lambda: os.link(f"/proc/self/fd/{fd}", "/work/env", follow_symlinks=True) is None)
root = os.open("/", os.O_PATH)
attempt("leave by O_PATH of /", lambda: os.open(".." + env("STATE") + "/secret", os.O_RDONLY, dir_fd=root))
attempt("O_PATH of a private file", lambda: os.open(env("STATE") + "/secret", os.O_PATH))
attempt("O_PATH of PID 1's root", lambda: os.stat("/proc/1/root" + env("STATE")))
attempt("O_TMPFILE in /usr", lambda: os.open("/usr/lib", os.O_TMPFILE | os.O_RDWR))
attempt("openat2 out of the root", lambda: call("openat2", root, c(env("STATE") + "/secret"), ctypes.byref(ctypes.create_string_buffer(struct.pack("QQQ", 0, 0, 0), 24)), 24))
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "remount what is read-only",
        why: "read-only binds must stay so",
        harmless: Py(
            r#"must(os.statvfs("/usr").f_flag & os.ST_RDONLY); must(os.statvfs("/tmp").f_flag & os.ST_NOSUID)"#,
        ),
        malicious: Py(r#"
MS_RDONLY, MS_NOSUID, MS_REMOUNT, MS_BIND = 1, 2, 32, 4096
for path in ("/", "/usr", "/etc", "/proc", "/sys", "/run/tendon/hand"):
    attempt(f"remount {path}", lambda: ok("mount", c("none"), c(path), None, MS_REMOUNT | MS_BIND, None))
    attempt(f"mount_setattr {path}", lambda: ok("mount_setattr", -100, c(path), 0, ctypes.byref(ctypes.create_string_buffer(struct.pack("QQQQ", 0, 1, 0, 0), 32)), 32))
    attempt(f"umount {path}", lambda: ok("umount2", c(path), 2))
attempt("/usr is writable", lambda: not os.statvfs("/usr").f_flag & os.ST_RDONLY)
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "other mounts",
        why: "the mount table must show and hold no more than what was bound",
        harmless: Py(
            r#"must(any(line.split()[4] == "/work" for line in read("/proc/self/mountinfo", 1 << 16).decode().splitlines()))"#,
        ),
        malicious: Py(r#"
table = [line.split(" - ") for line in read("/proc/self/mountinfo", 1 << 18).decode().splitlines()]
points = [left.split()[4] for left, _ in table]
allowed = ("/usr", "/etc", "/bin", "/sbin", "/lib", "/work", "/tmp", "/dev", "/proc", "/sys", "/home", "/run", "/var", "/opt", "/nix", "/root/.cargo", "/root/.rustup", "/root/.nvm", "/root/.pyenv", "/root/.local")
attempt("find a mount that is none of ours", lambda: [point for point in points if point != "/" and not point.startswith(allowed)])
attempt("find the state directory's path", lambda: [left for left, right in table if env("STATE") in left + right and "lowerdir" not in right])
attempt("find the old root", lambda: [point for point in points if "oldroot" in point or "newroot" in point])
attempt("find a cgroup mount that is writable", lambda: [left for left, right in table if right.startswith("cgroup") and " rw" in left])
def writable():
    for left, right in table:
        options = left.split()[5].split(",")
        if "rw" in options and not left.split()[4].startswith(("/work", "/tmp", "/dev", "/proc", "/home/agent", "/run", "/var/tmp", "/root/.cargo", "/root")):
            if os.access(left.split()[4], os.W_OK):
                yield left
attempt("find a writable mount beside ours", lambda: list(writable()))
attempt("find a mount with setuid", lambda: [left for left, _ in table if "nosuid" not in left.split()[5] and left.split()[4] not in ("/",)])
attempt("find a mount with devices", lambda: [left for left, right in table if "nodev" not in left.split()[5] and not left.split()[4].startswith("/dev") and os.access(left.split()[4], os.W_OK)])
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "inherited descriptors",
        why: "a descriptor that the runner or the hand left open is a door",
        harmless: Py(r#"
for fd in (0, 1, 2):
    os.fstat(fd)
must(subprocess.call(["true"]) == 0)
"#),
        malicious: Py(r#"
def more():
    found = []
    for fd in range(3, 4096):
        try:
            found.append((fd, os.readlink(f"/proc/self/fd/{fd}")))
        except OSError:
            pass
    return found
attempt("find an open descriptor", more)
attempt("read the runner's descriptor", lambda: os.pread(int(env("FD")), 100, 0))
attempt("see a descriptor of a parent", lambda: os.listdir(f"/proc/{os.getppid()}/fd"))
attempt("take one by pidfd_getfd", lambda: call("pidfd_getfd", os.pidfd_open(os.getppid()), 3, 0))
attempt("find a socket on 0-2", lambda: [fd for fd in (0, 1, 2) if stat.S_ISSOCK(os.fstat(fd).st_mode)])
attempt("find a directory on 0-2", lambda: [fd for fd in (0, 1, 2) if stat.S_ISDIR(os.fstat(fd).st_mode)])
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "the base of a branch",
        why: "code changes its branch and never the base under it or another branch",
        harmless: Py(r#"
must(read("/work/base.txt") == b"base\n"); open("/work/base.txt", "a").close()
os.makedirs("/work/x", exist_ok=True); os.rmdir("/work/x")
"#),
        malicious: Py(r#"
attempt("see an overlay's directories", lambda: [right for right in (line.split(" - ")[1] for line in read("/proc/self/mountinfo", 1 << 18).decode().splitlines()) for word in right.replace(",", " ").split() if word.startswith(("upperdir=", "lowerdir=")) and os.path.exists(word.split("=", 1)[1].split(":")[0])])
attempt("set an overlay's attribute", lambda: os.setxattr("/work", "trusted.overlay.opaque", b"y") is None)
attempt("redirect a directory", lambda: (os.makedirs("/work/redirect", exist_ok=True), os.setxattr("/work/redirect", "trusted.overlay.redirect", b"/../../.."))[1] is None)
attempt("make a whiteout", lambda: os.mknod("/work/whiteout", stat.S_IFCHR, os.makedev(0, 0)) is None and None)
attempt("find another branch", lambda: os.listdir("/work/.."  + env("STATE")))
"#),
        expect: Held,
        control: Skip,
    },
];
