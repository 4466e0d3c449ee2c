//! Tests of whole clusters, with the real programs, on the real kernel.
//!
//! Every test builds its own machines (see `weft_tests::Host`), so tests can run side by side.

mod chance;
mod kernel;
mod scene;

mod address;
mod bad_manifests;
mod changes;
mod clear_text;
mod cut;
mod demo;
mod departed;
mod down;
mod examples;
mod families;
mod firewall;
mod floods;
mod footprint;
mod healing;
mod idle;
mod interop;
mod killed;
mod leaks;
mod lifecycle;
mod limits;
mod liqo_probe;
mod moving;
mod mtu;
mod node_paths;
mod one_host_goes;
mod other_rules;
mod path_mtu;
mod peering;
mod refused;
mod roaming;
mod rotation;
mod same_node;
mod sources;
mod truth;
mod versions;
