//! The key of the audit chain: 32 random bytes in a file that only the runner's user can read.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// The key under which rows are chained.
#[derive(Clone)]
pub(crate) struct AuditKey([u8; 32]);

impl AuditKey {
    /// A key from random bytes.
    pub(crate) fn generate() -> io::Result<Self> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
        Ok(Self(bytes))
    }

    /// Reads the key; `None` if there is no file.
    pub(crate) fn load(path: &Path) -> io::Result<Option<Self>> {
        let mut file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        if file.metadata()?.permissions().mode() & 0o077 != 0 {
            file.set_permissions(std::fs::Permissions::from_mode(0o600))?;
        }
        let mut bytes = [0; 32];
        file.read_exact(&mut bytes)?;
        Ok(Some(Self(bytes)))
    }

    /// Writes the key so that it survives a power cut, or not at all.
    pub(crate) fn save(&self, path: &Path) -> io::Result<()> {
        crate::replace::replace(path, &self.0)
    }

    /// A hasher under this key.
    pub(crate) fn hasher(&self) -> blake3::Hasher {
        blake3::Hasher::new_keyed(&self.0)
    }
}
