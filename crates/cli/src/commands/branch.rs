//! `tendon branch`: a base and an agent's changes to it.

use std::ffi::OsString;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use proto::api::{AuditRow, BranchInfo};
use proto::client::{Client, ClientError};
use proto::error::ErrorBody;
use proto::http::{
    BranchAt, BranchAtReply, CreateBranch, ExportGit, ExportReply, FILE_BYTES_MAX, FileEntry, ForkBranch,
    percent_encode,
};
use proto::ids::BaseId;
use proto::path::JsonBytes;
use proto::spec::{absolute, is_url};
use proto::units::counted;
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};

use super::source::{HERE, SourceArgs, branch_path, find_branch, freeze, resolved_directory};
use super::{App, branch_text, exec, file_error, host, number, tree_path, usage};
use crate::Outcome;
use crate::environment::current_dir;
use crate::output::{Cleaner, one_line};

/// Files that lack their content and are named.
const MISSING_SHOWN: usize = 20;

/// Branches: a base and an agent's changes to it. Each is given by its id or its name.
#[derive(Args)]
#[command(after_help = "\
Examples:
  tendon branch create --repo . --name fix
  tendon branch write fix src/lib.rs < new-lib.rs
  tendon branch exec fix -- cargo test
  tendon branch diff fix
  tendon branch export fix --git . agent/fix --message \"Fix the parser\"
  tendon branch drop fix")]
pub(crate) struct BranchArgs {
    #[command(subcommand)]
    command: BranchCommand,
}

#[derive(Subcommand)]
enum BranchCommand {
    /// Make a branch and print its id
    #[command(
        after_help = "Examples:\n  tendon branch create --repo . --name fix\n  tendon branch create --base base-…"
    )]
    Create(CreateArgs),
    /// Make a branch that starts as another is now
    #[command(after_help = "Example:\n  tendon branch fork fix --name other-idea")]
    Fork {
        /// The branch to start from, by id or name
        #[arg(value_parser = branch_text)]
        branch: String,
        /// A name for the new one
        #[arg(long)]
        name: Option<String>,
    },
    /// List the branches
    #[command(after_help = "Example:\n  tendon branch list --json")]
    List,
    /// Show one branch
    #[command(after_help = "Example:\n  tendon branch show fix")]
    Show {
        /// The branch, by id or name
        #[arg(value_parser = branch_text)]
        branch: String,
    },
    /// Print what a branch changed against its base
    #[command(after_help = "Examples:\n  tendon branch diff fix\n  tendon branch diff fix --name-status")]
    Diff {
        /// The branch, by id or name
        #[arg(value_parser = branch_text)]
        branch: String,
        /// Only the names, with git's letters
        #[arg(long)]
        name_status: bool,
    },
    /// Write a branch as a patch, a commit or an archive
    #[command(
        after_help = "Examples:\n  tendon branch export fix --git . agent/fix --message \"Fix the parser\"\n  \
                      tendon branch export fix --patch fix.patch\n  tendon branch export fix --tar - | tar -t\n\n\
                      A ref that exists is never moved. Uncommitted work that was frozen with a directory is in the\n\
                      commit, too: freeze a ref to keep them apart (branch create --repo . --ref HEAD)."
    )]
    Export(ExportArgs),
    /// Remove a branch; the audit keeps what it did
    #[command(after_help = "Example:\n  tendon branch drop fix")]
    Drop {
        /// The branch, by id or name
        #[arg(value_parser = branch_text)]
        branch: String,
    },
    /// Make a branch as another was at an audit sequence number
    #[command(
        after_help = "Examples:\n  tendon audit log --branch fix\n  tendon branch at 42 --name as-it-was"
    )]
    At {
        /// The sequence number, from `tendon audit log`
        #[arg(value_parser = number::<u64>, allow_negative_numbers = true)]
        seq: u64,
        /// The branch whose past it is [default: the one that the row is about]
        #[arg(long, value_parser = branch_text)]
        branch: Option<String>,
        /// A name for the new one
        #[arg(long)]
        name: Option<String>,
    },
    /// Run a command on a branch, in a sandbox. Ends with the command's exit status
    #[command(after_help = "Examples:\n  tendon branch exec fix -- cargo test\n  \
                      tendon branch exec fix --timeout 2m -- sh -c 'make && ./test | tee log'\n  \
                      tendon branch exec fix --tty -- bash\n\n\
                      Exit status: the command's own, 128 and the number of the signal that ended it, or\n  \
                      124 it timed out · 125 tendon failed: a bad option, no such branch, refused, the host's fault, …\n  \
                      126 it can't be executed · 127 there is no such program · 130 cancelled · 137 it went over a limit\n\
                      A command may end with each of these by itself: `outcome` in the record of --json tells.")]
    Exec(exec::ExecArgs),
    /// Print a file of a branch
    #[command(after_help = "Example:\n  tendon branch read fix src/lib.rs")]
    Read(PathArgs),
    /// Write a file of a branch from standard input
    #[command(after_help = "Example:\n  tendon branch write fix src/lib.rs < new-lib.rs")]
    Write {
        #[command(flatten)]
        at: PathArgs,
        /// Make it executable [default: as it was]
        #[arg(long)]
        executable: bool,
    },
    /// Remove a file, a symlink or a directory with all below it from a branch
    #[command(after_help = "Example:\n  tendon branch rm fix old.rs")]
    Rm(PathArgs),
    /// List a directory of a branch
    #[command(after_help = "Example:\n  tendon branch ls fix src")]
    Ls {
        /// The branch, by id or name
        #[arg(value_parser = branch_text)]
        branch: String,
        /// The directory [default: the branch's top]
        path: Option<PathBuf>,
    },
}

#[derive(Args)]
struct CreateArgs {
    #[command(flatten)]
    source: SourceArgs,
    /// A base that exists
    #[arg(long, value_name = "BASE", group = "source", value_parser = base_id)]
    base: Option<BaseId>,
    /// A name for it
    #[arg(long)]
    name: Option<String>,
}

#[derive(Args)]
struct ExportArgs {
    /// The branch, by id or name
    #[arg(value_parser = branch_text)]
    branch: String,
    /// As a patch to FILE, - for standard output
    #[arg(long, value_name = "FILE", group = "to")]
    patch: Option<PathBuf>,
    /// As a tar archive to FILE, - for standard output
    #[arg(long, value_name = "FILE", group = "to")]
    tar: Option<PathBuf>,
    /// As a commit on the new branch REF of the repository at REPO
    #[arg(long, num_args = 2, value_names = ["REPO", "REF"], group = "to")]
    git: Option<Vec<OsString>>,
    /// The commit's message
    #[arg(long, requires = "git", conflicts_with_all = ["patch", "tar"], default_value = "Changes from a tendon branch")]
    message: String,
    /// The commit's author
    #[arg(
        long,
        requires = "git",
        conflicts_with_all = ["patch", "tar"],
        value_name = "NAME <ADDRESS>",
        default_value = "tendon <tendon@localhost>"
    )]
    author: String,
}

#[derive(Args)]
struct PathArgs {
    /// The branch, by id or name
    #[arg(value_parser = branch_text)]
    branch: String,
    /// A path in the branch
    path: PathBuf,
}

/// A base's id.
fn base_id(text: &str) -> Result<BaseId, String> {
    text.parse().map_err(|_| "give the id of a base, as `tendon base list` shows them".into())
}

impl BranchArgs {
    pub(super) fn is_exec(&self) -> bool {
        matches!(self.command, BranchCommand::Exec(_))
    }
}

impl PathArgs {
    fn url(&self) -> Result<String, ErrorBody> {
        Ok(files_url(&self.branch, tree_path(&self.path)?.as_bytes(), "files"))
    }
}

pub(crate) async fn run(args: BranchArgs, app: &App<'_>) -> Outcome {
    // What makes no sense is told before a runner is started for it.
    match args.command {
        BranchCommand::Create(args) => create(args, app).await,
        BranchCommand::Fork { branch, name } => {
            let path = format!("{}/fork", branch_path(&branch));
            made(app.client().await?.post(&path, &ForkBranch { name }).await, app)
        }
        BranchCommand::List => list(&app.client().await?, app).await,
        BranchCommand::Show { branch } => show(&find_branch(&app.client().await?, &branch).await?, app),
        BranchCommand::Diff { branch, name_status } => {
            diff(&app.client().await?, &branch, name_status, app).await
        }
        BranchCommand::Export(args) => export(args, app).await,
        BranchCommand::Drop { branch } => done(app.client().await?.delete(&branch_path(&branch)).await, app),
        BranchCommand::At { seq, branch, name } => at(seq, branch, name, &app.client().await?, app).await,
        BranchCommand::Exec(args) => exec::run(args, app).await,
        BranchCommand::Read(at) => {
            let url = at.url()?;
            copy_out(&app.client().await?, &url, "content", app).await
        }
        BranchCommand::Write { at, executable } => {
            let mode = if executable { "&mode=755" } else { "" };
            let (url, content) = (format!("{}{mode}", at.url()?), standard_input()?);
            done(app.client().await?.put(&url, content).await, app)
        }
        BranchCommand::Rm(at) => {
            let url = at.url()?;
            done(app.client().await?.delete(&url).await, app)
        }
        BranchCommand::Ls { branch, path } => ls(&branch, path, app).await,
    }
}

async fn create(args: CreateArgs, app: &App<'_>) -> Outcome {
    let source = args.source.source()?;
    let missing = || usage("no source is named", Some("give --repo, --files or --base"));
    let (client, base) = match (args.base, source) {
        (Some(base), _) => (app.client().await?, base),
        (None, source) => {
            let source = source.ok_or_else(missing)?;
            let client = app.client().await?;
            let base = freeze(&client, &source, app).await?.id;
            (client, base)
        }
    };
    made(client.post("/v1/branches", &CreateBranch { base, name: args.name }).await, app)
}

fn made(made: Result<BranchInfo, ClientError>, app: &App<'_>) -> Outcome {
    let branch = made.map_err(ClientError::into_body)?;
    if app.output.json {
        app.output.json(&json!({ "version": 1, "branch": branch }))
    } else {
        app.output.line(branch.id.as_str())
    }
    Ok(0)
}

/// What has no record of its own: done, or why not.
fn done(done: Result<Value, ClientError>, app: &App<'_>) -> Outcome {
    done.map_err(ClientError::into_body)?;
    if app.output.json {
        app.output.json(&json!({ "version": 1 }));
    }
    Ok(0)
}

async fn list(client: &Client, app: &App<'_>) -> Outcome {
    let branches: Vec<BranchInfo> = client.get("/v1/branches").await.map_err(ClientError::into_body)?;
    if app.output.json {
        app.output.json(&json!({ "version": 1, "branches": branches }));
        return Ok(0);
    }
    let row = |branch: &BranchInfo| {
        let name = branch.name.as_deref().unwrap_or("-").to_owned();
        let created = super::audit::show_time(branch.created_ms);
        vec![branch.id.to_string(), name, branch.base.to_string(), branch.depth.to_string(), created]
    };
    app.output.table(
        &["BRANCH", "NAME", "BASE", "DEPTH", "CREATED"],
        &branches.iter().map(row).collect::<Vec<_>>(),
    );
    Ok(0)
}

fn show(branch: &BranchInfo, app: &App<'_>) -> Outcome {
    if app.output.json {
        app.output.json(&json!({ "version": 1, "branch": branch }));
        return Ok(0);
    }
    let parent = branch.parent.as_ref().map_or("-", |parent| parent.as_str());
    for (name, value) in [
        ("branch", branch.id.as_str()),
        ("name", &one_line(branch.name.as_deref().unwrap_or("-"))),
        ("base", branch.base.as_str()),
        ("forked from", parent),
        ("engine", &branch.engine),
        ("depth", &branch.depth.to_string()),
        ("created", &super::audit::show_time(branch.created_ms)),
        ("audit", &branch.audit_seq.to_string()),
    ] {
        app.output.line(format!("{name:<12} {value}"));
    }
    Ok(0)
}

async fn diff(client: &Client, branch: &str, name_status: bool, app: &App<'_>) -> Outcome {
    let format = if name_status { "name-status" } else { "unified" };
    copy_out(client, &format!("{}/diff?format={format}", branch_path(branch)), "diff", app).await
}

/// Prints bytes as they come; with `--json` as the record's member `member`.
async fn copy_out(client: &Client, path: &str, member: &str, app: &App<'_>) -> Outcome {
    let mut stream = client.bytes(path).await.map_err(ClientError::into_body)?;
    let (mut all, mut cleaner) = (Vec::new(), Cleaner::default());
    while let Some(bytes) = stream.next().await.map_err(ClientError::into_body)? {
        if app.output.json {
            all.extend_from_slice(&bytes);
            continue;
        }
        if app.output.closed() {
            return Ok(0);
        }
        if app.output.terminal {
            app.output.raw(cleaner.next(&bytes).as_bytes())
        } else {
            app.output.raw(&bytes)
        }
    }
    if app.output.json {
        app.output.json(&json!({ "version": 1, member: JsonBytes::new(&all) }));
    }
    Ok(0)
}

async fn export(args: ExportArgs, app: &App<'_>) -> Outcome {
    let path = branch_path(&args.branch);
    match (&args.patch, &args.tar, &args.git) {
        (Some(file), _, _) => save(&format!("{path}/export?format=patch"), file, app).await,
        (_, Some(file), _) => save(&format!("{path}/export?format=tar"), file, app).await,
        (_, _, Some(git)) => export_git(&args, git, app).await,
        (None, None, None) => {
            Err(usage("export to what?", Some("give --patch FILE, --tar FILE or --git REPO REF")))
        }
    }
}

async fn export_git(args: &ExportArgs, git: &[OsString], app: &App<'_>) -> Outcome {
    let [repo, name] = git else { return Err(usage("--git takes REPO and REF", None)) };
    if repo.is_empty() {
        return Err(usage("REPO is empty", Some("name the directory of a git repository")));
    }
    let name =
        name.to_str().ok_or_else(|| usage("REF is not UTF-8", Some("name a branch of the repository")))?;
    if is_url(repo) {
        return Err(usage(
            "a branch is not exported to a URL",
            Some("name a repository on this machine, and push the branch from there"),
        ));
    }
    let repo = JsonBytes::of_path(&absolute(&current_dir()?, Path::new(repo)));
    let repo = resolved_directory("export to the repository", &repo, HERE)?;
    let (name, message, author) = (name.to_owned(), args.message.clone(), args.author.clone());
    let request = ExportGit { repo, name, message, author };
    let path = branch_path(&args.branch);
    let client = app.client().await?;
    let reply: ExportReply =
        client.post(&format!("{path}/export-git"), &request).await.map_err(ClientError::into_body)?;
    if app.output.json {
        app.output.json(&json!({ "version": 1, "export": reply }));
    } else if let Some(commit) = &reply.commit {
        app.output.line(commit);
        if reply.uncommitted > 0 {
            app.output.note(&format!(
                "uncommitted work in the frozen directory is in the commit, too: {} (freeze a ref to keep it out)",
                counted(reply.uncommitted, "file")
            ));
        }
    }
    Ok(0)
}

/// Saves a stream as a file, which appears only when it is complete. What is there and is no file (a pipe, a device) is
/// written to, never replaced; and of a symbolic link to a file, the file is replaced.
async fn save(url: &str, file: &Path, app: &App<'_>) -> Outcome {
    if file == Path::new("-") {
        return copy_out_raw(url, app).await;
    }
    let client = app.client().await?;
    let mut stream = client.bytes(url).await.map_err(ClientError::into_body)?;
    let failed = |error: std::io::Error| file_error("write", file, &error);
    let there = std::fs::metadata(file).ok();
    let target = there.as_ref().and_then(|_| std::fs::canonicalize(file).ok());
    let target = target.as_deref().unwrap_or(file);
    let part = there.is_none_or(|there| there.is_file()).then(|| part_of(target));
    let mut open = std::fs::File::options();
    open.write(true);
    let opened = match &part {
        Some(part) => open.create_new(true).open(part),
        None => open.open(file),
    };
    let mut out = opened.map_err(failed)?;
    let write = async {
        while let Some(bytes) = stream.next().await.map_err(ClientError::into_body)? {
            out.write_all(&bytes).map_err(failed)?;
        }
        Ok(())
    };
    let Some(part) = &part else {
        write.await?;
        return done(Ok(Value::Null), app);
    };
    let written: Result<(), ErrorBody> = tokio::select! {
        written = write => written,
        ended = told_to_end() => ended.and_then(|()| Err(exec::cancelled())),
    };
    let placed =
        written.and_then(|()| out.sync_all().and_then(|()| std::fs::rename(part, target)).map_err(failed));
    if placed.is_err() {
        let _ = std::fs::remove_file(part);
    }
    placed?;
    done(Ok(Value::Null), app)
}

/// Waits for a signal that asks to end.
async fn told_to_end() -> Result<(), ErrorBody> {
    let on = |kind| signal(kind).map_err(|error| host(format!("signals can't be received: {error}")));
    let mut interrupt = on(SignalKind::interrupt())?;
    let mut terminate = on(SignalKind::terminate())?;
    let mut hangup = on(SignalKind::hangup())?;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        _ = hangup.recv() => {}
    }
    Ok(())
}

/// The name that `file` has until it is complete.
fn part_of(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(format!(".part-{}", std::process::id()));
    name.into()
}

async fn copy_out_raw(url: &str, app: &App<'_>) -> Outcome {
    if app.output.terminal && url.ends_with("tar") {
        return Err(usage("an archive is not written to a terminal", Some("redirect it, or name a file")));
    }
    copy_out(&app.client().await?, url, if url.ends_with("tar") { "tar" } else { "patch" }, app).await
}

async fn at(
    seq: u64,
    branch: Option<String>,
    name: Option<String>,
    client: &Client,
    app: &App<'_>,
) -> Outcome {
    let branch = match branch {
        Some(branch) => branch,
        None => {
            let path = format!("/v1/audit?since={}&limit=1", seq.saturating_sub(1));
            let rows: Vec<AuditRow> = client.get(&path).await.map_err(ClientError::into_body)?;
            let row = rows.into_iter().find(|row| row.seq == seq);
            row.ok_or_else(|| usage(format!("the audit has no row {seq}"), Some("see: tendon audit log")))?
                .branch
                .to_string()
        }
    };
    let made: BranchAtReply = client
        .post(&format!("{}/at", branch_path(&branch)), &BranchAt { seq, name })
        .await
        .map_err(ClientError::into_body)?;
    if app.output.json {
        app.output.json(&json!({ "version": 1, "branch": made.branch, "missing": made.missing }));
        return Ok(0);
    }
    app.output.line(made.branch.id.as_str());
    for path in made.missing.iter().take(MISSING_SHOWN) {
        app.output.note(&format!("its content was not kept, so it is not there: {path}"));
    }
    if let Some(more) = made.missing.len().checked_sub(MISSING_SHOWN).filter(|more| *more > 0) {
        app.output.note(&format!("and {}", counted(more as u64, "more file")));
    }
    Ok(0)
}

async fn ls(branch: &str, path: Option<PathBuf>, app: &App<'_>) -> Outcome {
    let top = |path: &PathBuf| [".", "./", "/"].iter().any(|top| path == Path::new(top));
    let url = match path.filter(|path| !top(path)) {
        Some(path) => files_url(branch, tree_path(&path)?.as_bytes(), "list"),
        None => files_url(branch, b"", "list"),
    };
    let entries: Vec<FileEntry> = app.client().await?.get(&url).await.map_err(ClientError::into_body)?;
    if app.output.json {
        app.output.json(&json!({ "version": 1, "entries": entries }));
        return Ok(0);
    }
    for entry in &entries {
        let mark = match entry.kind.as_str() {
            "dir" => "/",
            "symlink" => "@",
            _ => "",
        };
        app.output.line(format!("{:04o}  {:>10}  {}{mark}", entry.mode & 0o7777, entry.size, entry.name));
    }
    Ok(0)
}

fn files_url(branch: &str, path: &[u8], end: &str) -> String {
    format!("{}/{end}?path={}", branch_path(branch), percent_encode(path))
}

fn standard_input() -> Result<Vec<u8>, ErrorBody> {
    let mut bytes = Vec::new();
    let read = std::io::stdin().lock().take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes);
    read.map_err(|error| usage(format!("standard input can't be read: {error}"), None))?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(usage(format!("standard input is longer than {} MiB", FILE_BYTES_MAX >> 20), None));
    }
    Ok(bytes)
}
