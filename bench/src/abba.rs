//! Two tunnels in turns, in one run: nothing else can be compared on a machine that others share.

use anyhow::Result;

use crate::line::Figure;
use crate::slice::Slice;
use crate::statistics::{Ratio, median};

/// Slices in the order A B, B A, A B, …: what drifts slowly hits both alike, and neighbours across
/// two pairs are of the same tunnel, which gives the control for nothing.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) pairs: Vec<Pair>,
}

#[derive(Clone, Debug)]
pub(crate) struct Pair {
    /// Slices of A and of B.
    pub(crate) slices: [Slice; 2],
    a_first: bool,
}

impl Pair {
    fn is_sound(&self) -> bool {
        self.slices.iter().all(Slice::is_sound)
    }

    fn last(&self) -> &Slice {
        &self.slices[usize::from(self.a_first)]
    }

    fn first(&self) -> &Slice {
        &self.slices[usize::from(!self.a_first)]
    }
}

impl Outcome {
    /// Pairs that were not disturbed.
    pub(crate) fn sound(&self) -> impl Iterator<Item = &Pair> {
        self.pairs.iter().filter(|pair| pair.is_sound())
    }

    /// Figure of A and of B, for each sound pair.
    pub(crate) fn values(&self, figure: Figure) -> Vec<[f64; 2]> {
        self.sound().map(|pair| pair.slices.each_ref().map(|slice| figure.of(slice))).collect()
    }

    /// A over B. `None` if they have none, such as that of two zeros.
    pub(crate) fn ratio(&self, figure: Figure) -> Option<Ratio> {
        let ratios = self.values(figure).into_iter().map(|[a, b]| a / b);
        Ratio::of(&ratios.filter(is_comparable).collect::<Vec<_>>())
    }

    /// Neighbouring slices of the same tunnel: what this machine calls equal.
    pub(crate) fn control(&self, figure: Figure) -> Option<Ratio> {
        let neighbours = self.pairs.windows(2).filter_map(|two| {
            let [before, after] = two else { return None };
            let (one, other) = (before.last(), after.first());
            let sound = one.is_sound() && other.is_sound();
            sound.then(|| figure.of(one) / figure.of(other))
        });
        Ratio::of(&neighbours.filter(is_comparable).collect::<Vec<_>>())
    }

    /// Medians of a figure, of A and of B.
    pub(crate) fn medians(&self, figure: impl Fn(&Slice) -> f64) -> [f64; 2] {
        [0, 1].map(|side| {
            let values: Vec<_> = self.sound().map(|pair| figure(&pair.slices[side])).collect();
            median(&values).unwrap_or(f64::NAN)
        })
    }
}

fn is_comparable(ratio: &f64) -> bool {
    ratio.is_finite() && *ratio > 0.0
}

/// Lets the two take turns until there are `pairs` sound pairs; after half as many more tries the
/// pairs so far have to do. `measure` takes one slice of the one or the other.
pub(crate) fn run(
    pairs: usize,
    mut measure: impl FnMut(usize) -> Result<Slice>,
) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    while outcome.sound().count() < pairs && outcome.pairs.len() < max_pairs(pairs) {
        let a_first = outcome.pairs.len() % 2 == 0;
        let slices = if a_first {
            let a = measure(0)?;
            [a, measure(1)?]
        } else {
            let b = measure(1)?;
            [measure(0)?, b]
        };
        outcome.pairs.push(Pair { slices, a_first });
    }
    Ok(outcome)
}

/// Pairs that are tried for so many sound ones.
pub(crate) fn max_pairs(pairs: usize) -> usize {
    pairs + pairs.div_ceil(2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Figure::Throughput;

    fn slice(gbit: f64, steal_share: f64) -> Slice {
        Slice { gbit, seconds: 2.0, steal_share, ..Slice::default() }
    }

    fn pair(a: Slice, b: Slice, a_first: bool) -> Pair {
        Pair { slices: [a, b], a_first }
    }

    #[test]
    fn disturbed_pairs_do_not_count() {
        let clean = pair(slice(8.0, 0.0), slice(4.0, 0.01), true);
        let disturbed = pair(slice(8.0, 0.011), slice(1.0, 0.0), false);
        let outcome = Outcome { pairs: vec![clean.clone(), disturbed, clean] };
        assert_eq!(outcome.values(Throughput), [[4.0, 2.0]; 2]);
        assert_eq!(outcome.medians(|slice| slice.gbit), [8.0, 4.0]);
        assert!((outcome.ratio(Throughput).unwrap().median - 2.0).abs() < 1e-9);
    }

    #[test]
    fn control_compares_adjacent_slices_of_one_tunnel() {
        let ab = pair(slice(8.0, 0.0), slice(4.0, 0.0), true);
        let ba = pair(slice(10.0, 0.0), slice(5.0, 0.0), false);
        // A 8, B 4 | B 5, A 10 | A 8, B 4
        let outcome = Outcome { pairs: vec![ab.clone(), ba, ab] };
        let control = outcome.control(Throughput).unwrap();
        assert!((control.low - 0.8).abs() < 1e-9 && (control.high - 1.25).abs() < 1e-9);
    }

    #[test]
    fn turns_are_in_abba_order_and_bounded() {
        let mut turns = Vec::new();
        let outcome = run(4, |side| {
            turns.push(side);
            Ok(slice(1.0, 0.5))
        });
        assert_eq!(outcome.unwrap().pairs.len(), max_pairs(4));
        assert_eq!(turns[..6], [0, 1, 1, 0, 0, 1]);
    }

    #[test]
    fn zeros_have_no_ratio() {
        let none = pair(slice(1.0, 0.0), slice(1.0, 0.0), true);
        let outcome = Outcome { pairs: vec![none] };
        assert_eq!(outcome.ratio(Figure::RetransmitsPerGbit), None);
    }
}
