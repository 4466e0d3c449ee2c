//! Apparent subject of a document that is not YAML, read line by line.

use fabric_objects::{Kind, ObjectRef};

/// The object and the field that a line belongs to, as far as they can be determined.
#[derive(Debug, Default)]
pub(crate) struct Outline {
    pub(crate) object: Option<ObjectRef>,
    pub(crate) field: Option<String>,
}

impl Outline {
    /// Outline around a line of a document, counted from 1.
    pub(crate) fn of(document: &str, line: usize) -> Self {
        let mut outline = Self::default();
        let (mut kind, mut name, mut namespace) = (None, None, None);
        // The keys around the current line, with their columns.
        let mut around: Vec<(usize, &str)> = Vec::new();
        for (number, text) in (1..).zip(document.lines()) {
            let content = text.trim_start_matches([' ', '-']);
            let column = text.len() - content.len();
            let Some((key, value)) = entry(content) else { continue };
            around.retain(|(outer, _)| *outer < column);
            around.push((column, key));
            let path = around.iter().map(|(_, key)| *key).collect::<Vec<_>>().join(".");
            match path.as_str() {
                "kind" => kind = Kind::ALL.into_iter().find(|kind| kind.as_str() == value),
                "metadata.name" => name = Some(value),
                "metadata.namespace" => namespace = Some(value),
                "metadata" => {
                    let inline = |key| within(value, key);
                    name = inline("name").or(name);
                    namespace = inline("namespace").or(namespace);
                }
                _ => {}
            }
            if number <= line {
                outline.field = Some(path);
            }
        }
        outline.object = kind
            .zip(name)
            .map(|(kind, name)| ObjectRef::new(kind, namespace.unwrap_or("default"), name));
        outline
    }
}

/// Key and value of a line such as `key: value`, `"key": "value",` or `key:`.
fn entry(content: &str) -> Option<(&str, &str)> {
    let (key, value) = content.split_once(':')?;
    let key = key.trim_matches(['"', '\'']);
    let legal = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    let is_key = !key.is_empty() && key.chars().all(legal);
    is_key.then(|| (key, plain(value)))
}

/// The value of a key in `{key: value, ...}`.
fn within<'a>(map: &'a str, key: &str) -> Option<&'a str> {
    let entries = map.strip_prefix('{')?.split([',', '}']);
    let mut found = entries.filter_map(|part| entry(part.trim())).filter(|(k, _)| *k == key);
    found.next().map(|(_, value)| value)
}

fn plain(value: &str) -> &str {
    let value = value.trim();
    if value.starts_with('{') { value } else { value.trim_matches([',', ' ', '"', '\'']) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_document_still_names_its_object() {
        let text = "\
apiVersion: networking.liqo.io/v1beta1
kind: Configuration
metadata:
  name: milan
  namespace: t
spec:
  remote:
    cidr:
      pod: [10.200.
";
        let outline = Outline::of(text, 9);
        assert_eq!(outline.object.unwrap().to_string(), "Configuration t/milan");
        assert_eq!(outline.field.unwrap(), "spec.remote.cidr.pod");
        let short = "kind: PublicKey\nmetadata: {name: \"k\", labels: {a: b}}\nspec: {publicKey";
        let outline = Outline::of(short, 3);
        assert_eq!(outline.object.unwrap().to_string(), "PublicKey default/k");
        assert_eq!(outline.field.unwrap(), "spec");
        let json = "{\n\"kind\": \"Node\",\n\"metadata\": {\"name\": \"n1\"},\n\"spec\": [\n";
        assert_eq!(Outline::of(json, 4).object.unwrap().to_string(), "Node n1");
        assert!(Outline::of("\u{0}: [\nnothing", 1).object.is_none());
    }
}
