//! 16-bit operands: every op gives what it would of the same numbers in f32, rounded once where it is stored, with the same bits
//! on any number of threads.
//!
//! The f32 ops are held against f64 formulas and finite differences elsewhere; with this, so are those of f16 and bf16.

mod common;

use common::{
    Bench, cpu,
    ops::{New, OPS, SMALL, Sizes, operands},
    random,
};
use ebbtide_kernels::{
    DType, Device, Op, SimOptions, Slice,
    op::{LayerNorm, Mode},
};
use proptest::prelude::*;

type Make = fn(Sizes, New<'_>) -> Op;

/// Which operands, in the order in which they are made, may be of 16 bits.
fn flexible(make: Make) -> Vec<bool> {
    let bench = Bench::new(cpu(1));
    let mut dtypes = Vec::new();
    make(SMALL, &mut |len, dtype| {
        dtypes.push(dtype);
        bench.alloc(len, dtype)
    });
    let may = |narrow: usize| {
        let mut at = 0;
        let op = make(SMALL, &mut |len, dtype| {
            at += 1;
            bench.alloc(len, if at - 1 == narrow { DType::F16 } else { dtype })
        });
        dtypes[narrow] == DType::F32 && op.check().is_ok()
    };
    (0..dtypes.len()).map(may).collect()
}

/// The op's results, in 16 bits where `narrow` says so: of an op whose operands are in 16 bits, or of the f32 op of the same
/// numbers, whose results are rounded after.
fn results(
    device: Device,
    make: Make,
    sizes: Sizes,
    narrow: &[bool],
    dtype: DType,
    rounded_after: bool,
    seed: u64,
) -> Vec<Vec<f32>> {
    let bench = Bench::new(device);
    let mut made: Vec<(u64, bool)> = Vec::new();
    let op = make(sizes, &mut |len, own| {
        let is_narrow = narrow[made.len()];
        let slice = bench.alloc(len, if is_narrow && !rounded_after { dtype } else { own });
        made.push((slice.buffer_id(), is_narrow));
        slice
    });
    let is_narrow = |slice: &Slice| made.iter().any(|&(id, narrow)| id == slice.buffer_id() && narrow);
    let round = |slice: &Slice| {
        let rounded = bench.alloc(slice.len(), dtype);
        bench.run(Op::Cast { input: slice.clone(), out: rounded.clone() });
        rounded
    };
    for ((name, slice, mode), seed) in operands(&op).into_iter().zip(seed..) {
        if mode == Mode::Write {
            continue;
        }
        let integers = |value: fn(u32) -> i32| -> Vec<i32> { (0..slice.len() as u32).map(value).collect() };
        let values = match slice.dtype() {
            // All three tokens; every third target is ignored.
            DType::U32 => {
                bench.up(&integers(|i| (i * i % 3) as i32).iter().map(|&i| i as u32).collect::<Vec<_>>())
            }
            DType::I32 => bench.up(&integers(|i| [2, -100, 1][i as usize % 3])),
            _ => {
                let positive = matches!(name, "second_moment" | "sum_squares" | "rstd");
                let numbers: Vec<f32> = random(seed, slice.len())
                    .into_iter()
                    .map(|x| if positive { x.abs() + 0.1 } else { x })
                    .collect();
                let numbers = bench.up(&numbers);
                if is_narrow(&slice) { round(&numbers) } else { numbers }
            }
        };
        match slice.dtype() {
            DType::U32 | DType::I32 => bench.run(Op::Copy { input: values, out: slice }),
            _ => bench.run(Op::Cast { input: values, out: slice }),
        }
    }
    bench.run(op.clone());
    if let Op::LayerNorm(norm) = &op
        && let Some(residual) = norm.residual.as_ref().filter(|residual| is_narrow(&residual.out))
        && rounded_after
    {
        // The statistics are of the stream as it is stored.
        bench.run(Op::Cast { input: round(&residual.out), out: residual.out.clone() });
        let input = residual.out.clone();
        bench.run(Op::LayerNorm(LayerNorm { input, residual: None, ..norm.clone() }));
    }
    let values = |slice: Slice| -> Vec<f32> {
        if slice.dtype() == DType::U32 {
            return bench.down::<u32>(&slice).into_iter().map(|x| x as f32).collect();
        }
        let slice = if rounded_after && is_narrow(&slice) { round(&slice) } else { slice };
        let wide = bench.alloc(slice.len(), DType::F32);
        bench.run(Op::Cast { input: slice, out: wide.clone() });
        bench.down(&wide)
    };
    let written = operands(&op).into_iter().filter(|(_, _, mode)| *mode != Mode::Read);
    written.map(|(_, slice, _)| values(slice)).collect()
}

/// Ops of which some operand can be of 16 bits, with which.
fn narrow_ops() -> Vec<(Make, Vec<bool>)> {
    OPS.iter()
        .map(|&make| (make, flexible(make)))
        .filter(|(make, flexible)| {
            // What converts, or does not compute, has tests of its own.
            let bench = Bench::new(cpu(1));
            let op = make(SMALL, &mut |len, dtype| bench.alloc(len, dtype));
            let computes =
                !matches!(op, Op::Cast { .. } | Op::Fill { .. } | Op::Copy { .. } | Op::Checksum { .. });
            computes && flexible.contains(&true)
        })
        .collect()
}

#[test]
fn every_float_op_takes_16_bits() {
    let bench = Bench::new(cpu(1));
    let mut names: Vec<String> = narrow_ops()
        .into_iter()
        .map(|(make, _)| make(SMALL, &mut |len, dtype| bench.alloc(len, dtype)).name().to_string())
        .collect();
    names.dedup();
    // All but the optimizer and what goes with it, which are of f32 by design.
    assert_eq!(
        names,
        [
            "max_difference",
            "add",
            "dropout",
            "gemm",
            "bias_backward",
            "gelu",
            "gelu_backward",
            "layer_norm",
            "layer_norm_apply",
            "layer_norm_backward",
            "attention",
            "attention_backward",
            "embedding",
            "embedding_backward",
            "cross_entropy",
            "sum",
            "sum_squares",
            "cross_entropy"
        ]
    );
}

fn same_as_f32(sizes: Sizes, mix: u64, seed: u64) {
    for (i, (make, flexible)) in narrow_ops().into_iter().enumerate() {
        let mixed: Vec<bool> =
            flexible.iter().zip(0..).map(|(&may, bit)| may && mix >> (bit + i) & 1 == 1).collect();
        for dtype in [DType::F16, DType::BF16] {
            for narrow in [&flexible, &mixed] {
                let results =
                    |device, rounded_after| results(device, make, sizes, narrow, dtype, rounded_after, seed);
                let (found, expected) = (results(cpu(1), false), results(cpu(1), true));
                let what = || format!("op {i}, {dtype}, {narrow:?}, {sizes:?}");
                for (found, expected) in found.iter().zip(&expected) {
                    close(&what(), found, expected, dtype);
                }
                let sim = Device::sim(SimOptions { seed, ..SimOptions::default() }).unwrap();
                for device in [cpu(3), sim] {
                    assert!(bits(&results(device, false)) == bits(&found), "{}", what());
                }
            }
        }
    }
}

fn bits(values: &[Vec<f32>]) -> Vec<u32> {
    values.iter().flatten().map(|x| x.to_bits()).collect()
}

/// Within one unit in the last place of 16 bits, since sums in another order may round to the other neighbour, or of what f32
/// sums are off by where they cancel.
fn close(what: &str, found: &[f32], expected: &[f32], dtype: DType) {
    let unit = if dtype == DType::F16 { 2f32.powi(-10) } else { 2f32.powi(-7) };
    let largest = expected.iter().fold(1e-3f32, |largest, x| largest.max(x.abs()));
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let most = unit * expected.abs() + 4e-6 * largest;
        assert!((found - expected).abs() <= most, "{what}: [{i}] is {found}, not {expected}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4))]

    #[test]
    fn sixteen_bit_ops_round_what_f32_ops_give(
        batch in 1usize..4, context in 1usize..70, heads in 1usize..4, head_size in 1usize..40,
        vocabulary in 3usize..200, mix: u64, seed in 0u64..1 << 40,
    ) {
        same_as_f32(Sizes { batch, context, heads, head_size, vocabulary, probability: 0.3 }, mix, seed);
    }
}

/// Several tiles and pieces of everything.
#[test]
fn large_sixteen_bit_ops_round_what_f32_ops_give() {
    let sizes = Sizes { batch: 2, context: 530, heads: 3, head_size: 47, vocabulary: 263, probability: 0.1 };
    same_as_f32(sizes, 0x9E37_79B9_7F4A_7C15, 11);
}
