//! The checked-in code is what `ipam.proto` says, and nobody needs protoc to build it.

use std::path::Path;

/// Set to write the code instead of comparing it.
const UPDATE: &str = "UPDATE_GENERATED";

#[test]
fn checked_in_code_is_what_the_proto_file_generates() {
    let root = Path::new(".");
    let out = tempfile::tempdir().unwrap();
    let files = protox::compile([root.join("ipam.proto")], [root]).unwrap();
    tonic_prost_build::configure().out_dir(out.path()).compile_fds(files).unwrap();
    // A file without a package is generated under this name.
    let fresh = std::fs::read_to_string(out.path().join("_.rs")).unwrap();

    let checked_in = root.join("src/generated.rs");
    if std::env::var_os(UPDATE).is_some() {
        std::fs::write(&checked_in, &fresh).unwrap();
    }
    let stored = std::fs::read_to_string(&checked_in).unwrap_or_default();
    assert!(
        stored == fresh,
        "{} is out of date; run {UPDATE}=1 cargo test -p ipam-proto",
        checked_in.display()
    );
}
