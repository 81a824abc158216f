//! What a probe is, and how it is run on any tier.

use proto::verify::Outcome;

use crate::host::Host;

/// A pair of programs: the harmless one must live, the malicious one must do no harm.
pub struct Probe {
    /// Unique within its group.
    pub name: &'static str,
    /// What is at stake.
    pub why: &'static str,
    /// Uses the same mechanism for something that code may do: it exits with 0, before the malicious one and after it.
    pub harmless: Script,
    /// Tries to do harm.
    pub malicious: Script,
    /// How the malicious one ends.
    pub expect: Expect,
    /// Whether a control run checks that the malicious one does its harm where nothing confines it.
    pub control: Control,
}

/// A program. A prelude with helpers stands before it.
#[derive(Clone, Copy)]
pub enum Script {
    /// For `python3`.
    Py(&'static str),
    /// For `sh`.
    Sh(&'static str),
}

/// How a malicious program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// It tries everything, each attempt is refused, and it comes to its own end.
    Held,
    /// It may be killed or starved as well.
    Contained,
    /// It attacks what watches it, within [`ATTACK_MS_MAX`], and its exec ends in any way: the hand lives on.
    KillsItsExec,
}

/// The check that a malicious program is able to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// Run by root without a hand it does its harm, which is none to the machine.
    Harms,
    /// It is not run: its harm would be real, or needs what machines need not have.
    Skip,
}

/// How large a hand is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// Enough for anything but a bomb.
    Usual,
    /// [`SMALL_PIDS_MAX`], [`SMALL_MEMORY_BYTES_MAX`].
    Small,
}

/// Processes of a small hand.
pub const SMALL_PIDS_MAX: u32 = 64;
/// Memory of a small hand.
pub const SMALL_MEMORY_BYTES_MAX: u64 = 192 << 20;
/// How long any program may run, unless it is said otherwise.
pub const WALL_MS_MAX: u64 = 30_000;
/// How long a program may run that attacks what watches it.
pub const ATTACK_MS_MAX: u64 = 5_000;

/// A tier under test: it boots hands.
pub trait Tier {
    /// A hand over a branch of its own, with nothing in its environment.
    fn boot(&self, size: Size) -> Box<dyn Machine>;
}

/// A booted hand.
pub trait Machine {
    /// Runs a program to its end.
    fn run(&self, program: &Program) -> Ran;
}

/// What to run.
#[derive(Clone, Debug)]
pub struct Program {
    /// The program and its arguments.
    pub argv: Vec<String>,
    /// Its whole environment.
    pub env: Vec<(String, String)>,
    /// On a terminal instead of pipes.
    pub terminal: bool,
    /// When it is killed.
    pub wall_ms_max: u64,
}

/// How a program ended.
#[derive(Clone, Debug)]
pub struct Ran {
    /// How.
    pub outcome: Outcome,
    /// The first [`OUTPUT_BYTES_MAX`] of stdout and stderr, in the order of arrival.
    pub output: String,
}

/// Output that is kept of one program.
pub const OUTPUT_BYTES_MAX: usize = 256 * 1024;

/// Adds output, up to the bound.
pub fn append(output: &mut Vec<u8>, bytes: &[u8]) {
    let room = OUTPUT_BYTES_MAX.saturating_sub(output.len());
    output.extend_from_slice(&bytes[..bytes.len().min(room)]);
}

const PRELUDE_PY: &str = include_str!("prelude.py");
const PRELUDE_SH: &str = include_str!("prelude.sh");

impl Program {
    /// A probe's script with its prelude; `env` is what it learns about the host.
    pub fn of(script: Script, env: Vec<(String, String)>) -> Program {
        let (interpreter, text): (&[&str], String) = match script {
            Script::Py(text) => (&["python3", "-I", "-c"], format!("{PRELUDE_PY}\n{text}\nfinish()\n")),
            Script::Sh(text) => (&["sh", "-c"], format!("{PRELUDE_SH}\n{text}\nfinish\n")),
        };
        let argv = interpreter.iter().map(|part| (*part).to_owned()).chain([text]).collect();
        Program { argv, env, terminal: false, wall_ms_max: WALL_MS_MAX }
    }
}

impl Ran {
    /// The program came to its own end and nothing was refused to it.
    pub fn lived(&self) -> Result<(), String> {
        if self.outcome.passed() { Ok(()) } else { Err(format!("{:?}\n{}", self.outcome, self.output)) }
    }

    /// The program did no harm that it knows of.
    fn held(&self, expect: Expect) -> Result<(), String> {
        let lines: Vec<&str> = self.output.lines().collect();
        let harms: Vec<&str> = lines.iter().copied().filter(|line| line.starts_with("HARM")).collect();
        if !harms.is_empty() {
            return Err(harms.join("\n"));
        }
        let ended = self.outcome.passed() && lines.last() == Some(&"end");
        let tried = lines.iter().any(|line| line.starts_with("held: "));
        let lost = matches!(
            self.outcome,
            Outcome::HandLost { .. } | Outcome::Killed { .. } | Outcome::NotStarted { .. }
        );
        match expect {
            Expect::Held if !ended || !tried => {
                Err(format!("it did not try everything: {:?}\n{}", self.outcome, self.output))
            }
            Expect::Contained if lost => Err(format!("{:?}\n{}", self.outcome, self.output)),
            Expect::Held | Expect::Contained | Expect::KillsItsExec => Ok(()),
        }
    }
}

/// Runs a group of probes in one hand; panics with all that failed.
pub fn run_group(tier: &dyn Tier, host: &Host, size: Size, probes: &[Probe]) {
    let machine = tier.boot(size);
    let failed: Vec<String> =
        probes.iter().filter_map(|probe| run_probe(&*machine, host, probe).err()).collect();
    assert!(
        failed.is_empty(),
        "{} of {} probes failed\n\n{}",
        failed.len(),
        probes.len(),
        failed.join("\n\n")
    );
}

/// Runs each probe in a hand of its own.
pub fn run_each(tier: &dyn Tier, host: &Host, size: Size, probes: &[Probe]) {
    for probe in probes {
        run_group(tier, host, size, std::slice::from_ref(probe));
    }
}

fn run_probe(machine: &dyn Machine, host: &Host, probe: &Probe) -> Result<(), String> {
    let run = |script| machine.run(&program(probe, script, host));
    let name = |what: &str, problem: String| format!("{} ({}): {what}: {problem}", probe.name, probe.why);
    run(probe.harmless).lived().map_err(|problem| name("the harmless program did not live", problem))?;
    let ran = run(probe.malicious);
    ran.held(probe.expect).map_err(|problem| name("the malicious program", problem))?;
    host.unharmed(&ran.output).map_err(|problem| name("the host", problem))?;
    run(probe.harmless).lived().map_err(|problem| name("the hand afterwards", problem))
}

fn program(probe: &Probe, script: Script, host: &Host) -> Program {
    let mut program = Program::of(script, host.env());
    program.terminal = probe.name.contains("terminal");
    if probe.expect == Expect::KillsItsExec {
        program.wall_ms_max = ATTACK_MS_MAX;
    }
    program
}

/// Runs each harmless program in a neighbour's hand (or on the host) while, in another, the malicious one keeps what it took.
pub fn run_beside(tier: &dyn Tier, neighbour: &dyn Tier, host: &Host, probes: &[Probe]) {
    let neighbour = neighbour.boot(Size::Usual);
    let beside = |probe: &Probe| {
        let machine = tier.boot(Size::Usual);
        let harmless = program(probe, probe.harmless, host);
        let lived = |when: &str| {
            let problem = |problem| format!("{} ({}): {when}: {problem}", probe.name, probe.why);
            neighbour.run(&harmless).lived().map_err(problem)
        };
        lived("before")?;
        let ran = machine.run(&program(probe, probe.malicious, host));
        ran.held(probe.expect).map_err(|problem| format!("{}: {problem}", probe.name))?;
        lived("while a hand keeps all it could take")
    };
    let failed: Vec<String> = probes.iter().filter_map(|probe| beside(probe).err()).collect();
    assert!(
        failed.is_empty(),
        "{} of {} probes failed\n\n{}",
        failed.len(),
        probes.len(),
        failed.join("\n\n")
    );
}

/// Runs the malicious programs of a group where nothing confines them; panics if one that should does no harm.
pub fn run_controls(bare: &dyn Tier, host: &Host, probes: &[Probe]) {
    let machine = bare.boot(Size::Usual);
    for probe in probes.iter().filter(|probe| probe.control == Control::Harms) {
        let ran = machine.run(&program(probe, probe.malicious, host));
        assert!(
            ran.output.contains("HARM: "),
            "{}: unconfined, the malicious program does no harm, so it shows nothing: {:?}\n{}",
            probe.name,
            ran.outcome,
            ran.output
        );
    }
}
