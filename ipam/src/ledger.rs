//! The pools, kept in step with the store. Pure: the time is an argument.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use fabric_api::Cidr;
use serde::{Deserialize, Serialize};

use crate::claims::{AddressClaim, Claims, Fault, PrefixClaim};
use crate::pools::{AcquireError, AddressError, Holding, Pools, Request, Search};

/// Taken prefixes and addresses, including those that the store may not know yet.
///
/// The store is right in the long run: a caller writes into it what it was granted. What a caller
/// has touched less than a grace period ago is left as the caller left it, in both directions: a
/// fresh grant is not lost because its status is not written yet, a release is not undone because
/// its resource still is there.
#[derive(Clone, Debug)]
pub(crate) struct Ledger {
    pools: Pools,
    grace: Duration,
    touched: BTreeMap<Entry, Instant>,
}

/// Something that was granted a moment ago, as it is noted for the next ipam.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct OpenGrant {
    cidr: String,
    /// One address of the prefix; absent for the prefix itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    address: Option<IpAddr>,
    /// Numbers of exclusive holders, shared holders and addresses never issued.
    exclusive: u32,
    shared: u32,
    pre_allocated: u32,
}

/// A prefix, or (with an address) one address of it.
type Entry = (Cidr, Option<IpAddr>);

impl Ledger {
    pub(crate) fn new(pools: Pools, grace: Duration) -> Self {
        Self { pools, grace, touched: BTreeMap::new() }
    }

    pub(crate) fn acquire(&mut self, request: Request, now: Instant) -> Result<Cidr, AcquireError> {
        let granted = self.pools.acquire(request)?;
        self.touch((granted, None), now);
        Ok(granted)
    }

    /// False if nobody held it.
    pub(crate) fn release(&mut self, cidr: Cidr, now: Instant) -> bool {
        let was_held = self.pools.release(cidr);
        if was_held {
            self.touch((cidr, None), now);
        }
        was_held
    }

    pub(crate) fn is_available(&self, cidr: Cidr) -> bool {
        self.pools.is_available(cidr)
    }

    pub(crate) fn acquire_address(
        &mut self,
        cidr: Cidr,
        search: Search,
        now: Instant,
    ) -> Result<IpAddr, AddressError> {
        let address = self.pools.acquire_address(cidr, search)?;
        self.touch((cidr, Some(address)), now);
        Ok(address)
    }

    /// False if it was not taken.
    pub(crate) fn release_address(&mut self, cidr: Cidr, address: IpAddr, now: Instant) -> bool {
        let was_taken = self.pools.release_address(cidr, address);
        if was_taken {
            self.touch((cidr, Some(address)), now);
        }
        was_taken
    }

    /// Makes the taken set match the store, and returns the store's faults.
    ///
    /// With an empty ledger this is the rebuild after a start. Nothing is refused: where two
    /// resources claim the same, both keep it, so that nobody else gets it meanwhile.
    pub(crate) fn reconcile(&mut self, claims: &Claims, now: Instant) -> Vec<Fault> {
        self.forget_old_touches(now);
        self.reconcile_prefixes(claims);
        self.reconcile_addresses(claims);

        let mut faults = claims.faults.clone();
        faults.extend(overlaps(&claims.prefixes));
        faults.extend(same_addresses(&claims.addresses));
        faults.extend(self.outside_pools(&claims.prefixes));
        faults.extend(self.without_network(&claims.addresses));
        faults
    }

    /// Returns the grants within the grace period that are held: the store may not know them yet.
    pub(crate) fn open(&self) -> Vec<OpenGrant> {
        let grants = self.touched.keys().filter_map(|&(cidr, address)| {
            let holding = self.pools.holding(cidr);
            let held = address.is_none_or(|address| self.pools.is_issued(cidr, address));
            let holding = holding.filter(|_| held)?;
            Some(OpenGrant {
                cidr: cidr.to_string(),
                address,
                exclusive: holding.exclusive,
                shared: holding.shared,
                pre_allocated: holding.pre_allocated,
            })
        });
        grants.collect()
    }

    /// Holds again, for another grace period, what an earlier ipam had granted when it ended.
    pub(crate) fn reopen(&mut self, grants: &[OpenGrant], now: Instant) {
        for grant in grants {
            let Ok(cidr) = grant.cidr.parse::<Cidr>() else { continue };
            match grant.address {
                Some(address) if !self.pools.is_issued(cidr, address) => {
                    self.pools.adopt_address(cidr, address);
                }
                Some(_) => {}
                None => {
                    let have = self.pools.holding(cidr).unwrap_or_default();
                    let holding = Holding {
                        exclusive: have.exclusive.max(grant.exclusive),
                        shared: have.shared.max(grant.shared),
                        pre_allocated: have.pre_allocated.max(grant.pre_allocated),
                    };
                    self.pools.set(cidr, Some(holding));
                }
            }
            self.touch((cidr, grant.address), now);
        }
    }

    fn reconcile_prefixes(&mut self, claims: &Claims) {
        let mut wanted: BTreeMap<Cidr, Holding> = BTreeMap::new();
        for claim in &claims.prefixes {
            let holding = wanted.entry(claim.cidr).or_default();
            let count = if claim.shared { &mut holding.shared } else { &mut holding.exclusive };
            *count += 1;
            holding.pre_allocated = holding.pre_allocated.max(claim.pre_allocated);
        }
        let known: BTreeSet<Cidr> = wanted.keys().copied().chain(self.pools.prefixes()).collect();
        for cidr in known {
            let (want, have) = (wanted.get(&cidr).copied(), self.pools.holding(cidr));
            let settled = !self.touched.contains_key(&(cidr, None));
            let fewer = want.map_or(0, Holding::holders) < have.map_or(0, Holding::holders);
            if settled && want != have && (claims.complete || !fewer) {
                tracing::debug!(%cidr, ?have, ?want, "the store knows better");
                self.pools.set(cidr, want);
            }
        }
    }

    fn reconcile_addresses(&mut self, claims: &Claims) {
        let wanted: BTreeSet<(Cidr, IpAddr)> =
            claims.addresses.iter().map(|claim| (claim.cidr, claim.address)).collect();
        let settled = |ledger: &Self, (cidr, address): (Cidr, IpAddr)| {
            !ledger.touched.contains_key(&(cidr, Some(address)))
        };
        for &(cidr, address) in &wanted {
            if !self.pools.is_issued(cidr, address) && settled(self, (cidr, address)) {
                self.pools.adopt_address(cidr, address);
            }
        }
        let issued: Vec<_> = self.pools.issued().collect();
        for (cidr, address) in issued {
            let unknown = !wanted.contains(&(cidr, address));
            if claims.complete && unknown && settled(self, (cidr, address)) {
                tracing::debug!(%cidr, %address, "the store knows nothing of it; freed");
                self.pools.release_address(cidr, address);
            }
        }
    }

    fn outside_pools(&self, prefixes: &[PrefixClaim]) -> impl Iterator<Item = Fault> {
        prefixes
            .iter()
            .filter(|claim| !claim.shared && !self.pools.in_a_pool(claim.cidr))
            .map(|claim| Fault::OutsidePools { network: claim.network.clone(), cidr: claim.cidr })
    }

    fn without_network(&self, addresses: &[AddressClaim]) -> impl Iterator<Item = Fault> {
        addresses.iter().filter(|claim| self.pools.holding(claim.cidr).is_none()).map(|claim| {
            Fault::NoNetwork { ip: claim.ip.clone(), address: claim.address, cidr: claim.cidr }
        })
    }

    fn touch(&mut self, entry: Entry, now: Instant) {
        self.forget_old_touches(now);
        self.touched.insert(entry, now);
    }

    fn forget_old_touches(&mut self, now: Instant) {
        let grace = self.grace;
        self.touched.retain(|_, at| now.saturating_duration_since(*at) < grace);
    }
}

/// Pairs of claims that overlap and are not both shared.
fn overlaps(claims: &[PrefixClaim]) -> Vec<Fault> {
    let mut sorted: Vec<&PrefixClaim> = claims.iter().collect();
    sorted.sort_by(|a, b| (a.cidr, &a.network).cmp(&(b.cidr, &b.network)));
    let mut faults = Vec::new();
    // In this order a prefix comes before all that lies inside it, so what encloses the current
    // claim is a stack.
    let mut around: Vec<&PrefixClaim> = Vec::new();
    for claim in sorted {
        around.retain(|outer| outer.cidr.overlaps(&claim.cidr));
        let clashing = around.iter().filter(|outer| !(outer.shared && claim.shared));
        faults.extend(clashing.map(|outer| Fault::Overlap {
            a: outer.network.clone(),
            a_cidr: outer.cidr,
            b: claim.network.clone(),
            b_cidr: claim.cidr,
        }));
        around.push(claim);
    }
    faults
}

fn same_addresses(claims: &[AddressClaim]) -> Vec<Fault> {
    let mut holder: BTreeMap<IpAddr, &AddressClaim> = BTreeMap::new();
    let mut faults = Vec::new();
    for claim in claims {
        match holder.get(&claim.address) {
            Some(first) => faults.push(Fault::SameAddress {
                a: first.ip.clone(),
                b: claim.ip.clone(),
                address: claim.address,
            }),
            None => {
                holder.insert(claim.address, claim);
            }
        }
    }
    faults
}

#[cfg(test)]
mod tests;
