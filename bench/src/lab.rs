//! Four machines in a row, and how to lead a tunnel's packets through the two in the middle.
//!
//! ```text
//! end a -- gateway a ==underlay== gateway b -- end b
//! ```
//!
//! Every tunnel has a number N: its packets go from 10.10.N.1 at end a to 10.20.N.1 at end b and
//! back, so that several tunnels can be up side by side.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use weft_tests::{Host, Netns, Program, wait_until};

use crate::flow::{End, Flow, Load};

/// Machines of a run carry this name, so that `ps` shows what they are.
const GROUP: &str = "weft-bench";
/// MTU of the tunnels: what WireGuard leaves of 1,500 bytes over IPv6.
pub(crate) const MTU: u32 = 1420;
/// Underlay addresses of the gateways.
pub(crate) const UNDERLAY: [Ipv4Addr; 2] =
    [Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2)];

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

    /// Leads the packets of tunnel `number` through the devices `device` of both gateways, and
    /// opens flows through it.
    pub(crate) fn flows(&self, number: u8, device: &str, load: Load<'_>) -> Result<Vec<Flow>> {
        let congestion = load.congestion;
        let near_and_far = [(10, 20), (20, 10)];
        for (side, (near, far)) in near_and_far.into_iter().enumerate() {
            self.gateways[side].net().ip(&format!(
                "link set {device} mtu {MTU} up\n\
                 route replace 10.{near}.{number}.0/24 via 198.51.100.2\n\
                 route replace 10.{far}.{number}.0/24 dev {device}\n"
            ))?;
            self.ends[side].net().ip(&format!(
                "address add 10.{near}.{number}.1/32 dev lan\n\
                 route replace 10.{far}.{number}.0/24 via 198.51.100.1 \
                 src 10.{near}.{number}.1 congctl {congestion}\n"
            ))?;
        }
        let end = |side: usize, net| End {
            net: self.ends[side].net().clone(),
            address: SocketAddr::new([10, net, number, 1].into(), 0),
        };
        (0..load.flows).map(|_| Flow::open(&end(0, 10), &end(1, 20), load)).collect()
    }

    /// Namespace that the flows are sent from.
    pub(crate) fn sender(&self) -> Netns {
        self.ends[0].net().clone()
    }
}

/// A cable with an end of the same name on both machines.
fn link(a: &Host, b: &Host, device: &str) -> Result<()> {
    let far = b.holder();
    a.net().ip(&format!("link add {device} type veth peer name {device} netns {far}"))
}
