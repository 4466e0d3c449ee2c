//! Takes weft's own templates from the chart. An `include_str!` of what lies outside of the package would
//! have Cargo build all again wherever the project is cloned anew.

use std::path::Path;
use std::{env, fs, io};

const CHART: &str = "../../deploy/chart/gateway-templates";

fn main() -> io::Result<()> {
    let out = env::var("OUT_DIR").expect("Cargo sets OUT_DIR");
    for name in ["wireguard-server.yaml", "wireguard-client.yaml"] {
        let from = Path::new(CHART).join(name);
        println!("cargo::rerun-if-changed={}", from.display());
        fs::write(Path::new(&out).join(name), fs::read(from)?)?;
    }
    Ok(())
}
