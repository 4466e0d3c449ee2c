//! wireguard-go, the tunnel to beat: built from the Go module proxy, told over its UAPI socket.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use fabric_api::{PrivateKey, PublicKey};
use weft_tests::{Host, Program, wait_until};

use crate::bout::Contestant;
use crate::flow::Load;
use crate::lab::{Lab, UNDERLAY};

/// Always the same one, so that reports of different days can be put side by side.
const MODULE: &str = "golang.zx2c4.com/wireguard@v0.0.0-20260522210424-ecfc5a8d5446";
/// Where `make peers` puts other WireGuards.
const PEERS_DIR: &str = "WEFT_PEERS_DIR";
const PORT: u16 = 51821;
const DEVICE: &str = "wg0";

/// The program, built into `WEFT_PEERS_DIR` or `~/.cache/weft/bin` unless it is there already.
///
/// `None` if there is no Go to build it with.
pub(crate) fn build() -> Result<Option<PathBuf>> {
    let folder = match std::env::var_os(PEERS_DIR) {
        Some(folder) => PathBuf::from(folder),
        None => {
            Path::new(&std::env::var_os("HOME").context("HOME is not set")?).join(".cache/weft/bin")
        }
    };
    // Go names programs after the last word of their module.
    let built = folder.join("wireguard");
    if built.exists() {
        return Ok(Some(built));
    }
    let runs = |go: &&str| Command::new(go).arg("version").output().is_ok();
    let Some(go) = ["go", "/usr/local/go/bin/go"].into_iter().find(runs) else { return Ok(None) };
    eprintln!("building wireguard-go into {} ...", folder.display());
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("making folder {}", folder.display()))?;
    let output = Command::new(go).args(["install", MODULE]).env("GOBIN", &folder).output();
    let output = output.context("starting go")?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "go install {MODULE} failed: {}", complaint.trim());
    Ok(Some(built))
}

/// What the program says it is.
pub(crate) fn version(program: &Path) -> Result<String> {
    let output =
        Command::new(program).arg("--version").output().context("starting wireguard-go")?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().next().map(str::to_owned).context("wireguard-go does not tell its version")
}

/// A tunnel between the two gateways of `lab`.
pub(crate) fn start(
    lab: &Lab,
    program: &Path,
    number: u8,
    load: Load<'_>,
) -> Result<(Contestant, Vec<Program>)> {
    let keys = [PrivateKey::generate(), PrivateKey::generate()];
    let mut running = Vec::new();
    for (side, gateway) in lab.gateways().iter().enumerate() {
        let mut command = Command::new(program);
        command.args(["-f", DEVICE]).env("LOG_LEVEL", "error");
        let process = lab.start(side, &mut command)?;
        let (own, peer) = (&keys[side], keys[1 - side].public());
        let config = config(own, &peer, UNDERLAY[1 - side].into());
        configure(gateway, &config)
            .with_context(|| format!("wireguard-go says: {}", process.log()))?;
        running.push(process);
    }
    let flows = lab.flows(number, DEVICE, load).context("no way through wireguard-go")?;
    let contestant = Contestant {
        label: "wireguard-go".to_owned(),
        pids: running.iter().map(Program::pid).collect(),
        sender: lab.sender(),
        flows,
    };
    Ok((contestant, running))
}

/// A UAPI `set` (<https://www.wireguard.com/xplatform/>): keys in hexadecimal, an empty line ends it.
fn config(own: &PrivateKey, peer: &PublicKey, peer_address: std::net::IpAddr) -> String {
    format!(
        "set=1\n\
         private_key={}\n\
         listen_port={PORT}\n\
         public_key={}\n\
         endpoint={peer_address}:{PORT}\n\
         persistent_keepalive_interval=5\n\
         allowed_ip=0.0.0.0/0\n\n",
        hex(own.expose()),
        hex(peer.as_bytes())
    )
}

fn configure(gateway: &Host, config: &str) -> Result<()> {
    let socket = gateway.outside(format!("/run/wireguard/{DEVICE}.sock"));
    let connect = || UnixStream::connect(&socket);
    let mut stream = wait_until("wireguard-go is up", Duration::from_secs(5), connect)?;
    stream.write_all(config.as_bytes()).context("configuring wireguard-go")?;
    let mut reply = String::new();
    BufReader::new(stream).read_line(&mut reply).context("reading wireguard-go's reply")?;
    if reply.trim() != "errno=0" {
        bail!("wireguard-go refused its config: {}", reply.trim());
    }
    Ok(())
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_told_in_hexadecimal_and_an_empty_line_ends_the_config() {
        let own = PrivateKey::from_bytes(&[0x0f; 32]).unwrap();
        let text = config(&own, &own.public(), "192.0.2.2".parse().unwrap());
        assert!(text.starts_with(&format!("set=1\nprivate_key={}\n", "0f".repeat(32))));
        assert!(text.contains("\nendpoint=192.0.2.2:51821\n") && text.ends_with("\n\n"));
    }
}
