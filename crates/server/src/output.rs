//! The little that this program prints: whether it could start.

use std::io::Write as _;

use proto::error::ErrorBody;
use proto::http::StartLine;

/// Tells the starter of a private runner that it listens.
pub(crate) fn ready() {
    put(&StartLine::Ready { pid: std::process::id() });
}

/// Tells why the runner does not start: a private one tells its starter, another one tells people.
pub(crate) fn refuse(error: &ErrorBody, private: bool) {
    if private {
        return put(&StartLine::Refused { error: error.clone() });
    }
    let mut text = format!("error: {}\n", error.message);
    for cause in &error.causes {
        text += &format!("caused by: {cause}\n");
    }
    if let Some(hint) = &error.hint {
        text += &format!("hint: {hint}\n");
    }
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

fn put(line: &StartLine) {
    if let Ok(mut text) = serde_json::to_string(line) {
        text.push('\n');
        let mut out = std::io::stdout().lock();
        // The starter may be gone; then nobody needs to know.
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }
}
