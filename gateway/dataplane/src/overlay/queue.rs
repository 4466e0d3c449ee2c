//! Drops that the kernel counts at the TUN, which its reader does not see.

use std::fs;

use netlink::Netns;

use super::inner::TUN;

/// Column of a device in `net/dev`, whose first eight are about packets received.
const TX_DROPPED: usize = 8 + 3;

/// Packets of nodes that found the TUN's queue full, since that was made. `None` if it is not there.
pub fn tun_overflows(inner: &Netns) -> Option<u64> {
    let devices = inner.run(|| fs::read_to_string("/proc/thread-self/net/dev")).ok()?;
    tx_dropped(&devices.ok()?, TUN)
}

fn tx_dropped(devices: &str, name: &str) -> Option<u64> {
    let mut lines = devices.lines().filter_map(|line| line.split_once(':'));
    let (_, numbers) = lines.find(|(device, _)| device.trim() == name)?;
    numbers.split_whitespace().nth(TX_DROPPED)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICES: &str = "\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:       1       2    3    4    5     6          7         8        9      10   11   12   13    14      15         16
tunnel: 1000 10 0 1 0 0 0 0 2000 20 0 352 0 0 0 0
tunnel2: 0 0 0 0 0 0 0 0 0 0 0 7 0 0 0 0
";

    #[test]
    fn the_devices_own_number_is_found() {
        assert_eq!(tx_dropped(DEVICES, "tunnel"), Some(352));
        assert_eq!(tx_dropped(DEVICES, "tunnel2"), Some(7));
        assert_eq!(tx_dropped(DEVICES, "tun"), None);
    }
}
