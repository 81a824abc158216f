//! How a repository's address is shown. No I/O.

/// A repository's address for people, reports, logs and the database: control characters escaped, and without what may be
/// secret in a URL: the user and password, the query and the fragment. A path stays whole.
pub fn shown(repo: &[u8]) -> String {
    let shown = crate::path::shown(repo);
    let Some((scheme, rest)) = shown.split_once("://") else { return shown };
    let rest = rest.split(['?', '#']).next().unwrap_or(rest);
    let host_end = rest.find('/').unwrap_or(rest.len());
    let host = rest[..host_end].rfind('@').map_or(0, |at| at + 1);
    format!("{scheme}://{}", &rest[host..])
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_may_be_secret_in_a_url_is_not_shown() {
        for (repo, want) in [
            ("https://me:secret@host/x.git", "https://host/x.git"),
            ("https://secret@host/x.git", "https://host/x.git"),
            ("https://me:sec@ret@host:8443", "https://host:8443"),
            ("https://host/x.git?private_token=secret", "https://host/x.git"),
            ("https://host?token=a/b@c#secret", "https://host"),
            ("https://host/a@b", "https://host/a@b"),
            ("foo::https://me:secret@host/x", "foo::https://host/x"),
            ("git@host:a.git", "git@host:a.git"),
            ("/a/b?c", "/a/b?c"),
            ("/a\x1b[31m", "/a\\u{1b}[31m"),
        ] {
            assert_eq!(super::shown(repo.as_bytes()), want);
        }
        assert_eq!(super::shown(b"/a\xff"), "/a\\xff");
    }
}
