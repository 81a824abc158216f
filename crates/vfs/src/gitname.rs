//! Names that git takes into no index: what some file system, not only Linux's, takes for `.git`, and symbolic links that
//! one takes for `.gitmodules`. One such name in a patch or commit and git applies, or checks out, none of it.

use proto::path::TreePath;

use crate::entries::Kind;

/// Characters that HFS+ does not see in a name (git's `utf8.c`, `next_hfs_char`).
const UNSEEN: [std::ops::RangeInclusive<char>; 4] =
    ['\u{200c}'..='\u{200f}', '\u{202a}'..='\u{202e}', '\u{206a}'..='\u{206f}', '\u{feff}'..='\u{feff}'];

/// Whether git refuses the file or symlink for its name, whatever its settings are (git's `read-cache.c`, `verify_path`, with
/// `core.protectNTFS` and `core.protectHFS`).
pub(crate) fn refused(path: &TreePath, kind: Kind) -> bool {
    // NTFS takes a backslash for a separator.
    path.as_bytes().split(|byte| matches!(byte, b'/' | b'\\')).any(|part| {
        let (on_ntfs, on_hfs) = (ntfs(part), hfs(part));
        let is_link = kind == Kind::Symlink;
        [".git", "git~1"].iter().any(|name| on_ntfs == name.as_bytes())
            || on_hfs.as_deref() == Some(".git")
            || is_link && (is_gitmodules(&on_ntfs) || on_hfs.as_deref() == Some(".gitmodules"))
    })
}

/// A name as NTFS takes it: in lower case, without its stream and without spaces and dots at its end.
fn ntfs(part: &[u8]) -> Vec<u8> {
    let name = part.split(|byte| *byte == b':').next().unwrap_or_default();
    let end = name.iter().rposition(|byte| !matches!(byte, b' ' | b'.')).map_or(0, |last| last + 1);
    name[..end].to_ascii_lowercase()
}

/// A name as HFS+ takes it, if it is one there.
fn hfs(part: &[u8]) -> Option<String> {
    let seen = |c: &char| !UNSEEN.iter().any(|unseen| unseen.contains(c));
    Some(std::str::from_utf8(part).ok()?.chars().filter(seen).collect::<String>().to_ascii_lowercase())
}

/// With the short names that NTFS makes of it (git's `is_ntfs_dot_generic`; a few more are taken for one).
fn is_gitmodules(name: &[u8]) -> bool {
    let is_short = || {
        let mut parts = name.splitn(2, |byte| *byte == b'~');
        let (stem, number) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        number.first().is_some_and(u8::is_ascii_digit)
            && (stem == b"gitmod" || name.len() == 8 && b"gi7eba".starts_with(stem))
    };
    name == b".gitmodules" || is_short()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::git::Git;

    #[test]
    fn names_are_refused_as_git_refuses_them() {
        let dir = tempfile::tempdir().unwrap();
        Git::new().run(&["init".as_ref(), "-q".as_ref(), dir.path().as_os_str()]).unwrap();
        let git = Git::at(&dir.path().join(".git"))
            .work_tree(dir.path())
            .config("core.protectNTFS", "true")
            .config("core.protectHFS", "true");
        let id = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391";
        let dot_gits = [
            ".git",
            ".GIT",
            "GIT~1",
            ".git ",
            ".git. .",
            ".git::$INDEX",
            ".gi\u{200c}T",
            "d/.Git/x",
            "a\\.git\\b",
            "a\\git~1",
            "git~2",
            ".gitx",
            "git~1x",
            "x.git",
            ".gi",
            ".git x",
            "a\\b",
        ];
        let modules = [
            ".gitmodules",
            ".GITMODULES",
            "gitmod~1",
            "GI7EBA~1",
            ".gitmodules .",
            ".gitmodules\u{feff}",
            ".gitmodule",
        ];
        for name in dot_gits.into_iter().chain(modules) {
            for (kind, mode) in [(Kind::File, "100644"), (Kind::Symlink, "120000")] {
                let ours = refused(&TreePath::new(name).unwrap(), kind);
                let info = format!("{mode},{id},{name}");
                let gits = git.run(&["update-index", "--add", "--cacheinfo", &info]).is_err();
                assert_eq!(ours, gits, "{name:?} {mode}");
                std::fs::remove_file(dir.path().join(".git/index")).ok();
            }
        }
    }
}
