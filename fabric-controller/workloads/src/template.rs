//! The template of a gateway. Pure.

use std::sync::LazyLock;

use fabric_api::check::Fault;
use fabric_api::networking::{GatewayClient, GatewayServer};
use fabric_objects::Object;
use fabric_runtime::chain;
use gateway_templates::{Rendered, Variables, WIREGUARD_CLIENT, WIREGUARD_SERVER};
use k8s_openapi::api::core::v1::ObjectReference;
use serde_json::Value;

use super::liqo_template::foreign_container;
use super::live::{ContentDigest, Key, Objects, Watched};
use fabric_index::placement::PlannedGateway;

static CLIENT: LazyLock<Value> = LazyLock::new(|| parsed(WIREGUARD_CLIENT));
static SERVER: LazyLock<Value> = LazyLock::new(|| parsed(WIREGUARD_SERVER));
const GROUP: &str = "networking.liqo.io/v1beta1";

/// Template that a gateway is made from.
#[derive(Clone, Debug)]
pub(super) struct Template<'a> {
    pub(super) origin: Origin,
    content: &'a Value,
}

/// Place of a template.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Origin {
    /// Weft's own template.
    BuiltIn,
    Object(Key, ContentDigest),
}

/// The one that the gateway names. One that names none has weft's, as it was installed or as it is
/// built in.
pub(super) fn template_of<'a>(
    gateway: &PlannedGateway,
    live: &'a Objects,
    installation: &str,
) -> Result<Template<'a>, Fault> {
    let side = Side::of(&gateway.object);
    let Some(reference) = side.reference else {
        let installed = Key::new(side.watched, installation, side.default_name);
        return Ok(found(live, &installed).unwrap_or_else(|| built_in(&side)));
    };
    let (field, kind) = (side.field, side.watched.resource().kind);
    if reference.kind.as_deref().is_some_and(|found| found != kind)
        || reference.api_version.as_deref().is_some_and(|found| found != GROUP)
    {
        let [version, found] = [&reference.api_version, &reference.kind]
            .map(|text| text.as_deref().unwrap_or_default());
        let message = format!("found {found} of {version}; expected {kind} of {GROUP}");
        return Err(fault(field, message));
    }
    let namespace = reference.namespace.as_deref().or_else(|| gateway.object.namespace());
    let name = reference.name.as_deref().unwrap_or_default();
    let key = Key::new(side.watched, namespace.unwrap_or_default(), name);
    found(live, &key).ok_or_else(|| {
        let message =
            format!("there is no {kind} {}/{name}; expected the name of one", key.namespace);
        fault(field, message)
    })
}

pub(super) fn rendered(
    gateway: &PlannedGateway,
    template: &Template<'_>,
) -> Result<Rendered, Fault> {
    let variables = if let Ok(client) = <&GatewayClient>::try_from(&gateway.object) {
        Variables::of_client(client, &gateway.peer)
    } else if let Ok(server) = <&GatewayServer>::try_from(&gateway.object) {
        Variables::of_server(server, &gateway.peer)
    } else {
        return Err(fault("", format!("{} is no gateway", gateway.object.reference())));
    };
    let wrong = |what: String| {
        let place = match &template.origin {
            Origin::BuiltIn => "weft's own".to_owned(),
            Origin::Object(key, _) => format!("{}/{}", key.namespace, key.name),
        };
        fault(Side::of(&gateway.object).field, format!("template {place}: {what}"))
    };
    let rendered = Rendered::new(template.content, &variables);
    let rendered = rendered.map_err(|error| wrong(chain(&error)))?;
    match foreign_container(&rendered.deployment) {
        Some(foreign) => Err(wrong(foreign)),
        None => Ok(rendered),
    }
}

struct Side<'a> {
    reference: Option<&'a ObjectReference>,
    field: &'static str,
    watched: Watched,
    default_name: &'static str,
    built_in: &'static LazyLock<Value>,
}

impl<'a> Side<'a> {
    fn of(gateway: &'a Object) -> Self {
        let named = |reference: &'a Option<ObjectReference>| {
            reference.as_ref().filter(|r| r.name.as_ref().is_some_and(|name| !name.is_empty()))
        };
        if let Ok(client) = <&GatewayClient>::try_from(gateway) {
            return Self {
                reference: named(&client.spec.client_template_ref),
                field: "spec.clientTemplateRef",
                watched: Watched::ClientTemplate,
                default_name: "wireguard-client",
                built_in: &CLIENT,
            };
        }
        let server = <&GatewayServer>::try_from(gateway);
        let reference = server.ok().and_then(|server| named(&server.spec.server_template_ref));
        Self {
            reference,
            field: "spec.serverTemplateRef",
            watched: Watched::ServerTemplate,
            default_name: "wireguard-server",
            built_in: &SERVER,
        }
    }
}

fn found<'a>(live: &'a Objects, key: &Key) -> Option<Template<'a>> {
    let content = &live.get(key)?.data["spec"]["template"];
    Some(Template { origin: Origin::Object(key.clone(), live.content(key)?), content })
}

fn built_in(side: &Side<'_>) -> Template<'static> {
    Template { origin: Origin::BuiltIn, content: &side.built_in["spec"]["template"] }
}

/// One of weft's own, which its tests parse as well.
fn parsed(template: &str) -> Value {
    serde_saphyr::from_str(template).unwrap_or_default()
}

fn fault(field: &str, message: String) -> Fault {
    Fault { field: field.to_owned(), message }
}
