//! What the command line takes from its environment: the one place that reads it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use proto::error::ErrorBody;

use crate::commands::usage;

#[expect(clippy::disallowed_methods, reason = "the one place of this crate that reads the environment")]
fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// The state directory: see [`proto::place::state_dir`].
pub(crate) fn state_dir(flag: Option<PathBuf>) -> Result<PathBuf, ErrorBody> {
    let dir = proto::place::state_dir(flag, variable).ok_or_else(|| {
        usage(
            "there is no state directory: HOME is not set to an absolute path",
            Some("give one with --state-dir"),
        )
    })?;
    let dir = if dir.is_absolute() { dir } else { current_dir()?.join(dir) };
    Ok(resolved(&dir))
}

/// `dir` as the runner is to be told it: what it says may hold for this process alone (`/proc/self/cwd`). What does not
/// exist yet stays as it is.
fn resolved(dir: &Path) -> PathBuf {
    let known = dir.ancestors().find_map(|part| Some((part, std::fs::canonicalize(part).ok()?)));
    match known {
        // By its components: what is joined with nothing would end in a slash.
        Some((part, real)) => real.join(dir.strip_prefix(part).unwrap_or(dir)).components().collect(),
        None => dir.to_owned(),
    }
}

/// The directory that relative paths are taken from.
pub(crate) fn current_dir() -> Result<PathBuf, ErrorBody> {
    std::env::current_dir().map_err(|error| {
        usage(
            format!("the current directory can't be read: {error}"),
            Some("change to a directory that exists, or name all paths in full"),
        )
    })
}

/// The runner's binary: `TENDON_TENDOND`, or `tendond` next to this one.
pub(crate) fn tendond() -> PathBuf {
    if let Some(path) = variable("TENDON_TENDOND") {
        return PathBuf::from(path);
    }
    let here = std::env::current_exe().ok().and_then(|exe| exe.parent().map(|dir| dir.join("tendond")));
    here.filter(|path| path.exists()).unwrap_or_else(|| PathBuf::from("tendond"))
}

/// Whether the user asked for no colours: <https://no-color.org>.
pub(crate) fn no_color() -> bool {
    variable("NO_COLOR").is_some()
}

/// Whether a terminal knows no escape sequences: it says so, or nobody says what it is.
pub(crate) fn dumb_terminal() -> bool {
    variable("TERM").is_none_or(|term| term == "dumb")
}
