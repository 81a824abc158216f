//! A report as people read it.

use proto::path::JsonBytes;
use proto::spec::command::join_command;
use proto::units::{counted, show_bytes, show_millis};
use proto::verify::{
    ChangedFiles, CommandReport, Confinement, Outcome, OutputTail, Phase, Report, limit_word,
};

use crate::output::{Output, Paint, clean, one_line};

/// Changed paths that are listed.
const PATHS_SHOWN: usize = 20;
/// Lines of a failed command's output that are shown.
const LINES_SHOWN: usize = 40;

/// Prints the summary of a report.
pub(super) fn print(report: &Report, output: &Output) {
    for command in &report.commands {
        output.line(command_line(command, output));
        if let Outcome::NotStarted { reason, .. } = &command.outcome {
            output.line(format!("  {}", one_line(reason)));
        } else if !command.outcome.passed() && command.outcome != Outcome::Skipped {
            print_tails(command, output);
        }
    }
    print_changed(&report.changed, output);
    if let Some(confinement) = &report.confinement {
        print_confinement(confinement, output);
    }
    for warning in &report.warnings {
        output.line(format!("{} {}", output.paint(Paint::Yellow, "warning:"), one_line(warning)));
    }
    let failed = |command: &&CommandReport| !command.outcome.passed() && command.outcome != Outcome::Skipped;
    let logs: Vec<&JsonBytes> = report
        .commands
        .iter()
        .filter(failed)
        .flat_map(|command| [&command.stdout.log, &command.stderr.log])
        .flatten()
        .collect();
    for log in logs {
        output.line(format!("log      {log}"));
    }
    if report.branch_kept {
        output.line(format!("branch   {} (tendon branch diff {0})", report.branch));
    }
    let (paint, word) = match report {
        Report { cancelled: true, .. } => (Paint::Yellow, "cancelled"),
        Report { passed: true, .. } => (Paint::Green, "passed"),
        Report { .. } => (Paint::Red, "failed"),
    };
    output.line(format!("{} in {}", output.paint(paint, word), show_millis(report.wall_ms)));
}

fn command_line(command: &CommandReport, output: &Output) -> String {
    let (paint, mark) = match &command.outcome {
        Outcome::Exited { code: 0 } => (Paint::Green, "✓"),
        Outcome::Skipped => (Paint::Dim, "–"),
        Outcome::Cancelled => (Paint::Yellow, "✗"),
        Outcome::Exited { .. }
        | Outcome::Signalled { .. }
        | Outcome::TimedOut { .. }
        | Outcome::LimitExceeded { .. }
        | Outcome::NotStarted { .. }
        | Outcome::Killed { .. }
        | Outcome::HandLost { .. } => (Paint::Red, "✗"),
    };
    let mut facts = vec![ended(&command.outcome)];
    if !matches!(command.outcome, Outcome::Skipped | Outcome::NotStarted { .. }) {
        facts.push(show_millis(command.wall_ms));
        facts.extend(command.memory_bytes_peak.map(|bytes| format!("peak {}", show_bytes(bytes))));
    }
    facts.retain(|fact| !fact.is_empty());
    let setup =
        if command.phase == Phase::Setup { output.paint(Paint::Dim, "setup ") } else { String::new() };
    let text = one_line(&join_command(&command.argv));
    let (mark, text) = (output.paint(paint, mark), output.paint(Paint::Bold, &text));
    format!("{mark} {setup}{text}  {}", output.paint(Paint::Dim, &facts.join(", ")))
}

/// How a command ended; nothing for exit status 0.
fn ended(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Exited { code: 0 } => String::new(),
        Outcome::Exited { code } => format!("exit status {code}"),
        Outcome::Signalled { signal } => format!("signal {signal}"),
        Outcome::TimedOut { wall_ms_max } => format!("timed out after {}", show_millis(*wall_ms_max)),
        Outcome::LimitExceeded { limit } => format!("went over the {limit} limit"),
        Outcome::NotStarted { .. } => "not started".into(),
        Outcome::Killed { reason } => format!("killed: {}", one_line(reason)),
        Outcome::Cancelled => "cancelled".into(),
        Outcome::HandLost { reason } => format!("the hand was lost: {}", one_line(reason)),
        Outcome::Skipped => "skipped".into(),
    }
}

fn print_tails(command: &CommandReport, output: &Output) {
    for (name, stream) in [("stdout", &command.stdout), ("stderr", &command.stderr)] {
        let lines = tail_lines(stream);
        if lines.is_empty() {
            continue;
        }
        output.line(
            output.paint(Paint::Dim, &format!("  ── {name}, {} in all", show_bytes(stream.bytes_total))),
        );
        for line in lines {
            output.line(format!("  {line}"));
        }
    }
}

fn tail_lines(stream: &OutputTail) -> Vec<String> {
    let bytes = stream.tail.as_ref().and_then(|tail| JsonBytes::decode(tail).ok()).unwrap_or_default();
    let text = clean(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES_SHOWN)..].iter().map(|line| (*line).to_owned()).collect()
}

fn print_changed(changed: &ChangedFiles, output: &Output) {
    if changed.tree_total == 0 {
        return;
    }
    let other = if changed.other_total > 0 {
        format!(", {} ignored or in .git", changed.other_total)
    } else {
        String::new()
    };
    output.line(format!("changed  {}{other}", counted(changed.tree_total, "file")));
    for change in changed.paths.iter().take(PATHS_SHOWN) {
        output.line(format!("  {} {}", change.status.letter(), change.path));
    }
    let rest = changed.tree_total.saturating_sub(PATHS_SHOWN as u64);
    if rest > 0 {
        output.line(format!("  … and {rest} more"));
    }
}

fn print_confinement(confinement: &Confinement, output: &Output) {
    output.line(format!("tier     {}", confinement.tier));
    for (word, text) in weaknesses(confinement) {
        output.line(format!("{} {text}", output.paint(Paint::Yellow, word)));
    }
}

/// What does not protect as it should, each with the word in front.
pub(in crate::commands) fn weaknesses(confinement: &Confinement) -> Vec<(&'static str, String)> {
    let free = confinement.limits.iter().filter(|limit| limit.enforced_by.is_none());
    let free: Vec<&str> = free.map(|limit| limit_word(&limit.name)).collect();
    let limits = (!free.is_empty()).then(|| ("not enforced on this host:", free.join(", ")));
    let degraded = confinement.degraded.iter().map(|degraded| ("degraded:", one_line(degraded)));
    limits.into_iter().chain(degraded).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::verify::LimitInForce;

    #[test]
    fn what_is_not_enforced_is_named_as_people_give_it() {
        let limit = |name: &str, by: Option<&str>| LimitInForce {
            name: name.into(),
            value: 1,
            enforced_by: by.map(str::to_owned),
        };
        let mut confinement = Confinement {
            tier: "sandbox".into(),
            policy_digest: String::new(),
            limits: vec![
                limit("memory_bytes_max", None),
                limit("pids_max", Some("x")),
                limit("cpu_milli", None),
            ],
            self_test: Vec::new(),
            degraded: vec!["landlock".into()],
        };
        let want =
            [("not enforced on this host:", "memory, cpus".to_owned()), ("degraded:", "landlock".to_owned())];
        assert_eq!(weaknesses(&confinement), want);
        (confinement.limits, confinement.degraded) = (vec![limit("pids_max", Some("x"))], Vec::new());
        assert_eq!(weaknesses(&confinement), []);
    }
}
