//! What holds for every kernel: the same bits for any thread count, values that are not finite, indices out of range.

use std::sync::Arc;

use ebbtide_kernels::{
    Category, CpuOptions, DType, Device, Error, Op, SimOptions, Slice, Stream,
    op::{
        AdamW, Attention, AttentionBackward, AttentionShape, CrossEntropy, CustomOp, Dropout, Embedding,
        EmbeddingBackward, GeluKind, Gemm, LayerNorm, LayerNormBackward, Layout, Residual, reduce_workspace,
    },
};
use half::{bf16, f16};
use proptest::prelude::*;

fn cpu(threads: usize) -> Device {
    Device::cpu_with(CpuOptions { threads: Some(threads), budget_bytes: None }).unwrap()
}

fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..len).map(|_| 4.0 * random.f32() - 2.0).collect()
}

struct Bench<'a> {
    device: &'a Device,
    stream: Stream,
}

impl<'a> Bench<'a> {
    fn new(device: &'a Device) -> Self {
        Bench { stream: device.stream("compute"), device }
    }
    fn up(&self, seed: u64, len: usize) -> Slice {
        self.stream.upload(&random(seed, len), Category::Workspace, "operand").unwrap()
    }
    fn out(&self, len: usize) -> Slice {
        self.device.alloc(len, DType::F32, Category::Workspace, "out").unwrap()
    }
    fn down(&self, slice: &Slice) -> Vec<f32> {
        self.stream.download(slice).unwrap()
    }
}

/// Runs every kernel once on shapes of the given size, and gives the bits of all that was written.
fn every_kernel(device: &Device, rows: usize, width: usize, seed: u64) -> Vec<Vec<u32>> {
    let bench = Bench::new(device);
    let (up, out) = (|offset: u64, len| bench.up(seed + offset, len), |len| bench.out(len));
    let submit = |op: Op| bench.stream.submit(op).unwrap();
    let dropout = Dropout { probability: 0.25, seed, site: 1, step: 3 };
    let size = rows * width;
    let mut written = Vec::new();

    for (a_layout, b_layout) in [(Layout::Normal, Layout::Transposed), (Layout::Transposed, Layout::Normal)] {
        let product = up(3, rows * rows);
        submit(Op::Gemm(Gemm {
            a: up(1, size),
            a_layout,
            b: up(2, size),
            b_layout,
            bias: Some(up(4, rows)),
            out: product.clone(),
            accumulate: true,
            m: rows,
            n: rows,
            k: width,
        }));
        written.push(product);
    }
    let dbias = up(5, width);
    let workspace = out(reduce_workspace(rows, width));
    submit(Op::BiasBackward { dout: up(6, size), dbias: dbias.clone(), workspace, rows, width });
    let (sum, normed, mean, rstd) = (out(size), out(size), out(rows), out(rows));
    submit(Op::LayerNorm(LayerNorm {
        input: up(7, size),
        residual: Some(Residual { input: up(8, size), out: sum.clone(), dropout: Some(dropout) }),
        weight: up(9, width),
        bias: up(10, width),
        out: normed.clone(),
        mean: mean.clone(),
        rstd: rstd.clone(),
        rows,
        width,
        epsilon: 1e-5,
    }));
    let (dinput, ddelta, dweight, dshift) = (up(11, size), out(size), up(12, width), up(13, width));
    submit(Op::LayerNormBackward(LayerNormBackward {
        dout: up(14, size),
        input: sum.clone(),
        weight: up(9, width),
        mean,
        rstd,
        dinput: dinput.clone(),
        accumulate: true,
        ddelta: Some((ddelta.clone(), dropout)),
        dweight: dweight.clone(),
        dbias: dshift.clone(),
        workspace: out(reduce_workspace(rows, 2 * width)),
        rows,
        width,
    }));
    let (active, gradient) = (out(size), up(15, size));
    submit(Op::Gelu { input: sum.clone(), out: active.clone(), kind: GeluKind::Tanh });
    submit(Op::GeluBackward { input: sum.clone(), gradient: gradient.clone(), kind: GeluKind::Erf });
    let shape = AttentionShape { batch: 1, context: rows, heads: 1, head_size: width, scale: 0.1 };
    let (mixed, lse, dqkv) = (out(size), out(rows), out(3 * size));
    let qkv = up(16, 3 * size);
    submit(Op::Attention(Attention {
        qkv: qkv.clone(),
        out: mixed.clone(),
        lse: lse.clone(),
        shape,
        dropout: Some(dropout),
    }));
    submit(Op::AttentionBackward(AttentionBackward {
        dout: up(17, size),
        qkv,
        out: mixed.clone(),
        lse: lse.clone(),
        dqkv: dqkv.clone(),
        workspace: out(rows),
        shape,
        dropout: Some(dropout),
    }));
    let vocabulary = 5;
    let ids: Vec<u32> = (0..rows as u32).map(|i| i * 7 % 5).collect();
    let tokens = bench.stream.upload(&ids, Category::Staging, "tokens").unwrap();
    let embedded = out(size);
    submit(Op::Embedding(Embedding {
        tokens: tokens.clone(),
        wte: up(18, vocabulary * width),
        wpe: up(19, size),
        out: embedded.clone(),
        batch: 1,
        context: rows,
        width,
        vocabulary,
        dropout: Some(dropout),
    }));
    let (dwte, dwpe) = (up(20, vocabulary * width), up(21, size));
    submit(Op::EmbeddingBackward(EmbeddingBackward {
        tokens,
        dout: up(22, size),
        dwte: dwte.clone(),
        dwpe: dwpe.clone(),
        batch: 1,
        context: rows,
        width,
        vocabulary,
        dropout: Some(dropout),
    }));
    let targets: Vec<i32> = (0..rows).map(|i| (i * 3 % width) as i32).collect();
    let targets = bench.stream.upload(&targets, Category::Staging, "targets").unwrap();
    let (logits, losses) = (up(23, size), out(rows));
    submit(Op::CrossEntropy(CrossEntropy {
        logits: logits.clone(),
        targets,
        losses: losses.clone(),
        rows,
        vocabulary: width,
        gradient_scale: Some(0.5),
        loss_scale: None,
    }));
    let (total, squares, norm, coefficient) = (up(24, 1), out(1), out(1), out(1));
    submit(Op::Sum { input: losses.clone(), out: total.clone(), scale: 0.3 });
    submit(Op::SumSquares { input: gradient.clone(), out: squares.clone() });
    submit(Op::ClipCoefficient {
        sum_squares: squares.clone(),
        norm: norm.clone(),
        coefficient: coefficient.clone(),
        max_norm: 1.0,
    });
    let (parameters, first, second) = (up(25, size), up(26, size), out(size));
    submit(Op::Fill { out: second.clone(), value: 0.25 });
    submit(Op::AdamW(AdamW {
        parameters: parameters.clone(),
        gradients: gradient.clone(),
        first_moment: first.clone(),
        second_moment: second.clone(),
        gradient_scale: Some(coefficient.clone()),
        scaled: None,
        learning_rate: 0.1,
        beta1: 0.9,
        beta2: 0.99,
        epsilon: 1e-8,
        weight_decay: 0.1,
        step: 3,
    }));
    let (halves, again, copied, dropped) = (
        device.alloc(size, DType::F16, Category::Workspace, "halves").unwrap(),
        out(size),
        out(size),
        up(27, size),
    );
    submit(Op::Cast { input: active.clone(), out: halves.clone() });
    submit(Op::Cast { input: halves, out: again.clone() });
    submit(Op::Copy { input: again.clone(), out: copied.clone() });
    submit(Op::Add { input: active.clone(), out: copied.clone() });
    submit(Op::Dropout { data: dropped.clone(), dropout });
    written.extend([dbias, sum, normed, dinput, ddelta, dweight, dshift, active, gradient, mixed, lse, dqkv]);
    written.extend([embedded, dwte, dwpe, logits, losses, total, squares, norm, coefficient]);
    written.extend([parameters, first, second, again, copied, dropped]);
    let bits = |slice: &Slice| bench.down(slice).iter().map(|x| x.to_bits()).collect();
    let written = written.iter().map(bits).collect();
    device.synchronize().unwrap();
    written
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Whatever the thread count, on shapes from a single element to where the work is cut.
    #[test]
    fn thread_counts_give_the_same_bits(rows in 1usize..200, width in 1usize..200, seed in 0u64..1 << 40) {
        let expected = every_kernel(&cpu(1), rows, width, seed);
        for threads in [2, 5] {
            prop_assert!(every_kernel(&cpu(threads), rows, width, seed) == expected, "{} threads", threads);
        }
    }

    /// Fresh memory is NaN there, and a read of what was never written is reported: no kernel leaves a hole.
    #[test]
    fn no_kernel_leaves_a_hole(rows in 1usize..80, width in 1usize..80, seed in 0u64..1 << 40) {
        let device = Device::sim(SimOptions { seed, ..SimOptions::default() }).unwrap();
        prop_assert!(every_kernel(&device, rows, width, seed) == every_kernel(&cpu(1), rows, width, seed));
    }

    /// Each conversion is that of one element.
    #[test]
    fn casts_round_to_nearest(bits in prop::collection::vec(any::<u32>(), 1..600)) {
        let values: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        let device = cpu(1);
        let bench = Bench::new(&device);
        let input = bench.stream.upload(&values, Category::Workspace, "x").unwrap();
        let halves = device.alloc(values.len(), DType::F16, Category::Workspace, "f16").unwrap();
        let brains = device.alloc(values.len(), DType::BF16, Category::Workspace, "bf16").unwrap();
        let back = bench.out(values.len());
        bench.stream.submit(Op::Cast { input: input.clone(), out: halves.clone() }).unwrap();
        bench.stream.submit(Op::Cast { input, out: brains.clone() }).unwrap();
        bench.stream.submit(Op::Cast { input: halves.clone(), out: back.clone() }).unwrap();
        let halves = bench.stream.download::<f16>(&halves).unwrap();
        let brains = bench.stream.download::<bf16>(&brains).unwrap();
        for (i, &value) in values.iter().enumerate() {
            let (half, brain, back) = (halves[i], brains[i], bench.down(&back)[i]);
            if value.is_nan() {
                prop_assert!(half.is_nan() && brain.is_nan() && back.is_nan());
            } else {
                prop_assert_eq!(half.to_bits(), f16::from_f32(value).to_bits());
                prop_assert_eq!(brain.to_bits(), bf16::from_f32(value).to_bits());
                prop_assert_eq!(back.to_bits(), half.to_f32().to_bits());
            }
        }
    }

    /// Five steps of AdamW against the formula in f64.
    #[test]
    fn adamw_follows_its_formula(len in 1usize..200, decay in 0.0f64..0.3, seed in 0u64..1 << 40) {
        let device = cpu(1);
        let bench = Bench::new(&device);
        let (parameters, first, second) = (bench.up(seed, len), bench.out(len), bench.out(len));
        let scale = bench.stream.upload(&[0.5f32], Category::Workspace, "scale").unwrap();
        for moment in [&first, &second] {
            bench.stream.submit(Op::Fill { out: moment.clone(), value: 0.0 }).unwrap();
        }
        let mut p: Vec<f64> = random(seed, len).into_iter().map(f64::from).collect();
        let (mut m, mut v) = (vec![0.0f64; len], vec![0.0f64; len]);
        let (rate, beta1, beta2, epsilon) = (0.01f64, 0.9f64, 0.95f64, 1e-8f64);
        for step in 1..=5u64 {
            bench.stream.submit(Op::AdamW(AdamW {
                parameters: parameters.clone(),
                gradients: bench.up(seed + step, len),
                first_moment: first.clone(),
                second_moment: second.clone(),
                gradient_scale: Some(scale.clone()),
                scaled: None,
                learning_rate: rate as f32,
                beta1: beta1 as f32,
                beta2: beta2 as f32,
                epsilon: epsilon as f32,
                weight_decay: decay as f32,
                step,
            })).unwrap();
            for (i, g) in random(seed + step, len).into_iter().enumerate() {
                let g = 0.5 * f64::from(g);
                p[i] *= 1.0 - rate * decay;
                m[i] += (1.0 - beta1) * (g - m[i]);
                v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
                let root = v[i].sqrt() / (1.0 - beta2.powi(step as i32)).sqrt() + epsilon;
                p[i] -= rate / (1.0 - beta1.powi(step as i32)) * m[i] / root;
            }
        }
        for (found, expected) in bench.down(&parameters).into_iter().zip(p) {
            // Five updates of at most 0.03, each right to a few units of 2^-24, on parameters of at most 2.
            prop_assert!((f64::from(found) - expected).abs() <= 5e-6, "{} {}", found, expected);
        }
    }

    /// Sums in f64, over more than one piece.
    #[test]
    fn sums_are_exact_to_f32(len in 1usize..60_000, seed in 0u64..1 << 40) {
        let device = cpu(3);
        let bench = Bench::new(&device);
        let (sum, squares) = (bench.out(1), bench.out(1));
        bench.stream.submit(Op::Fill { out: sum.clone(), value: 1.0 }).unwrap();
        let input = bench.up(seed, len);
        bench.stream.submit(Op::Sum { input: input.clone(), out: sum.clone(), scale: 0.5 }).unwrap();
        bench.stream.submit(Op::SumSquares { input, out: squares.clone() }).unwrap();
        let values = random(seed, len);
        let total: f64 = values.iter().map(|&x| f64::from(x)).sum();
        let of_squares: f64 = values.iter().map(|&x| f64::from(x).powi(2)).sum();
        let expected = 1.0 + (0.5 * total) as f32;
        prop_assert!((bench.down(&sum)[0] - expected).abs() <= f32::EPSILON * expected.abs().max(1.0));
        prop_assert!((f64::from(bench.down(&squares)[0]) - of_squares).abs() <= 1e-7 * of_squares);
    }
}

#[test]
fn what_is_not_finite_stays_so() {
    let device = cpu(2);
    let bench = Bench::new(&device);
    let up = |values: &[f32]| bench.stream.upload(values, Category::Workspace, "x").unwrap();
    // 0 · ∞ in a product.
    let out = bench.out(1);
    bench
        .stream
        .submit(Op::Gemm(Gemm {
            a: up(&[0.0, 1.0]),
            a_layout: Layout::Normal,
            b: up(&[f32::INFINITY, 1.0]),
            b_layout: Layout::Normal,
            bias: None,
            out: out.clone(),
            accumulate: false,
            m: 1,
            n: 1,
            k: 2,
        }))
        .unwrap();
    assert!(bench.down(&out)[0].is_nan());

    // A row of a norm spoils no other.
    let (out, mean, rstd) = (bench.out(6), bench.out(3), bench.out(3));
    bench
        .stream
        .submit(Op::LayerNorm(LayerNorm {
            input: up(&[1.0, 2.0, f32::NAN, 2.0, 3.0, 5.0]),
            residual: None,
            weight: up(&[1.0; 2]),
            bias: up(&[0.0; 2]),
            out: out.clone(),
            mean,
            rstd,
            rows: 3,
            width: 2,
            epsilon: 1e-5,
        }))
        .unwrap();
    let finite: Vec<bool> = bench.down(&out).iter().map(|x| x.is_finite()).collect();
    assert_eq!(finite, [true, true, false, false, true, true]);

    // Losses and norms.
    let targets = bench.stream.upload(&[0i32, 0, 0], Category::Staging, "targets").unwrap();
    let (logits, losses) = (up(&[1.0, f32::NAN, f32::INFINITY, 0.0, 1.0, f32::NEG_INFINITY]), bench.out(3));
    bench
        .stream
        .submit(Op::CrossEntropy(CrossEntropy {
            logits,
            targets,
            losses: losses.clone(),
            rows: 3,
            vocabulary: 2,
            gradient_scale: Some(1.0),
            loss_scale: None,
        }))
        .unwrap();
    let found = bench.down(&losses);
    assert!(found[0].is_nan() && found[1].is_nan() && found[2] == 0.0, "{found:?}");
    for (squares, max_norm, norm, coefficient) in [
        (25.0, 1.0, 5.0, 0.2),
        (0.25, 1.0, 0.5, 1.0),
        (0.25, f32::INFINITY, 0.5, 1.0),
        (f32::INFINITY, 1.0, f32::INFINITY, 0.0),
    ] {
        let (of_norm, of_coefficient) = (bench.out(1), bench.out(1));
        bench
            .stream
            .submit(Op::ClipCoefficient {
                sum_squares: up(&[squares]),
                norm: of_norm.clone(),
                coefficient: of_coefficient.clone(),
                max_norm,
            })
            .unwrap();
        assert_eq!(bench.down(&of_norm)[0], norm);
        assert!((bench.down(&of_coefficient)[0] - coefficient).abs() < 1e-6);
    }
}

#[test]
fn indices_out_of_range_fail_the_op_and_not_the_device() {
    let device = cpu(2);
    let bench = Bench::new(&device);
    let tokens = bench.stream.upload(&[0u32, 4, 5], Category::Staging, "tokens").unwrap();
    let embedding = Op::Embedding(Embedding {
        tokens,
        wte: bench.up(1, 10),
        wpe: bench.up(2, 6),
        out: bench.out(6),
        batch: 1,
        context: 3,
        width: 2,
        vocabulary: 5,
        dropout: None,
    });
    let targets = bench.stream.upload(&[-1i32, 2], Category::Staging, "targets").unwrap();
    let loss = Op::CrossEntropy(CrossEntropy {
        logits: bench.up(3, 4),
        targets,
        losses: bench.out(2),
        rows: 2,
        vocabulary: 2,
        gradient_scale: None,
        loss_scale: None,
    });
    for (op, expected) in [
        (embedding, "embedding failed: token 5 at index 2 is outside of the vocabulary of 5"),
        (loss, "cross_entropy failed: target 2 at index 1 is outside of the vocabulary of 2"),
    ] {
        bench.stream.submit(op).unwrap();
        let skipped = bench.out(1);
        bench.stream.submit(Op::Fill { out: skipped, value: 1.0 }).unwrap();
        assert_eq!(device.synchronize().unwrap_err().to_string(), expected);
        assert_eq!(device.synchronize(), Ok(()));
        let after = bench.out(1);
        bench.stream.submit(Op::Fill { out: after.clone(), value: 2.0 }).unwrap();
        assert_eq!(bench.down(&after), [2.0]);
    }
}

/// Doubles its output and adds its input; fails on a zero.
struct DoubleAndAdd;

impl CustomOp for DoubleAndAdd {
    fn name(&self) -> &str {
        "double_and_add"
    }
    fn run_cpu(&self, inputs: &[&[u8]], outputs: &mut [&mut [u8]]) -> Result<(), String> {
        for (out, &input) in outputs[0].iter_mut().zip(inputs[0]) {
            if input == 0 {
                return Err("a zero".to_string());
            }
            *out = *out * 2 + input;
        }
        Ok(())
    }
}

#[test]
fn custom_ops_run_in_order_and_may_fail() {
    let device = cpu(2);
    let (first, second) = (device.stream("a"), device.stream("b"));
    let up = |values: &[u8]| first.upload(values, Category::Workspace, "bytes").unwrap();
    let (input, out) = (up(&[1, 2]), up(&[10, 20]));
    for stream in [&first, &second, &first] {
        let (inputs, outputs) = (vec![input.clone()], vec![out.clone()]);
        stream.submit(Op::Custom { custom: Arc::new(DoubleAndAdd), inputs, outputs }).unwrap();
    }
    assert_eq!(second.download::<u8>(&out).unwrap(), [87, 174]);
    let (inputs, outputs) = (vec![up(&[0, 0])], vec![out]);
    first.submit(Op::Custom { custom: Arc::new(DoubleAndAdd), inputs, outputs }).unwrap();
    let expected = Error::OpFailed { op: "double_and_add".to_string(), message: "a zero".to_string() };
    assert_eq!(device.synchronize(), Err(expected));
}

/// The same offsets of two devices are not one place.
#[test]
fn two_devices_do_not_meet_in_an_op() {
    let (first, second) = (cpu(1), cpu(1));
    let (input, out) = (Bench::new(&first).up(1, 4), Bench::new(&second).up(2, 4));
    let error = first.stream("compute").submit(Op::Add { input, out }).unwrap_err();
    assert_eq!(error, Error::OtherDevice { op: "add".to_string(), operand: "out" });
}
