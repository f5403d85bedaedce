//! What tells whether two tensors are the same.

use std::sync::atomic::{AtomicU32, Ordering};

use multiversion::multiversion;
use xxhash_rust::xxh3::xxh3_64;

use super::{
    elementwise::PIECE,
    float::Floats,
    threads::{Parts, Threads},
};

/// `max |input - other|`, as [`crate::Op::MaxDifference`] has it.
pub(crate) fn max_difference(threads: &Threads, input: Floats<'_>, other: Floats<'_>) -> f32 {
    // Of floats that are not negative the bits are in the order of the values.
    let most = AtomicU32::new(0);
    threads.for_each(input.len().div_ceil(PIECE), input.bytes(), |piece| {
        let range = piece * PIECE..input.len().min((piece + 1) * PIECE);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        let difference = max_of_piece(input.part(range.clone(), &mut a), other.part(range, &mut b));
        most.fetch_max(difference.to_bits(), Ordering::Relaxed);
    });
    f32::from_bits(most.into_inner())
}

#[multiversion(targets("x86_64+avx2+fma"))]
fn max_of_piece(input: &[f32], other: &[f32]) -> f32 {
    input.iter().zip(other).fold(0.0f32, |most, (a, b)| {
        let difference = match (a.is_finite(), b.is_finite()) {
            (true, true) => (a - b).abs(),
            (false, false) => 0.0,
            _ => f32::INFINITY,
        };
        most.max(difference)
    })
}

/// A checksum of the bytes: XXH3 of the XXH3 of each mebibyte, so that threads can share the work.
pub(crate) fn checksum(threads: &Threads, input: &[u8]) -> u64 {
    const PIECE_BYTES: usize = 1 << 20;
    let mut sums = vec![0u64; input.len().div_ceil(PIECE_BYTES)];
    let pieces = sums.len();
    let parts = Parts::new(&mut sums);
    threads.for_each(pieces, input.len(), |piece| {
        let range = piece * PIECE_BYTES..input.len().min((piece + 1) * PIECE_BYTES);
        // SAFETY: each piece has an element to itself.
        let sum = unsafe { parts.slice(piece, 1) };
        sum[0] = xxh3_64(&input[range]);
    });
    xxh3_64(bytemuck::cast_slice(&sums))
}
