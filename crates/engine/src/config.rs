//! Configuration: built-in < system < user < environment < flag, and where each value came from. Nothing inside a branch or a
//! repository is ever read as configuration.

mod layers;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hands::HandsOptions;
use policy::{BadValue, Bound};
use proto::error::{Code, Coded};
use proto::http::{ConfigReply, ConfigValue};
use proto::nearest::nearest;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};
use vfs::{EngineChoice, StoreOptions, SystemClock};

pub use layers::Layer;

/// The built-in layer's name.
const BUILT_IN: &str = "built-in";
/// Characters of a wrong value that are shown.
const VALUE_CHARS_MAX: usize = 60;

/// The dotted names of all settings and their built-in values. An empty table as value takes any key below it.
type Known = BTreeMap<String, serde_json::Value>;

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
    /// How long a base is kept on which no branch stands; 0: for ever.
    pub bases_idle_ms_max: u64,
    /// Bytes of such bases that are kept together; 0: no bound.
    pub bases_bytes_max: u64,
}

impl Default for RunnerConfig {
    fn default() -> Self {
        Self {
            engine: Engine::Auto,
            warm_hands_max: 32,
            warm_idle_ms_max: 300_000,
            bases_idle_ms_max: 14 * 24 * 60 * 60 * 1000,
            bases_bytes_max: 10 << 30,
        }
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

/// The bounds of the runner's own settings.
const BOUNDS: [Bound; 1] = [Bound::from("runner.warm_hands_max", 1)];

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
    /// A file can be none.
    #[error("the configuration {} {text}", path.display())]
    Unfit {
        /// The file.
        path: PathBuf,
        /// Why.
        text: String,
    },
    /// A file is not TOML.
    #[error("the configuration {origin} is not TOML: {text}")]
    Toml {
        /// The file.
        origin: String,
        /// Where and why.
        text: String,
    },
    /// A key that means nothing.
    #[error("unknown key `{key}` in {place}")]
    UnknownKey {
        /// Dotted.
        key: String,
        /// Which layer, and where in it.
        place: String,
        /// The known key that was most likely meant.
        nearest: Option<String>,
    },
    /// A value of a wrong type.
    #[error("`{key}` in {place} is {value}")]
    Value {
        /// Dotted.
        key: String,
        /// Which layer, and where in it.
        place: String,
        /// What it is.
        value: String,
        /// What it must be.
        want: String,
    },
    /// A value that makes no sense.
    #[error("`{}` in {place} {}", bad.key, bad.problem)]
    Range {
        /// Which layer, and where in it.
        place: String,
        /// Which, and why.
        bad: BadValue,
    },
}

impl Coded for ConfigError {
    fn code(&self) -> Code {
        match self {
            Self::Read { .. } | Self::Unfit { .. } => Code::BadInput,
            Self::Toml { .. } | Self::UnknownKey { .. } | Self::Value { .. } | Self::Range { .. } => {
                Code::Usage
            }
        }
    }
    fn hint(&self) -> Option<String> {
        match self {
            Self::UnknownKey { nearest: Some(nearest), .. } => Some(format!("did you mean `{nearest}`?")),
            Self::UnknownKey { .. } => Some("docs/configuration.md lists all settings".into()),
            Self::Value { want, .. } => Some(format!("write {want}")),
            Self::Range { bad, .. } => Some(bad.allowed.clone()),
            Self::Read { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Some("let the user read it whom the runner runs as".into())
            }
            Self::Unfit { .. } => Some("write TOML text, or remove it".into()),
            Self::Read { .. } | Self::Toml { .. } => None,
        }
    }
}

impl Settings {
    /// Reads all layers of this process: the system's and the user's file, the environment, and the file that a flag names.
    pub fn load(flag: Option<&Path>) -> Result<Self, ConfigError> {
        Self::from_layers(layers::all(flag, &known())?)
    }

    /// Puts layers over the built-in values, later ones over earlier ones.
    pub fn from_layers(layers: Vec<Layer>) -> Result<Self, ConfigError> {
        let known = known();
        let mut merged = Table::new();
        let mut origins = BTreeMap::new();
        let mut places = BTreeMap::new();
        for layer in layers {
            for (key, value) in leaves(&layer.table, &known) {
                let place = layer.place(&key);
                if !is_known(&key, &known) {
                    let nearest = nearest(&key, known.keys().map(String::as_str)).map(str::to_owned);
                    return Err(ConfigError::UnknownKey { key, place, nearest });
                }
                if !fits(&key, value.clone()) {
                    let want = wanted(&key, &known);
                    let value = value.to_string().chars().take(VALUE_CHARS_MAX).collect();
                    return Err(ConfigError::Value { key, place, value, want });
                }
                places.insert(key.clone(), place);
                origins.insert(key, layer.origin.clone());
            }
            merge(&mut merged, layer.table);
        }
        // Each of its values fits.
        let mut settings: Self = Value::Table(merged).try_into().unwrap_or_default();
        settings.check().map_err(|bad| {
            let place = places.get(bad.key).map_or(BUILT_IN, String::as_str).to_owned();
            ConfigError::Range { place, bad }
        })?;
        settings.origins = origins;
        Ok(settings)
    }

    fn check(&self) -> Result<(), BadValue> {
        self.policy.check()?;
        BOUNDS[0].check(u64::from(self.runner.warm_hands_max))
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
            home: layers::variable("HOME").map(PathBuf::from),
            env: std::env::vars_os()
                .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
                .collect(),
            warden,
            ..HandsOptions::new(hand_binary, state_dir)
        }
    }
}

fn known() -> Known {
    flat(&Settings::default())
}

fn flat(settings: &Settings) -> Known {
    let mut out = BTreeMap::new();
    if let Ok(value) = serde_json::to_value(settings) {
        flatten("", value, &mut out);
    }
    out
}

fn flatten(prefix: &str, value: serde_json::Value, out: &mut Known) {
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
fn leaves(table: &Table, known: &Known) -> Vec<(String, Value)> {
    fn collect(prefix: &str, value: &Value, known: &Known, out: &mut Vec<(String, Value)>) {
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

fn is_known(key: &str, known: &Known) -> bool {
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

/// The state directory: see [`proto::place::state_dir`].
pub fn state_dir(flag: Option<PathBuf>) -> Option<PathBuf> {
    proto::place::state_dir(flag, layers::variable)
}

/// The in-sandbox agent's binary: `TENDON_HAND`, else `hand` next to this program.
pub fn hand_binary() -> PathBuf {
    let beside = || std::env::current_exe().ok().and_then(|exe| exe.parent().map(|dir| dir.join("hand")));
    layers::variable("TENDON_HAND")
        .map(PathBuf::from)
        .or_else(beside)
        .unwrap_or_else(|| PathBuf::from("hand"))
}

/// Whether the setting `key` can be `value`, as far as types go.
fn fits(key: &str, value: Value) -> bool {
    Value::Table(layers::nested(key, value)).try_into::<Settings>().is_ok()
}

/// What the setting `key` must be, for people.
fn wanted(key: &str, known: &Known) -> String {
    if key == "runner.engine" {
        return "\"auto\", \"overlay\" or \"copy\"".into();
    }
    match known.get(key) {
        Some(serde_json::Value::Bool(_)) => "true or false".into(),
        Some(serde_json::Value::Array(_)) => "a list of texts, like [\"a\", \"b\"]".into(),
        Some(serde_json::Value::Number(_)) => {
            let most = if fits(key, Value::Integer(i64::MAX)) { i64::MAX } else { u32::MAX.into() };
            let bounds = policy::BOUNDS.iter().chain(&BOUNDS);
            let bound = bounds.into_iter().find(|bound| bound.key == key && bound.zero.is_none());
            format!("a whole number from {} to {most}", bound.map_or(0, |bound| bound.least))
        }
        Some(serde_json::Value::Null | serde_json::Value::String(_) | serde_json::Value::Object(_)) => {
            "text".into()
        }
        None => format!("a section of settings, which begins with [{key}]"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(origin: &str, text: &str) -> Layer {
        Layer::parse(origin, text).unwrap()
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

    /// The message and the hint for a layer of that text.
    fn refused(text: &str) -> (String, String) {
        let error =
            Layer::parse("/f", text).and_then(|layer| Settings::from_layers(vec![layer])).unwrap_err();
        (error.to_string(), error.hint().unwrap_or_default())
    }

    #[test]
    fn a_wrong_value_is_named_with_its_place_and_what_it_may_be() {
        for (text, message, hint) in [
            (
                "[limits]\n\npids_max = 15",
                "`limits.pids_max` in /f, line 3 is 15, less than the smallest value, 16",
                "write 16 or more",
            ),
            (
                "limits = { wall_ms_max = 0 }",
                "`limits.wall_ms_max` in /f, line 1 is 0, less than the smallest value, 1",
                "write 1 or more",
            ),
            (
                "# x\nlimits_max.memory_bytes_max = 1",
                "`limits_max.memory_bytes_max` in /f, line 2 is 1, less than the smallest value, 33554432",
                "write 33554432 or more, or 0: no bound",
            ),
            (
                "[runner]\nwarm_hands_max = 0",
                "`runner.warm_hands_max` in /f, line 2 is 0, less than the smallest value, 1",
                "write 1 or more",
            ),
            (
                "[limits]\nmemory_bytes_max = \"2GiB\"",
                "`limits.memory_bytes_max` in /f, line 2 is \"2GiB\"",
                "write a whole number from 0 to 9223372036854775807",
            ),
            (
                "[limits]\npids_max = 99999999999",
                "`limits.pids_max` in /f, line 2 is 99999999999",
                "write a whole number from 16 to 4294967295",
            ),
            (
                "[hand]\n\n\netc = \"x\"",
                "`hand.etc` in /f, line 4 is \"x\"",
                "write a list of texts, like [\"a\", \"b\"]",
            ),
            ("hand.toolchains = 1", "`hand.toolchains` in /f, line 1 is 1", "write true or false"),
            (
                "limits = 3",
                "`limits` in /f, line 1 is 3",
                "write a section of settings, which begins with [limits]",
            ),
            (
                "[runner]\nengine = \"fast\"",
                "`runner.engine` in /f, line 2 is \"fast\"",
                "write \"auto\", \"overlay\" or \"copy\"",
            ),
            (
                "[limits\npids_max = 3",
                "the configuration /f is not TOML: line 1, column 8: unclosed table, expected `]`",
                "",
            ),
            ("a = 1\n\na = 2", "the configuration /f is not TOML: line 3, column 1: duplicate key", ""),
        ] {
            let (got, help) = refused(text);
            assert_eq!((got.as_str(), help.as_str()), (message, hint), "{text}");
        }
        let (message, _) = refused(&format!("runner.engine = \"{}\"", "x".repeat(10_000)));
        assert!(message.len() < 200, "{message}");
        for text in ["hand.uid = 0", "hand.uid = 4294967295", "hand.gid = 0", "hand.gid = 4294967295"] {
            assert!(refused(text).0.contains("nobody's"), "{text}");
        }
        Settings::from_layers(vec![layer("c.toml", "hand.uid = 60601")]).unwrap();
    }

    #[test]
    fn the_reference_has_every_setting_as_it_is() {
        let text = include_str!("../../../docs/configuration.md");
        let mut rows = BTreeMap::new();
        for line in text.lines().filter(|line| line.starts_with("| `")) {
            let cells: Vec<&str> = line.split('|').map(|cell| cell.trim().trim_matches('`')).collect();
            rows.insert(cells[1].to_owned(), [cells[2].to_owned(), cells[3].to_owned(), cells[4].to_owned()]);
        }
        let bounds: BTreeMap<&str, Bound> =
            policy::BOUNDS.iter().chain(&BOUNDS).map(|bound| (bound.key, *bound)).collect();
        let want = known().into_iter().map(|(key, value)| {
            let built_in = if key == "hand.etc" { "a list".into() } else { value.to_string() };
            let least = match (bounds.get(key.as_str()), key.as_str()) {
                (Some(bound), _) => bound.least.to_string(),
                (None, "hand.uid" | "hand.gid") => "1".into(),
                (None, _) => String::new(),
            };
            let limit = key.strip_prefix("limits.");
            let option = limit.map(|name| format!("--{}", proto::verify::limit_word(name)));
            (key, [built_in, least, option.unwrap_or_default()])
        });
        assert_eq!(rows, want.collect());
    }

    #[test]
    fn an_unknown_key_is_named_with_the_nearest_known_one() {
        for (text, key, hint) in [
            ("[runner]\nwarm_hand_max = 1", "runner.warm_hand_max", "did you mean `runner.warm_hands_max`?"),
            ("[runer]\nengine = \"copy\"", "runer.engine", "did you mean `runner.engine`?"),
            (
                "zzzzzzzzzzzzzzzzzzzzzzz = 1",
                "zzzzzzzzzzzzzzzzzzzzzzz",
                "docs/configuration.md lists all settings",
            ),
        ] {
            let error = Settings::from_layers(vec![layer("/f", text)]).unwrap_err();
            assert!(error.to_string().starts_with(&format!("unknown key `{key}` in /f, line ")), "{error}");
            assert_eq!(error.hint().unwrap(), hint);
        }
    }

    #[test]
    fn a_wrong_value_is_blamed_on_its_layer() {
        let good = layer("/good", "runner.warm_hands_max = 4\n[limits]\npids_max = 20");
        for bad in ["runner.engine = \"fast\"", "limits.wall_ms_max = 0"] {
            let error = Settings::from_layers(vec![good.clone(), layer("/bad", bad)]).unwrap_err();
            assert!(error.to_string().contains(" in /bad, line 1 is "), "{error}");
        }
    }

    #[test]
    fn variables_are_settings() {
        let variables = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        let load = |pairs: &[(&str, &str)]| {
            layers::environment(&known(), variables(pairs)).and_then(Settings::from_layers)
        };
        let settings = load(&[
            ("TENDON_RUNNER_WARM_HANDS_MAX", "3"),
            ("TENDON_RUNNER_ENGINE", "copy"),
            ("TENDON_HAND_READ_ONLY", "[\"/opt\"]"),
            ("TENDON_STATE_DIR", "/s"),
            ("TENDON_HAND", "/bin/hand"),
        ])
        .unwrap();
        assert_eq!((settings.runner.engine, settings.runner.warm_hands_max), (Engine::Copy, 3));
        assert_eq!(settings.policy.hand.read_only, ["/opt"]);
        assert_eq!(shown(&settings, "runner.engine"), "\"copy\" from environment TENDON_RUNNER_ENGINE");
        for (name, value, want) in [
            (
                "TENDON_RUNNER_WARM_HANDS_MAX",
                "many",
                "`runner.warm_hands_max` in environment TENDON_RUNNER_WARM_HANDS_MAX is \"many\"",
            ),
            (
                "TENDON_LIMITS_PIDS_MAX",
                "1",
                "`limits.pids_max` in environment TENDON_LIMITS_PIDS_MAX is 1, less",
            ),
            (
                "TENDON_HAND_READ_ONLY",
                "/opt",
                "`hand.read_only` in environment TENDON_HAND_READ_ONLY is \"/opt\"",
            ),
            ("TENDON_LIMITS_PID_MAX", "1", "unknown key `TENDON_LIMITS_PID_MAX` in the environment"),
        ] {
            let error = load(&[(name, value)]).unwrap_err();
            assert!(error.to_string().starts_with(want), "{error}");
        }
        let hint = load(&[("TENDON_LIMITS_PID_MAX", "1")]).unwrap_err().hint().unwrap();
        assert_eq!(hint, "did you mean `TENDON_LIMITS_PIDS_MAX`?");
    }

    #[test]
    fn what_can_be_no_configuration_is_told_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let message = |name: &str| layers::read(&at(name), false).unwrap_err().to_string();
        let of = |name: &str, end: &str| format!("the configuration {} {end}", at(name).display());
        rustix::fs::mkfifoat(rustix::fs::CWD, at("fifo"), rustix::fs::Mode::RUSR).unwrap();
        assert_eq!(message("fifo"), of("fifo", "is not a file"));
        assert_eq!(message("."), of(".", "is not a file"));
        std::fs::write(at("latin1"), b"# a\n# gr\xfc\xdfe\n").unwrap();
        assert_eq!(message("latin1"), of("latin1", "is not UTF-8 in line 2"));
        std::fs::write(at("large"), "#".repeat(1024 * 1024 + 1)).unwrap();
        assert_eq!(message("large"), of("large", "is larger than 1024 KiB"));
        std::fs::write(at("whole"), "#".repeat(1024 * 1024)).unwrap();
        assert!(layers::read(&at("whole"), false).unwrap().is_some());
        assert!(layers::read(Path::new("/dev/null/tendon/config.toml"), false).unwrap().is_none());
        assert!(layers::read(&at("nowhere"), false).unwrap().is_none());
        let error = layers::read(&at("nowhere"), true).unwrap_err();
        assert_eq!(error.code(), Code::BadInput);
    }
}
