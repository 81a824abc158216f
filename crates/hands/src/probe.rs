//! What this host can do, found by trying, for `tendon doctor`.
