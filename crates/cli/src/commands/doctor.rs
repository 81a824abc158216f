//! `tendon doctor`: what this host can enforce, found by trying, and what to install for the rest.

use clap::Args;
use proto::client::ClientError;
use proto::http::{DoctorReply, DoctorState};

use super::App;
use crate::Outcome;
use crate::output::{Paint, clean, one_line};

/// Characters of a finding that are shown; `--json` has all of it.
const DETAIL_CHARS_MAX: usize = 160;

/// Try what this host can enforce, and tell what to install for the rest.
///
/// Exit status 0: verify can run here. 4: it can't.
#[derive(Args)]
#[command(after_help = "Example:\n  tendon doctor")]
pub(crate) struct DoctorArgs {}

pub(crate) async fn run(_args: DoctorArgs, app: &App<'_>) -> Outcome {
    app.output.progress("trying what this host can enforce");
    let reply: DoctorReply = app.client().await?.get("/v1/doctor").await.map_err(ClientError::into_body)?;
    app.output.clear_progress();
    let broken = reply.checks.iter().any(|check| check.state == DoctorState::Broken);
    if app.output.json {
        app.output.json(&reply);
        return Ok(if broken { 4 } else { 0 });
    }
    let name_width = reply.checks.iter().map(|check| check.name.chars().count()).max().unwrap_or(0);
    for check in &reply.checks {
        let (paint, mark, word) = match check.state {
            DoctorState::Works => (Paint::Green, "✓", "works"),
            DoctorState::Degraded => (Paint::Yellow, "~", "partly"),
            DoctorState::Missing => (Paint::Yellow, "–", "missing"),
            DoctorState::Broken => (Paint::Red, "✗", "broken"),
        };
        let mark = app.output.paint(paint, &format!("{mark} {word:8}"));
        app.output.line(format!("{mark} {:name_width$}  {}", check.name, cut(&one_line(&check.detail))));
    }
    // Several checks may be helped by one thing.
    let mut fixes: Vec<&String> = Vec::new();
    for fix in reply.checks.iter().filter_map(|check| check.fix.as_ref()) {
        if !fixes.contains(&fix) {
            fixes.push(fix);
        }
    }
    if !fixes.is_empty() {
        app.output.line("");
        for fix in fixes {
            app.output.line(format!("{} {}", app.output.paint(Paint::Cyan, "fix:"), clean(fix.as_bytes())));
        }
    }
    Ok(if broken { 4 } else { 0 })
}

fn cut(detail: &str) -> String {
    match detail.char_indices().nth(DETAIL_CHARS_MAX) {
        Some((at, _)) => format!("{}…", &detail[..at]),
        None => detail.to_owned(),
    }
}
