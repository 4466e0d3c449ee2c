//! The YAML that users write, in the shapes that guides show.

use std::fmt::Write as _;
use std::net::IpAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fabric_api::PrivateKey;
use ipnet::IpNet;

use crate::ClusterSpec;

/// Notation of a list of one CIDR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spelling {
    /// `pod: 10.0.0.0/16`, as older guides have it. Only the first CIDR can be written so.
    Text,
    /// `pod: [10.0.0.0/16]`.
    List,
}

/// Peering of two clusters.
#[derive(Clone, Debug)]
pub struct Peering {
    pub client: ClusterSpec,
    pub server: ClusterSpec,
    /// Addresses or names of the server, for the client.
    pub endpoint: Vec<String>,
    pub port: u16,
    pub mtu: u32,
    pub client_spelling: Spelling,
    pub server_spelling: Spelling,
    client_key: PrivateKey,
    server_key: PrivateKey,
}

impl Peering {
    /// A peering with fresh keys, whose server listens on its first node.
    pub fn new(client: &ClusterSpec, server: &ClusterSpec, port: u16) -> Self {
        Self {
            client: client.clone(),
            server: server.clone(),
            endpoint: vec![server.node_address(1).to_string()],
            port,
            mtu: 1340,
            client_spelling: Spelling::List,
            server_spelling: Spelling::List,
            client_key: PrivateKey::generate(),
            server_key: PrivateKey::generate(),
        }
    }

    pub fn client_key(&self) -> &PrivateKey {
        &self.client_key
    }

    pub fn server_key(&self) -> &PrivateKey {
        &self.server_key
    }

    /// Manifests to apply in the client's cluster, one document each.
    pub fn client_documents(&self) -> Vec<String> {
        let peer = &self.server;
        let mut documents = common(peer, self.client_spelling, &self.client_key, &self.server_key);
        documents.push(self.gateway_client());
        documents
    }

    /// Manifests to apply in the server's cluster, one document each.
    pub fn server_documents(&self) -> Vec<String> {
        let peer = &self.client;
        let mut documents = common(peer, self.server_spelling, &self.server_key, &self.client_key);
        documents.push(self.gateway_server());
        documents
    }

    pub fn gateway_client(&self) -> String {
        let Self { mtu, port, .. } = self;
        let peer = &self.server.id;
        let addresses = self.endpoint.join(", ");
        format!(
            "apiVersion: networking.liqo.io/v1beta1\n\
             kind: GatewayClient\n\
             metadata:\n  name: client\n  namespace: liqo-tenant-{peer}\n  labels: {{liqo.io/remote-cluster-id: {peer}}}\n\
             spec:\n  clientTemplateRef:\n    {{apiVersion: networking.liqo.io/v1beta1, kind: WgGatewayClientTemplate, name: wireguard-client, namespace: liqo}}\n  \
             secretRef: {{name: gw-keys}}\n  mtu: {mtu}\n  endpoint:\n    addresses: [{addresses}]\n    port: {port}\n    protocol: UDP\n"
        )
    }

    pub fn gateway_server(&self) -> String {
        let Self { mtu, port, .. } = self;
        let peer = &self.client.id;
        format!(
            "apiVersion: networking.liqo.io/v1beta1\n\
             kind: GatewayServer\n\
             metadata:\n  name: server\n  namespace: liqo-tenant-{peer}\n  labels: {{liqo.io/remote-cluster-id: {peer}}}\n\
             spec:\n  serverTemplateRef:\n    {{apiVersion: networking.liqo.io/v1beta1, kind: WgGatewayServerTemplate, name: wireguard-server, namespace: liqo}}\n  \
             secretRef: {{name: gw-keys}}\n  mtu: {mtu}\n  endpoint:\n    serviceType: NodePort\n    port: 51840\n    nodePort: {port}\n"
        )
    }
}

/// One file of several documents.
pub fn join(documents: &[String]) -> String {
    documents.join("---\n")
}

/// Namespace, Configuration, key Secret and the other side's PublicKey.
fn common(
    peer: &ClusterSpec,
    spelling: Spelling,
    own: &PrivateKey,
    theirs: &PrivateKey,
) -> Vec<String> {
    let id = &peer.id;
    let resource = format!(
        "  namespace: liqo-tenant-{id}\n  labels: {{liqo.io/remote-cluster-id: {id}, networking.liqo.io/gateway-resource: \"true\"}}\n"
    );
    let private = STANDARD.encode(own.expose());
    let (public, their_public) = (own.public(), theirs.public());
    vec![
        format!(
            "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: liqo-tenant-{id}\n  \
             labels: {{liqo.io/remote-cluster-id: {id}, liqo.io/tenant-namespace: \"true\"}}\n"
        ),
        configuration(peer, spelling),
        format!(
            "apiVersion: v1\nkind: Secret\nmetadata:\n  name: gw-keys\n{resource}type: Opaque\n\
             data:\n  privateKey: {private}\n  publicKey: {public}\n"
        ),
        format!(
            "apiVersion: networking.liqo.io/v1beta1\nkind: PublicKey\nmetadata:\n  name: gw-publickey\n{resource}\
             spec:\n  publicKey: {their_public}\n"
        ),
    ]
}

/// Configuration with a peer's CIDRs.
pub fn configuration(peer: &ClusterSpec, spelling: Spelling) -> String {
    let id = &peer.id;
    let (pod, external) = (spell(&peer.pod_cidrs, spelling), spell(&peer.external_cidrs, spelling));
    format!(
        "apiVersion: networking.liqo.io/v1beta1\nkind: Configuration\n\
         metadata:\n  name: {id}\n  namespace: liqo-tenant-{id}\n  labels: {{liqo.io/remote-cluster-id: {id}}}\n\
         spec:\n  remote:\n    cidr:\n      pod: {pod}\n      external: {external}\n"
    )
}

fn spell(cidrs: &[IpNet], spelling: Spelling) -> String {
    let texts: Vec<_> = cidrs.iter().map(IpNet::to_string).collect();
    match spelling {
        Spelling::Text => texts.into_iter().next().unwrap_or_default(),
        Spelling::List => format!("[{}]", texts.join(", ")),
    }
}

/// An address of the external CIDR that stands for `target`.
pub fn ip(name: &str, target: IpAddr, masquerade: bool) -> String {
    format!(
        "apiVersion: ipam.liqo.io/v1alpha1\nkind: IP\nmetadata:\n  name: {name}\n  namespace: liqo\n\
         spec:\n  ip: {target}\n  masquerade: {masquerade}\n"
    )
}

/// Manifests as `weft init` writes them: the cluster's name, its Networks, its Nodes.
pub fn own(cluster: &ClusterSpec) -> String {
    let mut documents = vec![format!(
        "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: liqo-clusterid-configmap\n  namespace: liqo\n  \
         labels: {{app.kubernetes.io/name: clusterid-configmap}}\ndata:\n  CLUSTER_ID: {}\n",
        cluster.id
    )];
    let kinds = [
        ("pod-cidr", &cluster.pod_cidrs),
        ("external-cidr", &cluster.external_cidrs),
        ("internal-cidr", &cluster.internal_cidrs),
    ];
    for (kind, cidrs) in kinds {
        for (i, cidr) in cidrs.iter().enumerate() {
            documents.push(network(kind, i, cidr));
        }
    }
    documents.extend((1..=cluster.nodes).map(|number| node(cluster, number)));
    join(&documents)
}

fn network(kind: &str, number: usize, cidr: &IpNet) -> String {
    let suffix = if number == 0 { String::new() } else { format!("-{number}") };
    let mut labels = format!("ipam.liqo.io/network-type: {kind}");
    if kind == "pod-cidr" {
        labels +=
            ", ipam.liqo.io/network-not-remapped: \"true\", ipam.liqo.io/network-shared: \"true\"";
    }
    let skip = if kind == "external-cidr" { "  preAllocated: 1\n" } else { "" };
    format!(
        "apiVersion: ipam.liqo.io/v1alpha1\nkind: Network\nmetadata:\n  name: {kind}{suffix}\n  namespace: liqo\n  \
         labels: {{{labels}}}\nspec:\n  cidr: {cidr}\n{skip}"
    )
}

fn node(cluster: &ClusterSpec, number: u8) -> String {
    let pods: Vec<_> = cluster.node_pod_cidrs(number).iter().map(IpNet::to_string).collect();
    let first = pods.first().cloned().unwrap_or_default();
    let mut text = format!(
        "apiVersion: v1\nkind: Node\nmetadata:\n  name: {}\nspec:\n  podCIDR: {first}\n  podCIDRs: [{}]\nstatus:\n  addresses:\n",
        cluster.node_name(number),
        pods.join(", ")
    );
    for address in cluster.node_addresses(number) {
        let _ = writeln!(text, "  - {{type: InternalIP, address: \"{address}\"}}");
    }
    text
}
