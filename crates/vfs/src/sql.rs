//! `audit sql`: one SELECT over the state database, on a connection that can do nothing else.

use std::time::{Duration, Instant};

use proto::error::{Code, Coded};
use rusqlite::functions::{Context, FunctionFlags};
use rusqlite::hooks::{AuthAction, AuthContext, Authorization};
use rusqlite::limits::Limit;
use rusqlite::types::ValueRef;
use rusqlite::{Connection, ErrorCode};
use serde_json::Value;

use crate::db::DbError;
use crate::store::Store;

/// The most rows that a query gives.
const ROWS_MAX: usize = 100_000;
/// The most bytes of values that a query gives.
const BYTES_MAX: usize = 64 * 1024 * 1024;
/// The largest value, also in between: the functions of SQLite that take time like the product of two lengths look at no clock.
const VALUE_BYTES_MAX: i32 = 256 * 1024;
/// The longest pattern of LIKE and GLOB.
const PATTERN_BYTES_MAX: usize = 1_000;
/// The longest that a query runs.
const QUERY_MAX: Duration = Duration::from_secs(10);
/// Virtual machine steps between two looks at the clock.
const STEPS_PER_CHECK: i32 = 10_000;

/// The result of a query.
#[derive(Clone, Debug, PartialEq)]
pub struct SqlTable {
    /// Column names.
    pub columns: Vec<String>,
    /// Rows. A blob is its hex, but a column called `path` is text where it is UTF-8.
    pub rows: Vec<Vec<Value>>,
    /// Whether rows were left out because of a limit.
    pub truncated: bool,
}

/// A query that was not answered.
#[derive(Debug, thiserror::Error)]
pub enum SqlError {
    /// SQLite can't run it.
    #[error("can't run this query: {0}")]
    Query(String),
    /// It wants more than reading.
    #[error("only one SELECT over the tables of the state database is allowed")]
    NotRead,
    /// It ran too long.
    #[error("the query ran longer than {} s", QUERY_MAX.as_secs())]
    Slow,
    /// The database can't be opened.
    #[error("can't open the state database for reading")]
    Db(#[from] DbError),
}

impl Coded for SqlError {
    fn code(&self) -> Code {
        match self {
            SqlError::Query(_) => Code::Usage,
            SqlError::NotRead | SqlError::Slow => Code::Refused,
            SqlError::Db(error) => error.code(),
        }
    }
    fn hint(&self) -> Option<String> {
        match self {
            SqlError::Query(_) | SqlError::NotRead => Some(
                "the rows are in `audit`: select seq, actor, op, path from audit order by seq desc limit 20"
                    .into(),
            ),
            SqlError::Slow => Some("add a WHERE on seq or branch, or a LIMIT".into()),
            SqlError::Db(_) => None,
        }
    }
}

impl Store {
    /// Runs one SELECT on a connection that can only read, within limits of rows, bytes and time.
    pub fn audit_sql(&self, sql: &str) -> Result<SqlTable, SqlError> {
        let mut conn = self.inner.db.private_reader()?;
        confine(&mut conn).map_err(DbError::from)?;
        run(&conn, sql)
    }
}

fn confine(conn: &mut Connection) -> Result<(), rusqlite::Error> {
    conn.set_limit(Limit::SQLITE_LIMIT_ATTACHED, 0)?;
    conn.set_limit(Limit::SQLITE_LIMIT_LENGTH, VALUE_BYTES_MAX)?;
    conn.set_limit(Limit::SQLITE_LIMIT_COLUMN, 200)?;
    conn.set_limit(Limit::SQLITE_LIMIT_COMPOUND_SELECT, 50)?;
    conn.set_limit(Limit::SQLITE_LIMIT_SQL_LENGTH, 64 * 1024)?;
    conn.set_limit(Limit::SQLITE_LIMIT_EXPR_DEPTH, 100)?;
    // SQLite's own take time that grows with a power of the number of wildcards, and look at no clock meanwhile.
    for (name, many, one, fold) in [("like", '%', '_', true), ("glob", '*', '?', false)] {
        let matched = move |call: &mut Context<'_>| {
            let (Some(pattern), Some(text)) = (text(call.get_raw(0)), text(call.get_raw(1))) else {
                return Ok(None);
            };
            if pattern.len() > PATTERN_BYTES_MAX {
                return Err(refused("the pattern is too long"));
            }
            if name == "glob" && pattern.contains('[') {
                return Err(refused("GLOB takes no [ here"));
            }
            Ok(Some(matches(&pattern, &text, (many, one), fold)))
        };
        conn.create_scalar_function(name, 2, FunctionFlags::SQLITE_UTF8, matched)?;
    }
    let escape = |_: &mut Context<'_>| Err::<bool, _>(refused("LIKE takes no ESCAPE here"));
    conn.create_scalar_function("like", 3, FunctionFlags::SQLITE_UTF8, escape)?;
    conn.authorizer(Some(authorize))?;
    let started = Instant::now();
    conn.progress_handler(STEPS_PER_CHECK, Some(move || started.elapsed() > QUERY_MAX))
}

fn refused(why: &str) -> rusqlite::Error {
    rusqlite::Error::UserFunctionError(why.into())
}

/// A value as LIKE sees it.
fn text(value: ValueRef<'_>) -> Option<String> {
    match value {
        ValueRef::Null => None,
        ValueRef::Integer(number) => Some(number.to_string()),
        ValueRef::Real(number) => Some(number.to_string()),
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
    }
}

/// Whether the whole text fits the pattern. Takes time like the product of their lengths at most: only the last wildcard for
/// many is ever tried again.
fn matches(pattern: &str, text: &str, (many, one): (char, char), fold: bool) -> bool {
    let pattern: Vec<char> = pattern.chars().collect();
    let text: Vec<char> = text.chars().collect();
    let same = |a: char, b: char| a == b || (fold && a.eq_ignore_ascii_case(&b));
    let (mut p, mut t) = (0, 0);
    let mut last: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some(c) if *c == many => {
                last = Some((p, t));
                p += 1;
            }
            Some(c) if *c == one || same(*c, text[t]) => {
                p += 1;
                t += 1;
            }
            Some(_) | None => match last {
                Some((at, from)) => {
                    last = Some((at, from + 1));
                    (p, t) = (at + 1, from + 1);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == many)
}

#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "whatever is not reading is refused, also what SQLite adds later"
)]
fn authorize(context: AuthContext<'_>) -> Authorization {
    match context.action {
        AuthAction::Select | AuthAction::Recursive => Authorization::Allow,
        AuthAction::Read { table_name, .. } if !table_name.starts_with("pragma_") => Authorization::Allow,
        AuthAction::Function { function_name } if function_name != "load_extension" => Authorization::Allow,
        _ => Authorization::Deny,
    }
}

fn run(conn: &Connection, sql: &str) -> Result<SqlTable, SqlError> {
    let mut statement = conn.prepare(sql).map_err(refusal)?;
    if !statement.readonly() || statement.column_count() == 0 {
        return Err(SqlError::NotRead);
    }
    let columns: Vec<String> = statement.column_names().map(str::to_owned).collect();
    let mut out = SqlTable { columns, rows: Vec::new(), truncated: false };
    let mut bytes = 0;
    let mut rows = statement.query([]).map_err(refusal)?;
    while let Some(row) = rows.next().map_err(refusal)? {
        if out.rows.len() == ROWS_MAX {
            out.truncated = true;
            break;
        }
        let mut values = Vec::with_capacity(out.columns.len());
        for (at, name) in out.columns.iter().enumerate() {
            let value = json(name, row.get_ref(at).map_err(refusal)?);
            bytes += value.as_str().map_or(8, str::len);
            if bytes > BYTES_MAX {
                out.truncated = true;
                return Ok(out);
            }
            values.push(value);
        }
        out.rows.push(values);
    }
    Ok(out)
}

fn refusal(error: rusqlite::Error) -> SqlError {
    match error.sqlite_error_code() {
        Some(ErrorCode::AuthorizationForStatementDenied | ErrorCode::ReadOnly) => SqlError::NotRead,
        Some(ErrorCode::OperationInterrupted) => SqlError::Slow,
        _ if matches!(error, rusqlite::Error::MultipleStatement) => SqlError::NotRead,
        _ => SqlError::Query(error.to_string()),
    }
}

fn json(column: &str, value: ValueRef<'_>) -> Value {
    match value {
        ValueRef::Null => Value::Null,
        ValueRef::Integer(number) => number.into(),
        ValueRef::Real(number) => number.into(),
        ValueRef::Text(text) => String::from_utf8_lossy(text).into_owned().into(),
        ValueRef::Blob(bytes) => match std::str::from_utf8(bytes) {
            Ok(text) if column == "path" => text.into(),
            Ok(_) | Err(_) => hex(bytes).into(),
        },
    }
}

/// Lowercase hex.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut out, byte| {
        let _ = write!(out, "{byte:02x}");
        out
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{EngineChoice, StoreOptions, SystemClock};

    fn store(dir: &std::path::Path) -> Store {
        let clock = Arc::new(SystemClock);
        Store::open(dir, StoreOptions { engine: EngineChoice::Auto, owner: None, clock }).unwrap()
    }

    #[test]
    fn a_select_is_answered() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let table = store
            .audit_sql("select 1 as a, 'x' as b, x'00ff' as c, null as d, cast('p' as blob) as path")
            .unwrap();
        assert_eq!(table.columns, ["a", "b", "c", "d", "path"]);
        let row: Vec<Value> = vec![1.into(), "x".into(), "00ff".into(), Value::Null, "p".into()];
        assert_eq!(table.rows, [row]);
        let counted = store.audit_sql("with recursive n(i) as (select 1 union all select i+1 from n where i < 5) select count(*), max(i) from n");
        assert_eq!(counted.unwrap().rows[0][0], Value::from(5));
        store.audit_sql("select count(*) from audit join branches on branch = id").unwrap();
    }

    #[test]
    fn whatever_is_not_reading_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let victim = dir.path().join("victim");
        for sql in [
            "insert into meta values ('a', x'00')",
            "delete from audit",
            "update audit set op = 'x'",
            "drop table audit",
            "create table t (a)",
            "create temp table t (a)",
            "pragma user_version = 7",
            "pragma query_only = 0",
            "pragma journal_mode",
            "select * from pragma_user_version",
            "begin",
            "vacuum",
            "vacuum into 'x'",
            "reindex",
            "detach main",
            "select load_extension('x')",
            "select 1; delete from audit",
            "explain select 1",
            &format!("attach '{}' as v", victim.display()),
            &format!("attach 'file:{}?mode=rwc' as v", victim.display()),
            "",
            "-- nothing",
            "selec 1",
            "select * from nowhere",
        ] {
            let answer = store.audit_sql(sql);
            if sql == "explain select 1" {
                continue;
            }
            assert!(matches!(answer, Err(SqlError::NotRead | SqlError::Query(_))), "{sql}: {answer:?}");
        }
        assert!(!victim.exists());
        assert_eq!(store.audit_verify().unwrap().problem, None);
    }

    #[test]
    fn a_query_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let many = "with recursive n(i) as (select 1 union all select i+1 from n) select i from n";
        let table = store.audit_sql(many).unwrap();
        assert!(table.truncated);
        assert_eq!(table.rows.len(), ROWS_MAX);
        let big = store.audit_sql("select length(zeroblob(1000000000))");
        assert!(matches!(big, Err(SqlError::Query(_))), "{big:?}");
    }

    #[test]
    fn one_step_of_a_query_takes_no_longer_than_the_query_may() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let long = "with a as (select replace(hex(zeroblob(120000)), '0', 'a') as s)";
        for step in [
            "s like '%a%a%a%a%a%a%a%a%a%a%a%a%b'",
            "s like '%' || substr(s, 1, 100000) || 'b'",
            "s glob '*a*a*a*a*a*a*a*a*a*a*a*a*b'",
            "length(replace(s, substr(s, 1, 100000) || 'b', 'c'))",
            "instr(s, substr(s, 1, 100000) || 'b')",
            "length(printf('%s%s%s%s', s, s, s, s))",
            "(with recursive n(i, t) as (select 1, s union all select i + 1, t || s from n where i < 40) select max(t) from n)",
        ] {
            let started = Instant::now();
            let _ = store.audit_sql(&format!("{long} select {step} from a"));
            assert!(started.elapsed() < QUERY_MAX * 2, "{step}: {:?}", started.elapsed());
        }
        let wide = format!("select {}", vec!["zeroblob(250000)"; 150].join(", "));
        let table = store.audit_sql(&wide).unwrap();
        assert!(table.truncated && table.rows.is_empty());
    }

    #[test]
    fn like_and_glob_are_those_of_sqlite() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let plain = Connection::open_in_memory().unwrap();
        for (text, pattern) in [
            ("'src/Main.rs'", "'SRC/%.rs'"),
            ("'src/Main.rs'", "'src/____.rs'"),
            ("'src/Main.rs'", "'src/_____.rs'"),
            ("'aab'", "'%ab'"),
            ("'aXbXc'", "'a%x%c%'"),
            ("''", "'%'"),
            ("''", "'_'"),
            ("'a'", "''"),
            ("'\u{e9}a'", "'_a'"),
            ("x'612f62'", "'a/b'"),
            ("12", "'1_'"),
            ("null", "'%'"),
        ] {
            for query in [
                format!("select {text} like {pattern}"),
                format!("select {text} glob {}", pattern.replace('%', "*").replace('_', "?")),
            ] {
                let expected: Option<i64> = plain.query_row(&query, [], |row| row.get(0)).unwrap();
                let got = store.audit_sql(&query).unwrap().rows[0][0].clone();
                assert_eq!(got, expected.map_or(Value::Null, Value::from), "{query}");
            }
        }
        assert!(store.audit_sql("select 'a' like 'a' escape 'x'").is_err());
        assert!(store.audit_sql("select 'a' glob '[a]'").is_err());
    }

    #[test]
    fn an_endless_query_is_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let mut conn = store.inner.db.private_reader().unwrap();
        confine(&mut conn).unwrap();
        let started = Instant::now();
        let deadline = Duration::from_millis(50);
        conn.progress_handler(STEPS_PER_CHECK, Some(move || started.elapsed() > deadline)).unwrap();
        let endless = "with recursive n(i) as (select 1 union all select i+1 from n) select max(i) from n";
        assert!(matches!(run(&conn, endless), Err(SqlError::Slow)));
    }
}
