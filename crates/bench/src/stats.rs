//! Samples and what is said about them: medians, percentiles, and ratios with their spread.

use std::time::Duration;

/// Measured times of one thing, in seconds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples(Vec<f64>);

/// A middle with the smallest and the largest value beside it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Samples {
    pub(crate) fn push(&mut self, time: Duration) {
        self.0.push(time.as_secs_f64());
    }

    pub(crate) fn push_value(&mut self, value: f64) {
        self.0.push(value);
    }

    pub(crate) fn extend(&mut self, other: &Samples) {
        self.0.extend_from_slice(&other.0);
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn nth(&self, place: usize) -> f64 {
        self.0.get(place).copied().unwrap_or(f64::NAN)
    }

    pub(crate) fn last(&self) -> f64 {
        self.0.last().copied().unwrap_or(f64::NAN)
    }

    /// The value below which the share `q` (0 to 1) of the samples lies, by the nearest rank.
    pub(crate) fn quantile(&self, q: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (q * sorted.len() as f64).ceil() as usize;
        sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or(f64::NAN)
    }

    /// The middle sample; of an even number, the mean of the two in the middle.
    pub(crate) fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        match (sorted.len(), sorted.len() / 2) {
            (0, _) => f64::NAN,
            (n, middle) if n % 2 == 1 => sorted[middle],
            (_, middle) => f64::midpoint(sorted[middle - 1], sorted[middle]),
        }
    }

    pub(crate) fn spread(&self) -> Spread {
        let min = self.0.iter().copied().fold(f64::INFINITY, f64::min);
        let max = self.0.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        Spread { median: self.median(), min, max }
    }

    /// Each sample divided by the one of the same repetition in `other`.
    pub(crate) fn over(&self, other: &Samples) -> Samples {
        Samples(self.0.iter().zip(&other.0).map(|(ours, theirs)| ours / theirs).collect())
    }
}

/// The order of `count` candidates in repetition `round`: rotated by one each time, so that none is always first.
pub(crate) fn rotated(count: usize, round: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |place| (place + round) % count)
}

/// A time for people: `0.31 ms`, `12.4 s`.
pub(crate) fn show_seconds(seconds: f64) -> String {
    match seconds {
        s if s.is_nan() => "–".to_owned(),
        s if s < 0.000_999_5 => format!("{:.0} µs", s * 1e6),
        s if s < 0.009_995 => format!("{:.2} ms", s * 1e3),
        s if s < 0.9995 => format!("{:.1} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

/// A ratio with a sensible number of digits.
pub(crate) fn show_ratio(ratio: f64) -> String {
    match ratio {
        r if r.is_nan() => "–".to_owned(),
        r if r >= 20.0 => format!("{r:.0}"),
        r if r >= 5.0 => format!("{r:.1}"),
        r if r >= 0.1 => format!("{r:.2}"),
        r => format!("{r:.4}"),
    }
}

/// Bytes for people, in binary units.
pub(crate) fn show_bytes(bytes: f64) -> String {
    match bytes.abs() {
        b if b.is_nan() => "–".to_owned(),
        b if b < 1024.0 => format!("{bytes:.0} B"),
        b if b < 1024.0 * 1024.0 => format!("{:.1} KiB", bytes / 1024.0),
        _ => format!("{:.1} MiB", bytes / 1024.0 / 1024.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(values: &[f64]) -> Samples {
        Samples(values.to_vec())
    }

    #[test]
    fn middles_and_percentiles() {
        assert_eq!(samples(&[3.0, 1.0, 2.0]).median(), 2.0);
        assert_eq!(samples(&[4.0, 1.0, 2.0, 3.0]).median(), 2.5);
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(samples(&hundred).quantile(0.99), 99.0);
        assert_eq!(samples(&hundred).quantile(0.5), 50.0);
        assert_eq!(samples(&[7.0]).quantile(0.99), 7.0);
        assert!(samples(&[]).median().is_nan());
        assert!(samples(&[]).quantile(0.5).is_nan());
    }

    #[test]
    fn ratios_are_of_the_same_repetition() {
        let ratio = samples(&[1.0, 2.0, 9.0]).over(&samples(&[1.0, 1.0, 3.0]));
        assert_eq!(ratio.spread(), Spread { median: 2.0, min: 1.0, max: 3.0 });
    }

    #[test]
    fn every_candidate_is_first_as_often() {
        let orders: Vec<Vec<usize>> = (0..3).map(|round| rotated(3, round).collect()).collect();
        assert_eq!(orders, [[0, 1, 2], [1, 2, 0], [2, 0, 1]]);
    }

    #[test]
    fn numbers_for_people() {
        let shown: Vec<String> = [0.000_31, 0.001_2, 0.25, 12.345].map(show_seconds).into();
        assert_eq!(shown, ["310 µs", "1.20 ms", "250.0 ms", "12.35 s"]);
        let shown: Vec<String> = [0.0123, 1.018, 7.25, 431.2].map(show_ratio).into();
        assert_eq!(shown, ["0.0123", "1.02", "7.2", "431"]);
        assert_eq!(show_bytes(3.5 * 1024.0), "3.5 KiB");
    }
}
