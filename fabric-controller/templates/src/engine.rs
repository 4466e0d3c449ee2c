use gotmpl::parse::{Node, Parser};
use gotmpl::{MissingKey, Template, TemplateError, Value};

use crate::Variables;

/// More than any list in a gateway is long; `{{ range 1000000000 }}` ends here.
const MAX_ROUNDS: u64 = 10_000;

/// Output of the engine for an optional field that is not set, and that of Go.
const UNSET: [&str; 2] = ["<no value>", "<nil>"];

/// Renders single texts as Go's text/template would.
pub(crate) struct Engine {
    data: Value,
}

impl Engine {
    pub(crate) fn new(variables: &Variables) -> Self {
        Self { data: variables.data() }
    }

    pub(crate) fn render(&self, text: &str) -> Result<String, TemplateError> {
        if !text.contains("{{") {
            return Ok(text.to_owned());
        }
        let template = Template::new("")
            .missing_key(MissingKey::Error)
            .max_range_iters(MAX_ROUNDS)
            .func("index", index)
            .parse(text)?;
        closed(text)?;
        Ok(template.execute_to_string(&self.data)?.replace(UNSET[0], UNSET[1]))
    }
}

/// Go refuses an `{{end}}` too many or too few; gotmpl cuts the text off, or takes the rest for the block.
fn closed(text: &str) -> Result<(), TemplateError> {
    if reaches_end(text) && !reaches_end(&format!("{text} {{{{end}}}}")) {
        return Ok(());
    }
    let message = "an {{end}} is missing, or there is one too many".to_owned();
    Err(TemplateError::Parse { name: None, line: 1, col: text.chars().count(), message })
}

/// True if an addition to the text would stand outside of every block.
fn reaches_end(text: &str) -> bool {
    const AFTER: &str = "after";
    let parsed = Parser::new(&format!("{text} {AFTER}"), "{{", "}}").and_then(Parser::parse);
    parsed.is_ok_and(|(list, _)| {
        matches!(list.nodes.last(), Some(Node::Text(last)) if last.text.ends_with(AFTER))
    })
}

/// Formats a number with a fraction as a text.
pub(crate) fn plain(number: f64) -> Result<String, TemplateError> {
    gotmpl::execute("{{ printf `%g` . }}", &Value::Float(number))
}

/// Go's `index`: what a map of texts does not have is the empty text.
fn index(arguments: &[Value]) -> Result<Value, TemplateError> {
    let Some((of, keys)) = arguments.split_first() else {
        return Err(TemplateError::Exec("wrong number of args for index: want at least 1".into()));
    };
    let element = |of: Value, key: &Value| {
        let found = of.index(key)?;
        Ok(if matches!(found, Value::Nil) { Value::String("".into()) } else { found })
    };
    keys.iter().try_fold(of.clone(), element)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn render(text: &str) -> Result<String, TemplateError> {
        let data = gotmpl::tmap! { "Name" => "milan", "Unset" => Value::Nil };
        Engine { data }.render(text)
    }

    #[test]
    fn loops_end() {
        assert_eq!(render("{{ range 3 }}{{ . }}{{ end }}").unwrap(), "012");
        let endless = render("{{ range 1000000000 }}{{ range 1000000000 }}{{ end }}{{ end }}");
        assert!(matches!(endless, Err(TemplateError::RangeIterLimit)), "{endless:?}");
    }

    #[test]
    fn blocks_have_their_ends() {
        for text in [
            "a{{ if .Name }}b",
            "a{{ end }}b",
            "a{{ else }}b",
            "{{ if .Name }}a{{ else }}b",
            "{{ if .Name }}a{{ else if .Name }}b{{ else }}c",
            "{{ if .Name }}a{{ end }}b{{ end }}c",
            "{{ if .Name }}a{{ else }}b{{ else }}c{{ end }}",
            "{{ range 3 }}{{ with .Name }}a{{ end }}",
            "{{ define `x` }}a",
        ] {
            assert!(render(text).is_err(), "{text}");
        }
        assert_eq!(
            render("{{ if .Unset }}a{{ else if .Name }}b{{ else }}c{{ end -}} d").unwrap(),
            "bd"
        );
    }

    #[test]
    fn recursion_ends() {
        let text = r#"{{ define "x" }}{{ template "x" }}{{ end }}{{ template "x" }}"#;
        assert!(matches!(render(text), Err(TemplateError::RecursionLimit)));
    }

    #[test]
    fn unset_values_print_as_in_go() {
        assert_eq!(render("{{ .Unset }} {{ print .Unset }}").unwrap(), "<nil> <nil>");
    }

    proptest! {
        #[test]
        fn no_template_panics_the_engine(text in r#"[{}]{0,4}[-a-z .$|()"`0-9:=/*]{0,20}([{}]{0,4}[-A-Za-z .$]{0,20}){0,3}"#) {
            let _ = render(&text);
        }

        #[test]
        fn text_without_an_action_stays(text in "[^{]*") {
            prop_assert_eq!(render(&text).unwrap(), text);
        }
    }
}
