//! Where things lie when nobody says otherwise. Pure: variables of the environment are passed in.

use std::ffi::OsString;
use std::path::PathBuf;

/// The state directory: the flag, `TENDON_STATE_DIR`, or `tendon` in XDG's state home.
pub fn state_dir(flag: Option<PathBuf>, variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let named = || variable("TENDON_STATE_DIR").filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || xdg("XDG_STATE_HOME", ".local/state", &variable);
    flag.or_else(named).or_else(|| Some(home()?.join("tendon")))
}

/// The user's configuration file, in XDG's configuration home.
pub fn config_file(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    Some(xdg("XDG_CONFIG_HOME", ".config", &variable)?.join("tendon/config.toml"))
}

/// A directory of XDG's; a variable that is not an absolute path counts as not set, as the specification has it.
fn xdg(name: &str, below_home: &str, variable: &impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let named = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    named(name).or_else(|| Some(named("HOME")?.join(below_home)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of<'a>(known: &'a [(&str, &str)]) -> impl Fn(&str) -> Option<OsString> + 'a {
        |name| known.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
    }

    #[test]
    fn the_first_that_is_named_is_taken() {
        let all = [("TENDON_STATE_DIR", "rel"), ("XDG_STATE_HOME", "/xdg"), ("HOME", "/home/me")];
        let dir = |known: &[(&str, &str)]| state_dir(None, of(known)).map(|dir| dir.display().to_string());
        assert_eq!(state_dir(Some("flag".into()), of(&all)), Some("flag".into()));
        assert_eq!(dir(&all).as_deref(), Some("rel"));
        assert_eq!(dir(&all[1..]).as_deref(), Some("/xdg/tendon"));
        assert_eq!(dir(&all[2..]).as_deref(), Some("/home/me/.local/state/tendon"));
        assert_eq!(
            dir(&[("TENDON_STATE_DIR", ""), ("XDG_STATE_HOME", "x"), ("HOME", "/h")]).as_deref(),
            Some("/h/.local/state/tendon")
        );
        assert_eq!(dir(&[("HOME", "relative")]), None);
        assert_eq!(config_file(of(&all)), Some("/home/me/.config/tendon/config.toml".into()));
        assert_eq!(
            config_file(of(&[("XDG_CONFIG_HOME", "/c"), ("HOME", "/h")])),
            Some("/c/tendon/config.toml".into())
        );
    }
}
