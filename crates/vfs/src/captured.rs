//! What a branch holds that can't be captured. Its record lacks that, and so would all that is made of the record: a fork and
//! an export are refused, and a diff tells it.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::PoisonError;

use proto::error::{Code, Coded};
use proto::ids::{BranchId, LayerId};
use proto::path::TreePath;
use rusqlite::Connection;

use crate::content::layer_dir;
use crate::db::DbError;
use crate::entries::{self, Class, Entry, Kind};
use crate::scan::{Layers, ScanError, ScanReport};
use crate::store::Store;
use crate::walk::{Marks, Walk, walk};

/// A branch that holds what can't be captured.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Uncaptured(String);

impl Coded for Uncaptured {
    fn code(&self) -> Code {
        Code::Refused
    }
    fn hint(&self) -> Option<String> {
        Some("remove it, or make it readable, then try again".into())
    }
}

impl ScanReport {
    /// Fails if the scan left out anything.
    pub(crate) fn is_whole(&self) -> Result<(), Uncaptured> {
        self.unscannable_told().map_or(Ok(()), |told| Err(Uncaptured(told)))
    }
}

impl Store {
    /// What the record of the branch, as of its last scan, lacks of what is there. Records nothing: what is there may be being
    /// written by somebody, whose next scan says it.
    pub(crate) fn uncaptured(&self, branch: &BranchId) -> Result<Option<Uncaptured>, ScanError> {
        let lock = self.branch_lock(branch);
        let _held = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let conn = self.inner.db.reader()?;
        let layers = Layers::of(&conn, branch)?.ok_or_else(|| ScanError::NoBranch(branch.clone()))?;
        // No layer below is sealed with anything like that in it.
        let unread = unread(&entries::of_layer(&conn, &layers.open, None)?);
        let mut unscannable =
            if self.inner.live.may_be_written(branch) || self.inner.live.unscanned().contains(branch) {
                let io_error = |source| ScanError::Io { branch: branch.clone(), source };
                let dir = File::open(layer_dir(&self.inner.layout.branch(branch))).map_err(io_error)?;
                let walk = crate::hashing::pool().install(|| walk(dir.as_fd(), Marks::None));
                unseen(&conn, &layers.chain(), &walk.map_err(|errno| io_error(errno.into()))?)?
            } else {
                Vec::new()
            };
        unscannable.extend(unread);
        Ok(ScanReport { unscannable, ..ScanReport::default() }.is_whole().err())
    }
}

/// Files that the layer has of which nobody could read the content.
fn unread(own: &BTreeMap<TreePath, Entry>) -> Vec<String> {
    let unread = own.iter().filter(|(_, entry)| entry.class != Class::Ignored && is_unread(entry));
    unread.map(|(path, _)| format!("can't read {path}")).collect()
}

/// Whether its content could not be read when it was recorded.
pub(crate) fn is_unread(entry: &Entry) -> bool {
    matches!(entry.kind, Kind::File | Kind::Symlink) && entry.hash.is_none()
}

/// What could not be seen, but in directories that are ignored.
fn unseen(conn: &Connection, chain: &[LayerId], walk: &Walk) -> Result<Vec<String>, DbError> {
    let mut notes = Vec::new();
    for unseen in &walk.unseen {
        if !is_ignored(conn, chain, unseen.dir.clone())? {
            notes.push(unseen.note.clone());
        }
    }
    Ok(notes)
}

/// Whether a directory is ignored; of one that is not recorded yet, the nearest one above says it.
fn is_ignored(conn: &Connection, chain: &[LayerId], dir: Option<TreePath>) -> Result<bool, DbError> {
    let mut at = dir;
    while let Some(dir) = at {
        if let Some(entry) = entries::lookup(conn, chain, &dir)? {
            return Ok(entry.class == Class::Ignored);
        }
        at = dir.parent();
    }
    Ok(false)
}
