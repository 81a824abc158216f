//! Keeps a report as short as a reader of one line takes it: what a guest printed or named is left out, from the least telling
//! on. Pure.

use proto::verify::{CommandReport, OutputTail};
use serde::Serialize;

use crate::limits::{ARGV_BYTES_MAX, OUTPUTS_BYTES_MAX, OUTPUTS_BYTES_OF_FAILED, WARNINGS_BYTES_MAX};

/// Room in a report for what its commands printed and changed, as JSON.
#[derive(Debug)]
pub(crate) struct Room {
    left: usize,
    /// Commands of which something was left out.
    short: usize,
}

impl Default for Room {
    fn default() -> Self {
        Self { left: OUTPUTS_BYTES_MAX, short: 0 }
    }
}

impl Room {
    /// Leaves out of a command's report what there is no room for: changed paths first, then output. A part of the room is
    /// for commands that failed.
    pub(crate) fn fit(&mut self, report: &mut CommandReport) {
        let kept = if report.outcome.passed() { OUTPUTS_BYTES_OF_FAILED } else { 0 };
        let mut short = false;
        let mut take = |bytes: usize| {
            let fits = self.left.saturating_sub(kept) >= bytes;
            self.left -= if fits { bytes } else { 0 };
            short |= !fits;
            fits
        };
        let OutputTail { tail: stderr, .. } = &mut report.stderr;
        let OutputTail { tail: stdout, .. } = &mut report.stdout;
        for tail in [stderr, stdout] {
            tail.take_if(|tail| !take(json_bytes(tail)));
        }
        let paths = &mut report.changed.paths;
        let listed = paths.iter().take_while(|path| take(json_bytes(path))).count();
        paths.truncate(listed);
        self.short += usize::from(short);
    }

    /// The warnings, and one more if something was left out.
    pub(crate) fn warnings(&self, mut warnings: Vec<String>) -> Vec<String> {
        let (all, mut bytes) = (warnings.len(), 0);
        let shown = warnings.iter().take_while(|warning| {
            bytes += json_bytes(warning);
            bytes <= WARNINGS_BYTES_MAX
        });
        warnings.truncate(shown.count());
        if warnings.len() < all {
            warnings.push(format!("{} more warnings were left out", all - warnings.len()));
        }
        if self.short > 0 {
            warnings.push(format!(
                "of {} commands not all output and changed paths are here, which would be too long: \
                 the logs have the output, and the audit the paths",
                self.short
            ));
        }
        warnings
    }
}

/// Whether commands are short enough for a report to hold them all.
pub(crate) fn holds<'a>(commands: impl IntoIterator<Item = &'a Vec<String>>) -> bool {
    commands.into_iter().map(json_bytes).sum::<usize>() <= ARGV_BYTES_MAX
}

/// How long something is as JSON, the comma behind it included.
fn json_bytes(part: &impl Serialize) -> usize {
    serde_json::to_vec(part).map_or(usize::MAX / 2, |bytes| bytes.len() + 1)
}

#[cfg(test)]
mod tests {
    use proto::http::LINE_BYTES_MAX;
    use proto::path::{JsonBytes, TreePath};
    use proto::verify::{Change, ChangeStatus, ChangedFiles, Outcome, Phase};

    use super::*;
    use crate::limits::{COMMANDS_MAX, PATHS_MAX, TAIL_BYTES_MAX};

    /// The longest that a command can make of it: every byte becomes six.
    fn longest(code: i32) -> CommandReport {
        let tail = || OutputTail {
            tail: Some(JsonBytes::new(&[1; TAIL_BYTES_MAX])),
            bytes_total: 1 << 40,
            truncated: true,
            log: Some(JsonBytes::new(
                b"/home/somebody/.local/state/tendon/logs/vf-0123456789abcdef/999-stderr",
            )),
        };
        let path = TreePath::new(vec![1; 250]).unwrap();
        let paths = vec![Change { status: ChangeStatus::Added, path }; PATHS_MAX];
        CommandReport {
            phase: Phase::Check,
            argv: vec!["x".repeat(1000)],
            exec: None,
            outcome: Outcome::Exited { code },
            stdout: tail(),
            stderr: tail(),
            wall_ms: u64::MAX,
            cpu_ms: u64::MAX,
            memory_bytes_peak: Some(u64::MAX),
            changed: ChangedFiles { tree_total: 1000, other_total: 0, paths },
        }
    }

    #[test]
    fn the_longest_report_is_a_line_that_is_read() {
        let mut room = Room::default();
        let mut reports = Vec::new();
        for code in std::iter::repeat_n(0, COMMANDS_MAX - 1).chain([1]) {
            let mut report = longest(code);
            room.fit(&mut report);
            reports.push(report);
        }
        let warnings = room.warnings(vec!["w".repeat(1 << 20); 1000]);
        let bytes = json_bytes(&reports) + json_bytes(&warnings);
        assert!(bytes < LINE_BYTES_MAX - (1 << 20), "{bytes}");
        let has = |report: &CommandReport| report.stdout.tail.is_some() && report.stderr.tail.is_some();
        assert!(has(&reports[0]) && !reports[0].changed.paths.is_empty());
        assert!(!has(&reports[COMMANDS_MAX - 2]) && reports[COMMANDS_MAX - 2].stderr.log.is_some());
        assert!(has(&reports[COMMANDS_MAX - 1]), "of the one that failed the output is there");
        assert_eq!(warnings.len(), 2);
        assert!(warnings[1].contains("commands not all output"), "{warnings:?}");
    }

    #[test]
    fn an_ordinary_report_is_whole() {
        let mut room = Room::default();
        let before = longest(0);
        let mut after = before.clone();
        room.fit(&mut after);
        assert_eq!(after, before);
        assert_eq!(room.warnings(vec!["one".into()]), ["one"]);
    }

    #[test]
    fn commands_that_no_report_can_hold_are_refused() {
        let command = |bytes: usize| vec!["x".repeat(bytes)];
        assert!(holds(&vec![command(1000); 1000]));
        assert!(!holds(&vec![command(1 << 20); 5]));
        assert!(!holds(&[vec!["\u{1}".repeat(1 << 20)]]));
    }
}
