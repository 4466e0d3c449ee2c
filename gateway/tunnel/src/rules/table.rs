use std::net::IpAddr;
use std::ops::{BitAnd, BitOr, Not};

use ipnet::IpNet;

use super::RulesError;
use crate::checksum::Change;

/// An address of one family, as a number in the machine's byte order.
pub(super) trait Address:
    Copy + Ord + BitAnd<Output = Self> + BitOr<Output = Self> + Not<Output = Self>
{
    /// As the IP header has it.
    const VERSION: u8;
    /// Length of the fixed IP header in bytes.
    const HEADER: usize;
    /// Offset of the IP header's checksum, if it has one.
    const CHECKSUM: Option<usize>;

    fn from_ip(address: IpAddr) -> Option<Self>;
    /// Address and mask of a prefix.
    fn from_net(net: IpNet) -> Option<(Self, Self)>;
    /// Source and destination; `header` has at least `HEADER` bytes.
    fn read(header: &[u8]) -> [Self; 2];
    fn write(header: &mut [u8], addresses: [Self; 2]);
    fn change(old: Self, new: Self) -> Change;
}

impl Address for u32 {
    const VERSION: u8 = 4;
    const HEADER: usize = 20;
    const CHECKSUM: Option<usize> = Some(10);

    fn from_ip(address: IpAddr) -> Option<Self> {
        match address {
            IpAddr::V4(a) => Some(a.to_bits()),
            IpAddr::V6(_) => None,
        }
    }

    fn from_net(net: IpNet) -> Option<(Self, Self)> {
        match net {
            IpNet::V4(n) => Some((n.network().to_bits(), n.netmask().to_bits())),
            IpNet::V6(_) => None,
        }
    }

    #[inline(always)]
    fn read(header: &[u8]) -> [Self; 2] {
        let h = &header[12..20];
        [
            Self::from_be_bytes([h[0], h[1], h[2], h[3]]),
            Self::from_be_bytes([h[4], h[5], h[6], h[7]]),
        ]
    }

    #[inline(always)]
    fn write(header: &mut [u8], [source, destination]: [Self; 2]) {
        header[12..16].copy_from_slice(&source.to_be_bytes());
        header[16..20].copy_from_slice(&destination.to_be_bytes());
    }

    fn change(old: Self, new: Self) -> Change {
        Change::of_bytes(&old.to_be_bytes(), &new.to_be_bytes())
    }
}

impl Address for u128 {
    const VERSION: u8 = 6;
    const HEADER: usize = 40;
    const CHECKSUM: Option<usize> = None;

    fn from_ip(address: IpAddr) -> Option<Self> {
        match address {
            IpAddr::V4(_) => None,
            IpAddr::V6(a) => Some(a.to_bits()),
        }
    }

    fn from_net(net: IpNet) -> Option<(Self, Self)> {
        match net {
            IpNet::V4(_) => None,
            IpNet::V6(n) => Some((n.network().to_bits(), n.netmask().to_bits())),
        }
    }

    #[inline(always)]
    fn read(header: &[u8]) -> [Self; 2] {
        let (mut source, mut destination) = ([0; 16], [0; 16]);
        source.copy_from_slice(&header[8..24]);
        destination.copy_from_slice(&header[24..40]);
        [Self::from_be_bytes(source), Self::from_be_bytes(destination)]
    }

    #[inline(always)]
    fn write(header: &mut [u8], [source, destination]: [Self; 2]) {
        header[8..24].copy_from_slice(&source.to_be_bytes());
        header[24..40].copy_from_slice(&destination.to_be_bytes());
    }

    fn change(old: Self, new: Self) -> Change {
        Change::of_bytes(&old.to_be_bytes(), &new.to_be_bytes())
    }
}

/// Prefixes and what becomes of the addresses in them, by longest match.
#[derive(Clone, Debug)]
pub(super) struct Table<A> {
    /// Single addresses, ordered: there may be hundreds of IP resources.
    hosts: Vec<Entry<A>>,
    /// Prefixes, the longest first: a handful.
    nets: Vec<Entry<A>>,
}

#[derive(Clone, Copy, Debug)]
struct Entry<A> {
    net: A,
    mask: A,
    to: A,
    /// The same for all addresses of the prefix, as their host bits stay.
    change: Change,
}

impl<A: Address> Table<A> {
    /// Entries of the other family are left out. A prefix given twice must have the same translation.
    pub(super) fn new(pairs: impl Iterator<Item = (IpNet, IpNet)>) -> Result<Self, RulesError> {
        let mut pairs: Vec<_> = pairs.map(|(from, to)| (from.trunc(), to.trunc())).collect();
        pairs.sort_by_key(|(from, _)| (std::cmp::Reverse(from.prefix_len()), from.network()));
        pairs.dedup();
        if let Some(twice) = pairs.windows(2).find(|w| w[0].0 == w[1].0) {
            return Err(RulesError::Ambiguous(twice[0].0));
        }
        let entries = pairs.into_iter().filter_map(|(from, to)| {
            let ((net, mask), (to, _)) = (A::from_net(from)?, A::from_net(to)?);
            Some((from, Entry { net, mask, to, change: A::change(net, to) }))
        });
        let (hosts, nets): (Vec<_>, Vec<_>) =
            entries.partition(|(from, _)| from.prefix_len() == from.max_prefix_len());
        Ok(Self {
            hosts: hosts.into_iter().map(|(_, entry)| entry).collect(),
            nets: nets.into_iter().map(|(_, entry)| entry).collect(),
        })
    }

    /// The translated address and what that adds to a checksum over it.
    #[inline]
    pub(super) fn translate(&self, address: A) -> Option<(A, Change)> {
        if let Ok(i) = self.hosts.binary_search_by_key(&address, |entry| entry.net) {
            return self.hosts.get(i).map(|entry| (entry.to, entry.change));
        }
        let entry = self.nets.iter().find(|entry| address & entry.mask == entry.net)?;
        Some((entry.to | (address & !entry.mask), entry.change))
    }
}

/// The prefix that holds only `address`.
pub(super) fn host(address: IpAddr) -> IpNet {
    address.into()
}
