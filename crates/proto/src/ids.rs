//! One newtype per kind of id, each with its own printed prefix, so that an id can't be mistaken for another.

use std::fmt;
use std::str::FromStr;

/// Crockford base 32: no letter that looks like a digit.
const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
/// Digits after the prefix: 16 digits of 5 bits are 80 random bits.
const DIGITS: usize = 16;

/// An id that could not be parsed: `what` it should be and the text that was given.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a {what} id")]
pub struct IdError {
    /// The kind of id that was expected.
    pub what: &'static str,
    /// What was given, cut to 64 characters.
    pub text: String,
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(String);

        impl $name {
            /// The prefix that every printed id of this kind starts with.
            pub const PREFIX: &'static str = $prefix;

            /// Makes an id from 10 random bytes.
            pub fn from_random(random: [u8; 10]) -> Self {
                Self(render($prefix, random))
            }

            /// The id as text, prefix included. Safe as a file name.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                check($prefix, $what, text).map(Self)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.serialize_str(&self.0)
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                let text = String::deserialize(d)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

id!(
    /// An immutable snapshot that branches start from.
    BaseId, "base-", "base"
);
id!(
    /// A base and an agent's changes to it.
    BranchId, "br-", "branch"
);
id!(
    /// One set of changes in a branch's chain; sealed (immutable) below the topmost.
    LayerId, "ly-", "layer"
);
id!(
    /// One run of `verify`.
    VerifyId, "vf-", "verify"
);
id!(
    /// One command run in a hand.
    ExecId, "ex-", "exec"
);

fn render(prefix: &str, random: [u8; 10]) -> String {
    let mut out = String::with_capacity(prefix.len() + DIGITS);
    out.push_str(prefix);
    let mut bits: u128 = random.iter().fold(0, |acc, byte| (acc << 8) | u128::from(*byte));
    for _ in 0..DIGITS {
        out.push(char::from(ALPHABET[(bits & 31) as usize]));
        bits >>= 5;
    }
    out
}

fn check(prefix: &str, what: &'static str, text: &str) -> Result<String, IdError> {
    let digits = text.strip_prefix(prefix).unwrap_or("");
    let good = digits.len() == DIGITS && digits.bytes().all(|b| b.is_ascii_digit() || b.is_ascii_lowercase());
    if good { Ok(text.to_owned()) } else { Err(IdError { what, text: text.chars().take(64).collect() }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_prints_and_parses_back() {
        let id = BranchId::from_random([7; 10]);
        assert_eq!(id.to_string().parse::<BranchId>().unwrap(), id);
        assert!(id.as_str().starts_with("br-"));
    }

    #[test]
    fn an_id_of_another_kind_is_refused() {
        let base = BaseId::from_random([7; 10]);
        assert!(base.as_str().parse::<BranchId>().is_err());
        for bad in ["", "br-", "br-../../etc/passwd", "br-0123456789bcdfgH", "br-0123456789bcdfghj"] {
            assert!(bad.parse::<BranchId>().is_err(), "{bad}");
        }
    }
}
