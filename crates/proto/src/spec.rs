//! `verify.toml`, the declared form of a verify: text in, [`VerifyRequest`] out. No I/O, and no panic on any text.

pub mod command;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use toml::{Table, Value};

use crate::error::{Code, Coded};
use crate::ids::BranchId;
use crate::nearest::nearest;
use crate::path::{JsonBytes, TreePath};
use crate::units::{parse_bytes, parse_cpu_milli, parse_millis};
use crate::verify::{InlineFile, LimitsAsked, OutputWanted, Source, VerifyRequest};

pub use command::{CommandError, split_command};

/// The largest spec, in bytes. Inline files count.
pub const SPEC_BYTES_MAX: usize = 8 * 1024 * 1024;
/// The most commands in a spec, setup and checks together.
pub const COMMANDS_MAX: usize = 1000;

const TOP_KEYS: [&str; 7] = ["source", "setup", "checks", "env", "limits", "keep_going", "keep_branch"];
const SOURCE_KEYS: [&str; 5] = ["repo", "ref", "files", "branch", "include_ignored"];
const LIMIT_KEYS: [&str; 5] = ["cpus", "memory", "pids", "disk", "timeout"];

/// Why text is not a spec.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// It is longer than [`SPEC_BYTES_MAX`].
    #[error("the spec has {0} bytes, more than {SPEC_BYTES_MAX}")]
    Large(usize),
    /// It is not TOML.
    #[error("the spec is not TOML: {0}")]
    Toml(String),
    /// A key that means nothing.
    #[error("unknown key `{key}` in the spec")]
    UnknownKey {
        /// Dotted.
        key: String,
        /// The known key that was most likely meant.
        nearest: Option<&'static str>,
        /// All that would be known there.
        known: &'static [&'static str],
    },
    /// A value of a wrong type or range.
    #[error("`{key}` in the spec must be {want}")]
    Value {
        /// Dotted.
        key: String,
        /// What it must be.
        want: String,
    },
    /// A command that is none.
    #[error("`{key}` in the spec is not a command")]
    Command {
        /// Dotted, with its place.
        key: String,
        /// Why.
        source: CommandError,
    },
    /// Nothing to check.
    #[error("the spec has no checks")]
    NoChecks,
    /// More than [`COMMANDS_MAX`] commands.
    #[error("the spec has {0} commands, more than {COMMANDS_MAX}")]
    ManyCommands(usize),
}

impl Coded for SpecError {
    fn code(&self) -> Code {
        Code::Usage
    }
    fn hint(&self) -> Option<String> {
        match self {
            Self::UnknownKey { nearest: Some(nearest), .. } => Some(format!("did you mean `{nearest}`?")),
            Self::UnknownKey { known, .. } => Some(format!("known here: {}", known.join(", "))),
            Self::Command { source, .. } => source.hint(),
            Self::NoChecks => Some("add one, like: checks = [\"cargo test\"]".into()),
            Self::Large(_) | Self::Toml(_) | Self::Value { .. } | Self::ManyCommands(_) => None,
        }
    }
}

/// Reads a spec. Relative paths in it are taken from `base_dir`, the spec's own directory, which is also the source when
/// the spec names none.
pub fn parse_spec(text: &str, base_dir: &Path) -> Result<VerifyRequest, SpecError> {
    if text.len() > SPEC_BYTES_MAX {
        return Err(SpecError::Large(text.len()));
    }
    let table: Table =
        text.parse().map_err(|error: toml::de::Error| SpecError::Toml(toml_problem(text, &error)))?;
    known_keys(&table, "", &TOP_KEYS)?;
    let source = match table.get("source") {
        Some(value) => source(value, base_dir)?,
        None => directory(base_dir, false),
    };
    let setup = commands(table.get("setup"), "setup")?;
    let checks = commands(table.get("checks"), "checks")?;
    if checks.is_empty() {
        return Err(SpecError::NoChecks);
    }
    if setup.len() + checks.len() > COMMANDS_MAX {
        return Err(SpecError::ManyCommands(setup.len() + checks.len()));
    }
    Ok(VerifyRequest {
        source,
        setup,
        checks,
        env: environment(table.get("env"))?,
        limits: limits(table.get("limits"))?,
        keep_going: flag(&table, "keep_going")?,
        keep_branch: flag(&table, "keep_branch")?,
        output: OutputWanted::default(),
    })
}

/// The source that `--repo REPO [--ref REF]` means: without a ref, a path is the directory as it is now; with one, or for
/// a URL, it is git's commit. Relative paths are taken from `base_dir`.
pub fn repo_source(repo: &OsStr, rev: Option<&str>, include_ignored: bool, base_dir: &Path) -> Source {
    if is_url(repo) {
        return Source::Git { repo: JsonBytes::new(repo.as_bytes()), rev: rev.unwrap_or("HEAD").to_owned() };
    }
    let path = absolute(base_dir, Path::new(repo));
    match rev {
        Some(rev) => Source::Git { repo: JsonBytes::of_path(&path), rev: rev.to_owned() },
        None => directory(&path, include_ignored),
    }
}

/// The source of a directory. `path` must be absolute.
pub fn directory(path: &Path, include_ignored: bool) -> Source {
    Source::Directory { path: JsonBytes::of_path(path), include_ignored }
}

/// `path` from `base`, without `.` components. `..` stays: only the file system knows where it leads.
pub fn absolute(base: &Path, path: &Path) -> PathBuf {
    base.join(path).components().filter(|part| *part != Component::CurDir).collect()
}

/// Whether `repo` is for git to fetch: `https://…`, `ssh://…`, or `user@host:path`.
pub fn is_url(repo: &OsStr) -> bool {
    let repo = repo.to_string_lossy();
    let scp_like = repo.split_once(':').is_some_and(|(host, _)| !host.contains('/') && host.contains('@'));
    repo.contains("://") || scp_like
}

fn source(value: &Value, base_dir: &Path) -> Result<Source, SpecError> {
    let one = "one of { repo = … }, { files = … } or { branch = … }";
    let table = value.as_table().ok_or_else(|| wrong("source", one))?;
    known_keys(table, "source.", &SOURCE_KEYS)?;
    let kinds = ["repo", "files", "branch"].iter().filter(|key| table.contains_key(**key)).count();
    if kinds != 1 {
        return Err(wrong("source", one));
    }
    let include_ignored = match table.get("include_ignored") {
        None => false,
        Some(value) => value.as_bool().ok_or_else(|| wrong("source.include_ignored", "true or false"))?,
    };
    if let Some(repo) = table.get("repo") {
        let repo = text(repo, "source.repo", "a path or URL")?;
        let rev = table.get("ref").map(|rev| text(rev, "source.ref", "a ref or commit")).transpose()?;
        if include_ignored && (rev.is_some() || is_url(OsStr::new(repo))) {
            return Err(wrong("source.include_ignored", "false for a commit, which has no ignored files"));
        }
        return Ok(repo_source(OsStr::new(repo), rev, include_ignored, base_dir));
    }
    if table.contains_key("include_ignored") {
        return Err(wrong("source.include_ignored", "given only together with `repo`"));
    }
    if table.contains_key("ref") {
        return Err(wrong("source.ref", "given only together with `repo`"));
    }
    match (table.get("files"), table.get("branch")) {
        (Some(Value::String(dir)), _) if !dir.is_empty() => {
            Ok(directory(&absolute(base_dir, Path::new(dir)), true))
        }
        (Some(Value::Table(files)), _) => inline_files(files),
        (Some(_), _) => Err(wrong("source.files", "a directory, or a table of path = \"content\"")),
        (None, Some(branch)) => {
            let id = text(branch, "source.branch", "a branch id")?;
            let branch = id.parse::<BranchId>().map_err(|_| {
                wrong("source.branch", "a branch id, like br-…, as `tendon branch list` shows them")
            })?;
            Ok(Source::Branch { branch })
        }
        (None, None) => Err(wrong("source", one)),
    }
}

fn inline_files(files: &Table) -> Result<Source, SpecError> {
    let mut out = Vec::with_capacity(files.len());
    for (name, content) in files {
        let key = format!("source.files.{}", shown(name));
        let path = TreePath::new(name.as_bytes())
            .map_err(|error| wrong(&key, &format!("a path in the tree: {error}")))?;
        let content = content.as_str().ok_or_else(|| wrong(&key, "text"))?;
        out.push(InlineFile {
            path,
            content: JsonBytes::Text(content.to_owned()),
            executable: content.starts_with("#!"),
        });
    }
    if out.is_empty() {
        return Err(wrong("source.files", "at least one file"));
    }
    Ok(Source::Files { files: out })
}

fn commands(value: Option<&Value>, key: &str) -> Result<Vec<Vec<String>>, SpecError> {
    let want = "a list of commands, each a string or a list of strings";
    let Some(value) = value else { return Ok(Vec::new()) };
    let list = value.as_array().ok_or_else(|| wrong(key, want))?;
    list.iter().enumerate().map(|(i, value)| one_command(value, &format!("{key}[{i}]"))).collect()
}

fn one_command(value: &Value, key: &str) -> Result<Vec<String>, SpecError> {
    let refused = |source| SpecError::Command { key: key.to_owned(), source };
    match value {
        Value::String(text) => split_command(text).map_err(refused),
        Value::Array(words) => {
            let argv: Option<Vec<String>> =
                words.iter().map(|word| word.as_str().map(str::to_owned)).collect();
            command::checked(argv.ok_or_else(|| wrong(key, "a string or a list of strings"))?)
                .map_err(refused)
        }
        Value::Integer(_) | Value::Float(_) | Value::Boolean(_) | Value::Datetime(_) | Value::Table(_) => {
            Err(wrong(key, "a string or a list of strings"))
        }
    }
}

fn environment(value: Option<&Value>) -> Result<Vec<(String, String)>, SpecError> {
    let Some(value) = value else { return Ok(Vec::new()) };
    let table = value.as_table().ok_or_else(|| wrong("env", "a table of NAME = \"value\""))?;
    let mut out = Vec::with_capacity(table.len());
    for (name, value) in table {
        let key = format!("env.{}", shown(name));
        let value = value.as_str().ok_or_else(|| wrong(&key, "a string"))?;
        check_env(name, value).map_err(|want| wrong(&key, want))?;
        out.push((name.clone(), value.to_owned()));
    }
    Ok(out)
}

/// Checks an environment variable; the error says what it must be.
pub fn check_env(name: &str, value: &str) -> Result<(), &'static str> {
    if name.is_empty() || name.contains('=') || name.contains('\0') {
        return Err("named by text without `=` and NUL");
    }
    if value.contains('\0') {
        return Err("without a NUL character");
    }
    Ok(())
}

fn limits(value: Option<&Value>) -> Result<LimitsAsked, SpecError> {
    let mut out = LimitsAsked::default();
    let Some(value) = value else { return Ok(out) };
    let table = value.as_table().ok_or_else(|| wrong("limits", "a table"))?;
    known_keys(table, "limits.", &LIMIT_KEYS)?;
    for (name, value) in table {
        let key = format!("limits.{name}");
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Integer(number) => number.to_string(),
            Value::Float(number) => number.to_string(),
            Value::Boolean(_) | Value::Datetime(_) | Value::Array(_) | Value::Table(_) => {
                return Err(wrong(&key, "a number or text with a unit"));
            }
        };
        let bad = |error: crate::units::UnitError| wrong(&key, &format!("in range: {error}"));
        match name.as_str() {
            "cpus" => out.cpu_milli = Some(parse_cpu_milli(&text).map_err(bad)?),
            "memory" => out.memory_bytes_max = Some(parse_bytes(&text).map_err(bad)?),
            "disk" => out.disk_bytes_max = Some(parse_bytes(&text).map_err(bad)?),
            "timeout" => out.wall_ms_max = Some(parse_millis(&text).map_err(bad)?),
            _ => out.pids_max = Some(text.parse().map_err(|_| wrong(&key, "a number of processes"))?),
        }
    }
    Ok(out)
}

fn flag(table: &Table, key: &str) -> Result<bool, SpecError> {
    table.get(key).map_or(Ok(false), |value| value.as_bool().ok_or_else(|| wrong(key, "true or false")))
}

fn text<'a>(value: &'a Value, key: &str, want: &str) -> Result<&'a str, SpecError> {
    value.as_str().filter(|text| !text.is_empty() && !text.contains('\0')).ok_or_else(|| wrong(key, want))
}

fn known_keys(table: &Table, prefix: &str, known: &'static [&'static str]) -> Result<(), SpecError> {
    match table.keys().find(|key| !known.contains(&key.as_str())) {
        None => Ok(()),
        Some(key) => Err(SpecError::UnknownKey {
            key: format!("{prefix}{}", shown(key)),
            nearest: nearest(key, known.iter().copied()),
            known,
        }),
    }
}

fn wrong(key: &str, want: &str) -> SpecError {
    SpecError::Value { key: key.to_owned(), want: want.to_owned() }
}

/// A key as it may be printed: cut and escaped.
fn shown(key: &str) -> String {
    key.chars().take(64).flat_map(char::escape_debug).collect()
}

/// Where and why text is not TOML, in one line.
pub fn toml_problem(text: &str, error: &toml::de::Error) -> String {
    let why: String =
        error.message().split_whitespace().collect::<Vec<_>>().join(" ").chars().take(200).collect();
    let Some(before) = error.span().and_then(|span| text.get(..span.start)) else { return why };
    let (line, start) = (before.matches('\n').count() + 1, before.rfind('\n').map_or(0, |at| at + 1));
    format!("line {line}, column {}: {why}", before[start..].chars().count() + 1)
}

#[cfg(test)]
mod tests;
