//! Operations that meet each element by itself, and those that only move bytes.
//!
//! Work is cut into pieces of [`PIECE`] elements whatever the thread count. Cost: memory traffic; GELU and dropout
//! compute about as long as they read.

use multiversion::multiversion;

use super::{
    float::{FloatParts, Floats},
    math::{gelu_erf, gelu_erf_slope, gelu_tanh, gelu_tanh_slope},
    threads::{Parts, Threads},
};
use crate::op::{Dropout, GeluKind};

/// Elements of a piece: 64 KiB of f32.
pub(super) const PIECE: usize = 16 << 10;

/// Calls `work` with each piece of `out` and the index of its first element.
pub(super) fn each_piece<T: Send>(
    threads: &Threads,
    out: &mut [T],
    work: impl Fn(usize, &mut [T]) + Send + Sync,
) {
    let (len, bytes) = (out.len(), size_of_val(out));
    let parts = Parts::new(out);
    threads.for_each(len.div_ceil(PIECE), bytes, |piece| {
        let first = piece * PIECE;
        // SAFETY: pieces do not overlap.
        work(first, unsafe { parts.slice(first, PIECE.min(len - first)) });
    });
}

/// Calls `work` with each piece of `out` as f32, to read and write, and the index of its first element.
pub(super) fn each_float_piece(
    threads: &Threads,
    out: &FloatParts<'_>,
    reads: bool,
    work: impl Fn(usize, &mut [f32]) + Send + Sync,
) {
    let len = out.len();
    threads.for_each(len.div_ceil(PIECE), 4 * len, |piece| {
        let first = piece * PIECE;
        let (range, mut scratch) = (first..len.min(first + PIECE), Vec::new());
        // SAFETY: pieces do not overlap.
        unsafe {
            match reads {
                true => out.update(range, &mut scratch, |out| work(first, out)),
                false => out.write(range, &mut scratch, |out| work(first, out)),
            }
        }
    });
}

/// `out = value`, of any element type.
pub(crate) fn fill<T: Copy + Send + Sync>(threads: &Threads, out: &mut [T], value: T) {
    each_piece(threads, out, |_, out| out.fill(value));
}

/// `out = input`.
pub(crate) fn copy(threads: &Threads, input: &[u8], out: &mut [u8]) {
    // Bytes a piece: as many as 16 pieces of f32 have, since a copy computes nothing.
    const BYTES: usize = 64 * PIECE;
    let len = out.len();
    assert_eq!(input.len(), len);
    let parts = Parts::new(out);
    threads.for_each(len.div_ceil(BYTES), len, |piece| {
        let range = piece * BYTES..len.min((piece + 1) * BYTES);
        // SAFETY: pieces do not overlap.
        unsafe { parts.slice(range.start, range.len()) }.copy_from_slice(&input[range]);
    });
}

/// `out += input`.
pub(crate) fn add(threads: &Threads, input: Floats<'_>, out: &FloatParts<'_>) {
    each_float_piece(threads, out, true, |first, out| {
        add_piece(input.part(first..first + out.len(), &mut Vec::new()), out);
    });
}

#[multiversion(targets("x86_64+avx2+fma"))]
fn add_piece(input: &[f32], out: &mut [f32]) {
    out.iter_mut().zip(input).for_each(|(out, input)| *out += input);
}

/// `data = dropout(data)`, whose first element has index 0.
pub(crate) fn dropout(threads: &Threads, data: &FloatParts<'_>, dropout: &Dropout) {
    each_float_piece(threads, data, true, |first, data| drop_piece(data, first as u64, dropout));
}

/// Multiplies consecutive elements, the first of index `first`, by their dropout factors.
#[multiversion(targets("x86_64+avx2+fma"))]
pub(super) fn drop_piece(data: &mut [f32], first: u64, dropout: &Dropout) {
    let mut factors = [0.0; 256];
    for (i, data) in data.chunks_mut(factors.len()).enumerate() {
        let factors = &mut factors[..data.len()];
        dropout.fill_factors(first + 256 * i as u64, factors);
        data.iter_mut().zip(factors).for_each(|(x, factor)| *x *= *factor);
    }
}

/// `out = gelu(input)`.
pub(crate) fn gelu(threads: &Threads, input: Floats<'_>, out: &FloatParts<'_>, kind: GeluKind) {
    each_float_piece(threads, out, false, |first, out| {
        gelu_piece(input.part(first..first + out.len(), &mut Vec::new()), out, kind);
    });
}

#[multiversion(targets("x86_64+avx2+fma"))]
fn gelu_piece(input: &[f32], out: &mut [f32], kind: GeluKind) {
    match kind {
        GeluKind::Tanh => out.iter_mut().zip(input).for_each(|(out, &x)| *out = gelu_tanh(x)),
        GeluKind::Erf => out.iter_mut().zip(input).for_each(|(out, &x)| *out = gelu_erf(x)),
    }
}

/// `gradient *= gelu'(input)`.
pub(crate) fn gelu_backward(threads: &Threads, input: Floats<'_>, gradient: &FloatParts<'_>, kind: GeluKind) {
    each_float_piece(threads, gradient, true, |first, gradient| {
        gelu_backward_piece(input.part(first..first + gradient.len(), &mut Vec::new()), gradient, kind);
    });
}

#[multiversion(targets("x86_64+avx2+fma"))]
fn gelu_backward_piece(input: &[f32], gradient: &mut [f32], kind: GeluKind) {
    match kind {
        GeluKind::Tanh => gradient.iter_mut().zip(input).for_each(|(g, &x)| *g *= gelu_tanh_slope(x)),
        GeluKind::Erf => gradient.iter_mut().zip(input).for_each(|(g, &x)| *g *= gelu_erf_slope(x)),
    }
}
