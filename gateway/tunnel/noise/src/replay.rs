use std::sync::atomic::{AtomicU64, Ordering};

/// Counters by which a packet may be late, as in Linux.
pub(crate) const WINDOW: u64 = 8192;

/// Counters of a slot.
const BITS: u64 = 32;

/// Enough slots for every counter of a window that begins in the middle of one.
const SLOTS: u64 = 2 * WINDOW / BITS;

/// The counters that were received with a key (RFC 6479), for any number of threads at once.
///
/// A slot has the bits of 32 counters in its lower half, and in its upper half the number of its
/// round, so that both change together. A round only ever gives way to a later one: a counter that
/// was taken is never taken again, however threads interleave.
pub(crate) struct ReplayWindow {
    /// The greatest counter that was taken, plus one.
    next: AtomicU64,
    slots: Box<[AtomicU64]>,
}

impl ReplayWindow {
    pub(crate) fn new() -> Self {
        let slots = (0..SLOTS).map(|_| AtomicU64::new(0)).collect();
        Self { next: AtomicU64::new(0), slots }
    }

    /// Returns whether a packet with that counter is worth opening.
    #[inline]
    pub(crate) fn may_take(&self, counter: u64) -> bool {
        if self.is_late(counter) {
            return false;
        }
        let (slot, round, bit) = place(counter);
        let value = self.slots[slot].load(Ordering::Relaxed);
        match age(value, round) {
            0 => value & bit == 0,
            age => age > 0,
        }
    }

    /// Takes the counter of an authentic packet. Returns false if it was taken before, or is late.
    #[inline]
    pub(crate) fn take(&self, counter: u64) -> bool {
        if self.is_late(counter) {
            return false;
        }
        let (slot, round, bit) = place(counter);
        let take = |value: u64| match age(value, round) {
            0 if value & bit == 0 => Some(value | bit),
            1.. => Some(u64::from(round) << BITS | bit),
            _ => None,
        };
        let order = Ordering::Relaxed;
        let is_new = self.slots[slot].fetch_update(order, order, take).is_ok();
        if is_new && counter >= self.next.load(order) {
            self.next.fetch_max(counter.saturating_add(1), order);
        }
        is_new
    }

    #[inline]
    fn is_late(&self, counter: u64) -> bool {
        counter.saturating_add(WINDOW) < self.next.load(Ordering::Relaxed)
    }
}

/// Slot, round and bit of a counter. Rounds begin with 1: slots of round 0 are unused.
#[inline]
fn place(counter: u64) -> (usize, u32, u64) {
    let slot = counter / BITS % SLOTS;
    let round = counter / (BITS * SLOTS) + 1;
    (slot as usize, round as u32, 1 << (counter % BITS))
}

/// Rounds by which a slot is behind `round`. The number of a round has 32 bits: it repeats after
/// 2^46 counters, which nobody sends in the life of a key, and could only refuse what is new.
#[inline]
fn age(value: u64, round: u32) -> i32 {
    round.wrapping_sub((value >> BITS) as u32) as i32
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    fn takes(window: &ReplayWindow, counter: u64) -> bool {
        let (expects, takes) = (window.may_take(counter), window.take(counter));
        assert_eq!(expects, takes, "{counter}");
        takes
    }

    #[test]
    fn each_counter_is_taken_once() {
        let window = ReplayWindow::new();
        for counter in (0..20_000).chain(5 << 40..(5 << 40) + 20_000) {
            assert!(takes(&window, counter));
            assert!(!takes(&window, counter));
        }
    }

    #[test]
    fn window_has_8192_counters() {
        for next in [8192, 8193, 8223, 100_000, 1 << 40, (1 << 60) + 77] {
            let window = ReplayWindow::new();
            assert!(takes(&window, next - 1));
            assert!(!takes(&window, next - 1));
            assert!(takes(&window, next - WINDOW), "{next}");
            assert!(!takes(&window, next - WINDOW));
            if next > WINDOW {
                assert!(!takes(&window, next - WINDOW - 1), "{next}");
            }
        }
    }

    /// Against a set, over steps of every size.
    #[test]
    fn random_counters_match_a_plain_set() {
        for seed in 1..=40u64 {
            let (window, mut taken, mut next) = (ReplayWindow::new(), HashSet::new(), 0u64);
            let mut random = seed;
            for _ in 0..20_000 {
                random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(seed | 1);
                let draw = random >> 33;
                let counter = match draw % 8 {
                    0 => next + draw % [2, 64, 9000, 70_000][draw as usize / 8 % 4],
                    1 => next.saturating_sub(draw % 20_000),
                    2 => next.saturating_sub(WINDOW + draw % 3),
                    3 => next,
                    _ => next.saturating_sub(draw % 300),
                };
                let is_new = counter + WINDOW >= next && taken.insert(counter);
                assert_eq!(takes(&window, counter), is_new, "seed {seed}, {counter}, {next}");
                next = next.max(counter + 1);
            }
        }
    }

    /// Four threads are given the same packets, in orders of their own.
    #[test]
    fn threads_take_each_counter_once() {
        const COUNTERS: u64 = 200_000;
        let window = ReplayWindow::new();
        let taken: Vec<AtomicUsize> = (0..COUNTERS).map(|_| AtomicUsize::new(0)).collect();
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let (window, taken) = (&window, &taken);
                scope.spawn(move || {
                    for i in 0..COUNTERS {
                        // Blocks of 64 in turn, each in an order of the thread's own.
                        let counter = i / 64 * 64 + (i * (2 * thread + 1) + thread * 7) % 64;
                        if window.take(counter) {
                            taken[counter as usize].fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        let more = taken.iter().filter(|count| count.load(Ordering::Relaxed) > 1).count();
        assert_eq!(more, 0, "taken more than once");
        let none = taken.iter().filter(|count| count.load(Ordering::Relaxed) == 0).count();
        // A thread that was ahead of all others by a window took what these came too late for.
        assert_eq!(none, 0, "never taken");
    }
}
