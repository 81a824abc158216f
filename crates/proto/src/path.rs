//! Paths inside a branch: bytes, relative, without `.`, `..` or empty components, and safe to print.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine as _;
use serde::{Deserialize, Serialize};

/// The longest path that a branch takes, in bytes (Linux's `PATH_MAX` less the branch root's share).
pub const PATH_BYTES_MAX: usize = 3072;

/// A relative path below a branch root. Any bytes but NUL; no empty, `.` or `..` component; never empty.
/// In JSON it is a string when it is UTF-8, else `{"base64": "…"}`. Its clones share the bytes: what looks at a whole branch
/// has each path in several places.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TreePath(Arc<[u8]>);

/// Why bytes are not a [`TreePath`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// Nothing is left of the path.
    #[error("the path is empty")]
    Empty,
    /// It starts with `/`.
    #[error("the path `{0}` is absolute, not relative to the branch")]
    Absolute(String),
    /// It has a component that would leave or not name anything.
    #[error("the path `{0}` has an empty, `.` or `..` component")]
    Component(String),
    /// It holds a NUL byte.
    #[error("the path `{0}` holds a NUL byte")]
    Nul(String),
    /// It is longer than [`PATH_BYTES_MAX`].
    #[error("the path has {0} bytes, more than {PATH_BYTES_MAX}")]
    Long(usize),
}

impl TreePath {
    /// Checks and takes `bytes`. A leading `./` and a trailing `/` are not taken off: callers normalise.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self, PathError> {
        let bytes = bytes.into();
        let shown = || String::from_utf8_lossy(&bytes[..bytes.len().min(256)]).escape_debug().to_string();
        if bytes.is_empty() {
            return Err(PathError::Empty);
        }
        if bytes.len() > PATH_BYTES_MAX {
            return Err(PathError::Long(bytes.len()));
        }
        if bytes[0] == b'/' {
            return Err(PathError::Absolute(shown()));
        }
        if bytes.contains(&0) {
            return Err(PathError::Nul(shown()));
        }
        if bytes.split(|b| *b == b'/').any(|part| matches!(part, b"" | b"." | b"..")) {
            return Err(PathError::Component(shown()));
        }
        Ok(Self(bytes.into()))
    }

    /// The bytes of the path.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The path for system calls, relative to a branch root.
    pub fn as_path(&self) -> &Path {
        Path::new(OsStr::from_bytes(&self.0))
    }

    /// The path's components, first to last.
    pub fn components(&self) -> impl Iterator<Item = &[u8]> {
        self.0.split(|b| *b == b'/')
    }

    /// The directory that holds this path, or `None` at the top.
    pub fn parent(&self) -> Option<TreePath> {
        let cut = self.0.iter().rposition(|b| *b == b'/')?;
        Some(Self(self.0[..cut].into()))
    }

    /// The last component.
    pub fn file_name(&self) -> &[u8] {
        self.0.rsplit(|b| *b == b'/').next().unwrap_or(&self.0)
    }

    /// This path with `name` below it. `name` must be one good component.
    pub fn join(&self, name: &[u8]) -> Result<TreePath, PathError> {
        let mut bytes = Vec::with_capacity(self.0.len() + 1 + name.len());
        bytes.extend_from_slice(&self.0);
        bytes.push(b'/');
        bytes.extend_from_slice(name);
        Self::new(bytes)
    }

    /// Whether this path is `dir` or lies below it.
    pub fn starts_with(&self, dir: &TreePath) -> bool {
        self.0 == dir.0 || (self.0.starts_with(&dir.0) && self.0.get(dir.0.len()) == Some(&b'/'))
    }
}

impl std::str::FromStr for TreePath {
    type Err = PathError;
    fn from_str(text: &str) -> Result<Self, PathError> {
        Self::new(text.as_bytes())
    }
}

/// Printed for people: UTF-8 as it is, control characters and other bytes escaped.
impl fmt::Display for TreePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&shown(&self.0))
    }
}

/// Whether a character steers the terminal that shows it, or the order of the text around it.
pub fn steers(c: char) -> bool {
    let order = matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || order || matches!(c, '\u{2028}' | '\u{2029}')
}

/// Bytes for people, on one line: UTF-8 as it is, but what [`steers`] and other bytes escaped.
pub fn shown(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            if steers(c) { out.extend(c.escape_default()) } else { out.push(c) }
        }
        for byte in chunk.invalid() {
            out += &format!("\\x{byte:02x}");
        }
    }
    out
}

impl fmt::Debug for TreePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{self}`")
    }
}

/// Bytes in JSON: a string when they are UTF-8, else `{"base64": "…"}`. What is read is good base 64.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, remote = "Self")]
pub enum JsonBytes {
    /// UTF-8 text.
    Text(String),
    /// Anything else.
    Base64 {
        /// Standard base 64 with padding.
        base64: String,
    },
}

impl Serialize for JsonBytes {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for JsonBytes {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = Self::deserialize(deserializer)?;
        bytes.decode().map_err(serde::de::Error::custom)?;
        Ok(bytes)
    }
}

impl JsonBytes {
    /// Takes bytes as they are.
    pub fn new(bytes: &[u8]) -> Self {
        match std::str::from_utf8(bytes) {
            Ok(text) => Self::Text(text.to_owned()),
            Err(_) => Self::Base64 { base64: base64::engine::general_purpose::STANDARD.encode(bytes) },
        }
    }

    /// Takes a path.
    pub fn of_path(path: &Path) -> Self {
        Self::new(path.as_os_str().as_bytes())
    }

    /// The bytes again as a path.
    pub fn decode_path(&self) -> Result<PathBuf, String> {
        Ok(OsString::from_vec(self.decode()?).into())
    }

    /// The bytes again; an error text if the base 64 is broken.
    pub fn decode(&self) -> Result<Vec<u8>, String> {
        match self {
            Self::Text(text) => Ok(text.clone().into_bytes()),
            Self::Base64 { base64 } => base64::engine::general_purpose::STANDARD
                .decode(base64)
                .map_err(|error| format!("not base 64: {error}")),
        }
    }
}

impl From<&str> for JsonBytes {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

/// Printed for people, like a [`TreePath`].
impl fmt::Display for JsonBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&shown(&self.decode().unwrap_or_default()))
    }
}

impl Serialize for TreePath {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        JsonBytes::new(&self.0).serialize(s)
    }
}

impl<'de> Deserialize<'de> for TreePath {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let bytes = JsonBytes::deserialize(d)?.decode().map_err(serde::de::Error::custom)?;
        Self::new(bytes).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_leave_or_name_nothing_are_refused() {
        for bad in ["", "/etc", "..", "a/..", "a/../b", "./a", "a//b", "a/", "a\0b"] {
            assert!(TreePath::new(bad).is_err(), "{bad:?}");
        }
        assert!(TreePath::new(vec![b'a'; PATH_BYTES_MAX + 1]).is_err());
    }

    #[test]
    fn any_bytes_survive_json() {
        for bytes in [&b"src/main.rs"[..], b"a\nb", b"\xff\xfe/x", "grüße".as_bytes()] {
            let path = TreePath::new(bytes).unwrap();
            let json = serde_json::to_string(&path).unwrap();
            assert_eq!(serde_json::from_str::<TreePath>(&json).unwrap(), path, "{json}");
        }
        assert!(serde_json::from_str::<TreePath>("\"../x\"").is_err());
        for bad in ["{\"base64\": \"%\"}", "{\"base64\": \"YQ\"}", "{\"base46\": \"YQ==\"}", "7", "null"] {
            assert!(serde_json::from_str::<JsonBytes>(bad).is_err(), "{bad}");
        }
        assert_eq!(
            serde_json::from_str::<JsonBytes>("{\"base64\": \"YQ==\"}").unwrap().decode().unwrap(),
            b"a"
        );
    }

    #[test]
    fn printing_escapes_what_a_terminal_would_obey() {
        let bytes = &b"a\x1b[31m\n\xff"[..];
        assert_eq!(TreePath::new(bytes).unwrap().to_string(), "a\\u{1b}[31m\\n\\xff");
        assert_eq!(TreePath::new("exe.\u{202e}fdp").unwrap().to_string(), "exe.\\u{202e}fdp");
        assert_eq!(JsonBytes::new(bytes).to_string(), "a\\u{1b}[31m\\n\\xff");
    }
}
