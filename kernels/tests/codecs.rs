//! Codecs, element by element, for every class of values.

use ebbtide_kernels::{
    Category, CpuOptions, DType, Device, Op, Stream,
    op::{Rounding, int8_bytes},
};
use proptest::prelude::*;

/// Cases of the property tests; each holds some hundred elements.
fn cases() -> u32 {
    if std::env::var_os("EBBTIDE_SOAK").is_some() { 1_000_000 } else { 10_000 }
}

/// Any f32: normal, subnormal, zero, huge, NaN, infinite, and groups of one kind.
fn values() -> impl Strategy<Value = Vec<f32>> {
    let element = prop_oneof![
        8 => -4.0f32..4.0,
        2 => any::<u32>().prop_map(f32::from_bits),
        1 => (0u32..1 << 23).prop_map(f32::from_bits),
        1 => Just(0.0f32),
        1 => prop_oneof![Just(f32::MAX), Just(f32::MIN), Just(f32::MIN_POSITIVE), Just(1e-38), Just(-1e38)],
        1 => prop_oneof![Just(f32::NAN), Just(f32::INFINITY), Just(f32::NEG_INFINITY)],
    ];
    let subnormal = (0u32..1 << 24).prop_map(f32::from_bits);
    prop_oneof![
        prop::collection::vec(element, 1..700),
        prop::collection::vec(-4.0f32..4.0, 1..700),
        prop::collection::vec(subnormal, 1..300),
        prop::collection::vec((-20i32..20).prop_map(|e| 2f32.powi(e)), 1..300),
        (1usize..300).prop_map(|len| vec![0.0; len]),
    ]
}

/// Encodes and decodes: each group's scale, and the elements that come back.
fn round_trip(stream: &Stream, values: &[f32], group: usize, rounding: Rounding) -> (Vec<f32>, Vec<f32>) {
    let device = stream.device();
    let alloc = |len, dtype| device.alloc(len, dtype, Category::Workspace, "block").unwrap();
    let input = stream.upload(values, Category::Workspace, "x").unwrap();
    let (block, out) = (alloc(int8_bytes(values.len(), group), DType::U8), alloc(values.len(), DType::F32));
    stream.submit(Op::Int8Encode { input, out: block.clone(), group, rounding }).unwrap();
    stream.submit(Op::Int8Decode { input: block.clone(), out: out.clone(), group }).unwrap();
    let bytes = stream.download::<u8>(&block).unwrap();
    let scales = bytes[..4 * values.len().div_ceil(group)].chunks_exact(4);
    let scales = scales.map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect();
    (scales, stream.download::<f32>(&out).unwrap())
}

fn check(values: &[f32], group: usize, scales: &[f32], back: &[f32], steps: f64) {
    for ((values, back), &scale) in values.chunks(group).zip(back.chunks(group)).zip(scales) {
        for (&x, &y) in values.iter().zip(back) {
            if !x.is_finite() {
                assert!(y.is_nan(), "{x} came back as {y}");
                continue;
            }
            let error = (f64::from(x) - f64::from(y)).abs();
            assert!(error <= steps * f64::from(scale), "{x} came back as {y}, scale {scale}");
            assert!(y == 0.0 || x.signum() == y.signum() || steps > 0.5, "{x} came back as {y}");
        }
        let largest = values.iter().filter(|x| x.is_finite()).fold(0.0f32, |a, x| a.max(x.abs()));
        // No coarser than it must be: up to the cut to 16 bits, or to the next power of two where it would be subnormal.
        let finest = f64::from(largest) / 127.0;
        assert!(
            f64::from(scale) <= (finest * 2.0).max(f64::from(f32::from_bits(1))),
            "{scale} for {largest}"
        );
        assert!((scale == 0.0) == (largest == 0.0));
    }
}

#[test]
fn int8_keeps_its_bound_for_every_input() {
    let device = Device::cpu_with(CpuOptions { threads: Some(1), budget_bytes: None }).unwrap();
    let stream = device.stream("compute");
    let groups = prop_oneof![Just(64usize), Just(128), Just(256)];
    let config = ProptestConfig { cases: cases(), ..ProptestConfig::default() };
    proptest!(config, |(values in values(), group in groups, seed: u64, stochastic: bool)| {
        let (rounding, steps) = match stochastic {
            false => (Rounding::Nearest, 0.5),
            true => (Rounding::Stochastic { seed, site: 3, step: 9 }, 1.0 + 1.0 / 65536.0),
        };
        let (scales, back) = round_trip(&stream, &values, group, rounding);
        check(&values, group, &scales, &back, steps);
    });
}

#[test]
fn int8_gives_the_same_bits_for_any_thread_count_and_in_simulation() {
    let values: Vec<f32> = (0..300_001).map(|i| (i64::from(i) * 7919 % 10_007) as f32 / 1e3 - 5.0).collect();
    let cpu = |threads| {
        let device = Device::cpu_with(CpuOptions { threads: Some(threads), budget_bytes: None }).unwrap();
        device.stream("compute")
    };
    for rounding in [Rounding::Nearest, Rounding::Stochastic { seed: 1, site: 2, step: 3 }] {
        let expected = round_trip(&cpu(1), &values, 128, rounding);
        assert!(round_trip(&cpu(3), &values, 128, rounding) == expected);
        let sim = Device::sim(Default::default()).unwrap().stream("compute");
        assert!(round_trip(&sim, &values, 128, rounding) == expected);
    }
}

/// Right in the mean: of n draws with probability p the share that rounds up is p.
#[test]
fn stochastic_rounding_is_unbiased() {
    let device = Device::cpu().unwrap();
    // The scale is 1, from the 127 at the front of each group; 0.3 of a step rounds up in 3 of 10 draws.
    let values: Vec<f32> = (0..256_000).map(|i| if i % 64 == 0 { 127.0 } else { 0.3 }).collect();
    let (scales, back) = round_trip(
        &device.stream("compute"),
        &values,
        64,
        Rounding::Stochastic { seed: 5, site: 1, step: 1 },
    );
    assert!(scales.iter().all(|&scale| scale == 1.0));
    let draws = values.len() as f64 * 63.0 / 64.0;
    let up = back.iter().filter(|&&x| x == 1.0).count() as f64;
    // Five standard deviations of a binomial.
    assert!((up - 0.3 * draws).abs() < 5.0 * (draws * 0.3 * 0.7).sqrt(), "{up} of {draws}");
}

#[test]
fn groups_of_another_size_are_refused() {
    let device = Device::cpu().unwrap();
    let stream = device.stream("compute");
    let input = stream.upload(&[0.0f32; 32], Category::Workspace, "x").unwrap();
    let out = device.alloc(int8_bytes(32, 32), DType::U8, Category::Workspace, "block").unwrap();
    let rounding = Rounding::Nearest;
    let error = stream.submit(Op::Int8Encode { input, out, group: 32, rounding }).unwrap_err().to_string();
    assert_eq!(error, "int8_encode: expected a group of 64, 128 or 256, found 32");
}

/// A mask comes back as it was; what is not 0 as 1.
fn bits_round_trip(stream: &Stream, mask: &[u8]) -> Vec<u8> {
    let device = stream.device();
    let alloc = |len| device.alloc(len, DType::U8, Category::Workspace, "bits").unwrap();
    let input = stream.upload(mask, Category::Workspace, "mask").unwrap();
    let (bits, out) = (alloc(mask.len().div_ceil(8)), alloc(mask.len()));
    stream.submit(Op::BitsEncode { input, out: bits.clone() }).unwrap();
    stream.submit(Op::BitsDecode { input: bits, out: out.clone() }).unwrap();
    stream.download(&out).unwrap()
}

#[test]
fn masks_come_back() {
    let device = Device::cpu_with(CpuOptions { threads: Some(2), budget_bytes: None }).unwrap();
    let stream = device.stream("compute");
    let mut random = fastrand::Rng::with_seed(3);
    // More than a piece of a kernel, and every rest of a division by 8.
    for len in (1..40).chain(400_000..400_009) {
        let mask: Vec<u8> = (0..len).map(|_| if random.bool() { random.u8(..) } else { 0 }).collect();
        let expected: Vec<u8> = mask.iter().map(|&element| u8::from(element != 0)).collect();
        assert_eq!(bits_round_trip(&stream, &mask), expected, "{len}");
    }
}

#[test]
fn differences_and_checksums_see_one_element() {
    let device = Device::cpu_with(CpuOptions { threads: Some(2), budget_bytes: None }).unwrap();
    let stream = device.stream("compute");
    let up = |values: &[f32]| stream.upload(values, Category::Workspace, "x").unwrap();
    let difference = |a: &[f32], b: &[f32]| {
        let out = up(&[0.0]);
        stream.submit(Op::MaxDifference { input: up(a), other: up(b), out: out.clone() }).unwrap();
        stream.download::<f32>(&out).unwrap()[0]
    };
    let checksum = |a: &[f32]| {
        let out = device.alloc(2, DType::U32, Category::Workspace, "sum").unwrap();
        stream.submit(Op::Checksum { input: up(a), out: out.clone() }).unwrap();
        stream.download::<u32>(&out).unwrap()
    };
    let mut random = fastrand::Rng::with_seed(4);
    let values: Vec<f32> = (0..700_001).map(|_| random.f32()).collect();
    assert_eq!(difference(&values, &values), 0.0);
    for at in [0, 16_384, 262_143, 262_144, 700_000] {
        let mut other = values.clone();
        other[at] = f32::from_bits(other[at].to_bits() ^ 1);
        assert_eq!(difference(&values, &other), (values[at] - other[at]).abs(), "{at}");
        assert_ne!(checksum(&values), checksum(&other), "{at}");
    }
    assert_eq!(difference(&[f32::NAN, 1.0], &[f32::INFINITY, 1.0]), 0.0);
    assert_eq!(difference(&[f32::NAN], &[1.0]), f32::INFINITY);
}
