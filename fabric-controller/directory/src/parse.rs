//! Parsing of a manifest file's text into objects and problems.

use std::sync::Arc;

use fabric_objects::{Kind, Object, ObjectRef, Problem, decode, expectation};
use serde_json::Value;
use serde_saphyr::{DefaultMessageFormatter, MessageFormatter as _};

use crate::identity::identify;
use crate::layout::Layout;
use crate::lines::Lines;
use crate::outline::Outline;

/// A bigger file is refused before it is read.
pub(crate) const MAX_FILE: u64 = 1024 * 1024;

/// Limits of one document, named in README.md: lists and objects inside each other, values, those that
/// aliases repeat counted each time, and aliases for each anchor, where there are more than
/// `FREE_ALIASES` in all.
const MAX_DEPTH: usize = 64;
const MAX_VALUES: usize = 250_000;
const MAX_ALIASES: usize = 10;
const FREE_ALIASES: usize = 100;

/// Limit with which `<namespace>.<name>.yaml` fits into a file name, also with what weft appends.
const MAX_NAME: usize = 120;

/// Weft's own objects are named after the users'.
pub(crate) const MAX_OWN_NAME: usize = 180;

/// Liqo's kinds that belong to a dataplane weft does not have; they may lie among the manifests.
const OF_NO_USE: [&str; 11] = [
    "FirewallConfiguration",
    "ForeignCluster",
    "GeneveTunnel",
    "InternalFabric",
    "InternalNode",
    "RouteConfiguration",
    "Tenant",
    "WgGatewayClient",
    "WgGatewayClientTemplate",
    "WgGatewayServer",
    "WgGatewayServerTemplate",
];

/// Fields that messages about a broken Secret name. Any other may be part of a value.
const SECRET_FIELDS: [&str; 9] = [
    "apiVersion",
    "kind",
    "metadata",
    "metadata.name",
    "metadata.namespace",
    "data",
    "data.privateKey",
    "data.publicKey",
    "stringData",
];

/// Content of a file.
#[derive(Debug, Default)]
pub(crate) struct Parsed {
    pub(crate) objects: Vec<Located>,
    pub(crate) problems: Vec<Problem>,
}

/// An object and where it stands.
#[derive(Clone, Debug)]
pub(crate) struct Located {
    pub(crate) object: Object,
    /// Line of the file at which its document starts, from 0.
    pub(crate) document: usize,
    /// Its path in the document: empty, or `items[3]` in a List.
    pub(crate) path: String,
    /// False if something is wrong with it.
    pub(crate) sound: bool,
}

/// Reads all documents of a file. `file` is its name.
pub(crate) fn parse(file: &str, text: &str) -> Parsed {
    let mut parsed = Parsed::default();
    for (start, text) in documents(text) {
        let document = Document { file, text: &text, start };
        match document.value() {
            Ok(Value::Null) => {}
            Ok(value) => document.object(value, "", &mut parsed),
            Err(problem) => parsed.problems.push(*problem),
        }
    }
    parsed
}

/// Parses one document into plain values. The error names line and column of the document.
pub(crate) fn value(text: &str) -> Result<Value, serde_saphyr::Error> {
    let options = serde_saphyr::options! {
        with_snippet: false,
        strict_booleans: true,
        budget: serde_saphyr::budget! {
            max_depth: MAX_DEPTH,
            max_nodes: MAX_VALUES,
            alias_anchor_min_aliases: FREE_ALIASES + 1,
            alias_anchor_ratio_multiplier: MAX_ALIASES,
        },
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: MAX_VALUES },
    };
    serde_saphyr::from_str_with_options(text, options)
}

/// Returns whether it is the size of a document for which it is refused.
fn is_over_limit(error: &serde_saphyr::Error) -> bool {
    use serde_saphyr::Error;
    if let Error::AliasError { error, .. } = error {
        return is_over_limit(error);
    }
    // The parser's own limit, far beyond, has no variant.
    matches!(error, Error::ExternalMessage { msg, .. } if msg == "recursion limit exceeded")
        || matches!(error, Error::Budget { .. } | Error::AliasReplayLimitExceeded { .. })
}

/// The documents of a file with the line (from 0) on which each starts. A line that begins with
/// `---` or `...` can be nothing else in YAML, so a broken document does not hide the next.
pub(crate) fn documents(text: &str) -> Vec<(usize, String)> {
    let mut all = vec![(0, String::new())];
    for (number, line) in text.trim_start_matches('\u{feff}').lines().enumerate() {
        let marker = ["---", "..."].iter().find_map(|m| line.strip_prefix(m));
        match marker.filter(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\r'])) {
            Some(rest) => all.push((number, format!("   {rest}\n"))),
            None => {
                if let Some((_, document)) = all.last_mut() {
                    document.push_str(line);
                    document.push('\n');
                }
            }
        }
    }
    all.retain(|(_, document)| {
        let empty = |line: &str| line.trim().is_empty() || line.trim_start().starts_with('#');
        document.lines().any(|line| !empty(line) && !line.starts_with('%'))
    });
    all
}

/// Position of a field of an object in a document, for messages: `file:line`.
pub(crate) fn place(file: &str, document: usize, text: &str, path: &str) -> String {
    match Lines::of(text).find(path) {
        Some(line) => format!("{file}:{}", document + usize::try_from(line).unwrap_or(1)),
        None => format!("{file}:{}", document + 1),
    }
}

struct Document<'a> {
    file: &'a str,
    text: &'a str,
    start: usize,
}

impl Document<'_> {
    fn value(&self) -> Result<Value, Box<Problem>> {
        value(self.text).map_err(|error| {
            let line = error.location().map_or(1, |l| usize::try_from(l.line()).unwrap_or(1));
            let tab = self.line_with_tab(line);
            let line = tab.unwrap_or(line);
            let mut outline = Outline::of(self.text, line);
            let is_secret = self.may_be_secret();
            if is_secret {
                outline.field =
                    outline.field.filter(|field| SECRET_FIELDS.contains(&field.as_str()));
            }
            let message = match (&error, tab) {
                _ if is_over_limit(&error) => format!(
                    "too deep, or too many values or aliases; expected at most {MAX_DEPTH} levels, \
                     {MAX_VALUES} values, those of aliases included, and {FREE_ALIASES} aliases, or \
                     more with at most {MAX_ALIASES} for each anchor"
                ),
                // The parser's own message may quote the text.
                (_, None) if is_secret => "not YAML; expected a whole YAML document".to_owned(),
                (_, Some(_)) => "found a tab in the indentation; expected spaces".to_owned(),
                // Of a field's name: a value may be null.
                (serde_saphyr::Error::NullIntoString { .. }, _) => {
                    "found null; expected a text".to_owned()
                }
                (serde_saphyr::Error::DuplicateMappingKey { key, .. }, _) => {
                    let key = key.as_deref().unwrap_or("a field");
                    format!(
                        "found {key} twice in one object; expected it once: remove one of the two"
                    )
                }
                _ => {
                    let found = DefaultMessageFormatter.format_message(&error);
                    format!("{found}; expected a whole YAML document")
                }
            };
            Box::new(Problem {
                source: format!("{}:{}", self.file, self.start + line.max(1)),
                object: outline.object,
                field: outline.field,
                message,
            })
        })
    }

    /// Returns whether a text that is no YAML may hold a Secret's values, whatever is wrong with it.
    fn may_be_secret(&self) -> bool {
        let text = self.text.to_ascii_lowercase();
        let lines = text.lines().filter(|line| line.contains("kind"));
        ["privatekey", "stringdata"].iter().any(|key| text.contains(key))
            || lines
                .flat_map(|line| line.split(|c: char| !c.is_alphanumeric()))
                .any(|w| w == "secret")
    }

    /// The last line up to that of an error, or the next one, that a tab indents: of a text that is
    /// no YAML, the likely cause.
    fn line_with_tab(&self, line: usize) -> Option<usize> {
        let is_indented =
            |text: &str| text.trim_start_matches(' ').starts_with('\t') && !text.trim().is_empty();
        let lines = self.text.lines().enumerate().take(line + 1);
        lines.filter(|(_, text)| is_indented(text)).last().map(|(number, _)| number + 1)
    }

    /// Takes in the object, or the List of objects, at `path`.
    fn object(&self, mut value: Value, path: &str, parsed: &mut Parsed) {
        let kind = match self.kind(&mut value, path) {
            Ok(Some(Found::Object(kind))) => kind,
            Ok(Some(Found::List(items))) => {
                for (index, item) in items.into_iter().enumerate() {
                    self.object(item, &join(path, &format!("items[{index}]")), parsed);
                }
                return;
            }
            Ok(None) => return,
            Err(problem) => return parsed.problems.push(*problem),
        };
        let reference = match self.name(kind, &mut value, path) {
            Ok(reference) => reference,
            Err(problem) => return parsed.problems.push(*problem),
        };
        match self.typed(&reference, value, path) {
            Ok(object) => {
                let faults = object.faults();
                let (document, sound) = (self.start, faults.is_empty());
                parsed.problems.extend(faults.into_iter().map(|fault| {
                    *self.problem(Some(&reference), path, &fault.field, fault.message)
                }));
                parsed.objects.push(Located { object, document, path: path.to_owned(), sound });
            }
            Err(problems) => parsed.problems.extend(problems),
        }
    }

    /// `None` if weft has no use for the kind.
    fn kind(&self, value: &mut Value, path: &str) -> Result<Option<Found>, Box<Problem>> {
        let Some(map) = value.as_object_mut() else {
            let message = "not an object; expected apiVersion, kind and metadata";
            return Err(self.problem(None, path, "", message));
        };
        let text = |key: &str| map.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let (api_version, kind) = (text("apiVersion"), text("kind"));
        for (key, found) in [("apiVersion", &api_version), ("kind", &kind)] {
            if found.is_empty() {
                return Err(self.problem(None, path, key, "missing; expected a text"));
            }
        }
        if api_version == "v1" && kind == "List" {
            let items = map.remove("items").unwrap_or(Value::Array(Vec::new()));
            let Value::Array(items) = items else {
                return Err(self.problem(None, path, "items", "not a list; expected objects"));
            };
            return Ok(Some(Found::List(items)));
        }
        if api_version.contains(".liqo.io/") && OF_NO_USE.contains(&kind.as_str()) {
            tracing::debug!(file = self.file, kind, "no use for this kind");
            return Ok(None);
        }
        match Kind::from_type(&api_version, &kind) {
            Some(kind) if Layout::is_published(kind) => {
                let message = format!("weft itself writes every {kind}; remove it");
                Err(self.problem(None, path, "kind", message))
            }
            Some(kind) => Ok(Some(Found::Object(kind))),
            None => Err(self.unknown_kind(&api_version, &kind, path)),
        }
    }

    fn unknown_kind(&self, api_version: &str, kind: &str, path: &str) -> Box<Problem> {
        if let Some(meant) = Kind::ALL.into_iter().find(|k| k.as_str() == kind) {
            let expected = meant.api_version();
            let message = format!("found {api_version:?}; expected {expected:?} for a {kind}");
            return self.problem(None, path, "apiVersion", message);
        }
        let users = "Namespace, ConfigMap, Secret, Node, Network, IP, Configuration, \
                     GatewayServer, GatewayClient or PublicKey";
        let message = format!("{kind:?} is none that weft knows; expected {users}");
        self.problem(None, path, "kind", message)
    }

    /// Checks the name, which becomes part of file names, and fills in the namespace.
    fn name(&self, kind: Kind, value: &mut Value, path: &str) -> Result<ObjectRef, Box<Problem>> {
        let no_map = || self.problem(None, path, "metadata", "missing; expected at least a name");
        let metadata = value.get_mut("metadata").and_then(Value::as_object_mut);
        let metadata = metadata.ok_or_else(no_map)?;
        let name = match metadata.get("name") {
            Some(Value::String(name)) => name.clone(),
            Some(other) => {
                let message = format!("found {other}; expected a text (put it in quotes)");
                return Err(self.problem(None, path, "metadata.name", message));
            }
            None => {
                return Err(self.problem(None, path, "metadata.name", "missing; expected a text"));
            }
        };
        if !kind.is_namespaced() {
            metadata.remove("namespace");
        } else if !metadata.get("namespace").is_some_and(Value::is_string) {
            metadata.insert("namespace".to_owned(), Value::from("default"));
        }
        let namespace = metadata.get("namespace").and_then(Value::as_str).unwrap_or_default();
        let reference = ObjectRef::new(kind, namespace, &name);
        match check_names(&reference, MAX_NAME) {
            Ok(()) => Ok(reference),
            Err((field, expected)) => {
                let found = if field.ends_with("space") { namespace } else { &name };
                let message = format!("found {found:?}; expected {expected}");
                Err(self.problem(None, path, field, message))
            }
        }
    }

    fn typed(&self, of: &ObjectRef, mut value: Value, path: &str) -> Result<Object, Vec<Problem>> {
        if let (true, Some(map)) = (of.kind != Kind::Node, value.as_object_mut()) {
            map.remove("status"); // weft's to write; an exported manifest may still have one
        }
        let (mut object, unknown) = decode::object(of.kind, value).map_err(|error| {
            // The message of a wrong value may quote it.
            let message = if of.kind == Kind::Secret {
                "not as expected: data holds base64, stringData text".to_owned()
            } else {
                error.message
            };
            vec![*self.problem(Some(of), path, &error.path, message)]
        })?;
        let unknown: Vec<_> = unknown
            .into_iter()
            .filter(|field| !(of.kind == Kind::Ip && field.path == "spec.serviceTemplate"))
            .map(|field| *self.problem(Some(of), path, &field.path, unknown_message(of, &field)))
            .collect();
        if !unknown.is_empty() {
            return Err(unknown);
        }
        if let Object::Secret(secret) = &mut object {
            let secret = Arc::make_mut(secret);
            let texts = secret.string_data.take().unwrap_or_default();
            let data = secret.data.get_or_insert_default();
            let bytes = |text: String| k8s_openapi::ByteString(text.into_bytes());
            data.extend(texts.into_iter().map(|(key, text)| (key, bytes(text))));
        }
        identify(&mut object);
        Ok(object)
    }

    fn problem(
        &self,
        object: Option<&ObjectRef>,
        path: &str,
        field: &str,
        message: impl Into<String>,
    ) -> Box<Problem> {
        Box::new(Problem {
            source: place(self.file, self.start, self.text, &join(path, field)),
            object: object.cloned(),
            field: Some(field.to_owned()).filter(|f| !f.is_empty()),
            message: message.into(),
        })
    }
}

fn unknown_message(of: &ObjectRef, field: &decode::UnknownField) -> String {
    let name = field.path.rsplit('.').next().unwrap_or_default();
    let remedy = expectation::expected_field(name, field.siblings);
    let remedy = remedy.unwrap_or_else(|| "remove it".to_owned());
    format!("no field of a {}; {remedy}", of.kind)
}

enum Found {
    Object(Kind),
    List(Vec<Value>),
}

pub(crate) fn join(path: &str, field: &str) -> String {
    match (path, field) {
        ("", only) | (only, "") => only.to_owned(),
        (path, field) => format!("{path}.{field}"),
    }
}

/// The first field that breaks Kubernetes's rules for names, and what it expects.
pub(crate) fn check_names(of: &ObjectRef, longest: usize) -> Result<(), (&'static str, String)> {
    let label = |text: &str| {
        let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        !text.is_empty()
            && text.len() <= 63
            && text.chars().all(legal)
            && !text.starts_with('-')
            && !text.ends_with('-')
    };
    if !of.namespace.as_deref().is_none_or(label) {
        let expected = "1 to 63 of a-z, 0-9 and -, not starting or ending with -".to_owned();
        return Err(("metadata.namespace", expected));
    }
    let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    let ends = |c: char| c == '-' || c == '.';
    let name = &of.name;
    let shape = name.chars().all(legal) && !name.starts_with(ends) && !name.ends_with(ends);
    if name.is_empty() || name.len() > longest || !shape || name.contains("..") {
        let expected =
            format!("1 to {longest} of a-z, 0-9, - and ., starting and ending with a-z or 0-9");
        return Err(("metadata.name", expected));
    }
    Ok(())
}
