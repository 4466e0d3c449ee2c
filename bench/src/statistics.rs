//! Medians and how far they can be trusted.

use serde::{Deserialize, Serialize};

/// Resamples that the interval is taken from; more changes nothing in the second digit.
const RESAMPLES: usize = 10_000;

/// A ratio and the interval in which its true value lies with 95 % confidence.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Ratio {
    pub(crate) median: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

impl Ratio {
    /// The median of `ratios` with its bootstrap interval (percentile method). `None` if empty.
    ///
    /// Ratios are compared as logarithms: twice as fast and half as fast are equally far from 1.
    pub(crate) fn of(ratios: &[f64]) -> Option<Self> {
        let logs: Vec<f64> = ratios.iter().map(|ratio| ratio.ln()).collect();
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let mut medians: Vec<f64> = (0..RESAMPLES)
            .map(|_| {
                let resample: Vec<f64> = logs
                    .iter()
                    .filter_map(|_| logs.get(random.below(logs.len())).copied())
                    .collect();
                median(&resample)
            })
            .collect::<Option<_>>()?;
        medians.sort_by(f64::total_cmp);
        let at = |share: f64| medians.get((share * RESAMPLES as f64) as usize).copied();
        Some(Self { median: median(&logs)?.exp(), low: at(0.025)?.exp(), high: at(0.975)?.exp() })
    }
}

pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let upper = *sorted.get(middle)?;
    if sorted.len() % 2 == 1 { Some(upper) } else { Some((sorted[middle - 1] + upper) / 2.0) }
}

/// Smallest of the values, which are in ascending order, that at least this share does not exceed.
pub(crate) fn percentile(sorted: &[f64], share: f64) -> Option<f64> {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

/// Xorshift64: always the same draw, so that the same slices give the same report.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_even_count_is_mean_of_middle_two() {
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[]), None);
        assert_eq!(Ratio::of(&[]), None);
    }

    #[test]
    fn percentile_is_the_nearest_rank() {
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(
            [0.0, 0.5, 0.99, 0.991, 1.0].map(|share| percentile(&hundred, share)),
            [Some(1.0), Some(50.0), Some(99.0), Some(100.0), Some(100.0)]
        );
        assert_eq!((percentile(&[7.0], 0.99), percentile(&[], 0.5)), (Some(7.0), None));
    }

    #[test]
    fn clear_difference_excludes_one_noise_does_not() {
        let noise = [0.93, 1.06, 1.02, 0.97, 1.05, 0.99, 0.96, 1.04, 1.01, 0.98];
        let none = Ratio::of(&noise).unwrap();
        assert!(none.low < 1.0 && none.high > 1.0, "{none:?}");
        let twice = Ratio::of(&noise.map(|ratio| 2.0 * ratio)).unwrap();
        assert!(twice.low > 1.0 && (1.9..2.1).contains(&twice.median), "{twice:?}");
        assert!(twice.low <= twice.median && twice.median <= twice.high);
    }

    #[test]
    fn swapping_the_two_sides_inverts_the_ratio() {
        let ratios = [1.8, 2.2, 2.0, 2.4, 1.9];
        let (there, back) =
            (Ratio::of(&ratios).unwrap(), Ratio::of(&ratios.map(f64::recip)).unwrap());
        assert!((there.median * back.median - 1.0).abs() < 1e-9);
        assert!((there.low * back.high - 1.0).abs() < 0.05);
    }
}
