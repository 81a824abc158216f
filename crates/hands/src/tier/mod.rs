//! The tiers: ways to boot a hand.

pub(crate) mod bwrap;
pub(crate) mod mounts;
pub mod sandbox;
