//! ipam with a real API server.

#![allow(clippy::unwrap_used, reason = "all of it is test code")]

mod replicas;
mod tokens;

use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use api_server::ApiServer;
use ipam_proto::Address;
use ipam_proto::ipam_client::IpamClient;
use tonic::transport::Channel;

const TIMEOUT: Duration = Duration::from_secs(20);

/// A running ipam. Dies with its value.
struct Ipam(Child, Address);

impl Drop for Ipam {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

impl Ipam {
    fn start(server: &ApiServer, dir: &Path, name: &str, more: &[&str]) -> Self {
        let address = Address::Unix(dir.join(name));
        let mut ipam = Command::new("setpriv");
        ipam.args(["--pdeathsig", "KILL", env!("CARGO_BIN_EXE_ipam")]).args(more);
        ipam.arg("--kubeconfig").arg(server.admin());
        ipam.args(["--listen", &address.to_string()]);
        Self(ipam.spawn().unwrap(), address)
    }

    async fn client(&self) -> IpamClient<Channel> {
        let began = Instant::now();
        loop {
            match self.1.endpoint().unwrap().connect().await {
                Ok(channel) => return IpamClient::new(channel),
                Err(error) => assert!(began.elapsed() < TIMEOUT, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}
