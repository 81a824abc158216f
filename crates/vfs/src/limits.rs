//! Bounds of what is shown and exported. Constants only.

/// Larger files are never compared: a diff says that they differ, and a patch carries both contents, compressed.
pub const DIFF_FILE_BYTES_MAX: u64 = 8 << 20;
/// A larger diff is refused: it is made in memory, and nobody reads it. A patch has no such bound.
pub const DIFF_BYTES_MAX: usize = 32 << 20;
/// A larger patch is refused: git does not apply it (`MAX_APPLY_SIZE` in its `apply.c`).
pub const PATCH_BYTES_MAX: u64 = 1023 << 20;
