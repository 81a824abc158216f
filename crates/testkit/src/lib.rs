//! Shared test helpers: needs, fixtures, fake clock.
