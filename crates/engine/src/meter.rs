//! One command in a hand, from its start to its end: output passed on and logged, input passed in, cancelled when the
//! caller asks or is gone, and ended when the branch outgrows its limit.

use std::future::pending;

use hands::{ExecEvent, ExecSpec, ExecStdin, Hand};
use proto::http::ExecControl;
use proto::ids::{BranchId, ExecId};
use proto::path::JsonBytes;
use proto::verify::Outcome;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::disk::{self, End, Watched};
use crate::limits::CANCEL_GRACE;
use crate::logs::StreamLog;
use crate::recent::Recent;
use crate::runner::Runner;
use crate::warm::Lease;

/// A command to run.
pub(crate) struct Call<'a> {
    pub(crate) runner: &'a Runner,
    pub(crate) branch: &'a BranchId,
    pub(crate) hand: &'a Hand,
    /// The place on a warm hand, in which others may run; a hand of one's own has none.
    pub(crate) lease: Option<&'a Lease>,
    pub(crate) exec: &'a ExecId,
    pub(crate) spec: ExecSpec,
    pub(crate) cancel: &'a CancellationToken,
    /// The branch may not be larger than this.
    pub(crate) disk_end: End,
    pub(crate) watched: &'a Watched,
    /// The command's standard input.
    pub(crate) stdin: Option<mpsc::Receiver<Vec<u8>>>,
    /// What else the caller wants of it.
    pub(crate) control: Option<mpsc::Receiver<ExecControl>>,
}

/// Where a command's output goes.
pub(crate) struct Outlet<E> {
    pub(crate) events: mpsc::Sender<E>,
    pub(crate) passed: Passed<E>,
    /// Standard output and standard error.
    pub(crate) logs: Option<[StreamLog; 2]>,
}

/// What of the output the caller is sent.
pub(crate) enum Passed<E> {
    /// All; the command waits for a slow caller.
    All {
        event: Box<dyn Fn(u8, JsonBytes) -> E + Send + Sync>,
        /// For what the caller has no room yet.
        waiting: Option<E>,
    },
    /// The latest of it, now and then; the command waits for nobody.
    Recent(Recent<E>),
    /// Nothing.
    Nothing,
}

/// How a command ended.
pub(crate) struct Ended {
    pub(crate) outcome: Outcome,
    pub(crate) wall_ms: u64,
    pub(crate) cpu_ms: u64,
    pub(crate) memory_bytes_peak: Option<u64>,
    pub(crate) lingering: bool,
    /// Background processes of earlier commands filled the process limit and were ended.
    pub(crate) leftovers_ended: bool,
}

/// What people are told of that.
pub(crate) const LEFTOVERS_ENDED: &str =
    "background processes of earlier commands filled the process limit and were ended";

/// Runs it.
pub(crate) async fn run<E: Send + 'static>(mut call: Call<'_>, outlet: &mut Outlet<E>) -> Ended {
    let started = Instant::now();
    let (mut outcome, mut reported) = once(&mut call, outlet).await;
    let leftovers_ended =
        reported.as_ref().is_some_and(|reported| reported.processes_full) && end_leftovers(&call).await;
    if leftovers_ended {
        tracing::warn!(branch = %call.branch, exec = %call.exec, "{LEFTOVERS_ENDED}");
        (outcome, reported) = once(&mut call, outlet).await;
    }
    if call.hand.lost().is_some() {
        // What it ran may go on while nobody hears of it: not while its branch is captured.
        call.hand.stop().await;
    }
    if let Outcome::LimitExceeded { limit } = &outcome
        && disk::is_disk(limit)
    {
        // What it left running would go on filling the disk.
        end_leftovers(&call).await;
    }
    if let Passed::Recent(recent) = &mut outlet.passed {
        recent.finish(&outlet.events, call.cancel).await;
    }
    let wall_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    let reported = reported.unwrap_or(Reported { wall_ms, ..Reported::default() });
    // Without a control group the largest process stands for all.
    let rss = Some(reported.rss_bytes_max).filter(|rss| *rss > 0);
    Ended {
        outcome,
        wall_ms: reported.wall_ms,
        cpu_ms: reported.cpu_ms,
        memory_bytes_peak: call.hand.memory_peak().or(rss),
        lingering: reported.lingering,
        leftovers_ended,
    }
}

async fn once<E: Send + 'static>(call: &mut Call<'_>, outlet: &mut Outlet<E>) -> (Outcome, Option<Reported>) {
    // Who runs beside it is measured, too.
    if call.lease.is_none_or(Lease::is_alone) {
        call.hand.memory_peak_reset();
    }
    match call.hand.exec(call.exec.clone(), call.spec.clone()).await {
        Ok(exec) => {
            let mut stdin = call.stdin.take();
            let ended = follow(call, exec, &mut stdin, outlet).await;
            // A command that did not start has taken nothing of it.
            call.stdin = stdin;
            ended
        }
        Err(error) => (Outcome::NotStarted { reason: chain(&error), program_missing: false }, None),
    }
}

/// Ends what earlier commands left running in the hand; `false` if there is nothing, or if others run there.
async fn end_leftovers(call: &Call<'_>) -> bool {
    match call.lease {
        Some(lease) => lease.end_leftovers().await,
        None => ended_leftovers(call.hand).await,
    }
}

/// [`end_leftovers`] of a hand in which nothing else runs.
pub(crate) async fn ended_leftovers(hand: &Hand) -> bool {
    let any = hand.link().ping().await.is_ok_and(|status| status.lingering > 0);
    any && hand.link().kill_all().await.is_ok()
}

/// What the hand tells of a command's end.
#[derive(Default)]
struct Reported {
    cpu_ms: u64,
    wall_ms: u64,
    lingering: bool,
    rss_bytes_max: u64,
    processes_full: bool,
}

async fn follow<E: Send + 'static>(
    call: &mut Call<'_>,
    mut exec: hands::Exec,
    stdin: &mut Option<mpsc::Receiver<Vec<u8>>>,
    outlet: &mut Outlet<E>,
) -> (Outcome, Option<Reported>) {
    let outgrown = disk::outgrown(call.runner, call.branch, call.hand, call.disk_end);
    tokio::pin!(outgrown);
    // Beside the output: a command that writes before it has read all must not wait for itself.
    let feed = feed(exec.take_stdin(), stdin);
    tokio::pin!(feed);
    let mut fed = false;
    // Why the command is being ended, and when its hand is.
    let mut stop: Option<(Outcome, Instant)> = None;
    loop {
        let stopping = stop.is_some();
        tokio::select! {
            // While the caller has not taken the last output, the command waits, and nothing else does.
            event = exec.next_event(), if stopping || !outlet.waits() => match event {
                Some(ExecEvent::Output { fd, bytes }) => outlet.put(fd, &bytes),
                Some(ExecEvent::Ended { outcome, cpu_ms, wall_ms, lingering, rss_bytes_max, processes_full }) => {
                    let outcome = stop.map_or(outcome, |(why, _)| why);
                    let reported = Reported { cpu_ms, wall_ms, lingering, rss_bytes_max, processes_full };
                    return (outcome, Some(reported));
                }
                None => {
                    let reason = call.hand.lost().unwrap_or_else(|| "the channel to it ended".into());
                    return (stop.map_or(Outcome::HandLost { reason }, |(why, _)| why), None);
                }
            },
            room = outlet.events.clone().reserve_owned(), if outlet.waits() => outlet.pass_on(room.ok()),
            () = gone(call.cancel, &outlet.events), if !stopping => stop = Some(end(&exec, Outcome::Cancelled)),
            () = end_of(&stop), if stopping => {
                call.hand.stop().await;
                return (stop.map_or(Outcome::Cancelled, |(why, _)| why), None);
            }
            limit = &mut outgrown, if !stopping => stop = Some(end(&exec, Outcome::exceeded(limit))),
            () = call.watched.starved.cancelled(), if !stopping => stop = Some(end(&exec, Outcome::exceeded(disk::DISK_FREE))),
            () = outlet.due() => outlet.send_recent(),
            () = &mut feed, if !fed => fed = true,
            control = next(&mut call.control) => match control {
                // If it is over, or the hand is lost, that comes as an event.
                Some(ExecControl::Signal { signal }) => drop(timeout(CANCEL_GRACE, exec.signal(signal)).await),
                Some(ExecControl::Resize { size }) => {
                    let size = hands::Size { rows: size.rows, cols: size.cols };
                    drop(timeout(CANCEL_GRACE, exec.resize(size)).await);
                }
                Some(ExecControl::Cancel {}) => call.cancel.cancel(),
                None => call.control = None,
            },
        }
    }
}

/// Begins to end a command; says why, and when its hand is ended if it does not end.
fn end(exec: &hands::Exec, why: Outcome) -> (Outcome, Instant) {
    let control = exec.control();
    // If that fails the hand is ended.
    tokio::spawn(async move { drop(control.cancel().await) });
    (why, Instant::now() + CANCEL_GRACE)
}

/// Passes standard input on until it ends, or the command takes no more.
async fn feed(sink: Option<ExecStdin>, stdin: &mut Option<mpsc::Receiver<Vec<u8>>>) {
    let (Some(mut sink), Some(stdin)) = (sink, stdin) else { return };
    if !sink.started().await {
        return;
    }
    while let Some(bytes) = stdin.recv().await {
        if !sink.write(bytes.into()).await {
            return stdin.close();
        }
    }
}

/// Ends when the caller cancelled or nobody listens any more.
async fn gone<E>(cancel: &CancellationToken, events: &mpsc::Sender<E>) {
    tokio::select! {
        () = cancel.cancelled() => {}
        () = events.closed() => {}
    }
}

async fn end_of(stop: &Option<(Outcome, Instant)>) {
    match stop {
        Some((_, at)) => sleep_until(*at).await,
        None => pending().await,
    }
}

async fn next(control: &mut Option<mpsc::Receiver<ExecControl>>) -> Option<ExecControl> {
    match control {
        Some(control) => control.recv().await,
        None => pending().await,
    }
}

impl<E: Send> Outlet<E> {
    /// Logs it and passes it on, or keeps it until the caller takes it. One that is kept already is given up, as happens only
    /// when the command is being ended.
    fn put(&mut self, fd: u8, bytes: &[u8]) {
        if let Some(log) = self.logs.as_mut().and_then(|logs| logs.get_mut(usize::from(fd == 2))) {
            log.add(bytes);
        }
        match &mut self.passed {
            Passed::All { event, waiting } => {
                if let Err(TrySendError::Full(event)) = self.events.try_send(event(fd, JsonBytes::new(bytes)))
                {
                    *waiting = Some(event);
                }
            }
            Passed::Recent(recent) => {
                recent.add(fd, bytes);
                recent.send(&self.events);
            }
            Passed::Nothing => {}
        }
    }

    /// Whether output waits for the caller.
    fn waits(&self) -> bool {
        matches!(&self.passed, Passed::All { waiting: Some(_), .. })
    }

    /// Passes on what waits; without room nobody listens any more.
    fn pass_on(&mut self, room: Option<mpsc::OwnedPermit<E>>) {
        let Passed::All { waiting, .. } = &mut self.passed else { return };
        if let (Some(event), Some(room)) = (waiting.take(), room) {
            room.send(event);
        }
    }

    /// Returns when there is something to tell of late.
    async fn due(&self) {
        match &self.passed {
            Passed::Recent(recent) => match recent.due() {
                Some(at) => sleep_until(at).await,
                None => pending().await,
            },
            Passed::All { .. } | Passed::Nothing => pending().await,
        }
    }

    fn send_recent(&mut self) {
        if let Passed::Recent(recent) = &mut self.passed {
            recent.send(&self.events);
        }
    }
}

/// An error with its sources in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let parts = std::iter::successors(Some(error), |error| error.source());
    parts.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
