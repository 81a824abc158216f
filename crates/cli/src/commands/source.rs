//! The flags that name a source, shared by `verify`, `base freeze` and `branch create`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use clap::Args;
use proto::api::{BaseInfo, BranchInfo};
use proto::client::{Client, ClientError};
use proto::error::{Code, ErrorBody};
use proto::http::FreezeEvent;
use proto::path::JsonBytes;
use proto::spec::{absolute, directory, is_url, repo_source};
use proto::verify::Source;

use super::{App, file_error, usage};
use crate::environment::current_dir;

/// What helps with a path that leads nowhere.
pub(crate) const HERE: &str = "check the path: a relative one starts in the current directory";

/// Where the code comes from.
#[derive(Args, Default)]
#[command(next_help_heading = "Source")]
pub(crate) struct SourceArgs {
    /// A git repository. A directory without --ref is taken as it is now, uncommitted work included
    #[arg(long, value_name = "PATH|URL", group = "source")]
    repo: Option<OsString>,
    /// The ref or commit to take from the repository [default for a URL: HEAD]
    #[arg(long = "ref", value_name = "REF")]
    rev: Option<String>,
    /// A directory of any files, ignored ones included
    #[arg(long, value_name = "DIR", group = "source")]
    files: Option<PathBuf>,
    /// Take the files that git ignores along. With --repo DIR
    #[arg(long)]
    include_ignored: bool,
}

impl SourceArgs {
    /// Whether a flag names a source.
    pub(crate) fn names_one(&self) -> bool {
        self.repo.is_some() || self.files.is_some()
    }

    /// The source, or `None` if no flag names one.
    pub(crate) fn source(&self) -> Result<Option<Source>, ErrorBody> {
        let Some(repo) = &self.repo else {
            // Not left to the parser: it asks for no --repo where --files, --branch or --base excludes it.
            for (flag, given) in [("--ref", self.rev.is_some()), ("--include-ignored", self.include_ignored)]
            {
                if given {
                    return Err(usage(
                        format!("{flag} has a meaning only with --repo"),
                        Some(&format!("leave {flag} out, or name the code with --repo")),
                    ));
                }
            }
            let Some(dir) = &self.files else { return Ok(None) };
            return resolved(directory(&absolute(&current_dir()?, dir), true), HERE).map(Some);
        };
        if repo.is_empty() {
            return Err(usage("--repo is empty", Some("name a directory or a URL")));
        }
        if self.rev.as_ref().is_some_and(String::is_empty) {
            return Err(usage("--ref is empty", Some("name a branch, a tag or a commit")));
        }
        if self.include_ignored && (self.rev.is_some() || is_url(repo)) {
            return Err(usage(
                "--include-ignored needs a directory: a commit has no ignored files",
                Some("leave out --ref or --include-ignored"),
            ));
        }
        let here = if is_url(repo) { PathBuf::new() } else { current_dir()? };
        resolved(repo_source(repo, self.rev.as_deref(), self.include_ignored, &here), HERE).map(Some)
    }
}

/// A source as the runner is to be told it. A path is resolved here: what it says may hold for this process alone
/// (`/proc/self/cwd`, `/dev/fd/3`), and what is wrong with it is found out early. `hint` is for one that is not there.
pub(crate) fn resolved(source: Source, hint: &str) -> Result<Source, ErrorBody> {
    let directory = |path: &JsonBytes| resolved_directory("read the source", path, hint);
    Ok(match source {
        Source::Git { repo, rev } if !is_url(OsStr::from_bytes(&repo.decode().unwrap_or_default())) => {
            Source::Git { repo: directory(&repo)?, rev }
        }
        Source::Directory { path, include_ignored } => {
            Source::Directory { path: directory(&path)?, include_ignored }
        }
        other @ (Source::Git { .. } | Source::Branch { .. } | Source::Files { .. }) => other,
    })
}

/// The directory that an absolute path leads this process to.
pub(crate) fn resolved_directory(what: &str, path: &JsonBytes, hint: &str) -> Result<JsonBytes, ErrorBody> {
    let path = path.decode_path().map_err(|error| usage(error, None))?;
    let found = std::fs::canonicalize(&path)
        .and_then(|real| std::fs::metadata(&real).map(|found| (real, found.is_dir())));
    let failed = |error: std::io::Error| {
        let body = file_error(what, &path, &error);
        if body.code == Code::NotFound { ErrorBody { hint: Some(hint.to_owned()), ..body } } else { body }
    };
    match found.map_err(failed)? {
        (real, true) => Ok(JsonBytes::of_path(&real)),
        (_, false) => Err(usage(
            format!("{} is not a directory", path.display()),
            Some("name the directory that holds it"),
        )),
    }
}

/// Freezes a source as a base, with progress.
pub(crate) async fn freeze(client: &Client, source: &Source, app: &App<'_>) -> Result<BaseInfo, ErrorBody> {
    let mut events =
        client.events::<FreezeEvent>("/v1/bases", source).await.map_err(ClientError::into_body)?;
    loop {
        match events.next().await.map_err(ClientError::into_body)? {
            FreezeEvent::Progress { message } => app.output.progress(&message),
            FreezeEvent::Done { base } => {
                app.output.clear_progress();
                return Ok(base);
            }
            FreezeEvent::Failed { error } => return Err(error),
        }
    }
}

/// The branch that `text`, an id or a name, means.
pub(crate) async fn find_branch(client: &Client, text: &str) -> Result<BranchInfo, ErrorBody> {
    client.get(&branch_path(text)).await.map_err(ClientError::into_body)
}

/// The API's path of a branch, given by id or name.
pub(crate) fn branch_path(text: &str) -> String {
    format!("/v1/branches/{}", proto::http::percent_encode(text.as_bytes()).replace('/', "%2F"))
}
