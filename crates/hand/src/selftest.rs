//! What a hand finds about its own confinement, by looking and by trying.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream, UdpSocket};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::time::Duration;

use proto::hand::{BootConfig, Finding};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::table::Table;

/// How long a connection that must be refused may try: without a route the kernel answers at once.
const CONNECT_PATIENCE: Duration = Duration::from_millis(200);
/// Namespaces that have a link in `/proc/self/ns`.
const NAMESPACES: [&str; 7] = ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"];

/// All findings, as name and value. Values that prove confinement start with `closed`; `open` means that it leaks.
pub fn run(config: &BootConfig, landlock: &str, table: &Table) -> Vec<Finding> {
    let mut findings = Findings(Vec::new());
    findings.add("hand.version", env!("CARGO_PKG_VERSION"));
    findings.add("pid", std::process::id());
    findings.status();
    findings.add("landlock", landlock);
    findings.add("oom_score_adj.raised", table.raises_oom_score());
    for name in NAMESPACES {
        let link = std::fs::read_link(format!("/proc/self/ns/{name}"));
        findings
            .add(&format!("ns.{name}"), link.map_or_else(|e| kind(&e), |link| link.display().to_string()));
    }
    findings.add("net.interfaces", interfaces());
    let metadata = SocketAddrV4::new(Ipv4Addr::new(169, 254, 169, 254), 80);
    findings.add("net.metadata", connects(metadata));
    findings.add("net.host", connects(SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 1), 443)));
    findings.add("net.dns", sends(SocketAddrV4::new(Ipv4Addr::new(9, 9, 9, 9), 53)));
    for path in &config.denied_paths {
        let opened = path.decode_path().map_or_else(|error| error, |path| opens(&path));
        findings.add(&format!("path.{path}"), opened);
    }
    for (name, error) in sys::supervise::risky_syscalls() {
        findings.add(&format!("syscall.{name}"), syscall(&error));
    }
    findings.0
}

struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, name: &str, value: impl ToString) {
        self.0.push(Finding { name: name.into(), value: value.to_string() });
    }

    /// What the kernel says in `/proc/self/status`.
    fn status(&mut self) {
        let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let names = [
            ("Uid:", "uid"),
            ("Gid:", "gid"),
            ("Groups:", "groups"),
            ("CapEff:", "caps.effective"),
            ("CapPrm:", "caps.permitted"),
            ("CapBnd:", "caps.bounding"),
            ("CapAmb:", "caps.ambient"),
            ("NoNewPrivs:", "no_new_privs"),
            ("Seccomp:", "seccomp"),
        ];
        for (field, name) in names {
            let value = text.lines().find_map(|line| line.strip_prefix(field));
            self.add(
                name,
                value.map_or("unknown", |value| value.split_ascii_whitespace().next().unwrap_or("")),
            );
        }
    }
}

fn interfaces() -> String {
    let text = std::fs::read_to_string("/proc/net/dev").unwrap_or_default();
    let names = text.lines().skip(2).filter_map(|line| line.split_once(':')).map(|(name, _)| name.trim());
    names.collect::<Vec<_>>().join(" ")
}

fn connects(address: SocketAddrV4) -> String {
    match TcpStream::connect_timeout(&address.into(), CONNECT_PATIENCE) {
        Ok(_) => "open".into(),
        // No answer in time: there is a way out, only nobody at its end.
        Err(error) if error.kind() == io::ErrorKind::TimedOut => "open (no answer)".into(),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            "open (refused by the other side)".into()
        }
        Err(error) => format!("closed ({})", kind(&error)),
    }
}

fn sends(address: SocketAddrV4) -> String {
    let sent = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| socket.send_to(b"\0", address));
    sent.map_or_else(|error| format!("closed ({})", kind(&error)), |_| "open".into())
}

/// Whether there is anything to be had at a path. Only what can't be seen, or not be touched, is closed.
fn opens(path: &Path) -> String {
    let tried = std::fs::metadata(path).and_then(|meta| {
        if meta.file_type().is_socket() {
            return Ok(reaches(path)?);
        }
        // Neither a fifo nor a device may make this wait.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        rustix::fs::open(path, flags, Mode::empty())?;
        Ok(())
    });
    let closed = [io::ErrorKind::NotFound, io::ErrorKind::PermissionDenied, io::ErrorKind::NotADirectory];
    match tried {
        Ok(()) => "open".into(),
        Err(error) if closed.contains(&error.kind()) => format!("closed ({})", kind(&error)),
        Err(error) => format!("open ({})", kind(&error)),
    }
}

/// Connects to a socket in the file system.
fn reaches(path: &Path) -> Result<(), Errno> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
}

/// A filter answers with EPERM or ENOSYS; anything else means that the kernel itself looked at the call.
fn syscall(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(1 | 38) => format!("closed ({})", kind(error)),
        Some(0) => "open".into(),
        Some(_) | None => format!("open ({})", kind(error)),
    }
}

/// The kernel's word, short.
fn kind(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_lowercase()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::{UnixDatagram, UnixListener};

    use super::*;

    #[test]
    fn whatever_can_be_reached_is_open() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let _listens = UnixListener::bind(at("listens")).unwrap();
        drop(UnixListener::bind(at("deaf")).unwrap());
        let _datagrams = UnixDatagram::bind(at("datagrams")).unwrap();
        std::fs::write(at("file"), "").unwrap();
        symlink("listens", at("link")).unwrap();
        symlink("nowhere", at("dangling")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, at("fifo"), rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .unwrap();
        for (name, want) in [
            ("", "open"),
            ("file", "open"),
            ("fifo", "open"),
            ("listens", "open"),
            ("link", "open"),
            ("deaf", "open (connection refused)"),
            ("datagrams", "open (protocol wrong type for socket)"),
            ("missing", "closed (no such file or directory)"),
            ("dangling", "closed (no such file or directory)"),
            ("file/below", "closed (not a directory)"),
        ] {
            assert_eq!(opens(&at(name)), want, "{name}");
        }
    }
}
