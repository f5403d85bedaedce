//! From an op to launches.
//!
//! Grids depend on shapes alone, never on the card, and so does the order of every sum. A kernel's wide form, 16 bytes an access, is
//! taken where all its operands are aligned for it; both forms give the same bits.
//!
//! What is reduced to one number goes through partials in the stream's scratch: a stream's launches follow one another, so one scratch
//! serves them all.

use bytemuck::{Pod, bytes_of};

use super::{
    Module,
    arguments::{self as args, Address, Dropout, Floats},
};
use crate::{
    DType, Error, Op, Result, Slice,
    op::{
        AdamW, Attention, AttentionBackward, AttentionShape, CrossEntropy, GeluKind, Gemm, Layout,
        REDUCE_ROWS, Rounding, ScalerCounter,
    },
};

/// Where things are while a plan runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    /// Address of the first byte of device memory, aligned to 256 bytes.
    pub(crate) base: Address,
    /// [`SCRATCH_BYTES`] of the stream's own.
    pub(crate) scratch: Address,
    /// A [`FAILURE_WORDS`] record of the first index that was out of range, where the host can read it.
    pub(crate) failure: Address,
    /// A u32 of device memory: 0, or updates that are queued do nothing.
    pub(crate) stop: Address,
    /// What a failure is recorded as: the op's number.
    pub(crate) submission: u32,
}

/// Bytes of a stream's scratch: partial sums, and a bias in 16 bits of up to 512 Ki columns.
pub(crate) const SCRATCH_BYTES: usize = 1 << 20;

/// u32 words of a failure: noted, submission, element, value.
pub(crate) const FAILURE_WORDS: usize = 4;

/// One thing to hand to the driver or a library of it.
#[derive(Clone, Debug)]
pub(crate) enum Call {
    /// A kernel.
    Launch(Launch),
    /// A product, and the launch of our own that gives it where cuBLASLt has no algorithm.
    Product(Product, Launch),
    /// Bytes within device memory.
    Copy { from: Address, to: Address, bytes: usize },
    /// One byte, again and again.
    Set { at: Address, value: u8, bytes: usize },
}

/// A kernel; its one argument is bytes.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    pub(crate) module: Module,
    pub(crate) kernel: &'static str,
    pub(crate) grid: [u32; 2],
    pub(crate) block: u32,
    pub(crate) argument: Vec<u8>,
}

/// `out = a · b (+ bias) (+ out)` as [`Gemm`] has it, operands of one dtype.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub(crate) a: Address,
    pub(crate) b: Address,
    pub(crate) out: Address,
    /// Of the type of `out`; 0 if there is none.
    pub(crate) bias: Address,
    pub(crate) a_transposed: bool,
    pub(crate) b_transposed: bool,
    pub(crate) accumulate: bool,
    pub(crate) input_dtype: DType,
    pub(crate) out_dtype: DType,
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
}

/// Threads a block, as a rule.
const THREADS: u32 = 256;
/// Blocks of a kernel that strides over its elements: enough to fill any card.
const MOST_BLOCKS: u64 = 8192;
/// Blocks of a reduction, and so partials.
const MOST_PARTIALS: u64 = 1024;
/// Threads of the kernels that sum columns: 16 warps, as they have it.
const COLUMN_THREADS: u32 = 512;
/// Threads of the kernels of attention: 4 warps, as they have it.
const ATTENTION_THREADS: u32 = 128;
/// The largest head that attention takes.
pub(crate) const HEAD_SIZE: usize = 128;
/// Bytes that a wide access is aligned to.
const WIDE_BYTES: u64 = 16;

/// A kernel's two forms.
macro_rules! kernel {
    ($name:literal, $wide:expr) => {
        if $wide { concat!($name, "_8") } else { concat!($name, "_1") }
    };
}

/// Whether there are kernels for an op that passed [`Op::check`].
///
/// # Errors
/// [`Error::BadConstant`] if a head of attention is larger than [`HEAD_SIZE`].
pub(crate) fn check(op: &Op) -> Result<()> {
    match op {
        Op::Attention(Attention { shape, .. }) | Op::AttentionBackward(AttentionBackward { shape, .. })
            if shape.head_size > HEAD_SIZE =>
        {
            Err(Error::BadConstant {
                op: op.name().to_string(),
                expected: format!("a head size of at most {HEAD_SIZE}, as the CUDA kernels have it"),
                found: shape.head_size.to_string(),
            })
        }
        _ => Ok(()),
    }
}

/// What to run for an op that passed [`check`], in order. Transfers, files and custom ops are the backend's own: nothing here.
pub(crate) fn plan(op: &Op, target: &Target) -> Vec<Call> {
    let mut plan = Plan { target: *target, calls: Vec::new() };
    plan.op(op);
    plan.calls
}

struct Plan {
    target: Target,
    calls: Vec<Call>,
}

impl Plan {
    fn op(&mut self, op: &Op) {
        match op {
            Op::Fill { out, value } => self.fill(out, *value),
            Op::Copy { input, out } => {
                let (from, to, bytes) = (self.address(input), self.address(out), out.bytes());
                self.calls.extend((bytes > 0).then_some(Call::Copy { from, to, bytes }));
            }
            Op::Cast { input, out } => {
                let argument =
                    args::Cast { input: self.floats(input), out: self.floats(out), count: count(out) };
                let wide = self.wide(&[input, out]);
                self.each(Module::Elementwise, kernel!("cast", wide), wide, out, &argument);
            }
            Op::Int8Encode { input, out, group, rounding } => self.int8_encode(input, out, *group, *rounding),
            Op::Int8Decode { input, out, group } => {
                let codes = self.address(input) + 4 * out.len().div_ceil(*group) as u64;
                let wide =
                    self.wide(&[out]) && self.address(input).is_multiple_of(4) && codes.is_multiple_of(8);
                let argument = args::Int8Decode {
                    input: self.address(input),
                    out: self.floats(out),
                    count: count(out),
                    group: *group as u32,
                    ..Default::default()
                };
                self.each(Module::Codecs, kernel!("int8_decode", wide), wide, out, &argument);
            }
            Op::BitsEncode { input, out } => {
                let argument =
                    args::Bits { input: self.address(input), out: self.address(out), count: count(input) };
                self.each(Module::Codecs, "bits_encode", false, out, &argument);
            }
            Op::BitsDecode { input, out } => {
                let argument =
                    args::Bits { input: self.address(input), out: self.address(out), count: count(out) };
                self.each(Module::Codecs, "bits_decode", false, out, &argument);
            }
            Op::MaxDifference { input, other, out } => self.max_difference(input, other, out),
            Op::Checksum { input, out } => self.checksum(input, out),
            Op::Add { input, out } => {
                let argument =
                    args::Add { input: self.floats(input), out: self.floats(out), count: count(out) };
                let wide = self.wide(&[input, out]);
                self.each(Module::Elementwise, kernel!("add", wide), wide, out, &argument);
            }
            Op::Dropout { data, dropout } => {
                let dropout = Dropout::new(Some(dropout));
                let argument = args::Drop { data: self.floats(data), dropout, count: count(data) };
                let wide = self.wide(&[data]);
                self.each(Module::Elementwise, kernel!("dropout", wide), wide, data, &argument);
            }
            Op::Gemm(op) => self.gemm(op),
            Op::BiasBackward { dout, dbias, workspace, rows, width } => {
                let wide = self.wide(&[dout]) && width.is_multiple_of(8);
                let blocks = rows.div_ceil(REDUCE_ROWS) as u32;
                let (rows, width) = (*rows as u32, *width as u32);
                let partials = self.address(workspace);
                let argument =
                    args::BiasBackward { dout: self.floats(dout), workspace: partials, rows, width };
                let name = kernel!("bias_backward", wide);
                self.launch(Module::LayerNorm, name, [blocks, 1], COLUMN_THREADS, &argument);
                self.add_partials(partials, dbias, blocks, width, width);
            }
            Op::Gelu { input, out, kind } => {
                let argument = args::Gelu {
                    input: self.floats(input),
                    out: self.floats(out),
                    count: count(out),
                    erf: u32::from(*kind == GeluKind::Erf),
                    unused: 0,
                };
                let wide = self.wide(&[input, out]);
                self.each(Module::Elementwise, kernel!("gelu", wide), wide, out, &argument);
            }
            Op::GeluBackward { input, gradient, kind } => {
                let argument = args::GeluBackward {
                    input: self.floats(input),
                    gradient: self.floats(gradient),
                    count: count(gradient),
                    erf: u32::from(*kind == GeluKind::Erf),
                    unused: 0,
                };
                let wide = self.wide(&[input, gradient]);
                self.each(Module::Elementwise, kernel!("gelu_backward", wide), wide, gradient, &argument);
            }
            Op::LayerNorm(op) => {
                let mut slices = vec![&op.input, &op.weight, &op.bias, &op.out];
                slices.extend(op.residual.iter().flat_map(|residual| [&residual.input, &residual.out]));
                let residual = op.residual.as_ref();
                let argument = args::LayerNorm {
                    input: self.floats(&op.input),
                    residual: residual.map(|residual| self.floats(&residual.input)).unwrap_or_default(),
                    sum_out: residual.map(|residual| self.floats(&residual.out)).unwrap_or_default(),
                    dropout: Dropout::new(residual.and_then(|residual| residual.dropout.as_ref())),
                    weight: self.address(&op.weight),
                    bias: self.address(&op.bias),
                    out: self.floats(&op.out),
                    means: self.address(&op.mean),
                    rstds: self.address(&op.rstd),
                    rows: op.rows as u32,
                    width: op.width as u32,
                    epsilon: op.epsilon,
                    unused: 0,
                };
                let name = kernel!("layer_norm", self.wide(&slices) && op.width.is_multiple_of(8));
                self.rows(name, op.rows, &argument);
            }
            Op::LayerNormApply(op) => {
                let argument = args::LayerNormApply {
                    input: self.floats(&op.input),
                    weight: self.address(&op.weight),
                    bias: self.address(&op.bias),
                    means: self.address(&op.mean),
                    rstds: self.address(&op.rstd),
                    out: self.floats(&op.out),
                    rows: op.rows as u32,
                    width: op.width as u32,
                };
                let wide =
                    self.wide(&[&op.input, &op.weight, &op.bias, &op.out]) && op.width.is_multiple_of(8);
                self.rows(kernel!("layer_norm_apply", wide), op.rows, &argument);
            }
            Op::LayerNormBackward(op) => {
                let mut slices = vec![&op.dout, &op.input, &op.weight, &op.dinput];
                slices.extend(op.ddelta.iter().map(|(ddelta, _)| ddelta));
                let workspace = self.address(&op.workspace);
                let width = op.width as u32;
                let argument = args::LayerNormBackward {
                    dout: self.floats(&op.dout),
                    input: self.floats(&op.input),
                    weight: self.address(&op.weight),
                    means: self.address(&op.mean),
                    rstds: self.address(&op.rstd),
                    dinput: self.floats(&op.dinput),
                    accumulate: u32::from(op.accumulate),
                    unused: 0,
                    ddelta: op.ddelta.as_ref().map(|(ddelta, _)| self.floats(ddelta)).unwrap_or_default(),
                    dropout: Dropout::new(op.ddelta.as_ref().map(|(_, dropout)| dropout)),
                    workspace,
                    rows: op.rows as u32,
                    width,
                };
                let name = kernel!("layer_norm_backward", self.wide(&slices) && op.width.is_multiple_of(8));
                let blocks = op.rows.div_ceil(REDUCE_ROWS) as u32;
                self.launch(Module::LayerNorm, name, [blocks, 1], COLUMN_THREADS, &argument);
                self.add_partials(workspace, &op.dweight, blocks, 2 * width, width);
                self.add_partials(workspace + 4 * u64::from(width), &op.dbias, blocks, 2 * width, width);
            }
            Op::Attention(op) => self.attention(op),
            Op::AttentionBackward(op) => self.attention_backward(op),
            Op::Embedding(op) => {
                let argument = args::Embedding {
                    tokens: self.address(&op.tokens),
                    wte: self.floats(&op.wte),
                    wpe: self.floats(&op.wpe),
                    out: self.floats(&op.out),
                    context: op.context as u32,
                    width: op.width as u32,
                    count: count(&op.out),
                    vocabulary: op.vocabulary as u32,
                    dropout: Dropout::new(op.dropout.as_ref()),
                    failing: self.failing(),
                    ..Default::default()
                };
                let wide = self.wide(&[&op.wte, &op.wpe, &op.out]) && op.width.is_multiple_of(8);
                self.each(Module::Embedding, kernel!("embedding", wide), wide, &op.out, &argument);
            }
            Op::EmbeddingBackward(op) => {
                let (rows, sequence) = (op.batch * op.context, (op.context * op.width) as u64);
                let wide = self.wide(&[&op.dout, &op.dwte, &op.dwpe]) && op.width.is_multiple_of(8);
                let dropout = Dropout::new(op.dropout.as_ref());
                let tokens = args::EmbeddingBackwardTokens {
                    tokens: self.address(&op.tokens),
                    dout: self.floats(&op.dout),
                    dwte: self.address(&op.dwte),
                    rows: rows as u32,
                    width: op.width as u32,
                    vocabulary: op.vocabulary as u32,
                    dropout,
                    failing: self.failing(),
                    ..Default::default()
                };
                let name = kernel!("embedding_backward_tokens", wide);
                self.launch(Module::Embedding, name, [rows as u32, 1], THREADS, &tokens);
                let positions = args::EmbeddingBackwardPositions {
                    dout: self.floats(&op.dout),
                    dwpe: self.address(&op.dwpe),
                    batch: op.batch as u32,
                    unused: 0,
                    sequence,
                    dropout,
                };
                let (name, grid) =
                    (kernel!("embedding_backward_positions", wide), blocks(sequence, wide, MOST_BLOCKS));
                self.launch(Module::Embedding, name, [grid, 1], THREADS, &positions);
            }
            Op::CrossEntropy(op) => self.cross_entropy(op),
            Op::Sum { input, out, scale } => {
                let kernel = kernel!("sum_partials", self.wide(&[input]));
                self.sum(kernel, input, out, Some(*scale));
            }
            Op::SumSquares { input, out } => {
                let kernel = kernel!("sum_squares_partials", self.wide(&[input]));
                self.sum(kernel, input, out, None);
            }
            Op::ClipCoefficient { sum_squares, norm, coefficient, max_norm } => {
                let argument = args::ClipCoefficient {
                    sum_squares: self.address(sum_squares),
                    count: count(sum_squares),
                    norm: self.address(norm),
                    coefficient: self.address(coefficient),
                    max_norm: *max_norm,
                    unused: 0,
                };
                self.launch(Module::Reduce, "clip_coefficient", [1, 1], THREADS, &argument);
            }
            Op::Unscale { gradients, scale, found_inf, sum_squares } => {
                let argument = args::UnscalePartials {
                    gradients: self.address(gradients),
                    count: count(gradients),
                    scale: self.address(scale),
                    found_inf: self.address(found_inf),
                    partials: self.target.scratch,
                };
                let wide = self.wide(&[gradients]);
                let partials = partials(gradients, wide);
                self.launch(
                    Module::Reduce,
                    kernel!("unscale_partials", wide),
                    [partials, 1],
                    THREADS,
                    &argument,
                );
                self.sum_finish(partials, sum_squares, None);
            }
            Op::ScalerUpdate { scale, counters, found_inf, rules } => {
                let argument = args::ScalerUpdate {
                    scale: self.address(scale),
                    counters: self.address(counters),
                    found_inf: self.address(found_inf),
                    stop: self.target.stop,
                    growth: rules.growth,
                    backoff: rules.backoff,
                    floor: rules.floor,
                    interval: rules.interval,
                    hysteresis: rules.hysteresis,
                    unused: 0,
                };
                self.launch(Module::Reduce, "scaler_update", [1, 1], 1, &argument);
            }
            Op::AdamW(op) => self.adamw(op),
            Op::CopyOut { .. }
            | Op::CopyIn { .. }
            | Op::WriteFile { .. }
            | Op::ReadFile { .. }
            | Op::Custom { .. } => {}
        }
    }

    fn fill(&mut self, out: &Slice, value: f32) {
        let at = self.address(out);
        let word = match out.dtype() {
            DType::U8 => {
                let (value, bytes) = (value as u8, out.bytes());
                self.calls.extend((bytes > 0).then_some(Call::Set { at, value, bytes }));
                return;
            }
            DType::U32 => value as u32,
            DType::I32 => value as i32 as u32,
            DType::F32 | DType::F16 | DType::BF16 => {
                let argument = args::Fill { out: self.floats(out), value, unused: 0, count: count(out) };
                let wide = self.wide(&[out]);
                self.each(Module::Elementwise, kernel!("fill", wide), wide, out, &argument);
                return;
            }
        };
        let argument = args::FillWords { out: at, count: count(out), value: word, unused: 0 };
        self.each(Module::Elementwise, "fill_words", false, out, &argument);
    }

    fn int8_encode(&mut self, input: &Slice, out: &Slice, group: usize, rounding: Rounding) {
        let groups = input.len().div_ceil(group) as u64;
        let codes = self.address(out) + 4 * groups;
        let wide = self.wide(&[input]) && codes.is_multiple_of(8);
        let (input, out, count, group) = (self.floats(input), self.address(out), count(input), group as u32);
        // A warp a group.
        let grid = [groups.div_ceil(u64::from(THREADS / 32)).min(MOST_BLOCKS) as u32, 1];
        match rounding {
            Rounding::Nearest => {
                let argument = args::Int8Encode { input, out, count, group, unused: 0 };
                self.launch(Module::Codecs, kernel!("int8_encode", wide), grid, THREADS, &argument);
            }
            Rounding::Stochastic { seed, site, step } => {
                let argument =
                    args::Int8EncodeStochastic { input, out, count, group, unused: 0, seed, site, step };
                self.launch(
                    Module::Codecs,
                    kernel!("int8_encode_stochastic", wide),
                    grid,
                    THREADS,
                    &argument,
                );
            }
        }
    }

    fn max_difference(&mut self, input: &Slice, other: &Slice, out: &Slice) {
        let wide = self.wide(&[input, other]);
        let partials = partials(input, wide);
        let argument = args::MaxDifferencePartials {
            input: self.floats(input),
            other: self.floats(other),
            count: count(input),
            partials: self.target.scratch,
        };
        let name = kernel!("max_difference_partials", wide);
        self.launch(Module::Reduce, name, [partials, 1], THREADS, &argument);
        let (from, out) = (self.target.scratch, self.address(out));
        let argument = args::MaxDifferenceFinish { partials: from, out, count: partials, unused: 0 };
        self.launch(Module::Reduce, "max_difference_finish", [1, 1], 32, &argument);
    }

    fn checksum(&mut self, input: &Slice, out: &Slice) {
        let partials = blocks((input.bytes() as u64).div_ceil(8), false, MOST_PARTIALS).max(1);
        let (bytes, scratch) = (input.bytes() as u64, self.target.scratch);
        let argument = args::ChecksumPartials { bytes: self.address(input), count: bytes, partials: scratch };
        self.launch(Module::Reduce, "checksum_partials", [partials, 1], THREADS, &argument);
        let out = self.address(out);
        let argument =
            args::ChecksumFinish { partials: scratch, out, length: bytes, count: partials, unused: 0 };
        self.launch(Module::Reduce, "checksum_finish", [1, 1], THREADS, &argument);
    }

    /// cuBLASLt takes operands of one type, and a bias of the result's; the rest is our own.
    fn gemm(&mut self, op: &Gemm) {
        if op.m == 0 || op.n == 0 {
            return;
        }
        let fits_scratch = op.n * op.out.dtype().size_bytes() <= SCRATCH_BYTES;
        let out_fits = matches!(op.out.dtype(), DType::F32) || op.out.dtype() == op.a.dtype();
        if op.k == 0 || op.a.dtype() != op.b.dtype() || !out_fits || (op.bias.is_some() && !fits_scratch) {
            let launch = self.own_gemm(op);
            self.calls.push(Call::Launch(launch));
            return;
        }
        let mut bias = op.bias.as_ref().map_or(0, |bias| self.address(bias));
        if let Some(own) = op.bias.as_ref().filter(|bias| bias.dtype() != op.out.dtype()) {
            let out = Floats { data: self.target.scratch, ..self.floats(&op.out) };
            let argument = args::Cast { input: self.floats(own), out, count: count(own) };
            let wide = self.wide(&[own]);
            self.each(Module::Elementwise, kernel!("cast", wide), wide, own, &argument);
            bias = self.target.scratch;
        }
        let product = Product {
            a: self.address(&op.a),
            b: self.address(&op.b),
            out: self.address(&op.out),
            bias,
            a_transposed: op.a_layout == Layout::Transposed,
            b_transposed: op.b_layout == Layout::Transposed,
            accumulate: op.accumulate,
            input_dtype: op.a.dtype(),
            out_dtype: op.out.dtype(),
            m: op.m,
            n: op.n,
            k: op.k,
        };
        let own = self.own_gemm(op);
        self.calls.push(Call::Product(product, own));
    }

    fn own_gemm(&self, op: &Gemm) -> Launch {
        const TILE: usize = 64;
        let argument = args::Gemm {
            a: self.floats(&op.a),
            b: self.floats(&op.b),
            out: self.floats(&op.out),
            bias: op.bias.as_ref().map_or(0, |bias| self.address(bias)),
            m: op.m as u32,
            n: op.n as u32,
            k: op.k as u32,
            a_transposed: u32::from(op.a_layout == Layout::Transposed),
            b_transposed: u32::from(op.b_layout == Layout::Transposed),
            accumulate: u32::from(op.accumulate),
        };
        let grid = [op.m.div_ceil(TILE) as u32, op.n.div_ceil(TILE) as u32];
        let argument = bytes_of(&argument).to_vec();
        Launch { module: Module::Gemm, kernel: "gemm", grid, block: THREADS, argument }
    }

    fn attention(&mut self, op: &Attention) {
        const QUERIES: usize = 16;
        let AttentionShape { batch, context, heads, head_size, scale } = op.shape;
        let argument = args::Attention {
            qkv: self.floats(&op.qkv),
            out: self.floats(&op.out),
            lse: self.address(&op.lse),
            context: context as u32,
            heads: heads as u32,
            head_size: head_size as u32,
            scale,
            dropout: Dropout::new(op.dropout.as_ref()),
        };
        let name = if head_size <= 64 { "attention_64" } else { "attention_128" };
        let grid = [(batch * heads) as u32, context.div_ceil(QUERIES) as u32];
        self.launch(Module::Attention, name, grid, ATTENTION_THREADS, &argument);
    }

    fn attention_backward(&mut self, op: &AttentionBackward) {
        const SUMS: usize = 4;
        const ROWS: usize = 8;
        let AttentionShape { batch, context, heads, head_size, scale } = op.shape;
        let argument = args::AttentionBackward {
            dout: self.floats(&op.dout),
            qkv: self.floats(&op.qkv),
            out: self.floats(&op.out),
            dqkv: self.floats(&op.dqkv),
            lse: self.address(&op.lse),
            workspace: self.address(&op.workspace),
            context: context as u32,
            heads: heads as u32,
            head_size: head_size as u32,
            scale,
            dropout: Dropout::new(op.dropout.as_ref()),
        };
        let [queries, keys] = match head_size <= 64 {
            true => ["attention_backward_queries_64", "attention_backward_keys_64"],
            false => ["attention_backward_queries_128", "attention_backward_keys_128"],
        };
        for (name, rows) in [("attention_row_sums", SUMS), (queries, ROWS), (keys, ROWS)] {
            let grid = [(batch * heads) as u32, context.div_ceil(rows) as u32];
            self.launch(Module::Attention, name, grid, ATTENTION_THREADS, &argument);
        }
    }

    fn cross_entropy(&mut self, op: &CrossEntropy) {
        // Rows begin anywhere; the kernel finds their aligned middle if the matrix is aligned.
        let wide = self.address(&op.logits).is_multiple_of(WIDE_BYTES);
        let argument = args::CrossEntropy {
            logits: self.floats(&op.logits),
            targets: self.address(&op.targets),
            losses: self.address(&op.losses),
            vocabulary: op.vocabulary as u32,
            with_gradient: u32::from(op.gradient_scale.is_some()),
            gradient_scale: op.gradient_scale.unwrap_or(0.0),
            loss_scale: op.loss_scale.as_ref().map_or(0, |scale| self.address(scale)),
            failing: self.failing(),
            ..Default::default()
        };
        let threads = if op.vocabulary >= 8192 { 512 } else { 128 };
        let name = kernel!("cross_entropy", wide);
        self.launch(Module::CrossEntropy, name, [op.rows as u32, 1], threads, &argument);
    }

    fn adamw(&mut self, op: &AdamW) {
        let wide = self.wide(&[&op.parameters, &op.gradients, &op.first_moment, &op.second_moment]);
        let applied = 4 * ScalerCounter::Applied as u64;
        let argument = args::AdamW {
            parameters: self.address(&op.parameters),
            gradients: self.address(&op.gradients),
            first_moment: self.address(&op.first_moment),
            second_moment: self.address(&op.second_moment),
            count: count(&op.parameters),
            gradient_scale: op.gradient_scale.as_ref().map_or(0, |scale| self.address(scale)),
            found_inf: op.scaled.as_ref().map_or(0, |scaled| self.address(&scaled.found_inf)),
            applied: op.scaled.as_ref().map_or(0, |scaled| self.address(&scaled.counters) + applied),
            stop: self.target.stop,
            learning_rate: op.learning_rate,
            beta1: op.beta1,
            beta2: op.beta2,
            epsilon: op.epsilon,
            weight_decay: op.weight_decay,
            unused: 0,
            step: op.step,
        };
        self.each(Module::AdamW, kernel!("adamw", wide), wide, &op.parameters, &argument);
    }

    /// A sum of f64 partials: added to `out` times a scale, or instead of it.
    fn sum(&mut self, kernel: &'static str, input: &Slice, out: &Slice, scale: Option<f32>) {
        let partials = partials(input, self.wide(&[input]));
        let argument =
            args::Partials { input: self.floats(input), count: count(input), partials: self.target.scratch };
        self.launch(Module::Reduce, kernel, [partials, 1], THREADS, &argument);
        self.sum_finish(partials, out, scale);
    }

    fn sum_finish(&mut self, partials: u32, out: &Slice, scale: Option<f32>) {
        let argument = args::SumFinish {
            partials: self.target.scratch,
            out: self.address(out),
            count: partials,
            scale: scale.unwrap_or(1.0),
            accumulate: u32::from(scale.is_some()),
            unused: 0,
        };
        self.launch(Module::Reduce, "sum_finish", [1, 1], THREADS, &argument);
    }

    fn add_partials(&mut self, partials: Address, out: &Slice, blocks: u32, stride: u32, width: u32) {
        const COLUMNS: u32 = 32;
        let out = self.address(out);
        let argument = args::AddPartials { partials, out, blocks, stride, width, unused: 0 };
        self.launch(Module::LayerNorm, "add_partials", [width.div_ceil(COLUMNS), 1], THREADS, &argument);
    }

    /// A kernel that strides over the elements of `over`.
    fn each(&mut self, module: Module, kernel: &'static str, wide: bool, over: &Slice, argument: &impl Pod) {
        self.launch(module, kernel, [blocks(count(over), wide, MOST_BLOCKS), 1], THREADS, argument);
    }

    /// A kernel of norms: a warp a row.
    fn rows(&mut self, kernel: &'static str, rows: usize, argument: &impl Pod) {
        const ROWS: u32 = 4;
        self.launch(Module::LayerNorm, kernel, [(rows as u32).div_ceil(ROWS), 1], 32 * ROWS, argument);
    }

    /// A grid without blocks is nothing to do.
    fn launch(
        &mut self,
        module: Module,
        kernel: &'static str,
        grid: [u32; 2],
        block: u32,
        argument: &impl Pod,
    ) {
        if grid.contains(&0) {
            return;
        }
        let argument = bytes_of(argument).to_vec();
        self.calls.push(Call::Launch(Launch { module, kernel, grid, block, argument }));
    }

    fn failing(&self) -> args::Failing {
        let Target { failure, stop, submission, .. } = self.target;
        args::Failing { failure, stop, submission, unused: 0 }
    }

    fn address(&self, slice: &Slice) -> Address {
        self.target.base + slice.range().start as u64
    }

    fn floats(&self, slice: &Slice) -> Floats {
        Floats::new(slice, self.target.base)
    }

    /// Whether all are aligned for accesses of eight elements, and of a whole number of those.
    fn wide(&self, slices: &[&Slice]) -> bool {
        slices
            .iter()
            .all(|slice| self.address(slice).is_multiple_of(WIDE_BYTES) && slice.len().is_multiple_of(8))
    }
}

fn count(slice: &Slice) -> u64 {
    slice.len() as u64
}

/// Blocks that cover `count` elements, or as many as may be; the kernel strides over the rest.
fn blocks(count: u64, wide: bool, most: u64) -> u32 {
    count.div_ceil(u64::from(THREADS) * if wide { 8 } else { 1 }).min(most) as u32
}

/// Partials of a reduction: at least one, so that nothing sums to 0.
fn partials(input: &Slice, wide: bool) -> u32 {
    blocks(count(input).div_ceil(4), wide, MOST_PARTIALS).max(1)
}
