//! The chart before a real API server, without nodes: what a release leaves, keeps and takes away.

use std::path::PathBuf;

use api_server::ApiServer;
use serde_json::{Value, json};

use crate::crds;
use crate::helm::{Helm, MIN_VALUES};
use crate::uninstall::uninstall;

/// Binding of the accounts of gateways.
const RECORD_READERS: &str = "liqo-gateway-records";
/// No certificate, but it could be one's text.
const AUTHORITY: &str = "Y2VydA==";
/// A cluster that is given no name.
pub(crate) const NAMELESS: &str =
    "crds: {liqo: auto, weft: auto}\ndiscovery: {config: {clusterID: ''}}";
const OURS: &str = "app.kubernetes.io/part-of=weft";

/// Kinds of the chart's objects that a cluster may have, CRDs apart.
const KINDS: &str = "deployments,daemonsets,jobs,services,serviceaccounts,secrets,configmaps,leases,\
    roles,rolebindings,clusterroles,clusterrolebindings,mutatingwebhookconfigurations,\
    validatingadmissionpolicies,validatingadmissionpolicybindings,networkpolicies,\
    networks.ipam.liqo.io,wggatewayservertemplates,wggatewayclienttemplates";

pub(crate) struct Release {
    pub(crate) server: ApiServer,
    helm: Helm,
}

impl Release {
    /// `None` if there can't be one, which is printed.
    pub(crate) fn prepare() -> Option<Self> {
        let helm = Helm::find()?;
        let name = std::thread::current().name().unwrap_or("chart").replace(':', "-");
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        match ApiServer::start(dir) {
            Ok(server) => Some(Self { helm: helm.on(server.admin()), server }),
            Err(why) => {
                weft_tests::skip(&why);
                None
            }
        }
    }

    /// `install` or `upgrade`. Of several values, the last counts.
    pub(crate) fn helm(&self, verb: &str, values: &[&str]) -> Result<String, String> {
        let new = (verb == "install").then_some("--create-namespace");
        let arguments: Vec<_> = [verb, "weft"].into_iter().chain(new).collect();
        self.helm.with(&arguments, values)
    }

    pub(crate) fn plain(&self, arguments: &[&str]) -> String {
        self.helm_run(arguments).unwrap()
    }

    /// Output of helm, or its error.
    pub(crate) fn helm_run(&self, arguments: &[&str]) -> Result<String, String> {
        self.helm.run(arguments)
    }

    pub(crate) fn get(&self, kind: &str, name: &str) -> Value {
        let arguments = ["get", kind, name, "--namespace=liqo", "--output=json"];
        serde_json::from_str(&self.server.kubectl(&arguments, "").unwrap()).unwrap()
    }

    pub(crate) fn patch(&self, kind: &str, name: &str, patch: &Value) {
        let (kind, patch) = (format!("{kind}/{name}"), patch.to_string());
        let arguments = ["patch", &kind, "--namespace=liqo", "--type=merge", "--patch", &patch];
        self.server.kubectl(&arguments, "").unwrap();
    }

    pub(crate) fn apply(&self, objects: &[Value]) {
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string();
        self.server.kubectl(&["create", "--filename=-"], &list).unwrap();
    }

    /// Kinds and names of what the chart has made.
    fn ours(&self) -> String {
        self.labelled(KINDS, OURS)
    }

    pub(crate) fn labelled(&self, kinds: &str, labels: &str) -> String {
        let arguments = ["get", kinds, "--all-namespaces", "--selector", labels];
        let arguments = [&arguments[..], &["--output=name", "--ignore-not-found"]].concat();
        self.server.kubectl(&arguments, "").unwrap()
    }
}

#[test]
fn filled_in_fields_survive_upgrade_and_uninstall() {
    let Some(release) = Release::prepare() else { return };
    release.helm("install", &[MIN_VALUES, NAMELESS]).unwrap();
    let id = release.get("configmap", "liqo-clusterid-configmap")["data"].clone();
    fill_in(&release);
    release.helm("upgrade", &[MIN_VALUES, NAMELESS, "controllerManager: {replicas: 3}"]).unwrap();
    let replicas =
        || release.get("deployment", "liqo-fabric-controller")["spec"]["replicas"].clone();
    assert_eq!(replicas(), 3);
    assert_eq!(release.get("configmap", "liqo-clusterid-configmap")["data"], id);
    is_filled_in(&release);
    release.plain(&["rollback", "weft", "1"]);
    assert_eq!(replicas(), 2);
    is_filled_in(&release);

    let network = json!({"apiVersion": "ipam.liqo.io/v1alpha1", "kind": "Network",
        "metadata": {"name": "users", "namespace": "default"}, "spec": {"cidr": "10.9.0.0/16"}});
    release.apply(&[network]);
    uninstall(&release);
    assert_eq!(release.ours(), "");
    let network = ["get", "network.ipam.liqo.io/users", "--namespace=default"];
    release.server.kubectl(&network, "").unwrap();
    release.helm("install", &[MIN_VALUES, NAMELESS]).unwrap();
}

#[test]
fn gateways_of_liqo_are_taken_over_first() {
    let Some(release) = Release::prepare() else { return };
    let Some(chart) = liqos_chart() else { return };
    let file = "charts/liqo-crds/crds/networking.liqo.io_wggatewayclients.yaml";
    let file = chart.join(file).display().to_string();
    release.server.kubectl(&["apply", "--server-side", "--filename", &file], "").unwrap();
    release.server.wait_until("it is defined", || {
        let path = "/apis/networking.liqo.io/v1beta1/wggatewayclients";
        release.server.kubectl(&["get", "--raw", path], "")
    });
    let template = json!({"metadata": {}, "spec": {"selector": {},
        "template": {"spec": {"containers": []}}}});
    release.apply(&[json!({"apiVersion": "networking.liqo.io/v1beta1", "kind": "WgGatewayClient",
        "metadata": {"name": "milan", "namespace": "default"},
        "spec": {"deployment": template, "secretRef": {"name": "keys"}}})]);
    let refused = release.helm("install", &[MIN_VALUES]).unwrap_err();
    assert!(refused.contains("WgGatewayClient default/milan"), "{refused}");
    assert!(refused.contains("weft adopt --namespace liqo"), "{refused}");
    release.server.kubectl(&["delete", "wggatewayclient", "milan"], "").unwrap();
    release.helm("install", &[MIN_VALUES]).unwrap();
}

/// Folder of Liqo's own chart; none, with a note, where it has not been built.
pub(crate) fn liqos_chart() -> Option<PathBuf> {
    let chart = api_server::built("liqo-chart-1.2.0");
    if !chart.exists() {
        weft_tests::skip(&format!("no {}", chart.display()));
        return None;
    }
    Some(chart)
}

/// Fills in the authority as the fabric-controller does.
fn fill_in(release: &Release) {
    let name = "weft-cidr-lists";
    let mut webhooks = release.get("mutatingwebhookconfiguration", name)["webhooks"].clone();
    for webhook in webhooks.as_array_mut().unwrap() {
        webhook["clientConfig"]["caBundle"] = AUTHORITY.into();
    }
    release.patch("mutatingwebhookconfiguration", name, &json!({ "webhooks": webhooks }));
    release.patch("clusterrolebinding", RECORD_READERS, &json!({ "subjects": [a_gateway()] }));
}

fn is_filled_in(release: &Release) {
    let webhooks = release.get("mutatingwebhookconfiguration", "weft-cidr-lists");
    for webhook in webhooks["webhooks"].as_array().unwrap() {
        assert_eq!(webhook["clientConfig"]["caBundle"], AUTHORITY);
    }
    let readers = release.get("clusterrolebinding", RECORD_READERS);
    assert_eq!(readers["subjects"], json!([a_gateway()]));
}

fn a_gateway() -> Value {
    json!({"kind": "ServiceAccount", "name": "gw-milan", "namespace": "tenant"})
}

#[test]
fn objects_of_liqo_are_used_unchanged() {
    let Some(release) = Release::prepare() else { return };
    let theirs = Liqos::install(&release);
    let before = theirs.as_they_are(&release);
    let no_prefixes = "ipam: {podCIDRs: [], serviceCIDR: ''}";
    release.helm("install", &[MIN_VALUES, NAMELESS, no_prefixes]).unwrap();
    let controller = release.get("deployment", "liqo-fabric-controller");
    let component = &controller["metadata"]["labels"]["app.kubernetes.io/component"];
    assert_eq!(component, "fabric-controller", "liqoctl expects one controller-manager");
    release.helm("upgrade", &[MIN_VALUES, NAMELESS, no_prefixes]).unwrap();
    assert_eq!(theirs.as_they_are(&release), before);
    uninstall(&release);
    assert_eq!(theirs.as_they_are(&release), before);
}

/// As `helm install --take-ownership` of Liqo's chart does.
#[test]
fn shared_objects_outlive_a_takeover_by_liqo() {
    const SHARED: [(&str, &str); 5] = [
        ("configmap", "liqo-clusterid-configmap"),
        ("networks.ipam.liqo.io", "pod-cidr-10-200-0-0-16"),
        ("networks.ipam.liqo.io", "service-cidr"),
        ("networks.ipam.liqo.io", "external-cidr"),
        ("networks.ipam.liqo.io", "internal-cidr"),
    ];
    let Some(release) = Release::prepare() else { return };
    release.helm("install", &[MIN_VALUES, NAMELESS]).unwrap();
    let uids = || SHARED.map(|(kind, name)| release.get(kind, name)["metadata"]["uid"].clone());
    let before = uids();
    let annotations = json!({"meta.helm.sh/release-name": "other"});
    let metadata =
        json!({"annotations": annotations, "labels": {"app.kubernetes.io/part-of": "liqo"}});
    for (kind, name) in SHARED {
        release.patch(kind, name, &json!({ "metadata": metadata }));
    }
    release.helm("upgrade", &[MIN_VALUES, NAMELESS]).unwrap();
    assert_eq!(uids(), before, "an upgrade deletes none");
    uninstall(&release);
    assert_eq!(uids(), before, "nor does the release's end");
}

/// Objects that Liqo's own chart has installed.
struct Liqos {
    crds: Vec<Value>,
    objects: Vec<Value>,
}

impl Liqos {
    fn install(release: &Release) -> Self {
        let theirs = Self { crds: liqos_crds(), objects: liqos_objects() };
        let server = &release.server;
        server.kubectl(&["create", "namespace", "liqo"], "").unwrap();
        release.apply(&theirs.crds);
        let networks = ["get", "networks.ipam.liqo.io", "--all-namespaces", "--ignore-not-found"];
        server.wait_until("networks are served", || server.kubectl(&networks, ""));
        release.apply(&theirs.objects);
        theirs
    }

    /// Their identity and content at present.
    fn as_they_are(&self, release: &Release) -> Vec<Value> {
        let items: Vec<_> = self.crds.iter().chain(&self.objects).collect();
        let list = json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string();
        let arguments = ["get", "--filename=-", "--output=json"];
        let list = release.server.kubectl(&arguments, &list).unwrap();
        let list: Value = serde_json::from_str(&list).unwrap();
        let metadata = |object: &Value| {
            let metadata = &object["metadata"];
            json!([metadata["uid"], metadata["labels"], metadata["annotations"]])
        };
        let content = |object: &Value| json!([metadata(object), object["spec"], object["data"]]);
        list["items"].as_array().unwrap().iter().map(content).collect()
    }
}

/// CRDs of an older release, with fewer columns.
fn liqos_crds() -> Vec<Value> {
    let mut crds: Vec<_> = crds::liqo().collect();
    for crd in &mut crds {
        crd["spec"]["versions"][0]["additionalPrinterColumns"] = json!([]);
    }
    crds
}

fn liqos_objects() -> Vec<Value> {
    let network = |name: &str, cidr: &str| {
        let labels = json!({"ipam.liqo.io/network-type": name});
        json!({"apiVersion": "ipam.liqo.io/v1alpha1", "kind": "Network", "spec": {"cidr": cidr},
            "metadata": {"name": name, "namespace": "liqo", "labels": labels}})
    };
    let manager = json!({"app.kubernetes.io/name": "controller-manager"});
    let container = json!({"name": "controller-manager", "image": "liqo"});
    let pod = json!({"metadata": {"labels": manager}, "spec": {"containers": [container]}});
    vec![
        network("pod-cidr", "10.200.0.0/16"),
        network("service-cidr", "10.96.0.0/12"),
        network("external-cidr", "10.70.0.0/16"),
        network("internal-cidr", "10.80.0.0/16"),
        json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {"CLUSTER_ID": "milan"},
            "metadata": {"name": "liqo-clusterid-configmap", "namespace": "liqo"}}),
        json!({"apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {"name": "liqo-controller-manager", "namespace": "liqo", "labels": manager},
            "spec": {"selector": {"matchLabels": manager}, "template": pod}}),
    ]
}
