//! Every computation, as data.
//!
//! An [`Op`] is one submission to a stream: which computation, on which slices, with which constants. What it reads
//! and writes ([`Op::operands`]), what it costs ([`Op::flops`], [`Op::bytes`]) and what it is called ([`Op::name`])
//! follow from the value alone, so the order layer, the planner and the reports need to know nothing else. A backend is
//! a `match` over `Op`: the compiler lists what it lacks.
//!
//! Conventions: matrices are row-major and contiguous; "rows" is batch · context; an operand said to be *updated* is
//! read and written in place, and one said to *accumulate* has the result added to it. Distinct operands never overlap
//! unless both are only read; [`Op::check`] holds every operand's length and dtype against the op's shape.

use std::{fmt, sync::Arc};

use crate::{DType, Error, FileSlice, HostSlice, Result, Slice};

/// Dropout from a counter: which elements survive is a pure function of the key and the element's index, so nothing is
/// stored for backward and a recomputed forward draws the same mask.
///
/// Element `i` is dropped if word `i % 4` of `philox4x32_10(counter = [i / 4 low, i / 4 high, site, step], key = seed)`,
/// read as a fraction of 2^32, is below `probability`; survivors are multiplied by `1 / (1 - probability)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Share of elements that become zero, in `[0, 1)`.
    pub probability: f32,
    /// The run's seed: the generator's key.
    pub seed: u64,
    /// Which dropout of the model this is; unique within a model.
    pub site: u32,
    /// Which forward pass this is (step and micro-step counted together).
    pub step: u32,
}

/// The approximation of GELU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GeluKind {
    /// `0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))`: GPT-2's.
    Tanh,
    /// `0.5 x (1 + erf(x / √2))`: the exact form.
    Erf,
}

/// How a code is chosen between its two neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// The nearest.
    Nearest,
    /// The upper one with the probability of the distance to the lower: right in the mean. The draw of element `i` is word
    /// `i % 4` of `philox4x32_10(counter = [i / 4 low, i / 4 high, site, step], key = seed)`, apart from dropout's by its key.
    Stochastic {
        /// The generator's key.
        seed: u64,
        /// Which tensor.
        site: u32,
        /// Which forward pass.
        step: u32,
    },
}

/// Bytes of `len` elements in int8 with one f32 scale a `group`: see [`Op::Int8Encode`].
pub const fn int8_bytes(len: usize, group: usize) -> usize {
    // A group of 0 is refused by the op.
    4 * len.div_ceil(if group == 0 { 1 } else { group }) + len
}

/// How a matrix operand of [`Gemm`] lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// As the product reads it.
    Normal,
    /// Transposed: an `m × k` operand is stored `k × m`.
    Transposed,
}

/// `out = a · b (+ bias) (+ out)`, with `a: m × k`, `b: k × n`, `out: m × n`.
#[derive(Clone, Debug)]
pub struct Gemm {
    /// The left operand, `m × k`, or `k × m` if transposed.
    pub a: Slice,
    /// How `a` is stored.
    pub a_layout: Layout,
    /// The right operand, `k × n`, or `n × k` if transposed.
    pub b: Slice,
    /// How `b` is stored.
    pub b_layout: Layout,
    /// `n` values added to each row.
    pub bias: Option<Slice>,
    /// The product, `m × n`.
    pub out: Slice,
    /// Add to `out` rather than overwrite it.
    pub accumulate: bool,
    /// Rows of the product.
    pub m: usize,
    /// Columns of the product.
    pub n: usize,
    /// Length of the sums.
    pub k: usize,
}

/// How a loss scale moves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScalerRules {
    /// Multiplies the scale after `interval` steps without overflow; not where the result would be infinite.
    pub growth: f32,
    /// Multiplies it after an overflow.
    pub backoff: f32,
    /// Steps without overflow until it grows.
    pub interval: u32,
    /// It never falls below.
    pub floor: f32,
    /// Overflows since it last grew that it takes before it falls: 1 to fall at once.
    pub hysteresis: u32,
}

/// The scaler's counters, by their index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum ScalerCounter {
    /// Steps without overflow since the scale last moved.
    Growth,
    /// Overflows since it last grew.
    Overflows,
    /// Overflows in a row that found the scale at its floor.
    AtFloor,
    /// Steps whose update was applied.
    Applied,
    /// Steps that were skipped.
    Skipped,
}

impl ScalerCounter {
    /// How many there are.
    pub const COUNT: usize = 5;
}

/// What an update under a loss scale hangs on, read on the device.
#[derive(Clone, Debug)]
pub struct Scaled {
    /// One f32: not 0 if the step is to be skipped.
    pub found_inf: Slice,
    /// The scaler's counters, of which [`ScalerCounter::Applied`] is the number of the update less one.
    pub counters: Slice,
}

/// The residual stream that a [`LayerNorm`] adds to before it normalises.
#[derive(Clone, Debug)]
pub struct Residual {
    /// The stream so far, `rows × width`.
    pub input: Slice,
    /// `input + dropout(delta)`, `rows × width`.
    pub out: Slice,
    /// Dropout of the delta.
    pub dropout: Option<Dropout>,
}

/// Layer normalisation over the last axis, fused with the residual addition before it.
///
/// With a residual: `residual.out = residual.input + dropout(input)`, and `residual.out` is normalised; without, `input`
/// is. `out = (x - mean) · rstd · weight + bias`, `rstd = 1 / √(variance + epsilon)`, biased variance.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    /// `rows × width`: what is normalised, or the delta to the residual stream.
    pub input: Slice,
    /// The residual stream.
    pub residual: Option<Residual>,
    /// Gain, `width`.
    pub weight: Slice,
    /// Shift, `width`.
    pub bias: Slice,
    /// The result, `rows × width`.
    pub out: Slice,
    /// Mean of each row, f32.
    pub mean: Slice,
    /// Reciprocal standard deviation of each row, f32.
    pub rstd: Slice,
    /// Rows.
    pub rows: usize,
    /// Width of a row.
    pub width: usize,
    /// Added to the variance.
    pub epsilon: f32,
}

/// `out = (input - mean) · rstd · weight + bias` from saved statistics: a layer norm's output made again for backward,
/// bitwise as [`LayerNorm`] made it.
#[derive(Clone, Debug)]
pub struct LayerNormApply {
    /// What was normalised, `rows × width`.
    pub input: Slice,
    /// Gain, `width`.
    pub weight: Slice,
    /// Shift, `width`.
    pub bias: Slice,
    /// Mean of each row, f32.
    pub mean: Slice,
    /// Reciprocal standard deviation of each row, f32.
    pub rstd: Slice,
    /// The result, `rows × width`.
    pub out: Slice,
    /// Rows.
    pub rows: usize,
    /// Width of a row.
    pub width: usize,
}

/// Backward of [`LayerNorm`].
#[derive(Clone, Debug)]
pub struct LayerNormBackward {
    /// Gradient of `out`, `rows × width`.
    pub dout: Slice,
    /// What was normalised, `rows × width`.
    pub input: Slice,
    /// Gain, `width`.
    pub weight: Slice,
    /// Mean of each row.
    pub mean: Slice,
    /// Reciprocal standard deviation of each row.
    pub rstd: Slice,
    /// Gradient of what was normalised, `rows × width`.
    pub dinput: Slice,
    /// `dinput` holds the gradient that reaches the residual stream from above: add to it rather than overwrite it.
    pub accumulate: bool,
    /// Where the delta had dropout: its gradient, `dropout(dinput)` after the addition. Without dropout the delta's
    /// gradient is `dinput` itself.
    pub ddelta: Option<(Slice, Dropout)>,
    /// Gradient of the gain, accumulates, `width`.
    pub dweight: Slice,
    /// Gradient of the shift, accumulates, `width`.
    pub dbias: Slice,
    /// Scratch of [`reduce_workspace`]`(rows, 2 * width)` f32.
    pub workspace: Slice,
    /// Rows.
    pub rows: usize,
    /// Width of a row.
    pub width: usize,
}

/// Causal self-attention over packed projections: `out = dropout(softmax(scale · q kᵀ)) v`, one head at a time.
///
/// No `context × context` matrix is stored: only the output and each row's logsumexp are.
#[derive(Clone, Debug)]
pub struct Attention {
    /// Queries, keys and values side by side: `batch × context × (3 · heads · head_size)`.
    pub qkv: Slice,
    /// `batch × context × (heads · head_size)`.
    pub out: Slice,
    /// Logsumexp of each row of scaled scores, f32, `batch × heads × context`.
    pub lse: Slice,
    /// The sizes.
    pub shape: AttentionShape,
    /// Dropout of the probabilities; element index `((batch · heads + head) · context + query) · context + key`.
    pub dropout: Option<Dropout>,
}

/// Sizes of an attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Positions of a sequence.
    pub context: usize,
    /// Heads.
    pub heads: usize,
    /// Channels of a head.
    pub head_size: usize,
    /// Multiplies the scores; `1 / √head_size` as a rule.
    pub scale: f32,
}

/// Backward of [`Attention`]: probabilities are made again from `qkv` and `lse`.
#[derive(Clone, Debug)]
pub struct AttentionBackward {
    /// Gradient of `out`.
    pub dout: Slice,
    /// As in forward.
    pub qkv: Slice,
    /// Forward's output.
    pub out: Slice,
    /// Forward's logsumexp.
    pub lse: Slice,
    /// Gradient of `qkv`, overwritten.
    pub dqkv: Slice,
    /// Scratch, f32, `batch × heads × context`: row sums of `dout ∘ out`.
    pub workspace: Slice,
    /// The sizes.
    pub shape: AttentionShape,
    /// Forward's dropout.
    pub dropout: Option<Dropout>,
}

/// Token and position embedding: `out[b, t] = dropout(wte[tokens[b, t]] + wpe[t])`.
#[derive(Clone, Debug)]
pub struct Embedding {
    /// Token ids, u32, `batch × context`; an id at or above `vocabulary` fails the op.
    pub tokens: Slice,
    /// Token table, `vocabulary × width`.
    pub wte: Slice,
    /// Position table; the first `context × width` of it.
    pub wpe: Slice,
    /// `batch × context × width`.
    pub out: Slice,
    /// Sequences.
    pub batch: usize,
    /// Positions.
    pub context: usize,
    /// Channels.
    pub width: usize,
    /// Rows of the token table.
    pub vocabulary: usize,
    /// Dropout of the sum.
    pub dropout: Option<Dropout>,
}

/// Backward of [`Embedding`]; sums in token order, whatever the thread count.
#[derive(Clone, Debug)]
pub struct EmbeddingBackward {
    /// Token ids, u32, `batch × context`.
    pub tokens: Slice,
    /// Gradient of `out`.
    pub dout: Slice,
    /// Gradient of the token table, accumulates.
    pub dwte: Slice,
    /// Gradient of the first `context × width` of the position table, accumulates.
    pub dwpe: Slice,
    /// Sequences.
    pub batch: usize,
    /// Positions.
    pub context: usize,
    /// Channels.
    pub width: usize,
    /// Rows of the token table.
    pub vocabulary: usize,
    /// Forward's dropout.
    pub dropout: Option<Dropout>,
}

/// Softmax cross-entropy of `rows` rows of logits, and its gradient in place.
///
/// `losses[r] = logsumexp(logits[r]) - logits[r][targets[r]]`, or 0 where the target is negative (ignored). If
/// `gradient_scale` is given, `logits[r]` becomes `(softmax(logits[r]) - onehot) · gradient_scale`, or zeros where
/// ignored; otherwise the logits are left alone. A target at or above `vocabulary` fails the op.
#[derive(Clone, Debug)]
pub struct CrossEntropy {
    /// `rows × vocabulary`; becomes its own gradient.
    pub logits: Slice,
    /// i32, `rows`.
    pub targets: Slice,
    /// f32, `rows`.
    pub losses: Slice,
    /// Rows.
    pub rows: usize,
    /// Classes.
    pub vocabulary: usize,
    /// What a unit of loss weighs in the gradient.
    pub gradient_scale: Option<f32>,
    /// One f32 on the device that multiplies the gradient beside that: the loss scale.
    pub loss_scale: Option<Slice>,
}

/// Decoupled weight decay Adam (Loshchilov and Hutter, 2019), as `torch.optim.AdamW` computes it:
/// `p ← p (1 - lr · decay)`, `m ← m + (1 - β₁)(g - m)`, `v ← β₂ v + (1 - β₂) g²`,
/// `p ← p - lr / (1 - β₁ᵗ) · m / (√v / √(1 - β₂ᵗ) + ε)`.
#[derive(Clone, Debug)]
pub struct AdamW {
    /// Parameters, updated.
    pub parameters: Slice,
    /// Gradients.
    pub gradients: Slice,
    /// First moment, updated.
    pub first_moment: Slice,
    /// Second moment, updated.
    pub second_moment: Slice,
    /// One f32 on the device that multiplies the gradients (the clip coefficient).
    pub gradient_scale: Option<Slice>,
    /// lr.
    pub learning_rate: f32,
    /// β₁.
    pub beta1: f32,
    /// β₂.
    pub beta2: f32,
    /// ε.
    pub epsilon: f32,
    /// Weight decay.
    pub weight_decay: f32,
    /// t, from 1; by a scaler's count instead, where there is one.
    pub step: u64,
    /// Of an update under a loss scale: whether it is skipped, and its number.
    pub scaled: Option<Scaled>,
}

/// A computation of the user's own.
///
/// What it may touch is what the op lists: `inputs` are handed to it to read, `outputs` to write.
pub trait CustomOp: Send + Sync {
    /// Its name in reports and errors.
    fn name(&self) -> &str;
    /// Floating-point operations.
    fn flops(&self) -> u64 {
        0
    }
    /// Runs on the CPU. `inputs` and `outputs` are the bytes of the op's slices, in order; outputs hold what was there.
    ///
    /// # Errors
    /// A message, which becomes the op's error.
    fn run_cpu(&self, inputs: &[&[u8]], outputs: &mut [&mut [u8]]) -> std::result::Result<(), String>;
}

/// One computation; see the module's docs.
#[derive(Clone)]
pub enum Op {
    /// Every element of `out` becomes `value` (converted to its dtype).
    Fill {
        /// Overwritten.
        out: Slice,
        /// The value.
        value: f32,
    },
    /// Device to device, same dtype.
    Copy {
        /// From.
        input: Slice,
        /// To.
        out: Slice,
    },
    /// Between f32, f16 and bf16, rounding to nearest even.
    Cast {
        /// From.
        input: Slice,
        /// To.
        out: Slice,
    },
    /// To int8, symmetric, with one f32 scale a group of consecutive elements: the scales, then the codes.
    ///
    /// For every finite element of f32, `|x − x̂| ≤ scale / 2` with [`Rounding::Nearest`], exactly; at most `scale (1 + 2⁻¹⁶)` with
    /// stochastic rounding. A group of zeros comes back as zeros; an element that is not finite comes back as NaN, and does
    /// not touch the others of its group. What is decoded to 16 bits is rounded to them: half a unit of x̂'s last place more.
    Int8Encode {
        /// f32, f16 or bf16.
        input: Slice,
        /// u8, [`int8_bytes`] of them.
        out: Slice,
        /// Elements of a group: 64, 128 or 256.
        group: usize,
        /// How codes are chosen.
        rounding: Rounding,
    },
    /// From int8, as [`Op::Int8Encode`] wrote it.
    Int8Decode {
        /// u8, [`int8_bytes`] of them.
        input: Slice,
        /// f32, f16 or bf16.
        out: Slice,
        /// Elements of a group: 64, 128 or 256.
        group: usize,
    },
    /// Device to host.
    CopyOut {
        /// From.
        input: Slice,
        /// To.
        out: HostSlice,
    },
    /// Host to device.
    CopyIn {
        /// From.
        input: HostSlice,
        /// To.
        out: Slice,
    },
    /// Host memory to a file, past any device.
    WriteFile {
        /// From; as long as `file`.
        input: HostSlice,
        /// To.
        file: FileSlice,
    },
    /// A file to host memory.
    ReadFile {
        /// From.
        file: FileSlice,
        /// To; as long as `file`.
        out: HostSlice,
    },
    /// One bit an element: bit `i % 8` of byte `i / 8` says whether element `i` is not 0.
    BitsEncode {
        /// u8.
        input: Slice,
        /// u8, an eighth as many, rounded up.
        out: Slice,
    },
    /// From bits to elements that are 0 or 1.
    BitsDecode {
        /// u8, an eighth as many, rounded up.
        input: Slice,
        /// u8.
        out: Slice,
    },
    /// `out = max(out, max |input - other|)`; elements that are finite on neither side count as equal, those that are on one
    /// alone as infinitely far.
    MaxDifference {
        /// f32.
        input: Slice,
        /// f32.
        other: Slice,
        /// One f32, updated.
        out: Slice,
    },
    /// A 64-bit checksum of the bytes, low word first. Which one is the backend's affair: it is compared on the device that made it.
    Checksum {
        /// Any dtype.
        input: Slice,
        /// Two u32.
        out: Slice,
    },
    /// `out += input`.
    Add {
        /// Added.
        input: Slice,
        /// Updated.
        out: Slice,
    },
    /// `data = dropout(data)`; its own backward.
    Dropout {
        /// Updated.
        data: Slice,
        /// The mask's key.
        dropout: Dropout,
    },
    /// See [`Gemm`].
    Gemm(Gemm),
    /// `dbias += column sums of dout`: backward of a bias.
    BiasBackward {
        /// `rows × width`.
        dout: Slice,
        /// Accumulates, `width`.
        dbias: Slice,
        /// Scratch of [`reduce_workspace`]`(rows, width)` f32.
        workspace: Slice,
        /// Rows.
        rows: usize,
        /// Columns.
        width: usize,
    },
    /// `out = gelu(input)`.
    Gelu {
        /// Any shape.
        input: Slice,
        /// The same length.
        out: Slice,
        /// Which GELU.
        kind: GeluKind,
    },
    /// `gradient *= gelu'(input)`.
    GeluBackward {
        /// Forward's input.
        input: Slice,
        /// Gradient of the output; becomes that of the input.
        gradient: Slice,
        /// Which GELU.
        kind: GeluKind,
    },
    /// See [`LayerNorm`].
    LayerNorm(LayerNorm),
    /// See [`LayerNormApply`].
    LayerNormApply(LayerNormApply),
    /// See [`LayerNormBackward`].
    LayerNormBackward(LayerNormBackward),
    /// See [`Attention`].
    Attention(Attention),
    /// See [`AttentionBackward`].
    AttentionBackward(AttentionBackward),
    /// See [`Embedding`].
    Embedding(Embedding),
    /// See [`EmbeddingBackward`].
    EmbeddingBackward(EmbeddingBackward),
    /// See [`CrossEntropy`].
    CrossEntropy(CrossEntropy),
    /// `out += Σ input · scale`, summed in f64 over fixed chunks.
    Sum {
        /// f32.
        input: Slice,
        /// One f32, accumulates.
        out: Slice,
        /// Multiplies the sum.
        scale: f32,
    },
    /// `out = Σ input²`, summed in f64 over fixed chunks.
    SumSquares {
        /// f32.
        input: Slice,
        /// One f32, overwritten.
        out: Slice,
    },
    /// `norm = √Σ sum_squares`, `coefficient = min(1, max_norm / (norm + 1e-6))`, as `torch.nn.utils.clip_grad_norm_`.
    ClipCoefficient {
        /// f32 sums of squares, any number.
        sum_squares: Slice,
        /// One f32, overwritten.
        norm: Slice,
        /// One f32, overwritten.
        coefficient: Slice,
        /// The largest norm allowed; infinity to only measure.
        max_norm: f32,
    },
    /// Divides scaled gradients by their scale, in one pass: `gradients *= 1 / scale`, `sum_squares = Σ gradients²` after it, and
    /// `found_inf` becomes 1 if any element was not finite before or is not after.
    Unscale {
        /// f32, updated.
        gradients: Slice,
        /// One f32.
        scale: Slice,
        /// One f32, 0 or 1, updated.
        found_inf: Slice,
        /// One f32, overwritten.
        sum_squares: Slice,
    },
    /// The scale's own step, as `torch.amp.GradScaler.update` makes it, with a floor and hysteresis; `found_inf` becomes 0.
    ScalerUpdate {
        /// One f32, updated.
        scale: Slice,
        /// [`ScalerCounter::COUNT`] u32, updated.
        counters: Slice,
        /// One f32, 0 or 1, updated.
        found_inf: Slice,
        /// How the scale moves.
        rules: ScalerRules,
    },
    /// See [`AdamW`].
    AdamW(AdamW),
    /// See [`CustomOp`].
    Custom {
        /// The computation.
        custom: Arc<dyn CustomOp>,
        /// What it reads.
        inputs: Vec<Slice>,
        /// What it reads and writes.
        outputs: Vec<Slice>,
    },
}

/// Rows that one partial sum of a column reduction covers. Fixed, so that sums do not depend on the thread count.
pub const REDUCE_ROWS: usize = 64;

/// f32 elements of scratch that a reduction of `rows × width` over its rows needs.
pub const fn reduce_workspace(rows: usize, width: usize) -> usize {
    rows.div_ceil(REDUCE_ROWS) * width
}

/// What an op does to an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Read only.
    Read,
    /// Overwritten whole without being read.
    Write,
    /// Read and written.
    Update,
}

/// An operand's place.
#[derive(Clone, Copy, Debug)]
pub enum Place<'a> {
    /// On the device.
    Device(&'a Slice),
    /// In host memory.
    Host(&'a HostSlice),
    /// In a file.
    File(&'a FileSlice),
}

/// One operand of an op.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    /// The field's name.
    pub name: &'static str,
    /// Where it is.
    pub place: Place<'a>,
    /// What happens to it.
    pub mode: Mode,
    /// The length in elements that the op's shape asks for.
    pub expected_len: usize,
    /// The dtype that the op asks for, if it asks.
    pub expected_dtype: Option<DType>,
}

fn device<'a>(name: &'static str, slice: &'a Slice, mode: Mode, len: usize) -> Operand<'a> {
    Operand { name, place: Place::Device(slice), mode, expected_len: len, expected_dtype: Some(DType::F32) }
}

fn host<'a>(name: &'static str, slice: &'a HostSlice, mode: Mode, bytes: usize) -> Operand<'a> {
    Operand { name, place: Place::Host(slice), mode, expected_len: bytes, expected_dtype: None }
}

fn in_file(file: &FileSlice, mode: Mode) -> Operand<'_> {
    Operand { name: "file", place: Place::File(file), mode, expected_len: file.bytes(), expected_dtype: None }
}

impl<'a> Operand<'a> {
    fn dtype(self, dtype: DType) -> Self {
        Operand { expected_dtype: Some(dtype), ..self }
    }
    /// f32, f16 or bf16.
    fn float(self) -> Self {
        let Place::Device(slice) = self.place else { return self };
        match slice.dtype() {
            dtype @ (DType::F16 | DType::BF16) => self.dtype(dtype),
            _ => self.dtype(DType::F32),
        }
    }
    fn any_dtype(self) -> Self {
        Operand { expected_dtype: None, ..self }
    }
}

impl Op {
    /// The computation's name.
    pub fn name(&self) -> &str {
        match self {
            Op::Fill { .. } => "fill",
            Op::Copy { .. } => "copy",
            Op::Cast { .. } => "cast",
            Op::Int8Encode { .. } => "int8_encode",
            Op::Int8Decode { .. } => "int8_decode",
            Op::CopyOut { .. } => "copy_out",
            Op::CopyIn { .. } => "copy_in",
            Op::WriteFile { .. } => "write_file",
            Op::ReadFile { .. } => "read_file",
            Op::BitsEncode { .. } => "bits_encode",
            Op::BitsDecode { .. } => "bits_decode",
            Op::MaxDifference { .. } => "max_difference",
            Op::Checksum { .. } => "checksum",
            Op::Add { .. } => "add",
            Op::Dropout { .. } => "dropout",
            Op::Gemm(_) => "gemm",
            Op::BiasBackward { .. } => "bias_backward",
            Op::Gelu { .. } => "gelu",
            Op::GeluBackward { .. } => "gelu_backward",
            Op::LayerNorm(_) => "layer_norm",
            Op::LayerNormApply(_) => "layer_norm_apply",
            Op::LayerNormBackward(_) => "layer_norm_backward",
            Op::Attention(_) => "attention",
            Op::AttentionBackward(_) => "attention_backward",
            Op::Embedding(_) => "embedding",
            Op::EmbeddingBackward(_) => "embedding_backward",
            Op::CrossEntropy(_) => "cross_entropy",
            Op::Sum { .. } => "sum",
            Op::SumSquares { .. } => "sum_squares",
            Op::ClipCoefficient { .. } => "clip_coefficient",
            Op::Unscale { .. } => "unscale",
            Op::ScalerUpdate { .. } => "scaler_update",
            Op::AdamW(_) => "adamw",
            Op::Custom { custom, .. } => custom.name(),
        }
    }

    /// Whether the op moves bytes between device, host and disk rather than computes.
    pub fn is_transfer(&self) -> bool {
        matches!(self, Op::CopyOut { .. } | Op::CopyIn { .. } | Op::WriteFile { .. } | Op::ReadFile { .. })
    }

    /// Every slice the op touches, what it does to it, and what length and dtype it must have.
    pub fn operands(&self) -> Vec<Operand<'_>> {
        use Mode::{Read, Update, Write};
        match self {
            Op::Fill { out, .. } => vec![device("out", out, Write, out.len()).any_dtype()],
            Op::Copy { input, out } => vec![
                device("input", input, Read, out.len()).dtype(out.dtype()),
                device("out", out, Write, out.len()).any_dtype(),
            ],
            Op::Cast { input, out } => vec![
                device("input", input, Read, out.len()).any_dtype(),
                device("out", out, Write, out.len()).any_dtype(),
            ],
            Op::CopyOut { input, out } => vec![
                device("input", input, Read, input.len()).any_dtype(),
                host("out", out, Write, input.bytes()),
            ],
            Op::CopyIn { input, out } => vec![
                host("input", input, Read, out.bytes()),
                device("out", out, Write, out.len()).any_dtype(),
            ],
            Op::WriteFile { input, file } => {
                vec![host("input", input, Read, file.bytes()), in_file(file, Write)]
            }
            Op::ReadFile { file, out } => vec![in_file(file, Read), host("out", out, Write, file.bytes())],
            Op::BitsEncode { input, out } => vec![
                device("input", input, Read, input.len()).dtype(DType::U8),
                device("out", out, Write, input.len().div_ceil(8)).dtype(DType::U8),
            ],
            Op::BitsDecode { input, out } => vec![
                device("input", input, Read, out.len().div_ceil(8)).dtype(DType::U8),
                device("out", out, Write, out.len()).dtype(DType::U8),
            ],
            Op::MaxDifference { input, other, out } => vec![
                device("input", input, Read, input.len()).float(),
                device("other", other, Read, input.len()).float(),
                device("out", out, Update, 1),
            ],
            Op::Checksum { input, out } => vec![
                device("input", input, Read, input.len()).any_dtype(),
                device("out", out, Write, 2).dtype(DType::U32),
            ],
            Op::Add { input, out } => {
                vec![
                    device("input", input, Read, out.len()).float(),
                    device("out", out, Update, out.len()).float(),
                ]
            }
            Op::Dropout { data, .. } => vec![device("data", data, Update, data.len()).float()],
            Op::Gemm(op) => {
                let mut operands = vec![
                    device("a", &op.a, Read, op.m * op.k).float(),
                    device("b", &op.b, Read, op.k * op.n).float(),
                    device("out", &op.out, if op.accumulate { Update } else { Write }, op.m * op.n).float(),
                ];
                operands.extend(op.bias.iter().map(|bias| device("bias", bias, Read, op.n)));
                operands
            }
            Op::Int8Encode { input, out, group, .. } => vec![
                device("input", input, Read, input.len()).float(),
                device("out", out, Write, int8_bytes(input.len(), (*group).max(1))).dtype(DType::U8),
            ],
            Op::Int8Decode { input, out, group } => vec![
                device("input", input, Read, int8_bytes(out.len(), (*group).max(1))).dtype(DType::U8),
                device("out", out, Write, out.len()).float(),
            ],
            Op::BiasBackward { dout, dbias, workspace, rows, width } => vec![
                device("dout", dout, Read, rows * width).float(),
                device("dbias", dbias, Update, *width),
                device("workspace", workspace, Write, reduce_workspace(*rows, *width)),
            ],
            Op::Gelu { input, out, .. } => {
                vec![
                    device("input", input, Read, out.len()).float(),
                    device("out", out, Write, out.len()).float(),
                ]
            }
            Op::GeluBackward { input, gradient, .. } => vec![
                device("input", input, Read, gradient.len()).float(),
                device("gradient", gradient, Update, gradient.len()).float(),
            ],
            Op::LayerNorm(op) => {
                let size = op.rows * op.width;
                let mut operands = vec![
                    device("input", &op.input, Read, size).float(),
                    device("weight", &op.weight, Read, op.width),
                    device("bias", &op.bias, Read, op.width),
                    device("out", &op.out, Write, size).float(),
                    device("mean", &op.mean, Write, op.rows),
                    device("rstd", &op.rstd, Write, op.rows),
                ];
                if let Some(residual) = &op.residual {
                    operands.push(device("residual.input", &residual.input, Read, size).float());
                    operands.push(device("residual.out", &residual.out, Write, size).float());
                }
                operands
            }
            Op::LayerNormApply(op) => vec![
                device("input", &op.input, Read, op.rows * op.width).float(),
                device("weight", &op.weight, Read, op.width),
                device("bias", &op.bias, Read, op.width),
                device("mean", &op.mean, Read, op.rows),
                device("rstd", &op.rstd, Read, op.rows),
                device("out", &op.out, Write, op.rows * op.width).float(),
            ],
            Op::LayerNormBackward(op) => {
                let size = op.rows * op.width;
                let mut operands = vec![
                    device("dout", &op.dout, Read, size).float(),
                    device("input", &op.input, Read, size).float(),
                    device("weight", &op.weight, Read, op.width),
                    device("mean", &op.mean, Read, op.rows),
                    device("rstd", &op.rstd, Read, op.rows),
                    device("dinput", &op.dinput, if op.accumulate { Update } else { Write }, size).float(),
                    device("dweight", &op.dweight, Update, op.width),
                    device("dbias", &op.dbias, Update, op.width),
                    device("workspace", &op.workspace, Write, reduce_workspace(op.rows, 2 * op.width)),
                ];
                operands.extend(
                    op.ddelta.iter().map(|(ddelta, _)| device("ddelta", ddelta, Write, size).float()),
                );
                operands
            }
            Op::Attention(op) => {
                let s = &op.shape;
                vec![
                    device("qkv", &op.qkv, Read, 3 * s.channels()).float(),
                    device("out", &op.out, Write, s.channels()).float(),
                    device("lse", &op.lse, Write, s.rows()),
                ]
            }
            Op::AttentionBackward(op) => {
                let s = &op.shape;
                vec![
                    device("dout", &op.dout, Read, s.channels()).float(),
                    device("qkv", &op.qkv, Read, 3 * s.channels()).float(),
                    device("out", &op.out, Read, s.channels()).float(),
                    device("lse", &op.lse, Read, s.rows()),
                    device("dqkv", &op.dqkv, Write, 3 * s.channels()).float(),
                    device("workspace", &op.workspace, Write, s.rows()),
                ]
            }
            Op::Embedding(op) => {
                let rows = op.batch * op.context;
                vec![
                    device("tokens", &op.tokens, Read, rows).dtype(DType::U32),
                    device("wte", &op.wte, Read, op.vocabulary * op.width).float(),
                    device("wpe", &op.wpe, Read, op.context * op.width).float(),
                    device("out", &op.out, Write, rows * op.width).float(),
                ]
            }
            Op::EmbeddingBackward(op) => {
                let rows = op.batch * op.context;
                vec![
                    device("tokens", &op.tokens, Read, rows).dtype(DType::U32),
                    device("dout", &op.dout, Read, rows * op.width).float(),
                    device("dwte", &op.dwte, Update, op.vocabulary * op.width),
                    device("dwpe", &op.dwpe, Update, op.context * op.width),
                ]
            }
            Op::CrossEntropy(op) => {
                let mode = if op.gradient_scale.is_some() { Update } else { Read };
                let mut operands = vec![
                    device("logits", &op.logits, mode, op.rows * op.vocabulary).float(),
                    device("targets", &op.targets, Read, op.rows).dtype(DType::I32),
                    device("losses", &op.losses, Write, op.rows),
                ];
                operands.extend(op.loss_scale.iter().map(|scale| device("loss_scale", scale, Read, 1)));
                operands
            }
            Op::Unscale { gradients, scale, found_inf, sum_squares } => vec![
                device("gradients", gradients, Update, gradients.len()),
                device("scale", scale, Read, 1),
                device("found_inf", found_inf, Update, 1),
                device("sum_squares", sum_squares, Write, 1),
            ],
            Op::ScalerUpdate { scale, counters, found_inf, .. } => vec![
                device("scale", scale, Update, 1),
                device("counters", counters, Update, ScalerCounter::COUNT).dtype(DType::U32),
                device("found_inf", found_inf, Update, 1),
            ],
            Op::Sum { input, out, .. } => {
                vec![device("input", input, Read, input.len()).float(), device("out", out, Update, 1)]
            }
            Op::SumSquares { input, out } => {
                vec![device("input", input, Read, input.len()).float(), device("out", out, Write, 1)]
            }
            Op::ClipCoefficient { sum_squares, norm, coefficient, .. } => vec![
                device("sum_squares", sum_squares, Read, sum_squares.len()),
                device("norm", norm, Write, 1),
                device("coefficient", coefficient, Write, 1),
            ],
            Op::AdamW(op) => {
                let len = op.parameters.len();
                let mut operands = vec![
                    device("parameters", &op.parameters, Update, len),
                    device("gradients", &op.gradients, Read, len),
                    device("first_moment", &op.first_moment, Update, len),
                    device("second_moment", &op.second_moment, Update, len),
                ];
                operands.extend(op.gradient_scale.iter().map(|s| device("gradient_scale", s, Read, 1)));
                if let Some(scaled) = &op.scaled {
                    operands.push(device("found_inf", &scaled.found_inf, Read, 1));
                    operands.push(
                        device("counters", &scaled.counters, Read, ScalerCounter::COUNT).dtype(DType::U32),
                    );
                }
                operands
            }
            Op::Custom { inputs, outputs, .. } => {
                let reads = inputs.iter().map(|s| device("inputs", s, Read, s.len()).any_dtype());
                let writes = outputs.iter().map(|s| device("outputs", s, Update, s.len()).any_dtype());
                reads.chain(writes).collect()
            }
        }
    }

    /// Every device slice of the op, for the device layer to turn owners into plain places before it queues the op.
    pub(crate) fn device_slices_mut(&mut self) -> Vec<&mut Slice> {
        match self {
            Op::Fill { out, .. } => vec![out],
            Op::Copy { input, out }
            | Op::Cast { input, out }
            | Op::Int8Encode { input, out, .. }
            | Op::Int8Decode { input, out, .. }
            | Op::BitsEncode { input, out }
            | Op::BitsDecode { input, out }
            | Op::Checksum { input, out }
            | Op::Add { input, out }
            | Op::Gelu { input, out, .. }
            | Op::Sum { input, out, .. }
            | Op::SumSquares { input, out } => vec![input, out],
            Op::MaxDifference { input, other, out } => vec![input, other, out],
            Op::WriteFile { .. } | Op::ReadFile { .. } => vec![],
            Op::CopyOut { input, .. } => vec![input],
            Op::CopyIn { out, .. } => vec![out],
            Op::Dropout { data, .. } => vec![data],
            Op::Gemm(op) => [&mut op.a, &mut op.b, &mut op.out].into_iter().chain(&mut op.bias).collect(),
            Op::BiasBackward { dout, dbias, workspace, .. } => vec![dout, dbias, workspace],
            Op::GeluBackward { input, gradient, .. } => vec![input, gradient],
            Op::LayerNorm(op) => {
                let mut slices = vec![
                    &mut op.input,
                    &mut op.weight,
                    &mut op.bias,
                    &mut op.out,
                    &mut op.mean,
                    &mut op.rstd,
                ];
                if let Some(residual) = &mut op.residual {
                    slices.extend([&mut residual.input, &mut residual.out]);
                }
                slices
            }
            Op::LayerNormApply(op) => {
                vec![&mut op.input, &mut op.weight, &mut op.bias, &mut op.mean, &mut op.rstd, &mut op.out]
            }
            Op::LayerNormBackward(op) => {
                let mut slices = vec![
                    &mut op.dout,
                    &mut op.input,
                    &mut op.weight,
                    &mut op.mean,
                    &mut op.rstd,
                    &mut op.dinput,
                    &mut op.dweight,
                    &mut op.dbias,
                    &mut op.workspace,
                ];
                slices.extend(op.ddelta.iter_mut().map(|(ddelta, _)| ddelta));
                slices
            }
            Op::Attention(op) => vec![&mut op.qkv, &mut op.out, &mut op.lse],
            Op::AttentionBackward(op) => {
                vec![&mut op.dout, &mut op.qkv, &mut op.out, &mut op.lse, &mut op.dqkv, &mut op.workspace]
            }
            Op::Embedding(op) => vec![&mut op.tokens, &mut op.wte, &mut op.wpe, &mut op.out],
            Op::EmbeddingBackward(op) => vec![&mut op.tokens, &mut op.dout, &mut op.dwte, &mut op.dwpe],
            Op::CrossEntropy(op) => [&mut op.logits, &mut op.targets, &mut op.losses]
                .into_iter()
                .chain(&mut op.loss_scale)
                .collect(),
            Op::Unscale { gradients, scale, found_inf, sum_squares } => {
                vec![gradients, scale, found_inf, sum_squares]
            }
            Op::ScalerUpdate { scale, counters, found_inf, .. } => vec![scale, counters, found_inf],
            Op::ClipCoefficient { sum_squares, norm, coefficient, .. } => {
                vec![sum_squares, norm, coefficient]
            }
            Op::AdamW(op) => {
                let scaled = op.scaled.iter_mut().flat_map(|s| [&mut s.found_inf, &mut s.counters]);
                [&mut op.parameters, &mut op.gradients, &mut op.first_moment, &mut op.second_moment]
                    .into_iter()
                    .chain(&mut op.gradient_scale)
                    .chain(scaled)
                    .collect()
            }
            Op::Custom { inputs, outputs, .. } => inputs.iter_mut().chain(outputs).collect(),
        }
    }

    /// Floating-point operations: two a multiply-add of a product; elementwise work is counted by bytes alone.
    pub fn flops(&self) -> u64 {
        match self {
            Op::Gemm(op) => 2 * op.m as u64 * op.n as u64 * op.k as u64,
            // Two products over the lower triangle forward, five backward.
            Op::Attention(op) => 2 * op.shape.product_flops(),
            Op::AttentionBackward(op) => 5 * op.shape.product_flops(),
            Op::Custom { custom, .. } => custom.flops(),
            _ => 0,
        }
    }

    /// Bytes read and written, each operand once; of a table of tokens a row a token at most.
    pub fn bytes(&self) -> u64 {
        // Elements of a table that tokens can touch.
        let most = match self {
            Op::Embedding(op) => op.tokens.len() * op.width,
            Op::EmbeddingBackward(op) => op.tokens.len() * op.width,
            _ => usize::MAX,
        };
        let moved = |operand: &Operand<'_>| {
            let bytes = match operand.place {
                Place::Device(slice) if matches!(operand.name, "wte" | "dwte") => {
                    slice.len().min(most) * slice.dtype().size_bytes()
                }
                Place::Device(slice) => slice.bytes(),
                Place::Host(_) | Place::File(_) => 0,
            } as u64;
            if operand.mode == Mode::Update { 2 * bytes } else { bytes }
        };
        self.operands().iter().map(moved).sum()
    }

    /// Holds every operand against the op's shape, and writes against overlap.
    ///
    /// # Errors
    /// [`Error::BadOperand`] names the op, the operand, what it should be and what it is; [`Error::Overlap`] two
    /// operands that share bytes of which at least one is written.
    pub fn check(&self) -> Result<()> {
        let operands = self.operands();
        for operand in &operands {
            let (len, dtype) = match operand.place {
                Place::Device(slice) => (slice.len(), Some(slice.dtype())),
                Place::Host(slice) => (slice.bytes(), None),
                Place::File(slice) => (slice.bytes(), None),
            };
            let wrong_dtype = operand.expected_dtype.is_some() && operand.expected_dtype != dtype;
            if len != operand.expected_len || wrong_dtype {
                return Err(Error::BadOperand {
                    op: self.name().to_string(),
                    operand: operand.name,
                    expected: describe(operand.expected_len, operand.expected_dtype),
                    found: describe(len, dtype),
                });
            }
        }
        for (i, a) in operands.iter().enumerate() {
            for b in &operands[i + 1..] {
                if (a.mode != Mode::Read || b.mode != Mode::Read) && a.place.overlaps(&b.place) {
                    return Err(Error::Overlap {
                        op: self.name().to_string(),
                        first: a.name,
                        second: b.name,
                    });
                }
            }
        }
        self.check_constants()
    }

    fn check_constants(&self) -> Result<()> {
        let bad = |expected: &str, found: String| {
            Err(Error::BadConstant { op: self.name().to_string(), expected: expected.to_string(), found })
        };
        let dropout = match self {
            Op::Dropout { dropout, .. } => Some(dropout),
            Op::LayerNorm(op) => op.residual.as_ref().and_then(|r| r.dropout.as_ref()),
            Op::LayerNormBackward(op) => op.ddelta.as_ref().map(|(_, dropout)| dropout),
            Op::Attention(op) => op.dropout.as_ref(),
            Op::AttentionBackward(op) => op.dropout.as_ref(),
            Op::Embedding(op) => op.dropout.as_ref(),
            Op::EmbeddingBackward(op) => op.dropout.as_ref(),
            _ => None,
        };
        if let Some(dropout) = dropout
            && !(0.0..1.0).contains(&dropout.probability)
        {
            return bad("a dropout probability in [0, 1)", dropout.probability.to_string());
        }
        match self {
            Op::Int8Encode { group, .. } | Op::Int8Decode { group, .. }
                if ![64, 128, 256].contains(group) =>
            {
                bad("a group of 64, 128 or 256", group.to_string())
            }
            Op::ScalerUpdate { rules, .. } => {
                let ScalerRules { growth, backoff, interval, floor, hysteresis } = *rules;
                let sound = growth.is_finite()
                    && growth >= 1.0
                    && backoff > 0.0
                    && backoff <= 1.0
                    && interval > 0
                    && floor.is_finite()
                    && floor > 0.0
                    && hysteresis > 0;
                match sound {
                    true => Ok(()),
                    false => bad(
                        "a growth from 1, a backoff in (0, 1], a floor above 0, an interval and a hysteresis from 1",
                        format!("{rules:?}"),
                    ),
                }
            }
            Op::AdamW(op) if op.step == 0 => bad("a step from 1", "0".into()),
            Op::Cast { input, out } => {
                let is_float = |dtype| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
                if is_float(input.dtype()) && is_float(out.dtype()) {
                    Ok(())
                } else {
                    bad("f32, f16 or bf16 on both sides", format!("{} to {}", input.dtype(), out.dtype()))
                }
            }
            _ => Ok(()),
        }
    }
}

impl Place<'_> {
    fn overlaps(&self, other: &Place<'_>) -> bool {
        match (self, other) {
            (Place::Device(a), Place::Device(b)) => {
                // The same addresses of two devices are two places; that they meet in one op is another error.
                let same_device = match (a.device(), b.device()) {
                    (Some(a), Some(b)) => Arc::ptr_eq(a, b),
                    _ => true,
                };
                same_device && a.range().start < b.range().end && b.range().start < a.range().end
            }
            (Place::Host(a), Place::Host(b)) => a.overlaps(b),
            (Place::File(a), Place::File(b)) => a.overlaps(b),
            _ => false,
        }
    }
}

fn describe(len: usize, dtype: Option<DType>) -> String {
    match dtype {
        Some(dtype) => format!("{len} × {dtype}"),
        None => format!("{len}"),
    }
}

impl AttentionShape {
    /// Elements of the output.
    pub const fn channels(&self) -> usize {
        self.batch * self.context * self.heads * self.head_size
    }
    /// Rows of all heads.
    pub const fn rows(&self) -> usize {
        self.batch * self.heads * self.context
    }
    fn product_flops(&self) -> u64 {
        let triangle = self.context as u64 * (self.context as u64 + 1) / 2;
        2 * (self.batch * self.heads * self.head_size) as u64 * triangle
    }
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.name())?;
        f.debug_list().entries(self.operands().iter().map(|o| (o.name, o.mode, o.place))).finish()
    }
}
