use std::collections::BTreeMap;
use std::sync::LazyLock;

use regex::Regex;
use serde_json::{Map, Number, Value};

use crate::engine::{Engine, plain};
use crate::place::Place;
use crate::{Problem, RenderError, Variables};

/// The first action of a text without a space inside, as Liqo finds it: `{{\s*(.\S+)\s*}}` in Go,
/// where white space is ASCII.
static VARIABLE: LazyLock<Regex> = LazyLock::new(|| {
    let pattern = r"\{\{[\t\n\f\r ]*(.[^\t\n\f\r ]+)[\t\n\f\r ]*\}\}";
    Regex::new(pattern).expect("a pattern known to be right")
});

/// Renders the `spec.template` of a WgGatewayServerTemplate or WgGatewayClientTemplate: of its
/// metadata the name, namespace, labels and annotations, and the whole spec.
///
/// # Errors
///
/// The first field that cannot be rendered.
pub fn render(template: &Value, variables: &Variables) -> Result<Value, RenderError> {
    Walk::over(template, variables).map(|walk| walk.rendered)
}

/// A rendered template.
pub(crate) struct Walk {
    pub(crate) rendered: Value,
    /// Original texts of those that became integers, by their places.
    pub(crate) numbers: BTreeMap<String, String>,
}

impl Walk {
    pub(crate) fn over(template: &Value, variables: &Variables) -> Result<Self, RenderError> {
        let mut walker = Walker { engine: Engine::new(variables), numbers: BTreeMap::new() };
        let rendered = walker.object(template)?;
        Ok(Self { rendered, numbers: walker.numbers })
    }
}

/// Types that a result may have.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Results {
    AsTheyLook,
    TextsOnly,
}

struct Walker {
    engine: Engine,
    numbers: BTreeMap<String, String>,
}

impl Walker {
    fn object(&mut self, template: &Value) -> Result<Value, RenderError> {
        let root = Place::root();
        let metadata = self.metadata(field(template, &root, "metadata")?, &root.key("metadata"))?;
        let spec = field(template, &root, "spec")?;
        let spec = self.map(spec, &root.key("spec"), Results::AsTheyLook)?;
        Ok(serde_json::json!({ "metadata": metadata, "spec": spec }))
    }

    fn metadata(&mut self, of: &Map<String, Value>, place: &Place) -> Result<Value, RenderError> {
        let mut rendered = Map::new();
        for key in ["name", "namespace", "labels", "annotations"] {
            let place = place.key(key);
            match of.get(key) {
                Some(value) => {
                    let value = self.value(value, &place, Results::TextsOnly)?;
                    rendered.insert(key.to_owned(), value);
                }
                None if key.starts_with("name") => {
                    let expected = "a text such as {{ .Name }} or {{ .Namespace }}";
                    return Err(Problem::Missing { expected }.at(place.field));
                }
                None => {}
            }
        }
        Ok(Value::Object(rendered))
    }

    fn value(&mut self, of: &Value, place: &Place, results: Results) -> Result<Value, RenderError> {
        match of {
            Value::String(text) => self.text(text, text, place, results),
            Value::Object(map) => self.map(map, place, results),
            Value::Array(list) => self.list(list, place, results),
            Value::Bool(bool) if results == Results::TextsOnly => Ok(bool.to_string().into()),
            Value::Number(number) if results == Results::TextsOnly => digits(number, place),
            Value::Bool(_) | Value::Number(_) | Value::Null => Ok(of.clone()),
        }
    }

    fn map(
        &mut self,
        of: &Map<String, Value>,
        place: &Place,
        results: Results,
    ) -> Result<Value, RenderError> {
        let texts = of.contains_key("labels") || of.contains_key("annotations");
        let results = if texts { Results::TextsOnly } else { results };
        let (optional, plain): (Vec<_>, Vec<_>) = of.iter().partition(|(k, _)| k.starts_with('?'));
        let mut rendered = Map::new();
        for (key, value) in plain {
            rendered.insert(key.clone(), self.value(value, &place.key(key), results)?);
        }
        for (key, value) in optional {
            rendered.extend(self.optional(key, value, place, results)?);
        }
        Ok(Value::Object(rendered))
    }

    fn list(
        &mut self,
        of: &[Value],
        place: &Place,
        results: Results,
    ) -> Result<Value, RenderError> {
        let elements = of.iter().enumerate();
        elements.map(|(i, value)| self.value(value, &place.item(i), results)).collect()
    }

    /// The field `?key`, unless it is empty.
    fn optional(
        &mut self,
        key: &str,
        value: &Value,
        place: &Place,
        results: Results,
    ) -> Result<Option<(String, Value)>, RenderError> {
        let Some(text) = value.as_str() else {
            let expected = "a text, as the key starts with ?";
            return Err(Problem::Kind { found: kind(value), expected }.at(place.key(key).field));
        };
        let Some(variable) = first_variable(text) else {
            let value = self.value(value, &place.key(key), results)?;
            return Ok(Some((key.to_owned(), value)));
        };
        let name = key.strip_prefix('?').unwrap_or(key);
        let template = format!("{{{{if {variable}}}}}{text}{{{{end}}}}");
        let value = self.text(&template, text, &place.renamed(key, name), results)?;
        Ok(Some((name.to_owned(), value)).filter(|(_, value)| !is_zero(value)))
    }

    /// Renders `template`, which the user wrote as `text`.
    fn text(
        &mut self,
        template: &str,
        text: &str,
        place: &Place,
        results: Results,
    ) -> Result<Value, RenderError> {
        let result = self.engine.render(template);
        let result = result.map_err(|cause| Problem::of_text(text, cause).at(&place.field))?;
        match result.parse::<i64>() {
            Ok(number) if results == Results::AsTheyLook => {
                self.numbers.insert(place.pointer.clone(), result);
                Ok(number.into())
            }
            Ok(_) | Err(_) => Ok(result.into()),
        }
    }
}

/// Returns the action that decides about an optional key.
fn first_variable(text: &str) -> Option<&str> {
    let found = VARIABLE.captures(text)?;
    found.get(1).map(|variable| variable.as_str())
}

/// Formats a number as Go prints it: an integer if it is one of 64 bits, else a float.
fn digits(number: &Number, place: &Place) -> Result<Value, RenderError> {
    if let Some(whole) = number.as_i64() {
        return Ok(whole.to_string().into());
    }
    let printed = plain(number.as_f64().unwrap_or_default());
    let printed = printed.map_err(|cause| Problem::of_text(&number.to_string(), cause));
    printed.map(Value::from).map_err(|problem| problem.at(&place.field))
}

fn is_zero(value: &Value) -> bool {
    value.as_str() == Some("") || value.as_i64() == Some(0)
}

/// The map `key` of `of`.
fn field<'a>(
    of: &'a Value,
    place: &Place,
    key: &str,
) -> Result<&'a Map<String, Value>, RenderError> {
    let problem = match of.get(key) {
        Some(Value::Object(map)) => return Ok(map),
        Some(other) => Problem::Kind { found: kind(other), expected: "an object" },
        None => Problem::Missing { expected: "an object" },
    };
    Err(problem.at(place.key(key).field))
}

fn kind(of: &Value) -> &'static str {
    match of {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
