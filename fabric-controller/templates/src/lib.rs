//! Rendering of a WgGatewayServerTemplate or WgGatewayClientTemplate by the controller into the
//! Deployment and the Service of one gateway. No I/O.
//!
//! Every text of `spec.template` is a Go template over [`Variables`]; [`render`] turns the whole
//! into a value by the rules of Liqo's controller, so that customised templates go on working:
//!
//! * A result that is a decimal number becomes an integer, whether or not the text had an action
//!   in it. Not so in the metadata, nor anywhere below a map with a key `labels` or `annotations`:
//!   there, numbers and booleans become texts.
//! * A key that starts with `?` is optional. The first action of its text without a space inside
//!   decides: if that is empty, or if the result is empty or 0, the key is left out; otherwise it
//!   loses its `?`. A text without such an action keeps the key as it is.
//! * Keys are never rendered. What is no text stays as it is.
//! * The names in templates are those of Liqo's Go types: `.Spec.Endpoint.Port`. A field that is not
//!   set is empty, 0, or `<nil>` for `NodePort`, `LoadBalancerIP` and a client's `Protocol`. A name
//!   that does not exist is an error.
//!
//! [`Rendered`] is what Kubernetes gets. A number where Kubernetes has a text (a label in a selector,
//! the value of an environment variable) becomes a text again. Liqo's are refused by the API server,
//! so that no gateway can be named `42` there.

mod engine;
mod error;
mod place;
mod rendered;
mod variables;
mod walk;

pub use error::{Problem, RenderError};
pub use rendered::Rendered;
pub use variables::{GatewaySpec, Variables};
pub use walk::render;

/// weft's own WgGatewayServerTemplate, as YAML.
pub const WIREGUARD_SERVER: &str = include_str!(concat!(env!("OUT_DIR"), "/wireguard-server.yaml"));
/// weft's own WgGatewayClientTemplate, as YAML.
pub const WIREGUARD_CLIENT: &str = include_str!(concat!(env!("OUT_DIR"), "/wireguard-client.yaml"));
