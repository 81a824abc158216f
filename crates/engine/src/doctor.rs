//! What this host can enforce, for `tendon doctor`.

use proto::http::{DoctorCheck, DoctorReply, DoctorState};

use crate::runner::{Blocking, Runner};

impl Runner {
    /// Tries everything: what hands and branches need, and git.
    pub async fn doctor(&self) -> DoctorReply {
        let mut checks = self.hands().probe().await;
        checks.push(Blocking::run(git).await);
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
