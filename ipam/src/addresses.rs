use std::collections::BTreeSet;
use std::net::IpAddr;

use fabric_api::Cidr;

/// The addresses of one prefix that are taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Addresses {
    issued: BTreeSet<IpAddr>,
    /// The one issued last: the next search begins behind it, so that an address given back is not
    /// issued again while others still associate it with its old owner.
    last: Option<IpAddr>,
    /// The same of those issued from the end.
    last_from_end: Option<IpAddr>,
}

impl Addresses {
    /// Takes the next free address of `cidr` behind the last one, never one of the first `skip`.
    ///
    /// The search begins at the network address itself, as Liqo's does. `None` if all are taken.
    pub(crate) fn issue(&mut self, cidr: Cidr, skip: u32) -> Option<IpAddr> {
        let (first, end) = (u128::from(skip), last_offset(cidr));
        let behind = self.last.map_or(first, |last| offset(cidr, last).saturating_add(1));
        let start = if (first..=end).contains(&behind) { behind } else { first };
        let found = self
            .first_gap(cidr, start, end)
            .or_else(|| self.first_gap(cidr, first, start.checked_sub(1)?))?;
        self.issued.insert(found);
        self.last = Some(found);
        Some(found)
    }

    /// Takes the next free address of `cidr` before the one last issued so, never one of the first
    /// `skip`, and the broadcast address of an IPv4 prefix last. `None` if all are taken.
    pub(crate) fn issue_from_end(&mut self, cidr: Cidr, skip: u32) -> Option<IpAddr> {
        let (first, last) = (u128::from(skip), last_offset(cidr));
        let end = if cidr.is_ipv4() && last >= 3 { last - 1 } else { last };
        let before = self.last_from_end.and_then(|last| offset(cidr, last).checked_sub(1));
        let start = before.filter(|before| (first..=end).contains(before)).unwrap_or(end);
        let found = self
            .last_gap(cidr, first, start)
            .or_else(|| self.last_gap(cidr, start.checked_add(1)?, end))
            .or_else(|| self.last_gap(cidr, first.max(end.checked_add(1)?), last))?;
        self.issued.insert(found);
        self.last_from_end = Some(found);
        Some(found)
    }

    /// Takes `address` of `cidr`, which has been issued before according to the store: in the second half
    /// of the prefix, from its end. False if it was taken.
    pub(crate) fn adopt(&mut self, cidr: Cidr, address: IpAddr) -> bool {
        if offset(cidr, address) > last_offset(cidr) / 2 {
            let lowest = self.last_from_end.map_or(address, |last| last.min(address));
            self.last_from_end = Some(lowest);
        } else {
            self.last = self.last.max(Some(address));
        }
        self.issued.insert(address)
    }

    /// Gives `address` back. False if it was not taken.
    pub(crate) fn release(&mut self, address: IpAddr) -> bool {
        self.issued.remove(&address)
    }

    pub(crate) fn contains(&self, address: IpAddr) -> bool {
        self.issued.contains(&address)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = IpAddr> {
        self.issued.iter().copied()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.issued.is_empty()
    }

    /// The first address that is not taken from offset `from` to offset `to`, both included.
    fn first_gap(&self, cidr: Cidr, from: u128, to: u128) -> Option<IpAddr> {
        if from > to {
            return None;
        }
        let mut candidate = from;
        for taken in self.issued.range(at(cidr, from)..=at(cidr, to)) {
            if offset(cidr, *taken) != candidate {
                break;
            }
            candidate = candidate.checked_add(1)?;
        }
        (candidate <= to).then(|| at(cidr, candidate))
    }

    /// The last address that is not taken from offset `from` to offset `to`, both included.
    fn last_gap(&self, cidr: Cidr, from: u128, to: u128) -> Option<IpAddr> {
        if from > to {
            return None;
        }
        let mut candidate = to;
        for taken in self.issued.range(at(cidr, from)..=at(cidr, to)).rev() {
            if offset(cidr, *taken) != candidate {
                break;
            }
            candidate = candidate.checked_sub(1)?;
        }
        (candidate >= from).then(|| at(cidr, candidate))
    }
}

/// Returns the number of addresses of `cidr`, less one: all of IPv6 has more than fit.
pub(crate) fn last_offset(cidr: Cidr) -> u128 {
    let host_bits = u32::from(if cidr.is_ipv4() { 32 } else { 128 } - cidr.len());
    u128::MAX.checked_shr(128 - host_bits).unwrap_or(0)
}

fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(v4.to_bits()),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

fn offset(cidr: Cidr, address: IpAddr) -> u128 {
    bits(address).saturating_sub(bits(cidr.address()))
}

fn at(cidr: Cidr, offset: u128) -> IpAddr {
    match cidr.address() {
        // An offset inside an IPv4 prefix fits in 32 bits.
        IpAddr::V4(v4) => IpAddr::V4((v4.to_bits() | (offset as u32)).into()),
        IpAddr::V6(v6) => IpAddr::V6((v6.to_bits() | offset).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    fn issue(addresses: &mut Addresses, prefix: &str, skip: u32) -> Option<String> {
        addresses.issue(cidr(prefix), skip).map(|address| address.to_string())
    }

    #[test]
    fn addresses_go_round_robin_from_the_network_address() {
        let mut addresses = Addresses::default();
        let mut next = || issue(&mut addresses, "10.0.0.0/30", 0).unwrap();
        assert_eq!([next(), next()], ["10.0.0.0", "10.0.0.1"]);
        addresses.release([10, 0, 0, 0].into());
        let mut next = || issue(&mut addresses, "10.0.0.0/30", 0);
        assert_eq!(next().as_deref(), Some("10.0.0.2"), "what was given back comes last");
        assert_eq!(next().as_deref(), Some("10.0.0.3"));
        assert_eq!(next().as_deref(), Some("10.0.0.0"));
        assert_eq!(next(), None);
    }

    #[test]
    fn pre_allocated_addresses_are_never_issued() {
        let mut addresses = Addresses::default();
        let issued: Vec<_> =
            std::iter::from_fn(|| issue(&mut addresses, "10.0.0.0/29", 5)).collect();
        assert_eq!(issued, ["10.0.0.5", "10.0.0.6", "10.0.0.7"]);
        assert_eq!(issue(&mut Addresses::default(), "10.0.0.0/30", 4), None);
    }

    #[test]
    fn both_ends_of_both_families_are_reached() {
        assert_eq!(last_offset(cidr("0.0.0.0/0")), u128::from(u32::MAX));
        assert_eq!(last_offset(cidr("::/0")), u128::MAX);
        assert_eq!(last_offset(cidr("fd00::1/128")), 0);
        let mut host = Addresses::default();
        assert_eq!(issue(&mut host, "fd00::1/128", 0).as_deref(), Some("fd00::1"));
        assert_eq!(issue(&mut host, "fd00::1/128", 0), None);
        let mut top = Addresses::default();
        let last = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff".parse().unwrap();
        top.adopt(cidr("ff00::/8"), last);
        assert_eq!(issue(&mut top, "ff00::/8", 0).as_deref(), Some("ff00::"));
    }

    #[test]
    fn search_continues_behind_highest_after_rebuild() {
        let mut addresses = Addresses::default();
        let prefix = cidr("10.0.0.0/24");
        for host in [9, 3, 252, 254] {
            addresses.adopt(prefix, [10, 0, 0, host].into());
        }
        assert_eq!(issue(&mut addresses, "10.0.0.0/24", 1).as_deref(), Some("10.0.0.10"));
        let from_end = addresses.issue_from_end(prefix, 1).map(|address| address.to_string());
        assert_eq!(from_end.as_deref(), Some("10.0.0.251"));
    }

    #[test]
    fn addresses_from_the_end_avoid_the_first_ones() {
        let mut addresses = Addresses::default();
        let issue = |addresses: &mut Addresses| {
            let issued = addresses.issue_from_end(cidr("10.0.0.0/29"), 2);
            issued.map(|address| address.to_string())
        };
        for host in [6, 5] {
            assert_eq!(issue(&mut addresses), Some(format!("10.0.0.{host}")));
        }
        addresses.release([10, 0, 0, 6].into());
        for host in [4, 3, 2, 6] {
            assert_eq!(issue(&mut addresses), Some(format!("10.0.0.{host}")), "round robin");
        }
        assert_eq!(issue(&mut addresses).as_deref(), Some("10.0.0.7"), "the broadcast address");
        assert_eq!(issue(&mut addresses), None);
    }
}
