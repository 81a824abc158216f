//! Tiers, hand supervision and limits.

pub mod link;
