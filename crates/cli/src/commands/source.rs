//! The flags that name a source, shared by `verify`, `base freeze` and `branch create`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::Args;
use proto::api::{BaseInfo, BranchInfo};
use proto::client::{Client, ClientError};
use proto::error::ErrorBody;
use proto::http::FreezeEvent;
use proto::spec::{absolute, directory, is_url, repo_source};
use proto::verify::Source;

use super::{App, file_error, usage};
use crate::environment::current_dir;

/// Where the code comes from.
#[derive(Args, Default)]
#[command(next_help_heading = "Source")]
pub(crate) struct SourceArgs {
    /// A git repository. A directory without --ref is taken as it is now, uncommitted work included
    #[arg(long, value_name = "PATH|URL", group = "source")]
    repo: Option<OsString>,
    /// The ref or commit to take from the repository [default for a URL: HEAD]
    #[arg(long = "ref", value_name = "REF", requires = "repo")]
    rev: Option<String>,
    /// A directory of any files, ignored ones included
    #[arg(long, value_name = "DIR", group = "source")]
    files: Option<PathBuf>,
    /// Take the files that git ignores along with --repo DIR
    #[arg(long, requires = "repo")]
    include_ignored: bool,
}

impl SourceArgs {
    /// The source, or `None` if no flag names one.
    pub(crate) fn source(&self) -> Result<Option<Source>, ErrorBody> {
        if self.repo.is_none() && self.files.is_none() {
            return Ok(None);
        }
        let here = current_dir()?;
        if let Some(repo) = &self.repo {
            if repo.is_empty() {
                return Err(usage("--repo is empty", Some("name a directory or a URL")));
            }
            if self.include_ignored && (self.rev.is_some() || is_url(repo)) {
                return Err(usage(
                    "--include-ignored needs a directory: a commit has no ignored files",
                    None,
                ));
            }
            if !is_url(repo) {
                check_directory(&absolute(&here, Path::new(repo)))?;
            }
            return Ok(Some(repo_source(repo, self.rev.as_deref(), self.include_ignored, &here)));
        }
        match &self.files {
            None => Ok(None),
            Some(dir) => {
                let dir = absolute(&here, dir);
                check_directory(&dir)?;
                Ok(Some(directory(&dir, true)))
            }
        }
    }
}

/// Finds out early, and by the name that the user gave, what the runner would find out late.
fn check_directory(path: &Path) -> Result<(), ErrorBody> {
    let found = std::fs::metadata(path).map_err(|error| file_error("read the source", path, &error))?;
    if found.is_dir() {
        return Ok(());
    }
    Err(usage(
        format!("the source {} is not a directory", path.display()),
        Some("name the directory that holds it"),
    ))
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
