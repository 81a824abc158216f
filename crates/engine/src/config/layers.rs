//! The layers of configuration, each with where its settings stand: files that the operator owns, and the environment. Reads
//! these, and nothing else.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use proto::nearest::nearest;
use rustix::fs::OFlags;
use toml::de::{DeTable, DeValue};
use toml::{Table, Value};

use super::{ConfigError, Known, dotted};
use crate::limits::CONFIG_BYTES_MAX;

/// The system's file.
const SYSTEM_FILE: &str = "/etc/tendon/config.toml";
/// How the variables begin that are settings.
const PREFIX: &str = "TENDON_";

/// One layer: where it came from, and what it says.
#[derive(Clone, Debug, Default)]
pub struct Layer {
    /// A file's path, `environment NAME`, or `flag` and a path.
    pub origin: String,
    /// Its settings.
    pub table: Table,
    /// The lines that its settings and sections stand in, from 1, by dotted name.
    lines: BTreeMap<String, usize>,
}

impl Layer {
    /// A layer of TOML.
    pub fn parse(origin: impl Into<String>, text: &str) -> Result<Self, ConfigError> {
        let origin = origin.into();
        let table = text.parse().map_err(|error: toml::de::Error| ConfigError::Toml {
            origin: origin.clone(),
            text: proto::spec::toml_problem(text, &error),
        })?;
        let mut lines = BTreeMap::new();
        if let Ok(document) = DeTable::parse(text) {
            note_lines("", document.get_ref(), text, &mut lines);
        }
        Ok(Self { origin, table, lines })
    }

    /// Where `key` stands in it, for people.
    pub(super) fn place(&self, key: &str) -> String {
        match self.lines.get(key) {
            Some(line) => format!("{}, line {line}", self.origin),
            None => self.origin.clone(),
        }
    }
}

fn note_lines(prefix: &str, table: &DeTable<'_>, text: &str, lines: &mut BTreeMap<String, usize>) {
    for (name, value) in table {
        let key = dotted(prefix, name.get_ref());
        let line = 1 + text.bytes().take(name.span().start).filter(|byte| *byte == b'\n').count();
        if let DeValue::Table(inner) = value.get_ref() {
            note_lines(&key, inner, text, lines);
        }
        lines.insert(key, line);
    }
}

/// All layers of this process: the system's and the user's file, the environment, and the file that a flag names.
pub(super) fn all(flag: Option<&Path>, known: &Known) -> Result<Vec<Layer>, ConfigError> {
    let mut layers = Vec::new();
    for path in [Some(PathBuf::from(SYSTEM_FILE)), proto::place::config_file(variable)].into_iter().flatten()
    {
        layers.extend(read(&path, false)?);
    }
    layers.extend(environment(known, variables())?);
    if let Some(path) = flag {
        let file = read(path, true)?;
        layers.extend(file.map(|layer| Layer { origin: format!("flag {}", path.display()), ..layer }));
    }
    Ok(layers)
}

/// The layers of environment variables: `limits.pids_max` is `TENDON_LIMITS_PIDS_MAX`. The value is TOML, or text where the
/// setting is text. A variable of one of the sections that names no setting is a mistake; others (`TENDON_STATE_DIR`) are
/// others' business.
pub(super) fn environment(
    known: &Known,
    variables: impl IntoIterator<Item = (String, String)>,
) -> Result<Vec<Layer>, ConfigError> {
    let name_of = |key: &str| format!("{PREFIX}{}", key.to_uppercase().replace('.', "_"));
    let names: BTreeMap<String, &String> = known.keys().map(|key| (name_of(key), key)).collect();
    let sections: Vec<String> =
        known.keys().filter_map(|key| Some(format!("{}_", name_of(key.split_once('.')?.0)))).collect();
    let mut layers = Vec::new();
    for (name, text) in variables {
        let Some(key) = names.get(&name) else {
            if sections.iter().any(|section| name.starts_with(section)) {
                let nearest = nearest(&name, names.keys().map(String::as_str)).map(str::to_owned);
                return Err(ConfigError::UnknownKey { key: name, place: "the environment".into(), nearest });
            }
            continue;
        };
        let parsed = format!("v = {text}").parse::<Table>().ok().and_then(|mut table| table.remove("v"));
        let value = match parsed {
            Some(value) if !known[*key].is_string() => value,
            Some(_) | None => Value::String(text),
        };
        layers.push(Layer {
            origin: format!("environment {name}"),
            table: nested(key, value),
            ..Layer::default()
        });
    }
    // In the order of settings, not in that of the environment.
    layers.sort_by(|a, b| a.origin.cmp(&b.origin));
    Ok(layers)
}

/// A table in which the setting `key` has a value.
pub(super) fn nested(key: &str, value: Value) -> Table {
    let mut parts = key.rsplit('.');
    let last = parts.next().unwrap_or_default();
    let innermost = Table::from_iter([(last.to_owned(), value)]);
    parts.fold(innermost, |table, part| Table::from_iter([(part.to_owned(), Value::Table(table))]))
}

/// Reads a file. Opening it never waits, as a pipe without a writer would have it.
pub(super) fn read(path: &Path, must_exist: bool) -> Result<Option<Layer>, ConfigError> {
    let failed = |source| ConfigError::Read { path: path.to_owned(), source };
    let unfit = |text| ConfigError::Unfit { path: path.to_owned(), text };
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = match File::options().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if absent(&error) && !must_exist => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(unfit("is not a file".into()));
    }
    let mut bytes = Vec::new();
    file.take(CONFIG_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > CONFIG_BYTES_MAX {
        return Err(unfit(format!("is larger than {} KiB", CONFIG_BYTES_MAX >> 10)));
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let line =
            1 + error.as_bytes()[..error.utf8_error().valid_up_to()].iter().filter(|b| **b == b'\n').count();
        unfit(format!("is not UTF-8 in line {line}"))
    })?;
    Layer::parse(path.display().to_string(), &text).map(Some)
}

/// Whether there is no such file. `XDG_CONFIG_HOME=/dev/null` is a way to have none.
fn absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

#[expect(clippy::disallowed_methods, reason = "the one place of this crate that reads the environment")]
pub(super) fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// The environment's variables. What is not UTF-8 can't be a setting, and is named as a wrong value of one.
pub(super) fn variables() -> impl Iterator<Item = (String, String)> {
    let text = |text: OsString| text.to_string_lossy().into_owned();
    std::env::vars_os().map(move |(name, value)| (text(name), text(value)))
}
