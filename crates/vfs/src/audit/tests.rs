//! Tests of the audit: what was changed is found, and what can't be written leaves nothing.

use std::sync::Arc;

use proto::error::{Code, Coded};
use rusqlite::Connection;

use super::*;
use crate::{EngineChoice, StoreOptions, SystemClock};

fn store(dir: &Path) -> Store {
    let clock = Arc::new(SystemClock);
    Store::open(dir, StoreOptions { engine: EngineChoice::Auto, owner: None, clock }).unwrap()
}

fn branch() -> BranchId {
    BranchId::from_random([1; 10])
}

fn with_rows(dir: &Path, rows: u64) -> Store {
    let store = store(dir);
    let path = TreePath::new(&b"a/b\n\xff"[..]).unwrap();
    for n in 0..rows {
        let detail = format!("row {n}");
        let (branch, actor) = (branch(), Actor::cli(7));
        let row = NewRow {
            path: Some(&path),
            after: Some(blake3::hash(&n.to_le_bytes())),
            kind: Some(Kind::File),
            ..NewRow::event(&branch, &actor, "write", Some(&detail))
        };
        store.inner.db.write(|tx| append(tx, &store.inner.key, n, &row)).unwrap();
    }
    store
}

/// What verify finds after `sql` ran on the database of ten rows.
fn tampered(sql: &str) -> AuditCheck {
    let dir = tempfile::tempdir().unwrap();
    let store = with_rows(dir.path(), 10);
    assert_eq!(store.audit_verify().unwrap(), AuditCheck { rows: 10, bad_seq: None, problem: None });
    Connection::open(dir.path().join("tendon.db")).unwrap().execute_batch(sql).unwrap();
    store.audit_verify().unwrap()
}

#[test]
fn every_way_to_change_history_is_found_and_its_place_named() {
    for (sql, seq) in [
        ("UPDATE audit SET actor = 'cli:8' WHERE seq = 4", 4),
        ("UPDATE audit SET path = NULL WHERE seq = 1", 1),
        ("UPDATE audit SET time_ms = time_ms + 1 WHERE seq = 10", 10),
        ("UPDATE audit SET kept = 1 WHERE seq = 6", 6),
        ("UPDATE audit SET detail = '' WHERE seq = 2", 2),
        ("UPDATE audit SET hash = zeroblob(32) WHERE seq = 5", 5),
        ("UPDATE audit SET hash = x'00' WHERE seq = 5", 5),
        ("DELETE FROM audit WHERE seq = 3", 3),
        ("DELETE FROM audit WHERE seq = 1", 1),
        ("DELETE FROM audit WHERE seq > 7", 8),
        ("DELETE FROM audit", 1),
        ("DELETE FROM audit; DELETE FROM meta", 1),
        ("DELETE FROM meta WHERE key = 'audit_head'", 11),
        (
            "INSERT INTO audit SELECT 11, time_ms, branch, actor, op, path, before, after, kind, class, mode, size, kept, detail, hash FROM audit WHERE seq = 10",
            11,
        ),
        (
            "UPDATE audit SET seq = 99 WHERE seq = 4; UPDATE audit SET seq = 4 WHERE seq = 5; UPDATE audit SET seq = 5 WHERE seq = 99",
            4,
        ),
        (
            "DELETE FROM audit WHERE seq = 4; UPDATE audit SET seq = -seq WHERE seq > 4; UPDATE audit SET seq = -seq - 1 WHERE seq < 0",
            4,
        ),
    ] {
        let check = tampered(sql);
        assert_eq!(check.bad_seq, Some(seq), "{sql}: {check:?}");
        assert!(check.problem.is_some());
    }
}

#[test]
fn an_old_head_does_not_hide_a_cut_tail() {
    let dir = tempfile::tempdir().unwrap();
    let store = with_rows(dir.path(), 3);
    let old = head_bytes(&store.inner.db.read()).unwrap().unwrap();
    drop(store);
    let store = with_rows(dir.path(), 2);
    let other = Connection::open(dir.path().join("tendon.db")).unwrap();
    other.execute("UPDATE meta SET value = ?1 WHERE key = 'audit_head'", [old]).unwrap();
    assert_eq!(store.audit_verify().unwrap().bad_seq, Some(4));
    // Nothing can be appended to a chain whose end is not known: the operation fails.
    let (branch, actor) = (branch(), Actor::recovery());
    let row = NewRow::event(&branch, &actor, "x", None);
    let failed = store.inner.db.write(|tx| append(tx, &store.inner.key, 0, &row));
    assert!(failed.is_err());
}

#[test]
fn a_tail_that_is_cut_with_an_older_head_put_back_is_missed() {
    let dir = tempfile::tempdir().unwrap();
    let store = with_rows(dir.path(), 3);
    let old = head_bytes(&store.inner.db.read()).unwrap().unwrap();
    drop(store);
    let store = with_rows(dir.path(), 2);
    store.witness().unwrap();
    let cut = |store: &Store| {
        store.inner.db.read().execute("DELETE FROM audit WHERE seq > 3", []).unwrap();
        let set = "UPDATE meta SET value = ?1 WHERE key = 'audit_head'";
        store.inner.db.read().execute(set, [&old]).unwrap();
        let check = store.audit_verify().unwrap();
        assert_eq!(check.problem.as_deref(), Some("rows 4 to 5 are missing at the end"));
        assert_eq!(check.bad_seq, Some(4));
    };
    cut(&store);
    // It is not forgotten by a start, nor by rows that are written instead.
    drop(store);
    let store = with_rows(dir.path(), 1);
    assert_eq!(store.audit_verify().unwrap().problem.as_deref(), Some("rows 5 to 5 are missing at the end"));
    drop(store);
    let store = with_rows(dir.path(), 4);
    assert_eq!(store.audit_verify().unwrap().problem.as_deref(), Some("row 5 is not the one that was noted"));
    drop(store);
    // An orderly end and a start later it still is.
    let store = with_rows(dir.path(), 1);
    assert_eq!(store.audit_verify().unwrap().problem.as_deref(), Some("row 5 is not the one that was noted"));
    drop(store);
    std::fs::remove_file(dir.path().join("audit.head")).unwrap();
    let check = with_rows(dir.path(), 0).audit_verify().unwrap();
    assert_eq!(check.problem.as_deref(), Some("`audit.head` is missing"));
}

#[test]
fn the_chain_goes_on_after_a_restart_and_a_lost_key_is_told() {
    let dir = tempfile::tempdir().unwrap();
    drop(with_rows(dir.path(), 2));
    let store = with_rows(dir.path(), 2);
    assert_eq!(store.audit_verify().unwrap().rows, 4);
    drop(store);
    let key = dir.path().join("audit.key");
    let mode = std::os::unix::fs::PermissionsExt::mode(&key.metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    std::fs::remove_file(key).unwrap();
    let clock = Arc::new(SystemClock);
    let options = StoreOptions { engine: EngineChoice::Auto, owner: None, clock };
    assert!(matches!(Store::open(dir.path(), options), Err(crate::OpenError::Audit { .. })));
}

#[test]
fn a_first_start_that_was_cut_before_its_key_is_repeated() {
    let dir = tempfile::tempdir().unwrap();
    drop(store(dir.path()));
    std::fs::remove_file(dir.path().join("audit.key")).unwrap();
    assert_eq!(with_rows(dir.path(), 1).audit_verify().unwrap().problem, None);
}

#[test]
fn fields_do_not_run_into_each_other() {
    let key = AuditKey::generate().unwrap();
    let of = |actor, op, path, before| {
        let stored = Stored {
            seq: 1,
            time_ms: 1,
            branch: "b",
            actor,
            op,
            path,
            before,
            after: None,
            kind: None,
            class: None,
            mode: None,
            size: None,
            kept: None,
            detail: None,
        };
        stored.chain(&key, &[0; 32])
    };
    let plain = of("ab", "c", Some(&b"x"[..]), None);
    assert_ne!(plain, of("a", "bc", Some(b"x"), None));
    assert_ne!(plain, of("ab", "c", None, Some(b"x")));
    assert_ne!(of("a", "b", Some(b""), None), of("a", "b", None, None));
}

#[test]
fn the_log_is_filtered() {
    let dir = tempfile::tempdir().unwrap();
    let store = with_rows(dir.path(), 10);
    let log =
        |filter: AuditFilter| store.audit_log(&filter).unwrap().iter().map(|row| row.seq).collect::<Vec<_>>();
    assert_eq!(log(AuditFilter { since: Some(8), ..AuditFilter::default() }), [9, 10]);
    assert_eq!(log(AuditFilter { until: Some(2), ..AuditFilter::default() }), [1, 2]);
    assert_eq!(log(AuditFilter { limit: Some(1), ..AuditFilter::default() }), [1]);
    let path = |bytes: &[u8]| Some(TreePath::new(bytes).unwrap());
    assert_eq!(log(AuditFilter { path: path(b"a"), ..AuditFilter::default() }).len(), 10);
    assert_eq!(log(AuditFilter { path: path(b"a/b\n\xff"), ..AuditFilter::default() }).len(), 10);
    assert!(log(AuditFilter { path: path(b"b"), ..AuditFilter::default() }).is_empty());
    assert!(log(AuditFilter { actor: Some("cli:8".into()), ..AuditFilter::default() }).is_empty());
    let other = Some(BranchId::from_random([2; 10]));
    assert!(log(AuditFilter { branch: other, ..AuditFilter::default() }).is_empty());
}

#[test]
fn a_row_that_can_not_be_written_is_an_error_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = with_rows(dir.path(), 1);
    let append_big = || {
        let detail = "x".repeat(DETAIL_BYTES_MAX);
        let (branch, actor) = (branch(), Actor::recovery());
        let row = NewRow::event(&branch, &actor, "x", Some(&detail));
        store.inner.db.write(|tx| -> Result<(), DbError> {
            let mut appender = Appender::begin(tx, &store.inner.key, 0)?;
            for _ in 0..64 {
                appender.push(&row)?;
            }
            appender.finish().map(drop)
        })
    };
    let pages: u32 = store.inner.db.read().pragma_query_value(None, "page_count", |r| r.get(0)).unwrap();
    store.inner.db.read().pragma_update(None, "max_page_count", pages + 2).unwrap();
    assert_eq!(append_big().unwrap_err().code(), Code::NoSpace);
    assert_eq!(store.audit_verify().unwrap(), AuditCheck { rows: 1, bad_seq: None, problem: None });
    store.inner.db.read().pragma_update(None, "max_page_count", 1_000_000).unwrap();
    store.inner.db.read().busy_timeout(std::time::Duration::from_millis(10)).unwrap();
    let other = Connection::open(dir.path().join("tendon.db")).unwrap();
    other.execute_batch("BEGIN EXCLUSIVE").unwrap();
    assert_eq!(append_big().unwrap_err().code(), Code::StateBusy);
    other.execute_batch("ROLLBACK").unwrap();
    append_big().unwrap();
    assert_eq!(store.audit_verify().unwrap().rows, 65);
}
