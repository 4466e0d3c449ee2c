//! What whole clusters do, with the real programs, on the real kernel.
//!
//! Every test builds its own machines (see `weft_tests::Host`), so tests can run side by side.

mod scene;

mod address;
mod changes;
mod demo;
mod down;
mod families;
mod firewall;
mod footprint;
mod leaks;
mod liqo_probe;
mod moving;
mod mtu;
mod peering;
mod refused;
mod restart;
mod roaming;
mod wireguard_go;
