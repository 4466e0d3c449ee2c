//! Caller of the API as liqoctl: liqoctl itself, or the tests, which need no liqoctl.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use weft_tests::Kubernetes;

use crate::calls;
use crate::liqoctl::{liqoctl, on_both};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Tool {
    Liqoctl,
    Calls,
}

const TIMEOUT: Duration = Duration::from_secs(60);
pub(crate) const GROUP: &str = "networking.liqo.io/v1beta1";
/// Any 32 bytes.
pub(crate) const KEY: &str = "SJbnWw47WiNBxWI4qjL/kxk/kpfvFCwKHSkixFgTt2Q=";

impl Tool {
    pub(crate) fn info(self, cluster: &Kubernetes) -> Result<Value> {
        if self == Self::Calls {
            return calls::info(cluster);
        }
        let answer = cluster.liqoctl(None, &["info", "--verbose", "--output=json"])?;
        ensure!(answer.success && answer.stderr.is_empty(), "{answer:?}");
        Ok(serde_json::from_str(&answer.stdout)?)
    }

    pub(crate) fn info_peer(self, cluster: &Kubernetes, peer: &str) -> Result<Value> {
        if self == Self::Calls {
            return calls::info_peer(cluster, peer);
        }
        let text = liqoctl(cluster, &["info", "peer"])?;
        ensure!(text.contains("Remapped to"), "{text}");
        json_of(cluster, &["info", "peer", peer, "--output=json"])
    }

    /// `client` is the local one. By a NodePort, of that number if one is given.
    pub(crate) fn connect(
        self,
        client: &Kubernetes,
        server: &Kubernetes,
        node_port: Option<u16>,
    ) -> Result<()> {
        if self == Self::Calls {
            return calls::connect(&calls::sides(client, server)?, node_port);
        }
        let port = node_port.map(|port| format!("--gw-server-service-nodeport={port}"));
        let line = "network connect --wait --timeout 60s --gw-server-service-type NodePort";
        let line: Vec<_> = line.split(' ').chain(port.as_deref()).collect();
        on_both(client, server, &line)
    }

    pub(crate) fn disconnect(self, local: &Kubernetes, remote: &Kubernetes) -> Result<()> {
        match self {
            Self::Calls => calls::disconnect(&calls::sides(local, remote)?),
            Self::Liqoctl => on_both(local, remote, &["network", "disconnect", "--skip-confirm"]),
        }
    }

    pub(crate) fn reset(self, local: &Kubernetes, remote: &Kubernetes) -> Result<()> {
        match self {
            Self::Calls => calls::reset(&calls::sides(local, remote)?),
            Self::Liqoctl => on_both(local, remote, &["network", "reset", "--skip-confirm"]),
        }
    }

    /// The spec of a Configuration with the CIDRs that peers need of the cluster.
    pub(crate) fn configuration(self, cluster: &Kubernetes) -> Result<Value> {
        match self {
            Self::Calls => calls::generate_configuration(cluster),
            Self::Liqoctl => json_of(cluster, &["generate", "configuration", "--output=json"]),
        }
    }

    /// A PublicKey with the key of this cluster's server for that peer.
    pub(crate) fn public_key(self, cluster: &Kubernetes, peer: &Kubernetes) -> Result<Value> {
        let name = &peer.spec.id;
        if self == Self::Calls {
            let [side, _] = calls::sides(cluster, peer)?;
            return calls::generate_publickey(&side, "gatewayserver", name);
        }
        let line = "generate publickey --gateway-type server --output=json --gateway-name";
        let namespace = format!("--namespace=liqo-tenant-{name}");
        let line: Vec<_> = line.split(' ').chain([name.as_str(), &namespace]).collect();
        json_of(cluster, &line)
    }

    /// A peer that there is not, in a namespace without labels: Configuration, GatewayServer,
    /// PublicKey, each until its status has what `create --wait` waits for; then all of it goes.
    pub(crate) fn create_and_delete(self, cluster: &Kubernetes, peer: &str) -> Result<()> {
        match self {
            Self::Calls => by_calls(cluster, peer),
            Self::Liqoctl => by_liqoctl(cluster, peer),
        }
    }
}

fn by_calls(cluster: &Kubernetes, peer: &str) -> Result<()> {
    let side = calls::Side { cluster, peer: peer.to_owned(), namespace: peer.to_owned() };
    let object = |kind: &str, spec: Value| {
        let labels = json!({"liqo.io/remote-cluster-id": peer});
        let metadata = json!({"name": peer, "namespace": peer, "labels": labels});
        json!({"apiVersion": GROUP, "kind": kind, "metadata": metadata, "spec": spec})
    };
    let cidr = json!({"pod": ["10.200.0.0/16"], "external": ["10.70.0.0/16"]});
    let endpoint = json!({"serviceType": "NodePort", "port": 51840});
    for object in [
        object("Configuration", json!({"remote": {"cidr": cidr}})),
        object("GatewayServer", json!({"endpoint": endpoint})),
        object("PublicKey", json!({"publicKey": KEY})),
    ] {
        calls::create(&side, &object, TIMEOUT)?;
    }
    for kind in ["gatewayserver", "configuration", "publickey"] {
        cluster.kubectl(&["delete", kind, peer, "--namespace", peer])?;
    }
    Ok(())
}

fn by_liqoctl(cluster: &Kubernetes, peer: &str) -> Result<()> {
    let key = format!("create publickey --public-key {KEY}");
    for line in [
        "create configuration --wait --pod-cidr 10.200.0.0/16 --external-cidr 10.70.0.0/16",
        "create gatewayserver --wait --service-type NodePort",
        &key,
        "delete gatewayserver --skip-confirm",
        "delete configuration --skip-confirm",
        "delete publickey --skip-confirm",
    ] {
        let mut args: Vec<_> = line.split(' ').collect();
        args.insert(2, peer);
        args.extend(["--namespace", peer]);
        if line.starts_with("create") {
            args.extend(["--remote-cluster-id", peer]);
        }
        liqoctl(cluster, &args)?;
    }
    Ok(())
}

fn json_of(cluster: &Kubernetes, args: &[&str]) -> Result<Value> {
    let text = liqoctl(cluster, args)?;
    serde_json::from_str(&text).with_context(|| format!("liqoctl printed {text:?}"))
}
