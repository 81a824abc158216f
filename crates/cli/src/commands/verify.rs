//! `tendon verify`: runs a project's own checks on a branch of it, in a sandbox.

pub(super) mod summary;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use proto::client::{Client, ClientError, Events};
use proto::error::{Code, ErrorBody};
use proto::ids::VerifyId;
use proto::spec::command::join_command;
use proto::spec::{SPEC_BYTES_MAX, parse_spec, split_command};
use proto::units::show_millis;
use proto::verify::{
    LimitsAsked, Outcome as Ended, OutputWanted, Report, Source, VerifyEvent, VerifyRequest,
};
use serde_json::{Value, json};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::source::{SourceArgs, find_branch, resolved};
use super::{App, LimitArgs, body, branch_text, env_pair, file_error, host, usage};
use crate::Outcome;
use crate::environment::current_dir;

/// What helps with a source of a spec that leads nowhere.
const SPEC_DIR: &str = "check `source` in the spec: a relative path starts in the directory of the spec";
/// How often the progress line is drawn again.
const TICK: Duration = Duration::from_millis(100);

/// Run checks on a frozen copy of code, isolated, and report.
///
/// The source is frozen, a branch of it is made, and each command runs there in order, in a sandbox without network. Your
/// own files are never touched.
#[derive(Args)]
#[command(after_help = "\
Examples:
  tendon verify --repo . --check \"cargo test\"
  tendon verify --repo . --ref main --setup \"npm ci --offline\" --check \"npm test\" --check \"npm run lint\"
  tendon verify --files DIR --check \"python3 -m pytest\"
  tendon verify --spec verify.toml --json
  tendon verify --branch fix --check \"sh -c 'make && ./test | tee log'\"

No shell is implied: a command is split into words by the shell's rules of quoting,
and |, &&, $, * and the like are refused unless they are quoted.

verify.toml:
  setup = [\"npm ci --offline\"]
  checks = [\"npm test\", [\"npm\", \"run\", \"lint\"]]
  source = { repo = \".\", ref = \"main\" }
  env = { CI = \"1\" }
  limits = { cpus = 2, memory = \"2GiB\", pids = 512, disk = \"4GiB\", timeout = \"10m\" }
  keep_going = true")]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    source: SourceArgs,
    /// A branch that exists, as it is now, by id or name; it is not changed
    #[arg(long, value_name = "BRANCH", group = "source", help_heading = "Source", value_parser = branch_text)]
    branch: Option<String>,
    /// A file that declares all of this, see below. Its commands are the only ones; a source and limits that are given here
    /// besides are stronger, and variables are added. Without `source` in it, the source is the directory that the file is in
    #[arg(long, value_name = "FILE", conflicts_with_all = ["setup", "check"])]
    spec: Option<PathBuf>,
    /// A command that prepares; a failure ends the run. May be repeated
    #[arg(long, value_name = "COMMAND")]
    setup: Vec<String>,
    /// A command that must exit 0. May be repeated
    #[arg(long, value_name = "COMMAND")]
    check: Vec<String>,
    /// An environment variable for all commands. May be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = env_pair)]
    env: Vec<(String, String)>,
    /// Run the checks after a failed one too
    #[arg(long)]
    keep_going: bool,
    /// Keep the branch that the commands ran on
    #[arg(long)]
    keep_branch: bool,
    #[command(flatten)]
    limits: LimitArgs,
}

pub(crate) async fn run(args: VerifyArgs, app: &App<'_>) -> Outcome {
    let mut request = request(&args)?;
    if !app.output.shows_progress() {
        request.output = OutputWanted::None;
    }
    let client = app.client().await?;
    if let Some(branch) = &args.branch {
        request.source = Source::Branch { branch: find_branch(&client, branch).await?.id };
    }
    let events = client.events("/v1/verify", &request).await.map_err(ClientError::into_body)?;
    let report = Run::new(&client, app)?.follow(events).await?;
    app.output.clear_progress();
    if app.output.json {
        app.output.json(&report)
    } else {
        summary::print(&report, app.output)
    }
    Ok(status(&report))
}

/// The exit status of a report.
fn status(report: &Report) -> u8 {
    let lost = report.commands.iter().any(|command| matches!(command.outcome, Ended::HandLost { .. }));
    match report {
        Report { cancelled: true, .. } => Code::Cancelled.exit_status(),
        Report { passed: true, .. } => 0,
        Report { .. } if lost => Code::HandLost.exit_status(),
        Report { .. } => 1,
    }
}

fn request(args: &VerifyArgs) -> Result<VerifyRequest, ErrorBody> {
    let mut request = match &args.spec {
        Some(file) => {
            let request = read_spec(file)?;
            let given = args.source.names_one() || args.branch.is_some();
            VerifyRequest {
                source: if given { request.source } else { resolved(request.source, SPEC_DIR)? },
                ..request
            }
        }
        None => VerifyRequest {
            source: Source::Files { files: Vec::new() },
            setup: commands(&args.setup)?,
            checks: commands(&args.check)?,
            env: Vec::new(),
            limits: LimitsAsked::default(),
            keep_going: false,
            keep_branch: false,
            output: OutputWanted::default(),
        },
    };
    if request.checks.is_empty() {
        return Err(usage(
            "there is nothing to check",
            Some("add --check COMMAND, like: --check \"cargo test\""),
        ));
    }
    match args.source.source()? {
        Some(source) => request.source = source,
        None if args.spec.is_none() && args.branch.is_none() => {
            return Err(usage(
                "no source is named",
                Some("give --repo, --files, --branch or --spec; --repo . is this directory"),
            ));
        }
        None => {}
    }
    request.env.extend(args.env.iter().cloned());
    args.limits.apply(&mut request.limits);
    request.keep_going |= args.keep_going;
    request.keep_branch |= args.keep_branch;
    Ok(request)
}

fn commands(texts: &[String]) -> Result<Vec<Vec<String>>, ErrorBody> {
    texts.iter().map(|text| split_command(text).map_err(body)).collect()
}

fn read_spec(file: &Path) -> Result<VerifyRequest, ErrorBody> {
    use std::io::Read as _;
    let mut text = String::new();
    let opened = std::fs::File::open(file).map_err(|error| file_error("read the spec", file, &error))?;
    let read = opened.take(SPEC_BYTES_MAX as u64 + 1).read_to_string(&mut text);
    read.map_err(|error| file_error("read the spec", file, &error))?;
    let (here, own) = (current_dir()?, file.parent().unwrap_or(Path::new("")));
    // What a descriptor names (`--spec <(…)`, `/dev/stdin`) has no directory of its own.
    let real = std::fs::canonicalize(here.join(own)).unwrap_or_default();
    let of_descriptor = ["/dev", "/proc"].iter().any(|top| real.starts_with(top));
    parse_spec(&text, &if of_descriptor { here } else { here.join(own) }).map_err(body)
}

/// A verify that runs, and what is shown of it.
struct Run<'a> {
    client: &'a Client,
    app: &'a App<'a>,
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
    id: Option<VerifyId>,
    cancelled: bool,
    /// What is done now, since when, and the last line it wrote.
    now: (String, Instant, String),
}

impl<'a> Run<'a> {
    fn new(client: &'a Client, app: &'a App<'a>) -> Result<Self, ErrorBody> {
        let receive =
            |kind| signal(kind).map_err(|error| host(format!("signals can't be received: {error}")));
        Ok(Self {
            client,
            app,
            interrupt: receive(SignalKind::interrupt())?,
            terminate: receive(SignalKind::terminate())?,
            hangup: receive(SignalKind::hangup())?,
            id: None,
            cancelled: false,
            now: ("starting".into(), Instant::now(), String::new()),
        })
    }

    async fn follow(mut self, mut events: Events<VerifyEvent>) -> Result<Report, ErrorBody> {
        let mut tick = tokio::time::interval(TICK);
        loop {
            tokio::select! {
                event = events.next() => match event.map_err(ClientError::into_body)? {
                    VerifyEvent::Done { report } => return Ok(*report),
                    VerifyEvent::Failed { error } => return Err(error),
                    other @ (VerifyEvent::Accepted { .. }
                    | VerifyEvent::Progress { .. }
                    | VerifyEvent::Started { .. }
                    | VerifyEvent::Output { .. }
                    | VerifyEvent::Ended { .. }) => self.show(other),
                },
                _ = tick.tick() => self.draw(),
                _ = self.interrupt.recv() => self.cancel().await?,
                _ = self.terminate.recv() => self.cancel().await?,
                _ = self.hangup.recv() => self.cancel().await?,
            }
        }
    }

    /// The first time asks the runner to stop, so that the report still comes; the second time leaves.
    async fn cancel(&mut self) -> Result<(), ErrorBody> {
        let id = match &self.id {
            Some(id) if !self.cancelled => id.clone(),
            _ => {
                return Err(ErrorBody {
                    code: Code::Cancelled,
                    message: "cancelled".into(),
                    causes: vec![],
                    hint: None,
                });
            }
        };
        self.cancelled = true;
        self.now = ("cancelling".into(), Instant::now(), String::new());
        let cancelled = self.client.post::<Value>(&format!("/v1/verify/{id}/cancel"), &json!({})).await;
        // It may have ended meanwhile; then its report comes anyway.
        match cancelled.map_err(ClientError::into_body) {
            Err(error) if error.code != Code::NotFound => Err(error),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    fn show(&mut self, event: VerifyEvent) {
        match event {
            VerifyEvent::Accepted { id } => self.id = Some(id),
            VerifyEvent::Progress { message } => self.now = (message, Instant::now(), String::new()),
            VerifyEvent::Started { argv, .. } => {
                self.now = (join_command(&argv), Instant::now(), String::new())
            }
            VerifyEvent::Output { bytes, .. } => {
                let bytes = bytes.decode().unwrap_or_default();
                let text = crate::output::clean(&bytes);
                if let Some(line) = text.lines().rev().map(str::trim).find(|line| !line.is_empty()) {
                    self.now.2 = line.to_owned();
                }
                return;
            }
            VerifyEvent::Ended { .. } | VerifyEvent::Done { .. } | VerifyEvent::Failed { .. } => {}
        }
        self.draw();
    }

    fn draw(&self) {
        let (what, since, line) = &self.now;
        let elapsed = show_millis(u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX));
        self.app.output.progress(&format!("{what}  {elapsed}  {line}"));
    }
}
