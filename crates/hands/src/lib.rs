//! Tiers, hand supervision and limits.
