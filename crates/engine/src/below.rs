//! An error of a crate below, passed on as it is: its words, its code, its hint.

use std::fmt;

use proto::error::{Code, Coded};

/// An error of `vfs`, `hands` or `policy`.
pub struct Below(Box<dyn Coded + Send + Sync>);

impl Below {
    /// Takes the error. For `map_err`.
    pub fn new(error: impl Coded + Send + Sync + 'static) -> Self {
        Self(Box::new(error))
    }
}

impl fmt::Display for Below {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Below {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Below {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

impl Coded for Below {
    fn code(&self) -> Code {
        self.0.code()
    }
    fn hint(&self) -> Option<String> {
        self.0.hint()
    }
}
