use std::fmt::{self, Write as _};
use std::io::{BufRead, BufReader, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fabric_api::{PrivateKey, PublicKey};
use ipnet::IpNet;

use crate::{Host, Program, wait_until};

/// Folder in which `make peers` puts other WireGuards.
const PEERS_DIR: &str = "WEFT_PEERS_DIR";
/// The name of a stock peer's device.
pub const STOCK_DEVICE: &str = "wg0";

/// A userspace WireGuard of another make. All of them are configured over the UAPI socket
/// (<https://www.wireguard.com/xplatform/>).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StockPeer {
    WireguardGo,
    Boringtun,
    Gotatun,
}

/// Configuration of a stock peer.
#[derive(Clone, Debug)]
pub struct Tunnel {
    pub own: PrivateKey,
    pub peer: PublicKey,
    pub listen_port: u16,
    /// Address of the peer, unless it sends first.
    pub endpoint: Option<SocketAddr>,
    /// Seconds between persistent keepalives, the first of which may begin the handshake.
    pub keepalive: Option<u16>,
    /// Prefixes that the peer may send from. Routes lead there, too.
    pub allowed: Vec<IpNet>,
    /// The device's own addresses.
    pub addresses: Vec<IpNet>,
    /// The address that packets to the first of `allowed` come from.
    pub source: Option<IpAddr>,
    /// MTU of the device, in bytes.
    pub mtu: u32,
}

impl StockPeer {
    pub const ALL: [Self; 3] = [Self::WireguardGo, Self::Boringtun, Self::Gotatun];

    /// The program, if `make peers` could build it.
    pub fn program(self) -> Result<PathBuf> {
        let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
        let folder = std::env::var_os(PEERS_DIR).map(PathBuf::from);
        let path = folder.unwrap_or_else(|| home().join(".cache/weft/bin")).join(match self {
            // Go names programs after the last part of their module's path.
            Self::WireguardGo => "wireguard",
            Self::Boringtun => "boringtun-cli",
            Self::Gotatun => "gotatun",
        });
        ensure!(path.exists(), "{self} is not there: {}", path.display());
        Ok(path)
    }

    /// Version that the program reports.
    pub fn version(self) -> Result<String> {
        let output = Command::new(self.program()?).arg("--version").output();
        let output = output.with_context(|| format!("starting {self}"))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let line = text.lines().next().map(str::to_owned);
        line.with_context(|| format!("{self} prints no version"))
    }

    /// Runs the program on a machine, with the device [`STOCK_DEVICE`].
    pub fn start(self, host: &Host, tunnel: &Tunnel) -> Result<Program> {
        let process =
            host.start(&mut self.command()?, &host.outside(format!("/run/{self}.log")))?;
        configure(host, &tunnel.uapi())
            .with_context(|| format!("{self} logged: {}", process.log()))?;
        host.ip(&tunnel.device()).with_context(|| format!("setting the device of {self} up"))?;
        Ok(process)
    }

    fn command(self) -> Result<Command> {
        let mut command = Command::new(self.program()?);
        match self {
            Self::WireguardGo => command.args(["-f", STOCK_DEVICE]).env("LOG_LEVEL", "error"),
            Self::Boringtun | Self::Gotatun => {
                let own_rights = "--disable-drop-privileges";
                command.args(["--foreground", own_rights, "--verbosity", "error", STOCK_DEVICE])
            }
        };
        Ok(command)
    }
}

/// The name of the program, as its authors write it.
impl fmt::Display for StockPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::WireguardGo => "wireguard-go",
            Self::Boringtun => "boringtun",
            Self::Gotatun => "gotatun",
        })
    }
}

impl Tunnel {
    /// Keys in hexadecimal.
    fn uapi(&self) -> String {
        let (own, peer) = (hex(self.own.expose()), hex(self.peer.as_bytes()));
        let port = self.listen_port;
        let mut text = format!("private_key={own}\nlisten_port={port}\npublic_key={peer}\n");
        if let Some(endpoint) = self.endpoint {
            let _ = writeln!(text, "endpoint={endpoint}");
        }
        if let Some(keepalive) = self.keepalive {
            let _ = writeln!(text, "persistent_keepalive_interval={keepalive}");
        }
        for allowed in &self.allowed {
            let _ = writeln!(text, "allowed_ip={allowed}");
        }
        text
    }

    fn device(&self) -> String {
        let mut batch = String::new();
        for address in &self.addresses {
            let nodad = if address.addr().is_ipv6() { " nodad" } else { "" };
            let _ = writeln!(batch, "addr add {address} dev {STOCK_DEVICE}{nodad}");
        }
        let _ = writeln!(batch, "link set {STOCK_DEVICE} mtu {} up", self.mtu);
        for allowed in &self.allowed {
            let _ = writeln!(batch, "route replace {allowed} dev {STOCK_DEVICE}");
        }
        if let (Some(first), Some(source)) = (self.allowed.first(), self.source) {
            let _ = writeln!(batch, "route replace {first} dev {STOCK_DEVICE} src {source}");
        }
        batch
    }
}

/// A UAPI `set`, which an empty line ends.
fn configure(host: &Host, config: &str) -> Result<()> {
    let socket = host.outside(format!("/run/wireguard/{STOCK_DEVICE}.sock"));
    let connect = || UnixStream::connect(&socket);
    let mut stream = wait_until("the stock peer is up", Duration::from_secs(10), connect)?;
    stream.write_all(format!("set=1\n{config}\n").as_bytes()).context("configuring it")?;
    let mut reply = String::new();
    BufReader::new(stream).read_line(&mut reply).context("reading its reply")?;
    ensure!(reply.trim() == "errno=0", "it refused its config: {}", reply.trim());
    Ok(())
}

/// Bytes as two digits each, as the UAPI has keys.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stock_keys_are_hex_and_routes_follow_allowed_ips() {
        let own = PrivateKey::from_bytes(&[0x0f; 32]).unwrap();
        let tunnel = Tunnel {
            peer: own.public(),
            own,
            listen_port: 7,
            endpoint: Some("[2001:db8::2]:51821".parse().unwrap()),
            keepalive: None,
            allowed: vec!["10.0.0.0/8".parse().unwrap(), "fd00::/8".parse().unwrap()],
            addresses: vec!["10.9.0.1/32".parse().unwrap()],
            source: Some("10.9.0.1".parse().unwrap()),
            mtu: 1340,
        };
        let text = tunnel.uapi();
        assert!(text.starts_with(&format!("private_key={}\n", "0f".repeat(32))));
        assert!(text.contains("\nendpoint=[2001:db8::2]:51821\nallowed_ip=10.0.0.0/8\n"));
        assert!(text.ends_with("\nallowed_ip=fd00::/8\n"));
        assert!(tunnel.device().ends_with("route replace 10.0.0.0/8 dev wg0 src 10.9.0.1\n"));
    }
}
