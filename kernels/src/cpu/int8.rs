//! Symmetric int8 with one f32 scale a group of consecutive elements.
//!
//! An encoded block holds the scales of all groups, then the codes, one byte an element. A code is in −127…127, or −128 for
//! an element that is not finite, which comes back as NaN: an overflow stays visible.
//!
//! The scale `s` is `amax / 127` of the group's finite elements, cut to 16 significant bits, so that `code · s` is exact in
//! f32; where that would be subnormal it is the least power of two with `127 s ≥ amax`. The code nearest to `x / s` is put
//! right by the exact remainder `x − code · s`, so for every finite element, rounded to nearest,
//! `|x − code · s| ≤ s / 2` holds exactly. Stochastic rounding gives one of the two neighbours: at most `s (1 + 2⁻¹⁶)`.
//!
//! Cost: encoding reads 4 bytes an element and writes 1, decoding the reverse; a division an element.

use multiversion::multiversion;

use super::{
    float::{FloatParts, Floats},
    threads::{Parts, Threads},
};
use crate::{op::Rounding, rng::philox4x32_blocks};

/// Groups that a task covers, at most 64 KiB of f32.
const TASK_GROUPS: usize = 64;
/// What stands for an element that is not finite.
const NOT_FINITE: i8 = -128;
/// 1.5 · 2^23: adding it rounds to an integer, half to even, which is then in the low bits.
const ROUND: f32 = 12_582_912.0;

/// See [`crate::Op::Int8Encode`].
pub(crate) fn int8_encode(
    threads: &Threads,
    input: Floats<'_>,
    out: &mut [u8],
    group: usize,
    rounding: Rounding,
) {
    let groups = input.len().div_ceil(group);
    let (scales, codes) = out.split_at_mut(4 * groups);
    let (scales, codes) = (Parts::new(scales), Parts::new(codes));
    threads.for_each(groups.div_ceil(TASK_GROUPS), input.bytes(), |task| {
        let first = task * TASK_GROUPS;
        let elements = first * group..input.len().min((first + TASK_GROUPS) * group);
        let groups = elements.len().div_ceil(group);
        // SAFETY: tasks cover distinct groups.
        let (scales, codes) =
            unsafe { (scales.slice(4 * first, 4 * groups), codes.slice(elements.start, elements.len())) };
        let mut scratch = Vec::new();
        let input = input.part(elements.clone(), &mut scratch);
        match rounding {
            Rounding::Nearest => encode_nearest(input, scales, codes, group),
            Rounding::Stochastic { seed, site, step } => {
                // A group starts at a multiple of 64, so at a block of the generator.
                let first = elements.start as u64 / 4;
                encode_stochastic(input, scales, codes, group, first, (seed, site, step));
            }
        }
    });
}

/// See [`crate::Op::Int8Decode`].
pub(crate) fn int8_decode(threads: &Threads, input: &[u8], out: &FloatParts<'_>, group: usize) {
    let len = out.len();
    let groups = len.div_ceil(group);
    let (scales, codes) = input.split_at(4 * groups);
    threads.for_each(groups.div_ceil(TASK_GROUPS), 4 * len, |task| {
        let first = task * TASK_GROUPS;
        let elements = first * group..len.min((first + TASK_GROUPS) * group);
        let codes = &codes[elements.clone()];
        // SAFETY: tasks cover distinct groups.
        unsafe {
            out.write(elements, &mut Vec::new(), |out| decode(&scales[4 * first..], codes, out, group))
        };
    });
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
fn encode_nearest(input: &[f32], scales: &mut [u8], codes: &mut [u8], group: usize) {
    for ((x, scale_out), codes) in
        input.chunks(group).zip(scales.chunks_exact_mut(4)).zip(codes.chunks_mut(group))
    {
        let scale = scale_of(largest(x));
        scale_out.copy_from_slice(&scale.to_ne_bytes());
        let divisor = if scale == 0.0 { 1.0 } else { scale };
        let half = 0.5 * divisor;
        let inverse = 1.0 / divisor;
        if inverse.is_finite() {
            each(x, codes, |x| nearest_code(x, x * inverse, divisor, half));
        } else {
            // A step so small that its inverse is too large.
            each(x, codes, |x| nearest_code(x, x / divisor, divisor, half));
        }
    }
}

/// The code nearest to an element, of which `quotient` is `x / divisor` to within a few units in the last place.
#[inline(always)]
fn nearest_code(x: f32, quotient: f32, divisor: f32, half: f32) -> u8 {
    let shifted = quotient + ROUND;
    let nearest = shifted - ROUND;
    // Exact: 8 bits by 16, and a difference of at most a step.
    let rest = x - nearest * divisor;
    // The low byte of the shifted quotient is its code: at most 127, since the scale is hardly less than a 127th.
    let code =
        (shifted.to_bits() as u8).wrapping_add(u8::from(rest > half)).wrapping_sub(u8::from(rest < -half));
    if x.abs() <= f32::MAX { code } else { NOT_FINITE as u8 }
}

/// `codes[i] = code(x[i])`, in chunks of a fixed length that the compiler turns into vectors.
#[inline(always)]
fn each(x: &[f32], codes: &mut [u8], code: impl Fn(f32) -> u8) {
    let (x, x_rest) = x.as_chunks::<64>();
    let (codes, codes_rest) = codes.as_chunks_mut::<64>();
    for (x, codes) in x.iter().zip(codes) {
        for i in 0..64 {
            codes[i] = code(x[i]);
        }
    }
    x_rest.iter().zip(codes_rest).for_each(|(&x, out)| *out = code(x));
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
fn encode_stochastic(
    input: &[f32],
    scales: &mut [u8],
    codes: &mut [u8],
    group: usize,
    first: u64,
    (seed, site, step): (u64, u32, u32),
) {
    /// Blocks of the generator that are drawn at once.
    const BLOCKS: usize = 16;
    let mut block = first;
    for ((x, scale_out), codes) in
        input.chunks(group).zip(scales.chunks_exact_mut(4)).zip(codes.chunks_mut(group))
    {
        let scale = scale_of(largest(x));
        scale_out.copy_from_slice(&scale.to_ne_bytes());
        let divisor = if scale == 0.0 { 1.0 } else { scale };
        for (x, codes) in x.chunks(4 * BLOCKS).zip(codes.chunks_mut(4 * BLOCKS)) {
            let words = philox4x32_blocks::<BLOCKS>(block, site, step, seed);
            for ((&x, code), &word) in x.iter().zip(codes).zip(words.as_flattened()) {
                let fraction = (word >> 8) as f32 / (1 << 24) as f32;
                let below = (x / divisor).floor();
                // Whether the part above it exceeds the draw.
                let up = x / divisor - below > fraction;
                *code = code_of(x, if up { below + 1.0 } else { below });
            }
            block += BLOCKS as u64;
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+fma", "x86_64+avx2+fma"))]
fn decode(scales: &[u8], codes: &[u8], out: &mut [f32], group: usize) {
    for ((scale, codes), out) in scales.chunks_exact(4).zip(codes.chunks(group)).zip(out.chunks_mut(group)) {
        let scale = f32::from_ne_bytes([scale[0], scale[1], scale[2], scale[3]]);
        for (out, &code) in out.iter_mut().zip(codes) {
            let code = code as i8;
            let value = f32::from(code) * scale;
            *out = if code == NOT_FINITE { f32::NAN } else { value };
        }
    }
}

/// The code of an element whose quotient rounds to `nearest`.
#[inline(always)]
fn code_of(x: f32, nearest: f32) -> u8 {
    let nearest = if nearest > 127.0 { 127.0 } else { nearest };
    let nearest = if nearest < -127.0 { -127.0 } else { nearest };
    let code = (nearest + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i8;
    (if x.abs() <= f32::MAX { code } else { NOT_FINITE }) as u8
}

/// The largest magnitude of the finite elements.
#[inline(always)]
fn largest(x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 64];
    let chunks = x.chunks_exact(64);
    let rest = chunks.remainder();
    let finite = |x: f32| if x.abs() <= f32::MAX { x.abs() } else { 0.0 };
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, &x)| *lane = larger(*lane, finite(x)));
    }
    // In halves rather than one by one.
    for width in [32, 16, 8, 4, 2, 1] {
        let (low, high) = lanes.split_at_mut(width);
        low.iter_mut().zip(high).for_each(|(low, high)| *low = larger(*low, *high));
    }
    rest.iter().map(|&x| finite(x)).fold(lanes[0], larger)
}

/// See the module's docs.
#[inline(always)]
fn scale_of(largest: f32) -> f32 {
    let scale = largest / 127.0;
    if scale >= f32::MIN_POSITIVE {
        return f32::from_bits(scale.to_bits() & !0xFF);
    }
    if largest == 0.0 {
        return 0.0;
    }
    let mut scale = f32::from_bits(1);
    while 127.0 * scale < largest {
        scale *= 2.0;
    }
    scale
}
