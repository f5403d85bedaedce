//! The computations on the CPU, one file a family.
//!
//! Kernels take plain slices and cut their work by the shape alone, so that results are bitwise the same for any thread
//! count. Inner loops are compiled for several instruction sets, of which the best is chosen at run time.

mod adamw;
mod attention;
mod bits;
mod cast;
mod compare;
mod cross_entropy;
mod elementwise;
mod embedding;
pub(crate) mod execute;
pub(crate) mod float;
mod gemm;
mod int8;
mod layer_norm;
mod math;
mod reduce;
mod scaler;
pub(crate) mod threads;
