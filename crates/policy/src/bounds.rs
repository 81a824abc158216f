//! The smallest value of each setting that has one: what is below is refused, never raised in silence. Pure.

use crate::Config;
use crate::grant::MIN;

/// A setting with a smallest value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// The setting's dotted name.
    pub key: &'static str,
    /// Its smallest value.
    pub least: u64,
    /// What 0 means, where it is allowed besides.
    pub zero: Option<&'static str>,
}

/// A setting whose value can't be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{key}` {problem}")]
pub struct BadValue {
    /// The setting's dotted name.
    pub key: &'static str,
    /// What is wrong with its value.
    pub problem: String,
    /// What it may be.
    pub allowed: String,
}

impl Bound {
    /// A bound without a meaning of 0.
    pub const fn from(key: &'static str, least: u64) -> Self {
        Bound { key, least, zero: None }
    }

    /// A bound where 0 means something else.
    pub const fn or_zero(key: &'static str, least: u64, zero: &'static str) -> Self {
        Bound { key, least, zero: Some(zero) }
    }

    /// Checks a value.
    pub fn check(&self, value: u64) -> Result<(), BadValue> {
        let Bound { key, least, zero } = *self;
        if value >= least || (value == 0 && zero.is_some()) {
            return Ok(());
        }
        let zero = zero.map(|meaning| format!(", or 0: {meaning}")).unwrap_or_default();
        let problem = format!("is {value}, less than the smallest value, {least}");
        Err(BadValue { key, problem, allowed: format!("write {least} or more{zero}") })
    }
}

const NO_BOUND: &str = "no bound";

/// The bounds of policy's settings.
pub const BOUNDS: [Bound; 10] = [
    Bound::or_zero("limits.cpu_milli", MIN.cpu_milli as u64, "all CPUs"),
    Bound::or_zero("limits.memory_bytes_max", MIN.memory_bytes_max, "three quarters of the host's memory"),
    Bound::from("limits.pids_max", MIN.pids_max as u64),
    Bound::from("limits.disk_bytes_max", MIN.disk_bytes_max),
    Bound::from("limits.wall_ms_max", MIN.wall_ms_max),
    Bound::or_zero("limits_max.cpu_milli", MIN.cpu_milli as u64, NO_BOUND),
    Bound::or_zero("limits_max.memory_bytes_max", MIN.memory_bytes_max, NO_BOUND),
    Bound::or_zero("limits_max.pids_max", MIN.pids_max as u64, NO_BOUND),
    Bound::or_zero("limits_max.disk_bytes_max", MIN.disk_bytes_max, NO_BOUND),
    Bound::or_zero("limits_max.wall_ms_max", MIN.wall_ms_max, NO_BOUND),
];

/// What `hand.tolerate` may name.
const TOLERABLE: [&str; 1] = ["landlock"];

impl Config {
    /// Checks what types alone don't.
    pub fn check(&self) -> Result<(), BadValue> {
        let (limits, most, hand) = (&self.limits, &self.limits_max, &self.hand);
        let values = [
            u64::from(limits.cpu_milli),
            limits.memory_bytes_max,
            u64::from(limits.pids_max),
            limits.disk_bytes_max,
            limits.wall_ms_max,
            u64::from(most.cpu_milli),
            most.memory_bytes_max,
            u64::from(most.pids_max),
            most.disk_bytes_max,
            most.wall_ms_max,
        ];
        BOUNDS.iter().zip(values).try_for_each(|(bound, value)| bound.check(value))?;
        for (key, id) in [("hand.uid", hand.uid), ("hand.gid", hand.gid)] {
            // The last one means "leave it as it is" to the kernel, which is root's.
            if id == 0 || id == u32::MAX {
                let problem = format!("is {id}: code in a hand must be nobody's that matters");
                let allowed = format!("write one that owns nothing, from 1 to {}", u32::MAX - 1);
                return Err(BadValue { key, problem, allowed });
            }
        }
        if let Some(word) = hand.tolerate.iter().find(|word| !TOLERABLE.contains(&word.as_str())) {
            let problem = format!("names `{word}`, which is no protection that may be missing");
            return Err(BadValue {
                key: "hand.tolerate",
                problem,
                allowed: format!("known here: {}", TOLERABLE.join(", ")),
            });
        }
        if let Some(path) = hand.read_only.iter().find(|path| !path.starts_with('/')) {
            let problem = format!("names `{path}`, which is not a path from the root");
            return Err(BadValue { key: "hand.read_only", problem, allowed: "begin it with /".into() });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_below_the_smallest_is_refused_by_its_name() {
        for bound in BOUNDS {
            let set = |value: u64| {
                let (section, name) = bound.key.split_once('.').unwrap();
                let text = format!(r#"{{"{section}": {{"{name}": {value}}}}}"#);
                serde_json::from_str::<Config>(&text).unwrap().check()
            };
            assert_eq!(set(bound.least), Ok(()), "{}", bound.key);
            assert_eq!(set(0).is_ok(), bound.zero.is_some(), "{}", bound.key);
            if bound.least > 1 {
                let bad = set(bound.least - 1).unwrap_err();
                assert_eq!(bad.key, bound.key);
                assert!(bad.to_string().contains(&format!("the smallest value, {}", bound.least)), "{bad}");
            }
        }
        let bad = serde_json::from_str::<Config>(r#"{"limits": {"wall_ms_max": 0}}"#).unwrap().check();
        let bad = bad.unwrap_err();
        assert_eq!(bad.to_string(), "`limits.wall_ms_max` is 0, less than the smallest value, 1");
        assert_eq!(bad.allowed, "write 1 or more");
    }

    #[test]
    fn words_that_mean_nothing_are_refused() {
        for (text, key) in [
            (r#"{"hand": {"tolerate": ["landlok"]}}"#, "hand.tolerate"),
            (r#"{"hand": {"read_only": ["opt"]}}"#, "hand.read_only"),
            (r#"{"hand": {"uid": 0}}"#, "hand.uid"),
            (r#"{"hand": {"gid": 4294967295}}"#, "hand.gid"),
        ] {
            assert_eq!(serde_json::from_str::<Config>(text).unwrap().check().unwrap_err().key, key);
        }
        assert_eq!(Config::default().check(), Ok(()));
    }
}
