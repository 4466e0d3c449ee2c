use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Result;
use ipnet::IpNet;

use crate::{Capture, Files, Host, Machines};

/// The underlay's own addresses: where machines send what they have no better route for. The
/// switch forwards none of it, so whatever leaks can be seen there and gets no further.
pub const SWITCH_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
pub const SWITCH_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 1);
/// Addresses of a router on the segment.
pub(crate) const ROUTER_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
pub(crate) const ROUTER_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 2);

/// One Ethernet segment with machines on it, and maybe a machine behind a router.
///
/// ```text
///   rome-1 eth0 --+
///   rome-2 eth0 --+-- br0 (192.0.2.1/24, 2001:db8:2::1/64)
///  milan-1 eth0 --+
///   router eth0 --+    198.51.100.1/24, 2001:db8:3::1 --- eth0 of a machine behind it
/// ```
pub struct Lab {
    group: String,
    switch: Host,
    machines: Mutex<Machines>,
}

impl Lab {
    /// An empty segment. `group` is the name under which a later process finds what is left.
    pub fn new(group: &str) -> Result<Self> {
        let switch = Host::new(group, "switch")?;
        switch.ip(&format!(
            "link add br0 type bridge mcast_snooping 0 forward_delay 0\n\
             addr add {SWITCH_V4}/24 dev br0\n\
             addr add {SWITCH_V6}/64 dev br0 nodad\n\
             link set br0 up\n"
        ))?;
        Ok(Self { group: group.to_owned(), switch, machines: Mutex::default() })
    }

    /// The machine in the middle.
    pub fn switch(&self) -> &Host {
        &self.switch
    }

    /// A machine on the segment: its `eth0` has these addresses, and the default routes lead to
    /// the switch. The other end of its cable has the machine's name.
    pub fn machine(&self, name: &str, addresses: &[IpNet]) -> Result<Host> {
        let host = self.switch.nested(&self.group, name, Files::Own)?;
        self.plug_in(name, host, addresses)
    }

    /// A machine that shares the files of another one, as over NFS.
    pub fn machine_beside(&self, other: &Host, name: &str, addresses: &[IpNet]) -> Result<Host> {
        let host = other.nested(&self.group, name, Files::Shared)?;
        self.plug_in(name, host, addresses)
    }

    /// A router on the segment, at .2 and ::2.
    pub fn router(&self) -> Result<Host> {
        let router =
            self.machine("router", &[ROUTER_V4.into(), ROUTER_V6.into()].map(on_segment))?;
        router.net().sysctl(&[("ipv4/ip_forward", "1"), ("ipv6/conf/all/forwarding", "1")])?;
        Ok(router)
    }

    /// A machine like [`Self::machine_beside`], whose `eth0` leads to a router and no further.
    pub fn machine_behind(
        &self,
        router: &Host,
        other: &Host,
        (name, addresses): (&str, &[IpNet]),
    ) -> Result<Host> {
        let host = other.nested(&self.group, name, Files::Shared)?;
        let gateways: String = addresses
            .iter()
            .map(|a| format!("addr add {}/{} dev {name}{}\n", first(a), a.prefix_len(), nodad(a)))
            .collect();
        router.net().ip(&format!(
            "link add name {name} type veth peer name eth0 netns {}\n\
             link set dev {name} up\n{gateways}",
            host.holder()
        ))?;
        host.ip(&interface(addresses))?;
        Ok(host)
    }

    /// Machines that were plugged in so far.
    pub fn machines(&self) -> Machines {
        self.plugged_in().clone()
    }

    fn plugged_in(&self) -> MutexGuard<'_, Machines> {
        self.machines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn plug_in(&self, name: &str, host: Host, addresses: &[IpNet]) -> Result<Host> {
        let mac = self.plugged_in().add(name).map(|byte| format!("{byte:02x}")).join(":");
        self.switch.net().ip(&format!(
            "link add name {name} type veth peer name eth0 address {mac} netns {}\n\
             link set dev {name} master br0 up\n",
            host.holder()
        ))?;
        host.ip(&interface(addresses))?;
        Ok(host)
    }

    /// Cuts this machine's cable, while its device stays up.
    pub fn cut(&self, machine: &str) -> Result<()> {
        self.port_state(machine, 0)
    }

    pub fn restore(&self, machine: &str) -> Result<()> {
        self.port_state(machine, 3)
    }

    /// Has `look` see everything that passes the switch.
    pub fn capture(&self, look: impl FnMut(&[u8]) + Send + 'static) -> Result<Capture> {
        Capture::start(self.switch.net(), look)
    }

    /// Lets the switch outlive this process.
    pub fn keep(self) -> Result<()> {
        self.switch.keep()
    }

    fn port_state(&self, machine: &str, state: u8) -> Result<()> {
        let mut bridge = std::process::Command::new("bridge");
        bridge.args(["link", "set", "dev", machine, "state", &state.to_string()]);
        self.switch.command(&mut bridge, "").map(drop)
    }
}

fn interface(addresses: &[IpNet]) -> String {
    let mut batch = String::from("link set eth0 up\n");
    for address in addresses {
        batch += &format!("addr add {address} dev eth0{}\n", nodad(address));
    }
    for address in addresses {
        // There may be several of a family.
        batch += &format!("route replace default via {}\n", first(address));
    }
    batch
}

fn nodad(address: &IpNet) -> &'static str {
    if address.addr().is_ipv6() { " nodad" } else { "" }
}

/// First address of a subnet: that of the switch, or of a router.
fn first(address: &IpNet) -> IpAddr {
    match address.network() {
        IpAddr::V4(network) => Ipv4Addr::from_bits(network.to_bits() + 1).into(),
        IpAddr::V6(network) => Ipv6Addr::from_bits(network.to_bits() + 1).into(),
    }
}

/// The prefix of a segment around an address.
pub fn on_segment(address: IpAddr) -> IpNet {
    let len = if address.is_ipv4() { 24 } else { 64 };
    IpNet::new(address, len).expect("24 and 64 are lengths of prefixes")
}

/// Time after which a packet from one end of a lab to the other counts as lost: long, since a
/// machine that is busy building something starves the programs that carry the packet.
pub const TIMEOUT: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traffic::ping;

    #[test]
    fn machines_reach_each_other_until_the_cable_is_cut() {
        let lab = Lab::new("weft-lab-test").unwrap();
        let net = |last| on_segment([192, 0, 2, last].into());
        let a = lab.machine("a", &[net(11)]).unwrap();
        let _b = lab.machine("b", &["192.0.2.12/24".parse().unwrap()]).unwrap();
        let to = [192, 0, 2, 12].into();

        assert_eq!(ping(a.net(), to, 3).unwrap().lost, 0);
        lab.cut("b").unwrap();
        assert_eq!(ping(a.net(), to, 1).unwrap().lost, 1);
        lab.restore("b").unwrap();
        assert_eq!(ping(a.net(), to, 1).unwrap().lost, 0);
    }
}
