//! The state database: SQLite in WAL mode, every commit synced, schema versioned by migrations.

use std::fs::{File, Permissions};
use std::io;
use std::ops::Deref;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use proto::error::{Code, Coded};
use rusqlite::{Connection, ErrorCode, OpenFlags, Transaction, TransactionBehavior};

/// One script per version: the script at index `n` leads from version `n` to `n + 1`.
const MIGRATIONS: &[&str] = &[include_str!("schema.sql")];

/// How long a transaction waits for a lock that another process holds on the database.
const BUSY_MAX: Duration = Duration::from_secs(5);

/// A database that can't be opened or used.
#[derive(Debug, thiserror::Error)]
pub enum DbError {
    /// The state directory was in use, and its database is not there or empty. All else in it hangs on the database, and
    /// a new one would have it swept away.
    #[error("the state directory has been in use, and its database is missing")]
    Missing,
    /// Written by a newer tendon.
    #[error("the state directory has schema version {found}, this tendon knows versions up to {known}")]
    Newer {
        /// Its version.
        found: u32,
        /// Ours.
        known: u32,
    },
    /// Its file can't be made or opened.
    #[error("the file of the state database can't be opened")]
    File(#[source] io::Error),
    /// SQLite failed.
    #[error("the state database failed")]
    Sqlite(#[from] rusqlite::Error),
    /// The disk took a commit and could not keep it.
    #[error("the disk failed to keep what was recorded")]
    Lost,
    /// A row holds what this version can't read.
    #[error("the state database holds a damaged row: {0}")]
    Damaged(String),
}

impl DbError {
    /// Whether the disk is full.
    pub(crate) fn is_full(&self) -> bool {
        match self {
            DbError::Sqlite(error) => error.sqlite_error_code() == Some(ErrorCode::DiskFull),
            DbError::File(error) => error.kind() == io::ErrorKind::StorageFull,
            DbError::Lost | DbError::Missing | DbError::Newer { .. } | DbError::Damaged(_) => false,
        }
    }
}

impl Coded for DbError {
    fn code(&self) -> Code {
        if self.is_full() {
            return Code::NoSpace;
        }
        let error = match self {
            DbError::Sqlite(error) => error,
            DbError::File(_) | DbError::Lost => return Code::HostBroken,
            DbError::Missing | DbError::Newer { .. } | DbError::Damaged(_) => return Code::StateBad,
        };
        let busy = [Some(ErrorCode::DatabaseBusy), Some(ErrorCode::DatabaseLocked)];
        if busy.contains(&error.sqlite_error_code()) { Code::StateBusy } else { Code::StateBad }
    }
    fn hint(&self) -> Option<String> {
        let code = self.code();
        if code == Code::NoSpace {
            return Some("make room, then run it again: nothing was recorded".into());
        }
        if code == Code::StateBusy {
            return Some("another program holds the state database: end it".into());
        }
        Some(match self {
            DbError::File(_) => "choose another directory with --state-dir or TENDON_STATE_DIR".into(),
            DbError::Newer { .. } => "use the newer tendon".into(),
            DbError::Lost => "look after the disk, then start the runner again".into(),
            DbError::Missing => {
                "put `tendon.db` and `tendon.db-wal` back from a copy, or choose another directory".into()
            }
            DbError::Sqlite(_) | DbError::Damaged(_) => {
                "the directory may be damaged: keep a copy of it, then choose another".into()
            }
        })
    }
}

/// Makes the file if it is missing, and sees to it that nobody but its owner can read it: SQLite makes the files beside it
/// alike.
fn private(path: &Path) -> io::Result<()> {
    let file = File::options().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    if file.metadata()?.permissions().mode() & 0o077 != 0 {
        file.set_permissions(Permissions::from_mode(0o600))?;
    }
    Ok(())
}

/// The log of the database is cut to this when it is begun anew: one large transaction does not keep its space for ever.
const LOG_BYTES_MAX: u64 = 64 << 20;

/// The most idle readers that are kept.
const READERS_MAX: usize = 4;

/// The one connection that writes; short reads go through it too. Long reads have connections of their own, which
/// neither wait for the writer nor hold it up.
pub(crate) struct Db {
    path: PathBuf,
    conn: Mutex<Connection>,
    readers: Mutex<Vec<Connection>>,
    /// Something was committed that a power cut may take.
    unsynced: AtomicBool,
    settling: Mutex<()>,
    /// Such a commit is lost: what is appended behind it would be lost with it, so nothing is.
    lost: AtomicBool,
}

impl Db {
    /// Opens the database and brings it to the newest version. One that is not there is made, unless it must be.
    pub(crate) fn open(path: &Path, must_be: bool) -> Result<Self, DbError> {
        if must_be && std::fs::metadata(path).map_or(true, |found| found.len() == 0) {
            return Err(DbError::Missing);
        }
        private(path).map_err(DbError::File)?;
        let mut conn = Connection::open(path)?;
        conn.busy_timeout(BUSY_MAX)?;
        conn.pragma_update(None, "journal_mode", "wal")?;
        conn.pragma_update(None, "journal_size_limit", LOG_BYTES_MAX.cast_signed())?;
        conn.pragma_update(None, "synchronous", "full")?;
        conn.pragma_update(None, "foreign_keys", true)?;
        conn.pragma_update(None, "cache_size", -32_000)?;
        conn.set_prepared_statement_cache_capacity(64);
        migrate(&mut conn, must_be)?;
        Ok(Self {
            path: path.to_owned(),
            conn: Mutex::new(conn),
            readers: Mutex::default(),
            unsynced: AtomicBool::new(false),
            settling: Mutex::default(),
            lost: AtomicBool::new(false),
        })
    }

    /// A connection that only reads, in one transaction: it sees all that is committed at its first read, and nothing
    /// that is committed later. It goes back to the pool when it is dropped.
    pub(crate) fn reader(&self) -> Result<Reader<'_>, DbError> {
        let idle = self.readers.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let conn = idle.map_or_else(|| self.private_reader(), Ok)?;
        conn.execute_batch("BEGIN")?;
        Ok(Reader { db: self, conn: Some(conn) })
    }

    /// A connection that only reads and that the caller may confine further.
    pub(crate) fn private_reader(&self) -> Result<Connection, DbError> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let conn = Connection::open_with_flags(&self.path, flags)?;
        conn.busy_timeout(BUSY_MAX)?;
        conn.pragma_update(None, "query_only", true)?;
        conn.pragma_update(None, "cache_size", -16_000)?;
        conn.set_prepared_statement_cache_capacity(64);
        Ok(conn)
    }

    /// The connection, for reads outside a transaction.
    pub(crate) fn read(&self) -> MutexGuard<'_, Connection> {
        // A panic while it was held rolled its transaction back: the connection is still good.
        self.conn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` in one transaction: all of it is committed and synced, or none of it happened.
    pub(crate) fn write<T, E: From<DbError>>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        self.transact(&mut self.read(), work)
    }

    /// As [`Db::write`], and not synced: a power cut may take it, until [`Db::settle`] or the next [`Db::write`].
    pub(crate) fn write_unsynced<T, E: From<DbError>>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut conn = Unsynced { db: self, conn: self.read() };
        conn.conn.pragma_update(None, "synchronous", "normal").map_err(DbError::from)?;
        // Before: a commit that fails may have written.
        self.unsynced.store(true, Ordering::Release);
        self.transact(&mut conn.conn, work)
    }

    /// Syncs what was committed unsynced. Should that fail, no more is written until the database is opened again.
    pub(crate) fn settle(&self) -> Result<(), DbError> {
        // Whoever finds nothing to sync has waited for the one who syncs it.
        let _turn = self.settling.lock().unwrap_or_else(PoisonError::into_inner);
        if self.unsynced.swap(false, Ordering::AcqRel) {
            let mut log = self.path.clone().into_os_string();
            log.push("-wal");
            self.settled(File::open(log).and_then(|log| log.sync_data()))?;
        }
        self.usable()
    }

    fn settled(&self, synced: io::Result<()>) -> Result<(), DbError> {
        synced.map_err(|error| {
            tracing::error!(%error, "what was recorded can't be synced");
            self.lost.store(true, Ordering::Release);
            DbError::Lost
        })
    }

    fn usable(&self) -> Result<(), DbError> {
        if self.lost.load(Ordering::Acquire) { Err(DbError::Lost) } else { Ok(()) }
    }

    fn transact<T, E: From<DbError>>(
        &self,
        conn: &mut Connection,
        work: impl FnOnce(&Transaction<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        self.usable()?;
        let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).map_err(DbError::from)?;
        let out = work(&tx)?;
        if let Err(error) = tx.commit() {
            // What was committed before it and not synced went to the same log, and may be lost with it; not so on a disk
            // that is only full.
            let broken = error.sqlite_error_code() == Some(rusqlite::ErrorCode::SystemIoFailure);
            if broken && self.unsynced.load(Ordering::Acquire) {
                self.lost.store(true, Ordering::Release);
            }
            return Err(DbError::from(error).into());
        }
        Ok(out)
    }
}

/// The writer while its commits are not synced. They are again when it is dropped, whatever happened meanwhile.
struct Unsynced<'a> {
    db: &'a Db,
    conn: MutexGuard<'a, Connection>,
}

impl Drop for Unsynced<'_> {
    fn drop(&mut self) {
        if self.conn.pragma_update(None, "synchronous", "full").is_err() {
            self.db.lost.store(true, Ordering::Release);
        }
    }
}

/// A connection from the pool.
pub(crate) struct Reader<'a> {
    db: &'a Db,
    conn: Option<Connection>,
}

impl Deref for Reader<'_> {
    type Target = Connection;
    fn deref(&self) -> &Connection {
        #[expect(clippy::expect_used, reason = "only drop takes it")]
        self.conn.as_ref().expect("a reader holds its connection until it is dropped")
    }
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        let ended = self.conn.as_ref().is_some_and(|conn| conn.execute_batch("ROLLBACK").is_ok());
        if !ended {
            return;
        }
        let mut readers = self.db.readers.lock().unwrap_or_else(PoisonError::into_inner);
        if readers.len() < READERS_MAX {
            readers.extend(self.conn.take());
        }
    }
}

fn migrate(conn: &mut Connection, must_be: bool) -> Result<(), DbError> {
    let known = u32::try_from(MIGRATIONS.len()).unwrap_or(u32::MAX);
    let found: u32 = conn.pragma_query_value(None, "user_version", |row| row.get(0))?;
    if found > known {
        return Err(DbError::Newer { found, known });
    }
    if must_be && found == 0 {
        return Err(DbError::Missing);
    }
    for (from, script) in MIGRATIONS.iter().enumerate().skip(found as usize) {
        let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
        tx.execute_batch(script)?;
        tx.pragma_update(None, "user_version", u32::try_from(from + 1).unwrap_or(u32::MAX))?;
        tx.commit()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_database_opens_again_and_a_newer_one_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.db");
        drop(Db::open(&path, false).unwrap());
        let db = Db::open(&path, false).unwrap();
        db.read().pragma_update(None, "user_version", 99).unwrap();
        drop(db);
        assert!(matches!(Db::open(&path, false), Err(DbError::Newer { found: 99, .. })));
    }

    #[test]
    fn a_commit_that_the_disk_lost_is_the_last() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.db");
        let db = Db::open(&path, false).unwrap();
        let insert = |key: &'static str| {
            move |tx: &Transaction<'_>| -> Result<(), DbError> {
                tx.execute("INSERT INTO meta VALUES (?1, x'00')", [key])?;
                Ok(())
            }
        };
        let synchronous =
            || -> u32 { db.read().pragma_query_value(None, "synchronous", |r| r.get(0)).unwrap() };
        db.write_unsynced(insert("a")).unwrap();
        db.settle().unwrap();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            db.write_unsynced(|_| -> Result<(), DbError> { panic!("while it was unsynced") })
        }));
        assert!(panicked.is_err());
        assert_eq!(synchronous(), 2, "full");
        db.write_unsynced(insert("b")).unwrap();
        assert!(matches!(db.settled(Err(io::ErrorKind::Other.into())), Err(DbError::Lost)));
        assert!(matches!(db.settle(), Err(DbError::Lost)));
        assert!(matches!(db.write(insert("c")), Err(DbError::Lost)));
        drop(db);
        Db::open(&path, true).unwrap().write(insert("c")).unwrap();
    }

    #[test]
    fn the_log_of_a_large_transaction_does_not_stay_large() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.db");
        let db = Db::open(&path, false).unwrap();
        let insert = |key: &'static str, bytes: u64| {
            let sql = "INSERT INTO meta VALUES (?1, zeroblob(?2))";
            db.write(|tx| -> Result<usize, DbError> { Ok(tx.execute(sql, (key, bytes.cast_signed()))?) })
        };
        let log = || std::fs::metadata(dir.path().join("t.db-wal")).unwrap().len();
        insert("large", 2 * LOG_BYTES_MAX).unwrap();
        assert!(log() > 2 * LOG_BYTES_MAX);
        insert("small", 1).unwrap();
        assert!(log() <= LOG_BYTES_MAX, "{}", log());
    }

    #[test]
    fn a_failed_transaction_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let db = Db::open(&dir.path().join("t.db"), false).unwrap();
        let failed: Result<(), DbError> = db.write(|tx| {
            tx.execute("INSERT INTO meta VALUES ('a', x'00')", [])?;
            Err(DbError::Damaged("no".into()))
        });
        assert!(failed.is_err());
        let rows: u32 = db.read().query_row("SELECT count(*) FROM meta", [], |r| r.get(0)).unwrap();
        assert_eq!(rows, 0);
    }
}
