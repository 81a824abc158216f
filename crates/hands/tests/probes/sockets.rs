//! Networks and sockets.

use crate::probe::{Control::*, Expect::*, Probe, Script::*};

pub const PROBES: &[Probe] = &[
    Probe {
        name: "the host's loopback",
        why: "services that listen on the host's loopback trust whoever reaches it",
        harmless: Py(r#"
listener = socket.create_server(("127.0.0.1", 0)); client = socket.create_connection(listener.getsockname(), 5)
server, _ = listener.accept(); client.sendall(b"hi"); must(server.recv(2) == b"hi")
"#),
        malicious: Py(r#"
port = int(env("PORT"))
for address in ("127.0.0.1", "127.0.0.2", "0.0.0.0", "::1", "::ffff:127.0.0.1", "localhost"):
    attempt(f"connect to {address}", lambda: socket.create_connection((address, port), 2))
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "networks",
        why: "no network until one is granted",
        harmless: Py(r#"
one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); one.bind(("127.0.0.1", 0))
two = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); two.sendto(b"x", one.getsockname()); one.settimeout(5); must(one.recv(1) == b"x")
must([name for _, name in socket.if_nameindex()] == ["lo"])
"#),
        malicious: Py(r#"
for address, port in (("169.254.169.254", 80), ("169.254.170.2", 80), ("100.100.100.200", 80), ("10.0.0.1", 53), ("172.17.0.1", 2375), ("192.168.1.1", 80), ("8.8.8.8", 53), ("1.1.1.1", 443), ("fd00:ec2::254", 80), ("2001:4860:4860::8888", 53)):
    attempt(f"connect to {address}", lambda: socket.create_connection((address, port), 2))
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    attempt(f"send to {address}", lambda: socket.socket(family, socket.SOCK_DGRAM).sendto(b"x", (address, port)))
for name in ("example.org", "metadata.google.internal", "host.docker.internal", "_gateway"):
    attempt(f"resolve {name}", lambda: socket.getaddrinfo(name, 80))
attempt("multicast", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("224.0.0.251", 5353)))
def broadcast():
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); one.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    return one.sendto(b"x", ("255.255.255.255", 67))
attempt("broadcast", broadcast)
attempt("another interface", lambda: [name for _, name in socket.if_nameindex() if name != "lo"])
attempt("a route", lambda: read("/proc/net/route").decode().splitlines()[1:])
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "abstract sockets of the host",
        why: "abstract names belong to the network namespace and no file guards them",
        harmless: Py(r#"
listener = socket.socket(socket.AF_UNIX); listener.bind("\0probe-own"); listener.listen()
client = socket.socket(socket.AF_UNIX); client.connect("\0probe-own"); must(listener.accept())
"#),
        malicious: Py(r#"
def connect(name):
    client = socket.socket(socket.AF_UNIX); client.settimeout(2); client.connect(name); return client
attempt("the planted name", lambda: connect("\0" + env("ABSTRACT")))
for name in ("/tmp/.X11-unix/X0", "/run/systemd/private", "/tmp/dbus-probe"):
    attempt(f"@{name}", lambda: connect("\0" + name))
attempt("names in /proc/net/unix", lambda: [line for line in read("/proc/net/unix", 1 << 20).decode(errors="replace").splitlines() if env("ABSTRACT") in line])
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "unix sockets of the host",
        why: "D-Bus, agents, container engines, the runner itself",
        harmless: Py(r#"
listener = socket.socket(socket.AF_UNIX); listener.bind("/tmp/probe.sock"); listener.listen()
client = socket.socket(socket.AF_UNIX); client.connect("/tmp/probe.sock"); must(listener.accept()); os.remove("/tmp/probe.sock")
"#),
        malicious: Py(r#"
def connect(path):
    client = socket.socket(socket.AF_UNIX); client.settimeout(2); client.connect(path); return client
import glob
for path in [env("STATE") + "/agent.sock", env("STATE") + "/run/tendond.sock", "/run/dbus/system_bus_socket", "/var/run/dbus/system_bus_socket", "/run/user/1000/bus", "/run/user/0/bus", "/run/docker.sock", "/var/run/docker.sock", "/run/containerd/containerd.sock", "/run/podman/podman.sock",
             "/run/systemd/private", "/run/systemd/journal/socket", "/run/systemd/journal/stdout", "/dev/log", "/tmp/.X11-unix/X0", "/run/snapd.socket", "/run/user/1000/gnupg/S.gpg-agent", "/run/user/1000/wayland-0", "/run/nscd/socket", "/run/libvirt/libvirt-sock"] + glob.glob("/tmp/ssh-*/agent.*"):
    attempt(f"connect to {path}", lambda: connect(path))
for name in ("SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS", "GPG_AGENT_INFO", "DISPLAY", "WAYLAND_DISPLAY", "XDG_RUNTIME_DIR"):
    attempt(f"be told {name}", lambda: os.environ.get(name))
"#),
        expect: Held,
        control: Harms,
    },
    Probe {
        name: "other families",
        why: "each protocol family is a part of the kernel that few have looked at",
        harmless: Py(r#"
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
    socket.socket(family, socket.SOCK_STREAM).close()
must(len(socket.socketpair()) == 2)
"#),
        malicious: Py(r#"
for name, family, kind, protocol in (("packet", 17, 3, 0x300), ("packet dgram", 17, 2, 0), ("raw", 2, 3, 1), ("raw all", 2, 3, 255), ("raw6", 10, 3, 58), ("vsock", 40, 1, 0), ("vsock dgram", 40, 2, 0), ("alg", 38, 5, 0), ("key", 15, 3, 2), ("can", 29, 3, 1), ("bluetooth", 31, 3, 1), ("tipc", 30, 2, 0),
             ("rds", 21, 5, 0), ("xdp", 44, 3, 0), ("kcm", 41, 5, 0), ("smc", 43, 1, 0), ("nfc", 39, 5, 0), ("x25", 9, 5, 0), ("appletalk", 5, 2, 0), ("ax25", 3, 5, 0), ("caif", 37, 5, 0), ("phonet", 35, 2, 0), ("qipcrtr", 42, 2, 0), ("mctp", 45, 2, 0), ("pppox", 24, 1, 0), ("rxrpc", 33, 2, 2)):
    attempt(f"a {name} socket", lambda: socket.socket(family, kind, protocol))
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "netlink",
        why: "netlink configures networks, audit, crypto and devices",
        harmless: Py(r#"must([name for _, name in socket.if_nameindex()] == ["lo"])"#),
        malicious: Py(r#"
for name, protocol in (("sock_diag", 4), ("nflog", 5), ("xfrm", 6), ("selinux", 7), ("iscsi", 8), ("audit", 9), ("fib_lookup", 10), ("connector", 11), ("netfilter", 12), ("kobject_uevent", 15), ("generic", 16), ("crypto", 21), ("usersock", 2)):
    attempt(f"netlink {name}", lambda: socket.socket(16, 3, protocol))
def change(kind, payload, flags=5 | 0x600):
    one = socket.socket(16, 3, 0); one.bind((0, 0)); one.settimeout(2)
    one.send(struct.pack("IHHII", 16 + len(payload), kind, flags, 1, 0) + payload)
    reply = one.recv(4096)
    code = struct.unpack_from("i", reply, 16)[0]
    if code:
        raise OSError(-code, "netlink")
    return True
attempt("take lo down", lambda: change(16, struct.pack("BxHiII", 0, 0, 1, 0, 1), 5))
attempt("make an interface", lambda: change(16, struct.pack("BxHiII", 0, 0, 0, 0, 0) + struct.pack("HH4s", 8, 3, b"prb\0") + struct.pack("HHHH8s", 16, 18, 12, 1, b"dummy\0\0\0")))
attempt("add a route", lambda: change(24, struct.pack("BBBBBBBBI", 2, 0, 0, 0, 254, 3, 0, 1, 0) + struct.pack("HHi", 8, 4, 1)))
attempt("add an address", lambda: change(20, struct.pack("BBBBi", 2, 8, 0, 0, 1) + struct.pack("HH4B", 8, 2, 10, 9, 9, 9)))
attempt("listen to groups of others", lambda: (lambda one: one.bind((0, 1)))(socket.socket(16, 3, 15)) is None)
"#),
        expect: Held,
        control: Skip,
    },
    Probe {
        name: "socket options",
        why: "options that act on the network stack of the machine",
        harmless: Py(r#"
one = socket.socket(); one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
"#),
        malicious: Py(r#"
one = socket.socket()
attempt("SO_MARK", lambda: one.setsockopt(1, 36, 1) is None)
attempt("SO_RCVBUFFORCE", lambda: one.setsockopt(1, 33, 1 << 20) is None)
attempt("SO_BINDTODEVICE", lambda: one.setsockopt(1, 25, b"eth0\0") is None)
attempt("SO_PRIORITY high", lambda: one.setsockopt(1, 12, 7) is None)
attempt("IP_TRANSPARENT", lambda: one.setsockopt(0, 19, 1) is None)
attempt("iptables", lambda: one.getsockopt(0, 64, 84))
attempt("replace iptables", lambda: one.setsockopt(0, 64, bytes(96)) is None)
attempt("a privileged port", lambda: one.bind(("127.0.0.1", 22)) is None)
attempt("SIOCSIFFLAGS", lambda: fcntl.ioctl(one, 0x8914, struct.pack("16sh14x", b"lo", 0)) is not None)
attempt("SIOCSIFNAME", lambda: fcntl.ioctl(one, 0x8923, struct.pack("16s16s", b"lo", b"probe")) is not None)
def credentials():
    pair = socket.socketpair()
    pair[1].setsockopt(1, 16, 1)
    pair[0].sendmsg([b"x"], [(1, 2, struct.pack("iII", 1, 0, 0))])
    return pair[1].recvmsg(1, 64)[1]
attempt("forged credentials", credentials)
"#),
        expect: Held,
        control: Skip,
    },
];
