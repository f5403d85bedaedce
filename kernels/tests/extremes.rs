//! Values and shapes at the edge: all 16-bit floats, large scores and means, what is not finite, sums without terms, and
//! gradients that are added to what was there.
//!
//! Where it can be had the expectation is exact: integers, powers of two, or the same computation by another way.

mod common;

use common::{Bench, cpu, random};
use ebbtide_kernels::{
    DType, Op, Slice,
    op::{
        AdamW, Attention, AttentionBackward, AttentionShape, CrossEntropy, Dropout, Embedding,
        EmbeddingBackward, GeluKind, Gemm, LayerNorm, LayerNormBackward, Layout, Residual, reduce_workspace,
    },
};
use half::{bf16, f16};

/// Unit of rounding of f32: half the distance from 1 to the next number.
const UNIT: f64 = f32::EPSILON as f64 / 2.0;

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn cast<From: ebbtide_kernels::Element, To: ebbtide_kernels::Element>(
    bench: &Bench,
    values: &[From],
) -> Vec<To> {
    let (input, out) = (bench.up(values), bench.alloc(values.len(), To::DTYPE));
    bench.run(Op::Cast { input, out: out.clone() });
    bench.down(&out)
}

/// What a 16-bit float stands for, from its bits: sign, exponent, fraction.
fn value(bits: u16, exponent_bits: i32) -> f64 {
    let fraction_bits = 15 - exponent_bits;
    let fraction = f64::from(bits & ((1 << fraction_bits) - 1)) / f64::from(1u32 << fraction_bits);
    let exponent = i32::from(bits >> fraction_bits) & ((1 << exponent_bits) - 1);
    let bias = (1 << (exponent_bits - 1)) - 1;
    let magnitude = match exponent {
        0 => fraction * f64::from(1 - bias).exp2(),
        all_ones if all_ones == 2 * bias + 1 => {
            if fraction == 0.0 {
                f64::INFINITY
            } else {
                f64::NAN
            }
        }
        _ => (1.0 + fraction) * f64::from(exponent - bias).exp2(),
    };
    if bits >> 15 == 1 { -magnitude } else { magnitude }
}

#[test]
fn every_16_bit_float_widens_exactly_and_comes_back() {
    let bench = Bench::new(cpu(2));
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let halves: Vec<f16> = all.iter().map(|&bits| f16::from_bits(bits)).collect();
    let brains: Vec<bf16> = all.iter().map(|&bits| bf16::from_bits(bits)).collect();
    for (exponent_bits, wide) in [(5, cast::<_, f32>(&bench, &halves)), (8, cast(&bench, &brains))] {
        for (&bits, wide) in all.iter().zip(wide) {
            let expected = value(bits, exponent_bits);
            let same = f64::from(wide).to_bits() == expected.to_bits();
            assert!(same || wide.is_nan() && expected.is_nan(), "{bits:#06x}: {wide}, not {expected}");
        }
    }
    let from_half = cast::<f32, f16>(&bench, &cast(&bench, &halves));
    let from_brain = cast::<f32, bf16>(&bench, &cast(&bench, &brains));
    for ((half, brain), bits) in from_half.into_iter().zip(from_brain).zip(all) {
        assert!(half.to_bits() == bits || half.is_nan() && f16::from_bits(bits).is_nan(), "f16 {bits:#06x}");
        assert!(
            brain.to_bits() == bits || brain.is_nan() && bf16::from_bits(bits).is_nan(),
            "bf16 {bits:#06x}"
        );
    }
    // Between the two, one rounding: that of the exact value.
    for (half, brain) in halves.iter().zip(cast::<f16, bf16>(&bench, &halves)) {
        let expected = bf16::from_f32(half.to_f32());
        assert!(brain.to_bits() == expected.to_bits() || brain.is_nan() && half.is_nan(), "{half}");
    }
    for (brain, half) in brains.iter().zip(cast::<bf16, f16>(&bench, &brains)) {
        let expected = f16::from_f32(brain.to_f32());
        assert!(half.to_bits() == expected.to_bits() || half.is_nan() && brain.is_nan(), "{brain}");
    }
}

/// Half-way between neighbours the even one is taken, and next to it the nearer one; the last half-way is infinity's.
#[test]
fn casts_round_half_way_to_even() {
    let bench = Bench::new(cpu(1));
    for (exponent_bits, infinity) in [(5, 0x7C00u16), (8, 0x7F80)] {
        let mut values = Vec::new();
        let mut expected = Vec::new();
        for low in 0..infinity {
            let above = match low + 1 == infinity {
                // The neighbour as if exponents went on.
                true => 2.0 * value(low, exponent_bits) - value(low - 1, exponent_bits),
                false => value(low + 1, exponent_bits),
            };
            // One bit more than 16-bit floats have: exact in f32.
            let middle = ((value(low, exponent_bits) + above) / 2.0) as f32;
            for sign in [1.0, -1.0] {
                let signed = |bits: u16| if sign < 0.0 { bits | 0x8000 } else { bits };
                values.extend([sign * middle.next_down(), sign * middle, sign * middle.next_up()]);
                expected.extend([signed(low), signed(low + low % 2), signed(low + 1)]);
            }
        }
        let found: Vec<u16> = match exponent_bits {
            5 => cast::<_, f16>(&bench, &values).iter().map(|x| x.to_bits()).collect(),
            _ => cast::<_, bf16>(&bench, &values).iter().map(|x| x.to_bits()).collect(),
        };
        for ((found, expected), value) in found.into_iter().zip(expected).zip(values) {
            assert_eq!(found, expected, "{value:e}, {exponent_bits} bits of exponent");
        }
    }
}

fn product(bench: &Bench, a: Slice, b: Slice, out: &Slice, [m, n, k]: [usize; 3]) {
    let layout = Layout::Normal;
    let (out, accumulate) = (out.clone(), false);
    bench.run(Op::Gemm(Gemm {
        a,
        a_layout: layout,
        b,
        b_layout: layout,
        bias: None,
        out,
        accumulate,
        m,
        n,
        k,
    }));
}

#[test]
fn a_product_without_terms_is_its_bias() {
    let bench = Bench::new(cpu(2));
    for (bias, accumulate, expected) in [
        (false, false, [0.0, 0.0, 0.0, 0.0]),
        (true, false, [1.0, 2.0, 1.0, 2.0]),
        (false, true, [5.0, 6.0, 7.0, 8.0]),
        (true, true, [6.0, 8.0, 8.0, 10.0]),
    ] {
        let before = if accumulate { [5.0, 6.0, 7.0, 8.0] } else { [f32::NAN; 4] };
        let out = bench.up(&before);
        bench.run(Op::Gemm(Gemm {
            a: bench.alloc(0, DType::F32),
            a_layout: Layout::Normal,
            b: bench.alloc(0, DType::F32),
            b_layout: Layout::Transposed,
            bias: bias.then(|| bench.up(&[1.0f32, 2.0])),
            out: out.clone(),
            accumulate,
            m: 2,
            n: 2,
            k: 0,
        }));
        assert_eq!(bench.down::<f32>(&out), expected, "bias {bias}, accumulate {accumulate}");
    }
}

/// A NaN in a row of `a` reaches that row of the product and no other, whatever pads the last registers.
#[test]
fn a_product_keeps_rows_and_columns_apart() {
    let bench = Bench::new(cpu(2));
    for [m, n, k] in [[3, 5, 7], [67, 31, 33], [150, 131, 70]] {
        let (row, column) = (m / 2, n / 3);
        let (mut a, mut b) = (random(1, m * k), random(2, k * n));
        a[row * k + k - 1] = f32::NAN;
        b[column] = f32::NAN;
        let out = bench.alloc(m * n, DType::F32);
        product(&bench, bench.up(&a), bench.up(&b), &out, [m, n, k]);
        for (at, x) in bench.down::<f32>(&out).into_iter().enumerate() {
            let expected = at / n == row || at % n == column;
            assert_eq!(x.is_nan(), expected, "{m} × {n} × {k}, row {}, column {}", at / n, at % n);
        }
    }
}

/// Every place of a vector register, and the remainder after it.
#[test]
fn gelu_of_extremes() {
    let bench = Bench::new(cpu(1));
    let (nan, infinity, huge) = (f32::NAN, f32::INFINITY, 1e18);
    // Of -∞ the formula makes -∞ · 0, which is NaN; what is large and finite is itself or 0.
    let values = [(nan, nan), (infinity, infinity), (-infinity, nan), (0.0, 0.0)];
    let large = [(f32::MAX, f32::MAX), (f32::MIN, 0.0), (huge, huge), (-huge, 0.0), (100.0, 100.0)];
    let slopes =
        [(nan, nan), (0.0, 0.5), (-0.0, 0.5), (huge, 1.0), (-huge, 0.0), (100.0, 1.0), (-100.0, 0.0)];
    for kind in [GeluKind::Tanh, GeluKind::Erf] {
        let all = |found: Vec<f32>, x: f32, expected: f32| {
            let same = |&y: &f32| y == expected || y.is_nan() && expected.is_nan();
            assert!(found.iter().all(same), "{kind:?} of {x}: {found:?}, not {expected}");
        };
        for (x, expected) in values.into_iter().chain(large) {
            let out = bench.alloc(37, DType::F32);
            bench.run(Op::Gelu { input: bench.up(&[x; 37]), out: out.clone(), kind });
            all(bench.down(&out), x, expected);
        }
        for (x, expected) in slopes {
            let gradient = bench.up(&[1.0f32; 37]);
            bench.run(Op::GeluBackward { input: bench.up(&[x; 37]), gradient: gradient.clone(), kind });
            all(bench.down(&gradient), x, expected);
        }
    }
}

struct Norm {
    sum: Vec<f32>,
    out: Vec<f32>,
    mean: Slice,
    rstd: Slice,
}

/// Of `stream + delta`, with weight 1 and bias 0.
fn layer_norm(bench: &Bench, stream: &[f32], delta: &[f32], width: usize) -> Norm {
    let rows = delta.len() / width;
    let [sum, out] = [(); 2].map(|()| bench.alloc(delta.len(), DType::F32));
    let [mean, rstd] = [(); 2].map(|()| bench.alloc(rows, DType::F32));
    bench.run(Op::LayerNorm(LayerNorm {
        input: bench.up(delta),
        residual: Some(Residual { input: bench.up(stream), out: sum.clone(), dropout: None }),
        weight: bench.up(&vec![1.0f32; width]),
        bias: bench.up(&vec![0.0f32; width]),
        out: out.clone(),
        mean: mean.clone(),
        rstd: rstd.clone(),
        rows,
        width,
        epsilon: 1e-5,
    }));
    Norm { sum: bench.down(&sum), out: bench.down(&out), mean, rstd }
}

/// The variance is taken about the mean, so a mean of a thousand deviations does not drown it.
#[test]
fn a_large_mean_does_not_spoil_a_norm() {
    let bench = Bench::new(cpu(1));
    for width in [33usize, 768, 1600] {
        let delta = random(width as u64, width);
        let norm = layer_norm(&bench, &vec![1000.0f32; width], &delta, width);
        let x: Vec<f64> = norm.sum.iter().copied().map(f64::from).collect();
        let mean = x.iter().sum::<f64>() / width as f64;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
        let rstd = 1.0 / (variance + 1e-5).sqrt();
        // A sum in 16 lanes adds width / 16 + 16 + 15 terms one after the other, each with a rounding at the size of the
        // mean at most (all terms have its sign); the division adds one. The mean's error moves every element by itself
        // times rstd; the few roundings after that, and the square of it in the variance, are below one more of these.
        let tolerance = (width as f64 / 16.0 + 34.0) * UNIT * 1001.0 * rstd;
        for (&found, x) in norm.out.iter().zip(&x) {
            let error = (f64::from(found) - (x - mean) * rstd).abs();
            assert!(error <= tolerance, "width {width}: {error:e} above {tolerance:e}");
        }
    }
}

/// Equal elements have no variance: the output is the bias, and the reciprocal deviation epsilon's.
#[test]
fn a_norm_of_equal_elements_is_its_bias() {
    let bench = Bench::new(cpu(1));
    // 2 · 3 · 96 and below: sums of small integers, exact in any order.
    let norm = layer_norm(&bench, &[2.0; 96], &[1.0; 96], 32);
    assert_eq!((norm.sum, norm.out), (vec![3.0; 96], vec![0.0; 96]));
    assert_eq!(bench.down::<f32>(&norm.rstd), [1.0 / 1e-5f32.sqrt(); 3]);
    assert_eq!(bench.down::<f32>(&norm.mean), [3.0; 3]);
}

#[test]
fn a_row_that_is_not_finite_spoils_its_own_gradient_alone() {
    let bench = Bench::new(cpu(2));
    let (rows, width) = (70, 33);
    let size = rows * width;
    for bad in [f32::NAN, f32::INFINITY] {
        let mut delta = random(1, size);
        delta[2 * width + 7] = bad;
        let norm = layer_norm(&bench, &random(2, size), &delta, width);
        let dinput = bench.alloc(size, DType::F32);
        bench.run(Op::LayerNormBackward(LayerNormBackward {
            dout: bench.up(&random(3, size)),
            input: bench.up(&norm.sum),
            weight: bench.up(&random(4, width)),
            mean: norm.mean,
            rstd: norm.rstd,
            dinput: dinput.clone(),
            accumulate: false,
            ddelta: None,
            dweight: bench.up(&vec![0.0f32; width]),
            dbias: bench.up(&vec![0.0f32; width]),
            workspace: bench.alloc(reduce_workspace(rows, 2 * width), DType::F32),
            rows,
            width,
        }));
        let dinput: Vec<f32> = bench.down(&dinput);
        for (at, (x, dx)) in norm.out.iter().zip(&dinput).enumerate() {
            let (row, spoilt) = (at / width, !x.is_finite() || !dx.is_finite());
            assert!(spoilt == (row == 2), "{bad} in row 2: row {row} has {x}, {dx}");
        }
    }
}

/// What a gradient is added to is the only difference that `accumulate` makes, and `ddelta` is the sum after dropout.
#[test]
fn a_norms_gradient_adds_to_the_stream() {
    let bench = Bench::new(cpu(2));
    let dropout = Dropout { probability: 0.4, seed: 3, site: 1, step: 9 };
    for (rows, width) in [(1, 1), (3, 7), (65, 33), (130, 64)] {
        let size = rows * width;
        let (above, norm) = (random(9, size), layer_norm(&bench, &random(1, size), &random(2, size), width));
        let backward = |accumulate: bool| -> [Vec<f32>; 2] {
            let (dinput, ddelta) = (bench.up(&above), bench.alloc(size, DType::F32));
            bench.run(Op::LayerNormBackward(LayerNormBackward {
                dout: bench.up(&random(3, size)),
                input: bench.up(&norm.sum),
                weight: bench.up(&random(4, width)),
                mean: norm.mean.clone(),
                rstd: norm.rstd.clone(),
                dinput: dinput.clone(),
                accumulate,
                ddelta: Some((ddelta.clone(), dropout)),
                dweight: bench.up(&vec![0.0f32; width]),
                dbias: bench.up(&vec![0.0f32; width]),
                workspace: bench.alloc(reduce_workspace(rows, 2 * width), DType::F32),
                rows,
                width,
            }));
            [bench.down(&dinput), bench.down(&ddelta)]
        };
        let ([alone, of_alone], [added, of_added]) = (backward(false), backward(true));
        let expected: Vec<f32> = above.iter().zip(&alone).map(|(above, dx)| above + dx).collect();
        assert_eq!(bits(&added), bits(&expected), "{rows} × {width}");
        for (dinput, ddelta) in [(alone, of_alone), (added, of_added)] {
            let dropped = dinput.iter().zip(0..).map(|(dx, i)| dx * dropout.factor(i));
            assert_eq!(bits(&ddelta), bits(&dropped.collect::<Vec<_>>()), "{rows} × {width}");
        }
    }
}

/// Small integers, so that sums are exact in any order.
fn integers(seed: u64, len: usize) -> Vec<f32> {
    random(seed, len).iter().map(|x| (8.0 * x).round()).collect()
}

#[test]
fn an_embeddings_gradient_adds_to_the_tables() {
    let bench = Bench::new(cpu(3));
    let (batch, context, width, vocabulary) = (5, 31, 260, 9);
    let tokens: Vec<u32> = (0..(batch * context) as u32).map(|i| i * i % 7).collect();
    let (wte, wpe) = (integers(1, vocabulary * width), integers(2, context * width));
    let dout = integers(3, tokens.len() * width);
    let (dwte, dwpe) = (bench.up(&wte), bench.up(&wpe));
    bench.run(Op::EmbeddingBackward(EmbeddingBackward {
        tokens: bench.up(&tokens),
        dout: bench.up(&dout),
        dwte: dwte.clone(),
        dwpe: dwpe.clone(),
        batch,
        context,
        width,
        vocabulary,
        dropout: None,
    }));
    let (mut expected_wte, mut expected_wpe) = (wte, wpe);
    for (at, &g) in dout.iter().enumerate() {
        expected_wte[tokens[at / width] as usize * width + at % width] += g;
        expected_wpe[at / width % context * width + at % width] += g;
    }
    assert_eq!(bench.down::<f32>(&dwte), expected_wte);
    assert_eq!(bench.down::<f32>(&dwpe), expected_wpe);
}

/// Positions start over with every sequence, and tables may be longer than what is used of them.
#[test]
fn an_embedding_of_integers_is_exact() {
    let bench = Bench::new(cpu(3));
    let (batch, context, width, vocabulary) = (3, 17, 130, 300);
    let tokens: Vec<u32> = (0..(batch * context) as u32).map(|i| i * 37 % 300).collect();
    let (wte, wpe) = (integers(1, vocabulary * width), integers(2, 2 * context * width));
    let out = bench.alloc(tokens.len() * width, DType::F32);
    bench.run(Op::Embedding(Embedding {
        tokens: bench.up(&tokens),
        wte: bench.up(&wte),
        wpe: bench.up(&wpe).part(0..context * width).unwrap(),
        out: out.clone(),
        batch,
        context,
        width,
        vocabulary,
        dropout: None,
    }));
    let element = |at: usize| {
        wte[tokens[at / width] as usize * width + at % width] + wpe[at / width % context * width + at % width]
    };
    assert_eq!(bench.down::<f32>(&out), (0..tokens.len() * width).map(element).collect::<Vec<_>>());
}

fn attend(bench: &Bench, qkv: &[f32], shape: AttentionShape, dout: Option<&[f32]>) -> [Vec<f32>; 3] {
    let (input, out) = (bench.up(qkv), bench.alloc(shape.channels(), DType::F32));
    let (lse, dqkv) = (bench.alloc(shape.rows(), DType::F32), bench.up(&vec![0.0f32; qkv.len()]));
    bench.run(Op::Attention(Attention {
        qkv: input.clone(),
        out: out.clone(),
        lse: lse.clone(),
        shape,
        dropout: None,
    }));
    if let Some(dout) = dout {
        bench.run(Op::AttentionBackward(AttentionBackward {
            dout: bench.up(dout),
            qkv: input,
            out: out.clone(),
            lse: lse.clone(),
            dqkv: dqkv.clone(),
            workspace: bench.alloc(shape.rows(), DType::F32),
            shape,
            dropout: None,
        }));
    }
    [bench.down(&out), bench.down(&lse), bench.down(&dqkv)]
}

/// Scores of thousands, and lesser ones of which many count, over more than one tile of keys. Keys grow with the position,
/// so that the largest score of a row is often in its last tile and what came before is scaled to it. Queries and keys are
/// integers and scales powers of two, so scores are exact.
#[test]
fn attention_with_large_and_growing_scores() {
    let bench = Bench::new(cpu(2));
    for (context, scale) in [5usize, 64, 513, 700, 1100].into_iter().flat_map(|c| [(c, 1.0), (c, 1.0 / 64.0)])
    {
        let shape = AttentionShape { batch: 1, context, heads: 1, head_size: 1, scale };
        let mut qkv = random(context as u64, 3 * context);
        for (t, row) in qkv.chunks_exact_mut(3).enumerate() {
            row[0] = (30.0 * row[0]).round();
            row[1] = (8.0 * row[1]).round() + (t / 8) as f32;
        }
        let [out, lse, _] = attend(&bench, &qkv, shape, None);
        let at = |t: usize, third: usize| f64::from(qkv[3 * t + third]);
        for t in 0..context {
            let scores: Vec<f64> = (0..=t).map(|s| at(t, 0) * at(s, 1) * f64::from(scale)).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|score| (score - max).exp()).sum();
            let mixed: f64 = scores.iter().enumerate().map(|(s, x)| (x - max).exp() / total * at(s, 2)).sum();
            // Each sum has at most `context` terms of relative error 4 units (`exp` is within two in the last place, and a
            // rescaling is shared by both sums), and rounds as often; values are below 1.
            let tolerance = (2.0 * context as f64 + 16.0) * UNIT;
            assert!((f64::from(out[t]) - mixed).abs() <= tolerance, "row {t} of {context}, scale {scale}");
            let expected = max + total.ln();
            // The same for the logarithm of the sum, and one rounding at the result's size.
            let tolerance = tolerance + UNIT * expected.abs();
            assert!((f64::from(lse[t]) - expected).abs() <= tolerance, "lse {t} of {context}, scale {scale}");
        }
    }
}

/// With every score equal the softmax is the mean, in values, logsumexp and gradient of the values.
#[test]
fn attention_without_queries_is_the_mean() {
    let bench = Bench::new(cpu(2));
    let shape = AttentionShape { batch: 2, context: 130, heads: 3, head_size: 64, scale: 0.125 };
    let width = 192;
    let mut qkv = random(7, 3 * shape.channels());
    qkv.chunks_exact_mut(3 * width).for_each(|row| row[..width].fill(0.0));
    let dout = random(8, shape.channels());
    let [out, lse, dqkv] = attend(&bench, &qkv, shape, Some(&dout));
    for (i, &lse) in lse.iter().enumerate() {
        // Sums of ones are exact; a logarithm below 8 has units in the last place of 2⁻²¹, of which it may be off by one.
        assert!((f64::from(lse) - ((i % 130 + 1) as f64).ln()).abs() <= 8.0 * UNIT, "lse {i}");
    }
    for b in 0..2 {
        for c in 0..width {
            let v = |t: usize| f64::from(qkv[(b * 130 + t) * 3 * width + 2 * width + c]);
            let r = |t: usize| f64::from(dout[(b * 130 + t) * width + c]);
            for t in [0, 1, 63, 64, 127, 128, 129] {
                // As many roundings as terms, at the size of at most their number times 1, over that number.
                let tolerance = (130.0 + 8.0) * UNIT;
                let mean = (0..=t).map(v).sum::<f64>() / (t + 1) as f64;
                let found = f64::from(out[(b * 130 + t) * width + c]);
                assert!((found - mean).abs() <= tolerance, "out {b} {t} {c}");
                let dv: f64 = (t..130).map(|u| r(u) / (u + 1) as f64).sum();
                let found = f64::from(dqkv[(b * 130 + t) * 3 * width + 2 * width + c]);
                // Weights from the logsumexp: its error of 8 units, and 4 of `exp`; at most 1 + 1/2 + … < 6 altogether.
                assert!((found - dv).abs() <= 6.0 * (130.0 + 16.0) * UNIT, "dv {b} {t} {c}");
            }
        }
    }
}

/// A NaN stays in its sequence and head, forward and backward, and no position sees a later block of queries.
#[test]
fn attention_keeps_sequences_and_heads_apart() {
    let bench = Bench::new(cpu(2));
    let shape = AttentionShape { batch: 2, context: 140, heads: 3, head_size: 5, scale: 0.4 };
    let width = 15;
    let qkv = random(1, 3 * shape.channels());
    let dout = random(2, shape.channels());
    let clean = attend(&bench, &qkv, shape, Some(&dout));
    for third in 0..3 {
        let mut bad = qkv.clone();
        // Sequence 1, position 135, head 2.
        bad[(140 + 135) * 3 * width + third * width + 2 * 5 + 1] = f32::NAN;
        let found = attend(&bench, &bad, shape, Some(&dout));
        let in_head = |channel: usize| channel % width / 5 == 2;
        for (at, (x, clean)) in found[0].iter().zip(&clean[0]).enumerate() {
            let (row, channel) = (at / width, at % width);
            if row < 140 + 128 || !in_head(channel) {
                assert_eq!(x.to_bits(), clean.to_bits(), "out, row {row}, channel {channel}");
            }
        }
        for (at, (x, clean)) in found[2].iter().zip(&clean[2]).enumerate() {
            let (row, channel) = (at / (3 * width), at % (3 * width));
            if row < 140 || !in_head(channel) {
                assert_eq!(x.to_bits(), clean.to_bits(), "dqkv, row {row}, channel {channel}");
            }
        }
        assert!(found[0][(140 + 135) * width + 2 * 5 + 1].is_nan(), "a position sees its own NaN");
    }
}

fn cross_entropy(bench: &Bench, logits: &[f32], targets: &[i32], scale: Option<f32>) -> [Vec<f32>; 2] {
    let (rows, vocabulary) = (targets.len(), logits.len() / targets.len());
    let (slice, losses) = (bench.up(logits), bench.alloc(rows, DType::F32));
    bench.run(Op::CrossEntropy(CrossEntropy {
        logits: slice.clone(),
        targets: bench.up(targets),
        losses: losses.clone(),
        rows,
        vocabulary,
        gradient_scale: scale,
        loss_scale: None,
    }));
    [bench.down(&losses), bench.down(&slice)]
}

/// Logits of eighths, so that adding 2¹⁴ is exact: neither loss nor gradient may notice.
#[test]
fn a_shift_of_all_logits_changes_nothing() {
    let bench = Bench::new(cpu(2));
    let logits: Vec<f32> = random(1, 3 * 5003).iter().map(|x| (40.0 * x).round() / 8.0).collect();
    let targets = [4999, -1, 17];
    let plain = cross_entropy(&bench, &logits, &targets, Some(0.5));
    for shift in [16384.0, -16384.0] {
        let shifted: Vec<f32> = logits.iter().map(|x| x + shift).collect();
        let [losses, gradient] = cross_entropy(&bench, &shifted, &targets, Some(0.5));
        assert_eq!(bits(&gradient), bits(&plain[1]));
        for (shifted, plain) in losses.iter().zip(&plain[0]) {
            // Sums in f64 may fall to the other side of a rounding to f32.
            assert!((shifted - plain).abs() <= f32::EPSILON * plain, "{shifted} {plain}");
        }
    }
}

/// GPT-2's vocabulary with equal logits: the loss is the logarithm of its size, the gradient `1 / 50257` but for the target.
#[test]
fn equal_logits_over_a_large_vocabulary() {
    let bench = Bench::new(cpu(2));
    let vocabulary = 50_257;
    let [losses, gradient] = cross_entropy(&bench, &vec![-3.5; vocabulary], &[50_256], Some(1.0));
    // The sum is of ones, exact; a logarithm, a quotient and a difference round once each.
    let near = |found: f32, expected: f64| (f64::from(found) - expected).abs() <= 2.0 * UNIT * expected.abs();
    assert!(near(losses[0], (vocabulary as f64).ln()), "{losses:?}");
    assert!(gradient[..50_256].iter().all(|&g| near(g, 1.0 / vocabulary as f64)));
    assert!(near(gradient[50_256], 1.0 / vocabulary as f64 - 1.0));
}

#[test]
fn logits_that_are_not_finite_spoil_their_own_row() {
    let bench = Bench::new(cpu(2));
    for bad in [f32::NAN, f32::INFINITY] {
        let mut logits = random(1, 4 * 37);
        logits[37 + 11] = bad;
        logits[2 * 37 + 11] = bad;
        // Row 2 is ignored, and stays so.
        for scale in [None, Some(1.0)] {
            let [losses, gradient] = cross_entropy(&bench, &logits, &[3, 4, -100, 5], scale);
            let finite: Vec<bool> = losses.iter().map(|x| x.is_finite()).collect();
            assert_eq!(finite, [true, false, true, true], "{bad}: {losses:?}");
            match scale {
                Some(_) => {
                    let finite = gradient.chunks(37).map(|row| row.iter().all(|x| x.is_finite()));
                    assert_eq!(finite.collect::<Vec<_>>(), [true, false, true, true], "{bad}");
                    assert_eq!(gradient[2 * 37..3 * 37], [0.0; 37]);
                }
                None => assert_eq!(bits(&gradient), bits(&logits), "{bad}"),
            }
        }
    }
    // Weights of -∞ are zeros: what is masked out counts for nothing.
    let masked = [f32::NEG_INFINITY, 2.0, f32::NEG_INFINITY, 2.0];
    let [losses, gradient] = cross_entropy(&bench, &masked, &[1], Some(1.0));
    assert!((f64::from(losses[0]) - 2f64.ln()).abs() <= UNIT, "ln 2 rounds once: {losses:?}");
    assert_eq!(gradient, [0.0, -0.5, 0.0, 0.5]);
    let [losses, _] = cross_entropy(&bench, &masked, &[0], Some(1.0));
    assert_eq!(losses, [f32::INFINITY]);
}

/// Sums that f32 would lose: small terms after a large one, and terms that cancel.
#[test]
fn sums_are_in_f64() {
    let bench = Bench::new(cpu(2));
    let mut values = vec![1.0f32; 40_001];
    (values[0], values[40_000]) = (16_777_216.0, -16_777_216.0);
    let (sum, squares) = (bench.up(&[10.0f32]), bench.alloc(1, DType::F32));
    let input = bench.up(&values);
    for _ in 0..2 {
        bench.run(Op::Sum { input: input.clone(), out: sum.clone(), scale: 0.5 });
    }
    assert_eq!(bench.down::<f32>(&sum), [10.0 + 39_999.0]);
    bench.run(Op::SumSquares { input: bench.up(&values[1..40_000]), out: squares.clone() });
    assert_eq!(bench.down::<f32>(&squares), [39_999.0]);
    // Squares that f32 cannot hold, but their sum's scale can: 2⁸⁰ · 4 is still finite, 2¹³⁰ is not.
    for (x, expected) in [(40f32.exp2(), 82f32.exp2()), (64f32.exp2(), f32::INFINITY)] {
        bench.run(Op::SumSquares { input: bench.up(&[x; 4]), out: squares.clone() });
        assert_eq!(bench.down::<f32>(&squares), [expected]);
    }
}

#[test]
fn a_clip_coefficient_is_over_all_sums_and_hides_no_nan() {
    let bench = Bench::new(cpu(1));
    let clip = |squares: &[f32], max_norm: f32| -> [f32; 2] {
        let (norm, coefficient) = (bench.alloc(1, DType::F32), bench.alloc(1, DType::F32));
        let sum_squares = bench.up(squares);
        bench.run(Op::ClipCoefficient {
            sum_squares,
            norm: norm.clone(),
            coefficient: coefficient.clone(),
            max_norm,
        });
        [bench.down::<f32>(&norm)[0], bench.down::<f32>(&coefficient)[0]]
    };
    assert_eq!(clip(&[9.0, 16.0, 0.0, 144.0], 6.5), [13.0, 6.5 / (13.0 + 1e-6)]);
    assert_eq!(clip(&[0.0, 0.0], 1.0), [0.0, 1.0]);
    assert_eq!(clip(&[0.0], 0.0), [0.0, 0.0]);
    assert_eq!(clip(&[4.0, f32::INFINITY], 1.0), [f32::INFINITY, 0.0]);
    let [norm, coefficient] = clip(&[4.0, f32::NAN], 1.0);
    assert!(norm.is_nan() && coefficient.is_nan());
    // PyTorch's ∞ / ∞ too.
    assert!(clip(&[f32::INFINITY], f32::INFINITY)[1].is_nan());
}

struct State {
    parameters: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
}

fn adamw(bench: &Bench, state: &State, gradients: &[f32], scale: Option<f32>, step: u64) -> State {
    let parameters = bench.up(&state.parameters);
    let (first_moment, second_moment) = (bench.up(&state.first), bench.up(&state.second));
    bench.run(Op::AdamW(AdamW {
        parameters: parameters.clone(),
        gradients: bench.up(gradients),
        first_moment: first_moment.clone(),
        second_moment: second_moment.clone(),
        gradient_scale: scale.map(|scale| bench.up(&[scale])),
        scaled: None,
        learning_rate: 0.125,
        beta1: 0.5,
        beta2: 0.75,
        epsilon: 0.0625,
        weight_decay: 0.5,
        step,
    }));
    State {
        parameters: bench.down(&parameters),
        first: bench.down(&first_moment),
        second: bench.down(&second_moment),
    }
}

/// Constants that are powers of two leave nothing to round: one step by hand.
#[test]
fn a_first_step_of_adamw_by_hand() {
    let bench = Bench::new(cpu(2));
    let before = State { parameters: vec![4.0; 37], first: vec![0.0; 37], second: vec![0.0; 37] };
    let after = adamw(&bench, &before, &[2.0; 37], None, 1);
    // m = 0.5 · 2, v = 0.25 · 2², both corrected: 2 and √4. p = 4 (1 - 1/16) - 1/8 · 2 / (2 + 1/16).
    assert_eq!((after.first, after.second), (vec![1.0; 37], vec![1.0; 37]));
    let expected = 3.75 - 0.25 / 2.0625;
    // A quotient and a difference, each rounded once at the size of at most 4.
    let error = |p: &f32| (f64::from(*p) - expected).abs();
    assert!(after.parameters.iter().all(|p| error(p) <= 2.0 * 4.0 * UNIT), "{:?}", after.parameters);
}

#[test]
fn a_gradient_scale_of_adamw_scales_the_gradients() {
    let bench = Bench::new(cpu(2));
    let state = || State {
        parameters: random(1, 20_011),
        first: random(2, 20_011),
        second: random(3, 20_011).iter().map(|x| x.abs()).collect(),
    };
    let gradients = random(4, 20_011);
    let quarter: Vec<f32> = gradients.iter().map(|g| 0.25 * g).collect();
    for (scale, by_hand) in [(1.0, &gradients), (0.25, &quarter)] {
        let found = adamw(&bench, &state(), &gradients, Some(scale), 7);
        let expected = adamw(&bench, &state(), by_hand, None, 7);
        assert_eq!(bits(&found.parameters), bits(&expected.parameters), "{scale}");
        assert_eq!((found.first, found.second), (expected.first, expected.second), "{scale}");
    }
}

/// Without a gradient there is decay alone, however late; a gradient that is NaN or scaled by NaN is not hidden.
#[test]
fn adamw_at_its_limits() {
    let bench = Bench::new(cpu(1));
    let state = || State { parameters: vec![2.0; 20], first: vec![0.0; 20], second: vec![0.0; 20] };
    for step in [1, 1000, 1 << 40] {
        assert_eq!(adamw(&bench, &state(), &[0.0; 20], None, step).parameters, [1.875; 20]);
    }
    let mut gradients = [1.0; 20];
    gradients[18] = f32::NAN;
    let found = adamw(&bench, &state(), &gradients, None, 1).parameters;
    assert!(found.iter().enumerate().all(|(i, p)| p.is_nan() == (i == 18)), "{found:?}");
    let found = adamw(&bench, &state(), &[0.0; 20], Some(f32::NAN), 1).parameters;
    assert!(found.iter().all(|p| p.is_nan()), "{found:?}");
}

/// Copies of any alignment and of more than one piece move every byte and no other.
#[test]
fn copies_move_their_bytes_alone() {
    let bench = Bench::new(cpu(3));
    let bytes: Vec<u8> = (0..3_000_001u32).map(|i| (i * 7 + i / 251) as u8).collect();
    let input = bench.up(&bytes);
    for (start, len) in [(0, 3_000_001), (1, 2_500_003), (7, 1), (3_000_000, 1), (5, 0)] {
        let out = bench.up(&vec![0xAAu8; len + 2]);
        let (input, inner) = (input.part(start..start + len).unwrap(), out.part(1..len + 1).unwrap());
        bench.run(Op::Copy { input, out: inner });
        let found: Vec<u8> = bench.down(&out);
        assert!(found[0] == 0xAA && found[len + 1] == 0xAA && found[1..len + 1] == bytes[start..start + len]);
    }
}

#[test]
fn fills_convert_their_value() {
    let bench = Bench::new(cpu(2));
    let filled = |dtype, value| {
        let out = bench.alloc(70_003, dtype);
        bench.run(Op::Fill { out: out.clone(), value });
        out
    };
    assert_eq!(bench.down::<f32>(&filled(DType::F32, 0.1)), [0.1; 70_003]);
    // 1 + 2⁻⁸ is half-way between neighbours in bf16, and exact in f16.
    let value = 1.0 + 1.0 / 256.0;
    assert_eq!(bench.down::<bf16>(&filled(DType::BF16, value)), [bf16::ONE; 70_003]);
    assert!(bench.down::<f16>(&filled(DType::F16, value)).iter().all(|x| x.to_f32() == value));
    assert_eq!(bench.down::<u32>(&filled(DType::U32, 70_000.0)), [70_000; 70_003]);
    assert_eq!(bench.down::<i32>(&filled(DType::I32, -100.0)), [-100; 70_003]);
    assert_eq!(bench.down::<u8>(&filled(DType::U8, 255.0)), [255; 70_003]);
}

#[test]
fn every_part_of_a_dropouts_key_matters() {
    let bench = Bench::new(cpu(2));
    let mask = |dropout: Dropout| -> Vec<u32> {
        let data = bench.up(&[1.0f32; 1000]);
        bench.run(Op::Dropout { data: data.clone(), dropout });
        bits(&bench.down(&data))
    };
    let key = Dropout { probability: 0.5, seed: 1, site: 2, step: 3 };
    assert_eq!(mask(key), mask(key));
    for other in [
        Dropout { seed: 2, ..key },
        Dropout { seed: 1 | 1 << 40, ..key },
        Dropout { site: 3, ..key },
        Dropout { step: 4, ..key },
    ] {
        let same = mask(other).iter().zip(mask(key)).filter(|(a, b)| *a == b).count();
        // Half of 1000 agree by chance: five standard deviations, 5 · √(1000 / 4), about it.
        assert!(same.abs_diff(500) <= 79, "{other:?}: {same}");
    }
    assert_eq!(mask(Dropout { probability: 0.0, ..key }), bits(&[1.0; 1000]));
}
