//! What any backend computes, held against the `cpu` backend.

use ebbtide_kernels::{
    DType, Op, Slice,
    op::{Gemm, Mode},
};
use half::{bf16, f16};

use super::{
    Bench,
    ops::{self, New, SMALL, Sizes, operands},
    random,
};

pub(crate) fn floats(bytes: &[u8], dtype: DType) -> Vec<f32> {
    match dtype {
        DType::F16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        DType::BF16 => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        DType::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        DType::U8 => bytes.iter().map(|&b| f32::from(b)).collect(),
        DType::U32 | DType::I32 => {
            bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]) as f32).collect()
        }
    }
}

pub(crate) fn bytes_of(bench: &Bench, slice: &Slice) -> Vec<u8> {
    bench.down(&slice.as_bytes())
}

/// Both compute in f32 and round once where they store: results may be neighbours of 16 bits. A sum of `terms` in another order is off
/// by `terms · 2⁻²⁴` of the largest; the device's exponential, of 2 units in the last place, adds that much for each.
pub(crate) fn close(what: &str, found: &[f32], expected: &[f32], dtype: DType, terms: usize, extra: f32) {
    let unit = unit(dtype);
    let largest = expected.iter().fold(1e-3f32, |largest, x| largest.max(x.abs()));
    let sum = if unit == 0.0 { 0.0 } else { 3.0 * (terms + 8) as f32 * 2f32.powi(-24) * largest };
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let same = found.to_bits() == expected.to_bits();
        let most = unit * expected.abs() + sum + extra;
        assert!(
            same || (found - expected).abs() <= most,
            "{what}: [{i}] is {found}, not {expected} (at most {most} apart)"
        );
    }
}

/// The distance of neighbours about 1; for f32, of 16 of them.
pub(crate) fn unit(dtype: DType) -> f32 {
    match dtype {
        DType::F16 => 2f32.powi(-10),
        DType::BF16 => 2f32.powi(-7),
        DType::F32 => 2f32.powi(-20),
        DType::U8 | DType::U32 | DType::I32 => 0.0,
    }
}

/// Whether operand `index` of the op may be of 16 bits.
pub(crate) fn may_be_narrow(make: fn(Sizes, New<'_>) -> Op, bench: &Bench, index: usize) -> bool {
    let mut at = 0;
    let mut own = DType::F32;
    let op = make(SMALL, &mut |len, dtype| {
        at += 1;
        if at - 1 == index {
            own = dtype;
        }
        bench.alloc(len, if at - 1 == index { DType::F16 } else { dtype })
    });
    own == DType::F32 && op.check().is_ok()
}

/// Numbers that make sense for each operand.
pub(crate) fn write_inputs(bench: &Bench, op: &Op, seed: u64) {
    ops::write_inputs(bench, op, seed);
    for (name, slice, mode) in operands(op) {
        if mode != Mode::Write && name == "rstd" {
            let positive: Vec<f32> = random(seed, slice.len()).iter().map(|x| x.abs() + 0.1).collect();
            bench.run(Op::Copy { input: bench.up(&positive), out: slice });
        }
    }
}

/// The library of products takes a bias of the result's type: biases, of at most 1 here, are rounded once more.
pub(crate) fn extra(op: &Op) -> f32 {
    match op {
        Op::Gemm(Gemm { bias: Some(bias), out, .. }) if bias.dtype() != out.dtype() => {
            unit(out.dtype()) / 2.0
        }
        _ => 0.0,
    }
}
