//! The kernels' arguments: each struct of `kernels/cuda/*.cu`, field for field in C's layout, padding spelled out.
//!
//! That both sides agree is held by size when a kernel is looked up, and by every test that runs one.

use bytemuck::{Pod, Zeroable};

use crate::{DType, Slice, op};

/// A device address; 0 is null.
pub(super) type Address = u64;

/// Declares argument structs; all are plain data.
macro_rules! arguments {
    ($($name:ident { $($field:ident: $type:ty),* $(,)? })*) => {$(
        #[repr(C)]
        #[derive(Clone, Copy, Default, Pod, Zeroable)]
        pub(super) struct $name { $(pub(super) $field: $type),* }
    )*};
}

arguments! {
    Floats { data: Address, dtype: u32, unused: u32 }
    Failing { failure: Address, stop: Address, submission: u32, unused: u32 }
    Dropout { seed: u64, site: u32, step: u32, threshold: u32, keep: f32 }

    Fill { out: Floats, value: f32, unused: u32, count: u64 }
    FillWords { out: Address, count: u64, value: u32, unused: u32 }
    Cast { input: Floats, out: Floats, count: u64 }
    Add { input: Floats, out: Floats, count: u64 }
    Drop { data: Floats, dropout: Dropout, count: u64 }
    Gelu { input: Floats, out: Floats, count: u64, erf: u32, unused: u32 }
    GeluBackward { input: Floats, gradient: Floats, count: u64, erf: u32, unused: u32 }

    Int8Encode { input: Floats, out: Address, count: u64, group: u32, unused: u32 }
    Int8EncodeStochastic {
        input: Floats, out: Address, count: u64, group: u32, unused: u32, seed: u64, site: u32, step: u32,
    }
    Int8Decode { input: Address, out: Floats, count: u64, group: u32, unused: u32 }
    Bits { input: Address, out: Address, count: u64 }

    Gemm {
        a: Floats, b: Floats, out: Floats, bias: Address, m: u32, n: u32, k: u32,
        a_transposed: u32, b_transposed: u32, accumulate: u32,
    }

    LayerNorm {
        input: Floats, residual: Floats, sum_out: Floats, dropout: Dropout, weight: Address, bias: Address, out: Floats,
        means: Address, rstds: Address, rows: u32, width: u32, epsilon: f32, unused: u32,
    }
    LayerNormApply {
        input: Floats, weight: Address, bias: Address, means: Address, rstds: Address, out: Floats, rows: u32, width: u32,
    }
    LayerNormBackward {
        dout: Floats, input: Floats, weight: Address, means: Address, rstds: Address, dinput: Floats,
        accumulate: u32, unused: u32, ddelta: Floats, dropout: Dropout, workspace: Address, rows: u32, width: u32,
    }
    BiasBackward { dout: Floats, workspace: Address, rows: u32, width: u32 }
    AddPartials { partials: Address, out: Address, blocks: u32, stride: u32, width: u32, unused: u32 }

    Attention {
        qkv: Floats, out: Floats, lse: Address, context: u32, heads: u32, head_size: u32, scale: f32, dropout: Dropout,
    }
    AttentionBackward {
        dout: Floats, qkv: Floats, out: Floats, dqkv: Floats, lse: Address, workspace: Address,
        context: u32, heads: u32, head_size: u32, scale: f32, dropout: Dropout,
    }
    Embedding {
        tokens: Address, wte: Floats, wpe: Floats, out: Floats, context: u32, width: u32, count: u64,
        vocabulary: u32, unused: u32, dropout: Dropout, failing: Failing,
    }
    EmbeddingBackwardTokens {
        tokens: Address, dout: Floats, dwte: Address, rows: u32, width: u32, vocabulary: u32, unused: u32,
        dropout: Dropout, failing: Failing,
    }
    EmbeddingBackwardPositions {
        dout: Floats, dwpe: Address, batch: u32, unused: u32, sequence: u64, dropout: Dropout,
    }
    CrossEntropy {
        logits: Floats, targets: Address, losses: Address, vocabulary: u32, with_gradient: u32, gradient_scale: f32,
        unused: u32, loss_scale: Address, failing: Failing,
    }

    Partials { input: Floats, count: u64, partials: Address }
    UnscalePartials { gradients: Address, count: u64, scale: Address, found_inf: Address, partials: Address }
    SumFinish { partials: Address, out: Address, count: u32, scale: f32, accumulate: u32, unused: u32 }
    ClipCoefficient {
        sum_squares: Address, count: u64, norm: Address, coefficient: Address, max_norm: f32, unused: u32,
    }
    ScalerUpdate {
        scale: Address, counters: Address, found_inf: Address, stop: Address, growth: f32, backoff: f32, floor: f32,
        interval: u32, hysteresis: u32, unused: u32,
    }
    MaxDifferencePartials { input: Floats, other: Floats, count: u64, partials: Address }
    MaxDifferenceFinish { partials: Address, out: Address, count: u32, unused: u32 }
    ChecksumPartials { bytes: Address, count: u64, partials: Address }
    ChecksumFinish { partials: Address, out: Address, length: u64, count: u32, unused: u32 }

    AdamW {
        parameters: Address, gradients: Address, first_moment: Address, second_moment: Address, count: u64,
        gradient_scale: Address, found_inf: Address, applied: Address, stop: Address,
        learning_rate: f32, beta1: f32, beta2: f32, epsilon: f32, weight_decay: f32, unused: u32, step: u64,
    }
}

impl Floats {
    pub(super) fn new(slice: &Slice, base: Address) -> Self {
        let dtype = match slice.dtype() {
            DType::F16 => 1,
            DType::BF16 => 2,
            _ => 0,
        };
        Floats { data: base + slice.range().start as u64, dtype, unused: 0 }
    }
}

impl Dropout {
    /// A probability of 0 drops nothing.
    pub(super) fn new(dropout: Option<&op::Dropout>) -> Self {
        let Some(dropout) = dropout else { return Self::default() };
        let &op::Dropout { seed, site, step, .. } = dropout;
        Dropout { seed, site, step, threshold: dropout.threshold(), keep: dropout.keep() }
    }
}
