//! Line of a field in a YAML document. Looked up only when there is something to report.

use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

/// The lines of a value and of all below it, counted from 1 in its document.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    fields: Vec<(String, u64, Self)>,
    items: Vec<Spanned<Self>>,
}

impl Lines {
    /// Lines of a document that parses; otherwise nothing is known.
    pub(crate) fn of(document: &str) -> Self {
        let options = serde_saphyr::options! {
            with_snippet: false,
            duplicate_keys: serde_saphyr::DuplicateKeyPolicy::FirstWins,
        };
        serde_saphyr::from_str_with_options(document, options).unwrap_or_default()
    }

    /// The line of the field at a path such as `spec.remote.cidr.pod[0]`, or of the deepest of its
    /// parents that is there.
    pub(crate) fn find(&self, path: &str) -> Option<u64> {
        let mut here = self;
        let mut line = here.first();
        for step in path.split('.') {
            let (key, indices) = step.split_at(step.find('[').unwrap_or(step.len()));
            if !key.is_empty() {
                let Some((_, at, below)) = here.fields.iter().find(|(k, ..)| k == key) else {
                    return line;
                };
                (line, here) = (Some(*at), below);
            }
            for index in indices.split(['[', ']']).filter_map(|i| i.parse::<usize>().ok()) {
                let Some(item) = here.items.get(index) else { return line };
                (line, here) = (Some(item.referenced.line()), &item.value);
            }
        }
        line
    }

    fn first(&self) -> Option<u64> {
        let field = self.fields.first().map(|(_, line, _)| *line);
        field.or_else(|| self.items.first().map(|item| item.referenced.line()))
    }
}

impl<'de> Deserialize<'de> for Lines {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Collect)
    }
}

struct Collect;

/// Scalars have nothing below them.
macro_rules! scalars {
    ($($visit:ident: $t:ty),*) => {$(
        fn $visit<E>(self, _: $t) -> Result<Lines, E> {
            Ok(Lines::default())
        }
    )*};
}

impl<'de> Visitor<'de> for Collect {
    type Value = Lines;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    scalars! {
        visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_i128: i128, visit_u128: u128,
        visit_f64: f64, visit_str: &str, visit_bytes: &[u8]
    }

    fn visit_unit<E>(self) -> Result<Lines, E> {
        Ok(Lines::default())
    }

    fn visit_none<E>(self) -> Result<Lines, E> {
        Ok(Lines::default())
    }

    fn visit_some<D: Deserializer<'de>>(self, inner: D) -> Result<Lines, D::Error> {
        Lines::deserialize(inner)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Lines, A::Error> {
        let mut lines = Lines::default();
        while let Some(item) = seq.next_element()? {
            lines.items.push(item);
        }
        Ok(lines)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Lines, A::Error> {
        let mut lines = Lines::default();
        while let Some(key) = map.next_key::<Spanned<Key>>()? {
            let below = map.next_value()?;
            lines.fields.push((key.value.0, key.referenced.line(), below));
        }
        Ok(lines)
    }
}

/// A key of any type; all but text are of no use in a path.
struct Key(String);

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(serde::Deserialize)]
        #[serde(untagged)]
        enum Any {
            Text(String),
            Other(IgnoredAny),
        }
        Ok(match Any::deserialize(deserializer)? {
            Any::Text(text) => Self(text),
            Any::Other(_) => Self(String::new()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_style_of_yaml_gives_the_line_of_a_field() {
        let text = "\
kind: X
spec:
  remote: {cidr: {pod: 10.0.0.0/16,
     external: [1, 2,
       3]}}
  list:
  - a: 1
    b: 2
  -
    a: 3
";
        let lines = Lines::of(text);
        assert_eq!(lines.find("spec"), Some(2));
        assert_eq!(lines.find("spec.remote.cidr.pod"), Some(3));
        assert_eq!(lines.find("spec.remote.cidr.external"), Some(4));
        assert_eq!(lines.find("spec.remote.cidr.external[2]"), Some(5));
        assert_eq!(lines.find("spec.list[0].b"), Some(8));
        assert_eq!(lines.find("spec.list[1].a"), Some(10));
        assert_eq!(lines.find("spec.list[1].absent.below"), Some(10), "the item begins there");
        assert_eq!(lines.find("absent"), Some(1));
        assert_eq!(Lines::of("{\"a\":\n{\"b\": 1}}").find("a.b"), Some(2), "JSON");
        assert_eq!(Lines::of("a: [").find("a"), None);
    }
}
