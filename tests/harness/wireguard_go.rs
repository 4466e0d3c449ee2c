use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write as _};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fabric_api::{PrivateKey, PublicKey};
use ipnet::IpNet;

use crate::{Host, Program, wait_until};

/// Where `make peers` puts other WireGuards.
const PEERS_DIR: &str = "WEFT_PEERS_DIR";
const DEVICE: &str = "wg0";

/// What a WireGuard of another make is told.
pub struct Tunnel {
    pub own: PrivateKey,
    pub peer: PublicKey,
    pub listen_port: u16,
    /// Where the peer is, unless it comes first.
    pub endpoint: Option<SocketAddr>,
    /// What the peer may send from. Routes lead there, too.
    pub allowed: Vec<IpNet>,
    /// The device's own addresses.
    pub addresses: Vec<IpNet>,
    /// In bytes.
    pub mtu: u32,
}

/// Where the program wireguard-go is, if `make peers` could build it.
pub fn wireguard_go() -> PathBuf {
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
    let folder = std::env::var_os(PEERS_DIR).map(PathBuf::from);
    // Go names programs after the last word of their module.
    folder.unwrap_or_else(|| home().join(".cache/weft/bin")).join("wireguard")
}

/// Runs wireguard-go on a machine, with the device `wg0`.
pub fn start_wireguard_go(program: &Path, host: &Host, tunnel: &Tunnel) -> Result<Program> {
    let mut command = Command::new(program);
    command.args(["-f", DEVICE]).env("LOG_LEVEL", "error");
    let process = host.start(&mut command, &host.outside("/run/wireguard-go.log"))?;
    configure(host, &uapi(tunnel))
        .with_context(|| format!("wireguard-go says: {}", process.log()))?;
    host.ip(&device(tunnel)).context("setting wireguard-go's device up")?;
    Ok(process)
}

/// A `set` of <https://www.wireguard.com/xplatform/>: keys in hexadecimal, an empty line ends it.
fn uapi(tunnel: &Tunnel) -> String {
    let (own, peer) = (hex(tunnel.own.expose()), hex(tunnel.peer.as_bytes()));
    let port = tunnel.listen_port;
    let mut text = format!("set=1\nprivate_key={own}\nlisten_port={port}\npublic_key={peer}\n");
    if let Some(endpoint) = tunnel.endpoint {
        let _ = write!(text, "endpoint={endpoint}\npersistent_keepalive_interval=1\n");
    }
    for allowed in &tunnel.allowed {
        let _ = writeln!(text, "allowed_ip={allowed}");
    }
    text + "\n"
}

fn device(tunnel: &Tunnel) -> String {
    let mut batch = String::new();
    for address in &tunnel.addresses {
        let nodad = if address.addr().is_ipv6() { " nodad" } else { "" };
        let _ = writeln!(batch, "addr add {address} dev {DEVICE}{nodad}");
    }
    let _ = writeln!(batch, "link set {DEVICE} mtu {} up", tunnel.mtu);
    for allowed in &tunnel.allowed {
        let _ = writeln!(batch, "route replace {allowed} dev {DEVICE}");
    }
    batch
}

fn configure(host: &Host, config: &str) -> Result<()> {
    let socket = host.outside(format!("/run/wireguard/{DEVICE}.sock"));
    let connect = || UnixStream::connect(&socket);
    let mut stream = wait_until("wireguard-go is up", Duration::from_secs(10), connect)?;
    stream.write_all(config.as_bytes()).context("configuring wireguard-go")?;
    let mut reply = String::new();
    BufReader::new(stream).read_line(&mut reply).context("reading wireguard-go's reply")?;
    ensure!(reply.trim() == "errno=0", "wireguard-go refused its config: {}", reply.trim());
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_told_in_hexadecimal_and_an_empty_line_ends_the_config() {
        let own = PrivateKey::from_bytes(&[0x0f; 32]).unwrap();
        let tunnel = Tunnel {
            peer: own.public(),
            own,
            listen_port: 7,
            endpoint: Some("192.0.2.2:51821".parse().unwrap()),
            allowed: vec!["10.0.0.0/8".parse().unwrap(), "fd00::/8".parse().unwrap()],
            addresses: Vec::new(),
            mtu: 1340,
        };
        let text = uapi(&tunnel);
        assert!(text.starts_with(&format!("set=1\nprivate_key={}\n", "0f".repeat(32))));
        assert!(text.contains("\nendpoint=192.0.2.2:51821\n"));
        assert!(text.ends_with("\nallowed_ip=10.0.0.0/8\nallowed_ip=fd00::/8\n\n"));
    }
}
