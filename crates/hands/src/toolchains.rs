//! Toolchains and package caches of the runner's home, found by looking: what of it a hand sees, and never its credentials.
//! Pure apart from reading directories below the home that is passed in.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};

use crate::generated::AGENT_HOME;
use crate::limits::TOOLCHAIN_CONFIG_BYTES_MAX;

/// How a directory is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It can't be written.
    ReadOnly,
    /// Each hand writes its own copy.
    CopyOnWrite,
}

/// A directory or file of the host in a hand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bind {
    /// On the host.
    pub from: PathBuf,
    /// In the hand.
    pub to: PathBuf,
    /// Whether it can be written.
    pub access: Access,
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Toolchains {
    /// `rustup`, `cargo`, `npm`, …
    pub found: Vec<&'static str>,
    /// Empty, writable directories that the binds lie in.
    pub dirs: Vec<PathBuf>,
    /// What is shown.
    pub binds: Vec<Bind>,
    /// Files that are generated: path in the hand, content.
    pub files: Vec<(PathBuf, Vec<u8>)>,
    /// Environment.
    pub env: Vec<(String, String)>,
    /// Directories for the front of `PATH`.
    pub path: Vec<PathBuf>,
}

/// Variables that make the tools work without a network by themselves.
const OFFLINE: [(&str, &str); 7] = [
    ("CARGO_NET_OFFLINE", "true"),
    ("npm_config_offline", "true"),
    ("npm_config_audit", "false"),
    ("npm_config_fund", "false"),
    ("npm_config_update_notifier", "false"),
    ("PIP_NO_INDEX", "1"),
    ("PIP_DISABLE_PIP_VERSION_CHECK", "1"),
];

/// Where packages for pip lie below the home, unless `PIP_FIND_LINKS` names directories.
const WHEELS: &str = ".cache/tendon/wheels";

/// Files in what is shown that tools write credentials into: with them in an address, mostly.
const MAY_HOLD_SECRETS: [&str; 14] = [
    // cargo's copies of git repositories, and of git registries.
    "db/*/config",
    "db/*/FETCH_HEAD",
    "checkouts/*/*/.git/config",
    "checkouts/*/*/.git/FETCH_HEAD",
    "index/*/.git/config",
    "index/*/.git/FETCH_HEAD",
    // nvm and pyenv are clones themselves.
    ".git/config",
    ".git/FETCH_HEAD",
    "plugins/*/.git/config",
    "plugins/*/.git/FETCH_HEAD",
    "versions/*/pip.conf",
    "versions/*/etc/pip.conf",
    "versions/node/*/etc/npmrc",
    "versions/node/*/lib/node_modules/npm/npmrc",
];

/// Looks below `home`; `env` is the runner's environment, of which only the variables that name a place are used.
pub fn find(home: &Path, env: &BTreeMap<String, String>) -> Toolchains {
    let mut all = Toolchains::none();
    let place = |variable: &str, default: &str| {
        env.get(variable)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
            .unwrap_or_else(|| home.join(default))
    };
    rust(&mut all, &place("CARGO_HOME", ".cargo"), &place("RUSTUP_HOME", ".rustup"), env);
    python(&mut all, home, &place("PYENV_ROOT", ".pyenv"));
    wheels(&mut all, home, env.get("PIP_FIND_LINKS"));
    node(&mut all, home, &place("NVM_DIR", ".nvm"));
    all
}

impl Toolchains {
    /// None but what the system has.
    pub fn none() -> Self {
        let env = OFFLINE.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        Toolchains { env, ..Toolchains::default() }
    }

    /// What is shown in place of files that hold credentials now: path in the hand, content.
    pub fn masks(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let mut masks = Vec::new();
        for bind in &self.binds {
            for pattern in MAY_HOLD_SECRETS {
                for file in fitting(&bind.from, pattern) {
                    // What can't be read as text is not shown at all.
                    let text = read_small(&file).unwrap_or_default();
                    let shown = without_secret_lines(&text);
                    if shown != text || text.is_empty() {
                        let rest = file.strip_prefix(&bind.from).unwrap_or(&file);
                        masks.push((bind.to.join(rest), shown.into_bytes()));
                    }
                }
            }
        }
        masks
    }

    fn read_only(&mut self, path: &Path) {
        self.binds.push(Bind { from: path.to_owned(), to: path.to_owned(), access: Access::ReadOnly });
    }

    fn set(&mut self, name: &str, value: &Path) {
        self.env.push((name.to_owned(), value.to_string_lossy().into_owned()));
    }
}

/// cargo's home is the hand's own directory at the same path (paths in build outputs then stay valid), with the programs
/// read-only and registry and git checkouts copy-on-write. Credentials are not among these.
fn rust(all: &mut Toolchains, cargo: &Path, rustup: &Path, env: &BTreeMap<String, String>) {
    if rustup.join("toolchains").is_dir() {
        all.found.push("rustup");
        all.read_only(rustup);
        all.set("RUSTUP_HOME", rustup);
        for name in ["RUSTUP_TOOLCHAIN"] {
            if let Some(value) = env.get(name) {
                all.env.push((name.into(), value.clone()));
            }
        }
        for linked in links_out_of(&rustup.join("toolchains"), rustup) {
            all.read_only(&linked);
        }
    }
    if !cargo.is_dir() {
        return;
    }
    all.found.push("cargo");
    all.dirs.push(cargo.to_owned());
    all.set("CARGO_HOME", cargo);
    if cargo.join("bin").is_dir() {
        all.read_only(&cargo.join("bin"));
        all.path.push(cargo.join("bin"));
    }
    for name in ["registry", "git"] {
        let dir = cargo.join(name);
        if dir.is_dir() {
            all.binds.push(Bind { from: dir.clone(), to: dir, access: Access::CopyOnWrite });
        }
    }
    if let Some(text) = ["config.toml", "config"].iter().find_map(|name| read_small(&cargo.join(name))) {
        all.files.push((cargo.join("config.toml"), without_secrets(&text).into_bytes()));
    }
}

/// Toolchains that `rustup toolchain link` put elsewhere.
fn links_out_of(dir: &Path, home: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let targets = entries.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
    targets.filter(|to| to.is_absolute() && !to.starts_with(home) && to.join("bin").is_dir()).collect()
}

fn python(all: &mut Toolchains, home: &Path, pyenv: &Path) {
    if pyenv.join("versions").is_dir() {
        all.found.push("pyenv");
        all.read_only(pyenv);
        all.set("PYENV_ROOT", pyenv);
        let shims = pyenv.join("shims");
        if shims.is_dir() {
            // After each `pip install` pyenv writes there, or fails.
            all.binds.push(Bind { from: shims.clone(), to: shims.clone(), access: Access::CopyOnWrite });
        }
        all.path.extend([shims, pyenv.join("bin")]);
    }
    let base = home.join(".local");
    let packages = matching(&base.join("lib"), |name| name.starts_with("python"));
    if !packages.is_empty() {
        all.found.push("pip --user");
        for dir in packages {
            all.read_only(&dir);
        }
        all.set("PYTHONUSERBASE", &base);
    }
}

/// Directories of packages for pip, which without an index finds none by itself; of its cache it uses nothing then.
fn wheels(all: &mut Toolchains, home: &Path, named: Option<&String>) {
    let named: Vec<PathBuf> = named
        .map_or_else(|| vec![home.join(WHEELS)], |list| list.split_whitespace().map(PathBuf::from).collect());
    // pip splits the list at blanks, and takes URLs, which are of no use here.
    let fits = |path: &&PathBuf| {
        path.is_absolute() && path.is_dir() && !path.to_string_lossy().contains(char::is_whitespace)
    };
    let dirs: Vec<&PathBuf> = named.iter().filter(fits).collect();
    if dirs.is_empty() {
        return;
    }
    all.found.push("wheels");
    for dir in &dirs {
        all.read_only(dir);
    }
    let list: Vec<_> = dirs.iter().map(|dir| dir.to_string_lossy()).collect();
    all.env.push(("PIP_FIND_LINKS".into(), list.join(" ")));
}

fn node(all: &mut Toolchains, home: &Path, nvm: &Path) {
    let versions = nvm.join("versions/node");
    if versions.is_dir() {
        all.found.push("nvm");
        all.read_only(nvm);
        all.set("NVM_DIR", nvm);
        let wanted = read_small(&nvm.join("alias/default")).unwrap_or_default();
        let names = matching(&versions, |name| name.starts_with('v'));
        if let Some(version) = node_version(&names, wanted.trim()) {
            all.path.push(version.join("bin"));
        }
    }
    let cache = home.join(".npm/_cacache");
    if cache.is_dir() {
        all.found.push("npm");
        let to = Path::new(AGENT_HOME).join(".npm/_cacache");
        all.binds.push(Bind { from: cache, to, access: Access::CopyOnWrite });
    }
}

/// The newest version that begins with what is wanted; the newest of all when that names none (an alias like `lts/*`).
fn node_version(dirs: &[PathBuf], wanted: &str) -> Option<PathBuf> {
    let wanted = wanted.trim_start_matches('v');
    let number = |dir: &PathBuf| -> Vec<u64> {
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.trim_start_matches('v').split('.').filter_map(|part| part.parse().ok()).collect()
    };
    let wanted: Vec<u64> = wanted.split('.').filter_map(|part| part.parse().ok()).collect();
    let fits = dirs.iter().filter(|dir| number(dir).starts_with(&wanted));
    fits.max_by_key(|dir| number(dir)).or_else(|| dirs.iter().max_by_key(|dir| number(dir))).cloned()
}

fn matching(dir: &Path, fits: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let dirs = entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir());
    let mut found: Vec<PathBuf> =
        dirs.filter(|path| path.file_name().is_some_and(|name| fits(&name.to_string_lossy()))).collect();
    found.sort();
    found
}

/// Files below `dir` at a path of which a part may be `*`, any name. Links are not followed.
fn fitting(dir: &Path, pattern: &str) -> Vec<PathBuf> {
    let mut found = vec![dir.to_owned()];
    for part in pattern.split('/') {
        found = match part {
            "*" => {
                let inside = found.iter().filter_map(|dir| fs::read_dir(dir).ok());
                inside.flat_map(Iterator::flatten).map(|entry| entry.path()).collect()
            }
            name => found.iter().map(|dir| dir.join(name)).collect(),
        };
        found.retain(|path| path.symlink_metadata().is_ok_and(|meta| meta.is_dir() || meta.is_file()));
    }
    found.retain(|path| path.is_file());
    found
}

/// A configuration of lines, or what git fetched from where, without the lines that look like credentials.
fn without_secret_lines(text: &str) -> String {
    let words = ["_auth", "token", "password", "secret", "extraheader", "credential", "helper", "cookie"];
    let secret = |line: &&str| {
        let lower = line.to_lowercase();
        words.iter().any(|word| lower.contains(word)) || has_user(line)
    };
    text.split_inclusive('\n').filter(|line| !secret(line)).collect()
}

/// Whether there is a URL in the text with a user, and maybe a password.
fn has_user(text: &str) -> bool {
    text.split("://").skip(1).any(|rest| {
        let host = rest.split(['/', ' ', '\t', '\n', '"', '\'']).next().unwrap_or_default();
        host.contains('@')
    })
}

/// A file that is longer, or no UTF-8, is none.
fn read_small(path: &Path) -> Option<String> {
    let mut text = String::new();
    let most = TOOLCHAIN_CONFIG_BYTES_MAX;
    File::open(path).ok()?.take(most + 1).read_to_string(&mut text).ok()?;
    (text.len() as u64 <= most).then_some(text)
}

/// cargo's configuration without tokens, proxies, credential providers, and programs to run in place of others.
/// What is not TOML is left out whole.
fn without_secrets(text: &str) -> String {
    let Ok(mut table) = text.parse::<toml::Table>() else { return String::new() };
    for section in ["registry", "http", "credential-alias", "env", "paths", "include"] {
        table.remove(section);
    }
    strip(&mut table);
    toml::to_string(&table).unwrap_or_default()
}

fn strip(table: &mut toml::Table) {
    table.retain(|key, value| {
        let word = key.to_lowercase();
        let secret =
            ["token", "secret", "password", "credential", "proxy"].iter().any(|secret| word.contains(secret));
        !secret && !has_user(key) && strip_value(value)
    });
}

/// Whether the value may stay.
fn strip_value(value: &mut toml::Value) -> bool {
    match value {
        toml::Value::String(text) => !has_user(text),
        toml::Value::Array(values) => {
            values.retain_mut(strip_value);
            true
        }
        toml::Value::Table(table) => {
            strip(table);
            true
        }
        toml::Value::Integer(_)
        | toml::Value::Float(_)
        | toml::Value::Boolean(_)
        | toml::Value::Datetime(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Home(tempfile::TempDir);

    impl Home {
        fn new(paths: &[(&str, &str)]) -> Self {
            let home = Home(tempfile::tempdir().unwrap());
            for (path, text) in paths {
                let path = home.path().join(path);
                if text.is_empty() {
                    fs::create_dir_all(path).unwrap();
                } else {
                    fs::create_dir_all(path.parent().unwrap()).unwrap();
                    fs::write(path, text).unwrap();
                }
            }
            home
        }

        fn path(&self) -> &Path {
            self.0.path()
        }

        fn find(&self) -> Toolchains {
            find(self.path(), &BTreeMap::new())
        }
    }

    #[test]
    fn an_empty_home_has_none() {
        let found = Home::new(&[]).find();
        assert_eq!((found.found.len(), found.binds.len(), found.path.len()), (0, 0, 0));
        assert!(found.env.contains(&("CARGO_NET_OFFLINE".into(), "true".into())));
    }

    #[test]
    fn rust_comes_without_credentials() {
        let home = Home::new(&[
            (".rustup/toolchains/stable/bin", ""),
            (".cargo/bin", ""),
            (".cargo/registry/cache", ""),
            (".cargo/credentials.toml", "token = 'secret'"),
            (
                ".cargo/config.toml",
                "[build]\njobs = 2\n[registries.mine]\nindex = 'sparse+https://me:pw@host/'\ntoken = 'secret'\n\
                 [source.crates-io]\nreplace-with = 'mirror'\n[source.mirror]\nregistry = 'https://host/index'\n\
                 [http]\nproxy = 'http://u:p@h'\n",
            ),
        ]);
        let found = home.find();
        assert_eq!(found.found, ["rustup", "cargo"]);
        let cargo = home.path().join(".cargo");
        let shown: Vec<&Path> = found.binds.iter().map(|bind| bind.to.as_path()).collect();
        assert_eq!(shown, [&*home.path().join(".rustup"), &*cargo.join("bin"), &*cargo.join("registry")]);
        assert_eq!(found.binds[2].access, Access::CopyOnWrite);
        let (path, text) = &found.files[0];
        assert_eq!(path, &cargo.join("config.toml"));
        let text = String::from_utf8(text.clone()).unwrap();
        assert!(text.contains("jobs = 2") && text.contains("https://host/index"), "{text}");
        assert!(!text.contains("secret") && !text.contains("pw") && !text.contains("proxy"), "{text}");
    }

    #[test]
    fn files_in_what_is_shown_lose_their_credentials() {
        let git = "[core]\n\tbare = true\n[remote \"origin\"]\n\turl = https://me:pw@host/r\n[http]\n\textraheader = x\n";
        let home = Home::new(&[
            (".cargo/git/db/r-1/config", git),
            (".cargo/git/db/r-1/FETCH_HEAD", "0123\t\tbranch 'main' of https://me:pw@host/r\n"),
            (".cargo/git/db/r-2/config", "[core]\n\tbare = true\n"),
            (".cargo/git/checkouts/r-1/abc/.git/config", git),
            (".nvm/versions/node/v20.3.0/etc/npmrc", "prefix=/x\n//registry/:_authToken=pw\n"),
            (".nvm/.git/config", git),
            (
                ".pyenv/versions/3.12/pip.conf",
                "[global]\nindex-url = https://me:pw@host/simple\ntimeout = 9\n",
            ),
        ]);
        let masks: BTreeMap<PathBuf, String> = home
            .find()
            .masks()
            .into_iter()
            .map(|(path, text)| {
                let path = path.strip_prefix(home.path()).unwrap().to_owned();
                (path, String::from_utf8(text).unwrap())
            })
            .collect();
        let clean = "[core]\n\tbare = true\n[remote \"origin\"]\n[http]\n".to_owned();
        let expected = [
            (".cargo/git/checkouts/r-1/abc/.git/config", clean.clone()),
            (".cargo/git/db/r-1/FETCH_HEAD", String::new()),
            (".cargo/git/db/r-1/config", clean.clone()),
            (".nvm/.git/config", clean),
            (".nvm/versions/node/v20.3.0/etc/npmrc", "prefix=/x\n".into()),
            (".pyenv/versions/3.12/pip.conf", "[global]\ntimeout = 9\n".into()),
        ];
        assert_eq!(masks, expected.into_iter().map(|(path, text)| (path.into(), text)).collect());
    }

    #[test]
    fn cargos_configuration_loses_addresses_wherever_they_are() {
        let text = "[source.\"https://u:pw@h/i\"]\nreplace-with = 'm'\n[net]\nlist = ['https://u:pw@h', 'kept']\n\
                    [[a]]\nurl = 'https://u:pw@h'\nb = 1\n";
        let shown = without_secrets(text);
        assert!(!shown.contains("pw") && shown.contains("kept") && shown.contains("b = 1"), "{shown}");
    }

    #[test]
    fn variables_move_things() {
        let home = Home::new(&[("elsewhere/cargo/bin", "")]);
        let cargo = home.path().join("elsewhere/cargo");
        let env = BTreeMap::from([("CARGO_HOME".to_owned(), cargo.to_string_lossy().into_owned())]);
        assert_eq!(find(home.path(), &env).dirs, [cargo]);
        let env = BTreeMap::from([("CARGO_HOME".to_owned(), "relative".to_owned())]);
        assert_eq!(find(home.path(), &env).found.len(), 0);
    }

    #[test]
    fn linked_toolchains_are_shown_where_they_are() {
        let home = Home::new(&[(".rustup/toolchains", ""), ("build/stage1/bin", "")]);
        let target = home.path().join("build/stage1");
        std::os::unix::fs::symlink(&target, home.path().join(".rustup/toolchains/mine")).unwrap();
        assert!(home.find().binds.iter().any(|bind| bind.from == target));
    }

    #[test]
    fn nodes_cache_is_copied_on_write_into_the_own_home() {
        let home = Home::new(&[
            (".npm/_cacache", ""),
            (".cache/pip", ""),
            (".cache/tendon/wheels", ""),
            (".pyenv/versions/3.12.1/bin", ""),
            (".local/lib/python3.12/site-packages", ""),
            (".nvm/versions/node/v18.20.1/bin", ""),
            (".nvm/versions/node/v20.3.0/bin", ""),
            (".nvm/versions/node/v20.11.0/bin", ""),
            (".nvm/alias/default", "20\n"),
            (".npmrc", "//registry/:_authToken=secret"),
        ]);
        let found = home.find();
        assert_eq!(found.found, ["pyenv", "pip --user", "wheels", "nvm", "npm"]);
        assert!(found.path.contains(&home.path().join(".nvm/versions/node/v20.11.0/bin")));
        let copied: Vec<&Bind> =
            found.binds.iter().filter(|bind| bind.access == Access::CopyOnWrite).collect();
        let copied: Vec<&Path> = copied.iter().map(|bind| bind.to.as_path()).collect();
        assert_eq!(copied, [Path::new("/home/agent/.npm/_cacache")]);
        assert!(found.binds.iter().all(|bind| !bind.from.ends_with(".npmrc")));
    }

    #[test]
    fn pip_is_shown_directories_of_packages() {
        let home = Home::new(&[(".cache/tendon/wheels", ""), ("a", ""), ("b", ""), ("c d", "")]);
        let at = |name: &str| home.path().join(name).to_string_lossy().into_owned();
        let shown = |env: &[(&str, String)]| {
            let env = env.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
            let found = find(home.path(), &env);
            let links =
                found.env.into_iter().find(|(name, _)| name == "PIP_FIND_LINKS").map(|(_, value)| value);
            (found.binds.len(), links)
        };
        assert_eq!(shown(&[]), (1, Some(at(WHEELS))));
        let named = format!("{} https://x.test/simple relative {} {}", at("a"), at("b"), at("nowhere"));
        assert_eq!(shown(&[("PIP_FIND_LINKS", named)]), (2, Some(format!("{} {}", at("a"), at("b")))));
        assert_eq!(shown(&[("PIP_FIND_LINKS", at("c d"))]), (0, None));
    }

    #[test]
    fn an_unknown_alias_takes_the_newest() {
        let dirs = ["v4.9.1", "v20.0.0", "v18.1.0"].map(PathBuf::from);
        assert_eq!(node_version(&dirs, "lts/*"), Some("v20.0.0".into()));
        assert_eq!(node_version(&dirs, "v18"), Some("v18.1.0".into()));
        assert_eq!(node_version(&[], "18"), None);
    }
}
