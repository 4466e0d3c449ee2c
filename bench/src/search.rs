//! Search for the highest rate that a tunnel carries.

use anyhow::Result;

use crate::slice::Slice;

/// Range around the first guess, as a factor.
const RANGE: f64 = 4.0;
/// Rates that are tried below that range.
pub(crate) const TRIES_BELOW: u32 = 5;
/// Share of a rate below which the sender, not the tunnel, was the limit.
const SENT: f64 = 0.9;

/// Slice at the highest rate that `carried` has one for, by bisection of logarithms in `steps`.
/// `None` if it has none down to a hundredth of `guess`, in bits per second.
pub(crate) fn highest(
    guess: f64,
    steps: u32,
    mut carried: impl FnMut(f64) -> Result<Option<Slice>>,
) -> Result<Option<Slice>> {
    let (mut low, mut high, mut best) = (guess / RANGE, guess * RANGE, None);
    for _ in 0..steps {
        let rate = (low * high).sqrt();
        let Some(slice) = carried(rate)? else {
            high = rate;
            continue;
        };
        let is_sent = slice.gbit * 1e9 >= SENT * rate * slice.seconds;
        best = Some(slice);
        if !is_sent {
            return Ok(best);
        }
        low = rate;
    }
    let below = (0..TRIES_BELOW).map(|halvings| low / f64::from(1 << halvings));
    for rate in below {
        if best.is_some() {
            break;
        }
        best = carried(rate)?;
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tunnel that carries up to `limit`, and a sender that sends up to `sender`.
    fn found(guess: f64, limit: f64, sender: f64) -> (Option<f64>, usize) {
        let mut rates = 0;
        let slice = highest(guess, 7, |rate| {
            rates += 1;
            let gbit = rate.min(sender) / 1e9;
            let slice = Slice { gbit, seconds: 1.0, ..Slice::default() };
            Ok((gbit * 1e9 <= limit).then_some(slice))
        });
        (slice.unwrap().map(|slice| slice.gbit * 1e9), rates)
    }

    #[test]
    fn highest_rate_is_found_above_and_below_the_guess() {
        for limit in [0.3e9, 0.9e9, 1.0e9, 3.9e9] {
            let (rate, rates) = found(1e9, limit, 1e12);
            let share = rate.unwrap() / limit;
            assert!((0.97..=1.0).contains(&share), "{limit}: {share}");
            assert_eq!(rates, 7);
        }
    }

    #[test]
    fn slow_sender_ends_the_search() {
        assert_eq!(found(1e9, 1e12, 0.5e9), (Some(0.5e9), 1));
    }

    #[test]
    fn far_lower_rates_are_tried_last() {
        let (rate, _) = found(1e9, 0.1e9, 1e12);
        assert!((0.05e9..=0.1e9).contains(&rate.unwrap()), "{rate:?}");
        assert_eq!(found(1e9, 1.0, 1e12), (None, 12));
    }
}
