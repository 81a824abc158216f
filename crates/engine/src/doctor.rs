//! What this host can enforce, for `tendon doctor`.

use proto::http::{DoctorCheck, DoctorReply, DoctorState};

use crate::runner::Runner;

impl Runner {
    /// Tries everything: what hands need, the engine of branches, git.
    pub async fn doctor(&self) -> DoctorReply {
        let mut checks = self.hands().probe().await;
        checks.extend(self.with_store(|store| [overlay(store), git()]).await);
        DoctorReply { version: 1, checks }
    }
}

fn overlay(store: &vfs::Store) -> DoctorCheck {
    match store.no_overlay() {
        None => check("engine overlay", DoctorState::Works, "overlays can be mounted", None),
        Some(why) => {
            let detail = format!("{why}; branches are plain copies");
            let fix = "a kernel with overlayfs, and a state directory on ext4, xfs or btrfs";
            check("engine overlay", DoctorState::Degraded, &detail, Some(fix))
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
