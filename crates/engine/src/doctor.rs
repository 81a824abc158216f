//! What this host can enforce, for `tendon doctor`.

use policy::HostCaps;
use proto::http::{DoctorCheck, DoctorReply, DoctorState};

use crate::runner::Runner;

impl Runner {
    /// What was found by trying when the runner started, and git now.
    pub async fn doctor(&self) -> DoctorReply {
        let caps = self.hands().caps();
        let mut checks = vec![sandbox(&caps)];
        checks.extend(limits(&caps));
        checks.extend(self.with_store(|store| [overlay(store), git()]).await);
        let toolchains = self.hands().toolchains().join(", ");
        checks.push(check(
            "toolchains",
            DoctorState::Works,
            if toolchains.is_empty() { "none found" } else { &toolchains },
            None,
        ));
        DoctorReply { version: 1, checks }
    }
}

fn sandbox(caps: &HostCaps) -> DoctorCheck {
    match &caps.sandbox_missing {
        None => check("tier sandbox", DoctorState::Works, "bubblewrap and the agent are there", None),
        Some(missing) => check("tier sandbox", DoctorState::Broken, &missing.what, missing.fix.as_deref()),
    }
}

fn limits(caps: &HostCaps) -> Vec<DoctorCheck> {
    let fix = "run tendond where it may make control groups: as root, or in a systemd user session with Delegate=yes";
    let limit = |name: &str, by: &Option<String>| match by {
        Some(by) => check(name, DoctorState::Works, &format!("by {by}"), None),
        None => check(name, DoctorState::Missing, "no control group of this host can be used", Some(fix)),
    };
    vec![
        limit("limit cpu", &caps.cpu_by),
        limit("limit memory", &caps.memory_by),
        limit("limit pids", &caps.pids_by),
        check("limit disk", DoctorState::Works, "by watching the branch", None),
        check("limit time", DoctorState::Works, "by deadline", None),
    ]
}

fn overlay(store: &vfs::Store) -> DoctorCheck {
    match store.no_overlay() {
        None => check("engine overlay", DoctorState::Works, "overlays can be mounted", None),
        Some(why) => {
            let detail = format!("{why}; branches are plain copies");
            check(
                "engine overlay",
                DoctorState::Degraded,
                &detail,
                Some("a kernel with overlayfs, and a state directory on ext4, xfs or btrfs"),
            )
        }
    }
}

fn git() -> DoctorCheck {
    match vfs::git::Git::new().text(&["--version"]) {
        Ok(version) => check("git", DoctorState::Works, version.trim(), None),
        Err(error) => check("git", DoctorState::Missing, &error.to_string(), Some("apt-get install git")),
    }
}

fn check(name: &str, state: DoctorState, detail: &str, fix: Option<&str>) -> DoctorCheck {
    DoctorCheck { name: name.to_owned(), state, detail: detail.to_owned(), fix: fix.map(str::to_owned) }
}
