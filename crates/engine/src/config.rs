//! Configuration: built-in < system < user < environment < flag, and where each value came from. Nothing inside a branch or a
//! repository is ever read as configuration.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hands::HandsOptions;
use proto::error::{Code, Coded};
use proto::http::{ConfigReply, ConfigValue};
use proto::nearest::nearest;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};
use vfs::{EngineChoice, StoreOptions, SystemClock};

use crate::limits::CONFIG_BYTES_MAX;

/// The system's file.
const SYSTEM_FILE: &str = "/etc/tendon/config.toml";
/// The built-in layer's name.
const BUILT_IN: &str = "built-in";

/// All settings of a runner.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// What this crate decides.
    pub runner: RunnerConfig,
    /// What policy decides.
    #[serde(flatten)]
    pub policy: policy::Config,
    /// Where each value came from, by dotted name; what is missing is built in.
    #[serde(skip)]
    pub origins: BTreeMap<String, String>,
}

/// Settings of the runner itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunnerConfig {
    /// The engine of new branches.
    pub engine: Engine,
    /// Warm hands at one time; the one that was idle longest is ended for another.
    pub warm_hands_max: u32,
    /// How long a hand may be idle.
    pub warm_idle_ms_max: u64,
}

impl Default for RunnerConfig {
    fn default() -> Self {
        Self { engine: Engine::Auto, warm_hands_max: 32, warm_idle_ms_max: 300_000 }
    }
}

/// The engine of new branches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    /// overlayfs where it works, else copies.
    Auto,
    /// overlayfs or a refusal.
    Overlay,
    /// Plain copies.
    Copy,
}

/// Why the configuration can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file can't be read.
    #[error("cannot read the configuration {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file is not TOML.
    #[error("the configuration {} is not TOML: {text}", path.display())]
    Toml {
        /// The file.
        path: PathBuf,
        /// Why.
        text: String,
    },
    /// A key that means nothing.
    #[error("unknown key `{key}` in {origin}")]
    UnknownKey {
        /// Dotted.
        key: String,
        /// Which layer.
        origin: String,
        /// The known key that was most likely meant.
        nearest: Option<String>,
    },
    /// A value of a wrong type or range.
    #[error("wrong value in {origin}: {text}")]
    Value {
        /// Which layer.
        origin: String,
        /// What is wrong.
        text: String,
    },
}

impl Coded for ConfigError {
    fn code(&self) -> Code {
        match self {
            Self::Read { .. } => Code::BadInput,
            Self::Toml { .. } | Self::UnknownKey { .. } | Self::Value { .. } => Code::Usage,
        }
    }
    fn hint(&self) -> Option<String> {
        match self {
            Self::UnknownKey { nearest: Some(nearest), .. } => Some(format!("did you mean `{nearest}`?")),
            Self::UnknownKey { .. } => Some("see what is known with: tendon config list".into()),
            Self::Read { .. } | Self::Toml { .. } | Self::Value { .. } => None,
        }
    }
}

/// One layer: where it came from, and what it says.
#[derive(Clone, Debug)]
pub struct Layer {
    /// A file's path, `environment NAME`, or `flag`.
    pub origin: String,
    /// Its settings.
    pub table: Table,
}

impl Settings {
    /// Reads all layers of this process: the system's and the user's file, the environment, and the file that a flag names.
    pub fn load(flag: Option<&Path>) -> Result<Self, ConfigError> {
        let mut layers = Vec::new();
        for path in [Some(PathBuf::from(SYSTEM_FILE)), user_file()].into_iter().flatten() {
            layers.extend(read_layer(&path, false)?);
        }
        layers.extend(environment(&known(), variable));
        if let Some(path) = flag {
            layers.extend(
                read_layer(path, true)?
                    .map(|layer| Layer { origin: format!("flag {}", path.display()), ..layer }),
            );
        }
        Self::from_layers(layers)
    }

    /// Puts layers over the built-in values, later ones over earlier ones.
    pub fn from_layers(layers: Vec<Layer>) -> Result<Self, ConfigError> {
        let known = known();
        let mut merged = Table::new();
        let mut settings = Self::default();
        let mut origins = BTreeMap::new();
        for Layer { origin, table } in layers {
            for (key, _) in leaves(&table, &known) {
                if !is_known(&key, &known) {
                    let nearest = nearest(&key, known.keys().map(String::as_str)).map(str::to_owned);
                    return Err(ConfigError::UnknownKey { key, origin, nearest });
                }
                origins.insert(key, origin.clone());
            }
            merge(&mut merged, table);
            // After each layer, so that an error is the layer's that brought it.
            settings = Value::Table(merged.clone()).try_into().map_err(|error: toml::de::Error| {
                ConfigError::Value { origin, text: one_line(&error.to_string()) }
            })?;
        }
        for (key, id) in [("hand.uid", settings.policy.hand.uid), ("hand.gid", settings.policy.hand.gid)] {
            // The last one means "leave it as it is" to the kernel, which is root's.
            if id == 0 || id == u32::MAX {
                let origin = origins.get(key).cloned().unwrap_or_default();
                let text = format!("`{key}` is {id}: code in a hand must be nobody's that matters");
                return Err(ConfigError::Value { origin, text });
            }
        }
        settings.origins = origins;
        Ok(settings)
    }

    /// Each setting with its value and origin.
    pub fn list(&self) -> ConfigReply {
        let origin = |key: &str| self.origins.get(key).cloned().unwrap_or_else(|| BUILT_IN.to_owned());
        let values =
            flat(self).into_iter().map(|(key, value)| ConfigValue { origin: origin(&key), key, value });
        ConfigReply { version: 1, values: values.collect() }
    }

    pub(crate) fn store_options(&self) -> StoreOptions {
        let engine = match self.runner.engine {
            Engine::Auto => EngineChoice::Auto,
            Engine::Overlay => EngineChoice::Overlay,
            Engine::Copy => EngineChoice::Copy,
        };
        // Code of a hand runs as a user who owns nothing but bases and branches; only root can arrange that.
        let owner =
            rustix::process::geteuid().is_root().then_some((self.policy.hand.uid, self.policy.hand.gid));
        StoreOptions { engine, owner, clock: Arc::new(SystemClock) }
    }

    pub(crate) fn hands_options(
        &self,
        hand_binary: PathBuf,
        state_dir: &Path,
        warden: Option<Vec<OsString>>,
    ) -> HandsOptions {
        HandsOptions {
            config: self.policy.hand.clone(),
            home: variable("HOME").filter(|home| !home.is_empty()).map(PathBuf::from),
            env: std::env::vars_os()
                .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
                .collect(),
            warden,
            ..HandsOptions::new(hand_binary, state_dir)
        }
    }
}

/// The dotted names of all settings and their built-in values. An empty table as value takes any key below it.
fn known() -> BTreeMap<String, serde_json::Value> {
    flat(&Settings::default())
}

fn flat(settings: &Settings) -> BTreeMap<String, serde_json::Value> {
    let mut out = BTreeMap::new();
    if let Ok(value) = serde_json::to_value(settings) {
        flatten("", value, &mut out);
    }
    out
}

fn flatten(prefix: &str, value: serde_json::Value, out: &mut BTreeMap<String, serde_json::Value>) {
    let section = value.as_object().filter(|map| !map.is_empty());
    let Some(section) = section else {
        out.insert(prefix.to_owned(), value);
        return;
    };
    for (key, value) in section {
        flatten(&dotted(prefix, key), value.clone(), out);
    }
}

fn dotted(prefix: &str, key: &str) -> String {
    if prefix.is_empty() { key.to_owned() } else { format!("{prefix}.{key}") }
}

/// The settings of a table by dotted name. A table counts as a value where the setting is one.
fn leaves(table: &Table, known: &BTreeMap<String, serde_json::Value>) -> Vec<(String, Value)> {
    fn collect(
        prefix: &str,
        value: &Value,
        known: &BTreeMap<String, serde_json::Value>,
        out: &mut Vec<(String, Value)>,
    ) {
        match value.as_table().filter(|table| !known.contains_key(prefix) && !table.is_empty()) {
            Some(table) => {
                table.iter().for_each(|(key, value)| collect(&dotted(prefix, key), value, known, out))
            }
            None => out.push((prefix.to_owned(), value.clone())),
        }
    }
    let mut out = Vec::new();
    for (key, value) in table {
        collect(key, value, known, &mut out);
    }
    out
}

fn is_known(key: &str, known: &BTreeMap<String, serde_json::Value>) -> bool {
    // A section without settings in it says nothing, and is no mistake.
    known.contains_key(key)
        || known.keys().any(|name| name.strip_prefix(key).is_some_and(|rest| rest.starts_with('.')))
}

fn merge(below: &mut Table, above: Table) {
    for (key, value) in above {
        match (below.get_mut(&key), value) {
            (Some(Value::Table(below)), Value::Table(above)) => merge(below, above),
            (_, value) => {
                below.insert(key, value);
            }
        }
    }
}

/// The layers of environment variables: `limits.pids_max` is `TENDON_LIMITS_PIDS_MAX`. The value is TOML, or text where the
/// setting is text. Variables that name no setting are others' business (`TENDON_STATE_DIR`).
fn environment(
    known: &BTreeMap<String, serde_json::Value>,
    variable: impl Fn(&str) -> Option<String>,
) -> Vec<Layer> {
    let mut layers = Vec::new();
    for (key, default) in known {
        let name = format!("TENDON_{}", key.to_uppercase().replace('.', "_"));
        let Some(text) = variable(&name) else { continue };
        let parsed = format!("v = {text}").parse::<Table>().ok().and_then(|mut table| table.remove("v"));
        let value = match parsed {
            Some(value) if !default.is_string() => value,
            Some(_) | None => Value::String(text),
        };
        let mut table = Table::new();
        let mut parts = key.rsplit('.');
        if let Some(last) = parts.next() {
            table.insert(last.to_owned(), value);
        }
        for part in parts {
            table = Table::from_iter([(part.to_owned(), Value::Table(table))]);
        }
        layers.push(Layer { origin: format!("environment {name}"), table });
    }
    layers
}

fn read_layer(path: &Path, must_exist: bool) -> Result<Option<Layer>, ConfigError> {
    let failed = |source| ConfigError::Read { path: path.to_owned(), source };
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound && !must_exist => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let mut text = String::new();
    file.take(CONFIG_BYTES_MAX).read_to_string(&mut text).map_err(failed)?;
    let table = text.parse().map_err(|error: toml::de::Error| ConfigError::Toml {
        path: path.to_owned(),
        text: one_line(&error.to_string()),
    })?;
    Ok(Some(Layer { origin: path.display().to_string(), table }))
}

#[expect(clippy::disallowed_methods, reason = "the one place of this crate that reads the environment")]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn user_file() -> Option<PathBuf> {
    let named = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let dir = named("XDG_CONFIG_HOME").or_else(|| named("HOME").map(|home| home.join(".config")))?;
    Some(dir.join("tendon/config.toml"))
}

/// The state directory when no flag names one: `TENDON_STATE_DIR`, else XDG's state home.
pub fn default_state_dir() -> Option<PathBuf> {
    let named = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    named("TENDON_STATE_DIR")
        .or_else(|| named("XDG_STATE_HOME").map(|home| home.join("tendon")))
        .or_else(|| named("HOME").map(|home| home.join(".local/state/tendon")))
}

/// The in-sandbox agent's binary: `TENDON_HAND`, else `hand` next to this program.
pub fn hand_binary() -> PathBuf {
    let beside = || std::env::current_exe().ok().and_then(|exe| exe.parent().map(|dir| dir.join("hand")));
    variable("TENDON_HAND").map(PathBuf::from).or_else(beside).unwrap_or_else(|| PathBuf::from("hand"))
}

fn one_line(text: &str) -> String {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(origin: &str, text: &str) -> Layer {
        Layer { origin: origin.to_owned(), table: text.parse().unwrap() }
    }

    fn shown(settings: &Settings, key: &str) -> String {
        let list = settings.list();
        let value = list.values.iter().find(|value| value.key == key).unwrap();
        format!("{} from {}", value.value, value.origin)
    }

    #[test]
    fn later_layers_win_and_each_value_knows_its_own() {
        let settings = Settings::from_layers(vec![
            layer("/etc/c.toml", "[runner]\nwarm_hands_max = 4\nengine = \"copy\""),
            layer("/home/c.toml", "runner.warm_hands_max = 8"),
            layer("environment X", "runner = { warm_hands_max = 9 }"),
        ])
        .unwrap();
        assert_eq!(settings.runner.warm_hands_max, 9);
        assert_eq!(shown(&settings, "runner.warm_hands_max"), "9 from environment X");
        assert_eq!(shown(&settings, "runner.engine"), "\"copy\" from /etc/c.toml");
        assert_eq!(shown(&settings, "runner.warm_idle_ms_max"), "300000 from built-in");
    }

    #[test]
    fn a_hand_is_never_given_roots_ids() {
        for text in ["hand.uid = 0", "hand.uid = 4294967295", "hand.gid = 0", "hand.gid = 4294967295"] {
            let error = Settings::from_layers(vec![layer("c.toml", text)]).unwrap_err();
            assert!(error.to_string().contains("nobody's"), "{text}: {error}");
        }
        Settings::from_layers(vec![layer("c.toml", "hand.uid = 60601")]).unwrap();
    }

    #[test]
    fn an_unknown_key_is_named_with_the_nearest_known_one() {
        for (text, key, hint) in [
            ("[runner]\nwarm_hand_max = 1", "runner.warm_hand_max", "did you mean `runner.warm_hands_max`?"),
            ("[runer]\nengine = \"copy\"", "runer.engine", "did you mean `runner.engine`?"),
            (
                "zzzzzzzzzzzzzzzzzzzzzzz = 1",
                "zzzzzzzzzzzzzzzzzzzzzzz",
                "see what is known with: tendon config list",
            ),
        ] {
            let error = Settings::from_layers(vec![layer("/f", text)]).unwrap_err();
            assert_eq!(error.to_string(), format!("unknown key `{key}` in /f"));
            assert_eq!(error.hint().unwrap(), hint);
        }
    }

    #[test]
    fn a_wrong_value_is_blamed_on_its_layer() {
        let good = layer("/good", "runner.warm_hands_max = 4");
        let error = Settings::from_layers(vec![good, layer("/bad", "runner.engine = \"fast\"")]).unwrap_err();
        assert!(error.to_string().starts_with("wrong value in /bad: "), "{error}");
        assert!(error.to_string().contains("fast"), "{error}");
    }

    #[test]
    fn variables_are_settings() {
        let variable = |name: &str| match name {
            "TENDON_RUNNER_ENGINE" => Some("copy".to_owned()),
            "TENDON_RUNNER_WARM_HANDS_MAX" => Some("3".to_owned()),
            _ => None,
        };
        let settings = Settings::from_layers(environment(&known(), variable)).unwrap();
        assert_eq!((settings.runner.engine, settings.runner.warm_hands_max), (Engine::Copy, 3));
        assert_eq!(shown(&settings, "runner.engine"), "\"copy\" from environment TENDON_RUNNER_ENGINE");
        let broken = |name: &str| (name == "TENDON_RUNNER_WARM_HANDS_MAX").then(|| "many".to_owned());
        let error = Settings::from_layers(environment(&known(), broken)).unwrap_err();
        assert!(error.to_string().contains("environment TENDON_RUNNER_WARM_HANDS_MAX"), "{error}");
    }

    #[test]
    fn a_file_that_a_flag_names_must_exist() {
        let error = read_layer(Path::new("/nowhere/c.toml"), true).unwrap_err();
        assert_eq!(error.code(), Code::BadInput);
        assert!(read_layer(Path::new("/nowhere/c.toml"), false).unwrap().is_none());
    }
}
