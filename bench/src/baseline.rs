//! A stock WireGuard, the tunnel to beat.

use anyhow::{Context, Result};
use fabric_api::PrivateKey;
use weft_tests::{Program, STOCK_DEVICE, StockPeer, Tunnel};

use crate::abba::Contestant;
use crate::flow::Load;
use crate::lab::{Lab, MTU, UNDERLAY};

const PORT: u16 = 51821;

/// A tunnel between the two gateways of `lab`.
pub(crate) fn start(
    lab: &Lab,
    peer: StockPeer,
    number: u8,
    load: Load<'_>,
) -> Result<(Contestant, Vec<Program>)> {
    let keys = [PrivateKey::generate(), PrivateKey::generate()];
    let mut running = Vec::new();
    for (side, gateway) in lab.gateways().iter().enumerate() {
        let tunnel = Tunnel {
            own: keys[side].clone(),
            peer: keys[1 - side].public(),
            listen_port: PORT,
            endpoint: Some((UNDERLAY[1 - side], PORT).into()),
            keepalive: Some(5),
            allowed: vec!["10.0.0.0/8".parse()?],
            addresses: Vec::new(),
            source: None,
            mtu: MTU,
        };
        running.push(peer.start(gateway, &tunnel)?);
    }
    let flows = lab.flows(number, STOCK_DEVICE, load);
    let flows = flows.with_context(|| format!("no way through {peer}"))?;
    let contestant = Contestant {
        label: peer.to_string(),
        pids: running.iter().map(Program::pid).collect(),
        sender: lab.sender(),
        flows,
    };
    Ok((contestant, running))
}
