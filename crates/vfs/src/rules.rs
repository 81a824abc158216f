//! The class of a path: git's own, the tree's, or ignored. Reads `.gitignore` files as git does, from the branch's
//! merged root; nothing of the host's git configuration is looked at.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use ignore::Match;
use ignore::gitignore::{Gitignore, GitignoreBuilder};
use proto::path::TreePath;

use crate::entries::Class;

/// A larger file of patterns is passed over: what it would ignore is then kept, which is the safe side.
pub(crate) const RULES_BYTES_MAX: u64 = 128 * 1024;
/// More patterns of one file are passed over.
const PATTERNS_MAX: usize = 4_000;
/// Patterns of all files that one scan reads; those of further files are passed over.
const PATTERNS_ALL_MAX: usize = 40_000;
/// Files of patterns that hold for one directory, the nearest.
const SCOPES_MAX: usize = 64;
/// Where git keeps the patterns that are not in the tree.
const EXCLUDE: &[u8] = b".git/info/exclude";

/// Gives the content of a regular file of the merged root, up to [`RULES_BYTES_MAX`]; `None` if there is none.
pub(crate) trait RuleSource {
    /// The content of the file at `path`.
    fn rules(&self, path: &TreePath) -> Option<Vec<u8>>;
}

/// Whether a change of this path changes the class of others.
pub(crate) fn is_rules(path: &TreePath) -> bool {
    path.file_name() == b".gitignore" || path.as_bytes() == EXCLUDE
}

/// Answers for one scan; what it read is cached.
pub(crate) struct Rules<'a> {
    source: &'a dyn RuleSource,
    dirs: HashMap<TreePath, Arc<Dir>>,
    root: Arc<Dir>,
    parsed: Parsed,
}

/// Files of patterns that were parsed, each content once.
#[derive(Default)]
struct Parsed {
    by_content: HashMap<blake3::Hash, Option<Arc<Gitignore>>>,
    patterns: usize,
}

/// What holds for the children of one directory.
enum Dir {
    Git,
    Ignored,
    /// The patterns of the directory and of those above it, nearest first.
    Rules(Vec<Scoped>),
}

#[derive(Clone)]
struct Scoped {
    /// Bytes of a path that lie before the part that the patterns see.
    cut: usize,
    patterns: Arc<Gitignore>,
}

impl<'a> Rules<'a> {
    pub(crate) fn new(source: &'a dyn RuleSource) -> Self {
        let (mut scopes, mut parsed) = (Vec::new(), Parsed::default());
        for file in [&b".gitignore"[..], EXCLUDE] {
            let bytes = TreePath::new(file).ok().and_then(|path| source.rules(&path));
            let patterns = bytes.and_then(|bytes| parsed.parse(&bytes));
            scopes.extend(patterns.map(|patterns| Scoped { cut: 0, patterns }));
        }
        Self { source, dirs: HashMap::new(), root: Arc::new(Dir::Rules(scopes)), parsed }
    }

    /// The class of `path`. `base` is the class that the base gives it: a path of the base's tree is never ignored.
    pub(crate) fn class(&mut self, path: &TreePath, is_dir: bool, base: Option<Class>) -> Class {
        if let Some(class) = base {
            return class;
        }
        if path.file_name() == b".git" {
            return Class::Git;
        }
        match &*self.dir(path.parent().as_ref()) {
            Dir::Git => Class::Git,
            Dir::Ignored => Class::Ignored,
            Dir::Rules(scopes) if ignored(scopes, path, is_dir) => Class::Ignored,
            Dir::Rules(_) => Class::Tree,
        }
    }

    fn dir(&mut self, dir: Option<&TreePath>) -> Arc<Dir> {
        let Some(dir) = dir else { return Arc::clone(&self.root) };
        // Up to the nearest known directory, then down again: no recursion over a hostile depth.
        let mut unknown = Vec::new();
        let mut at = Some(dir.clone());
        let mut known = loop {
            match at {
                None => break Arc::clone(&self.root),
                Some(path) => match self.dirs.get(&path) {
                    Some(known) => break Arc::clone(known),
                    None => {
                        at = path.parent();
                        unknown.push(path);
                    }
                },
            }
        };
        while let Some(path) = unknown.pop() {
            known = Arc::new(self.below(&known, &path));
            self.dirs.insert(path, Arc::clone(&known));
        }
        known
    }

    fn below(&mut self, parent: &Dir, path: &TreePath) -> Dir {
        let scopes = match parent {
            Dir::Git => return Dir::Git,
            Dir::Ignored if path.file_name() != b".git" => return Dir::Ignored,
            Dir::Ignored => return Dir::Git,
            Dir::Rules(scopes) => scopes,
        };
        if path.file_name() == b".git" {
            return Dir::Git;
        }
        if ignored(scopes, path, true) {
            return Dir::Ignored;
        }
        let own = path.join(b".gitignore").ok().and_then(|file| self.source.rules(&file));
        let own = own.and_then(|bytes| self.parsed.parse(&bytes));
        let own = own.map(|patterns| Scoped { cut: path.as_bytes().len() + 1, patterns });
        Dir::Rules(own.into_iter().chain(scopes.iter().cloned()).take(SCOPES_MAX).collect())
    }
}

fn ignored(scopes: &[Scoped], path: &TreePath, is_dir: bool) -> bool {
    for scope in scopes {
        let seen: Range<usize> = scope.cut..path.as_bytes().len();
        let Ok(relative) = TreePath::new(&path.as_bytes()[seen]) else { continue };
        match scope.patterns.matched(relative.as_path(), is_dir) {
            Match::Ignore(_) => return true,
            Match::Whitelist(_) => return false,
            Match::None => {}
        }
    }
    false
}

impl Parsed {
    fn parse(&mut self, bytes: &[u8]) -> Option<Arc<Gitignore>> {
        let (patterns, known) = (&mut self.patterns, &mut self.by_content);
        let parsed = known.entry(blake3::hash(bytes)).or_insert_with(|| {
            if *patterns >= PATTERNS_ALL_MAX {
                return None;
            }
            *patterns += bytes.split(|byte| *byte == b'\n').count().min(PATTERNS_MAX);
            parse(bytes)
        });
        parsed.clone()
    }
}

/// Parses a file of patterns; `None` if nothing in it can match.
fn parse(bytes: &[u8]) -> Option<Arc<Gitignore>> {
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf".as_slice()).unwrap_or(bytes);
    let mut builder = GitignoreBuilder::new("");
    for line in bytes.split(|byte| *byte == b'\n').take(PATTERNS_MAX) {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        // A pattern that can't be read ignores nothing, as with git.
        if let Ok(line) = std::str::from_utf8(line) {
            let _ = builder.add_line(None, &literal_braces(line));
        }
    }
    builder.build().ok().filter(|patterns| !patterns.is_empty()).map(Arc::new)
}

/// git knows no `{a,b}`; the pattern library does.
fn literal_braces(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut escaped = false;
    for c in line.chars() {
        if matches!(c, '{' | '}') && !escaped {
            out.push('\\');
        }
        escaped = c == '\\' && !escaped;
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Instant;

    use super::*;

    struct Map(BTreeMap<TreePath, Vec<u8>>);

    impl RuleSource for Map {
        fn rules(&self, path: &TreePath) -> Option<Vec<u8>> {
            self.0.get(path).cloned()
        }
    }

    fn source(files: &[(&str, &str)]) -> Map {
        Map(files.iter().map(|(path, text)| (path.parse().unwrap(), text.as_bytes().to_vec())).collect())
    }

    /// The first letters of the classes of `paths`; a trailing slash makes a directory.
    fn check(files: &[(&str, &str)], paths: &[&str], expected: &str) {
        let source = source(files);
        let mut rules = Rules::new(&source);
        let got: String = paths
            .iter()
            .map(|path| {
                let (path, is_dir) = path.strip_suffix('/').map_or((*path, false), |path| (path, true));
                let class = rules.class(&path.parse().unwrap(), is_dir, None);
                class.word().chars().next().unwrap()
            })
            .collect();
        assert_eq!(got, expected, "{files:?} {paths:?}");
    }

    #[test]
    fn many_files_of_many_patterns_take_bounded_memory() {
        // The same content is held once.
        let many: String = (0..3_900).map(|n| format!("*.x{n}\n")).collect();
        let files: Vec<(String, String)> =
            (0..200).map(|n| (format!("same{n}/.gitignore"), many.clone())).collect();
        let source =
            Map(files.into_iter().map(|(path, text)| (path.parse().unwrap(), text.into())).collect());
        let mut rules = Rules::new(&source);
        for n in 0..200 {
            let class = rules.class(&format!("same{n}/a.x7").parse().unwrap(), false, None);
            assert_eq!(class, Class::Ignored);
        }
        assert_eq!((rules.parsed.by_content.len(), rules.parsed.patterns), (1, 3_901));
        // Of different ones, only so many; what the others would ignore is kept.
        let files = (0..200).map(|n| (format!("d{n}/.gitignore"), format!("{many}*.y{n}\n")));
        let source = Map(files.map(|(path, text)| (path.parse().unwrap(), text.into())).collect());
        let mut rules = Rules::new(&source);
        let class =
            |rules: &mut Rules<'_>, n| rules.class(&format!("d{n}/a.x7").parse().unwrap(), false, None);
        assert_eq!(class(&mut rules, 0), Class::Ignored);
        (1..199).for_each(|n| assert!(matches!(class(&mut rules, n), Class::Ignored | Class::Tree)));
        assert_eq!(class(&mut rules, 199), Class::Tree);
        assert!(rules.parsed.patterns <= PATTERNS_ALL_MAX + PATTERNS_MAX);
    }

    #[test]
    fn patterns_mean_what_they_mean_to_git() {
        let files = [
            (".gitignore", "target/\n*.log\n!keep.log\n/only-top\nd/**/x\n# c\n\\#h\nspace\\ \nn{a,b}\r\n"),
            ("sub/.gitignore", "!*.log\nsecret\n"),
            ("target/.gitignore", "!*\n"),
            (".git/info/exclude", "*.swp\n"),
        ];
        check(&files, &["target/", "target/a", "target/deep/b", "target"], "iiit");
        check(&files, &["a.log", "keep.log", "x/keep.log", "x/b.log", "sub/b.log"], "ittit");
        check(&files, &["only-top", "x/only-top", "d/x", "d/1/2/x", "#h", "# c"], "itiiit");
        check(&files, &["sub/secret", "secret", "sub/deep/secret", "a.swp", "sub/a.swp"], "itiii");
        check(&files, &["na", "n{a,b}", ".git/", ".git/HEAD", "sub/.git/config", ".github/x"], "tigggt");
        check(&files, &["x/target/", "x/target/y", "x.target/y"], "iit");
    }

    #[test]
    fn a_path_of_the_base_is_never_ignored() {
        let source = source(&[(".gitignore", "*\n")]);
        let mut rules = Rules::new(&source);
        let path = "a".parse().unwrap();
        assert_eq!(rules.class(&path, false, Some(Class::Tree)), Class::Tree);
        assert_eq!(rules.class(&path, false, None), Class::Ignored);
    }

    #[test]
    fn hostile_patterns_neither_hang_nor_panic() {
        let star = "*a".repeat(2_000);
        let deep = "**/".repeat(2_000);
        let class = "[".repeat(2_000);
        let many: String = (0..40_000).map(|n| format!("*{n}*\n")).collect();
        let braces = "{".repeat(500) + "a,b" + &"}".repeat(500);
        let path = "a".repeat(200) + "/" + &"a".repeat(200) + "b";
        for text in [star, deep, class, many, braces, "\\".into(), "!".into(), "[a-".into(), "\0".into()] {
            let started = Instant::now();
            let source = source(&[(".gitignore", &text)]);
            Rules::new(&source).class(&path.parse().unwrap(), false, None);
            assert!(
                started.elapsed().as_secs() < 10,
                "{}: {:?}",
                &text[..text.len().min(20)],
                started.elapsed()
            );
        }
    }

    #[test]
    fn a_deep_path_does_not_exhaust_the_stack() {
        let path = ["d"; 1_500].join("/");
        check(&[(".gitignore", "x")], &[&path], "t");
    }
}
