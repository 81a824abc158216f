//! Random choices that a printed seed repeats.

/// A small generator (splitmix64, Steele et al., 2014): good enough to pick moments and bytes.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The generator of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The seed of this run: `HEAVY_SEED`, else a fresh one.
    pub fn seed() -> u64 {
        let given = testkit::process::variable("HEAVY_SEED").and_then(|text| text.parse().ok());
        given.unwrap_or_else(|| {
            use std::hash::{BuildHasher as _, Hasher as _};
            std::collections::hash_map::RandomState::new().build_hasher().finish() % 1_000_000_007
        })
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    /// Whether a fair coin falls on heads.
    pub fn coin(&mut self) -> bool {
        self.bits() & 1 == 1
    }

    /// Lowercase text of `len` characters.
    pub fn text(&mut self, len: usize) -> String {
        (0..len).map(|_| char::from(b'a' + self.below(26) as u8)).collect()
    }
}
