//! No tier at all: root, in a mount and process id namespace of its own. It shows that the malicious programs can do harm.

use proto::verify::Outcome;
use tempfile::TempDir;

use crate::probe::{Machine, Program, Ran, Size, Tier};

/// Confines nothing.
pub struct Bare;

struct Unconfined {
    /// In the place of `/work` and `/tmp`.
    dir: TempDir,
}

impl Tier for Bare {
    fn boot(&self, _: Size) -> Box<dyn Machine> {
        Box::new(Unconfined { dir: testkit::temp_dir("bare") })
    }
}

impl Machine for Unconfined {
    fn run(&self, program: &Program) -> Ran {
        let mut unshare = testkit::process::command("unshare");
        unshare.args(["--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]);
        let dir = self.dir.path().display().to_string();
        // In this order: the directory itself is below `/tmp`.
        let here = |part: &String| part.replace("\"/tmp", &format!("\"{dir}")).replace("/work", &dir);
        unshare.args(program.argv.iter().map(here)).env_clear().envs(program.env.iter().cloned());
        let output = unshare.current_dir(self.dir.path()).stdin(std::process::Stdio::null()).output();
        let output = output.expect("unshare starts");
        let outcome = match output.status.code() {
            Some(code) => Outcome::Exited { code },
            None => Outcome::Cancelled,
        };
        let text = [output.stdout, output.stderr].concat();
        Ran { outcome, output: String::from_utf8_lossy(&text).into_owned() }
    }
}
