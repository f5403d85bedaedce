//! Sums: over the rows of a matrix, and over everything.
//!
//! Partial sums cover a fixed number of rows or elements and are added in order, so a result depends on the shape alone.

use multiversion::multiversion;

use super::{
    elementwise::PIECE,
    float::Floats,
    math::LANES,
    threads::{Parts, Threads},
};
use crate::op::REDUCE_ROWS;

/// See [`crate::Op::BiasBackward`].
pub(crate) fn bias_backward(
    threads: &Threads,
    dout: Floats<'_>,
    dbias: &mut [f32],
    workspace: &mut [f32],
    rows: usize,
    width: usize,
) {
    let blocks = rows.div_ceil(REDUCE_ROWS);
    let partials = Parts::new(&mut *workspace);
    threads.for_each(blocks, dout.bytes(), |block| {
        // SAFETY: each block has a row of the workspace to itself.
        let partial = unsafe { partials.slice(block * width, width) };
        let last = rows.min((block + 1) * REDUCE_ROWS);
        add_rows(dout.part(block * REDUCE_ROWS * width..last * width, &mut Vec::new()), partial);
    });
    add_blocks(&workspace[..blocks * width], width, 0, dbias);
}

#[multiversion(targets("x86_64+avx2+fma"))]
fn add_rows(rows: &[f32], out: &mut [f32]) {
    let width = out.len().max(1);
    out.fill(0.0);
    for row in rows.chunks_exact(width) {
        out.iter_mut().zip(row).for_each(|(out, x)| *out += x);
    }
}

/// `out[j] += Σ over blocks of partials[block · stride + first + j]`, in order.
pub(super) fn add_blocks(partials: &[f32], stride: usize, first: usize, out: &mut [f32]) {
    let width = out.len();
    let mut sum = vec![0.0f32; width];
    for block in partials.chunks_exact(stride.max(1)) {
        sum.iter_mut().zip(&block[first..first + width]).for_each(|(sum, x)| *sum += x);
    }
    out.iter_mut().zip(sum).for_each(|(out, sum)| *out += sum);
}

/// `Σ x`, in f64.
pub(crate) fn sum(threads: &Threads, input: Floats<'_>) -> f64 {
    in_pieces(threads, input, sum_piece)
}

/// `Σ x²`, in f64.
pub(crate) fn sum_squares(threads: &Threads, input: Floats<'_>) -> f64 {
    in_pieces(threads, input, sum_squares_piece)
}

fn in_pieces(threads: &Threads, input: Floats<'_>, piece_sum: impl Fn(&[f32]) -> f64 + Send + Sync) -> f64 {
    let pieces = input.len().div_ceil(PIECE);
    let mut sums = vec![0.0; pieces];
    let parts = Parts::new(&mut sums);
    threads.for_each(pieces, input.bytes(), |piece| {
        // SAFETY: each piece has an element to itself.
        let sum = unsafe { parts.slice(piece, 1) };
        let range = piece * PIECE..input.len().min((piece + 1) * PIECE);
        sum[0] = piece_sum(input.part(range, &mut Vec::new()));
    });
    sums.iter().sum()
}

#[multiversion(targets("x86_64+avx2+fma"))]
fn sum_piece(piece: &[f32]) -> f64 {
    sum_f64(piece, |x| x)
}

#[multiversion(targets("x86_64+avx2+fma"))]
fn sum_squares_piece(piece: &[f32]) -> f64 {
    sum_f64(piece, |x| x * x)
}

#[inline(always)]
fn sum_f64(piece: &[f32], f: impl Fn(f64) -> f64) -> f64 {
    let mut lanes = [0.0; LANES];
    let chunks = piece.chunks_exact(LANES);
    let rest: f64 = chunks.remainder().iter().map(|&x| f(f64::from(x))).sum();
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, &x)| *lane += f(f64::from(x)));
    }
    lanes.iter().sum::<f64>() + rest
}

/// See [`crate::Op::ClipCoefficient`]: the norm and the coefficient. A norm that is not finite gives a coefficient that
/// poisons what it multiplies, as PyTorch's does.
pub(crate) fn clip_coefficient(sum_squares: &[f32], max_norm: f32) -> (f32, f32) {
    let norm = sum_squares.iter().map(|&x| f64::from(x)).sum::<f64>().sqrt() as f32;
    let coefficient = max_norm / (norm + 1e-6);
    // Not `min`, which would make 1 of NaN.
    (norm, if coefficient > 1.0 { 1.0 } else { coefficient })
}
