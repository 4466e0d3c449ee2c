//! ```text
//!   pods -- rome ---[ 1,000 packets/s each way ]--- milan -- pods     whatever is wrong with rome's manifests
//! ```

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use weft_tests::kubernetes::Object;
use weft_tests::manifests::{Peering, join};
use weft_tests::{ClusterSpec, Kubernetes, wait_until};

use crate::pair::{Pair, SOON};
use crate::stage::step;
use crate::{requests, rights};

const TENANT: &str = "liqo-tenant-milan";
/// The kinds of a client's manifests, and the names of the objects; all but the namespace.
const OBJECTS: [(&str, &str); 5] = [
    ("Namespace", ""),
    ("Configuration", "milan"),
    ("Secret", "gw-keys"),
    ("PublicKey", "gw-publickey"),
    ("GatewayClient", "client"),
];
const CONFIGURATION: usize = 1;
const SECRET: usize = 2;
const PUBLIC_KEY: usize = 3;
const GATEWAY: usize = 4;

/// One slip in one manifest of a client: which one, what is written there instead of what, and parts of
/// what is reported of it.
type Slip = (usize, (&'static str, &'static str), &'static [&'static str]);

const LABEL: &str = "metadata.labels.liqo.io/remote-cluster-id: missing";

/// The API server takes none of them.
const REFUSED: &[Slip] = &[
    (GATEWAY, ("kind: GatewayClient", "kind: GatewayCleint"), &["no matches for kind"]),
    (GATEWAY, ("mtu: 1340", "mtu: high"), &["spec.mtu", "must be of type integer"]),
    (GATEWAY, ("mtu: 1340", "mtuu: 1340"), &["unknown field", "spec.mtuu"]),
    (GATEWAY, ("protocol: UDP", "protocol: SCTP"), &["spec.endpoint.protocol", "\"TCP\", \"UDP\""]),
    (GATEWAY, ("    port: 30742\n", ""), &["spec.endpoint", "write port or ports"]),
    (CONFIGURATION, ("/16", "/33"), &["spec.remote.cidr.pod"]),
    (PUBLIC_KEY, ("publicKey: ", "publicKey: 'no key' #"), &["spec.publicKey", "byte"]),
];

/// The API server takes them, weft does not.
const REPORTED: &[Slip] = &[
    (CONFIGURATION, ("labels: {liqo.io/remote-cluster-id: milan}", "labels: {}"), &[LABEL]),
    (
        CONFIGURATION,
        ("10.200.0.0/16", "10.200.0.7/16"),
        &["spec.remote.cidr.pod[0]", "has host bits set", "10.200.0.0/16"],
    ),
    (
        CONFIGURATION,
        ("external: 10.70.0.0/16", "external: 10.200.128.0/17"),
        &["spec.remote.cidr.external[0]", "overlaps", "expected prefixes apart"],
    ),
    (
        PUBLIC_KEY,
        ("publicKey: ", "publicKey: c2hvcnQ= #"),
        &["spec.publicKey", "5 bytes long", "expected 32"],
    ),
    (
        PUBLIC_KEY,
        ("publicKey: ", "publicKey: AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA= #"),
        &["spec.publicKey", "low order", "make a new pair"],
    ),
    (GATEWAY, ("labels: {liqo.io/remote-cluster-id: milan}", "labels: {}"), &[LABEL]),
    (
        GATEWAY,
        ("port: 30742", "port: 0"),
        &["spec.endpoint.port", "found 0", "expected a port, 1 to 65535"],
    ),
    (GATEWAY, ("mtu: 1340", "mtu: 10"), &["spec.mtu", "found 10", "expected 576 to 65535"]),
    (
        GATEWAY,
        ("name: wireguard-client", "name: absent"),
        &["spec.clientTemplateRef", "there is no WgGatewayClientTemplate liqo/absent"],
    ),
];

/// Slip in the Secret of a peering that has it already.
const SECRET_SLIP: Slip = (
    SECRET,
    ("privateKey: ", "privateKey: c2hvcnQ= #"),
    &["data.privateKey", "5 bytes long", "expected 32"],
);

/// Wrong manifests are refused or reported, without an effect on packets or API servers.
pub(crate) fn ensure_others_run(pair: &Pair) -> Result<()> {
    let rome = &pair.clusters[0];
    let traffic = pair.streaming(|| {
        step("what can be refused is refused", || are_refused(pair))?;
        step("slips in what runs are reported", || in_running_peering(pair))?;
        step("two gateways for a peer are reported", || second_gateway(pair))?;
        let new = step("slips in something new are reported", || in_something_new(pair))?;
        step("requests are few, with all that is wrong", || {
            requests::are_few(pair, || {
                requests::are_allowed(rome, "")?;
                rights::are_minimal(rome)
            })
        })?;
        let delete = ["delete", "namespace", "--wait=false"].into_iter();
        rome.kubectl(&delete.chain(new.iter().map(String::as_str)).collect::<Vec<_>>()).map(drop)
    })?;
    traffic.missed_nothing()
}

fn are_refused(pair: &Pair) -> Result<()> {
    let good = &pair.documents()[0];
    for slip @ (document, edit, parts) in REFUSED {
        let Err(error) = pair.clusters[0].apply(&slipped(&good[*document], slip)) else {
            bail!("{edit:?} is taken")
        };
        let refusal = format!("{error:#}");
        ensure!(parts.iter().all(|part| refusal.contains(part)), "{edit:?}: {refusal}");
    }
    Ok(())
}

fn in_running_peering(pair: &Pair) -> Result<()> {
    let (rome, good) = (&pair.clusters[0], &pair.documents()[0]);
    for slip @ (document, edit, parts) in REPORTED.iter().chain([&SECRET_SLIP]) {
        rome.apply(&slipped(&good[*document], slip))?;
        let (kind, name) = OBJECTS[*document];
        wait_until(&format!("{edit:?} is reported"), SOON, || {
            let tenant = Tenant::of(rome, TENANT)?;
            tenant.has_event((kind, name), parts)?;
            // Keys have no status: the objects that need them report the problem.
            let own = matches!(*document, CONFIGURATION | GATEWAY);
            tenant.has_condition(if own { (kind, name) } else { OBJECTS[GATEWAY] }, parts)
        })?;
        rome.apply(&good[*document])?;
        wait_until(&format!("{edit:?} is reported no more"), SOON, || is_well(rome))?;
    }
    Ok(())
}

fn second_gateway(pair: &Pair) -> Result<()> {
    let (rome, first) = (&pair.clusters[0], &pair.documents()[0][GATEWAY]);
    let second = first.replace("name: client\n", "name: another\n");
    rome.apply(&second)?;
    wait_until("both are reported", SOON, || {
        let tenant = Tenant::of(rome, TENANT)?;
        for name in ["client", "another"] {
            let parts = [
                "are for the same peer; expected one",
                "GatewayClient liqo-tenant-milan/client runs",
            ];
            tenant.has_condition(("GatewayClient", name), &parts)?;
            tenant.has_event(("GatewayClient", name), &parts)?;
        }
        Ok::<_, anyhow::Error>(())
    })?;
    rome.delete(&second)?;
    wait_until("it is reported no more", SOON, || is_well(rome))
}

/// Each slip in a peering of its own, which is nothing but that; and a peering without a gateway at the
/// other end. Their namespaces.
fn in_something_new(pair: &Pair) -> Result<Vec<String>> {
    let (rome, good) = (&pair.clusters[0], &pair.documents()[0]);
    let turin = ClusterSpec::new("turin", 3, 1);
    rome.apply(&join(&Peering::new(&rome.spec, &turin, 30742).client_documents()))?;
    let mut namespaces = vec!["liqo-tenant-turin".to_owned()];
    for (i, slip @ (document, edit, parts)) in REPORTED.iter().enumerate() {
        let peer = format!("absent-{i}");
        let both = [good[0].clone(), slipped(&good[*document], slip)];
        rome.apply(&join(&both.map(|document| document.replace("milan", &peer))))?;
        let namespace = format!("liqo-tenant-{peer}");
        let (kind, name) = OBJECTS[*document];
        let name = if name == "milan" { &peer } else { name };
        wait_until(&format!("{edit:?} is reported for {peer}"), SOON, || {
            let tenant = Tenant::of(rome, &namespace)?;
            tenant.has_event((kind, name), parts)?;
            if *document == PUBLIC_KEY { Ok(()) } else { tenant.has_condition((kind, name), parts) }
        })?;
        namespaces.push(namespace);
    }
    let connection = Object::new("connection", "liqo-tenant-turin", "gw-client");
    rome.wait_for(connection, "jsonpath={.status.value}=Connecting", SOON)?;
    Ok(namespaces)
}

fn slipped(document: &str, (_, (good, bad), _): &Slip) -> String {
    assert!(document.contains(good), "no {good:?} in {document}");
    document.replacen(good, bad, 1)
}

fn is_well(cluster: &Kubernetes) -> Result<()> {
    let status = cluster.status()?;
    ensure!(status["problems"].as_array().is_some_and(Vec::is_empty), "{}", status["problems"]);
    let tenant = Tenant::of(cluster, TENANT)?;
    let refused = tenant.0.iter().find(|object| !accepted(object).is_null());
    ensure!(refused.is_none(), "{refused:?}");
    Ok(())
}

/// Objects in a namespace of a peering.
struct Tenant(Vec<Value>);

impl Tenant {
    fn of(cluster: &Kubernetes, namespace: &str) -> Result<Self> {
        let kinds = "configurations,secrets,publickeies,gatewayclients,events";
        let list = cluster.kubectl(&["get", kinds, "--namespace", namespace, "--output=json"])?;
        let list: Value = serde_json::from_str(&list).context("kubectl prints JSON")?;
        Ok(Self(list["items"].as_array().cloned().unwrap_or_default()))
    }

    /// One that names a reason and the very generation that is there.
    fn has_condition(&self, object: (&str, &str), parts: &[&str]) -> Result<()> {
        let object = self.find(object)?;
        let condition = accepted(object);
        let message = condition["message"].as_str().unwrap_or_default();
        let generation = &object["metadata"]["generation"];
        ensure!(parts.iter().all(|part| message.contains(part)), "its condition is {condition}");
        ensure!(condition["reason"] == "Invalid" && condition["status"] == "False", "{condition}");
        ensure!(condition["observedGeneration"] == *generation, "of {generation}: {condition}");
        Ok(())
    }

    fn has_event(&self, object: (&str, &str), parts: &[&str]) -> Result<()> {
        let uid = &self.find(object)?["metadata"]["uid"];
        let own = self.0.iter().filter(|event| event["involvedObject"]["uid"] == *uid);
        let warnings =
            own.filter(|event| event["type"] == "Warning" && event["reason"] == "Invalid");
        let notes: Vec<_> = warnings.filter_map(|event| event["message"].as_str()).collect();
        let is_reported = notes.iter().any(|note| parts.iter().all(|part| note.contains(part)));
        ensure!(is_reported, "Events on {object:?}: {notes:#?}");
        Ok(())
    }

    fn find(&self, (kind, name): (&str, &str)) -> Result<&Value> {
        let mut all = self.0.iter();
        let found = all.find(|object| object["kind"] == kind && object["metadata"]["name"] == name);
        found.with_context(|| format!("there is no {kind} {name}"))
    }
}

/// The condition that reports the problem, if there is one.
fn accepted(object: &Value) -> &Value {
    let mut all = object["status"]["conditions"].as_array().into_iter().flatten();
    all.find(|condition| condition["type"] == "Accepted").unwrap_or(&Value::Null)
}
