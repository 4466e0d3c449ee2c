//! Four machines in a row, and how to lead a tunnel's packets through the two in the middle.
//!
//! ```text
//! end a (10.10.0.1) -- gateway a (192.0.2.1) ==underlay== gateway b (192.0.2.2) -- end b (10.20.0.1)
//! ```

use std::net::Ipv4Addr;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use weft_tests::{Host, Program, wait_until};

use crate::flow::{CONGESTION, End};

/// Machines of a run carry this name, so that `ps` shows what they are.
const GROUP: &str = "weft-bench";
/// MTU of the tunnels: what WireGuard leaves of 1,500 bytes over IPv6.
pub(crate) const MTU: u32 = 1420;
/// Underlay addresses of the gateways.
pub(crate) const UNDERLAY: [Ipv4Addr; 2] =
    [Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2)];
/// Addresses of the ends.
const ENDS: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 10, 0, 1), Ipv4Addr::new(10, 20, 0, 1)];

/// Dies with its value and with this process, whatever kills that.
pub(crate) struct Lab {
    ends: [Host; 2],
    gateways: [Host; 2],
}

impl Lab {
    pub(crate) fn new() -> Result<Self> {
        let host = |name| Host::new(GROUP, name);
        let lab = Self {
            ends: [host("end-a")?, host("end-b")?],
            gateways: [host("gateway-a")?, host("gateway-b")?],
        };
        let [a, b] = &lab.gateways;
        link(a, b, "under")?;
        for (gateway, address) in lab.gateways.iter().zip(UNDERLAY) {
            gateway.net().ip(&format!("address add {address}/24 dev under\nlink set under up"))?;
            gateway.net().sysctl(&[("ipv4/ip_forward", "1")])?;
        }
        for (end, gateway) in lab.ends.iter().zip(&lab.gateways) {
            link(end, gateway, "lan")?;
            end.net()
                .ip(&format!("link set lan mtu {MTU} up\naddress add 198.51.100.2/24 dev lan"))?;
            let address = "address add 198.51.100.1/24 dev lan";
            gateway.net().ip(&format!("link set lan mtu {MTU} up\n{address}"))?;
        }
        Ok(lab)
    }

    /// Gateway a, then gateway b.
    pub(crate) fn gateways(&self) -> &[Host; 2] {
        &self.gateways
    }

    /// Starts a program on a gateway; its log goes with the machine.
    pub(crate) fn start(&self, side: usize, command: &mut Command) -> Result<Program> {
        let gateway = &self.gateways[side];
        let program = command.get_program().to_string_lossy().replace('/', "_");
        gateway.start(command, &gateway.outside(format!("/run/{program}.log")))
    }

    /// Waits until both gateways have this device.
    pub(crate) fn wait_for_device(&self, device: &str) -> Result<()> {
        self.gateways.iter().try_for_each(|gateway| {
            let show = || gateway.net().ip(&format!("link show dev {device}"));
            wait_until(&format!("there is a device {device}"), Duration::from_secs(5), show)
        })
    }

    /// Leads packets between the ends through the devices `device` of both gateways.
    pub(crate) fn ends(&self, device: &str) -> Result<[End; 2]> {
        for (side, (near, far)) in
            [(0, 1), (1, 0)].map(|(n, f)| (ENDS[n], ENDS[f])).iter().enumerate()
        {
            self.gateways[side].net().ip(&format!(
                "link set {device} mtu {MTU} up\n\
                 route replace {near} via 198.51.100.2\n\
                 route replace {far} dev {device}\n"
            ))?;
            self.ends[side].net().ip(&format!(
                "address add {near}/32 dev lan\n\
                 route replace {far} via 198.51.100.1 src {near} congctl {CONGESTION}\n"
            ))?;
        }
        let end = |side: usize| {
            let address = ENDS[side].into();
            End { net: self.ends[side].net().clone(), address, seen: address }
        };
        Ok([end(0), end(1)])
    }

    /// Switches UDP segmentation of the underlay on or off: without it, the kernel cuts trains
    /// before they leave a gateway, and each datagram arrives alone.
    pub(crate) fn set_udp_segmentation(&self, on: bool) -> Result<()> {
        let state = if on { "on" } else { "off" };
        self.gateways.iter().try_for_each(|gateway| {
            let mut ethtool = Command::new("ethtool");
            ethtool.args(["-K", "under", "tx-udp-segmentation", state]);
            gateway.command(&mut ethtool, "").map(drop).context("switching UDP segmentation")
        })
    }
}

/// A cable with an end of the same name on both machines.
fn link(a: &Host, b: &Host, device: &str) -> Result<()> {
    let far = b.holder();
    a.net().ip(&format!("link add {device} type veth peer name {device} netns {far}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn udp_segmentation_is_switched() {
        weft_tests::require(&[("ethtool", "ethtool")]).unwrap();
        let lab = Lab::new().unwrap();
        let is_on = || {
            let mut show = Command::new("ethtool");
            let features = lab.gateways[1].command(show.args(["-k", "under"]), "").unwrap();
            features.contains("tx-udp-segmentation: on")
        };
        assert!(is_on());
        lab.set_udp_segmentation(false).unwrap();
        assert!(!is_on());
        lab.set_udp_segmentation(true).unwrap();
        assert!(is_on());
    }
}
