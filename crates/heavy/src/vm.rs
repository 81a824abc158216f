//! A machine of another kind than this one: Debian's kernel for virtual machines in QEMU, with an initial file system and
//! a disk that are made here of a few of this machine's programs. Touches a temporary directory and starts QEMU.

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use testkit::kernel::{Kernel, MODULES};
use testkit::process::{command, run};

/// Where the guest's first program finds its modules, in the order of their names.
const MODULES_DIR: &str = "modules";
/// How often a boot is tried, and how long one may take: it takes 3 s on a quiet machine.
const BOOTS_MAX: u32 = 4;
const BOOT_MAX: Duration = Duration::from_secs(60);
/// The kernel's parameters. Without the two about the clock it measures the processor's against a timer, which can't be
/// done on a busy machine.
const PARAMETERS: &str = "console=ttyS0 quiet panic=-1 no_timer_check tsc=unstable tsc_early_khz=2000000 \
     cryptomgr.notests mitigations=off 8250.nr_uarts=1 reboot=t rdinit=/init";

/// A disk's content, put together below a directory of this machine.
pub struct Root(PathBuf);

impl Root {
    /// A root in the new directory `dir`, with the usual directories and nothing in them.
    pub fn new(dir: &Path) -> Self {
        for name in [
            "usr/bin",
            "usr/sbin",
            "usr/lib",
            "usr/lib64",
            "etc",
            "proc",
            "sys",
            "dev",
            "run",
            "tmp",
            "root",
            "home",
        ] {
            fs::create_dir_all(dir.join(name)).expect("mkdir");
        }
        for name in ["bin", "sbin", "lib", "lib64"] {
            std::os::unix::fs::symlink(format!("usr/{name}"), dir.join(name)).expect("symlink");
        }
        Root(dir.to_owned())
    }

    /// Writes a file.
    pub fn write(&self, path: &str, content: &str) {
        testkit::fixtures::write(&self.0.join(path), content);
    }

    /// Copies a file of this machine to `path`, without what only a debugger reads.
    pub fn install(&self, from: &Path, path: &str) {
        let to = self.0.join(path);
        fs::create_dir_all(to.parent().expect("a file's directory")).expect("mkdir");
        run(command("strip").args(["--strip-debug", "-o"]).arg(&to).arg(from));
    }

    /// Copies programs of this machine to where they are here, with the libraries that they load.
    pub fn programs(&self, names: &[&str]) {
        for name in names {
            let places = ["/usr/bin", "/usr/sbin", "/usr/local/bin"].map(|dir| Path::new(dir).join(name));
            let path = places.into_iter().find(|path| path.exists());
            let path = path.unwrap_or_else(|| panic!("this machine has no {name}"));
            self.copy(&path);
            // A static program has none, and ldd says so by its status.
            let list = command("ldd").arg(&path).output().expect("ldd");
            for word in String::from_utf8_lossy(&list.stdout).split_whitespace() {
                if word.starts_with('/') {
                    self.copy(Path::new(word));
                }
            }
        }
    }

    fn copy(&self, path: &Path) {
        let to = self.0.join(path.strip_prefix("/").expect("an absolute path"));
        fs::create_dir_all(to.parent().expect("a file's directory")).expect("mkdir");
        fs::copy(path, &to).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }

    /// Makes an ext4 image of it.
    fn image(&self, image: &Path, bytes: u64) {
        File::create(image).and_then(|file| file.set_len(bytes)).expect("a sparse file");
        let mut mkfs = command("mkfs.ext4");
        run(mkfs.args(["-q", "-F", "-E", "root_owner=0:0,lazy_itable_init=1", "-d"]).arg(&self.0).arg(image));
    }
}

/// A machine that runs; ended when dropped.
pub struct Machine {
    qemu: Child,
    lines: std::sync::mpsc::Receiver<String>,
}

impl Machine {
    /// Boots a machine with a disk of what is in `root`. `init` becomes its first program, with the kernel's modules in
    /// `/modules`; the disk is `/dev/vda`. `dir` is for files.
    ///
    /// It is up when it writes the line `up`. On a busy machine a boot now and then stops before its first program has come
    /// that far: it is given up and begun anew. What the program does afterwards has one trial only.
    pub fn boot(root: &Root, init: &Path, dir: &Path, up: &str) -> Self {
        let kernel = Kernel::find().expect("a kernel");
        let (disk, initramfs) = (dir.join("disk.img"), dir.join("initramfs"));
        root.image(&disk, 768 << 20);
        let modules = kernel.module_files(&MODULES).expect("modules");
        let file = File::create(&initramfs).expect("create");
        archive(io::BufWriter::new(file), init, &modules).expect("the initial file system");
        for _ in 0..BOOTS_MAX {
            let machine = Self::start(&kernel, &disk, &initramfs);
            if machine.lines_until(BOOT_MAX, |line| line == up).1 {
                return machine;
            }
            show("the boot stopped: once more");
        }
        panic!("no boot of {BOOTS_MAX} came to its first program within {BOOT_MAX:?}");
    }

    fn start(kernel: &Kernel, disk: &Path, initramfs: &Path) -> Self {
        let mut qemu = command("qemu-system-x86_64");
        qemu.args(["-machine", "microvm,pit=on,pic=on,rtc=on", "-accel", "tcg,thread=multi", "-cpu", "max"])
            .args([
                "-smp",
                "2",
                "-m",
                "1024",
                "-nodefaults",
                "-no-user-config",
                "-display",
                "none",
                "-no-reboot",
            ])
            .args(["-serial", "stdio", "-append", PARAMETERS, "-device", "virtio-blk-device,drive=disk"])
            .arg("-drive")
            .arg(format!("id=disk,file={},format=raw,if=none,cache=unsafe", disk.display()))
            .arg("-kernel")
            .arg(&kernel.image)
            .arg("-initrd")
            .arg(initramfs)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut qemu = qemu.spawn().expect("QEMU starts");
        let (sender, lines) = channel();
        let stdout = qemu.stdout.take().expect("a pipe");
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).trim_end().to_owned();
                show(&line);
                let _ = sender.send(line);
            }
        });
        Machine { qemu, lines }
    }

    /// What it writes to its serial line until it switches itself off, or is switched off after `limit`.
    pub fn output(self, limit: Duration) -> Vec<String> {
        self.lines_until(limit, |_| false).0
    }

    /// Lines until one of them is `last`, the end, or `limit`; and whether it was `last`.
    fn lines_until(&self, limit: Duration, last: impl Fn(&str) -> bool) -> (Vec<String>, bool) {
        let deadline = Instant::now() + limit;
        let mut all = Vec::new();
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) if last(&line) => return (all, true),
                Ok(line) => all.push(line),
                Err(RecvTimeoutError::Disconnected) => return (all, false),
                Err(RecvTimeoutError::Timeout) => {
                    all.push(format!("nothing more within {limit:?}"));
                    return (all, false);
                }
            }
        }
    }
}

#[expect(clippy::print_stderr, reason = "what a machine says, for who watches a test")]
fn show(line: &str) {
    eprintln!("guest: {line}");
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// An initial file system in cpio's "newc" format, which is what the kernel reads: `/init`, and the modules.
fn archive(mut out: impl Write, init: &Path, modules: &[PathBuf]) -> io::Result<()> {
    let (directory, file) = (0o040_755, 0o100_755);
    for dir in ["dev", "root", MODULES_DIR] {
        entry(&mut out, dir, directory, b"")?;
    }
    entry(&mut out, "init", file, &fs::read(init)?)?;
    for (n, module) in modules.iter().enumerate() {
        entry(&mut out, &format!("{MODULES_DIR}/{n:02}.ko"), file, &fs::read(module)?)?;
    }
    entry(&mut out, "TRAILER!!!", 0, b"")?;
    out.flush()
}

fn entry(out: &mut impl Write, name: &str, mode: u32, content: &[u8]) -> io::Result<()> {
    // inode, mode, uid, gid, links, mtime, size, device and special device, length of the name, checksum
    let fields = [0, mode, 0, 0, 1, 0, content.len() as u32, 0, 0, 0, 0, name.len() as u32 + 1, 0];
    let mut head = "070701".to_owned();
    head.extend(fields.iter().map(|field| format!("{field:08x}")));
    head.push_str(name);
    head.push('\0');
    for part in [head.as_bytes(), content] {
        out.write_all(part)?;
        out.write_all(&[0; 3][..part.len().wrapping_neg() % 4])?;
    }
    Ok(())
}
