//! Sequence numbers of datagrams: new ones, reordered ones, duplicates.

/// Numbers below the highest one that are remembered.
const WINDOW: u64 = 1 << 16;

/// Place of a datagram among those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    InOrder,
    /// After one with a higher number.
    Reordered,
    Duplicate,
}

/// Highest number so far, and a bit for each of the [`WINDOW`] numbers up to it.
pub(super) struct Sequence {
    next: u64,
    seen: Vec<bool>,
}

impl Sequence {
    pub(super) fn new() -> Self {
        Self { next: 0, seen: vec![false; WINDOW as usize] }
    }

    /// Records a number. One that has left the window counts as reordered: it may be a duplicate.
    pub(super) fn observe(&mut self, number: u64) -> Arrival {
        if number >= self.next {
            let first = self.next.max((number + 1).saturating_sub(WINDOW));
            for missing in first..number {
                self.mark(missing, false);
            }
            self.mark(number, true);
            self.next = number + 1;
            return Arrival::InOrder;
        }
        if self.next - number > WINDOW {
            return Arrival::Reordered;
        }
        match self.mark(number, true) {
            true => Arrival::Duplicate,
            false => Arrival::Reordered,
        }
    }

    /// Returns what was there before.
    fn mark(&mut self, number: u64, seen: bool) -> bool {
        std::mem::replace(&mut self.seen[(number % WINDOW) as usize], seen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Arrival::{Duplicate, InOrder, Reordered};

    fn arrivals(numbers: &[u64]) -> Vec<Arrival> {
        let mut sequence = Sequence::new();
        numbers.iter().map(|number| sequence.observe(*number)).collect()
    }

    #[test]
    fn reordered_and_duplicate_are_distinguished() {
        assert_eq!(arrivals(&[0, 1, 2]), [InOrder; 3]);
        assert_eq!(
            arrivals(&[0, 3, 1, 1, 3, 2, 4]),
            [InOrder, InOrder, Reordered, Duplicate, Duplicate, Reordered, InOrder]
        );
    }

    #[test]
    fn numbers_of_an_earlier_lap_are_forgotten() {
        let lap = WINDOW;
        assert_eq!(
            arrivals(&[5, lap + 7, 9 + lap, lap + 8]),
            [InOrder, InOrder, InOrder, Reordered]
        );
        // 5 is in the slot of lap + 5, which has not arrived yet.
        assert_eq!(arrivals(&[5, lap + 6, lap + 5]), [InOrder, InOrder, Reordered]);
        assert_eq!(arrivals(&[0, 3 * lap, 0]), [InOrder, InOrder, Reordered]);
    }
}
