use fabric_store::{Kind, ObjectRef};

use super::*;
use crate::pools::{RequestMode, Search};

const GRACE: Duration = Duration::from_secs(30);

fn cidr(text: &str) -> Cidr {
    text.parse().unwrap()
}

fn ledger() -> Ledger {
    Ledger::new(Pools::new(vec![cidr("10.0.0.0/8"), cidr("fd00::/8")]).unwrap(), GRACE)
}

fn network(name: &str, prefix: &str, shared: bool) -> PrefixClaim {
    let network = ObjectRef::new(Kind::Network, "liqo", name);
    PrefixClaim { network, cidr: cidr(prefix), shared, pre_allocated: 1 }
}

fn ip(name: &str, address: &str, prefix: &str) -> AddressClaim {
    let ip = ObjectRef::new(Kind::Ip, "liqo", name);
    AddressClaim { ip, address: address.parse().unwrap(), cidr: cidr(prefix) }
}

fn claims(prefixes: Vec<PrefixClaim>, addresses: Vec<AddressClaim>) -> Claims {
    Claims { prefixes, addresses, faults: Vec::new(), complete: true }
}

fn acquire(ledger: &mut Ledger, prefix: &str, mode: RequestMode, now: Instant) -> String {
    let request = Request { cidr: cidr(prefix), mode, pre_allocated: 0 };
    ledger.acquire(request, now).unwrap().to_string()
}

#[test]
fn rebuild_keeps_counts_and_pre_allocated() {
    let now = Instant::now();
    let mut ledger = ledger();
    let stored = claims(
        vec![
            network("a", "10.20.0.0/16", true),
            network("b", "10.20.0.0/16", true),
            network("ext", "10.70.0.0/16", false),
        ],
        vec![ip("x", "10.70.0.1", "10.70.0.0/16")],
    );
    assert_eq!(ledger.reconcile(&stored, now), []);
    assert!(ledger.release(cidr("10.20.0.0/16"), now));
    assert!(!ledger.is_available(cidr("10.20.0.0/16")), "b still holds it");
    let next = ledger.acquire_address(cidr("10.70.0.0/16"), Search::FromStart, now).unwrap();
    assert_eq!(next.to_string(), "10.70.0.2");
    assert_eq!(acquire(&mut ledger, "10.70.0.0/16", RequestMode::Mutable, now), "10.21.0.0/16");
}

#[test]
fn fresh_grant_survives_grace_period() {
    let start = Instant::now();
    let mut ledger = ledger();
    acquire(&mut ledger, "10.70.0.0/16", RequestMode::Mutable, start);
    let address = ledger.acquire_address(cidr("10.70.0.0/16"), Search::FromStart, start).unwrap();
    let nothing = claims(vec![], vec![]);

    ledger.reconcile(&nothing, start + GRACE / 2);
    assert!(!ledger.is_available(cidr("10.70.0.0/16")));
    assert!(ledger.pools.is_issued(cidr("10.70.0.0/16"), address));

    ledger.reconcile(&nothing, start + GRACE);
    assert!(ledger.is_available(cidr("10.70.0.0/16")));
}

#[test]
fn fresh_release_is_not_undone_by_old_resource() {
    let start = Instant::now();
    let mut ledger = ledger();
    let stored = claims(
        vec![network("ext", "10.70.0.0/16", false)],
        vec![ip("x", "10.70.0.1", "10.70.0.0/16")],
    );
    ledger.reconcile(&stored, start);
    assert!(ledger.release_address(cidr("10.70.0.0/16"), [10, 70, 0, 1].into(), start));
    assert!(ledger.release(cidr("10.70.0.0/16"), start));
    ledger.reconcile(&stored, start + GRACE / 2);
    assert!(ledger.is_available(cidr("10.70.0.0/16")));
    ledger.reconcile(&stored, start + GRACE);
    assert!(!ledger.is_available(cidr("10.70.0.0/16")), "it never went away after all");
}

/// Liqo's removal takes the Network along, and weft puts another in its place.
#[test]
fn address_outlives_its_network_that_is_put_back() {
    let start = Instant::now();
    let mut ledger = ledger();
    let networks = || vec![network("internal", "10.70.0.0/16", false)];
    let stored = claims(networks(), vec![ip("x", "10.70.0.0", "10.70.0.0/16")]);
    ledger.reconcile(&stored, start);
    assert!(ledger.release(cidr("10.70.0.0/16"), start));
    assert_eq!(acquire(&mut ledger, "10.70.0.0/16", RequestMode::Mutable, start), "10.70.0.0/16");
    let next = ledger.acquire_address(cidr("10.70.0.0/16"), Search::FromStart, start);
    assert_eq!(next.unwrap().to_string(), "10.70.0.1");
    ledger.reconcile(&claims(networks(), vec![]), start);
    let first = [10, 70, 0, 0].into();
    assert!(!ledger.pools.is_issued(cidr("10.70.0.0/16"), first), "its IP is gone");
}

#[test]
fn shared_counts_follow_the_store() {
    let start = Instant::now();
    let mut ledger = ledger();
    let a_and_b = vec![network("a", "10.20.0.0/16", true), network("b", "10.20.0.0/16", true)];
    ledger.reconcile(&claims(a_and_b, vec![]), start);
    ledger.reconcile(&claims(vec![network("b", "10.20.0.0/16", true)], vec![]), start);
    assert!(ledger.release(cidr("10.20.0.0/16"), start));
    assert!(ledger.is_available(cidr("10.20.0.0/16")));
}

#[test]
fn partial_read_frees_nothing() {
    let start = Instant::now();
    let mut ledger = ledger();
    let address = ip("x", "10.70.0.1", "10.70.0.0/16");
    let stored = claims(vec![network("ext", "10.70.0.0/16", false)], vec![address]);
    ledger.reconcile(&stored, start);
    let unread =
        Claims { complete: false, ..claims(vec![network("c", "10.9.0.0/16", true)], vec![]) };
    ledger.reconcile(&unread, start + GRACE * 2);
    assert!(!ledger.is_available(cidr("10.70.0.0/16")));
    assert!(ledger.pools.is_issued(cidr("10.70.0.0/16"), [10, 70, 0, 1].into()));
    assert!(!ledger.is_available(cidr("10.9.0.0/16")), "what is new still counts");
}

#[test]
fn conflict_names_both_and_holds_prefix() {
    let now = Instant::now();
    let mut ledger = ledger();
    let stored = claims(
        vec![
            network("outer", "10.64.0.0/12", true),
            network("left", "10.70.0.0/16", false),
            network("right", "10.70.0.0/16", false),
        ],
        vec![],
    );
    let faults: Vec<_> = ledger.reconcile(&stored, now).iter().map(Fault::to_string).collect();
    let why = "which overlap and are not both shared";
    let [outer, left, right] = [
        "Network liqo/outer holds 10.64.0.0/12",
        "Network liqo/left holds 10.70.0.0/16",
        "Network liqo/right holds 10.70.0.0/16",
    ];
    let expected = [(outer, left), (outer, right), (left, right)];
    assert_eq!(faults, expected.map(|(a, b)| format!("{a} and {b}, {why}")));
    assert!(!ledger.is_available(cidr("10.79.0.0/16")));
    assert!(ledger.release(cidr("10.70.0.0/16"), now), "one of the two gives up");
    assert!(ledger.release(cidr("10.64.0.0/12"), now));
    assert!(!ledger.is_available(cidr("10.70.0.0/16")), "the other one still has it");
}

#[test]
fn duplicate_or_orphaned_addresses_are_reported() {
    let mut ledger = ledger();
    let stored = claims(
        vec![network("ext", "10.70.0.0/16", false)],
        vec![
            ip("x", "10.70.0.1", "10.70.0.0/16"),
            ip("y", "10.70.0.1", "10.70.0.0/16"),
            ip("lost", "10.80.0.1", "10.80.0.0/16"),
        ],
    );
    let faults = ledger.reconcile(&stored, Instant::now());
    let reported: Vec<_> = faults.iter().map(Fault::to_string).collect();
    assert_eq!(
        reported,
        [
            "IP liqo/x and IP liqo/y both hold the address 10.70.0.1",
            "IP liqo/lost holds 10.80.0.1 of 10.80.0.0/16, which no Network holds",
        ]
    );
    assert_eq!(faults.iter().map(Fault::is_conflict).collect::<Vec<_>>(), [true, false]);
}

#[test]
fn ipv6_networks_and_addresses_are_rebuilt_alike() {
    let now = Instant::now();
    let mut ledger = ledger();
    let stored =
        claims(vec![network("ext", "fd70::/48", false)], vec![ip("x", "fd70::1", "fd70::/48")]);
    assert_eq!(ledger.reconcile(&stored, now), []);
    assert_eq!(
        ledger.acquire_address(cidr("fd70::/48"), Search::FromStart, now).unwrap().to_string(),
        "fd70::2"
    );
    assert_eq!(acquire(&mut ledger, "fd70::/48", RequestMode::Mutable, now), "fd70:0:1::/48");
}

#[test]
fn network_outside_pools_is_kept_and_reported() {
    let mut ledger = ledger();
    let stored = claims(vec![network("ext", "192.168.0.0/16", false)], vec![]);
    let reported = ledger.reconcile(&stored, Instant::now());
    assert_eq!(
        reported.iter().map(Fault::to_string).collect::<Vec<_>>(),
        ["Network liqo/ext holds 192.168.0.0/16, which lies in none of the pools"]
    );
    assert!(
        ledger.acquire_address(cidr("192.168.0.0/16"), Search::FromStart, Instant::now()).is_ok()
    );
}
