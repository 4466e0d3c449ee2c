//! Health of a program's loops: whether they turn, and whether their work has begun.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};

/// Checks of a [`Heartbeat`] are this far apart.
const CHECK: Duration = Duration::from_secs(1);
/// Checks in a row without a beat after which a loop counts as hung. The longest step of a loop
/// between two beats is a request of 5 s, or a change of the packet filter.
const LIMIT: u32 = 30;

/// Counter that a loop increments in every turn. Clones share it.
#[derive(Clone, Debug)]
pub struct Heartbeat {
    name: &'static str,
    beats: Arc<AtomicU64>,
}

impl Default for Heartbeat {
    fn default() -> Self {
        Self::of("main")
    }
}

impl Heartbeat {
    /// Longest time that a loop that has nothing to do waits before it beats again.
    pub const INTERVAL: Duration = Duration::from_secs(5);

    /// Heartbeat of the loop with this name.
    pub fn of(name: &'static str) -> Self {
        Self { name, beats: Arc::default() }
    }

    pub fn beat(&self) {
        self.beats.fetch_add(1, Ordering::Relaxed);
    }

    /// Awaits a future that does nothing but wait, and beats meanwhile.
    pub async fn while_waiting<T>(&self, waiting: impl Future<Output = T>) -> T {
        tokio::pin!(waiting);
        let mut beats = interval(Self::INTERVAL);
        loop {
            tokio::select! {
                done = &mut waiting => return done,
                _ = beats.tick() => self.beat(),
            }
        }
    }

    /// Number of beats so far.
    pub fn beats(&self) -> u64 {
        self.beats.load(Ordering::Relaxed)
    }
}

/// Counts checks without a beat. Time is not compared: while the whole host stands still (a virtual
/// machine that is moved, a laptop that sleeps) there are no checks either, so no loop is hung
/// afterwards.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watchdog {
    heartbeat: Heartbeat,
    missed: Arc<AtomicU32>,
}

impl Watchdog {
    pub(crate) fn new(heartbeat: Heartbeat) -> Self {
        Self { heartbeat, missed: Arc::default() }
    }

    /// Checks without end.
    pub(crate) async fn run(self) {
        let mut checks = interval(CHECK);
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last = self.heartbeat.beats();
        loop {
            checks.tick().await;
            let beats = self.heartbeat.beats();
            let missed = if beats == last { self.missed.load(Ordering::Relaxed) + 1 } else { 0 };
            self.missed.store(missed, Ordering::Relaxed);
            last = beats;
        }
    }

    /// Fails with the cause for which the program should be restarted.
    pub(crate) fn alive(&self) -> Result<(), String> {
        let missed = self.missed.load(Ordering::Relaxed);
        if missed < LIMIT {
            return Ok(());
        }
        Err(format!("the {} loop has not turned for {missed} s", self.heartbeat.name))
    }
}

/// State that `/readyz` reports: the parts that are missing, and why. Ready once there is none. Clones
/// share it.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<Mutex<BTreeMap<&'static str, String>>>);

impl Readiness {
    /// Adds a part that is missing, or replaces why it is.
    pub fn missing(&self, part: &'static str, why: impl Into<String>) {
        self.parts().insert(part, why.into());
    }

    /// Removes a part that is there now.
    pub fn fulfilled(&self, part: &'static str) {
        self.parts().remove(part);
    }

    pub fn state(&self) -> Result<(), String> {
        let parts = self.parts();
        let missing: Vec<_> = parts.iter().map(|(part, why)| format!("{part}: {why}")).collect();
        if missing.is_empty() { Ok(()) } else { Err(missing.join("\n")) }
    }

    fn parts(&self) -> MutexGuard<'_, BTreeMap<&'static str, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::{advance, sleep, timeout};

    use super::*;

    fn watchdog() -> (Heartbeat, Watchdog) {
        let heartbeat = Heartbeat::default();
        let watchdog = Watchdog::new(heartbeat.clone());
        tokio::spawn(watchdog.clone().run());
        (heartbeat, watchdog)
    }

    #[tokio::test(start_paused = true)]
    async fn hung_loop_is_unhealthy_until_next_beat() {
        let (heartbeat, watchdog) = watchdog();
        sleep(CHECK * (LIMIT - 2)).await;
        assert_eq!(watchdog.alive(), Ok(()));
        sleep(CHECK * 4).await;
        assert!(watchdog.alive().unwrap_err().contains("has not turned"));
        heartbeat.beat();
        sleep(CHECK * 2).await;
        assert_eq!(watchdog.alive(), Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn loop_that_waits_for_an_hour_is_alive() {
        let (heartbeat, watchdog) = watchdog();
        let hour = Duration::from_secs(3600);
        let waited = timeout(hour, heartbeat.while_waiting(pending::<()>())).await;
        assert!(waited.is_err());
        assert_eq!(watchdog.alive(), Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn host_that_stood_still_has_no_hung_loop() {
        let (_heartbeat, watchdog) = watchdog();
        sleep(CHECK * 2).await;
        advance(Duration::from_secs(3600)).await;
        sleep(CHECK).await;
        assert_eq!(watchdog.alive(), Ok(()));
    }
}
