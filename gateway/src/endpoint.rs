//! The peer's endpoint: a client's server by address or DNS name, and first of all where an earlier
//! gateway has followed it to; a server's client as remembered.

use std::net::SocketAddr;
use std::time::Duration;

use gateway_config::desired::Endpoint;
use gateway_config::input::Input;
use gateway_health::{Fault, Reason};
use jiff::Timestamp;
use tokio::net::lookup_host;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::replicas::Standing;
use crate::state::{TimedFault, View};

/// Time until a name that did not resolve, or one that did, is looked up again.
const RETRY: Duration = Duration::from_secs(2);
/// Time for an answer of the resolver until that is reported as a fault.
const SLOW: Duration = Duration::from_millis(1500);
const REFRESH: Duration = Duration::from_secs(300);

/// Config, connection, and the place among replicas.
type Sources = (watch::Receiver<Input>, watch::Receiver<View>, watch::Receiver<Standing>);

/// Keeps `found` on the peer's address until `stop`.
pub async fn run(
    (mut inputs, mut views, mut standings): Sources,
    (found, lookups): (watch::Sender<Option<SocketAddr>>, watch::Sender<Option<TimedFault>>),
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let mut predecessor = None;
    let mut retries = views.borrow().retries;
    let mut wanted = None;
    // A spec.endpoint that is edited while this gateway runs is tried alone.
    let mut followed = None;
    let mut lookup_at = Instant::now();
    loop {
        let input = inputs.borrow_and_update().clone();
        let endpoint = input.desired.as_ref().map(|desired| desired.endpoint.clone());
        if endpoint != wanted {
            let of_start = endpoint.as_ref().filter(|_| wanted.is_none()).and_then(Option::as_ref);
            followed = of_start.and_then(|endpoint| input.remembered.followed(endpoint));
            if followed.is_some() {
                set(&found, followed);
            }
            wanted = endpoint;
            lookup_at = Instant::now();
        }
        let before = standings.borrow_and_update().predecessor.and_then(|of| of.peer());
        if before != predecessor {
            predecessor = before;
            if before.is_some() {
                followed = before;
                set(&found, before);
            }
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
                let view = views.borrow_and_update().clone();
                let is_lost = view.retries != retries;
                retries = view.retries;
                let left = view.left.filter(|_| is_lost);
                // The peer's packets have led elsewhere: it is tried there again, too.
                followed = left.filter(|left| !candidates.contains(left)).or(followed);
                let current = left.or_else(|| *found.borrow());
                let candidates = candidates_after(followed, candidates);
                settle(&found, current, &candidates, is_lost);
                lookup_at = Instant::now() + if complete { REFRESH } else { RETRY };
            }
            Some(Some(_)) => {}
            Some(None) => {
                report(&lookups, None);
                set(&found, followed.or(input.remembered.peer));
            }
            None => {}
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => return Ok(()),
            changed = inputs.changed() => changed?,
            changed = standings.changed() => changed?,
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
        remedy: "see whether the resolver works that this host uses; else correct \
                 spec.endpoint.addresses of the GatewayClient, or the DNS record"
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

/// The address that was followed to, then the others.
fn candidates_after(followed: Option<SocketAddr>, resolved: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let others = resolved.into_iter().filter(|address| Some(*address) != followed);
    followed.into_iter().chain(others).collect()
}

/// Stays on an address that is still among the candidates, unless the peer is lost there: then
/// the next one gets its turn. Names that no longer resolve change nothing.
fn settle(
    found: &watch::Sender<Option<SocketAddr>>,
    current: Option<SocketAddr>,
    candidates: &[SocketAddr],
    lost: bool,
) {
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
    use std::net::IpAddr;
    use std::sync::Arc;

    use gateway_config::desired::Desired;

    use super::*;
    use crate::test_config::config;

    /// Gateway without replicas.
    fn alone() -> watch::Receiver<Standing> {
        let (sender, receiver) = watch::channel(Standing::default());
        // Open for as long as the test.
        std::mem::forget(sender);
        receiver
    }

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

    /// 192.0.2.20 is that of the config.
    #[tokio::test]
    async fn followed_address_is_first_until_spec_is_edited() {
        let (moved, configured, edited) = ([192, 0, 2, 29], [192, 0, 2, 20], [192, 0, 2, 40]);
        let mut input = Input::default();
        let mut desired = Desired::parse(&config()).unwrap();
        input.remembered.peer = Some(SocketAddr::from((moved, 30742)));
        input.remembered.configured = desired.endpoint.clone();
        input.desired = Some(Arc::new(desired.clone()));
        let (inputs, read_inputs) = watch::channel(input.clone());
        let (views, read_views) = watch::channel(View::start());
        let (found_to, mut found) = watch::channel(None);
        let stop = CancellationToken::new();
        let outputs = (found_to, watch::channel(None).0);
        tokio::spawn(run((read_inputs, read_views, alone()), outputs, stop.clone()));
        let mut expect = async |address: [u8; 4]| {
            let is_it =
                |at: &Option<SocketAddr>| at.is_some_and(|at| at.ip() == IpAddr::from(address));
            let waited = timeout(Duration::from_secs(5), found.wait_for(is_it)).await;
            assert!(waited.is_ok(), "{address:?} is not tried");
        };
        expect(moved).await;
        for next in [configured, moved] {
            views.send_modify(|view| view.retries += 1);
            expect(next).await;
        }
        desired.endpoint.as_mut().unwrap().hosts = vec!["192.0.2.40".to_owned()];
        input.desired = Some(Arc::new(desired));
        inputs.send_replace(input.clone());
        expect(edited).await;
        views.send_modify(|view| view.retries += 1);
        let (found_to, mut found) = watch::channel(None);
        let outputs = (found_to, watch::channel(None).0);
        tokio::spawn(run((inputs.subscribe(), views.subscribe(), alone()), outputs, stop.clone()));
        found.changed().await.unwrap();
        let first = found.borrow().map(|at| at.ip());
        assert_eq!(first, Some(IpAddr::from(edited)), "edited before the start");
    }

    #[tokio::test]
    async fn address_that_was_followed_to_is_tried_again() {
        let [configured, moved] = [20, 29].map(|n| SocketAddr::from(([192, 0, 2, n], 30742)));
        let desired = Desired::parse(&config()).unwrap();
        let input = Input { desired: Some(Arc::new(desired)), ..Input::default() };
        let (_inputs, read_inputs) = watch::channel(input);
        let (views, read_views) = watch::channel(View::start());
        let (found_to, mut found) = watch::channel(None);
        let outputs = (found_to, watch::channel(None).0);
        tokio::spawn(run((read_inputs, read_views, alone()), outputs, CancellationToken::new()));
        let mut expect = async |address: SocketAddr| {
            let is_it = |at: &Option<SocketAddr>| at.is_some_and(|at| at.ip() == address.ip());
            let waited = timeout(Duration::from_secs(5), found.wait_for(is_it)).await;
            assert!(waited.is_ok(), "{address} is not tried");
        };
        expect(configured).await;
        for (left, next) in [(moved, configured), (configured, moved), (moved, configured)] {
            views.send_modify(|view| (view.retries, view.left) = (view.retries + 1, Some(left)));
            tokio::time::sleep(Duration::from_millis(50)).await;
            expect(next).await;
        }
    }

    #[tokio::test]
    async fn followed_address_needs_no_resolver() {
        let mut input = Input::default();
        let mut desired = Desired::parse(&config()).unwrap();
        desired.endpoint.as_mut().unwrap().hosts = vec!["gateway.milan.test".to_owned()];
        let followed = Some(SocketAddr::from(([192, 0, 2, 29], 30742)));
        input.remembered.peer = followed;
        input.remembered.configured = desired.endpoint.clone();
        input.desired = Some(Arc::new(desired));
        let (_inputs, read_inputs) = watch::channel(input);
        let (_views, read_views) = watch::channel(View::start());
        let (found_to, found) = watch::channel(None);
        let outputs = (found_to, watch::channel(None).0);
        let mut run =
            Box::pin(run((read_inputs, read_views, alone()), outputs, CancellationToken::new()));
        assert!(futures::poll!(&mut run).is_pending());
        assert_eq!(*found.borrow(), followed, "while the name is looked up");
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
