//! What this host can enforce, for `tendon doctor`.

use proto::http::{DoctorCheck, DoctorReply, DoctorState};

use crate::runner::{Blocking, Runner};

impl Runner {
    /// Tries everything: what hands and branches need, and git.
    pub async fn doctor(&self) -> DoctorReply {
        let mut checks = self.hands().probe().await;
        checks.push(Blocking::run(git).await);
        checks.push(state_dir(self.store().slow_because()));
        DoctorReply { version: 1, checks }
    }
}

fn git() -> DoctorCheck {
    let (state, detail, fix) = match vfs::git::Git::new().text(&["--version"]) {
        Ok(version) => (DoctorState::Works, version.trim().to_owned(), None),
        Err(error) => (DoctorState::Missing, error.to_string(), Some("apt-get install git".to_owned())),
    };
    DoctorCheck { name: "git".to_owned(), state, detail, fix }
}

fn state_dir(slow_because: Option<&str>) -> DoctorCheck {
    let (state, detail, fix) = match slow_because {
        None => (DoctorState::Works, "its disk notes every write".to_owned(), None),
        Some(why) => {
            let fix = "put it on a disk: --state-dir, TENDON_STATE_DIR".to_owned();
            (DoctorState::Degraded, why.to_owned(), Some(fix))
        }
    };
    DoctorCheck { name: "state directory".to_owned(), state, detail, fix }
}
