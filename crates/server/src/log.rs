//! The log: structured lines to standard error, or to a bounded file of the state directory.

use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use tracing_subscriber::EnvFilter;

/// The log file is set aside when it is longer, and the one before that is removed.
const LOG_BYTES_MAX: u64 = 8 * 1024 * 1024;

/// Starts logging: to `STATE/logs/tendond.log`, or to standard error. `RUST_LOG` filters; the default is `info`.
pub(crate) fn start(state_dir: Option<&Path>) -> io::Result<()> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    // A line that can't be written, on a full disk or to a reader who is gone, is told nobody and stops nothing.
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).log_internal_errors(false);
    match state_dir {
        None => builder.with_writer(io::stderr).init(),
        Some(dir) => {
            let dir = dir.join("logs");
            DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
            builder.with_writer(Mutex::new(Bounded::open(dir.join("tendond.log"))?)).init();
        }
    }
    Ok(())
}

/// A log file that starts anew when it is full.
struct Bounded {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl Bounded {
    fn open(path: PathBuf) -> io::Result<Self> {
        let file = File::options().append(true).create(true).mode(0o600).open(&path)?;
        let bytes = file.metadata()?.len();
        Ok(Self { path, file, bytes })
    }
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes >= LOG_BYTES_MAX {
            match std::fs::rename(&self.path, self.path.with_extension("log.1")) {
                // Set aside by an earlier try, which could not make a new one.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                done => done?,
            }
            *self = Self::open(self.path.clone())?;
        }
        let written = self.file.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = Bounded::open(dir.path().join("tendond.log")).unwrap();
        let line = vec![b'x'; 1 << 20];
        for _ in 0..20 {
            log.write_all(&line).unwrap();
        }
        let sizes =
            std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len());
        let sizes: Vec<u64> = sizes.collect();
        assert_eq!(sizes.len(), 2);
        assert!(sizes.iter().all(|size| *size <= LOG_BYTES_MAX + (1 << 20)), "{sizes:?}");
    }
}
