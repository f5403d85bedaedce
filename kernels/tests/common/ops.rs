//! One list of all ops, with and without each of their options.

use ebbtide_kernels::{
    DType, Op, Slice,
    op::{
        AdamW, Attention, AttentionBackward, AttentionShape, CrossEntropy, Dropout, Embedding,
        EmbeddingBackward, GeluKind, Gemm, LayerNorm, LayerNormApply, LayerNormBackward, Layout, Mode, Place,
        Residual, Scaled, ScalerCounter, ScalerRules, reduce_workspace,
    },
};

use super::{Bench, random};

/// Sizes that every op of [`OPS`] is made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) batch: usize,
    pub(crate) context: usize,
    pub(crate) heads: usize,
    pub(crate) head_size: usize,
    /// At least 3: tokens are below it.
    pub(crate) vocabulary: usize,
    pub(crate) probability: f32,
}

impl Sizes {
    pub(crate) fn rows(&self) -> usize {
        self.batch * self.context
    }
    pub(crate) fn width(&self) -> usize {
        self.heads * self.head_size
    }
    pub(crate) fn size(&self) -> usize {
        self.rows() * self.width()
    }
    pub(crate) fn attention(&self) -> AttentionShape {
        let &Sizes { batch, context, heads, head_size, .. } = self;
        AttentionShape { batch, context, heads, head_size, scale: 1.0 / (head_size as f32).sqrt() }
    }
    pub(crate) fn dropout(&self) -> Dropout {
        Dropout { probability: self.probability, seed: 0xFEED_5EED_0123, site: 4, step: 2 }
    }
}

pub(crate) const SMALL: Sizes =
    Sizes { batch: 2, context: 3, heads: 2, head_size: 5, vocabulary: 7, probability: 0.25 };

/// Gives an operand of so many elements.
pub(crate) type New<'a> = &'a mut dyn FnMut(usize, DType) -> Slice;

/// Every op, with and without each of its options.
pub(crate) const OPS: &[fn(Sizes, New<'_>) -> Op] = &[
    |s, new| Op::Fill { out: new(s.size(), DType::BF16), value: 0.3 },
    |s, new| Op::Copy { input: new(s.size(), DType::F16), out: new(s.size(), DType::F16) },
    |s, new| Op::Cast { input: new(s.size(), DType::F32), out: new(s.size(), DType::F16) },
    |s, new| Op::Cast { input: new(s.size(), DType::F16), out: new(s.size(), DType::BF16) },
    |s, new| Op::Cast { input: new(s.size(), DType::BF16), out: new(s.size(), DType::F32) },
    |s, new| Op::Cast { input: new(s.size(), DType::F32), out: new(s.size(), DType::F32) },
    |s, new| Op::MaxDifference {
        input: new(s.size(), DType::F32),
        other: new(s.size(), DType::F32),
        out: new(1, DType::F32),
    },
    |s, new| Op::Checksum { input: new(s.size(), DType::F32), out: new(2, DType::U32) },
    |s, new| Op::Add { input: new(s.size(), DType::F32), out: new(s.size(), DType::F32) },
    |s, new| Op::Dropout { data: new(s.size(), DType::F32), dropout: s.dropout() },
    |s, new| gemm(s, new, Layout::Normal, Layout::Normal, true, false),
    |s, new| gemm(s, new, Layout::Normal, Layout::Transposed, false, false),
    |s, new| gemm(s, new, Layout::Transposed, Layout::Normal, false, true),
    |s, new| gemm(s, new, Layout::Transposed, Layout::Transposed, true, true),
    |s, new| Op::BiasBackward {
        dout: new(s.size(), DType::F32),
        dbias: new(s.width(), DType::F32),
        workspace: new(reduce_workspace(s.rows(), s.width()), DType::F32),
        rows: s.rows(),
        width: s.width(),
    },
    |s, new| gelu(s, new, GeluKind::Tanh),
    |s, new| gelu(s, new, GeluKind::Erf),
    |s, new| gelu_backward(s, new, GeluKind::Tanh),
    |s, new| gelu_backward(s, new, GeluKind::Erf),
    |s, new| layer_norm(s, new, None),
    |s, new| layer_norm(s, new, Some(None)),
    |s, new| layer_norm(s, new, Some(Some(s.dropout()))),
    |s, new| {
        Op::LayerNormApply(LayerNormApply {
            input: new(s.size(), DType::F32),
            weight: new(s.width(), DType::F32),
            bias: new(s.width(), DType::F32),
            mean: new(s.rows(), DType::F32),
            rstd: new(s.rows(), DType::F32),
            out: new(s.size(), DType::F32),
            rows: s.rows(),
            width: s.width(),
        })
    },
    |s, new| layer_norm_backward(s, new, false, false),
    |s, new| layer_norm_backward(s, new, false, true),
    |s, new| layer_norm_backward(s, new, true, false),
    |s, new| layer_norm_backward(s, new, true, true),
    |s, new| attention(s, new, None),
    |s, new| attention(s, new, Some(s.dropout())),
    |s, new| attention_backward(s, new, None),
    |s, new| attention_backward(s, new, Some(s.dropout())),
    |s, new| embedding(s, new, None),
    |s, new| embedding(s, new, Some(s.dropout())),
    |s, new| embedding_backward(s, new, None),
    |s, new| embedding_backward(s, new, Some(s.dropout())),
    |s, new| cross_entropy(s, new, None),
    |s, new| cross_entropy(s, new, Some(0.7)),
    |s, new| Op::Sum { input: new(s.size(), DType::F32), out: new(1, DType::F32), scale: 0.3 },
    |s, new| Op::SumSquares { input: new(s.size(), DType::F32), out: new(1, DType::F32) },
    |s, new| Op::ClipCoefficient {
        sum_squares: new(s.rows(), DType::F32),
        norm: new(1, DType::F32),
        coefficient: new(1, DType::F32),
        max_norm: 0.5,
    },
    |s, new| adamw(s, new, false),
    |s, new| adamw(s, new, true),
    |s, new| {
        let Op::CrossEntropy(op) = cross_entropy(s, new, Some(0.7)) else { unreachable!() };
        Op::CrossEntropy(CrossEntropy { loss_scale: Some(new(1, DType::F32)), ..op })
    },
    |s, new| {
        let Op::AdamW(op) = adamw(s, new, true) else { unreachable!() };
        let counters = new(ScalerCounter::COUNT, DType::U32);
        Op::AdamW(AdamW { scaled: Some(Scaled { found_inf: new(1, DType::F32), counters }), ..op })
    },
    |s, new| Op::Unscale {
        gradients: new(s.size(), DType::F32),
        scale: new(1, DType::F32),
        found_inf: new(1, DType::F32),
        sum_squares: new(1, DType::F32),
    },
    |_, new| Op::ScalerUpdate {
        scale: new(1, DType::F32),
        counters: new(ScalerCounter::COUNT, DType::U32),
        found_inf: new(1, DType::F32),
        rules: ScalerRules { growth: 2.0, backoff: 0.5, interval: 2, floor: 0.1, hysteresis: 1 },
    },
];

pub(crate) fn gemm(
    s: Sizes,
    new: New<'_>,
    a_layout: Layout,
    b_layout: Layout,
    bias: bool,
    accumulate: bool,
) -> Op {
    let (m, n, k) = (s.rows(), s.width(), s.vocabulary);
    Op::Gemm(Gemm {
        a: new(m * k, DType::F32),
        a_layout,
        b: new(k * n, DType::F32),
        b_layout,
        bias: bias.then(|| new(n, DType::F32)),
        out: new(m * n, DType::F32),
        accumulate,
        m,
        n,
        k,
    })
}

pub(crate) fn gelu(s: Sizes, new: New<'_>, kind: GeluKind) -> Op {
    Op::Gelu { input: new(s.size(), DType::F32), out: new(s.size(), DType::F32), kind }
}

pub(crate) fn gelu_backward(s: Sizes, new: New<'_>, kind: GeluKind) -> Op {
    Op::GeluBackward { input: new(s.size(), DType::F32), gradient: new(s.size(), DType::F32), kind }
}

pub(crate) fn layer_norm(s: Sizes, new: New<'_>, residual: Option<Option<Dropout>>) -> Op {
    Op::LayerNorm(LayerNorm {
        input: new(s.size(), DType::F32),
        residual: residual.map(|dropout| Residual {
            input: new(s.size(), DType::F32),
            out: new(s.size(), DType::F32),
            dropout,
        }),
        weight: new(s.width(), DType::F32),
        bias: new(s.width(), DType::F32),
        out: new(s.size(), DType::F32),
        mean: new(s.rows(), DType::F32),
        rstd: new(s.rows(), DType::F32),
        rows: s.rows(),
        width: s.width(),
        epsilon: 1e-5,
    })
}

pub(crate) fn layer_norm_backward(s: Sizes, new: New<'_>, accumulate: bool, ddelta: bool) -> Op {
    Op::LayerNormBackward(LayerNormBackward {
        dout: new(s.size(), DType::F32),
        input: new(s.size(), DType::F32),
        weight: new(s.width(), DType::F32),
        mean: new(s.rows(), DType::F32),
        rstd: new(s.rows(), DType::F32),
        dinput: new(s.size(), DType::F32),
        accumulate,
        ddelta: ddelta.then(|| (new(s.size(), DType::F32), s.dropout())),
        dweight: new(s.width(), DType::F32),
        dbias: new(s.width(), DType::F32),
        workspace: new(reduce_workspace(s.rows(), 2 * s.width()), DType::F32),
        rows: s.rows(),
        width: s.width(),
    })
}

pub(crate) fn attention(s: Sizes, new: New<'_>, dropout: Option<Dropout>) -> Op {
    Op::Attention(Attention {
        qkv: new(3 * s.size(), DType::F32),
        out: new(s.size(), DType::F32),
        lse: new(s.attention().rows(), DType::F32),
        shape: s.attention(),
        dropout,
    })
}

pub(crate) fn attention_backward(s: Sizes, new: New<'_>, dropout: Option<Dropout>) -> Op {
    Op::AttentionBackward(AttentionBackward {
        dout: new(s.size(), DType::F32),
        qkv: new(3 * s.size(), DType::F32),
        out: new(s.size(), DType::F32),
        lse: new(s.attention().rows(), DType::F32),
        dqkv: new(3 * s.size(), DType::F32),
        workspace: new(s.attention().rows(), DType::F32),
        shape: s.attention(),
        dropout,
    })
}

pub(crate) fn embedding(s: Sizes, new: New<'_>, dropout: Option<Dropout>) -> Op {
    Op::Embedding(Embedding {
        tokens: new(s.rows(), DType::U32),
        wte: new(s.vocabulary * s.width(), DType::F32),
        wpe: new(s.context * s.width(), DType::F32),
        out: new(s.size(), DType::F32),
        batch: s.batch,
        context: s.context,
        width: s.width(),
        vocabulary: s.vocabulary,
        dropout,
    })
}

pub(crate) fn embedding_backward(s: Sizes, new: New<'_>, dropout: Option<Dropout>) -> Op {
    Op::EmbeddingBackward(EmbeddingBackward {
        tokens: new(s.rows(), DType::U32),
        dout: new(s.size(), DType::F32),
        dwte: new(s.vocabulary * s.width(), DType::F32),
        dwpe: new(s.context * s.width(), DType::F32),
        batch: s.batch,
        context: s.context,
        width: s.width(),
        vocabulary: s.vocabulary,
        dropout,
    })
}

pub(crate) fn cross_entropy(s: Sizes, new: New<'_>, gradient_scale: Option<f32>) -> Op {
    Op::CrossEntropy(CrossEntropy {
        logits: new(s.rows() * s.vocabulary, DType::F32),
        targets: new(s.rows(), DType::I32),
        losses: new(s.rows(), DType::F32),
        rows: s.rows(),
        vocabulary: s.vocabulary,
        gradient_scale,
        loss_scale: None,
    })
}

pub(crate) fn adamw(s: Sizes, new: New<'_>, scaled: bool) -> Op {
    Op::AdamW(AdamW {
        parameters: new(s.size(), DType::F32),
        gradients: new(s.size(), DType::F32),
        first_moment: new(s.size(), DType::F32),
        second_moment: new(s.size(), DType::F32),
        gradient_scale: scaled.then(|| new(1, DType::F32)),
        scaled: None,
        learning_rate: 0.1,
        beta1: 0.9,
        beta2: 0.99,
        epsilon: 1e-8,
        weight_decay: 0.1,
        step: 3,
    })
}

/// The device operands of an op: name, slice, mode.
pub(crate) fn operands(op: &Op) -> Vec<(&'static str, Slice, Mode)> {
    let device = |place: Place<'_>| match place {
        Place::Device(slice) => slice.clone(),
        Place::Host(_) | Place::File(_) => unreachable!("no op of the list has operands off the device"),
    };
    op.operands().iter().map(|operand| (operand.name, device(operand.place), operand.mode)).collect()
}

/// Writes what the op may read: for each operand numbers of its own.
pub(crate) fn write_inputs(bench: &Bench, op: &Op, seed: u64) {
    for ((name, slice, mode), seed) in operands(op).into_iter().zip(seed..) {
        if mode == Mode::Write {
            continue;
        }
        let numbers = random(seed, slice.len());
        let values = match slice.dtype() {
            DType::U32 => bench.up(&(0..slice.len() as u32).map(|i| i * i % 3).collect::<Vec<_>>()),
            // Every third target is ignored.
            DType::I32 => {
                bench.up(&(0..slice.len() as i32).map(|i| [2, -100, 1][i as usize % 3]).collect::<Vec<_>>())
            }
            _ if matches!(name, "second_moment" | "sum_squares") => {
                bench.up(&numbers.iter().map(|x| x.abs()).collect::<Vec<_>>())
            }
            DType::F32 => bench.up(&numbers),
            dtype => {
                let halves = bench.alloc(slice.len(), dtype);
                bench.run(Op::Cast { input: bench.up(&numbers), out: halves.clone() });
                halves
            }
        };
        bench.run(Op::Copy { input: values, out: slice });
    }
}
