//! Ebbtide trains models larger than the device: saved activations are kept, recomputed or offloaded as a policy says,
//! within one memory budget, with the same bits as if they had never left.
//!
//! This package is the facade over the crates below, and the command line `ebbtide`.
#![forbid(unsafe_code)]

pub mod account;
pub mod bench;
pub mod config;
pub mod pack;
pub mod tokenizer;

pub use ebbtide_engine as engine;
pub use ebbtide_kernels as kernels;
pub use ebbtide_loader as loader;
pub use ebbtide_offload as offload;
