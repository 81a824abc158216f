//! Output of a command: the whole of it in a file, up to a limit, and its end in memory.

use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use proto::path::JsonBytes;
use proto::verify::OutputTail;

use crate::limits::{LOG_BYTES_MAX, LOGS_KEPT_MAX, TAIL_BYTES_MAX};

/// One output stream of one command.
#[derive(Debug)]
pub(crate) struct StreamLog {
    path: PathBuf,
    /// `None` before the first byte, and after writing failed.
    file: Option<File>,
    failed: bool,
    kept: u64,
    total: u64,
    tail: VecDeque<u8>,
}

impl StreamLog {
    /// A log at `path`, which is made when the first byte comes.
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, file: None, failed: false, kept: 0, total: 0, tail: VecDeque::new() }
    }

    /// Adds bytes. A log that can't be written (a full disk) is cut there: the command is judged by its exit status.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let from = bytes.len().saturating_sub(TAIL_BYTES_MAX);
        self.tail.extend(&bytes[from..]);
        let over = self.tail.len().saturating_sub(TAIL_BYTES_MAX);
        self.tail.drain(..over);
        let room = usize::try_from(LOG_BYTES_MAX - self.kept).unwrap_or(usize::MAX);
        let keep = &bytes[..bytes.len().min(room)];
        if keep.is_empty() || self.failed {
            return;
        }
        match self.write(keep) {
            Ok(()) => self.kept += keep.len() as u64,
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "a log can't be written");
                self.failed = true;
                self.file = None;
            }
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            None => {
                let file = File::options().append(true).create(true).mode(0o600).open(&self.path)?;
                self.file.insert(file)
            }
        };
        file.write_all(bytes)
    }

    /// What the report says about the stream.
    pub(crate) fn finish(mut self) -> OutputTail {
        self.file = None;
        let tail: Vec<u8> = self.tail.into();
        // A tail that starts within a character would be base 64 for that alone.
        let skip = if self.total > tail.len() as u64 {
            tail.iter().take(3).take_while(|b| **b & 0xc0 == 0x80).count()
        } else {
            0
        };
        OutputTail {
            tail: (!tail.is_empty()).then(|| JsonBytes::new(&tail[skip..])),
            bytes_total: self.total,
            truncated: self.kept < self.total,
            log: (self.kept > 0).then(|| JsonBytes::of_path(&self.path)),
        }
    }
}

/// Makes the directory of one run's logs, and removes those of the oldest runs, but not of those that are running. Ids are
/// random, so age is by time.
pub(crate) fn make_dir(logs: &Path, name: &str, running: &HashSet<String>) -> io::Result<PathBuf> {
    // A log that can't be removed, or that another run removes just now, keeps nobody from having one.
    if let Err(error) = remove_oldest(logs, running) {
        tracing::warn!(%error, "old logs can't be removed");
    }
    let dir = logs.join(name);
    std::fs::DirBuilder::new().mode(0o700).create(&dir)?;
    Ok(dir)
}

fn remove_oldest(logs: &Path, running: &HashSet<String>) -> io::Result<()> {
    let mut old: Vec<(std::time::SystemTime, PathBuf)> = Vec::new();
    for entry in std::fs::read_dir(logs)? {
        let entry = entry?;
        let runs = entry.file_name().to_str().is_some_and(|name| running.contains(name));
        // It may be gone by now.
        if let Ok(about) = entry.metadata()
            && about.is_dir()
            && !runs
        {
            old.push((about.modified()?, entry.path()));
        }
    }
    old.sort();
    let kept = LOGS_KEPT_MAX.saturating_sub(running.len().max(1));
    for (_, path) in old.iter().take(old.len().saturating_sub(kept)) {
        match std::fs::remove_dir_all(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(dir: &Path, chunks: &[&[u8]]) -> OutputTail {
        let mut log = StreamLog::new(dir.join("out"));
        chunks.iter().for_each(|chunk| log.add(chunk));
        log.finish()
    }

    #[test]
    fn binary_output_survives() {
        let dir = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0..=255).collect();
        let tail = log(dir.path(), &[&bytes[..100], &bytes[100..]]);
        assert_eq!(tail.tail.unwrap().decode().unwrap(), bytes);
        assert_eq!(std::fs::read(tail.log.unwrap().decode_path().unwrap()).unwrap(), bytes);
        assert_eq!((tail.bytes_total, tail.truncated), (256, false));
    }

    #[test]
    fn a_flood_is_cut_in_the_file_and_its_end_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let chunk = vec![b'x'; 1 << 20];
        let mut chunks: Vec<&[u8]> = vec![&chunk; 65];
        chunks.push(b"the end");
        let tail = log(dir.path(), &chunks);
        assert_eq!(std::fs::metadata(tail.log.unwrap().decode_path().unwrap()).unwrap().len(), LOG_BYTES_MAX);
        assert_eq!((tail.bytes_total, tail.truncated), (65 * (1 << 20) + 7, true));
        let end = tail.tail.unwrap().decode().unwrap();
        assert_eq!(end.len(), TAIL_BYTES_MAX);
        assert!(end.ends_with(b"xthe end"));
    }

    #[test]
    fn a_tail_does_not_start_within_a_character() {
        let dir = tempfile::tempdir().unwrap();
        let text = "ü".repeat(TAIL_BYTES_MAX) + "x";
        let tail = log(dir.path(), &[text.as_bytes()]);
        assert!(matches!(tail.tail, Some(JsonBytes::Text(_))));
    }

    #[test]
    fn no_output_makes_no_file_and_no_disk_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(log(dir.path(), &[]), OutputTail::default());
        let tail = log(&dir.path().join("missing"), &[b"x"]);
        assert_eq!((tail.truncated, tail.log, tail.bytes_total), (true, None, 1));
    }

    #[test]
    fn only_the_latest_runs_keep_their_logs() {
        let dir = tempfile::tempdir().unwrap();
        let names = |from: usize, to: usize| (from..to).map(|i| format!("vf-{i}"));
        let first = HashSet::from(["vf-0".to_owned()]);
        for name in names(0, LOGS_KEPT_MAX + 5) {
            let running = first.iter().cloned().chain([name.clone()]).collect();
            make_dir(dir.path(), &name, &running).unwrap();
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), LOGS_KEPT_MAX);
        assert!(dir.path().join(format!("vf-{}", LOGS_KEPT_MAX + 4)).exists());
        assert!(dir.path().join("vf-0").exists(), "one that runs keeps its logs, however old");
    }

    #[test]
    fn many_runs_at_once_have_logs() {
        let dir = tempfile::tempdir().unwrap();
        for i in 0..LOGS_KEPT_MAX {
            std::fs::create_dir(dir.path().join(format!("old-{i}"))).unwrap();
        }
        let running: HashSet<String> = (0..16).map(|i| format!("vf-{i}")).collect();
        std::thread::scope(|scope| {
            for name in &running {
                let (running, dir) = (&running, dir.path());
                scope.spawn(move || make_dir(dir, name, running).unwrap());
            }
        });
        assert!(running.iter().all(|name| dir.path().join(name).exists()));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), LOGS_KEPT_MAX);
    }
}
