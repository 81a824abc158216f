//! What the runner has acknowledged, and the check that it is still there.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read as _;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::tendon::Tendon;

/// Something that a call has acknowledged.
#[derive(Clone, Debug)]
pub enum Ack {
    /// A file of a branch has this content.
    File {
        /// The branch's name.
        branch: String,
        /// Below the branch's root.
        path: String,
        /// The whole content.
        content: String,
    },
    /// A branch of this name exists.
    Branch(String),
    /// A command has ended on this branch, and its audit rows hold this path.
    Audited {
        /// The path, unique in the whole run.
        path: String,
    },
}

/// A list that the threads of a workload share: each acknowledgement with the place that it was made at.
#[derive(Default)]
pub struct Acks(Mutex<Vec<(usize, Ack)>>);

impl Acks {
    /// Notes an acknowledgement made at `position` (of a disk's log, or any count that grows).
    pub fn note(&self, position: usize, ack: Ack) {
        self.lock().push((position, ack));
    }

    /// Those made at `position` or before.
    pub fn until(&self, position: usize) -> Vec<Ack> {
        self.lock().iter().filter(|(at, _)| *at <= position).map(|(_, ack)| ack.clone()).collect()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(usize, Ack)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks `tendon` for everything in `acks`, checks the audit's chain, and returns what is missing or wrong.
pub fn lost(tendon: &Tendon, acks: &[Ack]) -> Vec<String> {
    let mut lost = Vec::new();
    if let Err(error) = tendon.call(&["audit", "verify"]) {
        lost.push(format!("the audit's chain: {error}"));
    }
    let branches: BTreeSet<&str> = acks
        .iter()
        .filter_map(|ack| match ack {
            Ack::File { branch, .. } => Some(branch.as_str()),
            Ack::Branch(_) | Ack::Audited { .. } => None,
        })
        .collect();
    let mut contents = BTreeMap::new();
    for branch in branches {
        match export(tendon, branch) {
            Ok(files) => drop(contents.insert(branch, files)),
            Err(error) => lost.push(format!("branch {branch}: {error}")),
        }
    }
    let (audited, listed) = (audited(tendon), listed(tendon));
    for ack in acks {
        match ack {
            Ack::Branch(name) if listed.contains(name) => {}
            Ack::Branch(name) => lost.push(format!("there is no branch {name}")),
            Ack::Audited { path } if audited.contains(path) => {}
            Ack::Audited { path } => lost.push(format!("the audit has no row about {path}")),
            Ack::File { branch, path, content } => {
                let found = contents.get(branch.as_str()).and_then(|files| files.get(path));
                if found != Some(content) {
                    lost.push(format!("{branch}:{path} should be {content:?} and is {found:?}"));
                }
            }
        }
    }
    lost
}

/// All files of a branch by path.
fn export(tendon: &Tendon, branch: &str) -> Result<BTreeMap<String, String>, String> {
    let bytes = tendon.call(&["branch", "export", branch, "--tar", "-"])?;
    let mut files = BTreeMap::new();
    let mut archive = tar::Archive::new(bytes.as_slice());
    for entry in archive.entries().map_err(|error| error.to_string())? {
        let mut entry = entry.map_err(|error| error.to_string())?;
        let path = entry.path().map_err(|error| error.to_string())?.to_string_lossy().into_owned();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).map_err(|error| error.to_string())?;
        files
            .insert(path.trim_start_matches("./").to_owned(), String::from_utf8_lossy(&content).into_owned());
    }
    Ok(files)
}

/// Every word of the list of branches, their names among them.
fn listed(tendon: &Tendon) -> BTreeSet<String> {
    match tendon.call(&["branch", "list"]) {
        Ok(output) => String::from_utf8_lossy(&output).split_whitespace().map(str::to_owned).collect(),
        Err(error) => BTreeSet::from([error]),
    }
}

/// The paths that the audit has rows about.
fn audited(tendon: &Tendon) -> BTreeSet<String> {
    let query = "select distinct cast(path as text) from audit where path is not null";
    match tendon.call(&["audit", "sql", query]) {
        Ok(output) => String::from_utf8_lossy(&output).lines().map(|line| line.trim().to_owned()).collect(),
        Err(error) => BTreeSet::from([error]),
    }
}
