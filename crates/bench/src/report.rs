//! The table: rows with their bar, as Markdown or JSON, and its place in `docs/benchmarks.md`.

use std::path::Path;

use serde::Serialize;

use crate::error::{BenchError, Context, Result};
use crate::machine::Machine;
use crate::stats::{Spread, show_ratio};

/// Where the generated part of the document begins.
const BEGIN: &str = "<!-- begin: cargo xtask bench --write -->";
/// Where it ends.
const END: &str = "<!-- end: cargo xtask bench --write -->";
/// The first lines of the table.
const HEAD: &str =
    "| figure | ours | baseline | ratio | bar | met? | date |\n|---|---|---|---|---|---|---|\n";

/// How a figure compares with its baseline.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ratio {
    /// Nothing to compare with.
    None,
    /// Ours divided by the baseline.
    Of(Spread),
    /// The baseline divided by ours: so many times faster.
    Faster(Spread),
}

/// What a figure must reach.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Bar {
    /// It is only reported.
    None,
    /// The ratio's median, at most.
    AtMost(f64),
    /// The ratio's median, at least.
    AtLeast(f64),
    /// The median of our own value (seconds), at most.
    Milliseconds {
        /// What was measured, in seconds.
        value: f64,
        /// The most that it may be, in milliseconds.
        max: f64,
    },
}

/// Whether a figure reached its bar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    Met,
    Missed,
    Reported,
    Failed,
}

/// One line of the table.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    /// What is measured; unique in the table.
    pub(crate) figure: String,
    /// Our value, for people.
    pub(crate) ours: String,
    /// The baseline's, for people.
    pub(crate) baseline: String,
    pub(crate) ratio: Ratio,
    pub(crate) bar: Bar,
    /// Set when it could not be measured.
    pub(crate) failure: Option<String>,
}

impl Row {
    /// A row for a figure that could not be measured.
    pub(crate) fn failed(figure: &str, error: &BenchError) -> Self {
        Self {
            figure: figure.to_owned(),
            ours: String::new(),
            baseline: String::new(),
            ratio: Ratio::None,
            bar: Bar::None,
            failure: Some(error.chain()),
        }
    }

    pub(crate) fn verdict(&self) -> Verdict {
        if self.failure.is_some() {
            return Verdict::Failed;
        }
        let median = match self.ratio {
            Ratio::None => f64::NAN,
            Ratio::Of(spread) | Ratio::Faster(spread) => spread.median,
        };
        let met = match self.bar {
            Bar::None => return Verdict::Reported,
            Bar::AtMost(max) => median <= max,
            Bar::AtLeast(min) => median >= min,
            Bar::Milliseconds { value, max } => value * 1e3 <= max,
        };
        if met { Verdict::Met } else { Verdict::Missed }
    }

    fn ratio_text(&self) -> String {
        let (spread, unit) = match self.ratio {
            Ratio::None => return "–".into(),
            Ratio::Of(spread) => (spread, ""),
            Ratio::Faster(spread) => (spread, "× faster"),
        };
        let Spread { median, min, max } = spread;
        format!("{}{unit} ({}–{})", show_ratio(median), show_ratio(min), show_ratio(max))
    }

    fn bar_text(&self) -> String {
        match self.bar {
            Bar::None => "–".into(),
            Bar::AtMost(max) => format!("≤ {max}"),
            Bar::AtLeast(min) => format!("≥ {min}×"),
            Bar::Milliseconds { max, .. } => format!("p50 ≤ {max} ms"),
        }
    }

    /// The row as Markdown, with its line end.
    fn markdown(&self, date: &str) -> String {
        let met = match self.verdict() {
            Verdict::Met => "yes",
            Verdict::Missed => "**no**",
            Verdict::Reported => "–",
            Verdict::Failed => "**failed**",
        };
        let ours = self.failure.as_ref().unwrap_or(&self.ours);
        let cells = [&self.figure, ours, &self.baseline, &self.ratio_text(), &self.bar_text(), met, date];
        let cells: Vec<String> =
            cells.iter().map(|cell| cell.replace('|', "\\|").replace(['\n', '\r'], " ")).collect();
        format!("| {} |\n", cells.join(" | "))
    }
}

/// The head that says what the figures are of.
fn head(machine: &Machine) -> String {
    format!("{}\n\n{HEAD}", machine.line())
}

/// The whole table with the machine above it.
pub(crate) fn markdown(machine: &Machine, rows: &[Row]) -> String {
    rows.iter().fold(head(machine), |text, row| text + &row.markdown(&machine.date))
}

/// The same for programs.
pub(crate) fn json(machine: &Machine, rows: &[Row]) -> serde_json::Value {
    let spread = |ratio: Ratio| match ratio {
        Ratio::None => serde_json::Value::Null,
        Ratio::Of(s) => {
            serde_json::json!({ "ours_over_baseline": { "median": s.median, "min": s.min, "max": s.max } })
        }
        Ratio::Faster(s) => {
            serde_json::json!({ "baseline_over_ours": { "median": s.median, "min": s.min, "max": s.max } })
        }
    };
    let rows: Vec<serde_json::Value> = rows
        .iter()
        .map(|row| {
            serde_json::json!({
                "figure": row.figure, "ours": row.ours, "baseline": row.baseline, "ratio": spread(row.ratio),
                "bar": row.bar_text(), "verdict": row.verdict(), "failure": row.failure,
            })
        })
        .collect();
    serde_json::json!({ "version": 1, "machine": machine, "rows": rows })
}

/// Puts the rows into the document's generated part. A whole run replaces the part; a partial one replaces rows of
/// the same figures, and is refused when the rest is of another machine. Failed figures are never written.
pub(crate) fn write(document: &Path, machine: &Machine, rows: &[Row], whole: bool) -> Result<()> {
    if let Some(failed) = rows.iter().find(|row| row.failure.is_some()) {
        return Err(BenchError::new(format!("nothing is written: `{}` failed", failed.figure)));
    }
    let old = std::fs::read_to_string(document).context(|| format!("can't read {}", document.display()))?;
    let new = replaced(&old, machine, rows, whole)?;
    std::fs::write(document, new).context(|| format!("can't write {}", document.display()))
}

fn replaced(old: &str, machine: &Machine, rows: &[Row], whole: bool) -> Result<String> {
    let missing = || BenchError::new(format!("the document has no `{BEGIN}` before `{END}`"));
    let (before, rest) = old.split_once(BEGIN).ok_or_else(missing)?;
    let (part, after) = rest.split_once(END).ok_or_else(missing)?;
    let mut lines: Vec<String> = Vec::new();
    if !whole {
        lines = table_lines(part);
        if !lines.is_empty() && !part.contains(&machine.line()) {
            return Err(BenchError::new("the document's figures are of another machine: run all of them"));
        }
    }
    for row in rows {
        let new = row.markdown(&machine.date);
        let key = format!("| {} |", row.figure);
        match lines.iter_mut().find(|line| line.starts_with(&key)) {
            Some(line) => *line = new,
            None => lines.push(new),
        }
    }
    Ok(format!("{before}{BEGIN}\n{}{}{END}{after}", head(machine), lines.concat()))
}

/// The rows of a table that [`markdown`] made, without its head.
fn table_lines(part: &str) -> Vec<String> {
    let rows = part.lines().filter(|line| line.starts_with('|')).skip(2);
    rows.map(|line| format!("{line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Machine {
        Machine {
            cpus: 2,
            cpu_model: "Test CPU".into(),
            memory_bytes: 8 << 30,
            kernel: "6.18".into(),
            file_system: "ext4".into(),
            load: "0.1".into(),
            date: "2026-01-02".into(),
        }
    }

    fn row(figure: &str, median: f64, bar: Bar) -> Row {
        Row {
            figure: figure.into(),
            ours: "1 s".into(),
            baseline: "2 s".into(),
            ratio: Ratio::Of(Spread { median, min: 0.9, max: 1.5 }),
            bar,
            failure: None,
        }
    }

    #[test]
    fn bars_are_kept_or_missed() {
        assert_eq!(row("a", 1.05, Bar::AtMost(1.05)).verdict(), Verdict::Met);
        assert_eq!(row("a", 1.06, Bar::AtMost(1.05)).verdict(), Verdict::Missed);
        assert_eq!(row("a", 99.0, Bar::AtLeast(100.0)).verdict(), Verdict::Missed);
        assert_eq!(row("a", f64::NAN, Bar::AtMost(1.0)).verdict(), Verdict::Missed);
        assert_eq!(row("a", 1.0, Bar::Milliseconds { value: 0.0011, max: 1.0 }).verdict(), Verdict::Missed);
        assert_eq!(row("a", 1.0, Bar::None).verdict(), Verdict::Reported);
    }

    #[test]
    fn the_table_has_machine_and_verdicts() {
        let text = markdown(&machine(), &[row("a|b", 1.2, Bar::AtMost(1.05))]);
        assert!(
            text.starts_with("Machine: 2 × Test CPU, 8 GiB memory, Linux 6.18, ext4.\n\n| figure |"),
            "{text}"
        );
        assert!(
            text.ends_with("| a\\|b | 1 s | 2 s | 1.20 (0.90–1.50) | ≤ 1.05 | **no** | 2026-01-02 |\n"),
            "{text}"
        );
    }

    #[test]
    fn a_partial_run_replaces_its_rows_only() {
        let empty = format!("# Title\n{BEGIN}\n{END}\nend\n");
        let both = [row("a", 1.0, Bar::None), row("b", 1.0, Bar::None)];
        let first = replaced(&empty, &machine(), &both, true).unwrap();
        let second = replaced(&first, &machine(), &[row("b", 3.0, Bar::None)], false).unwrap();
        assert!(second.starts_with("# Title\n") && second.ends_with("-->\nend\n"), "{second}");
        assert_eq!(second.matches("| a | 1 s | 2 s | 1.00").count(), 1, "{second}");
        assert_eq!(second.matches("| b |").count(), 1, "{second}");
        assert!(second.contains("| b | 1 s | 2 s | 3.00"), "{second}");
        let other = Machine { kernel: "7.0".into(), ..machine() };
        assert!(replaced(&first, &other, &both[..1], false).is_err());
        assert!(replaced("no markers", &machine(), &both, true).is_err());
    }
}
