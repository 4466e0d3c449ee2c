//! The peer's endpoint: a client's server by address or DNS name, a server's client as remembered.

use std::net::SocketAddr;
use std::time::Duration;

use jiff::Timestamp;
use tokio::net::lookup_host;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::config::desired::Endpoint;
use crate::config::input::Input;
use crate::liveness::health::{Fault, Reason};
use crate::state::{TimedFault, View};

/// Time until a name that did not resolve, or one that did, is looked up again.
const RETRY: Duration = Duration::from_secs(2);
/// Time for an answer of the resolver until that is reported as a fault.
const SLOW: Duration = Duration::from_millis(1500);
const REFRESH: Duration = Duration::from_secs(300);

/// Keeps `found` on the peer's address until `stop`.
pub async fn run(
    mut inputs: watch::Receiver<Input>,
    mut views: watch::Receiver<View>,
    (found, lookups): (watch::Sender<Option<SocketAddr>>, watch::Sender<Option<TimedFault>>),
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let mut retries = views.borrow().retries;
    let mut wanted = None;
    let mut lookup_at = Instant::now();
    loop {
        let input = inputs.borrow_and_update().clone();
        let endpoint = input.desired.as_ref().map(|desired| desired.endpoint.clone());
        if endpoint != wanted {
            wanted = endpoint;
            lookup_at = Instant::now();
        }
        match &wanted {
            Some(Some(endpoint)) if lookup_at <= Instant::now() => {
                // A resolver that does not answer keeps nobody from correcting the name.
                let (candidates, complete) = tokio::select! {
                    biased;
                    () = stop.cancelled() => return Ok(()),
                    changed = inputs.changed() => {
                        changed?;
                        continue;
                    }
                    found = resolve(endpoint, &lookups) => found,
                };
                let lost = views.borrow_and_update().retries != retries;
                retries = views.borrow().retries;
                settle(&found, &candidates, lost);
                lookup_at = Instant::now() + if complete { REFRESH } else { RETRY };
            }
            Some(Some(_)) => {}
            Some(None) => {
                report(&lookups, None);
                set(&found, input.remembered.peer);
            }
            None => {}
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => return Ok(()),
            changed = inputs.changed() => changed?,
            lost = lost(&mut views, retries) => {
                lost?;
                lookup_at = Instant::now();
                if !matches!(wanted, Some(Some(_))) {
                    retries = views.borrow().retries;
                }
            }
            () = sleep_until(lookup_at), if matches!(wanted, Some(Some(_))) => {}
        }
    }
}

/// Returns when the peer was given up once more.
async fn lost(
    views: &mut watch::Receiver<View>,
    retries: u64,
) -> Result<(), watch::error::RecvError> {
    views.wait_for(|view| view.retries != retries).await.map(|_| ())
}

/// All addresses of the peer in order, and whether every name resolved.
async fn resolve(
    endpoint: &Endpoint,
    lookups: &watch::Sender<Option<TimedFault>>,
) -> (Vec<SocketAddr>, bool) {
    let (mut candidates, mut fault) = (Vec::new(), None);
    for host in &endpoint.hosts {
        if let Ok(address) = host.parse() {
            candidates.push(SocketAddr::new(address, endpoint.port));
            continue;
        }
        let lookup = lookup_host((host.as_str(), endpoint.port));
        tokio::pin!(lookup);
        let answer = match timeout(SLOW, &mut lookup).await {
            Ok(answer) => answer,
            Err(_) => {
                report(lookups, Some(unresolved(host, "the resolver does not answer")));
                lookup.await
            }
        };
        match answer {
            Ok(found) => candidates.extend(found),
            Err(error) => {
                tracing::debug!(host, %error, "cannot resolve the peer's name, trying again");
                fault = Some(unresolved(host, &error.to_string()));
            }
        }
    }
    let complete = fault.is_none() && !candidates.is_empty();
    report(lookups, fault);
    (candidates, complete)
}

fn unresolved(host: &str, error: &str) -> Fault {
    Fault {
        reason: Reason::NameNotResolved,
        message: format!("spec.endpoint: the name {host} does not resolve: {error}"),
        remedy: "correct spec.endpoint.addresses of the GatewayClient, or the DNS record"
            .to_owned(),
    }
}

/// Publishes the fault, or that there is none any more.
fn report(lookups: &watch::Sender<Option<TimedFault>>, fault: Option<Fault>) {
    lookups.send_if_modified(|current| {
        if current.as_ref().map(|known| &known.fault) == fault.as_ref() {
            return false;
        }
        if let Some(fault) = &fault {
            tracing::warn!("{}", fault.message);
        }
        *current = fault.map(|fault| TimedFault { fault, since: Timestamp::now() });
        true
    });
}

/// Stays on an address that is still among the candidates, unless the peer is lost there: then
/// the next one gets its turn. Names that no longer resolve change nothing.
fn settle(found: &watch::Sender<Option<SocketAddr>>, candidates: &[SocketAddr], lost: bool) {
    let current = *found.borrow();
    let next = choose(current, candidates, lost);
    if next.is_some() {
        set(found, next);
    }
}

fn choose(
    current: Option<SocketAddr>,
    candidates: &[SocketAddr],
    lost: bool,
) -> Option<SocketAddr> {
    let at = candidates.iter().position(|candidate| Some(*candidate) == current);
    match at {
        Some(at) if lost => candidates.iter().cycle().nth(at + 1).copied(),
        Some(_) => current,
        None => candidates.first().copied(),
    }
}

fn set(found: &watch::Sender<Option<SocketAddr>>, address: Option<SocketAddr>) {
    found.send_if_modified(|current| {
        if *current == address {
            return false;
        }
        tracing::info!(?address, "peer's endpoint");
        *current = address;
        true
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolved_address_is_kept_until_lost() {
        let [a, b, c] = [1, 2, 3].map(|i| SocketAddr::from(([192, 0, 2, i], 7)));
        assert_eq!(choose(None, &[a, b], false), Some(a));
        assert_eq!(choose(Some(b), &[a, b], false), Some(b), "a DNS answer in another order");
        assert_eq!(choose(Some(b), &[a, b], true), Some(a));
        assert_eq!(choose(Some(a), &[a], true), Some(a));
        assert_eq!(choose(Some(c), &[a, b], false), Some(a), "moved");
        assert_eq!(choose(Some(c), &[], true), None);
    }

    #[tokio::test]
    async fn unknown_names_are_retried_addresses_are_not() {
        let endpoint = |hosts: &[&str]| Endpoint {
            hosts: hosts.iter().map(|h| (*h).to_owned()).collect(),
            port: 7,
        };
        let (lookups, _) = watch::channel(None);
        let hosts = endpoint(&["192.0.2.1", "2001:db8::1"]);
        let (found, complete) = resolve(&hosts, &lookups).await;
        assert_eq!(found, ["192.0.2.1:7".parse().unwrap(), "[2001:db8::1]:7".parse().unwrap()]);
        assert!(complete);
        let hosts = endpoint(&["192.0.2.1", "no such name"]);
        let (found, complete) = resolve(&hosts, &lookups).await;
        assert_eq!((found.len(), complete), (1, false));
        let fault = lookups.borrow().clone().unwrap().fault;
        assert!(fault.message.contains("no such name"), "{fault:?}");
        resolve(&endpoint(&["192.0.2.1"]), &lookups).await;
        assert_eq!(*lookups.borrow(), None, "solved");
    }
}
