//! Dynamic loss scaling: the pass over the scaled gradients, and the scale's own step.
//!
//! Cost: a read and a write of the gradients; the scale's step touches a few numbers.

use std::sync::atomic::{AtomicBool, Ordering};

use multiversion::multiversion;

use super::{
    elementwise::PIECE,
    math::LANES,
    threads::{Parts, Threads},
};
use crate::op::{ScalerCounter, ScalerRules};

/// See [`crate::Op::Unscale`]: whether an element was not finite before or after, and the sum of squares after.
pub(crate) fn unscale(threads: &Threads, gradients: &mut [f32], scale: f32) -> (bool, f64) {
    // As PyTorch works it out.
    let inverse = (1.0 / f64::from(scale)) as f32;
    let (len, bytes) = (gradients.len(), size_of_val(gradients));
    let mut sums = vec![0.0; len.div_ceil(PIECE)];
    let found = AtomicBool::new(false);
    let (parts, of_pieces) = (Parts::new(gradients), Parts::new(&mut sums));
    threads.for_each(len.div_ceil(PIECE), bytes, |piece| {
        let first = piece * PIECE;
        // SAFETY: pieces do not overlap, and each has a sum to itself.
        let (gradients, sum) =
            unsafe { (parts.slice(first, PIECE.min(len - first)), of_pieces.slice(piece, 1)) };
        let (finite, squares) = unscale_piece(gradients, inverse);
        if !finite {
            found.store(true, Ordering::Relaxed);
        }
        sum[0] = squares;
    });
    (found.into_inner(), sums.iter().sum())
}

#[multiversion(targets("x86_64+avx2+fma"))]
fn unscale_piece(gradients: &mut [f32], inverse: f32) -> (bool, f64) {
    let mut lanes = [0.0f64; LANES];
    let mut finite = [true; LANES];
    let mut chunks = gradients.chunks_exact_mut(LANES);
    let mut of_chunk = |chunk: &mut [f32]| {
        for ((g, lane), finite) in chunk.iter_mut().zip(&mut lanes).zip(&mut finite) {
            let unscaled = *g * inverse;
            *finite &= g.is_finite() & unscaled.is_finite();
            *g = unscaled;
            *lane += f64::from(unscaled) * f64::from(unscaled);
        }
    };
    (&mut chunks).for_each(&mut of_chunk);
    of_chunk(chunks.into_remainder());
    (finite.iter().all(|&finite| finite), lanes.iter().sum())
}

/// See [`crate::Op::ScalerUpdate`].
pub(crate) fn scaler_update(scale: &mut f32, counters: &mut [u32], found_inf: &mut f32, rules: &ScalerRules) {
    let at = |counter: ScalerCounter| counter as usize;
    if *found_inf != 0.0 {
        *found_inf = 0.0;
        counters[at(ScalerCounter::Skipped)] += 1;
        counters[at(ScalerCounter::Growth)] = 0;
        let at_floor = *scale <= rules.floor;
        counters[at(ScalerCounter::AtFloor)] =
            if at_floor { counters[at(ScalerCounter::AtFloor)] + 1 } else { 0 };
        counters[at(ScalerCounter::Overflows)] += 1;
        if counters[at(ScalerCounter::Overflows)] >= rules.hysteresis {
            *scale = (*scale * rules.backoff).max(rules.floor);
        }
        return;
    }
    counters[at(ScalerCounter::Applied)] += 1;
    counters[at(ScalerCounter::AtFloor)] = 0;
    counters[at(ScalerCounter::Growth)] += 1;
    if counters[at(ScalerCounter::Growth)] >= rules.interval {
        counters[at(ScalerCounter::Growth)] = 0;
        counters[at(ScalerCounter::Overflows)] = 0;
        let grown = *scale * rules.growth;
        if grown.is_finite() {
            *scale = grown;
        }
    }
}
