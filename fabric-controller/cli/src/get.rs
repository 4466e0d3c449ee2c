use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use fabric_api::networking::ACCEPTED;
use fabric_observation::host;
use fabric_store::{Kind, Object, ObjectRef, Problem};
use serde_json::{Value, json};

use super::output::{self, Format};
use super::selection::Selection;

/// Placeholder for key material.
const HIDDEN: &str = "<hidden>";

const EXAMPLES: &str = "\
Examples:
    weft get configuration milan -n liqo-tenant-milan
    weft get networks -o json
    weft get all -o name";

/// Print resources with their status. Secrets never show their data.
///
/// While the newest manifest of a resource is not used, its condition Accepted is False and says why;
/// what is shown is the last good version.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct GetArgs {
    /// A kind, its plural or its short name, in any case (configuration, gws, networks), or `all`.
    #[arg(value_parser = checked_kind)]
    kind: String,
    /// Of one resource; without it, all of the kind are printed.
    name: Option<String>,
    /// Only those of this namespace.
    #[arg(short, long)]
    namespace: Option<String>,
    /// How they are printed; `name` is one KIND.GROUP/NAMESPACE/NAME a line.
    #[arg(short, long, value_enum, default_value_t = Output::Yaml)]
    output: Output,
    #[command(flatten)]
    selection: Selection,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Yaml,
    Json,
    Name,
}

/// A wrong kind is wrong usage: clap exits with 2.
fn checked_kind(text: &str) -> anyhow::Result<String> {
    kinds(text).map(|_| text.to_owned())
}

pub(crate) fn run(args: &GetArgs) -> anyhow::Result<ExitCode> {
    let kinds = kinds(&args.kind)?;
    let dir = args.selection.require()?;
    let record = dir.record()?.with_context(|| {
        format!("no `weft up` or `weft agent` ever ran in {}", dir.path().display())
    })?;
    let folders = [Some(dir.pids()), record.manifests.clone(), record.published.clone()];
    if let Some(folder) = folders.into_iter().flatten().find(|folder| host::is_denied(folder)) {
        bail!("{} is not for this user: run it as root", folder.display());
    }
    let store = dir.store(&record)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (snapshot, reported) =
        runtime.block_on(async { (store.read(&kinds).await, store.problems().await) });
    let snapshot = snapshot.context("cannot read the store")?;
    let mut problems: BTreeSet<Problem> = snapshot.problems.iter().cloned().collect();
    problems.extend(reported);
    let matches = |object: &Object| {
        args.name.as_deref().is_none_or(|name| object.name() == name)
            && args.namespace.as_deref().is_none_or(|wanted| object.namespace() == Some(wanted))
    };
    let found: Vec<_> = snapshot.objects.into_values().filter(matches).collect();
    if let (Some(name), true) = (&args.name, found.is_empty()) {
        let place =
            args.namespace.as_ref().map(|n| format!(" in namespace {n}")).unwrap_or_default();
        let about = |p: &&Problem| p.object.as_ref().is_some_and(|o| o.name == *name);
        let why: String = problems.iter().filter(about).map(|p| format!("\n  {p}")).collect();
        bail!(
            "no {} named {name}{place}; `weft get {} -o name` lists what is there{why}",
            args.kind,
            args.kind
        );
    }
    if found.is_empty() {
        let places = [Some(dir.path().to_owned()), record.manifests, record.published];
        let places: Vec<PathBuf> = places.into_iter().flatten().collect();
        output::say(&none_found(&kinds, args.namespace.as_deref(), &places));
    }
    output::print(&render(&found, &problems, args.output)?)?;
    Ok(ExitCode::SUCCESS)
}

fn none_found(kinds: &[Kind], namespace: Option<&str>, places: &[PathBuf]) -> String {
    let kind = if let [kind] = kinds { kind.as_str() } else { "resource" };
    let namespace = namespace.map(|name| format!(" in namespace {name}")).unwrap_or_default();
    let places: Vec<_> = places.iter().map(|place| place.display().to_string()).collect();
    format!("no {kind} found{namespace}; looked in {}", places.join(" and "))
}

fn render(
    found: &[Object],
    problems: &BTreeSet<Problem>,
    output: Output,
) -> anyhow::Result<String> {
    let shown = |object: &Object| shown(object, problems);
    match output {
        Output::Name => Ok(found.iter().map(|object| format!("{}\n", name(object))).collect()),
        Output::Yaml => {
            let documents = found.iter().map(|object| output::encode(&shown(object), Format::Yaml));
            Ok(documents.collect::<Result<Vec<_>, _>>()?.join("---\n"))
        }
        Output::Json => match found {
            [one] => output::encode(&shown(one), Format::Json),
            many => {
                let items: Vec<_> = many.iter().map(shown).collect();
                let list = serde_json::json!({"apiVersion": "v1", "kind": "List", "items": items});
                output::encode(&list, Format::Json)
            }
        },
    }
}

/// `kind[.group]/[namespace/]name`
fn name(object: &Object) -> String {
    let kind = object.kind();
    let group = kind.api_version().split_once('/').map(|(group, _)| format!(".{group}"));
    let namespace = object.namespace().map(|namespace| format!("{namespace}/"));
    format!(
        "{}{}/{}{}",
        kind.as_str().to_ascii_lowercase(),
        group.unwrap_or_default(),
        namespace.unwrap_or_default(),
        object.name()
    )
}

fn shown(object: &Object, problems: &BTreeSet<Problem>) -> Value {
    let mut value = object.to_value();
    accept(&mut value, &object.reference(), problems);
    if object.kind() == Kind::Secret {
        for field in ["data", "stringData"] {
            let Some(data) = value.get_mut(field).and_then(Value::as_object_mut) else { continue };
            data.values_mut().for_each(|value| *value = Value::from(HIDDEN));
        }
        // kubectl repeats the whole manifest there.
        if let Some(notes) =
            value.pointer_mut("/metadata/annotations").and_then(Value::as_object_mut)
        {
            notes.remove("kubectl.kubernetes.io/last-applied-configuration");
        }
    }
    value
}

/// Shows the problems of an object as a condition even if its status has no place for conditions,
/// or is not written yet.
fn accept(value: &mut Value, object: &ObjectRef, problems: &BTreeSet<Problem>) {
    let about = problems.iter().filter(|p| p.object.as_ref() == Some(object));
    let reported: BTreeSet<String> = about
        .filter(|problem| !problem.message.starts_with("waits for"))
        .map(|problem| Problem { object: None, ..problem.clone() }.to_string())
        .collect();
    let Some(map) = value.as_object_mut().filter(|_| !reported.is_empty()) else { return };
    let status = map.entry("status").or_insert_with(|| json!({}));
    let Some(status) = status.as_object_mut() else { return };
    let conditions = status.entry("conditions").or_insert_with(|| json!([]));
    let Some(conditions) = conditions.as_array_mut() else { return };
    conditions.retain(|condition| condition["type"] != ACCEPTED);
    let message = reported.into_iter().collect::<Vec<_>>().join("; ");
    conditions.push(json!({
        "type": ACCEPTED, "status": "False", "reason": "Invalid", "message": message
    }));
}

fn kinds(named: &str) -> anyhow::Result<Vec<Kind>> {
    let named = named.to_ascii_lowercase();
    if named == "all" {
        return Ok(Kind::ALL.to_vec());
    }
    let found = Kind::ALL.into_iter().find(|kind| {
        let singular = kind.as_str().to_ascii_lowercase();
        named == singular || named == kind.plural() || short_names(*kind).contains(&named.as_str())
    });
    found.map(|kind| vec![kind]).with_context(|| {
        let all: Vec<_> = Kind::ALL.iter().map(|kind| kind.as_str().to_ascii_lowercase()).collect();
        format!("{named:?} is no kind that weft has; expected all or one of {}", all.join(", "))
    })
}

/// Short names of the custom resource definitions, and kubectl's own for the built-in kinds.
fn short_names(kind: Kind) -> &'static [&'static str] {
    match kind {
        Kind::Namespace => &["ns"],
        Kind::ConfigMap => &["cm"],
        Kind::Secret => &[],
        Kind::Node => &["no"],
        Kind::Network => &["net"],
        Kind::Ip => &[],
        Kind::Configuration => &["conf"],
        Kind::Connection => &["conn"],
        Kind::GatewayServer => &["gws", "gwserver"],
        Kind::GatewayClient => &["gwc", "gwclient"],
        Kind::PublicKey => &["pk", "pkies", "pkey", "publickeys"],
        Kind::GatewayConfig => &["gwcfg"],
        Kind::NodeConfig => &["nodecfg"],
        Kind::FabricRecord => &["fabrec"],
        Kind::GatewayRecord => &["gwrec"],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_go_by_many_names() {
        for (named, kind) in [
            ("GatewayServer", Kind::GatewayServer),
            ("gws", Kind::GatewayServer),
            ("publickeies", Kind::PublicKey),
            ("IPs", Kind::Ip),
        ] {
            assert_eq!(kinds(named).unwrap(), [kind]);
        }
        assert!(kinds("pods").unwrap_err().to_string().contains("gatewayserver"));
    }

    #[test]
    fn missing_kind_is_named_with_searched_places() {
        let places = ["/run/weft/rome", "/etc/weft/rome"].map(PathBuf::from);
        assert_eq!(
            none_found(&[Kind::GatewayServer], Some("t"), &places),
            "no GatewayServer found in namespace t; looked in /run/weft/rome and /etc/weft/rome"
        );
        let all = none_found(&Kind::ALL, None, &places[..1]);
        assert_eq!(all, "no resource found; looked in /run/weft/rome");
    }

    #[test]
    fn a_secret_never_shows_its_data() {
        let secret: k8s_openapi::api::core::v1::Secret =
            serde_json::from_value(serde_json::json!({
                "metadata": {"name": "gw-keys", "namespace": "t", "annotations": {
                    "kubectl.kubernetes.io/last-applied-configuration": "c2VjcmV0"}},
                "data": {"privateKey": "c2VjcmV0"}, "stringData": {"x": "c2VjcmV0"},
            }))
            .unwrap();
        for output in [Output::Yaml, Output::Json, Output::Name] {
            let text = render(&[secret.clone().into()], &BTreeSet::new(), output).unwrap();
            assert!(!text.contains("c2VjcmV0"), "{text}");
        }
    }
}
