//! What each layer says of a path, in SQLite: the truth about bases and branches. Looks a path up along a chain of
//! layers; touches no file.

use std::collections::BTreeMap;

use proto::ids::{BranchId, LayerId};
use proto::path::TreePath;
use rusqlite::{Connection, OptionalExtension, Row, params};

use crate::db::DbError;

/// What kind of thing lies at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Dir,
    /// A symbolic link.
    Symlink,
    /// A fifo, socket or device.
    Other,
    /// Nothing: the layer deletes what lies below.
    Whiteout,
}

impl Kind {
    /// The letter in the database.
    pub fn letter(self) -> &'static str {
        match self {
            Kind::File => "f",
            Kind::Dir => "d",
            Kind::Symlink => "l",
            Kind::Other => "o",
            Kind::Whiteout => "x",
        }
    }

    /// The kind of a database letter.
    pub fn from_letter(letter: &str) -> Option<Self> {
        Some(match letter {
            "f" => Kind::File,
            "d" => Kind::Dir,
            "l" => Kind::Symlink,
            "o" => Kind::Other,
            "x" => Kind::Whiteout,
            _ => return None,
        })
    }
}

/// Whether a path belongs to the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// What git would track: hashed into the tree, content kept.
    Tree,
    /// Below `.git`: content kept, not in the tree.
    Git,
    /// Ignored by `.gitignore`: hash recorded, content not kept, not in the tree.
    Ignored,
}

impl Class {
    /// The word in the database.
    pub fn word(self) -> &'static str {
        match self {
            Class::Tree => "tree",
            Class::Git => "git",
            Class::Ignored => "ignored",
        }
    }

    /// The class of a database word.
    pub fn from_word(word: &str) -> Option<Self> {
        Some(match word {
            "tree" => Class::Tree,
            "git" => Class::Git,
            "ignored" => Class::Ignored,
            _ => return None,
        })
    }
}

/// A file's identity at the last scan: while it is the same, so is the content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatId {
    /// Change time, nanoseconds.
    pub ctime_ns: i64,
    /// Modification time, nanoseconds.
    pub mtime_ns: i64,
    /// Inode number.
    pub ino: u64,
}

/// What a layer says of one path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What lies there.
    pub kind: Kind,
    /// Whether it belongs to the tree.
    pub class: Class,
    /// Permission bits (`0o7777`).
    pub mode: u32,
    /// Bytes of a file; length of a symlink's target.
    pub size: u64,
    /// BLAKE3 of a file's content or a symlink's target.
    pub hash: Option<blake3::Hash>,
    /// Whether the content can be had from `blobs` or the base.
    pub kept: bool,
    /// Identity at the last scan.
    pub stat: StatId,
}

impl Entry {
    /// A layer's word that nothing lies there.
    pub fn whiteout(class: Class) -> Self {
        Self {
            kind: Kind::Whiteout,
            class,
            mode: 0,
            size: 0,
            hash: None,
            kept: true,
            stat: StatId::default(),
        }
    }

    /// Whether both say the same of content and mode. Where and when it was stored does not matter.
    pub fn same_content(&self, other: &Entry) -> bool {
        self.kind == other.kind
            && self.mode == other.mode
            && self.size == other.size
            && self.hash == other.hash
    }
}

/// A chain of layers, topmost first; the last one is the base's.
pub(crate) type Chain = Vec<LayerId>;

/// The chain of `top`, from the database.
pub(crate) fn chain(conn: &Connection, top: &LayerId) -> Result<Chain, DbError> {
    let mut statement = conn.prepare_cached("SELECT parent FROM layers WHERE id = ?1")?;
    let mut out = vec![top.clone()];
    let mut at = top.as_str().to_owned();
    while let Some(parent) =
        statement.query_row([&at], |row| row.get::<_, Option<String>>(0)).optional()?.flatten()
    {
        out.push(parent.parse().map_err(|error| DbError::Damaged(format!("{error}")))?);
        at = parent;
    }
    Ok(out)
}

const COLUMNS: &str = "path, kind, class, mode, size, hash, kept, ctime, mtime, ino";

/// What `layer` itself says of `path`.
pub(crate) fn get(conn: &Connection, layer: &LayerId, path: &TreePath) -> Result<Option<Entry>, DbError> {
    const GET: &str = "SELECT path, kind, class, mode, size, hash, kept, ctime, mtime, ino FROM entries WHERE layer = ?1 AND path = ?2";
    let mut statement = conn.prepare_cached(GET)?;
    let mut rows = statement.query(params![layer.as_str(), path.as_bytes()])?;
    rows.next()?.map(|row| read(row).map(|(_, entry)| entry)).transpose()
}

/// What lies at `path` as seen from the top of `chain`: the topmost layer that says anything decides, and a
/// whiteout is nothing. A whiteout or a non-directory at an ancestor hides what lies below it only through explicit
/// whiteouts: whoever writes a layer expands deletions into one whiteout per path.
pub(crate) fn lookup(
    conn: &Connection,
    chain: &[LayerId],
    path: &TreePath,
) -> Result<Option<Entry>, DbError> {
    for layer in chain {
        if let Some(entry) = get(conn, layer, path)? {
            return Ok((entry.kind != Kind::Whiteout).then_some(entry));
        }
    }
    Ok(None)
}

/// Replaces what `layer` says of `path`.
pub(crate) fn put(conn: &Connection, layer: &LayerId, path: &TreePath, entry: &Entry) -> Result<(), DbError> {
    const PUT: &str =
        "INSERT OR REPLACE INTO entries (layer, path, kind, class, mode, size, hash, kept, ctime, mtime, ino)
        VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)";
    conn.prepare_cached(PUT)?.execute(params![
        layer.as_str(),
        path.as_bytes(),
        entry.kind.letter(),
        entry.class.word(),
        entry.mode,
        entry.size.cast_signed(),
        entry.hash.as_ref().map(|hash| hash.as_bytes().as_slice()),
        entry.kept,
        entry.stat.ctime_ns,
        entry.stat.mtime_ns,
        entry.stat.ino.cast_signed(),
    ])?;
    Ok(())
}

/// Takes away what `layer` says of `path`, so that the layers below decide again.
pub(crate) fn forget(conn: &Connection, layer: &LayerId, path: &TreePath) -> Result<(), DbError> {
    conn.prepare_cached("DELETE FROM entries WHERE layer = ?1 AND path = ?2")?
        .execute(params![layer.as_str(), path.as_bytes()])?;
    Ok(())
}

/// Makes `to`, of which nothing is said yet, say all that `from` says.
pub(crate) fn copy_layer(conn: &Connection, from: &LayerId, to: &LayerId) -> Result<(), DbError> {
    let sql =
        format!("INSERT INTO entries (layer, {COLUMNS}) SELECT ?2, {COLUMNS} FROM entries WHERE layer = ?1");
    conn.prepare_cached(&sql)?.execute([from.as_str(), to.as_str()])?;
    Ok(())
}

/// All that `layer` itself says, whiteouts included, below `dir` (or everywhere), by path.
pub(crate) fn of_layer(
    conn: &Connection,
    layer: &LayerId,
    dir: Option<&TreePath>,
) -> Result<BTreeMap<TreePath, Entry>, DbError> {
    let (from, to) = range_below(dir);
    let sql = format!(
        "SELECT {COLUMNS} FROM entries WHERE layer = ?1 AND path >= ?2 AND (?3 IS NULL OR path < ?3) ORDER BY path"
    );
    let mut statement = conn.prepare_cached(&sql)?;
    let mut rows = statement.query(params![layer.as_str(), from, to])?;
    let mut out = BTreeMap::new();
    while let Some(row) = rows.next()? {
        let (path, entry) = read(row)?;
        out.insert(path, entry);
    }
    Ok(out)
}

/// All that lies below `dir` (or everywhere) as seen from the top of `chain`, without whiteouts, by path.
pub(crate) fn merged(
    conn: &Connection,
    chain: &[LayerId],
    dir: Option<&TreePath>,
) -> Result<BTreeMap<TreePath, Entry>, DbError> {
    let mut out = BTreeMap::new();
    for layer in chain.iter().rev() {
        for (path, entry) in of_layer(conn, layer, dir)? {
            if entry.kind == Kind::Whiteout {
                out.remove(&path);
            } else {
                out.insert(path, entry);
            }
        }
    }
    Ok(out)
}

/// Calls `each` for all that lies at a path as seen from the top of `chain`, by path, without holding it all.
pub(crate) fn each_merged(
    conn: &Connection,
    chain: &[LayerId],
    mut each: impl FnMut(&TreePath, &Entry),
) -> Result<(), DbError> {
    let sql = format!("SELECT {COLUMNS} FROM entries WHERE layer = ?1 ORDER BY path");
    let mut statements = chain.iter().map(|_| conn.prepare_cached(&sql)).collect::<Result<Vec<_>, _>>()?;
    let mut layers = Vec::with_capacity(chain.len());
    for (statement, layer) in statements.iter_mut().zip(chain) {
        let mut rows = statement.query([layer.as_str()])?;
        let next = rows.next()?.map(read).transpose()?;
        layers.push((rows, next));
    }
    // The topmost layer of those that say something of the least path decides.
    while let Some(path) = layers.iter().filter_map(|(_, next)| next.as_ref()).map(|(path, _)| path).min() {
        let path = path.clone();
        let mut said = false;
        for (rows, next) in &mut layers {
            if next.as_ref().is_none_or(|(at, _)| *at != path) {
                continue;
            }
            let row = rows.next()?.map(read).transpose()?;
            if let Some((_, entry)) = std::mem::replace(next, row)
                && !std::mem::replace(&mut said, true)
                && entry.kind != Kind::Whiteout
            {
                each(&path, &entry);
            }
        }
    }
    Ok(())
}

/// The last audit sequence number of a branch, 0 if it has none.
pub(crate) fn last_seq(conn: &Connection, branch: &BranchId) -> Result<u64, DbError> {
    let mut statement = conn.prepare_cached("SELECT max(seq) FROM audit WHERE branch = ?1")?;
    let seq: Option<i64> = statement.query_row([branch.as_str()], |row| row.get(0))?;
    Ok(seq.unwrap_or_default().cast_unsigned())
}

/// The half-open range of the paths strictly below `dir`: `dir/` up to `dir0` (`0` follows `/`).
fn range_below(dir: Option<&TreePath>) -> (Vec<u8>, Option<Vec<u8>>) {
    let Some(dir) = dir else { return (Vec::new(), None) };
    let mut from = dir.as_bytes().to_vec();
    let mut to = from.clone();
    from.push(b'/');
    to.push(b'0');
    (from, Some(to))
}

fn read(row: &Row<'_>) -> Result<(TreePath, Entry), DbError> {
    let path: Vec<u8> = row.get(0)?;
    let kind: String = row.get(1)?;
    let class: String = row.get(2)?;
    let hash: Option<[u8; 32]> = row.get(5)?;
    let damaged = |what: String| DbError::Damaged(what);
    let entry = Entry {
        kind: Kind::from_letter(&kind).ok_or_else(|| damaged(format!("entry kind `{kind}`")))?,
        class: Class::from_word(&class).ok_or_else(|| damaged(format!("entry class `{class}`")))?,
        mode: row.get(3)?,
        size: row.get::<_, i64>(4)?.cast_unsigned(),
        hash: hash.map(blake3::Hash::from_bytes),
        kept: row.get(6)?,
        stat: StatId {
            ctime_ns: row.get(7)?,
            mtime_ns: row.get(8)?,
            ino: row.get::<_, i64>(9)?.cast_unsigned(),
        },
    };
    Ok((TreePath::new(path).map_err(|error| damaged(error.to_string()))?, entry))
}
