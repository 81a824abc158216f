//! Compares what lies in a branch's directory with what its layers say. Changes nothing.

use std::collections::BTreeMap;

use proto::ids::LayerId;
use proto::path::TreePath;

use super::{After, Change, Changes, Dirs, Scan, THROUGH};
use crate::db::DbError;
use crate::entries::{self, Class, Entry, Kind, StatId};
use crate::walk::{Below, Seen, What};

impl Scan<'_> {
    pub(super) fn lower(&self, path: &TreePath) -> Result<Option<Entry>, DbError> {
        match &self.lower {
            Some(lower) => Ok(lower.get(path).cloned()),
            None if !self.has_dir(&self.lower_dirs, path, &self.layers.lower)? => Ok(None),
            None => entries::lookup(self.conn, &self.layers.lower, path),
        }
    }

    /// Whether the layers of `chain` have the directory that `path` is in: asked once for many new files.
    pub(super) fn has_dir(&self, known: &Dirs, path: &TreePath, chain: &[LayerId]) -> Result<bool, DbError> {
        let Some(parent) = path.parent() else { return Ok(true) };
        if let Some(has) = known.borrow().get(&parent) {
            return Ok(*has);
        }
        let has = entries::lookup(self.conn, chain, &parent)?.is_some_and(|entry| entry.kind == Kind::Dir);
        known.borrow_mut().insert(parent, has);
        Ok(has)
    }

    fn lower_below(&self, dir: &TreePath) -> Result<BTreeMap<TreePath, Entry>, DbError> {
        entries::merged(self.conn, &self.layers.lower, Some(dir))
    }

    /// What was at `path` when it was last looked at.
    fn before(&self, path: &TreePath) -> Result<Option<Entry>, DbError> {
        match self.own.get(path) {
            Some(entry) if entry.kind == Kind::Whiteout => Ok(None),
            Some(entry) => Ok(Some(entry.clone())),
            None => self.lower(path),
        }
    }

    pub(super) fn compare(&self) -> Result<Changes, DbError> {
        let mut changes = Changes::new();
        let moved = self.moved()?;
        for (path, seen) in &self.walk.seen {
            if !self.unchanged(path, seen) {
                self.changed(&mut changes, path, seen, &moved)?;
            }
        }
        for (path, entry) in &moved {
            let before = self.before(path)?;
            if !self.own.get(path).is_some_and(|own| own.same_content(entry)) {
                let entry = Entry { stat: StatId::default(), ..entry.clone() };
                changes.insert(path.clone(), Change { before, after: After::Is(entry) });
            }
        }
        self.missing(&mut changes, &moved)?;
        Ok(changes)
    }

    /// What shows through directories that were renamed: entries of the layers below, at their new paths.
    fn moved(&self) -> Result<BTreeMap<TreePath, Entry>, DbError> {
        let mut out = BTreeMap::new();
        for (path, seen) in &self.walk.seen {
            let What::Dir(Below::Moved(from)) = &seen.what else { continue };
            for (old, entry) in self.lower_below(from)? {
                let rest = &old.as_bytes()[from.as_bytes().len() + 1..];
                let child = rest.split(|byte| *byte == b'/').next().unwrap_or(rest);
                let hidden = path.join(child).is_ok_and(|child| self.walk.get(&child).is_some());
                if let (false, Ok(new)) = (hidden, path.join(rest)) {
                    out.insert(new, entry);
                }
            }
        }
        Ok(out)
    }

    fn unchanged(&self, path: &TreePath, seen: &Seen) -> bool {
        match self.own.get(path) {
            Some(own) => same(own, seen),
            // A whole tree: a file as it was copied.
            None => self.lower.as_ref().and_then(|lower| lower.get(path)).is_some_and(|lower| {
                lower.mode == seen.mode
                    && match (&seen.what, lower.kind) {
                        (What::Dir(_), Kind::Dir) | (What::Other, Kind::Other) => true,
                        (What::File, Kind::File) | (What::Symlink, Kind::Symlink) => {
                            lower.size == seen.size
                                && lower.stat.mtime_ns == seen.stat.mtime_ns
                                && seen.stat.ctime_ns < self.made_ns
                        }
                        _ => false,
                    }
            }),
        }
    }

    fn changed(
        &self,
        changes: &mut Changes,
        path: &TreePath,
        seen: &Seen,
        moved: &BTreeMap<TreePath, Entry>,
    ) -> Result<(), DbError> {
        let own = self.own.get(path);
        let before = self.before(path)?;
        if seen.what == What::Whiteout && own.is_none() && before.is_none() {
            return Ok(());
        }
        let had_dir = own.is_none_or(|own| own.kind == Kind::Dir);
        let hides = match &seen.what {
            What::Dir(Below::Same) => false,
            What::Dir(below) => {
                let marked = own.is_none_or(|own| own.kind != Kind::Dir || own.stat != dir_stat(below));
                marked && self.parent_shows(path)
            }
            What::File | What::Symlink | What::Other | What::Whiteout => had_dir,
        };
        if hides && self.lower.is_none() && self.lower(path)?.is_some_and(|entry| entry.kind == Kind::Dir) {
            for (below, entry) in self.lower_below(path)? {
                let said = self.own.contains_key(&below) || moved.contains_key(&below);
                if !said && self.walk.get(&below).is_none() {
                    changes.insert(below, Change { before: Some(entry), after: After::Whiteout });
                }
            }
        }
        let after = match &seen.what {
            What::Whiteout => After::Whiteout,
            What::File | What::Symlink => After::Read,
            What::Dir(below) => After::Is(special(Kind::Dir, seen.mode, dir_stat(below))),
            What::Other => After::Is(special(Kind::Other, seen.mode, StatId::default())),
        };
        changes.insert(path.clone(), Change { before, after });
        Ok(())
    }

    /// Whether the directory above `path` shows the layers below at its own path.
    fn parent_shows(&self, path: &TreePath) -> bool {
        path.parent().is_none_or(|parent| {
            self.walk.get(&parent).is_none_or(|seen| seen.what == What::Dir(Below::Same))
        })
    }

    /// Paths that the open layer (or, of a whole tree, any layer) has and the directory has not.
    fn missing(&self, changes: &mut Changes, moved: &BTreeMap<TreePath, Entry>) -> Result<(), DbError> {
        let mut cover: Option<TreePath> = None;
        for (path, own) in &self.own {
            if self.walk.get(path).is_some() || moved.contains_key(path) || self.closed(path) {
                continue;
            }
            if own.kind != Kind::Whiteout {
                let after = match self.lower(path)? {
                    Some(_) if own.stat == THROUGH && self.cover(path).is_none() => continue,
                    Some(_) => After::Whiteout,
                    None => After::Lower(None),
                };
                changes.insert(path.clone(), Change { before: Some(own.clone()), after });
                continue;
            }
            if self.lower.is_some() || cover.as_ref().is_some_and(|cover| path.starts_with(cover)) {
                continue;
            }
            cover = self.cover(path);
            if cover.is_none() {
                let shown = self.lower(path)?;
                changes.insert(path.clone(), Change { before: None, after: After::Lower(shown) });
            }
        }
        for (path, entry) in self.lower.iter().flatten() {
            if self.walk.get(path).is_none() && !self.own.contains_key(path) && !self.closed(path) {
                changes.insert(path.clone(), Change { before: Some(entry.clone()), after: After::Whiteout });
            }
        }
        Ok(())
    }

    /// The path in the directory that hides what the layers below have at `path`.
    fn cover(&self, path: &TreePath) -> Option<TreePath> {
        let mut at = path.parent();
        while let Some(dir) = at {
            if let Some(seen) = self.walk.get(&dir) {
                return (seen.what != What::Dir(Below::Same)).then_some(dir);
            }
            at = dir.parent();
        }
        None
    }

    /// Whether nothing is known of what is at `path`.
    fn closed(&self, path: &TreePath) -> bool {
        self.walk.closed.iter().any(|closed| path.starts_with(closed))
    }

    /// Where the layers below have what the branch shows at `path`, which is not in its own directory.
    pub(super) fn below(&self, path: &TreePath) -> Option<TreePath> {
        let mut at = path.parent();
        while let Some(dir) = at {
            if let Some(seen) = self.walk.get(&dir) {
                let What::Dir(below) = &seen.what else { return None };
                let rest = &path.as_bytes()[dir.as_bytes().len() + 1..];
                return match below {
                    Below::Same => Some(path.clone()),
                    Below::Moved(from) => from.join(rest).ok(),
                    Below::Nothing => None,
                };
            }
            at = dir.parent();
        }
        Some(path.clone())
    }
}

fn same(own: &Entry, seen: &Seen) -> bool {
    match (&seen.what, own.kind) {
        (What::Whiteout, Kind::Whiteout) => true,
        (What::File, Kind::File) | (What::Symlink, Kind::Symlink) => {
            own.mode == seen.mode && own.size == seen.size && own.stat == seen.stat
        }
        (What::Dir(below), Kind::Dir) => own.mode == seen.mode && own.stat == dir_stat(below),
        (What::Other, Kind::Other) => own.mode == seen.mode,
        _ => false,
    }
}

/// What is remembered of a directory in place of a file's identity: which directory shows through it. When that
/// changes, what the layers below have at its path is hidden anew.
fn dir_stat(below: &Below) -> StatId {
    let mtime_ns = match below {
        Below::Same => 0,
        Below::Nothing => 1,
        Below::Moved(from) => {
            let digest = blake3::hash(from.as_bytes());
            i64::from_le_bytes(std::array::from_fn(|at| digest.as_bytes()[at])) | 2
        }
    };
    StatId { mtime_ns, ..StatId::default() }
}

fn special(kind: Kind, mode: u32, stat: StatId) -> Entry {
    Entry { kind, class: Class::Tree, mode, size: 0, hash: None, kept: true, stat }
}
