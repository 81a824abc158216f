//! All printing: data on standard output, everything else on standard error.

use std::cell::{Cell, RefCell};
use std::io::{self, ErrorKind, IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use proto::error::{Code, ErrorBody};
use serde::Serialize;
use serde_json::json;

use crate::environment::{dumb_terminal, no_color};

/// Progress that lasts less is not shown.
const PROGRESS_AFTER: Duration = Duration::from_millis(250);

/// Bytes of each part of an error that are shown: it may repeat what was given.
const ERROR_BYTES_MAX: usize = 2000;

/// A colour of text on a terminal.
#[derive(Clone, Copy)]
pub(crate) enum Paint {
    Red,
    Green,
    Yellow,
    Cyan,
    Bold,
    Dim,
}

/// Where and how to print.
pub(crate) struct Output {
    /// Machine-readable output was asked for.
    pub(crate) json: bool,
    /// Standard output is a terminal.
    pub(crate) terminal: bool,
    /// Standard error is a terminal.
    pub(crate) terminal_err: bool,
    colour: bool,
    colour_err: bool,
    progress: bool,
    started: Instant,
    /// Why standard output, or what is passed on to standard error, could not be written.
    broken: RefCell<Option<io::Error>>,
    /// A record was printed.
    recorded: Cell<bool>,
}

impl Output {
    pub(crate) fn new(json: bool) -> Self {
        let (out, err) = (std::io::stdout().is_terminal(), std::io::stderr().is_terminal());
        let colour = !no_color() && !dumb_terminal();
        Self {
            json,
            terminal: out,
            colour: out && colour,
            colour_err: err && colour,
            terminal_err: err,
            progress: err && !dumb_terminal(),
            started: Instant::now(),
            broken: RefCell::default(),
            recorded: Cell::default(),
        }
    }

    /// Prints a line of data.
    pub(crate) fn line(&self, text: impl AsRef<str>) {
        self.raw(format!("{}\n", text.as_ref()).as_bytes());
    }

    /// Prints data as it is. What can't be written is told by [`Output::closed`] and [`Output::finish`].
    pub(crate) fn raw(&self, bytes: &[u8]) {
        let mut out = std::io::stdout().lock();
        self.written(out.write_all(bytes).and_then(|()| out.flush()));
    }

    /// Passes on what a command wrote to its standard error.
    pub(crate) fn raw_err(&self, bytes: &[u8]) {
        self.written(std::io::stderr().lock().write_all(bytes));
    }

    /// Notes how a write to standard output or standard error went.
    pub(crate) fn written(&self, written: io::Result<()>) {
        if let Err(error) = written {
            self.broken.borrow_mut().get_or_insert(error);
        }
    }

    /// Whether no data can be printed any more, so that making more of it is in vain.
    pub(crate) fn closed(&self) -> bool {
        self.broken.borrow().is_some()
    }

    /// The last word of a command that went well: data that could not be printed is an error, and nobody reading it any
    /// more is none.
    pub(crate) fn finish(&self, status: u8) -> Result<u8, ErrorBody> {
        match self.broken.take() {
            Some(error) if error.kind() != ErrorKind::BrokenPipe => Err(ErrorBody {
                code: if error.kind() == ErrorKind::StorageFull { Code::NoSpace } else { Code::HostBroken },
                message: "the output could not be written".into(),
                causes: vec![error.to_string()],
                hint: None,
            }),
            Some(_) | None => Ok(status),
        }
    }

    /// Prints a record as JSON: the only one of this run.
    pub(crate) fn json(&self, record: &impl Serialize) {
        self.recorded.set(true);
        match serde_json::to_string_pretty(record) {
            Ok(text) => self.line(text),
            Err(error) => self.note(&format!("the record can't be printed: {error}")),
        }
    }

    /// Prints a hint or a warning to standard error.
    pub(crate) fn note(&self, text: &str) {
        self.clear_progress();
        let _ = writeln!(std::io::stderr().lock(), "{}", clean(text.as_bytes()));
    }

    /// Whether somebody sees what is done now.
    pub(crate) fn shows_progress(&self) -> bool {
        self.progress
    }

    /// Shows on a terminal what is done now, in one line that the next one replaces.
    pub(crate) fn progress(&self, text: &str) {
        if !self.progress || self.started.elapsed() < PROGRESS_AFTER {
            return;
        }
        let columns =
            rustix::termios::tcgetwinsize(std::io::stderr()).map_or(0, |size| usize::from(size.ws_col));
        // Some terminals don't tell.
        let width = if columns < 20 { 80 } else { columns };
        let text: String =
            clean(text.as_bytes()).replace(['\n', '\t'], " ").chars().take(width - 1).collect();
        let _ = write!(std::io::stderr().lock(), "\r\x1b[2K{text}");
    }

    /// Takes the progress line away.
    pub(crate) fn clear_progress(&self) {
        if self.progress && self.started.elapsed() >= PROGRESS_AFTER {
            let _ = write!(std::io::stderr().lock(), "\r\x1b[2K");
        }
    }

    /// Prints an error as JSON.
    pub(crate) fn error_record(&self, error: &ErrorBody) {
        self.json(&json!({ "version": 1, "error": error }));
    }

    /// Prints an error; with `--json` it is the record, unless one was printed already.
    pub(crate) fn error(&self, error: &ErrorBody) {
        if self.json && !self.recorded.get() {
            self.error_record(error);
        }
        self.complain(error);
    }

    /// Prints an error for people.
    pub(crate) fn complain(&self, error: &ErrorBody) {
        self.clear_progress();
        let _ = std::io::stderr().lock().write_all(render_error(error, self.colour_err).as_bytes());
    }

    /// `text` in a colour, if standard output shows colours.
    pub(crate) fn paint(&self, paint: Paint, text: &str) -> String {
        painted(self.colour, paint, text)
    }

    /// Prints rows in columns, the first row being the heads; each row is one line.
    pub(crate) fn table(&self, heads: &[&str], rows: &[Vec<String>]) {
        let rows: Vec<Vec<String>> =
            rows.iter().map(|row| row.iter().map(|cell| one_line(cell)).collect()).collect();
        let head: Vec<String> = heads.iter().map(|head| one_line(head)).collect();
        let width = |column: usize| {
            let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
            cells.chain([head[column].chars().count()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..heads.len()).map(width).collect();
        self.line(self.paint(Paint::Dim, &columns(&head, &widths)));
        for row in &rows {
            self.line(columns(row, &widths));
        }
    }
}

fn columns(cells: &[String], widths: &[usize]) -> String {
    let padded = cells.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
    padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
}

fn painted(colour: bool, paint: Paint, text: &str) -> String {
    let code = match paint {
        Paint::Red => 31,
        Paint::Green => 32,
        Paint::Yellow => 33,
        Paint::Cyan => 36,
        Paint::Bold => 1,
        Paint::Dim => 2,
    };
    if colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
}

/// An error as people read it.
fn render_error(error: &ErrorBody, colour: bool) -> String {
    // A second line must not look like an error or a hint of its own.
    let text = |text: &str| {
        let cut = &text[..text.floor_char_boundary(ERROR_BYTES_MAX)];
        let more = if cut.len() < text.len() { " …" } else { "" };
        clean(cut.trim_end().as_bytes()).replace('\n', "\n  ") + more
    };
    let mut out = format!("{} {}\n", painted(colour, Paint::Red, "error:"), text(&error.message));
    for cause in &error.causes {
        out += &format!("{} {}\n", painted(colour, Paint::Yellow, "caused by:"), text(cause));
    }
    if let Some(hint) = &error.hint {
        out += &format!("{} {}\n", painted(colour, Paint::Cyan, "hint:"), text(hint));
    }
    out
}

/// A name, or other text that is to be one line: see [`proto::path::shown`].
pub(crate) fn one_line(text: &str) -> String {
    proto::path::shown(text.as_bytes())
}

/// Cleans a stream for a terminal, chunk by chunk: a character that a chunk's end cuts is kept for the next one.
#[derive(Default)]
pub(crate) struct Cleaner(Vec<u8>);

impl Cleaner {
    /// What may be shown of the stream so far, and was not yet.
    pub(crate) fn next(&mut self, bytes: &[u8]) -> String {
        self.0.extend_from_slice(bytes);
        let cut = match self.0.utf8_chunks().last() {
            Some(last) if is_cut(last.invalid()) => last.invalid().len(),
            Some(_) | None => 0,
        };
        let rest = self.0.split_off(self.0.len() - cut);
        clean(&std::mem::replace(&mut self.0, rest))
    }
}

/// Whether bytes may be the start of a character whose rest is still to come.
fn is_cut(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

/// Text that a terminal may be shown: escape sequences are taken out, what else steers it is escaped but for line ends and
/// tabs, and bytes that are not UTF-8 are replaced.
pub(crate) fn clean(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\n' | '\t' => out.push(c),
            '\r' => {}
            '\x1b' => {
                if chars.next_if_eq(&'[').is_some() {
                    while chars.next_if(|c| !('\x40'..='\x7e').contains(c)).is_some() {}
                    chars.next();
                }
            }
            c if proto::path::steers(c) => out.extend(c.escape_default()),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_shows_its_causes_and_its_hint() {
        let error = ErrorBody {
            code: Code::NotFound,
            message: "no ref `x` in `/r`".into(),
            causes: vec!["git: fatal".into(), "exit 128".into()],
            hint: Some("list them with git branch -a".into()),
        };
        let want = "error: no ref `x` in `/r`\ncaused by: git: fatal\ncaused by: exit 128\nhint: list them with git branch -a\n";
        assert_eq!(render_error(&error, false), want);
        assert!(render_error(&error, true).starts_with("\x1b[31merror:\x1b[0m "));
    }

    #[test]
    fn what_a_command_wrote_cannot_drive_the_terminal() {
        assert_eq!(clean(b"\x1b[31mred\x1b[0m\r\n\x07\xff\tok"), "red\n\\u{7}\u{fffd}\tok");
        assert_eq!(clean(b"\x1b]0;title\x07x"), "]0;title\\u{7}x");
        assert_eq!(clean(b"\x1b[9999"), "");
        assert_eq!(clean("\u{9b}31mx\u{202e}y".as_bytes()), "\\u{9b}31mx\\u{202e}y");
    }

    #[test]
    fn a_second_line_of_an_error_is_no_hint() {
        let error = crate::commands::usage("no branch `x\nhint: rm -rf /`\n", None);
        assert_eq!(render_error(&error, false), "error: no branch `x\n  hint: rm -rf /`\n");
        let long = render_error(&crate::commands::usage("é".repeat(10_000), None), false);
        assert!(long.len() < 2100 && long.ends_with("é …\n"), "{}", long.len());
    }

    #[test]
    fn a_stream_is_cleaned_across_its_chunks() {
        let mut cleaner = Cleaner::default();
        let whole = "grü\x1b[31mße €\n".as_bytes();
        let got: String = whole.iter().map(|byte| cleaner.next(&[*byte])).collect();
        assert_eq!(got, "grü[31mße €\n");
        assert_eq!(cleaner.next(b"\xff\xe2\x82"), "\u{fffd}");
        assert_eq!(cleaner.next(b"x"), "\u{fffd}x");
    }
}
