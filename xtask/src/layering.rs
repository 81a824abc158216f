//! Which crate links which. Two edges that must not exist are security properties: `cli` and `brain` can't reach a file
//! of a branch, a hand or the gate but through the runner's socket.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::shell::{Failure, capture, cargo, root, say};

/// For each crate of the workspace, the crates of the workspace that it may link, directly or through others.
const ALLOWED: &[(&str, &[&str])] = &[
    ("proto", &[]),
    ("sys", &[]),
    ("policy", &["proto"]),
    ("vfs", &["proto", "sys"]),
    ("hands", &["policy", "proto", "sys", "vfs"]),
    ("engine", &["hands", "policy", "proto", "sys", "vfs"]),
    ("server", &["engine", "hands", "policy", "proto", "sys", "vfs"]),
    ("cli", &["proto"]),
    ("brain", &["proto"]),
    ("hand", &["proto", "sys"]),
];

/// Crates that are never shipped, and may link everything.
const DEV_ONLY: &[&str] = &["testkit", "heavy", "bench", "xtask"];

/// The only crate that may hold unsafe code.
const UNSAFE: &str = "sys";

/// Asks cargo for the graph, reads each crate's roots, and lists every breach.
pub fn check() -> Result<(), Failure> {
    let members = members()?;
    let allowed: BTreeMap<&str, &[&str]> = ALLOWED.iter().copied().collect();
    let mut breaches = Vec::new();
    for member in &members {
        if DEV_ONLY.contains(&member.as_str()) {
            continue;
        }
        match allowed.get(member.as_str()) {
            Some(allowed) => breaches.extend(edges(member, allowed, &linked(member, &members)?)),
            None => {
                breaches.push(format!("`{member}` is not in the list of crates in xtask/src/layering.rs"))
            }
        }
    }
    for (path, text) in crate_roots()? {
        breaches.extend(unsafe_breach(&path, &text));
    }
    if breaches.is_empty() {
        say(format_args!("{} crates: every edge is allowed, unsafe code only in `{UNSAFE}`", members.len()));
        return Ok(());
    }
    Err(Failure::new(format!("layering:\n  {}", breaches.join("\n  "))))
}

/// What of `linked` is not in `allowed`.
fn edges(member: &str, allowed: &[&str], linked: &BTreeSet<String>) -> Vec<String> {
    let strangers = linked.iter().filter(|name| !allowed.contains(&name.as_str()));
    strangers.map(|name| format!("`{member}` links `{name}`, which it may not")).collect()
}

/// The workspace's crates.
fn members() -> Result<BTreeSet<String>, Failure> {
    let tree =
        capture(&mut cargo(&["tree", "--workspace", "--depth", "0", "--prefix", "none", "--format", "{p}"]))?;
    Ok(tree.lines().filter_map(first_word).collect())
}

/// The workspace's crates that `member` links in a build, with any feature and on any target.
fn linked(member: &str, members: &BTreeSet<String>) -> Result<BTreeSet<String>, Failure> {
    let args = ["tree", "--package", member, "--edges", "normal,build", "--all-features", "--target", "all"];
    let tree = capture(cargo(&args).args(["--prefix", "none", "--format", "{p}"]))?;
    let all = tree.lines().filter(|line| line.contains(&*root().to_string_lossy())).filter_map(first_word);
    Ok(all.filter(|name| name != member && members.contains(name)).collect())
}

fn first_word(line: &str) -> Option<String> {
    line.split_whitespace().next().map(str::to_owned)
}

/// Every file that cargo compiles as the root of a crate, with its text.
fn crate_roots() -> Result<Vec<(String, String)>, Failure> {
    let mut roots = Vec::new();
    let mut packages = vec![root().join("xtask")];
    for entry in std::fs::read_dir(root().join("crates"))? {
        packages.push(entry?.path());
    }
    for package in packages {
        let mut files = vec![package.join("src/lib.rs"), package.join("src/main.rs")];
        for dir in ["src/bin", "tests", "benches", "examples"] {
            if let Ok(entries) = std::fs::read_dir(package.join(dir)) {
                files.extend(entries.filter_map(Result::ok).map(|entry| entry.path()));
            }
        }
        for file in
            files.iter().filter(|file| file.extension().is_some_and(|end| end == "rs") && file.is_file())
        {
            let path = file.strip_prefix(root()).unwrap_or(file).to_string_lossy().into_owned();
            roots.push((path, std::fs::read_to_string(file)?));
        }
    }
    roots.sort();
    Ok(roots)
}

/// A crate root outside `sys` that does not forbid unsafe code. Test roots are held by the workspace's lint.
fn unsafe_breach(path: &str, text: &str) -> Option<String> {
    let in_fence = Path::new(path).starts_with(format!("crates/{UNSAFE}"));
    let test_root = path.contains("/tests/") || path.contains("/benches/") || path.contains("/examples/");
    let forbids = text.lines().any(|line| line.trim() == "#![forbid(unsafe_code)]");
    let loosened = text.contains("allow(unsafe_code)") || text.contains("expect(unsafe_code");
    let breach = !in_fence && (loosened || (!test_root && !forbids));
    breach.then(|| format!("{path} does not say #![forbid(unsafe_code)]"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_keeps_its_layers() {
        check().unwrap_or_else(|failure| panic!("{failure}"));
    }

    #[test]
    fn a_forbidden_edge_is_found() {
        let linked = BTreeSet::from(["proto".to_owned(), "vfs".to_owned()]);
        assert_eq!(edges("cli", &["proto"], &linked), ["`cli` links `vfs`, which it may not"]);
    }

    #[test]
    fn cargo_tells_real_edges() {
        let members = members().unwrap_or_else(|failure| panic!("{failure}"));
        let linked = linked("engine", &members).unwrap_or_else(|failure| panic!("{failure}"));
        assert!(linked.contains("vfs") && linked.contains("sys"), "{linked:?}");
    }

    #[test]
    fn a_root_without_the_fence_is_found() {
        assert!(unsafe_breach("crates/vfs/src/lib.rs", "//! x\n").is_some());
        assert!(unsafe_breach("crates/vfs/src/lib.rs", "#![forbid(unsafe_code)]\n").is_none());
        assert!(unsafe_breach("crates/vfs/tests/a.rs", "#![allow(unsafe_code)]\n").is_some());
        assert!(unsafe_breach("crates/sys/src/lib.rs", "").is_none());
    }

    #[test]
    fn cli_and_brain_reach_the_runner_only_through_proto() {
        for (name, allowed) in ALLOWED.iter().filter(|(name, _)| ["cli", "brain"].contains(name)) {
            assert_eq!(*allowed, ["proto"], "{name}");
        }
    }
}
