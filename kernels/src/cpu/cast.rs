//! Conversions between f32, f16 and bf16, rounding to nearest even. The inner loops are the `half` crate's.
//!
//! NaN stays NaN; what is too large for f16 becomes an infinity, as IEEE 754 has it.

use half::{bf16, f16, slice::HalfFloatSliceExt};

use super::{elementwise::each_piece, threads::Threads};
use crate::Element;

/// An element type of floats.
pub(crate) trait Float: Element {
    /// Converts to f32, exactly.
    fn widen(input: &[Self], out: &mut [f32]);
    /// Converts from f32, to nearest even.
    fn narrow(input: &[f32], out: &mut [Self]);
}

impl Float for f32 {
    fn widen(input: &[f32], out: &mut [f32]) {
        out.copy_from_slice(input);
    }
    fn narrow(input: &[f32], out: &mut [f32]) {
        out.copy_from_slice(input);
    }
}

impl Float for f16 {
    fn widen(input: &[f16], out: &mut [f32]) {
        input.convert_to_f32_slice(out);
    }
    fn narrow(input: &[f32], out: &mut [f16]) {
        out.convert_from_f32_slice(input);
    }
}

impl Float for bf16 {
    fn widen(input: &[bf16], out: &mut [f32]) {
        input.convert_to_f32_slice(out);
    }
    fn narrow(input: &[f32], out: &mut [bf16]) {
        out.convert_from_f32_slice(input);
    }
}

/// `out = input`, converted.
pub(crate) fn cast<From: Float, To: Float>(threads: &Threads, input: &[From], out: &mut [To]) {
    each_piece(threads, out, |first, out| {
        let input = &input[first..first + out.len()];
        let mut wide = [0.0; 256];
        for (input, out) in input.chunks(wide.len()).zip(out.chunks_mut(wide.len())) {
            let wide = &mut wide[..input.len()];
            From::widen(input, wide);
            To::narrow(wide, out);
        }
    });
}
