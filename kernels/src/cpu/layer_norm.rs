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
    math::{sum, sum_of},
    reduce::add_blocks,
    threads::{Parts, Threads},
};
use crate::op::{Dropout, REDUCE_ROWS};

/// Elements that a task of the forward pass covers, about.
const TASK: usize = 16 << 10;

/// `input + dropout(delta)` on its way into a norm.
pub(crate) struct ResidualArgs<'a> {
    pub(crate) input: &'a [f32],
    pub(crate) out: &'a mut [f32],
    pub(crate) dropout: Option<Dropout>,
}

/// See [`crate::op::LayerNorm`].
pub(crate) struct LayerNormArgs<'a> {
    pub(crate) input: &'a [f32],
    pub(crate) residual: Option<ResidualArgs<'a>>,
    pub(crate) weight: &'a [f32],
    pub(crate) bias: &'a [f32],
    pub(crate) out: &'a mut [f32],
    pub(crate) mean: &'a mut [f32],
    pub(crate) rstd: &'a mut [f32],
    pub(crate) rows: usize,
    pub(crate) width: usize,
    pub(crate) epsilon: f32,
}

pub(crate) fn layer_norm(threads: &Threads, args: LayerNormArgs<'_>) {
    let LayerNormArgs { input, residual, weight, bias, out, mean, rstd, rows, width, epsilon } = args;
    if out.is_empty() {
        return;
    }
    let (out, mean, rstd) = (Parts::new(out), Parts::new(mean), Parts::new(rstd));
    let residual = residual.map(|r| (r.input, Parts::new(r.out), r.dropout));
    each_task(threads, rows, width, |first, count| {
        for row in first..first + count {
            let at = row * width;
            let delta = &input[at..at + width];
            // SAFETY: each row of each output belongs to one task.
            let (out, mean, rstd) =
                unsafe { (out.slice(at, width), &mut mean.slice(row, 1)[0], &mut rstd.slice(row, 1)[0]) };
            let x = match &residual {
                Some((stream, sum, dropout)) => {
                    // SAFETY: as above.
                    let sum = unsafe { sum.slice(at, width) };
                    sum.copy_from_slice(delta);
                    if let Some(dropout) = dropout {
                        drop_piece(sum, at as u64, dropout);
                    }
                    add_row(sum, &stream[at..at + width]);
                    &*sum
                }
                None => delta,
            };
            (*mean, *rstd) = statistics(x, epsilon);
            apply_row(x, weight, bias, *mean, *rstd, out);
        }
    });
}

/// See [`crate::op::LayerNormApply`].
pub(crate) fn layer_norm_apply(
    threads: &Threads,
    input: &[f32],
    weight: &[f32],
    bias: &[f32],
    mean: &[f32],
    rstd: &[f32],
    out: &mut [f32],
    width: usize,
) {
    let rows = mean.len();
    let out = Parts::new(out);
    each_task(threads, rows, width, |first, count| {
        for row in first..first + count {
            let at = row * width;
            // SAFETY: each row belongs to one task.
            let out = unsafe { out.slice(at, width) };
            apply_row(&input[at..at + width], weight, bias, mean[row], rstd[row], out);
        }
    });
}

/// See [`crate::op::LayerNormBackward`].
pub(crate) struct LayerNormBackwardArgs<'a> {
    pub(crate) dout: &'a [f32],
    pub(crate) input: &'a [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) mean: &'a [f32],
    pub(crate) rstd: &'a [f32],
    pub(crate) dinput: &'a mut [f32],
    pub(crate) accumulate: bool,
    pub(crate) ddelta: Option<(&'a mut [f32], Dropout)>,
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
    let bytes = 3 * size_of_val(dout);
    let dinput = Parts::new(dinput);
    let ddelta = ddelta.map(|(ddelta, dropout)| (Parts::new(ddelta), dropout));
    let partials = Parts::new(&mut *workspace);
    threads.for_each(blocks, bytes, |block| {
        // SAFETY: each block of rows, and its partial sums, belong to one task.
        let (dweight, dbias) = unsafe {
            (partials.slice(2 * block * width, width), partials.slice((2 * block + 1) * width, width))
        };
        dweight.fill(0.0);
        dbias.fill(0.0);
        for row in block * REDUCE_ROWS..rows.min((block + 1) * REDUCE_ROWS) {
            let at = row * width;
            // SAFETY: as above.
            let dinput = unsafe { dinput.slice(at, width) };
            let (dout, x) = (&dout[at..at + width], &input[at..at + width]);
            backward_row(dout, x, weight, mean[row], rstd[row], dinput, accumulate, dweight, dbias);
            if let Some((ddelta, dropout)) = &ddelta {
                // SAFETY: as above.
                let ddelta = unsafe { ddelta.slice(at, width) };
                ddelta.copy_from_slice(dinput);
                drop_piece(ddelta, at as u64, dropout);
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
