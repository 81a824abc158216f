//! Bases, branches, capture, audit, diff and export.
