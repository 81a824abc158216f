//! Repositories that are fetched over https and ssh, what is refused as an address, and where a password must not show.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::io::BufRead as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use common::{Ran, Tendon, can_run};
use testkit::fixtures::{git, write};
use testkit::process::{command, run};
use testkit::{GitRepo, Need, have_all, temp_dir};

const PASSWORD: &str = "hunter2-swordfish";

/// `git http-backend` behind TLS. Below `/private/` it asks for a password.
const SERVER: &str = r#"
import base64, http.server, os, ssl, subprocess, sys
root, cert, key, password = sys.argv[1:5]
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def serve(self):
        want = "Basic " + base64.b64encode(("me:" + password).encode()).decode()
        if self.path.startswith("/private/") and self.headers.get("authorization") != want:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="private"')
            self.send_header("Content-Length", "0")
            return self.end_headers()
        path, _, query = self.path.partition("?")
        env = dict(os.environ, GIT_PROJECT_ROOT=root, GIT_HTTP_EXPORT_ALL="1", PATH_INFO=path, QUERY_STRING=query,
            REQUEST_METHOD=self.command, CONTENT_TYPE=self.headers.get("content-type", ""),
            GIT_PROTOCOL=self.headers.get("git-protocol", ""), HTTP_CONTENT_ENCODING=self.headers.get("content-encoding", ""),
            GIT_CONFIG_COUNT="1", GIT_CONFIG_KEY_0="safe.directory", GIT_CONFIG_VALUE_0="*")
        if self.headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
        env["CONTENT_LENGTH"] = str(len(body))
        out = subprocess.run(["git", "http-backend"], input=body, env=env, capture_output=True).stdout
        head, _, rest = out.partition(b"\r\n\r\n")
        fields = [line.split(": ", 1) for line in head.decode().split("\r\n") if line]
        self.send_response(next((int(value[:3]) for name, value in fields if name == "Status"), 200))
        for name, value in fields:
            if name != "Status": self.send_header(name, value)
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest)
    do_GET = do_POST = serve
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(cert, key)
server.socket = context.wrap_socket(server.socket, server_side=True)
print(server.server_address[1], flush=True)
server.serve_forever()
"#;

/// A server of the repositories below `dir`, with a certificate for `host` that it signed itself.
struct Server {
    child: Child,
    port: String,
    certificate: PathBuf,
}

impl Server {
    fn start(dir: &Path, host: &str) -> Self {
        let (certificate, key) = (dir.join(format!("{host}.pem")), dir.join(format!("{host}.key")));
        let mut openssl = command("openssl");
        openssl.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]);
        openssl.args(["-days", "2", "-subj", &format!("/CN={host}"), "-addext"]);
        openssl.arg(format!("subjectAltName=DNS:{host}")).arg("-keyout").arg(&key).arg("-out");
        run(openssl.arg(&certificate));
        let script = dir.join("server.py");
        write(&script, SERVER);
        let mut python = command("python3");
        python.arg(&script).arg(dir).arg(&certificate).arg(&key).arg(PASSWORD);
        let mut child = python.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut port = String::new();
        std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut port).unwrap();
        Self { child, port: port.trim().to_owned(), certificate }
    }

    fn url(&self, rest: &str) -> String {
        format!("https://localhost:{}/{rest}", self.port)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A `tendon` whose git trusts `certificate`, and its arguments.
fn call(tendon: &Tendon, certificate: Option<&Path>, args: &[&str]) -> Ran {
    let mut command = tendon.command(args);
    for name in ["https_proxy", "http_proxy", "HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "all_proxy"] {
        command.env_remove(name);
    }
    command.env_remove("GIT_SSL_CAINFO").env("RUST_LOG", "trace").env("HOME", tendon.dir.path());
    command.envs(certificate.map(|path| ("GIT_SSL_CAINFO", path)));
    Ran::new(command.output().unwrap(), args)
}

fn can_serve() -> bool {
    can_run() && have_all(&[Need::Python, Need::Openssl])
}

/// A directory with the repositories `repo.git` and `private/repo.git`.
fn served() -> tempfile::TempDir {
    let dir = temp_dir("served");
    for name in ["repo.git", "private/repo.git"] {
        let repo = GitRepo::at(&dir.path().join(name));
        repo.file("a", "1\n").commit("first");
        repo.git(&["tag", "v1"]);
        repo.file("a", "2\n").commit("second");
    }
    dir
}

#[test]
fn https_is_fetched_when_the_certificate_is_trusted() {
    if !can_serve() {
        return;
    }
    let dir = served();
    let server = Server::start(dir.path(), "localhost");
    let tendon = Tendon::new();
    let verify = |args: &[&str]| {
        call(
            &tendon,
            Some(&server.certificate),
            &[&["verify", "--repo", &server.url("repo.git")], args].concat(),
        )
    };
    verify(&["--check", "grep 2 a"]).expect(0);
    verify(&["--ref", "v1", "--check", "grep 1 a"]).expect(0);
    verify(&["--ref", "nosuch", "--check", "true"]).expect(2).says("nosuch");
    let url = server.url("nosuch.git");
    call(&tendon, Some(&server.certificate), &["verify", "--repo", &url, "--check", "true"])
        .expect(2)
        .says("not found");
}

#[test]
fn a_certificate_that_is_not_trusted_is_refused() {
    if !can_serve() {
        return;
    }
    let dir = served();
    for (host, trusted) in [("localhost", false), ("elsewhere.test", true)] {
        let server = Server::start(dir.path(), host);
        let tendon = Tendon::new();
        let certificate = trusted.then_some(server.certificate.as_path());
        let args = ["verify", "--repo", &server.url("repo.git"), "--check", "true"];
        call(&tendon, certificate, &args)
            .expect(2)
            .says("certificate")
            .says("hint: if its certificate is signed");
    }
}

#[test]
fn a_password_in_an_address_shows_nowhere() {
    if !can_serve() {
        return;
    }
    let dir = served();
    let server = Server::start(dir.path(), "localhost");
    let tendon = Tendon::new();
    let with = |user: &str, path: &str| server.url(path).replace("https://", &format!("https://{user}@"));
    let good = with(&format!("me:{PASSWORD}"), "private/repo.git");
    let calls: [(i32, &[&str]); 9] = [
        (0, &["verify", "--repo", &good, "--check", "grep 2 a", "--json"]),
        (0, &["verify", "--repo", &good, "--check", "sh -c 'cat .git/config .git/*HEAD; env'", "--json"]),
        (0, &["branch", "create", "--repo", &good, "--name", "fix"]),
        (0, &["base", "list", "--json"]),
        (0, &["audit", "log", "--json"]),
        (2, &["verify", "--repo", &good, "--ref", "nosuch", "--check", "true"]),
        (2, &["verify", "--repo", &with(&format!("you:{PASSWORD}"), "private/repo.git"), "--check", "true"]),
        (2, &["verify", "--repo", &with(&format!("me:{PASSWORD}"), "nosuch.git"), "--check", "true"]),
        (2, &["verify", "--repo", &good.replace("https", "gopher"), "--check", "true"]),
    ];
    for (status, args) in calls {
        let ran = call(&tendon, Some(&server.certificate), args);
        ran.expect(status);
        assert!(!format!("{} {}", ran.stdout, ran.stderr).contains(PASSWORD), "{ran:?}");
    }
    let found = command("grep").args(["-rlaF", PASSWORD]).arg(tendon.state()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&found.stdout), "", "files that hold the password");
    assert!(tendon.state().join("logs/tendond.log").exists());
}

#[test]
fn ssh_is_fetched_without_asking() {
    if !can_run() {
        return;
    }
    let dir = served();
    let (bin, seen) = (dir.path().join("bin"), dir.path().join("seen"));
    // What a server does with the last argument.
    let script = format!(
        "#!/bin/sh\necho \"$@\" >>{}\ncase \"$*\" in *refusing.test*) printf 'ssh: no, and why\\r\\n' >&2; exit 255;; esac\nfor last; do :; done\nGIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*' exec sh -c \"$last\"\n",
        seen.display()
    );
    write(&bin.join("ssh"), script);
    std::fs::set_permissions(bin.join("ssh"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let tendon = Tendon::new();
    let root = dir.path().to_str().unwrap();
    let verify = |url: &str| {
        let args = ["verify", "--repo", url, "--check", "grep 2 a"];
        let mut command = tendon.command(&args);
        let path =
            std::env::join_paths([bin.clone(), "/usr/local/bin".into(), "/usr/bin".into(), "/bin".into()]);
        command.env("PATH", path.unwrap()).env("GIT_SSH_COMMAND", "touch pwned");
        Ran::new(command.output().unwrap(), &args)
    };
    verify(&format!("ssh://git@host.test:2222{root}/repo.git")).expect(0);
    verify(&format!("git@host.test:{root}/repo.git")).expect(0);
    verify("git@refusing.test:x").expect(2).says("ssh: no, and why").says("hint: check the address");
    let seen = std::fs::read_to_string(seen).unwrap();
    assert!(seen.lines().count() >= 2 && seen.lines().all(|line| line.contains("BatchMode=yes")), "{seen}");
    assert!(seen.contains("-p 2222 git@host.test") && seen.contains("git-upload-pack"), "{seen}");
}

#[test]
fn what_would_run_a_program_is_no_address_and_no_ref() {
    if !can_run() {
        return;
    }
    let tendon = Tendon::new();
    let dir = served();
    let pwned = dir.path().join("pwned");
    let touch = format!("touch {}", pwned.display());
    let repo = dir.path().join("repo.git");
    for hook in ["post-checkout", "post-upload-pack", "pre-receive", "reference-transaction"] {
        write(&repo.join(".git/hooks").join(hook), format!("#!/bin/sh\n{touch}\n"));
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(repo.join(".git/hooks").join(hook), mode).unwrap();
    }
    for key in
        ["uploadpack.packObjectsHook", "core.fsmonitor", "core.sshCommand", "core.alternateRefsCommand"]
    {
        run(git(&repo).args(["config", key, &touch]));
    }
    let file = format!("file://{}", repo.display());
    tendon.run(&["verify", "--repo", &file, "--check", "grep 2 a"]).expect(0);
    let (pack, proxy) = (format!("--upload-pack={touch}"), format!("-oProxyCommand={touch}"));
    for url in [
        &format!("ext::sh -c {}", touch.replace(' ', "% ")),
        &format!("ext::sh -c {} ://x", touch.replace(' ', "% ")),
        "fd::0://x",
        "transport::https://x/y",
        "file://relative/path",
        &pack,
        &proxy,
        &format!("{proxy}@host:x"),
        &format!("ssh://{proxy}/x"),
        &format!("ssh://me@{proxy}/x"),
        "",
    ] {
        let ran = tendon.run(&["verify", &format!("--repo={url}"), "--ref", "main", "--check", "true"]);
        ran.expect(2).says("error:");
        assert!(!ran.stderr.contains("panicked"), "{ran:?}");
    }
    for rev in
        [&pack, "-x", "--all", "a b", "main:refs/heads/x", "refs/heads/main:refs/heads/x", "x\ny", "@{-1}"]
    {
        tendon
            .run(&["verify", "--repo", &file, &format!("--ref={rev}"), "--check", "true"])
            .expect(2)
            .says("no ref");
    }
    assert!(!pwned.exists(), "something was run");
}
