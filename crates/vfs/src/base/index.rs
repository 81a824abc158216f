//! Sets the modification times in a git index, so that it agrees with files that were given one common time. The format
//! is git's `index-format.txt`, versions 2 and 3.

/// Bytes of an entry before its object id: ten 32-bit fields.
const STAT_BYTES: usize = 40;
/// Where the modification time's seconds stand among them; its nanoseconds follow.
const MTIME_AT: usize = 8;
/// The flag of an entry that has 16 more flags.
const EXTENDED: u16 = 0x4000;

/// Sets the modification time of all entries. `None`: not an index of a version that is known here. The checksum at the
/// end is then wrong; git writes it anew.
pub(super) fn set_mtimes(index: &mut [u8], seconds: u32, oid_bytes: usize) -> Option<()> {
    let word = |index: &[u8], at: usize| -> Option<u32> {
        Some(u32::from_be_bytes(index.get(at..at + 4)?.try_into().ok()?))
    };
    if index.get(..4)? != b"DIRC" || !matches!(word(index, 4)?, 2 | 3) {
        return None;
    }
    let mut at = 12;
    for _ in 0..word(index, 8)? {
        let flags_at = at + STAT_BYTES + oid_bytes;
        let flags = u16::from_be_bytes(index.get(flags_at..flags_at + 2)?.try_into().ok()?);
        let name_at = flags_at + if flags & EXTENDED == 0 { 2 } else { 4 };
        let name_bytes = index.get(name_at..)?.iter().position(|b| *b == 0)?;
        let mtime = index.get_mut(at + MTIME_AT..at + MTIME_AT + 8)?;
        mtime[..4].copy_from_slice(&seconds.to_be_bytes());
        mtime[4..].fill(0);
        // Entries end with one to eight NUL bytes, at a multiple of eight.
        at += (name_at - at + name_bytes + 8) & !7;
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_index_is_left_alone() {
        for bad in [&b""[..], b"DIRC", b"DIRC\0\0\0\x04\0\0\0\0", b"DIRC\0\0\0\x02\0\0\0\x01short"] {
            assert_eq!(set_mtimes(&mut bad.to_vec(), 7, 20), None, "{bad:?}");
        }
    }
}
