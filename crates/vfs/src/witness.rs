//! The end of the audit as it was at some time, in a file beside the database: who cuts rows off its end, and puts an older
//! head back, has to know of this file, too. Against who puts the whole directory back to what it was, nothing in it helps.

use crate::audit::Head;
use crate::db::{Db, DbError};
use crate::key::AuditKey;
use crate::layout::Layout;
use crate::replace::replace;
use crate::store::Store;

/// What the file says.
pub(crate) enum Witness {
    /// The chain had this end.
    Head(Head),
    /// It is gone, or not as it was written.
    Bad(&'static str),
}

impl Witness {
    pub(crate) fn read(layout: &Layout, key: &AuditKey) -> Self {
        match std::fs::read(layout.audit_head()) {
            Ok(bytes) => match Head::decode(&bytes, key) {
                Some(head) => Self::Head(head),
                None => Self::Bad("`audit.head` is not as it was written"),
            },
            Err(_) => Self::Bad("`audit.head` is missing"),
        }
    }
}

impl Store {
    /// Notes the end of the audit. To be called now and then; a cut of what came after the last time is not found.
    pub fn witness(&self) -> Result<(), DbError> {
        let inner = &self.inner;
        note(&inner.db, &inner.key, &inner.layout)
    }
}

/// See [`Store::witness`]. What is noted already is never taken back.
pub(crate) fn note(db: &Db, key: &AuditKey, layout: &Layout) -> Result<(), DbError> {
    // What a power cut may take is no end.
    db.settle()?;
    let Some(head) = crate::audit::read_head(&db.read(), key)? else { return Ok(()) };
    match Witness::read(layout, key) {
        Witness::Head(noted) if noted.seq == head.seq => return Ok(()),
        Witness::Head(noted) if noted.seq > head.seq => {
            tracing::error!(noted = noted.seq, found = head.seq, "rows are missing at the end of the audit");
            return Ok(());
        }
        Witness::Head(noted) if !crate::audit::has_row(&db.read(), &noted)? => {
            tracing::error!(noted = noted.seq, "a row of the audit is not the one that was noted");
            return Ok(());
        }
        Witness::Bad(problem) if head.seq > 0 => {
            tracing::error!(problem, "the end of the audit can't be vouched for");
            return Ok(());
        }
        Witness::Head(_) | Witness::Bad(_) => {}
    }
    replace(&layout.audit_head(), &head.encode(key)).map_err(DbError::File)
}
