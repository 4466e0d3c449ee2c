//! Links the gateway so that little of its file has to be in memory.

fn main() {
    // Packed, the relocations of a position-independent program take 20 KB instead of a megabyte,
    // all of which the loader reads. Needs glibc 2.36 (Debian 12).
    println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    println!("cargo::rerun-if-changed=build.rs");
}
