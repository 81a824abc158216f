//! The documents about records and the state directory say what there is, no more and no less.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::collections::{BTreeMap, BTreeSet};

use common::{Tendon, can_run};
use serde_json::Value;
use testkit::GitRepo;

const RECORDS: &str = include_str!("../../../docs/records.md");
const STATE: &str = include_str!("../../../docs/state.md");

/// The members that a section lists: the path of each, and whether it may be absent.
fn sections() -> BTreeMap<&'static str, BTreeMap<&'static str, bool>> {
    let mut out = BTreeMap::<_, BTreeMap<_, _>>::new();
    let mut section = "";
    for line in RECORDS.lines() {
        if let Some(name) = line.strip_prefix("## ").or(line.strip_prefix("# ")) {
            section = name;
        } else if let Some((member, rest)) = line.strip_prefix("- `").and_then(|line| line.split_once('`')) {
            out.entry(section).or_default().insert(member, rest.starts_with(" (only "));
        }
    }
    out
}

/// The members of a record, by path; a list of plain values is one.
fn members(prefix: &str, value: &Value, out: &mut BTreeSet<String>) {
    let dotted = |key: &str| if prefix.is_empty() { key.to_owned() } else { format!("{prefix}.{key}") };
    match value {
        Value::Object(map) if map.contains_key("base64") => drop(out.insert(prefix.to_owned())),
        Value::Object(map) => map.iter().for_each(|(key, value)| members(&dotted(key), value, out)),
        Value::Array(list) if list.iter().any(Value::is_object) => {
            list.iter().for_each(|value| members(&format!("{prefix}[]"), value, out));
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            out.insert(prefix.to_owned());
        }
    }
}

#[track_caller]
fn check(section: &str, record: &Value) {
    let mut found = BTreeSet::new();
    members("", record, &mut found);
    let sections = sections();
    let listed = sections.get(section).unwrap_or_else(|| panic!("no section `{section}`"));
    for member in &found {
        // A list may be empty.
        let known = listed.keys().any(|name| name == member || name.starts_with(&format!("{member}[]")));
        assert!(known, "`{section}` does not list `{member}`: {record:#}");
    }
    for (member, optional) in listed {
        assert!(
            *optional || found.contains(*member),
            "`{section}` lists `{member}`, which is not there: {record:#}"
        );
    }
    assert_eq!(record["version"], 1, "{section}");
}

#[test]
fn every_record_is_documented_as_it_is() {
    if !can_run() {
        return;
    }
    let (tendon, repo) = (Tendon::new(), GitRepo::new());
    repo.file("a", "1\n").file("dir/b", "1\n").commit("first");
    let source = repo.path().to_str().unwrap();
    let mut done = BTreeSet::new();
    let mut ok = |section: &'static str, args: &[&str]| {
        let record = tendon.json(0, args);
        check(section, &record);
        done.insert(section);
        record
    };
    let verify = [
        "verify",
        "--repo",
        source,
        "--keep-going",
        "--setup",
        "true",
        "--check",
        "sh -c 'echo x > a; echo y'",
    ];
    ok("verify", &verify);
    let made = ok("branch create, fork, at, show", &["branch", "create", "--repo", source, "--name", "fix"]);
    ok("branch create, fork, at, show", &["branch", "fork", "fix", "--name", "other"]);
    ok("branch create, fork, at, show", &["branch", "show", "fix"]);
    let seq = made["branch"]["audit_seq"].to_string();
    ok("branch create, fork, at, show", &["branch", "at", &seq, "--branch", "fix"]);
    let exec = ["--json", "branch", "exec", "fix", "--", "sh", "-c", "echo x > a"];
    let ran = tendon.run(&exec);
    ran.expect(0);
    check("branch exec", &serde_json::from_str(&ran.stdout).unwrap());
    ok("branch ls", &["branch", "ls", "fix"]);
    ok("branch read", &["branch", "read", "fix", "a"]);
    ok("branch diff", &["branch", "diff", "fix"]);
    ok("branch export", &["branch", "export", "fix", "--git", source, "out"]);
    ok("branch export", &["branch", "export", "fix", "--patch", "-"]);
    ok("branch export", &["branch", "export", "fix", "--tar", "-"]);
    ok("branch write, rm, drop", &["branch", "write", "fix", "new"]);
    ok("branch write, rm, drop", &["branch", "rm", "fix", "new"]);
    ok("branch write, rm, drop", &["branch", "drop", "other"]);
    ok("base freeze", &["base", "freeze", "--repo", source]);
    ok("base gc", &["base", "gc"]);
    ok("audit log", &["audit", "log"]);
    ok("audit verify", &["audit", "verify"]);
    let sql = ok("audit sql", &["audit", "sql", "select * from audit limit 1"]);
    ok("doctor", &["doctor"]);
    ok("config list", &["config", "list"]);
    ok("runner status", &["runner", "status"]);
    for (section, args, list, one, like) in [
        ("branch list", ["branch", "list"], "branches[]", "branch", "branch create, fork, at, show"),
        ("base list", ["base", "list"], "bases[]", "base", "base freeze"),
    ] {
        let record = tendon.json(0, &args);
        let items = record[list.trim_end_matches("[]")].as_array().unwrap();
        assert!(!items.is_empty() && sections()[section].contains_key(list));
        items.iter().for_each(|item| check(like, &serde_json::json!({ "version": 1, one: item })));
    }
    check("any command that failed", &tendon.json(2, &["branch", "show", "nowhere"]));
    let columns: BTreeSet<&str> =
        sql["columns"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    let listed: BTreeSet<&str> = sections()["Columns of the audit"].keys().copied().collect();
    assert_eq!(columns, listed);
    assert!(made["branch"]["id"].is_string());
    ok("runner stop", &["runner", "stop"]);
    let rest: Vec<&str> = sections().into_keys().filter(|name| !done.contains(name)).collect();
    assert_eq!(
        rest,
        ["Columns of the audit", "any command that failed", "base list", "branch exec", "branch list"]
    );
}

#[test]
fn the_state_directory_holds_what_its_document_says() {
    if !can_run() {
        return;
    }
    let (tendon, repo) = (Tendon::new(), GitRepo::new());
    repo.file("a", "1\n").commit("first");
    tendon.text(&["verify", "--repo", repo.path().to_str().unwrap(), "--check", "true"]);
    let rows = STATE.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let mut listed: Vec<String> = rows.map(str::to_owned).collect();
    listed.sort();
    // Older kernels have that.
    assert!(listed.iter().any(|name| name == "mnt"));
    listed.retain(|name| name != "mnt");
    let entries = std::fs::read_dir(tendon.state()).unwrap().flatten();
    let mut found: Vec<String> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
    found.retain(|name| !["tendon.db-wal", "tendon.db-shm", "mnt"].contains(&name.as_str()));
    found.sort();
    assert_eq!(found, listed);
}
