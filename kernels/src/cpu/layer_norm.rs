//! Layer normalisation, fused with the residual addition before it, and its backward.
//!
//! Forward, a row at a time while it is in the cache: the residual sum with its dropout, the mean, the variance about it
//! (two passes, so that nothing cancels), the output. [`layer_norm_apply`] makes the output again from the statistics with
//! the same instructions, hence the same bits.
//!
//! Backward, with `g = dout ∘ weight` and `x̂ = (x - mean) rstd`:
//! `dx = rstd (g - mean(g) - x̂ mean(g ∘ x̂))`, `dweight = Σ dout ∘ x̂`, `dbias = Σ dout` (Ba et al., 2016). The sums over
//! rows go by blocks of [`REDUCE_ROWS`], a task a block, and the blocks are added in order.
//!
//! Cost: forward reads and writes each operand once; backward reads `dout` and `x` once from memory and writes `dx`.

use multiversion::multiversion;

use super::{
    elementwise::drop_piece,
    float::{FloatParts, Floats},
    math::{sum, sum_of},
    reduce::add_blocks,
    threads::{Parts, Threads},
};
use crate::op::{Dropout, REDUCE_ROWS};

/// Elements that a task of the forward pass covers, about.
const TASK: usize = 16 << 10;

/// `input + dropout(delta)` on its way into a norm.
pub(crate) struct ResidualArgs<'a> {
    pub(crate) input: Floats<'a>,
    pub(crate) out: FloatParts<'a>,
    pub(crate) dropout: Option<Dropout>,
}

/// See [`crate::op::LayerNorm`].
pub(crate) struct LayerNormArgs<'a> {
    pub(crate) input: Floats<'a>,
    pub(crate) residual: Option<ResidualArgs<'a>>,
    pub(crate) weight: &'a [f32],
    pub(crate) bias: &'a [f32],
    pub(crate) out: FloatParts<'a>,
    pub(crate) mean: &'a mut [f32],
    pub(crate) rstd: &'a mut [f32],
    pub(crate) rows: usize,
    pub(crate) width: usize,
    pub(crate) epsilon: f32,
}

pub(crate) fn layer_norm(threads: &Threads, args: LayerNormArgs<'_>) {
    let LayerNormArgs { input, residual, weight, bias, out, mean, rstd, rows, width, epsilon } = args;
    if out.len() == 0 {
        return;
    }
    let (mean, rstd) = (Parts::new(mean), Parts::new(rstd));
    each_task(threads, rows, width, |first, count| {
        let (mut of_delta, mut of_stream, mut of_sum, mut of_out) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for row in first..first + count {
            let range = row * width..(row + 1) * width;
            let delta = input.part(range.clone(), &mut of_delta);
            // SAFETY: each row of each output belongs to one task.
            let (mean, rstd) = unsafe { (&mut mean.slice(row, 1)[0], &mut rstd.slice(row, 1)[0]) };
            let mut normalise = |x: &[f32]| {
                (*mean, *rstd) = statistics(x, epsilon);
                // SAFETY: as above.
                unsafe {
                    out.write(range.clone(), &mut of_out, |out| {
                        apply_row(x, weight, bias, *mean, *rstd, out)
                    });
                }
            };
            let Some(ResidualArgs { input: stream, out: sum, dropout }) = &residual else {
                normalise(delta);
                continue;
            };
            let stream = stream.part(range.clone(), &mut of_stream);
            let add = |sum: &mut [f32]| {
                sum.copy_from_slice(delta);
                if let Some(dropout) = dropout {
                    drop_piece(sum, range.start as u64, dropout);
                }
                add_row(sum, stream);
            };
            // SAFETY: as above. What is normalised is the sum as it is stored, since that is what backward reads.
            unsafe {
                sum.write(range.clone(), &mut of_sum, add);
                sum.read(range.clone(), &mut of_sum, normalise);
            }
        }
    });
}

/// See [`crate::op::LayerNormApply`].
pub(crate) fn layer_norm_apply(
    threads: &Threads,
    input: Floats<'_>,
    weight: &[f32],
    bias: &[f32],
    mean: &[f32],
    rstd: &[f32],
    out: &FloatParts<'_>,
    width: usize,
) {
    let rows = mean.len();
    each_task(threads, rows, width, |first, count| {
        let (mut of_input, mut of_out) = (Vec::new(), Vec::new());
        for row in first..first + count {
            let range = row * width..(row + 1) * width;
            let x = input.part(range.clone(), &mut of_input);
            // SAFETY: each row belongs to one task.
            unsafe {
                out.write(range, &mut of_out, |out| apply_row(x, weight, bias, mean[row], rstd[row], out))
            };
        }
    });
}

/// See [`crate::op::LayerNormBackward`].
pub(crate) struct LayerNormBackwardArgs<'a> {
    pub(crate) dout: Floats<'a>,
    pub(crate) input: Floats<'a>,
    pub(crate) weight: &'a [f32],
    pub(crate) mean: &'a [f32],
    pub(crate) rstd: &'a [f32],
    pub(crate) dinput: FloatParts<'a>,
    pub(crate) accumulate: bool,
    pub(crate) ddelta: Option<(FloatParts<'a>, Dropout)>,
    pub(crate) dweight: &'a mut [f32],
    pub(crate) dbias: &'a mut [f32],
    pub(crate) workspace: &'a mut [f32],
    pub(crate) rows: usize,
    pub(crate) width: usize,
}

pub(crate) fn layer_norm_backward(threads: &Threads, args: LayerNormBackwardArgs<'_>) {
    let LayerNormBackwardArgs { dout, input, weight, mean, rstd, dinput, accumulate, .. } = args;
    let LayerNormBackwardArgs { ddelta, dweight, dbias, workspace, rows, width, .. } = args;
    let blocks = rows.div_ceil(REDUCE_ROWS);
    let bytes = 12 * dout.len();
    let partials = Parts::new(&mut *workspace);
    threads.for_each(blocks, bytes, |block| {
        // SAFETY: each block of rows, and its partial sums, belong to one task.
        let (dweight, dbias) = unsafe {
            (partials.slice(2 * block * width, width), partials.slice((2 * block + 1) * width, width))
        };
        dweight.fill(0.0);
        dbias.fill(0.0);
        let mut scratch: [Vec<f32>; 4] = Default::default();
        let [of_dout, of_input, of_dinput, of_ddelta] = &mut scratch;
        for row in block * REDUCE_ROWS..rows.min((block + 1) * REDUCE_ROWS) {
            let range = row * width..(row + 1) * width;
            let (dout, x) = (dout.part(range.clone(), of_dout), input.part(range.clone(), of_input));
            let of_row = |gradient: &mut [f32]| {
                backward_row(dout, x, weight, mean[row], rstd[row], gradient, accumulate, dweight, dbias);
                let Some((ddelta, dropout)) = &ddelta else { return };
                // SAFETY: as above.
                unsafe {
                    ddelta.write(range.clone(), of_ddelta, |ddelta| {
                        ddelta.copy_from_slice(gradient);
                        drop_piece(ddelta, range.start as u64, dropout);
                    });
                }
            };
            // SAFETY: as above.
            unsafe {
                match accumulate {
                    true => dinput.update(range.clone(), of_dinput, of_row),
                    false => dinput.write(range.clone(), of_dinput, of_row),
                }
            }
        }
    });
    add_blocks(&workspace[..2 * blocks * width], 2 * width, 0, dweight);
    add_blocks(&workspace[..2 * blocks * width], 2 * width, width, dbias);
}

fn each_task(threads: &Threads, rows: usize, width: usize, work: impl Fn(usize, usize) + Send + Sync) {
    let rows_a_task = (TASK / width.max(1)).max(1);
    threads.for_each(rows.div_ceil(rows_a_task), 8 * rows * width, |task| {
        let first = task * rows_a_task;
        work(first, rows_a_task.min(rows - first));
    });
}

#[multiversion(targets("x86_64+avx2+fma"))]
fn add_row(sum: &mut [f32], stream: &[f32]) {
    sum.iter_mut().zip(stream).for_each(|(delta, x)| *delta += x);
}

/// Mean and reciprocal standard deviation.
#[multiversion(targets("x86_64+avx2+fma"))]
fn statistics(x: &[f32], epsilon: f32) -> (f32, f32) {
    let width = x.len() as f32;
    let mean = sum(x) / width;
    let variance = sum_of(x, x, |x, _| (x - mean) * (x - mean)) / width;
    (mean, 1.0 / (variance + epsilon).sqrt())
}

#[multiversion(targets("x86_64+avx2+fma"))]
fn apply_row(x: &[f32], weight: &[f32], bias: &[f32], mean: f32, rstd: f32, out: &mut [f32]) {
    for (((out, x), weight), bias) in out.iter_mut().zip(x).zip(weight).zip(bias) {
        *out = (x - mean) * rstd * weight + bias;
    }
}

#[multiversion(targets("x86_64+avx2+fma"))]
fn backward_row(
    dout: &[f32],
    x: &[f32],
    weight: &[f32],
    mean: f32,
    rstd: f32,
    dinput: &mut [f32],
    accumulate: bool,
    dweight: &mut [f32],
    dbias: &mut [f32],
) {
    let width = dout.len() as f32;
    let mean_g = sum_of(dout, weight, |dout, weight| dout * weight) / width;
    // mean(g ∘ x̂), with the gradients of gain and shift on the way.
    let mut lanes = [0.0; 16];
    let mut mean_gx = 0.0;
    let mut tail = 0;
    let whole = dout.len() / 16 * 16;
    for i in (0..whole).step_by(16) {
        for l in 0..16 {
            let normed = (x[i + l] - mean) * rstd;
            lanes[l] += dout[i + l] * weight[i + l] * normed;
            dweight[i + l] += dout[i + l] * normed;
            dbias[i + l] += dout[i + l];
        }
        tail = i + 16;
    }
    for i in tail..dout.len() {
        let normed = (x[i] - mean) * rstd;
        mean_gx += dout[i] * weight[i] * normed;
        dweight[i] += dout[i] * normed;
        dbias[i] += dout[i];
    }
    let mean_gx = (lanes.iter().fold(0.0, |sum, lane| sum + lane) + mean_gx) / width;
    let gradient = |dout: f32, x: f32, weight: f32| {
        let normed = (x - mean) * rstd;
        rstd * (dout * weight - mean_g - normed * mean_gx)
    };
    let rows = dinput.iter_mut().zip(dout).zip(x).zip(weight);
    match accumulate {
        true => rows.for_each(|(((dinput, &dout), &x), &weight)| *dinput += gradient(dout, x, weight)),
        false => rows.for_each(|(((dinput, &dout), &x), &weight)| *dinput = gradient(dout, x, weight)),
    }
}
