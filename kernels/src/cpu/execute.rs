//! From an [`Op`] to its kernel.

use half::{bf16, f16};

use super::{
    adamw::{AdamWConstants, adamw},
    attention::{attention, attention_backward},
    bits::{bits_decode, bits_encode},
    cast::{Float, cast},
    compare::{checksum, max_difference},
    cross_entropy::{cross_entropy, cross_entropy_loss},
    elementwise::{add, copy, dropout, fill, gelu, gelu_backward},
    embedding::{EmbeddingShape, embedding, embedding_backward},
    gemm::{GemmArgs, gemm},
    int8::{int8_decode, int8_encode},
    layer_norm::{
        LayerNormArgs, LayerNormBackwardArgs, ResidualArgs, layer_norm, layer_norm_apply, layer_norm_backward,
    },
    reduce::{bias_backward, clip_coefficient, sum, sum_squares},
    scaler::{scaler_update, unscale},
    threads::Threads,
};
use crate::{DType, Op, Slice, memory::Memory, op::ScalerCounter};

/// Where a scaler counts the updates that were applied.
const APPLIED: usize = ScalerCounter::Applied as usize;

/// Runs an op.
///
/// # Safety
/// The op passed [`Op::check`], so that its operands have the lengths and types that its shape asks for and none that is
/// written overlaps another; and while this runs nobody else touches what it writes, nor writes what it reads.
///
/// # Errors
/// A message: an index out of range, or a custom op's own.
pub(crate) unsafe fn execute(op: &Op, memory: &Memory, threads: &Threads) -> Result<(), String> {
    // SAFETY: the caller's contract, for these and every call below: each operand is taken once.
    let read = |slice: &Slice| unsafe { memory.read::<f32>(slice) };
    // SAFETY: as above.
    let write = |slice: &Slice| unsafe { memory.write::<f32>(slice) };
    // SAFETY: as above.
    let floats = |slice: &Slice| unsafe { memory.floats(slice) };
    // SAFETY: as above.
    let float_parts = |slice: &Slice| unsafe { memory.float_parts(slice) };
    match op {
        Op::Fill { out, value } => {
            // SAFETY: as above.
            unsafe {
                match out.dtype() {
                    DType::F32 => fill(threads, memory.write::<f32>(out), *value),
                    DType::F16 => fill(threads, memory.write::<f16>(out), f16::from_f32(*value)),
                    DType::BF16 => fill(threads, memory.write::<bf16>(out), bf16::from_f32(*value)),
                    DType::U32 => fill(threads, memory.write::<u32>(out), *value as u32),
                    DType::I32 => fill(threads, memory.write::<i32>(out), *value as i32),
                    DType::U8 => fill(threads, memory.write::<u8>(out), *value as u8),
                }
            }
        }
        // SAFETY: as above.
        Op::Copy { input, out } => unsafe {
            copy(threads, memory.read_bytes(input), memory.write_bytes(out))
        },
        // SAFETY: as above.
        Op::CopyOut { input, out } => unsafe { copy(threads, memory.read_bytes(input), out.op_bytes_mut()) },
        // SAFETY: as above.
        Op::CopyIn { input, out } => unsafe { copy(threads, input.op_bytes(), memory.write_bytes(out)) },
        Op::Cast { input, out } => match input.dtype() {
            // SAFETY: as above.
            DType::F16 => unsafe { cast_from(threads, memory.read::<f16>(input), out, memory) },
            // SAFETY: as above.
            DType::BF16 => unsafe { cast_from(threads, memory.read::<bf16>(input), out, memory) },
            // SAFETY: as above.
            _ => unsafe { cast_from(threads, memory.read::<f32>(input), out, memory) },
        },
        Op::Int8Encode { input, out, group, rounding } => {
            // SAFETY: as above.
            int8_encode(threads, floats(input), unsafe { memory.write_bytes(out) }, *group, *rounding);
        }
        Op::Int8Decode { input, out, group } => {
            // SAFETY: as above.
            int8_decode(threads, unsafe { memory.read_bytes(input) }, &float_parts(out), *group);
        }
        // SAFETY: as above.
        Op::WriteFile { input, file } => return file.write(unsafe { input.op_bytes() }),
        // SAFETY: as above.
        Op::ReadFile { file, out } => return file.read(unsafe { out.op_bytes_mut() }),
        // SAFETY: as above.
        Op::BitsEncode { input, out } => unsafe {
            bits_encode(threads, memory.read_bytes(input), memory.write_bytes(out));
        },
        // SAFETY: as above.
        Op::BitsDecode { input, out } => unsafe {
            bits_decode(threads, memory.read_bytes(input), memory.write_bytes(out));
        },
        Op::MaxDifference { input, other, out } => {
            let out = &mut write(out)[0];
            *out = out.max(max_difference(threads, floats(input), floats(other)));
        }
        // SAFETY: as above.
        Op::Checksum { input, out } => unsafe {
            let sum = checksum(threads, memory.read_bytes(input));
            memory.write::<u32>(out).copy_from_slice(&[sum as u32, (sum >> 32) as u32]);
        },
        Op::Add { input, out } => add(threads, floats(input), &float_parts(out)),
        Op::Dropout { data, dropout: key } => dropout(threads, &float_parts(data), key),
        Op::Gemm(op) => gemm(
            threads,
            GemmArgs {
                a: floats(&op.a),
                a_layout: op.a_layout,
                b: floats(&op.b),
                b_layout: op.b_layout,
                bias: op.bias.as_ref().map(read),
                out: float_parts(&op.out),
                accumulate: op.accumulate,
                m: op.m,
                n: op.n,
                k: op.k,
            },
        ),
        Op::BiasBackward { dout, dbias, workspace, rows, width } => {
            bias_backward(threads, floats(dout), write(dbias), write(workspace), *rows, *width);
        }
        Op::Gelu { input, out, kind } => gelu(threads, floats(input), &float_parts(out), *kind),
        Op::GeluBackward { input, gradient, kind } => {
            gelu_backward(threads, floats(input), &float_parts(gradient), *kind);
        }
        Op::LayerNorm(op) => layer_norm(
            threads,
            LayerNormArgs {
                input: floats(&op.input),
                residual: op.residual.as_ref().map(|r| ResidualArgs {
                    input: floats(&r.input),
                    out: float_parts(&r.out),
                    dropout: r.dropout,
                }),
                weight: read(&op.weight),
                bias: read(&op.bias),
                out: float_parts(&op.out),
                mean: write(&op.mean),
                rstd: write(&op.rstd),
                rows: op.rows,
                width: op.width,
                epsilon: op.epsilon,
            },
        ),
        Op::LayerNormApply(op) => layer_norm_apply(
            threads,
            floats(&op.input),
            read(&op.weight),
            read(&op.bias),
            read(&op.mean),
            read(&op.rstd),
            &float_parts(&op.out),
            op.width,
        ),
        Op::LayerNormBackward(op) => layer_norm_backward(
            threads,
            LayerNormBackwardArgs {
                dout: floats(&op.dout),
                input: floats(&op.input),
                weight: read(&op.weight),
                mean: read(&op.mean),
                rstd: read(&op.rstd),
                dinput: float_parts(&op.dinput),
                accumulate: op.accumulate,
                ddelta: op.ddelta.as_ref().map(|(ddelta, dropout)| (float_parts(ddelta), *dropout)),
                dweight: write(&op.dweight),
                dbias: write(&op.dbias),
                workspace: write(&op.workspace),
                rows: op.rows,
                width: op.width,
            },
        ),
        Op::Attention(op) => {
            attention(threads, floats(&op.qkv), &float_parts(&op.out), write(&op.lse), &op.shape, op.dropout);
        }
        Op::AttentionBackward(op) => attention_backward(
            threads,
            floats(&op.dout),
            floats(&op.qkv),
            floats(&op.out),
            read(&op.lse),
            &float_parts(&op.dqkv),
            write(&op.workspace),
            &op.shape,
            op.dropout,
        ),
        Op::Embedding(op) => {
            // SAFETY: as above.
            let tokens = unsafe { memory.read::<u32>(&op.tokens) };
            let shape = EmbeddingShape { context: op.context, width: op.width, vocabulary: op.vocabulary };
            return embedding(
                threads,
                tokens,
                floats(&op.wte),
                floats(&op.wpe),
                &float_parts(&op.out),
                shape,
                op.dropout,
            );
        }
        Op::EmbeddingBackward(op) => {
            // SAFETY: as above.
            let tokens = unsafe { memory.read::<u32>(&op.tokens) };
            let shape = EmbeddingShape { context: op.context, width: op.width, vocabulary: op.vocabulary };
            return embedding_backward(
                threads,
                tokens,
                floats(&op.dout),
                write(&op.dwte),
                write(&op.dwpe),
                shape,
                op.dropout,
            );
        }
        Op::CrossEntropy(op) => {
            // SAFETY: as above.
            let targets = unsafe { memory.read::<i32>(&op.targets) };
            let losses = write(&op.losses);
            return match op.gradient_scale {
                Some(scale) => {
                    let scale = scale * op.loss_scale.as_ref().map_or(1.0, |scale| read(scale)[0]);
                    cross_entropy(threads, &float_parts(&op.logits), targets, losses, op.vocabulary, scale)
                }
                None => cross_entropy_loss(threads, floats(&op.logits), targets, losses, op.vocabulary),
            };
        }
        Op::Sum { input, out, scale } => {
            write(out)[0] += (sum(threads, floats(input)) * f64::from(*scale)) as f32;
        }
        Op::SumSquares { input, out } => write(out)[0] = sum_squares(threads, floats(input)) as f32,
        Op::ClipCoefficient { sum_squares, norm, coefficient, max_norm } => {
            (write(norm)[0], write(coefficient)[0]) = clip_coefficient(read(sum_squares), *max_norm);
        }
        Op::Unscale { gradients, scale, found_inf, sum_squares } => {
            let (found, squares) = unscale(threads, write(gradients), read(scale)[0]);
            if found {
                write(found_inf)[0] = 1.0;
            }
            write(sum_squares)[0] = squares as f32;
        }
        Op::ScalerUpdate { scale, counters, found_inf, rules } => {
            // SAFETY: as above.
            let counters = unsafe { memory.write::<u32>(counters) };
            scaler_update(&mut write(scale)[0], counters, &mut write(found_inf)[0], rules);
        }
        Op::AdamW(op) => adamw(
            threads,
            write(&op.parameters),
            read(&op.gradients),
            write(&op.first_moment),
            write(&op.second_moment),
            AdamWConstants {
                gradient_scale: op.gradient_scale.as_ref().map_or(1.0, |scale| read(scale)[0]),
                learning_rate: op.learning_rate,
                beta1: op.beta1,
                beta2: op.beta2,
                epsilon: op.epsilon,
                weight_decay: op.weight_decay,
                step: match &op.scaled {
                    Some(scaled) if read(&scaled.found_inf)[0] != 0.0 => return Ok(()),
                    // SAFETY: as above.
                    Some(scaled) => unsafe { u64::from(memory.read::<u32>(&scaled.counters)[APPLIED]) + 1 },
                    None => op.step,
                },
            },
        ),
        Op::Custom { custom, inputs, outputs } => {
            // SAFETY: as above.
            let inputs: Vec<&[u8]> = inputs.iter().map(|s| unsafe { memory.read_bytes(s) }).collect();
            // SAFETY: as above.
            let mut outputs: Vec<&mut [u8]> =
                outputs.iter().map(|s| unsafe { memory.write_bytes(s) }).collect();
            return custom.run_cpu(&inputs, &mut outputs);
        }
    }
    Ok(())
}

/// # Safety
/// As for [`execute`], with `input` and `out` the operands of a cast.
unsafe fn cast_from<T: Float>(threads: &Threads, input: &[T], out: &Slice, memory: &Memory) {
    // SAFETY: the caller's contract.
    unsafe {
        match out.dtype() {
            DType::F16 => cast(threads, input, memory.write::<f16>(out)),
            DType::BF16 => cast(threads, input, memory.write::<bf16>(out)),
            _ => cast(threads, input, memory.write::<f32>(out)),
        }
    }
}
