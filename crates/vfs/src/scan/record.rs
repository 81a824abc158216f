//! Records what a scan found: classes, content, entries and audit rows.

use std::fs::File;

use proto::path::TreePath;
use proto::verify::{Change as ChangedPath, ChangeStatus, ChangedFiles};

use super::{
    After, Change, Changes, PATHS_BYTES_MAX, PATHS_MAX, Scan, ScanError, ScanReport, Scope, THROUGH, Writers,
};
use crate::audit::{Actor, Appender, NewRow};
use crate::db::DbError;
use crate::entries::{self, Class, Entry, Kind, StatId};
use crate::hashing::{self, Captured, Job, KEPT_BYTES_MAX};
use crate::rules::{Rules, is_rules};

/// What could not be captured is told up to here.
const TOLD_MAX: usize = 5;

impl Scan<'_> {
    pub(super) fn record(
        &self,
        changes: Changes,
        actor: &Actor,
        detail: Option<&str>,
        writers: Writers,
    ) -> Result<ScanReport, ScanError> {
        let mut rules = Rules::new(self);
        let asked = |path: &TreePath| match self.scope {
            Scope::All => true,
            Scope::Below(tops) => tops.iter().any(|top| path.starts_with(top)),
            Scope::Rules => false,
        };
        let (mut changes, others): (Changes, Changes) =
            changes.into_iter().partition(|(path, _)| asked(path));
        if self.scope == Scope::Rules || changes.keys().any(is_rules) {
            self.reclassify(&mut changes, &others, &mut rules)?;
        }
        let classes = changes.iter().map(|(path, change)| self.class(&mut rules, path, change));
        let classes = classes.collect::<Result<Vec<_>, _>>()?;
        let jobs = self.jobs(&changes, &classes)?;
        let clock_ns = hashing::file_clock_ns();
        let blob_error = |source| ScanError::Blob { branch: self.branch.clone(), source };
        let read = hashing::read_all(self.dir, &self.store.inner.blobs, &jobs);
        let mut read = read.map_err(|error| error.of(self.branch))?;
        let mut unscannable = Vec::new();
        for unseen in &self.walk.unseen {
            // What is ignored is no part of the tree.
            let dir = unseen.dir.as_ref().map(|dir| self.class_of(&mut rules, dir, true)).transpose()?;
            if dir != Some(Class::Ignored) {
                unscannable.push(unseen.note.clone());
            }
        }
        let wanted = jobs.iter().zip(&read).filter(|(job, _)| job.keep);
        unscannable.extend(wanted.filter_map(|(_, read)| read.as_ref()?.note.clone()));
        // A page that is mapped and dirty takes more writes without a new time, until it is written back.
        let times = self.store.inner.times;
        let young = |read: &Captured| match writers {
            _ if !times.trusted => true,
            Writers::MayLive => read.stat.ctime_ns > clock_ns.saturating_sub(times.dirty_ns),
            Writers::Gone => false,
        };
        for read in read.iter_mut().flatten().filter(|read| young(read)) {
            read.stat = StatId::default();
        }
        let kept: Vec<_> =
            read.iter().flatten().filter(|read| read.kept).filter_map(|read| read.hash).collect();
        hashing::pool().install(|| self.store.inner.blobs.sync_all(&kept)).map_err(blob_error)?;
        // One at a time: a command may have made half a million files.
        let mut done = jobs.iter().zip(&read).peekable();
        let settled = changes.iter().zip(&classes).filter_map(|((path, change), class)| {
            let read = done.next_if(|(job, _)| job.path == *path).and_then(|(_, read)| read.as_ref());
            settle(path, change, *class, read)
        });
        self.store.inner.live.step("scan: stored");
        let (seqs, changed) = self.commit(settled, actor, detail, &unscannable)?;
        self.store.inner.live.step("scan: recorded");
        let (first_seq, last_seq) = seqs.unzip();
        Ok(ScanReport { changed, first_seq, last_seq, unscannable, disk: self.walk.disk })
    }

    fn class(&self, rules: &mut Rules<'_>, path: &TreePath, change: &Change) -> Result<Class, DbError> {
        let is_dir = match (&change.after, &change.before) {
            (After::Whiteout | After::Lower(None), Some(before)) => return Ok(before.class),
            (After::Lower(Some(entry)) | After::Class(entry), _) => return Ok(entry.class),
            (After::Is(entry), _) => entry.kind == Kind::Dir,
            (After::Whiteout | After::Lower(None) | After::Read, _) => false,
        };
        self.class_of(rules, path, is_dir)
    }

    fn class_of(&self, rules: &mut Rules<'_>, path: &TreePath, is_dir: bool) -> Result<Class, DbError> {
        let base = match &self.lower {
            Some(lower) if !lower.contains_key(path) => None,
            None if !self.has_dir(&self.base_dirs, path, std::slice::from_ref(self.layers.base()))? => None,
            Some(_) | None => entries::get(self.conn, self.layers.base(), path)?,
        };
        Ok(rules.class(path, is_dir, base.map(|entry| entry.class)))
    }

    /// Patterns changed: whatever the base does not have may have another class now, and so may what is recorded of `others`,
    /// whose change is for another scan to record.
    fn reclassify(
        &self,
        changes: &mut Changes,
        others: &Changes,
        rules: &mut Rules<'_>,
    ) -> Result<(), DbError> {
        let mut known = self.own.clone();
        let sealed = self.layers.lower.len().saturating_sub(1);
        for layer in &self.layers.lower[..sealed] {
            for (path, entry) in entries::of_layer(self.conn, layer, None)? {
                known.entry(path).or_insert(entry);
            }
        }
        for (path, entry) in known {
            let is_gone = others.contains_key(&path) && self.walk.get(&path).is_none();
            if entry.kind == Kind::Whiteout || changes.contains_key(&path) || is_gone {
                continue;
            }
            let class = self.class_of(rules, &path, entry.kind == Kind::Dir)?;
            if class != entry.class {
                let stat = if self.walk.get(&path).is_some() { entry.stat } else { THROUGH };
                let after = After::Class(Entry { class, stat, ..entry.clone() });
                changes.insert(path, Change { before: Some(entry), after });
            }
        }
        Ok(())
    }

    /// What is to be read, in the order of the changes.
    fn jobs(&self, changes: &Changes, classes: &[Class]) -> Result<Vec<Job>, ScanError> {
        let mut jobs = Vec::new();
        for ((path, change), class) in changes.iter().zip(classes) {
            let keep = *class != Class::Ignored;
            let mut job = Job { path: path.clone(), root: None, keep, kept: None };
            match &change.after {
                After::Read => {
                    let before = change.before.as_ref().filter(|before| before.kept);
                    job.kept = before.and_then(|before| before.hash);
                }
                After::Class(entry) if keep && !entry.kept && reads(entry) => {
                    if self.walk.get(path).is_none() {
                        let Some(root) = self.sealed_dir(path)? else { continue };
                        job.root = Some(root.into());
                    }
                }
                After::Class(_) | After::Is(_) | After::Whiteout | After::Lower(_) => continue,
            }
            jobs.push(job);
        }
        Ok(jobs)
    }

    /// The directory of the sealed layer that holds the file at `path`.
    fn sealed_dir(&self, path: &TreePath) -> Result<Option<File>, DbError> {
        for layer in &self.layers.lower {
            if entries::get(self.conn, layer, path)?.is_some() {
                return Ok(File::open(self.store.inner.layout.layer(layer)).ok());
            }
        }
        Ok(None)
    }

    fn commit<'s>(
        &self,
        settled: impl Iterator<Item = Settled<'s>>,
        actor: &Actor,
        detail: Option<&str>,
        unscannable: &[String],
    ) -> Result<(Option<(u64, u64)>, ChangedFiles), DbError> {
        let mut settled = settled.peekable();
        let mut report = Report::default();
        if settled.peek().is_none() && detail.is_none() {
            return Ok((None, report.files));
        }
        let time_ms = self.store.inner.options.clock.now_ms();
        let seqs = self.store.inner.db.write(|tx| {
            let mut rows = Appender::begin(tx, &self.store.inner.key, time_ms)?;
            if detail.is_some() {
                let first = actor.first();
                rows.push(&NewRow::event(self.branch, &first, "exec", detail))?;
                if let Some(told) = told(unscannable) {
                    rows.push(&NewRow::event(self.branch, &first, "unscannable", Some(&told)))?;
                }
            }
            for one in settled {
                match &one.stored {
                    Some(entry) => entries::put(tx, &self.layers.open, one.path, entry)?,
                    None => entries::forget(tx, &self.layers.open, one.path)?,
                }
                if let Some(op) = one.op {
                    let before = one.before.as_ref();
                    rows.push(&NewRow::change(self.branch, actor, op, one.path, before, &one.now))?;
                    report.add(&one);
                }
            }
            rows.finish()
        })?;
        Ok((seqs, report.files))
    }
}

/// What could not be captured, in a few lines; `None` if there is nothing.
pub(crate) fn told(unscannable: &[String]) -> Option<String> {
    let mut lines: Vec<String> = unscannable.iter().take(TOLD_MAX).cloned().collect();
    if let Some(more) = unscannable.len().checked_sub(TOLD_MAX).filter(|more| *more > 0) {
        lines.push(format!("and {more} more"));
    }
    (!lines.is_empty()).then(|| lines.join("; "))
}

/// A change as it is recorded.
struct Settled<'a> {
    path: &'a TreePath,
    before: Option<Entry>,
    /// What is there now, a whiteout for nothing.
    now: Entry,
    /// What the open layer says from now on.
    stored: Option<Entry>,
    /// The audit row's word; none if only the identity is new.
    op: Option<&'static str>,
}

/// Puts together what is known of a change; `None` if the file is gone again.
fn settle<'a>(
    path: &'a TreePath,
    change: &Change,
    class: Class,
    read: Option<&Captured>,
) -> Option<Settled<'a>> {
    let before = change.before.clone();
    let (now, stored) = match &change.after {
        After::Whiteout => {
            let whiteout = Entry::whiteout(class);
            (whiteout.clone(), Some(whiteout))
        }
        After::Lower(shown) => (shown.clone().unwrap_or_else(|| Entry::whiteout(class)), None),
        After::Is(entry) => {
            let entry = Entry { class, ..entry.clone() };
            (entry.clone(), Some(entry))
        }
        After::Class(entry) => {
            let kept = entry.kept || read.is_some_and(|read| read.kept && read.hash == entry.hash);
            let entry = Entry { kept, ..entry.clone() };
            (entry.clone(), Some(entry))
        }
        After::Read => {
            let read = read?;
            let Captured { kind, mode, size, hash, kept, stat, .. } = *read;
            let entry = Entry { kind, class, mode, size, hash, kept, stat };
            (entry.clone(), Some(entry))
        }
    };
    let op = op(before.as_ref(), &now);
    Some(Settled { path, before, now, stored, op })
}

/// The audit row's word for a change; `None` if there is none.
pub(crate) fn op(before: Option<&Entry>, now: &Entry) -> Option<&'static str> {
    let Some(before) = before else {
        return (now.kind != Kind::Whiteout).then_some("add");
    };
    if now.kind == Kind::Whiteout {
        Some("delete")
    } else if before.kind != now.kind {
        Some("type")
    } else if before.hash != now.hash || before.size != now.size {
        Some("modify")
    } else if before.mode != now.mode {
        Some("mode")
    } else if before.class != now.class {
        Some("class")
    } else {
        None
    }
}

fn reads(entry: &Entry) -> bool {
    matches!(entry.kind, Kind::File | Kind::Symlink) && entry.size <= KEPT_BYTES_MAX
}

/// The files of a scan's report: directories show only through what they hold.
#[derive(Default)]
struct Report {
    files: ChangedFiles,
    /// Of the paths in it.
    bytes: usize,
}

impl Report {
    fn add(&mut self, one: &Settled<'_>) {
        let in_tree = |entry: &&Entry| entry.class == Class::Tree && is_file(entry);
        let before = one.before.as_ref();
        let status = match (before.filter(in_tree), Some(&one.now).filter(in_tree)) {
            (None, Some(_)) => ChangeStatus::Added,
            (Some(_), None) => ChangeStatus::Deleted,
            (Some(before), Some(now)) if before.kind != now.kind => ChangeStatus::TypeChanged,
            (Some(_), Some(_)) => ChangeStatus::Modified,
            (None, None) => {
                self.files.other_total += u64::from(before.is_some_and(is_file) || is_file(&one.now));
                return;
            }
        };
        self.files.tree_total += 1;
        self.bytes += one.path.as_bytes().len();
        if self.files.paths.len() < PATHS_MAX && self.bytes <= PATHS_BYTES_MAX {
            self.files.paths.push(ChangedPath { status, path: one.path.clone() });
        }
    }
}

fn is_file(entry: &Entry) -> bool {
    matches!(entry.kind, Kind::File | Kind::Symlink)
}
