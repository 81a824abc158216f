//! `verify`: freeze the source, make a branch, run each command on it in a hand, and report what happened.

use std::path::{Path, PathBuf};

use hands::{ExecSpec, Hand, HandSpec, Stdin};
use policy::Grant;
use proto::api::BaseInfo;
use proto::error::{Code, Coded};
use proto::ids::{BranchId, ExecId, VerifyId};
use proto::path::shown;
use proto::repo;
use proto::spec::command::join_command;
use proto::units::counted;
use proto::verify::{
    ChangedFiles, CommandReport, Outcome, OutputTail, OutputWanted, Phase, REPORT_VERSION, Report, Source,
    VerifyEvent, VerifyRequest,
};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use vfs::{Actor, Cancel, Clock as _, DirSource, GitSource, ScanReport, SystemClock};

use crate::below::Below;
use crate::disk::{self, Watched};
use crate::fit::{self, Room};
use crate::hints;
use crate::id;
use crate::limits::{COMMANDS_MAX, EVENTS_MAX};
use crate::logs::{self, StreamLog};
use crate::meter::{self, Call, Ended, LEFTOVERS_ENDED, Outlet, Passed};
use crate::recent::Recent;
use crate::record::Changes;
use crate::runner::Runner;
use crate::warm::any_of;

/// Why a verify could not be run. What its commands did wrong is in the report instead.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// The request makes no sense.
    #[error("{0}")]
    Request(String),
    /// Too much runs already, or the runner is ending.
    #[error("the runner takes no more work now")]
    Full,
    /// It was cancelled before there was a branch to report on.
    #[error("cancelled before anything ran")]
    Cancelled,
    /// Policy refuses, the source can't be frozen, the store failed, or the hand can't be booted.
    #[error(transparent)]
    Below(Below),
    /// The logs can't be made.
    #[error("cannot make the directory for logs {}", path.display())]
    Logs {
        /// Where.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

impl Coded for VerifyError {
    fn code(&self) -> Code {
        match self {
            Self::Request(_) => Code::Usage,
            Self::Full => Code::Refused,
            Self::Cancelled => Code::Cancelled,
            Self::Below(error) => error.code(),
            Self::Logs { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => Code::NoSpace,
            Self::Logs { .. } => Code::HostBroken,
        }
    }
    fn hint(&self) -> Option<String> {
        match self {
            Self::Full => Some("wait until something has ended, and try again".into()),
            Self::Below(error) => error.hint(),
            Self::Request(_) | Self::Cancelled | Self::Logs { .. } => None,
        }
    }
}

/// For `map_err`: an error of a crate below.
fn below(error: impl Coded + Send + Sync + 'static) -> VerifyError {
    VerifyError::Below(Below::new(error))
}

impl Runner {
    /// Starts a verify. The last event is [`VerifyEvent::Done`] or [`VerifyEvent::Failed`]; dropping the receiver cancels.
    pub fn verify(&self, request: VerifyRequest) -> mpsc::Receiver<VerifyEvent> {
        let (events, receiver) = mpsc::channel(EVENTS_MAX);
        let runner = self.clone();
        self.spawn(async move {
            let last = match run(&runner, request, &events).await {
                Ok(report) => VerifyEvent::Done { report: Box::new(report) },
                Err(error) => VerifyEvent::Failed { error: error.body() },
            };
            // Nobody may listen any more.
            let _ = events.send(last).await;
        });
        receiver
    }
}

async fn run(
    runner: &Runner,
    request: VerifyRequest,
    events: &mpsc::Sender<VerifyEvent>,
) -> Result<Report, VerifyError> {
    let id = VerifyId::from_random(id::random());
    check(&request)?;
    let entered = runner.enter(&id).ok_or(VerifyError::Full)?;
    let _ = events.send(VerifyEvent::Accepted { id: id.clone() }).await;
    // The caller's end cancels too, from here to the last command.
    let watch = tokio::spawn({
        let (events, cancel) = (events.clone(), entered.cancel.clone());
        async move {
            events.closed().await;
            cancel.cancel();
        }
    });
    let run = Run { runner, id, request, events, cancel: entered.cancel.clone() };
    let report = run.all().await;
    watch.abort();
    report
}

fn check(request: &VerifyRequest) -> Result<(), VerifyError> {
    let bad = |text: &str| Err(VerifyError::Request(text.to_owned()));
    if request.checks.is_empty() {
        return bad("there is nothing to check");
    }
    if request.setup.len() + request.checks.len() > COMMANDS_MAX {
        return bad("there are too many commands");
    }
    if !fit::holds(request.setup.iter().chain(&request.checks)) {
        return bad("the commands are too long");
    }
    for argv in request.setup.iter().chain(&request.checks) {
        if let Err(error) = proto::spec::command::checked(argv.clone()) {
            return bad(&error.to_string());
        }
    }
    for (name, value) in &request.env {
        if let Err(want) = proto::spec::check_env(name, value) {
            return bad(&format!("an environment variable must be {want}"));
        }
    }
    Ok(())
}

/// One verify on its way.
struct Run<'a> {
    runner: &'a Runner,
    id: VerifyId,
    request: VerifyRequest,
    events: &'a mpsc::Sender<VerifyEvent>,
    cancel: CancellationToken,
}

/// The branch of a verify, and what is known of it before the first command.
struct Ground {
    base: BaseInfo,
    branch: BranchId,
    tree_before: String,
}

/// Where the commands run.
struct Stage<'a> {
    branch: &'a BranchId,
    hand: &'a Hand,
    watched: &'a Watched,
    logs: &'a Path,
    disk_bytes_max: u64,
}

/// What the commands left.
#[derive(Default)]
struct Ran {
    commands: Vec<CommandReport>,
    changes: Changes,
    audit: Option<(u64, u64)>,
    /// Commands whose background processes may be at work.
    lingering: Vec<Actor>,
    /// Something on the branch is not in its tree hash.
    unscannable: Option<String>,
    warnings: Vec<String>,
    room: Room,
    confinement: Option<proto::verify::Confinement>,
}

impl Run<'_> {
    async fn all(&self) -> Result<Report, VerifyError> {
        let (started, started_ms) = (Instant::now(), SystemClock.now_ms());
        let grant = self.runner.grant(&self.request.limits).map_err(below)?;
        let ground = self.ground().await?;
        let ran = self.on_branch(&ground, grant).await;
        let kept = self.request.keep_branch && ran.is_ok();
        let tree_after = self.runner.with_store({
            let branch = ground.branch.clone();
            move |store| store.tree_hash(&branch).ok()
        });
        let tree_after = tree_after.await;
        if kept {
            // A command that changed nothing may have recorded nothing.
            self.runner.with_store(vfs::Store::settle).await.map_err(below)?;
        } else {
            self.drop_branch(&ground.branch).await;
            self.runner.collect();
        }
        let ran = ran?;
        let cancelled = self.cancel.is_cancelled();
        let wall_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let passed = !cancelled
            && ran.unscannable.is_none()
            && ran.commands.iter().all(|command| command.outcome.passed());
        // The first ones are never left out for want of room.
        let warnings = ran.unscannable.into_iter().chain(ground.base.warnings).chain(ran.warnings);
        let warnings = ran.room.warnings(warnings.collect());
        Ok(Report {
            version: REPORT_VERSION,
            id: self.id.clone(),
            passed,
            cancelled,
            source: source_shown(&self.request.source),
            base: ground.base.id,
            branch: ground.branch,
            branch_kept: kept,
            git_head: ground.base.git_head,
            tree_before: ground.tree_before,
            tree_after,
            changed: ran.changes.total(),
            commands: ran.commands,
            confinement: ran.confinement,
            warnings,
            started_ms,
            wall_ms,
            audit: ran.audit,
        })
    }

    /// Freezes the source and makes the branch.
    async fn ground(&self) -> Result<Ground, VerifyError> {
        let actor = Actor::verify(&self.id);
        // The name marks the branch as one to drop if this runner dies; one that will be kept has none.
        let name = (!self.request.keep_branch).then(|| self.id.to_string());
        if let Source::Branch { branch } = &self.request.source {
            self.progress("forking the branch").await;
            let forked = self.runner.fork(branch.clone(), name, actor).await.map_err(below)?;
            let ground = self.runner.with_store(move |store| {
                let base = store.base(&forked.base).map_err(below)?;
                let tree_before = store.tree_hash(&forked.id).map_err(below)?;
                Ok(Ground { base, branch: forked.id, tree_before })
            });
            return ground.await;
        }
        let events = self.events.clone();
        let tell = move |message: String| {
            // Progress is for people: what a slow caller misses does not matter.
            let _ = events.try_send(VerifyEvent::Progress { message });
        };
        let base = self.runner.freeze_until(self.request.source.clone(), tell, &self.cancel).await;
        let base = base.map_err(|error| {
            let cancelled = matches!(error, vfs::FreezeError::Cancelled);
            if cancelled { VerifyError::Cancelled } else { below(error) }
        })?;
        let ground = self.runner.with_store(move |store| {
            // Nobody is told of it before its first command is recorded, which takes it to the disk.
            let branch = store.begin_branch(&base.id, name.as_deref(), &actor).map_err(below)?.id;
            let tree_before = base.tree.clone();
            Ok(Ground { base, branch, tree_before })
        });
        ground.await
    }

    async fn on_branch(&self, ground: &Ground, grant: Grant) -> Result<Ran, VerifyError> {
        let mut ran = Ran::default();
        if self.cancel.is_cancelled() {
            return Ok(ran);
        }
        let logs = self.make_logs().await?;
        let _taken = self.runner.inner.warm.take(self.runner, &ground.branch);
        self.progress("booting a hand").await;
        let (root, mount) = self.runner.root(&ground.branch).await.map_err(VerifyError::Below)?;
        let disk_bytes_max = grant.numbers.disk_bytes_max;
        let spec = HandSpec { root: mount, grant, env: self.request.env.clone() };
        disk::check_room(self.runner).await.map_err(below)?;
        // To its end, which is near, also when it is cancelled: the hand must be gone before its branch is.
        let hand = self.runner.hands().boot(spec).await.map_err(below)?;
        ran.confinement = Some(hand.confinement());
        let watched = self.runner.inner.disk.watch(self.runner, &ground.branch, &hand);
        let stage =
            Stage { branch: &ground.branch, hand: &hand, watched: &watched, logs: &logs, disk_bytes_max };
        let result = self.commands(&stage, &mut ran).await;
        // What the hand's background processes wrote last is captured after they are gone.
        hand.stop().await;
        let wrote = any_of(&ran.lingering).unwrap_or_else(|| Actor::verify(&self.id));
        match hand.is_gone() {
            true => ran.lingering.clear(),
            false => ran.lingering.push(wrote.clone()),
        }
        drop(root);
        result?;
        let last = self.scan(&ground.branch, &wrote, None, &mut ran).await;
        last.map(|_| ran)
    }

    async fn commands(&self, stage: &Stage<'_>, ran: &mut Ran) -> Result<(), VerifyError> {
        let disk_end = disk::End::from_now(self.runner, stage.branch, stage.hand, stage.disk_bytes_max).await;
        let disk_end = disk_end.map_err(VerifyError::Below)?;
        let setup = self.request.setup.iter().map(|argv| (Phase::Setup, argv));
        let all = setup.chain(self.request.checks.iter().map(|argv| (Phase::Check, argv)));
        let mut ended = false;
        for (index, (phase, argv)) in all.enumerate() {
            if ended || self.cancel.is_cancelled() {
                ran.commands.push(skipped(phase, argv));
                continue;
            }
            let index = u32::try_from(index).unwrap_or(u32::MAX);
            self.tell(VerifyEvent::Started { index, phase, argv: argv.clone() }).await;
            let report = self.command(stage, index, (phase, argv), disk_end, ran).await?;
            ended = stage.hand.lost().is_some() || ends(&report, self.request.keep_going);
            self.tell(VerifyEvent::Ended { index, report: Box::new(report.clone()) }).await;
            ran.commands.push(report);
        }
        Ok(())
    }

    async fn command(
        &self,
        stage: &Stage<'_>,
        index: u32,
        (phase, argv): (Phase, &[String]),
        disk_end: disk::End,
        ran: &mut Ran,
    ) -> Result<CommandReport, VerifyError> {
        let exec = ExecId::from_random(id::random());
        let log = |name: &str| StreamLog::new(stage.logs.join(format!("{index:03}-{name}")));
        let passed = match self.request.output {
            OutputWanted::None => Passed::Nothing,
            OutputWanted::Recent => Passed::Recent(Recent::new(Box::new(move |fd, bytes, skipped| {
                VerifyEvent::Output { index, fd, bytes, skipped }
            }))),
        };
        let mut outlet =
            Outlet { events: self.events.clone(), passed, logs: Some([log("stdout"), log("stderr")]) };
        let spec = ExecSpec {
            argv: argv.iter().map(|word| word.clone().into_bytes()).collect(),
            cwd: None,
            env: Vec::new(),
            stdin: Stdin::Null,
            pty: None,
            wall_ms_max: None,
        };
        let (branch, hand) = (stage.branch, stage.hand);
        // What earlier commands left behind wrote until now is not this one's.
        if let Some(others) = any_of(&ran.lingering) {
            self.scan(branch, &others, None, ran).await?;
        }
        let call = Call {
            runner: self.runner,
            branch,
            hand,
            lease: None,
            exec: &exec,
            spec,
            cancel: &self.cancel,
            disk_end,
            watched: stage.watched,
            stdin: None,
            control: None,
        };
        let ended = meter::run(call, &mut outlet).await;
        // What an earlier command left behind may write as well.
        let actor = Actor::exec(&exec).or(&ran.lingering);
        if ended.lingering {
            ran.lingering.push(Actor::exec(&exec));
        }
        // A hand that is lost was ended.
        if ended.leftovers_ended {
            ran.warnings.push(format!("before `{}`: {LEFTOVERS_ENDED}", join_command(argv)));
        }
        let scan = self.scan(branch, &actor, Some(join_command(argv)), ran).await?;
        let outcome = disk::last_look(ended.outcome, disk_end, &scan.disk);
        let ended = Ended { outcome, ..ended };
        let mut report = report(phase, argv, exec, ended, outlet, scan.changed);
        let hint = hints::offline(&report).map(str::to_owned);
        let hint = hint.or_else(|| hints::file_size(&report.outcome, stage.disk_bytes_max));
        ran.warnings.extend(hint.filter(|hint| !ran.warnings.contains(hint)));
        ran.room.fit(&mut report);
        Ok(report)
    }

    async fn scan(
        &self,
        branch: &BranchId,
        actor: &Actor,
        detail: Option<String>,
        ran: &mut Ran,
    ) -> Result<ScanReport, VerifyError> {
        let (branch, actor) = (branch.clone(), actor.clone());
        let live = !ran.lingering.is_empty();
        let scan = self.runner.with_store(move |store| match live {
            true => store.scan_live(&branch, &actor, detail.as_deref()),
            false => store.scan(&branch, &actor, detail.as_deref()),
        });
        let scan = scan.await.map_err(below)?;
        ran.changes.add(&scan.changed);
        // As of the last scan: what a command removed again does no harm.
        ran.unscannable = scan.unscannable_told();
        if let (Some(first), Some(last)) = (scan.first_seq, scan.last_seq) {
            ran.audit = Some((ran.audit.map_or(first, |(first, _)| first), last));
        }
        Ok(scan)
    }

    async fn make_logs(&self) -> Result<PathBuf, VerifyError> {
        let (dir, name) = (self.runner.store().logs_dir(), self.id.to_string());
        let path = dir.join(&name);
        let running = self.runner.running_verifies();
        let made = crate::Blocking::run(move || logs::make_dir(&dir, &name, &running)).await;
        made.map_err(|source| VerifyError::Logs { path, source })
    }

    /// A branch that can't be dropped now is dropped when its runner starts again, as every branch of a dead verify is.
    async fn drop_branch(&self, branch: &BranchId) {
        let actor = Actor::verify(&self.id);
        if let Err(error) = self.runner.drop_branch(branch.clone(), actor).await {
            tracing::error!(%branch, error = meter::chain(&error), "the branch of a verify can't be dropped");
        }
    }

    async fn progress(&self, message: &str) {
        self.tell(VerifyEvent::Progress { message: message.to_owned() }).await;
    }

    /// Tells the caller; does not wait for one who cancelled.
    async fn tell(&self, event: VerifyEvent) {
        if let Err(TrySendError::Full(event)) = self.events.try_send(event) {
            tokio::select! {
                _ = self.events.send(event) => {}
                () = self.cancel.cancelled() => {}
            }
        }
    }
}

impl Runner {
    /// Freezes a source as a base. A branch is no source for a base: its own base is. A caller that stops waiting ends it.
    pub async fn freeze(
        &self,
        source: Source,
        progress: impl Fn(String) + Send + 'static,
    ) -> Result<BaseInfo, vfs::FreezeError> {
        self.freeze_until(source, progress, &self.inner.stopping).await
    }

    /// The same, and `stop` ends it. Returns when nothing of it is left then.
    async fn freeze_until(
        &self,
        source: Source,
        progress: impl Fn(String) + Send + 'static,
        stop: &CancellationToken,
    ) -> Result<BaseInfo, vfs::FreezeError> {
        let cancel = CancelOnDrop(Cancel::default());
        let flag = cancel.0.clone();
        let freeze = self.with_store(move |store| {
            let progress = |text: &str| progress(text.to_owned());
            match source {
                Source::Git { repo, rev } => {
                    let source = GitSource { repo: os_path(&repo).into(), rev };
                    store.freeze_git_until(&source, &progress, &flag)
                }
                Source::Directory { path, include_ignored } => {
                    let source = DirSource { path: os_path(&path), include_ignored };
                    store.freeze_dir_until(&source, &progress, &flag)
                }
                Source::Files { files } => store.freeze_files(&files),
                Source::Branch { .. } => store.freeze_files(&[]),
            }
        });
        tokio::pin!(freeze);
        tokio::select! {
            base = &mut freeze => return base,
            () = stop.cancelled() => cancel.0.cancel(),
        }
        freeze.await
    }

    /// Policy's decision about limits.
    pub fn grant(&self, asked: &proto::verify::LimitsAsked) -> Result<Grant, policy::Refusal> {
        policy::grant(asked, &self.settings().policy, &self.hands().caps())
    }
}

struct CancelOnDrop(Cancel);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

fn os_path(path: &proto::path::JsonBytes) -> PathBuf {
    path.decode_path().unwrap_or_default()
}

/// Whether a command's end is the run's end.
fn ends(report: &CommandReport, keep_going: bool) -> bool {
    let broken = match &report.outcome {
        Outcome::HandLost { .. } | Outcome::Cancelled => true,
        // The branch stays too large.
        Outcome::LimitExceeded { limit } => disk::is_disk(limit),
        Outcome::Exited { .. }
        | Outcome::Signalled { .. }
        | Outcome::TimedOut { .. }
        | Outcome::NotStarted { .. }
        | Outcome::Killed { .. }
        | Outcome::Skipped => false,
    };
    !report.outcome.passed() && (broken || report.phase == Phase::Setup || !keep_going)
}

fn skipped(phase: Phase, argv: &[String]) -> CommandReport {
    CommandReport {
        phase,
        argv: argv.to_vec(),
        exec: None,
        outcome: Outcome::Skipped,
        stdout: OutputTail::default(),
        stderr: OutputTail::default(),
        wall_ms: 0,
        cpu_ms: 0,
        memory_bytes_peak: None,
        changed: ChangedFiles::default(),
    }
}

fn report(
    phase: Phase,
    argv: &[String],
    exec: ExecId,
    ended: Ended,
    outlet: Outlet<VerifyEvent>,
    changed: ChangedFiles,
) -> CommandReport {
    let [stdout, stderr] = outlet.logs.map_or_else(Default::default, |logs| logs.map(StreamLog::finish));
    CommandReport {
        phase,
        argv: argv.to_vec(),
        exec: Some(exec),
        outcome: ended.outcome,
        stdout,
        stderr,
        wall_ms: ended.wall_ms,
        cpu_ms: ended.cpu_ms,
        memory_bytes_peak: ended.memory_bytes_peak,
        changed,
    }
}

/// A source in words.
fn source_shown(source: &Source) -> String {
    match source {
        Source::Git { repo, rev } => {
            format!("{} at {}", repo::shown(&repo.decode().unwrap_or_default()), shown(rev.as_bytes()))
        }
        Source::Directory { path, .. } => path.to_string(),
        Source::Branch { branch } => format!("branch {branch}"),
        Source::Files { files } => counted(files.len() as u64, "file"),
    }
}
