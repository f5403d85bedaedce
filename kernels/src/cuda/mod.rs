//! CUDA: what a device with `kernels/cuda/*.cu` runs for an op, as data.
//!
//! [`plan`] turns an [`Op`](crate::Op) into [`Call`]s: launches with their arguments, products, copies. It needs no device, so the
//! same plan is run by the backend on a card, by the tests on an interpreter of the kernels' code, and counted by estimates.

mod arguments;
mod plan;

#[cfg(test)]
mod tests;

pub(crate) use plan::{Call, FAILURE_WORDS, Launch, Product, SCRATCH_BYTES, Target, check, plan};

/// The kernels' code for compute capability 8.0, which later cards take too: a module a file of `kernels/cuda`.
pub(crate) const MODULES: [(Module, &str); Module::COUNT] = [
    (Module::AdamW, include_str!("../../cuda/ptx/adamw.sm_80.ptx")),
    (Module::Attention, include_str!("../../cuda/ptx/attention.sm_80.ptx")),
    (Module::Codecs, include_str!("../../cuda/ptx/codecs.sm_80.ptx")),
    (Module::CrossEntropy, include_str!("../../cuda/ptx/cross_entropy.sm_80.ptx")),
    (Module::Elementwise, include_str!("../../cuda/ptx/elementwise.sm_80.ptx")),
    (Module::Embedding, include_str!("../../cuda/ptx/embedding.sm_80.ptx")),
    (Module::Gemm, include_str!("../../cuda/ptx/gemm.sm_80.ptx")),
    (Module::LayerNorm, include_str!("../../cuda/ptx/layer_norm.sm_80.ptx")),
    (Module::Reduce, include_str!("../../cuda/ptx/reduce.sm_80.ptx")),
];

/// A file of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Module {
    AdamW,
    Attention,
    Codecs,
    CrossEntropy,
    Elementwise,
    Embedding,
    Gemm,
    LayerNorm,
    Reduce,
}

impl Module {
    pub(crate) const COUNT: usize = 9;
}
