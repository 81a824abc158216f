//! Pure decisions: a request and the configuration in, a grant or a refusal out. No I/O, no clock, no async.

#![forbid(unsafe_code)]

mod bounds;
mod config;
mod grant;

pub use bounds::{BOUNDS, BadValue, Bound};
pub use config::{Config, HandConfig, LimitsConfig, MaxConfig};
pub use grant::{Grant, HostCaps, Limits, Missing, Refusal, grant};
