//! Expectations of a kind, in the terms of manifests: the fields that there are,
//! and the values that they take.

use std::cell::Cell;

use serde::de::value::{Error, MapDeserializer, SeqDeserializer};
use serde::de::{DeserializeOwned, Deserializer, Error as _, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;

/// Fields of the struct at a path of `T`; empty where there is none, or where it takes any.
pub(crate) fn fields<T: DeserializeOwned>(path: &str) -> &'static [&'static str] {
    let steps: Vec<_> = path.split(['.', '[', ']']).filter(|step| !step.is_empty()).collect();
    let found = Cell::default();
    // Always an error: it ends where the fields are known.
    drop(T::deserialize(Probe { steps: &steps, found: &found }));
    found.get()
}

/// Remedy for a field that none of `fields` is: the one that was meant, or all of them.
pub fn expected_field(found: &str, fields: &[&str]) -> Option<String> {
    let distance = |field: &&str| strsim::damerau_levenshtein(found, field);
    let is_near = |field: &&str| distance(field) <= 2 && distance(field) * 2 <= found.len();
    if let Some(meant) = fields.iter().filter(|field| is_near(field)).min_by_key(|f| distance(f)) {
        return Some(format!("did you mean {meant}?"));
    }
    let mut others = fields.to_vec();
    others.retain(|field| !["apiVersion", "kind", "status"].contains(field));
    others.sort_unstable();
    (!others.is_empty()).then(|| format!("expected one of {}", others.join(", ")))
}

/// The message of serde about a wrong value, with what was found and what is expected.
pub(crate) fn value_message(message: &str) -> String {
    let kinds = ["invalid type: ", "invalid value: "];
    let rest = kinds.into_iter().find_map(|kind| message.strip_prefix(kind));
    let Some((found, expected)) = rest.and_then(|rest| rest.rsplit_once(", expected ")) else {
        return message.to_owned();
    };
    format!("found {}; expected {}", found_value(found), expected_value(found, expected))
}

fn found_value(found: &str) -> String {
    let names = [("string ", "the text "), ("integer ", "the number ")];
    let more = [("floating point ", "the number "), ("boolean ", "")];
    for (name, word) in names.into_iter().chain(more) {
        if let Some(value) = found.strip_prefix(name) {
            return format!("{word}{}", value.trim_matches('`'));
        }
    }
    match found {
        "sequence" => "a list",
        "map" => "fields",
        "null" | "unit value" | "Option value" => "nothing",
        other => other,
    }
    .to_owned()
}

fn expected_value<'a>(found: &str, expected: &'a str) -> &'a str {
    let text = found.strip_prefix("string ").map(|text| text.trim_matches('"'));
    let is_scalar = ["integer ", "floating ", "boolean "].iter().any(|s| found.starts_with(s));
    match expected {
        "i8" | "i16" | "i32" | "i64" | "u8" | "u16" | "u32" | "u64" | "usize" => match text {
            Some(text) if text.parse::<i64>().is_ok() => "a number without quotes",
            None if found.starts_with("integer `-") => "a larger number",
            None if found.starts_with("integer ") => "a smaller number",
            None if found.starts_with("floating ") => "a whole number",
            Some(_) | None => "a number",
        },
        "a boolean" if text.is_some_and(|text| ["true", "false"].contains(&text)) => {
            "true or false without quotes"
        }
        "a boolean" => "true or false",
        "a string" if is_scalar => "a text (put it in quotes)",
        "a string" => "a text",
        "a sequence" => "a list",
        "a map" => "fields below it",
        structure if structure.starts_with("struct ") => "fields below it",
        other => other,
    }
}

/// A value with nothing but the fields on the way to the last step, where it ends.
#[derive(Clone, Copy)]
struct Probe<'a> {
    steps: &'a [&'a str],
    found: &'a Cell<&'static [&'static str]>,
}

impl<'de> Deserializer<'de> for Probe<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let Some((&step, steps)) = self.steps.split_first() else {
            return Err(Error::custom("no fields"));
        };
        let below = Self { steps, ..self };
        if step.bytes().all(|byte| byte.is_ascii_digit()) {
            return visitor.visit_seq(SeqDeserializer::new(std::iter::once(below)));
        }
        visitor.visit_map(MapDeserializer::new(std::iter::once((step, below))))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        if self.steps.is_empty() {
            self.found.set(fields);
        }
        self.deserialize_any(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

impl<'de> IntoDeserializer<'de, Error> for Probe<'_> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}
