/// Position of the walk: in the template, for messages, and in the rendered value.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// Path in the template object, such as `spec.template.spec.service.spec.ports[0].?nodePort`.
    pub(crate) field: String,
    /// JSON pointer (RFC 6901) into the rendered value, such as
    /// `/spec/service/spec/ports/0/nodePort`.
    pub(crate) pointer: String,
}

impl Place {
    pub(crate) fn root() -> Self {
        Self { field: "spec.template".to_owned(), pointer: String::new() }
    }

    pub(crate) fn key(&self, key: &str) -> Self {
        self.renamed(key, key)
    }

    /// The field `key` of the template, which is to become `name`.
    pub(crate) fn renamed(&self, key: &str, name: &str) -> Self {
        let name = name.replace('~', "~0").replace('/', "~1");
        Self { field: format!("{}.{key}", self.field), pointer: format!("{}/{name}", self.pointer) }
    }

    pub(crate) fn item(&self, index: usize) -> Self {
        Self {
            field: format!("{}[{index}]", self.field),
            pointer: format!("{}/{index}", self.pointer),
        }
    }
}
