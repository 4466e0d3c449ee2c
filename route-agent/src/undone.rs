//! Steps that another program keeps undoing.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use fabric_api::fabric::UndoneStep;
use jiff::Timestamp;
use netlink::ChurnLimiter;
use netplan::{Firewall, State};

/// So many of one step within this time are no accident. More rarely, hardly a packet is lost.
const MANY: usize = 4;
const WINDOW: Duration = Duration::from_secs(10);
/// Shortest time without one after which it is solved.
const MIN_QUIET: Duration = Duration::from_secs(2);

/// State that was set last, and the times at which each step to it was found undone.
#[derive(Debug, Default)]
pub(crate) struct Undone {
    set: Option<(State, Firewall)>,
    found: BTreeMap<String, VecDeque<Instant>>,
    named: Option<UndoneStep>,
    limiter: ChurnLimiter,
}

impl Undone {
    /// Takes in that this is to be set, and the first step that was needed for it. If all of it had been
    /// set before, another program undid that.
    pub(crate) fn note(&mut self, want: (&State, &Firewall), step: Option<String>, now: Instant) {
        if step.is_some() {
            self.limiter.note();
        }
        let is_known = self.set.as_ref().is_some_and(|(state, firewall)| (state, firewall) == want);
        if !is_known {
            self.set = Some((want.0.clone(), want.1.clone()));
        } else if let Some(step) = step {
            let times = self.found.entry(step.clone()).or_default();
            times.push_back(now);
            if times.len() > MANY {
                times.pop_front();
            }
            if times.len() == MANY && now - times[0] < WINDOW {
                let since = Timestamp::now() - (now - times[0]);
                // One of several, which do not take turns in the status.
                self.named.get_or_insert_with(|| UndoneStep { step, since: format!("{since:.3}") });
            }
            let named = self.named.as_ref().map(|named| &named.step);
            self.found.retain(|step, times| {
                named == Some(step) || times.back().is_some_and(|last| now - *last < WINDOW)
            });
        }
    }

    /// Takes in that not all was set, so that the same steps are needed again.
    pub(crate) fn forget(&mut self) {
        self.set = None;
    }

    /// Forgets all steps. Their rate still counts.
    pub(crate) fn clear(&mut self) {
        *self = Self { limiter: std::mem::take(&mut self.limiter), ..Self::default() };
    }

    /// Waits a moment if there were too many steps.
    pub(crate) async fn throttle(&mut self) {
        self.limiter.throttle().await;
    }

    /// Time at which it is solved if nothing happens.
    pub(crate) fn due(&self) -> Option<Instant> {
        let times = self.found.get(&self.named.as_ref()?.step);
        let (first, last) = times.and_then(|times| Some((*times.front()?, *times.back()?)))?;
        // As long as two of them take.
        let quiet = (last - first) * 2 / 3;
        Some(last + quiet.max(MIN_QUIET))
    }

    /// The step that is undone again and again.
    pub(crate) fn named(&mut self, now: Instant) -> Option<UndoneStep> {
        if self.due().is_some_and(|due| now >= due) {
            self.named = None;
            self.found.clear();
        }
        self.named.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Steps found undone at these times, in milliseconds.
    fn undone(times: &[u32]) -> (Undone, Instant) {
        let (mut undone, start) = (Undone::default(), Instant::now());
        let want = (State::default(), Firewall::default());
        undone.note((&want.0, &want.1), Some("ip link add weft4".to_owned()), start);
        for time in times {
            let now = start + *time * Duration::from_millis(1);
            undone.note((&want.0, &want.1), Some("ip rule add".to_owned()), now);
        }
        (undone, start)
    }

    #[test]
    fn step_that_is_needed_again_and_again_is_named() {
        let (mut three, start) = undone(&[0, 200, 400]);
        assert_eq!(three.named(start + SECOND), None);
        let (mut four, start) = undone(&[0, 200, 400, 600]);
        assert_eq!(four.named(start + SECOND).unwrap().step, "ip rule add");
        assert_eq!(four.due(), Some(start + 13 * SECOND / 5));
        assert_eq!(four.named(start + 3 * SECOND), None, "solved");
        assert_eq!(four.due(), None);
    }

    #[test]
    fn steps_undone_once_each_are_nobodys_habit() {
        let (mut undone, start) = undone(&[0, 200, 400]);
        let want = (State::default(), Firewall::default());
        let flushed = "ip route replace".to_owned();
        undone.note((&want.0, &want.1), Some(flushed), start + SECOND);
        assert_eq!(undone.named(start + SECOND), None);
    }

    #[test]
    fn named_step_is_solved_though_another_follows_late() {
        let (mut undone, start) = undone(&[0, 200, 400, 600]);
        let (want, later) = ((State::default(), Firewall::default()), start + 20 * SECOND);
        undone.note((&want.0, &want.1), Some("ip link set".to_owned()), later);
        assert_eq!(undone.named(later), None);
    }

    #[test]
    fn slow_undoing_is_named_for_longer() {
        let (mut slow, start) = undone(&[0, 3000, 6000, 9000]);
        assert!(slow.named(start + 14 * SECOND).is_some());
        assert!(slow.named(start + 16 * SECOND).is_none());
        let (mut rare, start) = undone(&[0, 5000, 10_000, 15_000, 20_000]);
        assert_eq!(rare.named(start + 20 * SECOND), None);
    }

    #[test]
    fn own_changes_and_failures_are_nobodys_undoing() {
        let (mut undone, now) = (Undone::default(), Instant::now());
        let step = || Some("ip rule add".to_owned());
        let (state, mut firewall) = (State::default(), Firewall::default());
        for number in 0..10 {
            firewall.local_pods = [format!("10.200.{number}.0/24").parse().unwrap()].into();
            undone.note((&state, &firewall), step(), now);
        }
        for _ in 0..10 {
            undone.forget();
            undone.note((&state, &firewall), step(), now);
        }
        assert_eq!(undone.named(now), None);
    }
}
