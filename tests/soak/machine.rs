//! Times at which the machine could not do what it could when its rate was measured.

use std::fmt;
use std::time::Duration;

use weft_tests::stolen;

/// The most that the hypervisor may take from all cores together between two looks.
const MAX_STOLEN: Duration = Duration::from_millis(20);
/// The part of a second's packets that a generator may leave out because it does not get to run.
const MAX_LEFT_OUT: f64 = 0.05;

/// Observations, a second at a time.
#[derive(Default)]
pub(crate) struct Machine {
    /// Packets sent until then, and whether the machine was disturbed since the look before.
    looks: Vec<(u64, bool)>,
    stolen: Duration,
    left_out: u64,
}

impl Machine {
    pub(crate) fn new() -> Self {
        Self { stolen: stolen(), ..Self::default() }
    }

    /// Records a look, about once a second, with what a generator of `rate` packets a second has sent
    /// and left out so far.
    pub(crate) fn look(&mut self, sent: u64, left_out: u64, rate: f64) {
        let stolen = stolen();
        let is_disturbed = stolen - self.stolen > MAX_STOLEN
            || (left_out - self.left_out) as f64 > rate * MAX_LEFT_OUT;
        self.looks.push((sent, is_disturbed));
        (self.stolen, self.left_out) = (stolen, left_out);
    }

    /// Second in which a packet was sent.
    pub(crate) fn second_of(&self, packet: u64) -> usize {
        self.looks.partition_point(|(sent, _)| *sent <= packet)
    }

    /// True if packets lost in that second may be the machine's fault.
    pub(crate) fn is_cause(&self, second: usize) -> bool {
        let near = self.looks.iter().skip(second.saturating_sub(1)).take(3);
        near.into_iter().any(|(_, is_disturbed)| *is_disturbed)
    }

    /// True if the machine was quiet for long enough to judge.
    pub(crate) fn was_quiet(&self) -> bool {
        self.disturbed() * 4 < self.looks.len()
    }

    fn disturbed(&self) -> usize {
        self.looks.iter().filter(|(_, is_disturbed)| *is_disturbed).count()
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (disturbed, seconds) = (self.disturbed(), self.looks.len());
        write!(f, "the machine was disturbed in {disturbed} of {seconds} s")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loss_during_machine_stall_is_excused() {
        let mut machine = Machine::new();
        for second in 1..=20 {
            let left_out = if second < 10 { 0 } else { 1000 };
            machine.look(second * 10_000, left_out, 10_000.0);
        }
        let excused = |packet| machine.is_cause(machine.second_of(packet));
        assert!([85_000, 95_000, 105_000].into_iter().all(excused));
        assert!(![5_000, 65_000, 195_000].into_iter().any(excused));
        assert!(machine.was_quiet());
    }
}
