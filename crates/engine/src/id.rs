//! Random ids.

/// Ten random bytes. The kernel's generator does not fail once it has been seeded, and it has been before any user's program runs.
pub(crate) fn random() -> [u8; 10] {
    let mut bytes = [0; 10];
    getrandom::fill(&mut bytes).expect("the kernel's random generator works");
    bytes
}
