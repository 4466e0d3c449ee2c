//! Steps that turn a cluster of Liqo's network into one of weft's. Pure.

use std::fmt;

use fabric_api::labels;
use fabric_kube_client::requests::Target;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::ResourceExt as _;
use kube::api::{ApiResource, DynamicObject};
use serde_json::{Map, Value, json};

use crate::liqo_networking::{is_liqos, is_of_release};
use gateway_workloads::is_argument_of_liqo;

/// Finalizers of Liqo's controllers for its network.
const FINALIZERS: [&str; 8] = [
    "networking.liqo.io/clusterrolebinding",
    "networking.liqo.io/internal-fabric-geneve-tunnel-finalizer",
    "internalnodes-route.liqo.io/finalizer",
    "routeconfiguration-controller.liqo.io/finalizer",
    "firewallconfigurations-controller.liqo.io/finalizer",
    "ip.ipam.liqo.io/finalizer",
    "network.ipam.liqo.io/finalizer",
    "ipmapping-nat-controller.liqo.io/finalizer",
];
/// Prefix of the kind that Liqo puts between a gateway and what it consists of.
const WG: &str = "Wg";

/// An object and its kind.
pub(super) type Item = (ApiResource, DynamicObject);

/// Leftovers of Liqo's network, and the users' objects that it has used.
#[derive(Default)]
pub(super) struct Found {
    /// GatewayServers and GatewayClients.
    pub(super) gateways: Vec<Item>,
    pub(super) templates: Vec<Item>,
    /// WgGatewayServers and WgGatewayClients.
    pub(super) wg_gateways: Vec<Item>,
    /// Services and Deployments of gateways.
    pub(super) parts: Vec<Item>,
    /// Accounts of gateways' pods.
    pub(super) accounts: Vec<Item>,
    /// ClusterRoleBindings of gateways.
    pub(super) bindings: Vec<Item>,
    /// FirewallConfigurations and RouteConfigurations, of users as well.
    pub(super) rules: Vec<Item>,
    pub(super) fabric: Vec<Item>,
    /// Networks and IPs.
    pub(super) held: Vec<Item>,
}

/// One change of an object. Prints as what it does.
pub(super) struct Step<'a> {
    pub(super) item: &'a Item,
    pub(super) action: Action,
    text: String,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Action {
    Merge(Value),
    Delete,
}

/// Steps in their order. What Kubernetes would collect with a WgGateway gets its new owner before
/// that goes, and nothing that users have made goes. `installation` is the namespace of weft.
pub(super) fn plan<'a>(found: &'a Found, installation: &str) -> Vec<Step<'a>> {
    let mut steps: Vec<_> = found.parts.iter().filter_map(|part| own(part, found)).collect();
    steps.extend(found.accounts.iter().filter_map(|account| keep(account, found)));
    steps.extend(found.gateways.iter().filter_map(|of| name_all(of, found, installation)));
    let is_liqos = |item: &&Item| is_liqos(&item.1.metadata);
    let rules = found.rules.iter().filter(is_liqos);
    let rules = rules.filter(|(_, of)| !is_of_release(&of.metadata, installation));
    let gone = found.wg_gateways.iter().chain(&found.bindings).chain(rules).chain(&found.fabric);
    let gone: Vec<_> = gone.collect();
    let of_users =
        found.rules.iter().filter(|item| !gone.iter().any(|of| std::ptr::eq(*of, *item)));
    for item in of_users.chain(&found.held) {
        steps.extend(release(item));
    }
    for item in gone {
        steps.extend(release(item));
        if item.1.metadata.deletion_timestamp.is_none() {
            let others = others(&item.1).join(", ");
            let text = match others.is_empty() {
                true => "removed".to_owned(),
                false => format!("removed, once another program removes the finalizers {others}"),
            };
            steps.push(Step { item, action: Action::Delete, text });
        }
    }
    steps
}

/// Objects of Liqo's network that are deleted, and whose finalizers of other programs keep them.
pub(super) fn held(found: &Found) -> Vec<String> {
    let gone = [&found.wg_gateways, &found.bindings, &found.rules, &found.fabric];
    let deleted = |item: &&Item| item.1.metadata.deletion_timestamp.is_some();
    let deleted = gone.into_iter().flatten().filter(deleted);
    let held = deleted.filter_map(|(kind, object)| {
        let others = others(object);
        let target = Target::of(kind, &object.metadata);
        (!others.is_empty()).then(|| format!("{target}: finalizers {}", others.join(", ")))
    });
    held.collect()
}

/// Finalizers that are not of Liqo's network.
fn others(object: &DynamicObject) -> Vec<&str> {
    let all = object.finalizers().iter().map(String::as_str);
    all.filter(|finalizer| !FINALIZERS.contains(finalizer)).collect()
}

/// Makes a part of a gateway the gateway's own, as weft has it.
fn own<'a>(item: &'a Item, found: &Found) -> Option<Step<'a>> {
    let (owners, text) = owners(item, found, Some(true))?;
    // By the label weft's controller finds it, to replace it.
    let labels = json!({(labels::MANAGED_BY): labels::WEFT});
    let metadata = json!({"ownerReferences": owners, "labels": labels});
    Some(Step { item, action: Action::Merge(json!({"metadata": metadata})), text })
}

/// Keeps an account for as long as the gateway is there. With the name of the gateway it is, as Liqo names both,
/// that of a virtual kubelet, whose tokens would end with it. It has no controller, as Liqo sets its own once it has
/// the network back.
fn keep<'a>(item: &'a Item, found: &Found) -> Option<Step<'a>> {
    let (owners, text) = owners(item, found, None)?;
    let metadata = json!({"ownerReferences": owners});
    Some(Step { item, action: Action::Merge(json!({"metadata": metadata})), text })
}

/// Owners of what a WgGateway owns with the gateway in its place, and the text of that step.
fn owners(
    (_, part): &Item,
    found: &Found,
    controller: Option<bool>,
) -> Option<(Vec<OwnerReference>, String)> {
    let owners = part.owner_references();
    let of_liqo = owners.iter().find(|owner| owner.kind.starts_with(WG))?;
    let (kind, gateway) = found.gateways.iter().find(|(kind, gateway)| {
        of_liqo.kind.strip_prefix(WG) == Some(kind.kind.as_str())
            && gateway.name_any() == of_liqo.name
            && gateway.namespace() == part.namespace()
    })?;
    let owner = OwnerReference {
        api_version: kind.api_version.clone(),
        kind: kind.kind.clone(),
        name: gateway.name_any(),
        uid: gateway.uid()?,
        controller,
        block_owner_deletion: None,
    };
    let others = owners.iter().filter(|of| !of.kind.starts_with(WG) && of.uid != owner.uid);
    let owners: Vec<_> = others.chain([&owner]).cloned().collect();
    let text =
        format!("owned by {} {}, no longer by Liqo's {}", kind.kind, of_liqo.name, of_liqo.kind);
    Some((owners, text))
}

/// Names of weft's template in place of one that weft cannot use, and of the keys.
fn name_all<'a>(item: &'a Item, found: &Found, installation: &str) -> Option<Step<'a>> {
    let changes = [template(item, found, installation), keys(item)];
    let (fields, texts): (Vec<_>, Vec<_>) = changes.into_iter().flatten().unzip();
    let spec: Map<String, Value> = fields.into_iter().collect();
    let action = Action::Merge(json!({"spec": spec}));
    (!texts.is_empty()).then(|| Step { item, action, text: texts.join("; ") })
}

/// Field of a spec with its value, and the text of the step.
type Change = ((String, Value), String);

fn template((kind, gateway): &Item, found: &Found, installation: &str) -> Option<Change> {
    let side = kind.kind.strip_prefix("Gateway")?.to_lowercase();
    let field = format!("{side}TemplateRef");
    let reference = gateway.data["spec"][&field].as_object()?;
    let text = |key: &str| reference.get(key).and_then(Value::as_str).filter(|t| !t.is_empty());
    let name = text("name")?;
    let namespace = text("namespace").map(str::to_owned).or_else(|| gateway.namespace())?;
    let template_kind = format!("{WG}{}Template", kind.kind);
    let own = format!("wireguard-{side}");
    let is_it = |(kind, template): &&Item| {
        kind.kind == template_kind
            && template.name_any() == name
            && template.namespace().as_deref() == Some(&namespace)
    };
    let is_wefts = |(_, template): &Item| !has_container_of_liqo(&template.data);
    let template = found.templates.iter().find(is_it);
    // Weft's chart makes the first.
    let is_usable = (namespace == installation && name == own) || template.is_some_and(is_wefts);
    if is_usable && text("kind").is_none_or(|kind| kind == template_kind) {
        return None;
    }
    // Another mistake is the user's, and a condition of the gateway.
    let is_liqos = |(of, wg): &Item| {
        of.kind == format!("{WG}{}", kind.kind)
            && wg.name_any() == gateway.name_any()
            && wg.namespace() == gateway.namespace()
    };
    if template.is_none() && !found.wg_gateways.iter().any(is_liqos) {
        return None;
    }
    let reference = json!({"apiVersion": kind.api_version, "kind": template_kind,
        "name": own, "namespace": installation});
    let text = format!("template {installation}/{own}, no longer {namespace}/{name}");
    Some(((field, reference), text))
}

/// Secret that Liqo has found by its labels; weft finds it by its name.
fn keys((_, gateway): &Item) -> Option<Change> {
    let name = |of: &str| gateway.data[of]["secretRef"]["name"].as_str().unwrap_or_default();
    let (named, used) = (name("spec"), name("status"));
    if !named.is_empty() || used.is_empty() || used == format!("gw-{}", gateway.name_any()) {
        return None;
    }
    Some((("secretRef".to_owned(), json!({"name": used})), format!("keys {used}, by name")))
}

fn has_container_of_liqo(template: &Value) -> bool {
    let pod = &template["spec"]["template"]["spec"]["deployment"]["spec"]["template"]["spec"];
    let containers = pod["containers"].as_array().into_iter().flatten();
    let mut arguments = containers.flat_map(|one| one["args"].as_array().into_iter().flatten());
    arguments.any(|argument| argument.as_str().is_some_and(is_argument_of_liqo))
}

/// Removes Liqo's finalizers.
fn release(item: &Item) -> Option<Step<'_>> {
    let all = item.1.finalizers();
    let (liqos, others): (Vec<_>, Vec<_>) =
        all.iter().partition(|finalizer| FINALIZERS.contains(&finalizer.as_str()));
    if liqos.is_empty() {
        return None;
    }
    let liqos: Vec<_> = liqos.into_iter().map(String::as_str).collect();
    let text = format!("without Liqo's finalizer {}", liqos.join(", "));
    let action = Action::Merge(json!({"metadata": {"finalizers": others}}));
    Some(Step { item, action, text })
}

impl fmt::Display for Step<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, object) = self.item;
        write!(f, "{}: {}", Target::of(kind, &object.metadata), self.text)
    }
}
