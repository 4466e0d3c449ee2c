/// Fault of a template, and its place. The chain of sources describes the fault.
#[derive(Debug, thiserror::Error)]
#[error("{field}")]
pub struct RenderError {
    /// Path in the template object, such as
    /// `spec.template.spec.deployment.spec.template.spec.containers[0].args[3]`.
    pub field: String,
    #[source]
    pub problem: Problem,
}

#[derive(Debug, thiserror::Error)]
pub enum Problem {
    #[error("missing; expected {expected}")]
    Missing { expected: &'static str },
    #[error("found {found}; expected {expected}")]
    Kind { found: &'static str, expected: &'static str },
    #[error(
        "found {text:?} with the unknown name {name}; expected .Name, .Namespace, .GatewayUID, \
         .ClusterID, .SecretName, or a field of the gateway's .Spec with a capital letter, such as \
         .Spec.Endpoint.Port"
    )]
    UnknownName { text: String, name: String },
    #[error("found {text:?}; expected a template as Go's text/template takes it")]
    Text {
        text: String,
        #[source]
        cause: Box<gotmpl::TemplateError>,
    },
    #[error("expected what a {kind} of Kubernetes has there")]
    Object {
        /// Deployment or Service.
        kind: &'static str,
        #[source]
        cause: serde_json::Error,
    },
}

impl Problem {
    pub(crate) fn at(self, field: impl Into<String>) -> RenderError {
        RenderError { field: field.into(), problem: self }
    }

    pub(crate) fn of_text(text: &str, cause: gotmpl::TemplateError) -> Self {
        let text = text.to_owned();
        if let gotmpl::TemplateError::MissingKey { key: name } = cause {
            return Self::UnknownName { text, name };
        }
        Self::Text { text, cause: Box::new(cause) }
    }
}
