//! The compiler on plain objects, in a world of its own.

mod families;
mod faults;
mod gateway_records;
mod heartbeats;
mod node_paths;
mod nodes;
mod peerings;
mod placed;
mod records;
mod refused;
mod world;
