//! What of the host is at stake: planted secrets, listeners, a process; and whether they are still as they were.

use std::io::ErrorKind;
use std::net::TcpListener;
use std::os::fd::AsRawFd as _;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::atomic::{AtomicU32, Ordering};

use tempfile::TempDir;

/// Planted where code must not read; it may be in no program's output.
const SECRET: &str = "tendon-probe-secret-6b0f";

/// The host's side of the probes.
pub struct Host {
    /// As a state directory is: readable by the runner's user only.
    state: TempDir,
    /// In the runner's home, when it is root's.
    home: Option<TempDir>,
    tcp: TcpListener,
    abstract_name: String,
    abstract_socket: UnixListener,
    unix_socket: UnixListener,
    victim: Child,
    /// Stays open, and is inherited by what is started carelessly.
    inheritable: std::fs::File,
}

impl Host {
    /// Plants everything.
    pub fn new() -> Host {
        let state = testkit::temp_dir("probes");
        plant(&state.path().join("secret"));
        let home = Path::new("/root");
        let home = testkit::user::is_root().then(|| {
            tempfile::Builder::new().prefix(".tendon-probes-").tempdir_in(home).expect("a directory in /root")
        });
        if let Some(home) = &home {
            plant(&home.path().join("secret"));
        }
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let abstract_name = format!("tendon-probes-{}-{count}", std::process::id());
        let address = SocketAddr::from_abstract_name(&abstract_name).expect("an abstract name");
        let listeners = (
            TcpListener::bind("127.0.0.1:0").expect("a port"),
            UnixListener::bind_addr(&address).expect("an abstract socket"),
            UnixListener::bind(state.path().join("agent.sock")).expect("a socket"),
        );
        listeners.0.set_nonblocking(true).expect("nonblocking");
        listeners.1.set_nonblocking(true).expect("nonblocking");
        listeners.2.set_nonblocking(true).expect("nonblocking");
        let victim = testkit::process::command("sleep").arg("600").spawn().expect("sleep");
        let inheritable = std::fs::File::open(state.path().join("secret")).expect("the secret");
        rustix::io::fcntl_setfd(&inheritable, rustix::io::FdFlags::empty()).expect("fcntl");
        Host {
            state,
            home,
            tcp: listeners.0,
            abstract_name,
            abstract_socket: listeners.1,
            unix_socket: listeners.2,
            victim,
            inheritable,
        }
    }

    /// The state directory.
    pub fn state(&self) -> &Path {
        self.state.path()
    }

    /// What the probes are told, so that they need not guess.
    pub fn env(&self) -> Vec<(String, String)> {
        let port = self.tcp.local_addr().expect("an address").port();
        let home = self.home.as_ref().map_or(Path::new("/root"), TempDir::path);
        let facts = [
            ("PROBE_STATE", self.state.path().display().to_string()),
            ("PROBE_HOME_DIR", home.display().to_string()),
            ("PROBE_PORT", port.to_string()),
            ("PROBE_ABSTRACT", self.abstract_name.clone()),
            ("PROBE_VICTIM", self.victim.id().to_string()),
            ("PROBE_RUNNER", std::process::id().to_string()),
            ("PROBE_HOSTNAME", hostname()),
            ("PROBE_FD", self.inheritable.as_raw_fd().to_string()),
            ("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin".to_owned()),
            ("HOME", "/home/agent".to_owned()),
        ];
        facts.map(|(name, value)| (name.to_owned(), value)).to_vec()
    }

    /// Whether all is as it was, and a program's output tells no secret.
    pub fn unharmed(&self, output: &str) -> Result<(), String> {
        if output.contains(SECRET) {
            return Err(format!("the secret was read\n{output}"));
        }
        for dir in self.secret_dirs() {
            let secret =
                std::fs::read_to_string(dir.join("secret")).map_err(|error| format!("{dir:?}: {error}"))?;
            if secret != SECRET || dir.join("tendon-probe").exists() {
                return Err(format!("{dir:?} was changed"));
            }
        }
        reached("the TCP port", self.tcp.accept())?;
        reached("the abstract socket", self.abstract_socket.accept())?;
        reached("the unix socket", self.unix_socket.accept())?;
        let state = std::fs::read_to_string(format!("/proc/{}/stat", self.victim.id())).unwrap_or_default();
        if !state.contains(") S ") {
            return Err(format!("the host's process was touched: {state}"));
        }
        Ok(())
    }

    fn secret_dirs(&self) -> Vec<PathBuf> {
        std::iter::once(&self.state).chain(&self.home).map(|dir| dir.path().to_owned()).collect()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.victim.kill();
        let _ = self.victim.wait();
    }
}

/// The value that is planted in the runner's environment.
pub fn secret() -> &'static str {
    SECRET
}

fn plant(path: &Path) {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::write(path, SECRET).expect("a secret");
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).expect("chmod");
}

fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn reached<T>(what: &str, accepted: std::io::Result<T>) -> Result<(), String> {
    match accepted {
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
        Ok(_) => Err(format!("{what} was reached")),
        Err(error) => Err(format!("{what}: {error}")),
    }
}
