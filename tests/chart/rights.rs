//! Rights of each account, as a real API server reports them.

mod table;

use std::fs;

use serde_json::{Value, json};
use weft_tests::kubernetes::access_review;

use crate::helm::MIN_VALUES;
use crate::life::Release;

const CONTROLLER: &str = "liqo-fabric-controller";
const IPAM: &str = "liqo-ipam";
const AGENT: &str = "liqo-route-agent";

const VALUES: &str = "crds: {liqo: auto, weft: auto}";

/// Service account, namespace and request: `VERB RESOURCE[.GROUP][/SUBRESOURCE][ NAME]`.
type Case = (&'static str, &'static str, &'static str);

const MAY_NOT: [Case; 39] = [
    (CONTROLLER, "", "list secrets"),
    (CONTROLLER, "", "patch secrets keys"),
    (CONTROLLER, "tenant", "get secrets keys"),
    (CONTROLLER, "liqo", "get secrets other"),
    (CONTROLLER, "", "bind clusterroles.rbac.authorization.k8s.io cluster-admin"),
    (CONTROLLER, "", "list namespaces"),
    (CONTROLLER, "tenant", "get replicasets.apps gw-milan"),
    (CONTROLLER, "tenant", "patch gatewayservers.networking.liqo.io milan"),
    (CONTROLLER, "tenant", "update configurations.networking.liqo.io/finalizers milan"),
    (CONTROLLER, "tenant", "delete secrets keys"),
    (CONTROLLER, "tenant", "get configmaps other"),
    (CONTROLLER, "liqo", "list configmaps"),
    (CONTROLLER, "liqo", "patch configmaps liqo-clusterid-configmap"),
    (CONTROLLER, "tenant", "create configmaps"),
    (CONTROLLER, "tenant", "create pods"),
    (CONTROLLER, "tenant", "create pods/exec gw-milan-1"),
    (CONTROLLER, "tenant", "deletecollection pods"),
    (CONTROLLER, "tenant", "delete shadowendpointslices.offloading.liqo.io web"),
    (CONTROLLER, "", "patch nodes node-1"),
    (CONTROLLER, "", "create clusterroles.rbac.authorization.k8s.io"),
    (CONTROLLER, "", "create clusterrolebindings.rbac.authorization.k8s.io"),
    (CONTROLLER, "", "patch clusterrolebindings.rbac.authorization.k8s.io liqo-route-agent"),
    (CONTROLLER, "tenant", "escalate roles.rbac.authorization.k8s.io"),
    (CONTROLLER, "tenant", "bind roles.rbac.authorization.k8s.io"),
    (CONTROLLER, "tenant", "create gatewayservers.networking.liqo.io"),
    (CONTROLLER, "tenant", "delete configurations.networking.liqo.io milan"),
    (CONTROLLER, "tenant", "create leases.coordination.k8s.io"),
    (CONTROLLER, "", "patch mutatingwebhookconfigurations.admissionregistration.k8s.io other"),
    (CONTROLLER, "", "create mutatingwebhookconfigurations.admissionregistration.k8s.io"),
    (IPAM, "liqo", "get secrets keys"),
    (IPAM, "liqo", "patch configmaps other"),
    (IPAM, "tenant", "create configmaps"),
    (IPAM, "tenant", "patch networks.ipam.liqo.io milan"),
    (AGENT, "", "get nodes node-1"),
    (AGENT, "tenant", "get secrets keys"),
    (AGENT, "", "patch nodeconfigs.fabric.weft.dev node-1"),
    (AGENT, "", "create nodeconfigs.fabric.weft.dev"),
    (AGENT, "tenant", "get gatewayconfigs.fabric.weft.dev milan"),
    (AGENT, "", "list gatewayrecords.fabric.weft.dev"),
];

/// Rights of a gateway, as the fabric-controller makes them.
pub(crate) const RULES: &str = "../fabric-controller/tests/kubernetes/gateway-rights.yaml";

#[test]
fn accounts_may_do_what_they_need_and_nothing_else() {
    let Some(release) = Release::prepare() else { return };
    release.helm("install", &[MIN_VALUES, VALUES]).unwrap();
    let questions: Vec<_> = MAY_NOT.iter().map(question).collect();
    let answers = answers_to(&release, &questions);
    let wrong: Vec<_> = MAY_NOT.iter().zip(answers).filter(|(_, may)| *may).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    controller_grants_no_more_than_it_has(&release);
    gateways_read_gateway_records_alone(&release);
    table::holds(&release);
}

/// The controller adds a gateway's account to the binding of the release, and may change no role in it.
fn gateways_read_gateway_records_alone(release: &Release) {
    let may_list = |kind: &str| {
        let what = format!("list {kind}.fabric.weft.dev");
        answers_to(release, &[access_review("tenant:gw-milan", "", &what)]) == [true]
    };
    let bind = |role: &str| {
        let binding = json!({"apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding", "metadata": {"name": "liqo-gateway-records"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": "gw-milan", "namespace": "tenant"}]});
        let who = format!("--as=system:serviceaccount:liqo:{CONTROLLER}");
        let arguments = [&who, "apply", "--server-side", "--force-conflicts", "--filename=-"];
        release.server.kubectl(&arguments, &binding.to_string())
    };
    assert!(!may_list("gatewayrecords"));
    bind("liqo-route-agent").unwrap_err();
    bind("liqo-gateway-records").unwrap();
    release.server.wait_until("the right is given", || {
        may_list("gatewayrecords").then_some(()).ok_or("not yet")
    });
    assert!(!may_list("fabricrecords") && !may_list("nodeconfigs"));
}

fn controller_grants_no_more_than_it_has(release: &Release) {
    release.apply(&[json!({"apiVersion": "v1", "kind": "Namespace",
        "metadata": {"name": "tenant", "labels": {"liqo.io/tenant-namespace": "true"}}})]);
    let create = |rules: Value| {
        let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
            "metadata": {"name": "gw-server", "namespace": "tenant",
                "labels": {"app.kubernetes.io/managed-by": "weft"}}, "rules": rules});
        let who = format!("--as=system:serviceaccount:liqo:{CONTROLLER}");
        let arguments = [&who, "apply", "--server-side", "--filename=-"];
        release.server.kubectl(&arguments, &role.to_string())
    };
    let own = || serde_saphyr::from_str(&fs::read_to_string(RULES).unwrap()).unwrap();
    let why = "attempting to grant RBAC permissions not currently held";
    let error = create(own()).unwrap_err();
    assert!(error.contains(why) && error.contains("secrets"), "{error}");
    bind_keys(release);
    release.server.wait_until("it may read keys there", || create(own()));
    let more = json!([{"apiGroups": [""], "resources": ["secrets"], "verbs": ["delete"]}]);
    let error = create(more).unwrap_err();
    assert!(error.contains(why), "{error}");
}

/// Binds the right to read keys as the controller does.
fn bind_keys(release: &Release) {
    let group = "rbac.authorization.k8s.io";
    let binding = json!({"apiVersion": format!("{group}/v1"), "kind": "RoleBinding",
        "metadata": {"name": "weft-gateway-keys", "namespace": "tenant",
            "labels": {"app.kubernetes.io/managed-by": "weft"}},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "liqo-gateway-keys"},
        "subjects": [{"kind": "ServiceAccount", "name": CONTROLLER, "namespace": "liqo"}]});
    let who = format!("--as=system:serviceaccount:liqo:{CONTROLLER}");
    let arguments = [&who, "apply", "--server-side", "--filename=-"];
    release.server.kubectl(&arguments, &binding.to_string()).unwrap();
}

/// Answers to the questions: true if the request is allowed.
fn answers_to(release: &Release, questions: &[Value]) -> Vec<bool> {
    let list = json!({"apiVersion": "v1", "kind": "List", "items": questions});
    let arguments = ["create", "--filename=-", "--output=json"];
    let text = release.server.kubectl(&arguments, &list.to_string()).unwrap();
    let reviews: Vec<Value> =
        serde_json::Deserializer::from_str(&text).into_iter().map(Result::unwrap).collect();
    assert_eq!(reviews.len(), questions.len());
    reviews.iter().map(|review| review["status"]["allowed"] == true).collect()
}

fn question((account, namespace, what): &Case) -> Value {
    access_review(&format!("liqo:{account}"), namespace, what)
}
