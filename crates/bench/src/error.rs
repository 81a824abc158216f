//! What stops a figure.

use std::error::Error as StdError;

/// A figure that can't be measured: what was tried, and why it failed.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub(crate) struct BenchError {
    what: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// The result of nearly everything here.
pub(crate) type Result<T> = std::result::Result<T, BenchError>;

impl BenchError {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), source: None }
    }

    /// The error and its sources on one line.
    pub(crate) fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut next = self.source();
        while let Some(source) = next {
            text.push_str(": ");
            text.push_str(&source.to_string());
            next = source.source();
        }
        text
    }
}

/// Says what was tried when something failed.
pub(crate) trait Context<T> {
    /// Adds it.
    fn context(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: StdError + Send + Sync + 'static> Context<T> for std::result::Result<T, E> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| BenchError { what: what(), source: Some(Box::new(source)) })
    }
}
