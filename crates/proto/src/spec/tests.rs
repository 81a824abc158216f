//! Specs as text, and what they become or why they are refused.

use super::*;

fn parse(text: &str) -> Result<VerifyRequest, SpecError> {
    parse_spec(text, Path::new("/project"))
}

fn refused(text: &str, message: &str, hint: Option<&str>) {
    let error = parse(text).unwrap_err();
    let chain = std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source());
    let got = chain.map(ToString::to_string).collect::<Vec<_>>().join(": ");
    assert_eq!(got, message, "{text}");
    assert_eq!(error.hint().as_deref(), hint, "{text}");
}

#[test]
fn the_shortest_spec_is_the_directory_it_stands_in() {
    let request = parse("checks = [\"cargo test\"]").unwrap();
    assert_eq!(request.source, directory(Path::new("/project"), false));
    assert_eq!(request.checks, [["cargo", "test"]]);
    assert_eq!(request.limits, LimitsAsked::default());
}

#[test]
fn a_full_spec() {
    let request = parse(
        r#"
        setup = ["npm ci"]
        checks = ["npm test", ["npm", "run", "lint", "a b"]]
        keep_going = true
        [source]
        repo = "../app"
        ref = "v1"
        [env]
        CI = "1"
        [limits]
        cpus = 1.5
        memory = "2GiB"
        pids = 100
        disk = "10MB"
        timeout = "10m"
        "#,
    )
    .unwrap();
    assert_eq!(request.source, Source::Git { repo: "/project/../app".into(), rev: "v1".into() });
    assert_eq!(request.setup, [["npm", "ci"]]);
    assert_eq!(request.checks[1], ["npm", "run", "lint", "a b"]);
    assert_eq!(request.env, [("CI".to_owned(), "1".to_owned())]);
    assert!(request.keep_going && !request.keep_branch);
    let limits = request.limits;
    assert_eq!(
        (limits.cpu_milli, limits.pids_max, limits.wall_ms_max),
        (Some(1500), Some(100), Some(600_000))
    );
    assert_eq!((limits.memory_bytes_max, limits.disk_bytes_max), (Some(2 << 30), Some(10_000_000)));
}

#[test]
fn sources() {
    let source = |text: &str| parse(&format!("checks = [\"true\"]\nsource = {text}")).unwrap().source;
    let git = |repo: &str, rev: &str| Source::Git { repo: repo.into(), rev: rev.into() };
    assert_eq!(source(r#"{ repo = "https://x.test/a.git" }"#), git("https://x.test/a.git", "HEAD"));
    assert_eq!(source(r#"{ repo = "git@x.test:a.git", ref = "main" }"#), git("git@x.test:a.git", "main"));
    assert_eq!(source(r#"{ repo = "." }"#), directory(Path::new("/project"), false));
    assert_eq!(source(r#"{ repo = ".", include_ignored = true }"#), directory(Path::new("/project"), true));
    assert_eq!(source(r#"{ files = "sub" }"#), directory(Path::new("/project/sub"), true));
    let Source::Files { files } = source(r##"{ files = { "run.sh" = "#!/bin/sh", "a/b.py" = "x" } }"##)
    else {
        panic!()
    };
    assert_eq!(files.len(), 2);
    assert!(files.iter().any(|file| file.executable && file.path.as_bytes() == b"run.sh"));
    assert!(matches!(source(r#"{ branch = "br-0123456789abcdef" }"#), Source::Branch { .. }));
}

#[test]
fn a_directory_of_any_name_is_a_source() {
    use std::os::unix::ffi::OsStrExt as _;
    let dir = Path::new(std::ffi::OsStr::from_bytes(b"/pro\xffject"));
    let source =
        |text: &str| parse_spec(&format!("checks = [\"true\"]\nsource = {text}"), dir).unwrap().source;
    assert_eq!(source(r#"{ repo = "." }"#), directory(dir, false));
    let Source::Git { repo, .. } = source(r#"{ repo = ".", ref = "main" }"#) else { panic!() };
    assert_eq!(repo.decode_path().unwrap(), dir);
}

#[test]
fn what_is_wrong_is_named() {
    refused("check = [\"true\"]", "unknown key `check` in the spec", Some("did you mean `checks`?"));
    refused(
        "checks = [\"true\"]\nlimits = { memry = 1 }",
        "unknown key `limits.memry` in the spec",
        Some("did you mean `memory`?"),
    );
    refused(
        "checks = [\"true\"]\nsource = { zzzzzzzz = 1 }",
        "unknown key `source.zzzzzzzz` in the spec",
        Some("known here: repo, ref, files, branch, include_ignored"),
    );
    refused("", "the spec has no checks", Some("add one, like: checks = [\"cargo test\"]"));
    refused(
        "checks = [\"\"]",
        "`checks[0]` in the spec is not a command: the command is empty",
        Some("name a program, like: cargo test"),
    );
    refused(
        "checks = [\"a | b\"]",
        "`checks[0]` in the spec is not a command: `a | b` has the operator `|`, which only a shell understands, and no shell is run",
        Some("to run it by a shell write: sh -c 'a | b'; to mean it literally, quote it"),
    );
    refused(
        "checks = \"true\"",
        "`checks` in the spec must be a list of commands, each a string or a list of strings",
        None,
    );
    refused("checks = [1]", "`checks[0]` in the spec must be a string or a list of strings", None);
    refused(
        "checks = [\"true\"]\nlimits = { memory = \"much\" }",
        "`limits.memory` in the spec must be in range: `much` is not a size (like 512MiB, 2GiB or 1048576)",
        None,
    );
    refused(
        "checks = [\"true\"]\nsource = { files = { \"../x\" = \"\" } }",
        "`source.files.../x` in the spec must be a path in the tree: the path `../x` has an empty, `.` or `..` component",
        None,
    );
    refused(
        "checks = [\"true\"]\nsource = { repo = \".\", branch = \"x\" }",
        "`source` in the spec must be one of { repo = … }, { files = … } or { branch = … }",
        None,
    );
    for source in [
        "{ files = \".\", include_ignored = true }",
        "{ files = \".\", include_ignored = false }",
        "{ branch = \"br-0123456789abcdef\", include_ignored = true }",
    ] {
        refused(
            &format!("checks = [\"true\"]\nsource = {source}"),
            "`source.include_ignored` in the spec must be given only together with `repo`",
            None,
        );
    }
    for source in ["{ repo = \".\", ref = \"main\"", "{ repo = \"https://x.test/a.git\""] {
        refused(
            &format!("checks = [\"true\"]\nsource = {source}, include_ignored = true }}"),
            "`source.include_ignored` in the spec must be false for a commit, which has no ignored files",
            None,
        );
    }
}

#[test]
fn damaged_and_hostile_text_is_refused_without_a_panic() {
    let deep = format!("a = {}", "[".repeat(100_000));
    let large = "x".repeat(SPEC_BYTES_MAX + 1);
    for text in
        ["[", "a = ", "\u{0}", "checks = [[]]", "checks = [[\"\"]]", "env = 1", "[env]\nA = 1", &deep, &large]
    {
        assert!(parse(text).is_err(), "{}", &text[..text.len().min(40)]);
    }
    assert!(parse(&format!("checks = [{}]", "\"true\",".repeat(COMMANDS_MAX + 1))).is_err());
    assert!(parse("checks = [\"true\"]\n[env]\n\"A=B\" = \"1\"").is_err());
}
