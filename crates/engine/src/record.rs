//! Adds up what several commands changed.

use std::collections::BTreeMap;

use proto::path::TreePath;
use proto::verify::{Change, ChangeStatus, ChangedFiles};

use crate::limits::{PATHS_BYTES_MAX, PATHS_MAX};

/// The changes of several commands as one.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    paths: BTreeMap<TreePath, ChangeStatus>,
    /// Paths beyond those that the parts listed.
    unlisted: u64,
    other: u64,
}

impl Changes {
    /// Adds what a later command changed.
    pub(crate) fn add(&mut self, later: &ChangedFiles) {
        self.unlisted += later.tree_total.saturating_sub(later.paths.len() as u64);
        self.other = self.other.max(later.other_total);
        for change in &later.paths {
            let before = self.paths.remove(&change.path);
            if let Some(status) = composed(before, change.status) {
                self.paths.insert(change.path.clone(), status);
            }
        }
    }

    /// All of it. Where a command changed more than it could list, the total is an upper bound.
    pub(crate) fn total(&self) -> ChangedFiles {
        let mut bytes = 0;
        let paths = self.paths.iter().take(PATHS_MAX).take_while(|(path, _)| {
            bytes += path.as_bytes().len();
            bytes <= PATHS_BYTES_MAX
        });
        ChangedFiles {
            tree_total: self.paths.len() as u64 + self.unlisted,
            other_total: self.other,
            paths: paths.map(|(path, status)| Change { status: *status, path: path.clone() }).collect(),
        }
    }
}

/// One change after another, seen from before both; `None` when nothing is left of them.
fn composed(before: Option<ChangeStatus>, later: ChangeStatus) -> Option<ChangeStatus> {
    use ChangeStatus::{Added, Deleted, Modified, TypeChanged};
    match (before, later) {
        (None, later) => Some(later),
        (Some(Added), Deleted) => None,
        (Some(Added), Added | Modified | TypeChanged) => Some(Added),
        (Some(Deleted), Added | Modified) => Some(Modified),
        (Some(TypeChanged), Added | Modified) => Some(TypeChanged),
        (Some(Modified | TypeChanged | Deleted), Deleted) => Some(Deleted),
        (Some(Modified), Added | Modified) => Some(Modified),
        (Some(_), TypeChanged) => Some(TypeChanged),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(changes: &[(ChangeStatus, &str)]) -> ChangedFiles {
        let paths = changes
            .iter()
            .map(|(status, path)| Change { status: *status, path: TreePath::new(path.as_bytes()).unwrap() })
            .collect();
        ChangedFiles { tree_total: changes.len() as u64, other_total: 0, paths }
    }

    #[test]
    fn later_changes_go_over_earlier_ones() {
        use ChangeStatus::{Added, Deleted, Modified, TypeChanged};
        let mut all = Changes::default();
        all.add(&changed(&[(Added, "a"), (Added, "b"), (Modified, "c"), (Deleted, "d"), (Modified, "e")]));
        all.add(&changed(&[
            (Modified, "a"),
            (Deleted, "b"),
            (Deleted, "c"),
            (Added, "d"),
            (TypeChanged, "e"),
        ]));
        let want = changed(&[(Added, "a"), (Deleted, "c"), (Modified, "d"), (TypeChanged, "e")]);
        assert_eq!(all.total(), want);
    }

    #[test]
    fn what_was_not_listed_still_counts() {
        let mut all = Changes::default();
        all.add(&ChangedFiles { tree_total: 5000, ..changed(&[(ChangeStatus::Added, "a")]) });
        assert_eq!(all.total().tree_total, 5000);
    }
}
