//! From the request to a plan of an exec: pure checks, and the search for the program.

use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use proto::hand::{Start, WindowSize};
use rustix::fs::{Access, AtFlags, CWD};

use crate::limits::EXEC_ID_BYTES_MAX;

/// What is searched when the environment has no `PATH`.
const PATH_DEFAULT: &[u8] = b"/usr/local/bin:/usr/bin:/bin";
/// What to do about a program of the host that the sandbox does not show.
pub(crate) const MORE_OF_THE_HOST: &str = "`hand.read_only` of tendon's configuration shows more of the host";

/// An exec that may be tried.
#[derive(Debug)]
pub struct Plan {
    /// Its id.
    pub exec: String,
    /// The command and its arguments.
    pub argv: Vec<CString>,
    /// `NAME=value`, the whole environment.
    pub env: Vec<CString>,
    /// Where to start; empty: the branch's root.
    pub cwd: CString,
    /// The terminal's size, if it gets one.
    pub pty: Option<WindowSize>,
    /// Whether stdin follows.
    pub stdin: bool,
    /// When to kill it.
    pub wall_ms_max: Option<u64>,
    /// What to search.
    path: Vec<u8>,
}

/// Why an exec can't be started as asked for.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// No argv, or an empty program name.
    #[error("the command is empty")]
    Empty,
    /// A NUL byte, which no argument, variable or directory can hold.
    #[error("{what} holds a NUL byte")]
    Nul {
        /// `an argument`, `the environment`, `the directory`.
        what: &'static str,
    },
    /// A variable's name that is empty or holds `=`.
    #[error("`{name}` is not the name of an environment variable")]
    EnvName {
        /// The name.
        name: String,
    },
    /// The exec's id.
    #[error("the exec's id is empty or longer than {EXEC_ID_BYTES_MAX} bytes")]
    ExecId,
    /// It was not found, or only where it can't be executed.
    #[error("`{name}` was not found in the sandbox: searched {searched}{found}; {MORE_OF_THE_HOST}")]
    NotFound {
        /// The program.
        name: String,
        /// The directories, separated by `:`.
        searched: String,
        /// Files of that name that can't be executed.
        found: String,
    },
}

/// Checks a request. Pure: for fuzzing, too.
pub fn check(start: Start) -> Result<Plan, PlanError> {
    if start.exec.is_empty() || start.exec.len() > EXEC_ID_BYTES_MAX {
        return Err(PlanError::ExecId);
    }
    let argv = start.argv.iter().map(|arg| c_string(arg, "an argument")).collect::<Result<Vec<_>, _>>()?;
    if argv.first().is_none_or(|program| program.is_empty()) {
        return Err(PlanError::Empty);
    }
    let mut env = Vec::with_capacity(start.env.len());
    let mut path = PATH_DEFAULT.to_vec();
    for var in &start.env {
        if var.name.is_empty() || var.name.contains(&b'=') {
            return Err(PlanError::EnvName { name: String::from_utf8_lossy(&var.name).into_owned() });
        }
        if var.name == b"PATH"[..] {
            path = var.value.to_vec();
        }
        env.push(c_string(&[&var.name[..], b"=", &var.value[..]].concat(), "the environment")?);
    }
    Ok(Plan {
        exec: start.exec,
        argv,
        env,
        cwd: c_string(&start.cwd, "the directory")?,
        pty: start.pty,
        stdin: start.stdin,
        wall_ms_max: (start.wall_ms_max > 0).then_some(start.wall_ms_max),
        path,
    })
}

fn c_string(bytes: &[u8], what: &'static str) -> Result<CString, PlanError> {
    CString::new(bytes).map_err(|_| PlanError::Nul { what })
}

impl Plan {
    /// The directory to start in: absolute, or relative to `root`.
    pub fn directory(&self, root: &Path) -> PathBuf {
        root.join(OsStr::from_bytes(self.cwd.as_bytes()))
    }

    /// Looks the program up, as `execvp` would, so that a miss can name what was searched.
    pub fn program(&self, directory: &Path) -> Result<CString, PlanError> {
        let Some(name) = self.argv.first() else { return Err(PlanError::Empty) };
        if name.as_bytes().contains(&b'/') {
            return Ok(name.clone());
        }
        let mut unusable = Vec::new();
        for dir in self.path.split(|byte| *byte == b':') {
            let candidate = directory.join(OsStr::from_bytes(dir)).join(OsStr::from_bytes(name.as_bytes()));
            match rustix::fs::accessat(CWD, &candidate, Access::EXEC_OK, AtFlags::empty()) {
                Ok(()) if candidate.is_file() => {
                    return c_string(candidate.as_os_str().as_bytes(), "the program's path");
                }
                Err(rustix::io::Errno::ACCESS) if candidate.exists() => unusable.push(candidate),
                Ok(()) | Err(_) => {}
            }
        }
        let found =
            unusable.first().map(|path| format!(" ({} is there, but can't be executed)", path.display()));
        Err(PlanError::NotFound {
            name: name.to_string_lossy().into_owned(),
            searched: String::from_utf8_lossy(&self.path).into_owned(),
            found: found.unwrap_or_default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::hand::EnvVar;

    fn start(argv: &[&str]) -> Start {
        Start {
            exec: "ex-1".into(),
            argv: argv.iter().map(|arg| arg.to_string().into()).collect(),
            ..Start::default()
        }
    }

    #[track_caller]
    fn refused(start: Start, want: &str) {
        assert_eq!(check(start).unwrap_err().to_string(), want);
    }

    #[test]
    fn bad_requests_are_named() {
        refused(start(&[]), "the command is empty");
        refused(start(&[""]), "the command is empty");
        refused(start(&["a\0b"]), "an argument holds a NUL byte");
        refused(
            Start { exec: String::new(), ..start(&["true"]) },
            "the exec's id is empty or longer than 64 bytes",
        );
        let var = EnvVar { name: "A=B".into(), value: "c".into() };
        refused(
            Start { env: vec![var], ..start(&["true"]) },
            "`A=B` is not the name of an environment variable",
        );
    }

    #[test]
    fn a_miss_names_what_was_searched() {
        let var = EnvVar { name: "PATH".into(), value: "/nowhere:/usr/share".into() };
        let plan = check(Start { env: vec![var], ..start(&["frobnicate"]) }).unwrap();
        assert_eq!(
            plan.program(Path::new("/")).unwrap_err().to_string(),
            format!(
                "`frobnicate` was not found in the sandbox: searched /nowhere:/usr/share; {MORE_OF_THE_HOST}"
            )
        );
    }

    #[test]
    fn a_program_is_found_by_path() {
        let plan = check(start(&["sh"])).unwrap();
        assert!(plan.program(Path::new("/")).unwrap().as_bytes().ends_with(b"/sh"));
    }
}
