//! The library's name, by which the dynamic loader answers whoever asks for CUDA's once this one is loaded.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcublasLt.so");
}
