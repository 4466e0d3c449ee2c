//! Common beginning of all tests of clusters.

use std::io::Write;
use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use weft_tests::kubernetes::require_kubernetes;
use weft_tests::{ClusterSpec, Kubernetes, Lab, skip};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Runs a test once no other runs, or reports why it cannot run here.
pub(crate) fn play(test: impl FnOnce() -> Result<()>) -> Result<()> {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    match require_kubernetes() {
        Ok(()) => test(),
        Err(why) => {
            skip(&format!("{why:#}"));
            Ok(())
        }
    }
}

/// Runs a part of a test, and prints how long that took, past the test runner.
pub(crate) fn step<T>(what: &str, f: impl FnOnce() -> Result<T>) -> Result<T> {
    let began = Instant::now();
    let result = f().with_context(|| what.to_owned())?;
    note_time(began.elapsed(), what);
    Ok(result)
}

/// Prints how long something took, past the test runner.
pub(crate) fn note_time(took: Duration, what: &str) {
    note(&format!("{:6.1} s  {what}", took.as_secs_f64()));
}

/// Prints something past the test runner.
pub(crate) fn note(what: &str) {
    let _ = std::io::stderr().write_all(format!("{what}\n").as_bytes());
}

/// Rome and milan, with the same prefixes for pods and services, on one segment.
///
/// ```text
///   pods -- rome-1, rome-2 (192.0.2.17, .18) --[ switch ]-- milan-1, milan-2 (192.0.2.33, .34) -- pods
/// ```
pub(crate) fn rome_and_milan(lab: &Lab) -> Result<[Kubernetes; 2]> {
    rome_and_milan_of(lab, 2)
}

/// The same, with so many nodes each.
pub(crate) fn rome_and_milan_of(lab: &Lab, nodes: u8) -> Result<[Kubernetes; 2]> {
    all_of(lab, rome_and_milan_specs(nodes))
}

pub(crate) fn rome_and_milan_specs(nodes: u8) -> [ClusterSpec; 2] {
    [("rome", 1), ("milan", 2)].map(|(id, n)| ClusterSpec::new(id, n, nodes))
}

/// Starts clusters side by side.
pub(crate) fn all_of<const N: usize>(
    lab: &Lab,
    specs: [ClusterSpec; N],
) -> Result<[Kubernetes; N]> {
    let clusters = std::thread::scope(|scope| {
        let threads = specs.map(|spec| scope.spawn(|| Kubernetes::start(lab, spec)));
        threads.map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
    });
    let clusters: Vec<_> = clusters.into_iter().collect::<Result<_>>()?;
    clusters.try_into().ok().context("as many clusters as specs")
}

/// Does something on all clusters at once.
pub(crate) fn each<T: Send>(
    clusters: &[Kubernetes],
    f: impl Fn(&Kubernetes) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = clusters.iter().map(|one| scope.spawn(|| f(one))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<T>>| {
            thread.join().unwrap_or_else(|panic| resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    })
}
