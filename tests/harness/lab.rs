use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use anyhow::Result;
use ipnet::IpNet;

use crate::{Capture, Files, Host};

/// The underlay's own addresses: where machines send what they have no better route for. The
/// switch forwards none of it, so whatever leaks can be seen there and gets no further.
pub const SWITCH_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
pub const SWITCH_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 1);

/// One Ethernet segment with machines on it.
///
/// ```text
///   rome-1 eth0 --+
///   rome-2 eth0 --+-- br0 (192.0.2.1/24, 2001:db8:2::1/64)
///  milan-1 eth0 --+
/// ```
pub struct Lab {
    group: String,
    switch: Host,
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
        Ok(Self { group: group.to_owned(), switch })
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

    fn plug_in(&self, name: &str, host: Host, addresses: &[IpNet]) -> Result<Host> {
        self.switch.net().ip(&format!(
            "link add name {name} type veth peer name eth0 netns {}\n\
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
        let nodad = if address.addr().is_ipv6() { " nodad" } else { "" };
        batch += &format!("addr add {address} dev eth0{nodad}\n");
    }
    if addresses.iter().any(|a| a.addr().is_ipv4()) {
        batch += &format!("route add default via {SWITCH_V4}\n");
    }
    if addresses.iter().any(|a| a.addr().is_ipv6()) {
        batch += &format!("route add default via {SWITCH_V6}\n");
    }
    batch
}

/// The segment's prefix around an address.
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
