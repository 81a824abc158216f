//! Projects that we did not write, in three languages, from the package registries: each passes as it is and fails with a
//! bug put in, without network in the sandbox.

use std::path::Path;

use heavy::tendon::Tendon;
use testkit::{GitRepo, Need, have_all, registry, temp_dir};

/// A project, the commands, and one edit that its tests must notice.
struct Project<'a> {
    setup: &'a [&'a str],
    check: &'a str,
    file: &'a str,
    good: &'a str,
    bad: &'a str,
}

#[test]
fn a_rust_project_with_dependencies() {
    if !have_all(&[Need::Bwrap, Need::Git, Need::Registry]) {
        return;
    }
    let project = Project {
        setup: &[],
        check: "cargo test",
        file: "src/lib.rs",
        good: "self.0 = seed;",
        bad: "self.0 = seed + 1;",
    };
    passes_and_fails(&project, |into| registry::fetch_crate("fastrand", "2.3.0", into));
}

#[test]
fn a_javascript_project() {
    if !have_all(&[Need::Bwrap, Need::Git, Need::Node, Need::Npm]) {
        return;
    }
    let project = Project {
        setup: &["npm ci --offline --no-audit --no-fund"],
        check: "node test/index.js",
        file: "index.js",
        good: "return hasSymbolSham();",
        bad: "return 'no';",
    };
    passes_and_fails(&project, |into| registry::fetch_npm("has-symbols@1.1.0", "tape@5.9.0", into));
}

#[test]
fn a_python_project() {
    if !have_all(&[Need::Bwrap, Need::Git, Need::Python, Need::Pip]) {
        return;
    }
    let project = Project {
        setup: &[],
        check: "python3 -m unittest discover -s simplejson/tests -t .",
        file: "simplejson/encoder.py",
        good: "item_separator = ', '",
        bad: "item_separator = '; '",
    };
    passes_and_fails(&project, |into| registry::fetch_wheel("simplejson==3.19.3", into));
}

fn passes_and_fails(project: &Project<'_>, fetch: impl FnOnce(&Path) -> Result<(), String>) {
    let dir = temp_dir("real");
    let source = dir.path().join("project");
    fetch(&source).unwrap_or_else(|error| panic!("{error}"));
    let repo = GitRepo::at(&source);
    repo.commit("as published");
    let tendon = Tendon::new(&dir.path().join("state"));
    let runner = tendon.start_runner();
    let place = source.to_string_lossy().into_owned();
    let setup: Vec<&str> = project.setup.iter().flat_map(|command| ["--setup", command]).collect();
    let verify = [&["verify", "--repo", &place], setup.as_slice(), &["--check", project.check]].concat();
    tendon.call(&verify).unwrap_or_else(|error| panic!("as published: {error}\n{}", runner.log()));

    let text = std::fs::read_to_string(source.join(project.file)).expect("the file");
    assert!(text.contains(project.good), "{} has no `{}`", project.file, project.good);
    repo.file(project.file, text.replace(project.good, project.bad));
    let error = tendon.call(&verify).expect_err("the bug is noticed");
    assert!(error.contains("exit status: 1:"), "with the bug: {error}");
    let status = repo.git(&["status", "--porcelain", "--ignored"]);
    assert_eq!(
        status,
        format!(" M {}", project.file),
        "the project's directory has the bug and nothing else"
    );
}
