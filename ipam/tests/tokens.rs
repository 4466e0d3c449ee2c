//! Tokens of service accounts, reviewed by a real API server.

#![allow(clippy::unwrap_used, reason = "all of it is test code")]

use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use api_server::{ApiServer, skip};
use ipam_proto::ipam_client::IpamClient;
use ipam_proto::{Address, NetworkAvailableRequest};
use tonic::{Code, Request};

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

    /// Answer to a request. There are no Networks here, so none is granted.
    async fn answer(&self, token: Option<&str>) -> Code {
        let began = Instant::now();
        let channel = loop {
            match self.1.endpoint().unwrap().connect().await {
                Ok(channel) => break channel,
                Err(error) => assert!(began.elapsed() < TIMEOUT, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        let mut request = Request::new(NetworkAvailableRequest { cidr: "10.0.0.0/8".to_owned() });
        if let Some(token) = token {
            let value = format!("Bearer {token}").parse().unwrap();
            request.metadata_mut().insert("authorization", value);
        }
        let answer = IpamClient::new(channel).network_is_available(request).await;
        answer.err().map_or(Code::Ok, |status| status.code())
    }
}

#[tokio::test]
async fn accounts_of_other_namespaces_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let server = match ApiServer::start(dir.path().join("server")) {
        Ok(server) => server,
        Err(why) => return skip(&why),
    };
    for line in [
        "create namespace liqo",
        "create serviceaccount client --namespace=liqo",
        "create serviceaccount client --namespace=default",
    ] {
        server.kubectl(&line.split(' ').collect::<Vec<_>>(), "").unwrap();
    }
    let token = |namespace: &str, audience: &str| {
        let (namespace, audience) =
            (format!("--namespace={namespace}"), format!("--audience={audience}"));
        let create = ["create", "token", "client", &namespace, &audience];
        server.kubectl(&create, "").unwrap().trim().to_owned()
    };
    let own = token("liqo", "weft-ipam");
    let default = Ipam::start(&server, dir.path(), "default.sock", &[]);
    let strict = Ipam::start(&server, dir.path(), "strict.sock", &["--require-token"]);
    assert_ne!(default.answer(None).await, Code::Unauthenticated);
    assert_eq!(strict.answer(None).await, Code::Unauthenticated);
    for ipam in [&default, &strict] {
        for _ in 0..2 {
            assert_ne!(ipam.answer(Some(&own)).await, Code::Unauthenticated);
        }
        for other in [
            token("default", "weft-ipam"),
            token("liqo", "https://kubernetes.default.svc"),
            "no token".to_owned(),
        ] {
            assert_eq!(ipam.answer(Some(&other)).await, Code::Unauthenticated);
        }
    }
}
