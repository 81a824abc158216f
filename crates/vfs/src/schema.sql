-- Version 1 of the state database. Later versions are migrations in db.rs; this file is never edited after a release.

CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value BLOB NOT NULL
) STRICT, WITHOUT ROWID;

-- A set of changes over `parent`; a base's layer has none. See docs/design/001-spine.md.
CREATE TABLE layers (
    id         TEXT PRIMARY KEY,
    parent     TEXT REFERENCES layers (id),
    base       TEXT NOT NULL,              -- the base at the bottom of the chain
    depth      INTEGER NOT NULL,           -- layers between this one and its base; a base's layer is 0
    state      TEXT NOT NULL CHECK (state IN ('open', 'sealed')),
    engine     TEXT NOT NULL CHECK (engine IN ('base', 'overlay', 'copy')),
    created_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX layers_by_parent ON layers (parent);

CREATE TABLE bases (
    id         TEXT PRIMARY KEY,
    layer      TEXT NOT NULL UNIQUE REFERENCES layers (id),
    content    TEXT NOT NULL UNIQUE,       -- digest of all that decides its content: found again by it
    source     TEXT NOT NULL,
    tree       TEXT NOT NULL,              -- blake3:…
    git_head   TEXT,
    files      INTEGER NOT NULL,
    bytes      INTEGER NOT NULL,
    warnings   TEXT NOT NULL,              -- JSON array of strings
    created_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE branches (
    id         TEXT PRIMARY KEY,
    name       TEXT UNIQUE,
    base       TEXT NOT NULL REFERENCES bases (id),
    layer      TEXT NOT NULL REFERENCES layers (id),
    parent     TEXT,                       -- the branch it was forked from; may be dropped
    parent_seq INTEGER,                    -- the audit sequence at the fork
    engine     TEXT NOT NULL CHECK (engine IN ('overlay', 'copy')),
    created_ms INTEGER NOT NULL,
    dropped_ms INTEGER                     -- rows are kept, for history; the directory is gone
) STRICT, WITHOUT ROWID;

-- What each layer says of a path. kind: f file, d directory, l symlink, o other (fifo, socket, device), x whiteout.
CREATE TABLE entries (
    layer  TEXT NOT NULL,
    path   BLOB NOT NULL,
    kind   TEXT NOT NULL CHECK (kind IN ('f', 'd', 'l', 'o', 'x')),
    class  TEXT NOT NULL CHECK (class IN ('tree', 'git', 'ignored')),
    mode   INTEGER NOT NULL,               -- permission bits
    size   INTEGER NOT NULL,
    hash   BLOB,                           -- BLAKE3 of the content, or of a symlink's target
    kept   INTEGER NOT NULL,               -- 1: the content is in blobs/ (or in the base's tree)
    ctime  INTEGER NOT NULL,               -- nanoseconds, with mtime, ino: the identity at the last scan
    mtime  INTEGER NOT NULL,
    ino    INTEGER NOT NULL,
    PRIMARY KEY (layer, path)
) STRICT, WITHOUT ROWID;

CREATE TABLE audit (
    seq     INTEGER PRIMARY KEY,           -- from 1, without gaps
    time_ms INTEGER NOT NULL,
    branch  TEXT NOT NULL,
    actor   TEXT NOT NULL,
    op      TEXT NOT NULL,
    path    BLOB,
    before  BLOB,
    after   BLOB,
    kind    TEXT,                          -- of the entry after: f d l o, or x when it is gone
    class   TEXT,
    mode    INTEGER,
    size    INTEGER,
    kept    INTEGER,
    detail  TEXT,
    hash    BLOB NOT NULL
) STRICT;
CREATE INDEX audit_by_branch ON audit (branch, seq);
