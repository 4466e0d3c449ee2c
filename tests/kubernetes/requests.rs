//! Number of requests from weft's programs to the API servers, and those that are refused.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use serde_json::Value;
use weft_tests::Kubernetes;
use weft_tests::kubernetes::Request;

use crate::pair::Pair;
use crate::peering::lease;
use crate::stage::note;

/// Longer than any program waits until it looks at everything again.
const WHILE: Duration = Duration::from_secs(35);
/// Requests of one program, a minute.
const AT_MOST: usize = 60;
const FORBIDDEN: u64 = 403;

/// Windows that are looked at until no controller took over from another one: a machine with too much to do
/// holds up the renewal of a Lease, and a controller that starts to work reads and reports everything.
const WINDOWS: usize = 3;

/// Checks the rate of requests while nothing changes. `meanwhile` may read, but change nothing.
pub(crate) fn are_few(pair: &Pair, meanwhile: impl Fn() -> Result<()>) -> Result<()> {
    for _ in 0..WINDOWS {
        let leases = pair.each(lease)?;
        let too_many = too_many(pair, &meanwhile)?;
        let terms = |leases: &[Value]| leases.iter().map(term).collect::<Vec<_>>();
        if terms(&leases) == terms(&pair.each(lease)?) {
            ensure!(too_many.is_empty(), "{too_many:#?}");
            return Ok(());
        }
        note("a controller took over meanwhile");
    }
    bail!("in {WINDOWS} windows of {WHILE:?} a controller took over from another one")
}

/// When, and after how many others, the holder of a Lease took it.
fn term(lease: &Value) -> [Value; 3] {
    ["holderIdentity", "acquireTime", "leaseTransitions"].map(|field| lease[field].clone())
}

/// Programs that send too many requests in a window.
fn too_many(pair: &Pair, meanwhile: impl Fn() -> Result<()>) -> Result<Vec<String>> {
    let began = Instant::now();
    let before = pair.each(|cluster| Ok(cluster.requests()?.len()))?;
    meanwhile()?;
    std::thread::sleep(WHILE.saturating_sub(began.elapsed()));
    let mut too_many = Vec::new();
    for (cluster, before) in pair.clusters.iter().zip(before) {
        let requests = cluster.requests()?.split_off(before);
        for (pod, what) in by_pod(&requests) {
            let rate = per_minute(what.values().sum(), began.elapsed());
            let line = format!("{rate:6} a minute: {pod} of {}", cluster.spec.id);
            note(&format!("{line} ({})", list(&what)));
            too_many.extend((rate > AT_MOST).then_some(line));
        }
    }
    Ok(too_many)
}

/// Checks that no request was refused for a missing right.
pub(crate) fn are_allowed(cluster: &Kubernetes, account: &str) -> Result<()> {
    let requests = cluster.requests()?;
    let own = requests.iter().filter(|request| is_of_a_pod(request));
    let own: Vec<_> = own.filter(|request| request.account.contains(account)).collect();
    let refused: Vec<_> = own.iter().filter(|request| request.code == FORBIDDEN).collect();
    ensure!(own.len() > 5 && refused.is_empty(), "of {} were refused {refused:#?}", own.len());
    Ok(())
}

/// Number of requests of each kind, by pod.
fn by_pod(requests: &[Request]) -> BTreeMap<&str, BTreeMap<&str, usize>> {
    let mut pods: BTreeMap<&str, BTreeMap<&str, usize>> = BTreeMap::new();
    for request in requests.iter().filter(|request| is_of_a_pod(request)) {
        *pods.entry(&request.pod).or_default().entry(&request.what).or_default() += 1;
    }
    pods
}

/// Others have no more than a token of that account.
fn is_of_a_pod(request: &Request) -> bool {
    !request.pod.is_empty()
}

fn per_minute(count: usize, time: Duration) -> usize {
    (count as f64 * 60.0 / time.as_secs_f64()).round() as usize
}

fn list(what: &BTreeMap<&str, usize>) -> String {
    what.iter().map(|(what, count)| format!("{count} {what}")).collect::<Vec<_>>().join(", ")
}
