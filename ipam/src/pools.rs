//! Prefixes and addresses that are taken. Pure: no clock, no store, no socket.
//!
//! A prefix tree whose free siblings always merge has a shape that follows from what is taken: a
//! node is split exactly if something below it is taken. So the ordered map of what is taken *is*
//! the tree, nothing has to be split or merged, and what is rebuilt after a restart is equal to
//! what was there before. In that map a prefix is followed at once by what lies inside it.

use std::collections::BTreeMap;
use std::net::IpAddr;

use fabric_api::Cidr;

use crate::addresses::{Addresses, last_offset};

/// The pools of a cluster and what is taken of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pools {
    pools: Vec<Cidr>,
    taken: BTreeMap<Cidr, Holding>,
    /// Addresses by prefix. May name a prefix that nobody holds: an IP can outlive its Network, and
    /// its address must not be issued again when the prefix is taken anew.
    addresses: BTreeMap<Cidr, Addresses>,
}

/// Numbers of holders of a prefix, by mode.
///
/// More than one exclusive holder, or a shared one beside it, comes only from a store that
/// contradicts itself: what is taken according to the store stays taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Holding {
    pub(crate) exclusive: u32,
    pub(crate) shared: u32,
    /// Number of the first addresses that are never issued.
    pub(crate) pre_allocated: u32,
}

/// Request for a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) cidr: Cidr,
    pub(crate) mode: RequestMode,
    /// Number of the first addresses that are never to be issued.
    pub(crate) pre_allocated: u32,
}

/// Mode of a requested prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestMode {
    /// Another of the same length will do. What is granted is exclusive.
    Mutable,
    /// Exactly this one; it may overlap other shared ones.
    Shared,
    /// Exactly this one, and nothing that is taken may overlap it.
    Exclusive,
}

/// End of a prefix from which a free address is searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Search {
    FromStart,
    FromEnd,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PoolError {
    #[error("there is no pool to take prefixes from")]
    None,
    #[error("pools {0} and {1} overlap")]
    Overlap(Cidr, Cidr),
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AcquireError {
    #[error("cannot allocate {cidr}: {by} is taken")]
    Taken { cidr: Cidr, by: Cidr },
    #[error("{cidr} lies in none of the pools ({}); add one that holds it", list(.pools))]
    OutsidePools { cidr: Cidr, pools: Vec<Cidr> },
    #[error("{cidr} is taken and no other /{} is free in the pools ({})", .cidr.len(), list(.pools))]
    NoneFree { cidr: Cidr, pools: Vec<Cidr> },
    #[error("{cidr} has fewer than {pre_allocated} addresses to pre-allocate")]
    TooManyPreAllocated { cidr: Cidr, pre_allocated: u32 },
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AddressError {
    #[error("{0} is not taken; acquire it before its addresses")]
    PrefixNotTaken(Cidr),
    #[error("all addresses of {0} are taken")]
    NoneFree(Cidr),
}

impl Holding {
    pub(crate) fn holders(self) -> u32 {
        self.exclusive + self.shared
    }
}

impl Pools {
    /// Pools are tried in this order; no two may overlap.
    pub(crate) fn new(pools: Vec<Cidr>) -> Result<Self, PoolError> {
        if pools.is_empty() {
            return Err(PoolError::None);
        }
        for (i, a) in pools.iter().enumerate() {
            if let Some(b) = pools[i + 1..].iter().find(|b| a.overlaps(b)) {
                return Err(PoolError::Overlap(*a, *b));
            }
        }
        Ok(Self { pools, taken: BTreeMap::new(), addresses: BTreeMap::new() })
    }

    /// Takes the prefix, or, if the request allows, the first free one of its length.
    ///
    /// A shared prefix outside the pools is held as well: no address of it would be granted
    /// anyway, unless it *contains* a pool, and then it must keep that pool from being used.
    pub(crate) fn acquire(&mut self, request: Request) -> Result<Cidr, AcquireError> {
        let Request { cidr, mode, pre_allocated } = request;
        if pre_allocated > 0 && u128::from(pre_allocated - 1) > last_offset(cidr) {
            return Err(AcquireError::TooManyPreAllocated { cidr, pre_allocated });
        }
        let granted = match mode {
            RequestMode::Mutable => self.free_as(cidr)?,
            RequestMode::Exclusive => self.free_exactly(cidr)?,
            RequestMode::Shared => self.free_of_exclusives(cidr)?,
        };
        let holding = self.taken.entry(granted).or_default();
        match mode {
            RequestMode::Mutable | RequestMode::Exclusive => holding.exclusive += 1,
            RequestMode::Shared => holding.shared += 1,
        }
        holding.pre_allocated = holding.pre_allocated.max(pre_allocated);
        Ok(granted)
    }

    /// Gives `cidr` back once. Its addresses stay taken until each is given back. False if nobody held it.
    pub(crate) fn release(&mut self, cidr: Cidr) -> bool {
        let Some(holding) = self.taken.get_mut(&cidr) else { return false };
        let count = if holding.shared > 0 { &mut holding.shared } else { &mut holding.exclusive };
        *count = count.saturating_sub(1);
        if holding.holders() == 0 {
            self.vacate(cidr);
        }
        true
    }

    fn vacate(&mut self, cidr: Cidr) {
        self.taken.remove(&cidr);
        if self.addresses.get(&cidr).is_some_and(Addresses::is_empty) {
            self.addresses.remove(&cidr);
        }
    }

    /// True if `cidr` lies in a pool and overlaps nothing that is taken.
    pub(crate) fn is_available(&self, cidr: Cidr) -> bool {
        self.in_a_pool(cidr) && self.overlapping(cidr).is_none()
    }

    /// Takes the next free address of `cidr`, which must be held as exactly that prefix.
    pub(crate) fn acquire_address(
        &mut self,
        cidr: Cidr,
        search: Search,
    ) -> Result<IpAddr, AddressError> {
        let skip = self.taken.get(&cidr).ok_or(AddressError::PrefixNotTaken(cidr))?.pre_allocated;
        let addresses = self.addresses.entry(cidr).or_default();
        let issued = match search {
            Search::FromStart => addresses.issue(cidr, skip),
            Search::FromEnd => addresses.issue_from_end(cidr, skip),
        };
        issued.ok_or(AddressError::NoneFree(cidr))
    }

    /// Gives an address back. False if it was not taken.
    pub(crate) fn release_address(&mut self, cidr: Cidr, address: IpAddr) -> bool {
        let Some(addresses) = self.addresses.get_mut(&cidr) else { return false };
        let was_taken = addresses.release(address);
        if addresses.is_empty() && !self.taken.contains_key(&cidr) {
            self.addresses.remove(&cidr);
        }
        was_taken
    }

    /// Holds `cidr` according to the store, regardless of all else taken; `None` frees it.
    pub(crate) fn set(&mut self, cidr: Cidr, holding: Option<Holding>) {
        match holding {
            Some(holding) => {
                self.taken.insert(cidr, holding);
            }
            None => self.vacate(cidr),
        }
    }

    /// Takes an address according to the store, even of a prefix that nobody holds.
    pub(crate) fn adopt_address(&mut self, cidr: Cidr, address: IpAddr) {
        self.addresses.entry(cidr).or_default().adopt(cidr, address);
    }

    pub(crate) fn holding(&self, cidr: Cidr) -> Option<Holding> {
        self.taken.get(&cidr).copied()
    }

    pub(crate) fn prefixes(&self) -> impl Iterator<Item = Cidr> {
        self.taken.keys().copied()
    }

    pub(crate) fn is_issued(&self, cidr: Cidr, address: IpAddr) -> bool {
        self.addresses.get(&cidr).is_some_and(|addresses| addresses.contains(address))
    }

    pub(crate) fn issued(&self) -> impl Iterator<Item = (Cidr, IpAddr)> {
        self.addresses.iter().flat_map(|(cidr, issued)| issued.iter().map(|ip| (*cidr, ip)))
    }

    pub(crate) fn in_a_pool(&self, cidr: Cidr) -> bool {
        self.pools.iter().any(|pool| pool.net().contains(&cidr.net()))
    }

    fn free_as(&self, cidr: Cidr) -> Result<Cidr, AcquireError> {
        if self.is_available(cidr) {
            return Ok(cidr);
        }
        let same_family = self.pools.iter().filter(|pool| pool.is_ipv4() == cidr.is_ipv4());
        same_family
            .filter(|pool| pool.len() <= cidr.len() && self.enclosing(**pool).is_none())
            .find_map(|pool| self.first_free(*pool, cidr.len()))
            .ok_or_else(|| AcquireError::NoneFree { cidr, pools: self.pools.clone() })
    }

    fn free_exactly(&self, cidr: Cidr) -> Result<Cidr, AcquireError> {
        if !self.in_a_pool(cidr) {
            return Err(AcquireError::OutsidePools { cidr, pools: self.pools.clone() });
        }
        match self.overlapping(cidr) {
            Some(by) => Err(AcquireError::Taken { cidr, by }),
            None => Ok(cidr),
        }
    }

    fn free_of_exclusives(&self, cidr: Cidr) -> Result<Cidr, AcquireError> {
        let exclusive = |(by, holding): (&Cidr, &Holding)| (holding.exclusive > 0).then_some(*by);
        let around = prefixes_around(cidr).filter_map(|by| self.taken.get_key_value(&by));
        match around.chain(self.inside(cidr)).find_map(exclusive) {
            Some(by) => Err(AcquireError::Taken { cidr, by }),
            None => Ok(cidr),
        }
    }

    /// The first free prefix of length `len` in `node`, in the half that is already split if only
    /// one is, else left first, so that free space stays whole.
    fn first_free(&self, node: Cidr, len: u8) -> Option<Cidr> {
        if self.taken.contains_key(&node) {
            return None;
        }
        if !self.is_split(node) {
            return Cidr::around(node.address(), len);
        }
        let [left, right] = halves(node).filter(|_| node.len() < len)?;
        let right_first = self.is_split(right) && !self.is_split(left);
        let [first, second] = if right_first { [right, left] } else { [left, right] };
        self.first_free(first, len).or_else(|| self.first_free(second, len))
    }

    /// Something that is taken and shares an address with `cidr`.
    fn overlapping(&self, cidr: Cidr) -> Option<Cidr> {
        self.enclosing(cidr).or_else(|| {
            let (inside, _) = self.inside(cidr).next()?;
            Some(*inside)
        })
    }

    /// The longest prefix that is taken and contains `cidr` or is `cidr`.
    fn enclosing(&self, cidr: Cidr) -> Option<Cidr> {
        prefixes_around(cidr).find(|outer| self.taken.contains_key(outer))
    }

    /// Holdings strictly inside `cidr`.
    fn inside(&self, cidr: Cidr) -> impl Iterator<Item = (&Cidr, &Holding)> {
        use std::ops::Bound::{Excluded, Unbounded};
        self.taken
            .range((Excluded(cidr), Unbounded))
            .take_while(move |(inner, _)| cidr.net().contains(&inner.net()))
    }

    fn is_split(&self, node: Cidr) -> bool {
        self.inside(node).next().is_some()
    }
}

/// `cidr` and every prefix that contains it, longest first.
fn prefixes_around(cidr: Cidr) -> impl Iterator<Item = Cidr> {
    (0..=cidr.len()).rev().filter_map(move |len| Cidr::around(cidr.address(), len))
}

/// The two prefixes one bit longer. `None` for a single address.
fn halves(cidr: Cidr) -> Option<[Cidr; 2]> {
    let longer = cidr.len() + 1;
    let mut halves =
        cidr.net().subnets(longer).ok()?.filter_map(|half| Cidr::around(half.addr(), longer));
    Some([halves.next()?, halves.next()?])
}

fn list(pools: &[Cidr]) -> String {
    pools.iter().map(Cidr::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests;
