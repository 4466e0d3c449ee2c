use proptest::prelude::*;

use super::*;

fn cidr(text: &str) -> Cidr {
    text.parse().unwrap()
}

fn pools(list: &[&str]) -> Pools {
    Pools::new(list.iter().map(|text| cidr(text)).collect()).unwrap()
}

fn liqos() -> Pools {
    pools(&["10.0.0.0/8", "192.168.0.0/16", "172.16.0.0/12", "fd00::/8"])
}

impl Pools {
    fn take(&mut self, prefix: &str, mode: RequestMode) -> Result<String, AcquireError> {
        let request = Request { cidr: cidr(prefix), mode, pre_allocated: 0 };
        self.acquire(request).map(|granted| granted.to_string())
    }

    fn mutable(&mut self, prefix: &str) -> String {
        self.take(prefix, RequestMode::Mutable).unwrap()
    }

    fn shared(&mut self, prefix: &str) -> bool {
        self.take(prefix, RequestMode::Shared).is_ok()
    }

    fn exclusive(&mut self, prefix: &str) -> bool {
        self.take(prefix, RequestMode::Exclusive).is_ok()
    }

    fn free(&self, prefix: &str) -> bool {
        self.is_available(cidr(prefix))
    }

    fn give_back(&mut self, prefix: &str) -> bool {
        self.release(cidr(prefix))
    }
}

#[test]
fn pools_that_overlap_are_refused() {
    for (a, b) in [("10.0.0.0/8", "10.0.0.0/16"), ("10.1.0.0/16", "10.0.0.0/15")] {
        let error = Pools::new(vec![cidr(a), cidr(b)]).unwrap_err();
        assert_eq!(error, PoolError::Overlap(cidr(a), cidr(b)));
    }
    assert_eq!(Pools::new(vec![]).unwrap_err(), PoolError::None);
}

#[test]
fn a_taken_prefix_is_replaced_by_its_neighbour() {
    let mut pools = liqos();
    assert_eq!(pools.mutable("10.70.0.0/16"), "10.70.0.0/16");
    assert_eq!(pools.mutable("10.70.0.0/16"), "10.71.0.0/16");
    assert_eq!(pools.mutable("10.70.0.0/16"), "10.68.0.0/16");
    assert_eq!(pools.mutable("10.70.0.0/15"), "10.64.0.0/15", "10.66.0.0/15 is as good, but right");
}

#[test]
fn split_halves_are_taken_first() {
    let mut pools = pools(&["10.0.0.0/8"]);
    assert!(pools.exclusive("10.200.0.0/16"));
    assert_eq!(pools.mutable("11.0.0.0/16"), "10.201.0.0/16", "not 10.0.0.0/16, which is first");
    assert_eq!(pools.mutable("11.0.0.0/9"), "10.0.0.0/9");
}

#[test]
fn outside_prefix_moves_into_first_pool() {
    let mut pools = liqos();
    assert_eq!(pools.mutable("100.64.0.0/10"), "10.0.0.0/10");
    assert_eq!(pools.mutable("2001:db8:7::/56"), "fd00::/56");
    assert_eq!(pools.mutable("fd12:3456:789a::/56"), "fd12:3456:789a::/56", "kept: it is free");
    assert_eq!(pools.mutable("fd12:3456:789a::/56"), "fd00:0:0:100::/56");
}

#[test]
fn full_pool_falls_back_to_next() {
    let mut pools = pools(&["10.0.0.0/24", "10.0.2.0/24"]);
    assert_eq!(pools.mutable("1.0.0.0/24"), "10.0.0.0/24");
    assert_eq!(pools.mutable("1.0.0.0/24"), "10.0.2.0/24");
    let error = pools.take("1.0.0.0/24", RequestMode::Mutable).unwrap_err().to_string();
    assert_eq!(
        error,
        "1.0.0.0/24 is taken and no other /24 is free in the pools (10.0.0.0/24, 10.0.2.0/24)"
    );
    assert!(matches!(
        pools.take("16.0.0.0/4", RequestMode::Mutable),
        Err(AcquireError::NoneFree { .. })
    ));
}

#[test]
fn shared_prefixes_are_counted() {
    let mut pools = liqos();
    assert!(pools.shared("10.20.0.0/16") && pools.shared("10.20.0.0/16"));
    assert!(pools.give_back("10.20.0.0/16") && !pools.free("10.20.0.0/16"));
    assert!(pools.give_back("10.20.0.0/16") && pools.free("10.20.0.0/16"));
    assert!(!pools.give_back("10.20.0.0/16"), "released once more: nothing happens");
    assert_eq!(pools, liqos());
}

#[test]
fn shared_prefixes_nest_and_release_separately() {
    let mut pools = liqos();
    assert!(pools.shared("10.20.0.0/16") && pools.shared("10.0.0.0/8"));
    assert!(pools.shared("10.20.0.0/17"));
    assert!(pools.give_back("10.0.0.0/8"));
    assert!(!pools.free("10.20.0.0/16") && !pools.free("10.0.0.0/8") && pools.free("10.21.0.0/16"));
}

#[test]
fn exclusive_prefix_allows_no_overlap() {
    let mut pools = liqos();
    assert!(pools.exclusive("10.50.0.0/16"));
    for (other, place) in [("10.50.0.0/16", "same"), ("10.50.1.0/24", "in"), ("10.0.0.0/8", "out")]
    {
        assert!(!pools.shared(other) && !pools.exclusive(other), "{place}");
    }
    assert!(pools.give_back("10.50.0.0/16") && pools.shared("10.50.0.0/24"));
    assert!(!pools.exclusive("10.50.0.0/16") && !pools.exclusive("10.50.0.128/25"));
    let error = pools.take("10.50.0.0/16", RequestMode::Exclusive).unwrap_err().to_string();
    assert_eq!(error, "cannot allocate 10.50.0.0/16: 10.50.0.0/24 is taken");
}

#[test]
fn mutable_prefix_avoids_shared_space() {
    let mut pools = liqos();
    assert!(pools.shared("10.0.0.0/8"));
    assert_eq!(pools.mutable("10.70.0.0/16"), "192.168.0.0/16");
}

#[test]
fn outside_pools_only_shared_is_granted() {
    let mut pools = liqos();
    assert!(pools.shared("100.64.0.0/10") && !pools.exclusive("100.64.0.0/10"));
    assert!(!pools.free("11.0.0.0/8") && !pools.free("0.0.0.0/0"));
    assert!(pools.give_back("100.64.0.0/10"));
    assert_eq!(pools, liqos());
}

#[test]
fn a_shared_prefix_around_a_pool_closes_that_pool() {
    let mut pools = pools(&["172.16.0.0/12", "10.0.0.0/8"]);
    assert!(pools.shared("172.0.0.0/8"));
    assert!(!pools.free("172.16.0.0/16"));
    assert_eq!(pools.mutable("172.16.0.0/16"), "10.0.0.0/16");
}

#[test]
fn addresses_need_exactly_the_prefix_that_is_held() {
    let mut pools = liqos();
    pools.mutable("10.70.0.0/16");
    let address =
        |pools: &mut Pools, prefix| pools.acquire_address(cidr(prefix), Search::FromStart);
    assert_eq!(address(&mut pools, "10.70.0.0/16").unwrap().to_string(), "10.70.0.0");
    for other in ["10.70.0.0/17", "10.0.0.0/8", "11.0.0.0/8"] {
        assert_eq!(address(&mut pools, other), Err(AddressError::PrefixNotTaken(cidr(other))));
    }
}

#[test]
fn released_prefix_keeps_its_addresses() {
    let mut pools = liqos();
    let prefix = cidr("10.70.0.0/16");
    pools.mutable("10.70.0.0/16");
    let first = pools.acquire_address(prefix, Search::FromStart).unwrap();
    pools.give_back("10.70.0.0/16");
    assert!(pools.free("10.70.0.0/16"));
    pools.mutable("10.70.0.0/16");
    let next = pools.acquire_address(prefix, Search::FromStart).unwrap();
    assert_ne!(next, first, "its IP is still there");
    pools.give_back("10.70.0.0/16");
    assert!(pools.release_address(prefix, first) && pools.release_address(prefix, next));
    assert_eq!(pools, liqos());
}

#[test]
fn orphaned_address_is_not_issued_again() {
    let mut pools = liqos();
    pools.adopt_address(cidr("10.70.0.0/30"), [10, 70, 0, 1].into());
    pools.mutable("10.70.0.0/30");
    let mut issued: Vec<_> =
        std::iter::from_fn(|| pools.acquire_address(cidr("10.70.0.0/30"), Search::FromStart).ok())
            .map(|address| address.to_string())
            .collect();
    issued.sort();
    assert_eq!(issued, ["10.70.0.0", "10.70.0.2", "10.70.0.3"]);
}

#[test]
fn too_many_pre_allocated_is_error_and_takes_none() {
    let mut pools = liqos();
    let mut ask = |pre_allocated| {
        let mode = RequestMode::Mutable;
        pools.acquire(Request { cidr: cidr("10.0.0.0/30"), mode, pre_allocated })
    };
    assert!(matches!(ask(5), Err(AcquireError::TooManyPreAllocated { .. })));
    assert_eq!(ask(4).unwrap(), cidr("10.0.0.0/30"), "nothing was taken before");
    let none_left = pools.acquire_address(cidr("10.0.0.0/30"), Search::FromStart);
    assert_eq!(none_left, Err(AddressError::NoneFree(cidr("10.0.0.0/30"))));
}

/// Change of one prefix, by a caller or by the store.
#[derive(Clone, Debug)]
enum Change {
    Set(Option<Holding>),
    Share(u32),
    Release,
    Adopt(u8),
    ReleaseAddress(u8),
}

fn some_change() -> impl Strategy<Value = Change> {
    let holding = (0..3u32, 0..3u32, 0..4u32)
        .prop_map(|(exclusive, shared, n)| Holding { exclusive, shared, pre_allocated: n })
        .prop_filter("somebody holds it", |holding| holding.holders() > 0);
    prop_oneof![
        prop::option::of(holding).prop_map(Change::Set),
        (0..4u32).prop_map(Change::Share),
        Just(Change::Release),
        (0..4u8).prop_map(Change::Adopt),
        (0..4u8).prop_map(Change::ReleaseAddress),
    ]
}

/// Holders and addresses of one prefix.
#[derive(Default)]
struct Model {
    holding: Option<Holding>,
    addresses: std::collections::BTreeSet<IpAddr>,
}

impl Model {
    const PREFIX: &str = "10.0.0.0/28";

    fn play(&mut self, pools: &mut Pools, change: &Change) {
        let prefix = cidr(Self::PREFIX);
        let address = |n: &u8| IpAddr::from([10, 0, 0, *n]);
        match change {
            Change::Set(holding) => {
                pools.set(prefix, *holding);
                self.holding = *holding;
            }
            Change::Share(pre_allocated) => {
                let (mode, pre_allocated) = (RequestMode::Shared, *pre_allocated);
                let granted = pools.acquire(Request { cidr: prefix, mode, pre_allocated });
                let mut holding = self.holding.unwrap_or_default();
                assert_eq!(granted.is_ok(), holding.exclusive == 0);
                if granted.is_ok() {
                    holding.shared += 1;
                    holding.pre_allocated = holding.pre_allocated.max(pre_allocated);
                    self.holding = Some(holding);
                }
            }
            Change::Release => {
                assert_eq!(pools.release(prefix), self.holding.is_some());
                let Some(mut holding) = self.holding else { return };
                // A prefix on which the store contradicts itself stays closed for the longest time.
                match holding.shared {
                    0 => holding.exclusive -= 1,
                    _ => holding.shared -= 1,
                }
                self.holding = Some(holding).filter(|holding| holding.holders() > 0);
            }
            Change::Adopt(n) => {
                pools.adopt_address(prefix, address(n));
                self.addresses.insert(address(n));
            }
            Change::ReleaseAddress(n) => {
                let was_taken = self.addresses.remove(&address(n));
                assert_eq!(pools.release_address(prefix, address(n)), was_taken);
            }
        }
    }
}

/// Operations of a caller. Prefixes are picked close together, so that they meet.
#[derive(Clone, Debug)]
enum Step {
    Acquire(Request),
    Release(prop::sample::Index),
    AcquireAddress(prop::sample::Index),
    ReleaseAddress(prop::sample::Index),
}

/// Prefixes in and around the two small pools of [`small_pools`].
fn some_cidr() -> impl Strategy<Value = Cidr> {
    let v4 = (any::<u8>(), 22..=32u8).prop_map(|(low, len)| ([10, 0, low & 3, low].into(), len));
    let v6 = (any::<u16>(), 118..=128u8).prop_map(|(low, len)| {
        (std::net::Ipv6Addr::from(0xfd00_u128 << 112 | u128::from(low & 0x3ff)).into(), len)
    });
    prop_oneof![v4, v6].prop_map(|(address, len): (IpAddr, u8)| Cidr::around(address, len).unwrap())
}

fn small_pools() -> Pools {
    pools(&["10.0.0.0/24", "10.0.2.0/23", "fd00::/119"])
}

fn some_step() -> impl Strategy<Value = Step> {
    let mode = prop_oneof![
        Just(RequestMode::Mutable),
        Just(RequestMode::Shared),
        Just(RequestMode::Exclusive)
    ];
    prop_oneof![
        4 => (some_cidr(), mode, 0..3u32).prop_map(|(cidr, mode, pre_allocated)| {
            Step::Acquire(Request { cidr, mode, pre_allocated })
        }),
        2 => any::<prop::sample::Index>().prop_map(Step::Release),
        2 => any::<prop::sample::Index>().prop_map(Step::AcquireAddress),
        1 => any::<prop::sample::Index>().prop_map(Step::ReleaseAddress),
    ]
}

/// Grants that were not given back: the model that the pools are compared with.
#[derive(Default)]
struct Granted {
    prefixes: Vec<(Cidr, RequestMode, u32)>,
    addresses: Vec<(Cidr, IpAddr)>,
}

impl Granted {
    fn play(&mut self, pools: &mut Pools, step: &Step) {
        match step {
            Step::Acquire(request) => self.acquire(pools, *request),
            Step::Release(pick) if !self.prefixes.is_empty() => {
                let (cidr, _, skip) = self.prefixes.swap_remove(pick.index(self.prefixes.len()));
                assert!(pools.release(cidr));
                // Pre-allocated addresses stay so while others hold the prefix.
                let others = self.prefixes.iter_mut().filter(|(other, ..)| *other == cidr);
                others.for_each(|(_, _, n)| *n = skip.max(*n));
            }
            Step::AcquireAddress(pick) if !self.prefixes.is_empty() => {
                let (cidr, ..) = self.prefixes[pick.index(self.prefixes.len())];
                self.acquire_address(pools, cidr);
            }
            Step::ReleaseAddress(pick) if !self.addresses.is_empty() => {
                let (cidr, ip) = self.addresses.swap_remove(pick.index(self.addresses.len()));
                assert!(pools.release_address(cidr, ip) && !pools.release_address(cidr, ip));
            }
            Step::Release(_) | Step::AcquireAddress(_) | Step::ReleaseAddress(_) => {}
        }
    }

    fn acquire(&mut self, pools: &mut Pools, request: Request) {
        let Request { cidr, mode, pre_allocated } = request;
        let clashes = |granted: &Cidr| {
            self.prefixes.iter().any(|(other, how, _)| {
                other.overlaps(granted)
                    && !(mode == RequestMode::Shared && *how == RequestMode::Shared)
            })
        };
        let size = last_offset(cidr) + 1;
        match pools.acquire(request) {
            Ok(granted) => {
                assert!(!clashes(&granted), "{granted} overlaps what is taken");
                assert_eq!(granted.len(), cidr.len());
                assert!(granted == cidr || mode == RequestMode::Mutable);
                assert!(mode == RequestMode::Shared || pools.in_a_pool(granted));
                self.prefixes.push((granted, mode, pre_allocated));
            }
            Err(AcquireError::TooManyPreAllocated { .. }) => assert!(size < pre_allocated.into()),
            Err(AcquireError::Taken { by, .. }) => assert!(by.overlaps(&cidr) && clashes(&cidr)),
            Err(AcquireError::OutsidePools { .. }) => assert!(!pools.in_a_pool(cidr)),
            Err(AcquireError::NoneFree { .. }) => {
                let all = pools.pools.iter().filter(|pool| pool.len() <= cidr.len());
                let mut candidates = all
                    .filter(|pool| pool.is_ipv4() == cidr.is_ipv4())
                    .flat_map(|pool| pool.net().subnets(cidr.len()).unwrap())
                    .map(|net| Cidr::around(net.addr(), net.prefix_len()).unwrap());
                assert!(candidates.all(|candidate| clashes(&candidate)), "one was free");
            }
        }
    }

    fn acquire_address(&mut self, pools: &mut Pools, cidr: Cidr) {
        let same = self.prefixes.iter().filter(|(other, ..)| *other == cidr);
        let skip = same.map(|(_, _, n)| u128::from(*n)).max().unwrap();
        let taken = self.addresses.iter().filter(|(from, _)| *from == cidr).count() as u128;
        let search = if taken.is_multiple_of(2) { Search::FromStart } else { Search::FromEnd };
        match pools.acquire_address(cidr, search) {
            Ok(ip) => {
                assert!(cidr.contains(ip) && !self.addresses.contains(&(cidr, ip)), "doubled {ip}");
                self.addresses.push((cidr, ip));
            }
            Err(AddressError::NoneFree(_)) => {
                assert!(last_offset(cidr) < skip + taken, "some of {cidr} was free");
            }
            Err(AddressError::PrefixNotTaken(_)) => panic!("{cidr} is held"),
        }
    }

    /// Rebuilds the pools as ipam does after a restart, from the store alone.
    fn rebuild(&self) -> Pools {
        let mut pools = small_pools();
        for (cidr, mode, pre_allocated) in &self.prefixes {
            let mut holding = pools.holding(*cidr).unwrap_or_default();
            match mode {
                RequestMode::Shared => holding.shared += 1,
                RequestMode::Mutable | RequestMode::Exclusive => holding.exclusive += 1,
            }
            holding.pre_allocated = holding.pre_allocated.max(*pre_allocated);
            pools.set(*cidr, Some(holding));
        }
        for (cidr, ip) in &self.addresses {
            pools.adopt_address(*cidr, *ip);
        }
        pools
    }
}

proptest! {
    #[test]
    fn free_prefix_is_granted_and_none_overlaps(
        steps in prop::collection::vec(some_step(), 1..80),
    ) {
        let (mut pools, mut granted) = (small_pools(), Granted::default());
        for step in &steps {
            granted.play(&mut pools, step);
        }
    }

    #[test]
    fn a_rebuild_knows_the_same_and_grants_the_same(
        steps in prop::collection::vec(some_step(), 1..60),
        next in some_cidr(),
    ) {
        let (mut pools, mut granted) = (small_pools(), Granted::default());
        for step in &steps {
            granted.play(&mut pools, step);
        }
        let mut rebuilt = granted.rebuild();
        prop_assert_eq!(rebuilt.issued().collect::<Vec<_>>(), pools.issued().collect::<Vec<_>>());
        // The number of skipped addresses is the most that any holder ever requested; a holder that
        // is gone no longer counts after a restart.
        let holders = |pools: &Pools| -> Vec<(Cidr, u32, u32)> {
            pools.taken.iter().map(|(cidr, h)| (*cidr, h.exclusive, h.shared)).collect()
        };
        prop_assert_eq!(holders(&rebuilt), holders(&pools));
        let request = Request { cidr: next, mode: RequestMode::Mutable, pre_allocated: 0 };
        prop_assert_eq!(rebuilt.acquire(request), pools.acquire(request));
    }

    #[test]
    fn pools_follow_the_model_of_one_prefix(
        changes in prop::collection::vec(some_change(), 1..40),
    ) {
        let (mut pools, mut model) = (small_pools(), Model::default());
        for change in &changes {
            model.play(&mut pools, change);
            prop_assert_eq!(pools.holding(cidr(Model::PREFIX)), model.holding);
            let issued: Vec<IpAddr> = pools.issued().map(|(_, address)| address).collect();
            prop_assert_eq!(issued, Vec::from_iter(model.addresses.iter().copied()));
            if model.holding.is_none() && model.addresses.is_empty() {
                prop_assert_eq!(&pools, &small_pools());
            }
        }
    }

    #[test]
    fn releasing_all_restores_initial_state(
        steps in prop::collection::vec(some_step(), 1..60),
    ) {
        let (mut pools, mut granted) = (small_pools(), Granted::default());
        for step in &steps {
            granted.play(&mut pools, step);
        }
        for (cidr, ..) in granted.prefixes {
            prop_assert!(pools.release(cidr));
        }
        for (cidr, address) in granted.addresses {
            prop_assert!(pools.release_address(cidr, address));
        }
        prop_assert_eq!(pools, small_pools());
    }
}
