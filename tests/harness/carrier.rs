//! Frames of the overlay among those that a [`crate::Capture`] of a segment sees.

use std::collections::BTreeMap;

const VXLAN: u16 = 4879;
/// Ports of flannel's and Calico's VXLAN, which carry what is sent to a gateway's pod.
const NETWORKS: [u16; 2] = [8472, 4789];
/// Headers of VXLAN within a datagram.
const HEADERS: usize = 16;

/// Carrier of a pod's packet between machines of one cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    Vxlan,
    /// ICMP error by which a host without weft refuses VXLAN: it quotes what the host was sent.
    Error,
}

/// Machines of a segment, each with its cluster, by hardware address.
#[derive(Clone, Debug, Default)]
pub struct Machines(BTreeMap<[u8; 6], String>);

impl Machines {
    /// Adds a machine, `CLUSTER-NUMBER`; returns its hardware address.
    pub(crate) fn add(&mut self, name: &str) -> [u8; 6] {
        let [high, low] = (self.0.len() as u16).to_be_bytes();
        let mac = [2, b'w', b'e', b'f', high, low];
        let cluster = name.rsplit_once('-').map_or(name, |(cluster, _)| cluster);
        self.0.insert(mac, cluster.to_owned());
        mac
    }

    /// Carrier of a frame from one machine of a cluster to another one. VXLAN that leaves by a
    /// default route has none.
    pub fn carrier(&self, frame: &[u8]) -> Option<Carrier> {
        let cluster = |at: usize| self.0.get(frame.get(at..at + 6)?);
        carrier(frame).filter(|_| cluster(0).is_some() && cluster(0) == cluster(6))
    }
}

fn carrier(frame: &[u8]) -> Option<Carrier> {
    let (protocol, transport, header) = match frame.get(12..14)? {
        [8, 0] => (*frame.get(23)?, 14 + usize::from(frame[14] & 15) * 4, 20),
        [0x86, 0xdd] => (*frame.get(20)?, 54, 40),
        _ => return None,
    };
    let (carrier, udp) = match (i32::from(protocol), frame.get(transport..transport + 2)?) {
        (libc::IPPROTO_UDP, _) => (Carrier::Vxlan, transport),
        (libc::IPPROTO_ICMP, [3, 3]) | (libc::IPPROTO_ICMPV6, [1, 4]) => {
            (Carrier::Error, transport + 8 + header)
        }
        _ => return None,
    };
    match u16::from_be_bytes(frame.get(udp + 2..udp + 4)?.try_into().ok()?) {
        VXLAN => Some(carrier),
        port if NETWORKS.contains(&port) => self::carrier(frame.get(udp + HEADERS..)?),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// IPv4 UDP datagram to VXLAN's port.
    fn vxlan(to: [u8; 6], from: [u8; 6]) -> Vec<u8> {
        let mut frame = [to, from].concat();
        frame.extend([8, 0, 0x45]);
        frame.resize(23, 0);
        frame.push(17);
        frame.resize(36, 0);
        frame.extend(VXLAN.to_be_bytes());
        frame
    }

    #[test]
    fn vxlan_within_that_of_networks_has_its_carrier() {
        let mut machines = Machines::default();
        let [rome_1, rome_2] = ["rome-1", "rome-2"].map(|name| machines.add(name));
        let within = |network: u16, port: u16| {
            let mut frame = vxlan(rome_1, rome_2);
            let length = frame.len();
            frame[length - 2..].copy_from_slice(&network.to_be_bytes());
            frame.resize(34 + HEADERS, 0);
            let mut inner = vxlan([1; 6], [2; 6]);
            let length = inner.len();
            inner[length - 2..].copy_from_slice(&port.to_be_bytes());
            [frame, inner].concat()
        };

        for network in NETWORKS {
            assert_eq!(machines.carrier(&within(network, VXLAN)), Some(Carrier::Vxlan));
            assert_eq!(machines.carrier(&within(network, 80)), None);
        }
    }

    #[test]
    fn vxlan_to_another_cluster_or_the_switch_has_none() {
        let mut machines = Machines::default();
        let [rome_1, rome_2, milan_1] = ["rome-1", "rome-2", "milan-1"].map(|n| machines.add(n));
        let switch = [6; 6];

        assert_eq!(machines.carrier(&vxlan(rome_1, rome_2)), Some(Carrier::Vxlan));
        assert_eq!(machines.carrier(&vxlan(milan_1, rome_2)), None);
        assert_eq!(machines.carrier(&vxlan(switch, rome_2)), None);
        assert_eq!(machines.carrier(&vxlan(switch, switch)), None);
    }
}
