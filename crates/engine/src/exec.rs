//! One command on a branch, in the branch's warm hand.

use std::collections::HashMap;
use std::sync::{MutexGuard, PoisonError};

use hands::{ExecSpec, Stdin};
use proto::error::{Code, Coded};
use proto::http::{EXEC_REPORT_VERSION, ExecControl, ExecLine, ExecReport, ExecRequest};
use proto::ids::{BranchId, ExecId};
use proto::spec::command::join_command;
use tokio::sync::mpsc;
use vfs::{Actor, Writers};

use crate::below::Below;
use crate::disk;
use crate::hints;
use crate::id;
use crate::limits::{CONTROLS_MAX, EVENTS_MAX, RUNNING_MAX};
use crate::meter::{self, Call, LEFTOVERS_ENDED, Outlet, Passed};
use crate::runner::Runner;

/// Why a command on a branch could not be run. What it did wrong is in the report instead.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// The request makes no sense.
    #[error("{0}")]
    Request(String),
    /// Too much runs already, or the runner is ending.
    #[error("the runner takes no more work now")]
    Full,
    /// Policy refuses, there is no hand for it, or what it changed can't be captured.
    #[error(transparent)]
    Below(Below),
}

impl Coded for ExecError {
    fn code(&self) -> Code {
        match self {
            Self::Request(_) => Code::Usage,
            Self::Full => Code::Refused,
            Self::Below(error) => error.code(),
        }
    }
    fn hint(&self) -> Option<String> {
        match self {
            Self::Request(_) => None,
            Self::Full => Some("wait until something has ended, and try again".into()),
            Self::Below(error) => error.hint(),
        }
    }
}

/// For `map_err`: an error of a crate below.
fn below(error: impl Coded + Send + Sync + 'static) -> ExecError {
    ExecError::Below(Below::new(error))
}

impl Runner {
    /// Starts a command on a branch. The last event is [`ExecLine::Done`] or [`ExecLine::Failed`]; dropping the receiver
    /// cancels. `stdin` that ends is the end of the command's standard input.
    pub fn exec(
        &self,
        branch: BranchId,
        request: ExecRequest,
        stdin: mpsc::Receiver<Vec<u8>>,
    ) -> mpsc::Receiver<ExecLine> {
        let (events, receiver) = mpsc::channel(EVENTS_MAX);
        let runner = self.clone();
        self.spawn(async move {
            let last = match run(&runner, branch, request, stdin, &events).await {
                Ok(report) => ExecLine::Done { report: Box::new(report) },
                Err(error) => ExecLine::Failed { error: error.body() },
            };
            // Nobody may listen any more.
            let _ = events.send(last).await;
        });
        receiver
    }

    /// Acts on a running exec; `false` if none of that id runs.
    pub async fn control(&self, exec: &ExecId, control: ExecControl) -> bool {
        let sender = execs(self).get(exec).cloned();
        match sender {
            Some(sender) => sender.send(control).await.is_ok(),
            None => false,
        }
    }
}

fn execs(runner: &Runner) -> MutexGuard<'_, HashMap<ExecId, mpsc::Sender<ExecControl>>> {
    runner.inner.execs.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An exec's place among those that can be acted on.
struct Controlled<'a>(&'a Runner, ExecId);

impl Drop for Controlled<'_> {
    fn drop(&mut self) {
        execs(self.0).remove(&self.1);
    }
}

async fn run(
    runner: &Runner,
    branch: BranchId,
    request: ExecRequest,
    stdin: mpsc::Receiver<Vec<u8>>,
    events: &mpsc::Sender<ExecLine>,
) -> Result<ExecReport, ExecError> {
    let argv = words(&request)?;
    if runner.inner.stopping.is_cancelled() || runner.running() >= RUNNING_MAX {
        return Err(ExecError::Full);
    }
    let exec = ExecId::from_random(id::random());
    let actor = Actor::exec(&exec);
    let grant = runner.grant(&request.limits).map_err(below)?;
    let (grant_wall_ms, disk_bytes_max) = (grant.numbers.wall_ms_max, grant.numbers.disk_bytes_max);
    let confined = grant.limits.clone();
    disk::check_room(runner).await.map_err(below)?;
    let lease = runner.inner.warm.lease(runner, &branch, grant, &actor).await.map_err(below)?;
    lease.capture_others().await;
    let disk_end = disk::End::from_now(runner, &branch, &lease.hand, disk_bytes_max).await;
    let disk_end = disk_end.map_err(ExecError::Below)?;
    lease.set_disk_end(disk_end);
    let detail =
        join_command(&argv.iter().map(|word| String::from_utf8_lossy(word).into_owned()).collect::<Vec<_>>());
    let spec = ExecSpec {
        argv,
        cwd: request.cwd.as_ref().map(|cwd| cwd.as_bytes().to_vec()),
        env: request.env,
        stdin: if request.stdin { Stdin::Piped } else { Stdin::Null },
        pty: request.pty.map(|size| hands::Size { rows: size.rows, cols: size.cols }),
        wall_ms_max: Some(grant_wall_ms),
    };
    let (sender, control) = mpsc::channel(CONTROLS_MAX);
    execs(runner).insert(exec.clone(), sender);
    let _controlled = Controlled(runner, exec.clone());
    let _ = events.send(ExecLine::Started { exec: exec.clone() }).await;
    let event = Box::new(|fd, bytes| ExecLine::Output { fd, bytes });
    let mut outlet =
        Outlet { events: events.clone(), passed: Passed::All { event, waiting: None }, logs: None };
    let cancel = runner.inner.stopping.child_token();
    let call = Call {
        runner,
        branch: &branch,
        hand: &lease.hand,
        lease: Some(&lease),
        exec: &exec,
        spec,
        cancel: &cancel,
        disk_end,
        watched: &lease.watched,
        stdin: request.stdin.then_some(stdin),
        control: Some(control),
    };
    let ended = meter::run(call, &mut outlet).await;
    if ended.lingering {
        lease.lingering();
    }
    let scanned = branch.clone();
    let (writers, actor) = (lease.writers(), lease.may_have_written());
    let scan = runner.with_store(move |store| match writers {
        Writers::MayLive => store.scan_live(&scanned, &actor, Some(&detail)),
        Writers::Gone => store.scan(&scanned, &actor, Some(&detail)),
    });
    let scan = scan.await.map_err(below)?;
    let outcome = disk::last_look(ended.outcome, disk_end, &scan.disk);
    let mut warnings = runner.inner.warm.take_notices(&branch);
    warnings.extend(hints::file_size(&outcome, disk_bytes_max));
    warnings.extend(ended.leftovers_ended.then(|| LEFTOVERS_ENDED.to_owned()));
    warnings.extend(scan.unscannable_told());
    let mut confinement = lease.hand.confinement();
    confinement.limits = confined;
    Ok(ExecReport {
        version: EXEC_REPORT_VERSION,
        exec,
        branch,
        outcome,
        wall_ms: ended.wall_ms,
        cpu_ms: ended.cpu_ms,
        memory_bytes_peak: ended.memory_bytes_peak,
        changed: scan.changed,
        audit: scan.first_seq.zip(scan.last_seq),
        lingering: ended.lingering,
        warnings,
        confinement,
    })
}

fn words(request: &ExecRequest) -> Result<Vec<Vec<u8>>, ExecError> {
    let words: Result<Vec<Vec<u8>>, String> = request.argv.iter().map(|word| word.decode()).collect();
    let words = words.map_err(ExecError::Request)?;
    if words.first().is_none_or(Vec::is_empty) {
        return Err(ExecError::Request("the command is empty".into()));
    }
    if words.iter().any(|word| word.contains(&0)) {
        return Err(ExecError::Request("the command holds a NUL byte".into()));
    }
    for (name, value) in &request.env {
        if let Err(want) = proto::spec::check_env(name, value) {
            return Err(ExecError::Request(format!("an environment variable must be {want}")));
        }
    }
    Ok(words)
}
