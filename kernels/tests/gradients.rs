//! Every op against its formula, and every backward against finite differences, in f64.
//!
//! The formulas stand here as plainly as they can be written. A backward op is held against central differences of its
//! formula's `Σ out · r` for random `r`; with a step of 1e-5 in f64 their own error is near 1e-9. What is allowed beyond is
//! f32's: [`EPSILON`] for each rounding, times a small power of the number of terms.
//!
//! Shapes are odd on purpose: one row, one column, lengths that no tile divides.

use ebbtide_kernels::{
    Category, DType, Device, Op, Slice, Stream,
    op::{
        Attention, AttentionBackward, AttentionShape, CrossEntropy, Dropout, Embedding, EmbeddingBackward,
        GeluKind, Gemm, LayerNorm, LayerNormApply, LayerNormBackward, Layout, Residual, reduce_workspace,
    },
};

/// Unit of rounding of f32.
const EPSILON: f64 = 1.0 / (1u64 << 24) as f64;

struct Bench {
    device: Device,
    stream: Stream,
}

impl Bench {
    fn new() -> Self {
        let device = Device::cpu().unwrap();
        Bench { stream: device.stream("compute"), device }
    }

    fn up(&self, values: &[f32]) -> Slice {
        self.stream.upload(values, Category::Workspace, "operand").unwrap()
    }

    /// What no kernel may read.
    fn out(&self, len: usize) -> Slice {
        self.up(&vec![f32::NAN; len])
    }

    fn zeros(&self, len: usize) -> Slice {
        self.up(&vec![0.0; len])
    }

    fn integers<T: ebbtide_kernels::Element>(&self, values: &[T]) -> Slice {
        self.stream.upload(values, Category::Staging, "integers").unwrap()
    }

    fn run(&self, op: Op) {
        self.stream.submit(op).unwrap();
    }

    fn down(&self, slice: &Slice) -> Vec<f32> {
        self.device.synchronize().unwrap();
        self.stream.download(slice).unwrap()
    }
}

fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(seed);
    // Sums of uniform deviates: near enough to normal ones.
    (0..len).map(|_| (0..4).map(|_| random.f32() - 0.5).sum::<f32>() * 1.7).collect()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

/// Each element within `roundings` units of f32 at the size of the largest.
fn close(what: &str, found: &[f32], expected: &[f64], roundings: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1e-3f64, |largest, x| largest.max(x.abs()));
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(found) - expected).abs();
        assert!(
            error <= roundings * EPSILON * largest,
            "{what}[{i}] is {found}, not {expected}: {error:.1e} off"
        );
    }
}

/// Gradient of `f` at `x` in some of its elements: all of a short one, about 150 of a long one.
fn differences(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<(usize, f64)> {
    const STEP: f64 = 1e-5;
    let mut x = x.to_vec();
    let stride = (x.len() / 150).max(1);
    let mut gradient = Vec::new();
    for i in (0..x.len()).step_by(stride) {
        let at = x[i];
        x[i] = at + STEP;
        let above = f(&x);
        x[i] = at - STEP;
        let below = f(&x);
        x[i] = at;
        gradient.push((i, (above - below) / (2.0 * STEP)));
    }
    gradient
}

/// A kernel's gradient against [`differences`].
fn gradient_close(what: &str, found: &[f32], x: &[f32], roundings: f64, f: impl Fn(&[f64]) -> f64) {
    let expected = differences(&wide(x), f);
    let found: Vec<f32> = expected.iter().map(|&(i, _)| found[i]).collect();
    let expected: Vec<f64> = expected.into_iter().map(|(_, gradient)| gradient).collect();
    close(what, &found, &expected, roundings);
}

fn dot(a: &[f64], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, &b)| a * f64::from(b)).sum()
}

fn drop_with(dropout: Option<Dropout>, values: &mut [f64]) {
    if let Some(dropout) = dropout {
        values.iter_mut().zip(0..).for_each(|(x, i)| *x *= f64::from(dropout.factor(i)));
    }
}

fn dropouts() -> [Option<Dropout>; 2] {
    [None, Some(Dropout { probability: 0.3, seed: 0x1234_5678_9ABC, site: 2, step: 7 })]
}

const LINEAR_SHAPES: [[usize; 3]; 9] = [
    [1, 1, 1],
    [1, 7, 13],
    [13, 1, 7],
    [7, 13, 1],
    [65, 33, 17],
    [3, 130, 257],
    [131, 67, 40],
    [300, 257, 70],
    [64, 64, 64],
];

#[test]
fn linear() {
    let bench = Bench::new();
    for [m, n, k] in LINEAR_SHAPES {
        let (x, w, b, r) = (random(1, m * k), random(2, k * n), random(3, n), random(4, m * n));
        let forward = |x: &[f64], w: &[f64], b: &[f64]| -> Vec<f64> {
            let row = |i: usize, j: usize| (0..k).map(|l| x[i * k + l] * w[l * n + j]).sum::<f64>() + b[j];
            (0..m * n).map(|at| row(at / n, at % n)).collect()
        };
        let (xs, ws, bs, dy) = (bench.up(&x), bench.up(&w), bench.up(&b), bench.up(&r));
        let gemm =
            |a: &Slice, a_layout, b: &Slice, b_layout, out: &Slice, accumulate, [m, n, k]: [usize; 3]| {
                let (a, b, out) = (a.clone(), b.clone(), out.clone());
                bench.run(Op::Gemm(Gemm { a, a_layout, b, b_layout, bias: None, out, accumulate, m, n, k }));
            };
        let what = format!("{m} × {n} × {k}");
        let out = bench.out(m * n);
        bench.run(Op::Gemm(Gemm {
            a: xs.clone(),
            a_layout: Layout::Normal,
            b: ws.clone(),
            b_layout: Layout::Normal,
            bias: Some(bs.clone()),
            out: out.clone(),
            accumulate: false,
            m,
            n,
            k,
        }));
        let roundings = 4.0 + (k as f64).sqrt() * 4.0;
        close(
            &format!("linear {what}"),
            &bench.down(&out),
            &forward(&wide(&x), &wide(&w), &wide(&b)),
            roundings,
        );

        let (dx, dw, db) = (bench.out(m * k), bench.up(&vec![1.0; k * n]), bench.up(&vec![1.0; n]));
        gemm(&dy, Layout::Normal, &ws, Layout::Transposed, &dx, false, [m, k, n]);
        gemm(&xs, Layout::Transposed, &dy, Layout::Normal, &dw, true, [k, n, m]);
        let workspace = bench.out(reduce_workspace(m, n));
        bench.run(Op::BiasBackward { dout: dy.clone(), dbias: db.clone(), workspace, rows: m, width: n });
        let (xw, ww, bw) = (wide(&x), wide(&w), wide(&b));
        let roundings = |terms: usize| 8.0 + 4.0 * (terms as f64).sqrt();
        gradient_close(&format!("dx {what}"), &bench.down(&dx), &x, roundings(n), |x| {
            dot(&forward(x, &ww, &bw), &r)
        });
        // What was there before stays in the sum.
        let minus_one = |values: Vec<f32>| -> Vec<f32> { values.iter().map(|x| x - 1.0).collect() };
        let dw = minus_one(bench.down(&dw));
        gradient_close(&format!("dw {what}"), &dw, &w, roundings(m), |w| dot(&forward(&xw, w, &bw), &r));
        let db = minus_one(bench.down(&db));
        gradient_close(&format!("db {what}"), &db, &b, roundings(m), |b| dot(&forward(&xw, &ww, b), &r));
    }
}

/// Every layout, with and without bias and accumulation.
#[test]
fn gemm_layouts() {
    let bench = Bench::new();
    for ([m, n, k], seed) in LINEAR_SHAPES.into_iter().zip(10..) {
        let (a, b, bias, before) =
            (random(seed, m * k), random(seed + 1, k * n), random(seed + 2, n), random(seed + 3, m * n));
        for case in 0..16 {
            let layout = |bit: u32| if case >> bit & 1 == 1 { Layout::Transposed } else { Layout::Normal };
            let (a_layout, b_layout) = (layout(0), layout(1));
            let (accumulate, biased) = (case >> 2 & 1 == 1, case >> 3 & 1 == 1);
            let at = |values: &[f32], layout: Layout, [i, j]: [usize; 2], [rows, columns]: [usize; 2]| {
                f64::from(if layout == Layout::Normal {
                    values[i * columns + j]
                } else {
                    values[j * rows + i]
                })
            };
            let element = |i: usize, j: usize| {
                let product: f64 =
                    (0..k).map(|l| at(&a, a_layout, [i, l], [m, k]) * at(&b, b_layout, [l, j], [k, n])).sum();
                let bias = if biased { f64::from(bias[j]) } else { 0.0 };
                product + bias + if accumulate { f64::from(before[i * n + j]) } else { 0.0 }
            };
            let expected: Vec<f64> = (0..m * n).map(|at| element(at / n, at % n)).collect();
            let out = if accumulate { bench.up(&before) } else { bench.out(m * n) };
            bench.run(Op::Gemm(Gemm {
                a: bench.up(&a),
                a_layout,
                b: bench.up(&b),
                b_layout,
                bias: biased.then(|| bench.up(&bias)),
                out: out.clone(),
                accumulate,
                m,
                n,
                k,
            }));
            let what = format!("gemm {m} × {n} × {k}, case {case:04b}");
            close(&what, &bench.down(&out), &expected, 8.0 + 4.0 * (k as f64).sqrt());
        }
    }
}

fn gelu(x: f64, kind: GeluKind) -> f64 {
    match kind {
        GeluKind::Tanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        GeluKind::Erf => 0.5 * x * (1.0 + libm::erf(x / std::f64::consts::SQRT_2)),
    }
}

#[test]
fn gelus() {
    let bench = Bench::new();
    for kind in [GeluKind::Tanh, GeluKind::Erf] {
        for len in [1, 7, 33, 1000, 40_001] {
            let (x, r) = (random(len as u64, len), random(5, len));
            let x: Vec<f32> = x.iter().map(|x| 3.0 * x).collect();
            let (input, out, gradient) = (bench.up(&x), bench.out(len), bench.up(&r));
            bench.run(Op::Gelu { input: input.clone(), out: out.clone(), kind });
            bench.run(Op::GeluBackward { input, gradient: gradient.clone(), kind });
            let expected: Vec<f64> = wide(&x).iter().map(|&x| gelu(x, kind)).collect();
            close("gelu", &bench.down(&out), &expected, 16.0);
            // Elementwise, so each difference needs its own element alone.
            let slope = |x: f64| (gelu(x + 1e-5, kind) - gelu(x - 1e-5, kind)) / 2e-5;
            let expected: Vec<f64> =
                x.iter().zip(&r).map(|(&x, &r)| slope(f64::from(x)) * f64::from(r)).collect();
            close("gelu backward", &bench.down(&gradient), &expected, 64.0);
        }
    }
}

const NORM_SHAPES: [[usize; 2]; 8] =
    [[1, 1], [1, 7], [7, 2], [13, 33], [65, 16], [130, 17], [3, 768], [200, 65]];

/// Mean, reciprocal deviation and output of a row-wise norm.
fn norm(x: &[f64], weight: &[f64], bias: &[f64], epsilon: f64) -> Vec<f64> {
    let width = weight.len();
    let row = |row: &[f64]| -> Vec<f64> {
        let mean = row.iter().sum::<f64>() / width as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
        let rstd = 1.0 / (variance + epsilon).sqrt();
        (0..width).map(|j| (row[j] - mean) * rstd * weight[j] + bias[j]).collect()
    };
    x.chunks(width).flat_map(row).collect()
}

#[test]
fn layer_norms() {
    let bench = Bench::new();
    let epsilon = 1e-2;
    for ([rows, width], seed) in NORM_SHAPES.into_iter().zip(100..) {
        for dropout in dropouts() {
            for fused in [false, true] {
                let size = rows * width;
                let (stream, delta) = (random(seed, size), random(seed + 1, size));
                let (w, b, r) = (random(seed + 2, width), random(seed + 3, width), random(seed + 4, size));
                // The gradient that reaches the residual stream from above it.
                let above = random(seed + 5, size);
                let sum_of = |stream: &[f64], delta: &[f64]| -> Vec<f64> {
                    let mut delta = delta.to_vec();
                    drop_with(dropout.filter(|_| fused), &mut delta);
                    if !fused {
                        return delta;
                    }
                    stream.iter().zip(delta).map(|(x, delta)| x + delta).collect()
                };
                let (sw, dw, ww, bw) = (wide(&stream), wide(&delta), wide(&w), wide(&b));
                let what = format!("{rows} × {width}, fused {fused}, dropout {}", dropout.is_some());
                let (mean, rstd, out) = (bench.out(rows), bench.out(rows), bench.out(size));
                let (input, weight, bias) = (bench.up(&delta), bench.up(&w), bench.up(&b));
                let residual =
                    fused.then(|| Residual { input: bench.up(&stream), out: bench.out(size), dropout });
                let normalised = residual.as_ref().map_or(input.clone(), |residual| residual.out.clone());
                bench.run(Op::LayerNorm(LayerNorm {
                    input,
                    residual,
                    weight: weight.clone(),
                    bias: bias.clone(),
                    out: out.clone(),
                    mean: mean.clone(),
                    rstd: rstd.clone(),
                    rows,
                    width,
                    epsilon: epsilon as f32,
                }));
                let sum = sum_of(&sw, &dw);
                close(&format!("residual {what}"), &bench.down(&normalised), &sum, 4.0);
                // A reciprocal deviation of up to 10 lifts the roundings of x - mean.
                close(&format!("norm {what}"), &bench.down(&out), &norm(&sum, &ww, &bw, epsilon), 128.0);
                let again = bench.out(size);
                bench.run(Op::LayerNormApply(LayerNormApply {
                    input: normalised.clone(),
                    weight: weight.clone(),
                    bias,
                    mean: mean.clone(),
                    rstd: rstd.clone(),
                    out: again.clone(),
                    rows,
                    width,
                }));
                let bits = |values: Vec<f32>| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(bench.down(&again)), bits(bench.down(&out)), "{what}: made again");

                let dinput = if fused { bench.up(&above) } else { bench.out(size) };
                let ddelta = dropout.filter(|_| fused).map(|dropout| (bench.out(size), dropout));
                let (dweight, dbias) = (bench.up(&vec![1.0; width]), bench.up(&vec![1.0; width]));
                bench.run(Op::LayerNormBackward(LayerNormBackward {
                    dout: bench.up(&r),
                    input: normalised,
                    weight,
                    mean,
                    rstd,
                    dinput: dinput.clone(),
                    accumulate: fused,
                    ddelta: ddelta.clone(),
                    dweight: dweight.clone(),
                    dbias: dbias.clone(),
                    workspace: bench.out(reduce_workspace(rows, 2 * width)),
                    rows,
                    width,
                }));
                let loss = |stream: &[f64], delta: &[f64], weight: &[f64], bias: &[f64]| {
                    let sum = sum_of(stream, delta);
                    let through = if fused { dot(&sum, &above) } else { 0.0 };
                    dot(&norm(&sum, weight, bias, epsilon), &r) + through
                };
                // Through rstd³ of up to 1000, from a row of one or two that is nearly even.
                let roundings = 2000.0 + 16.0 * rows as f64;
                let dx = bench.down(&dinput);
                if fused {
                    gradient_close(&format!("dx {what}"), &dx, &stream, roundings, |x| {
                        loss(x, &dw, &ww, &bw)
                    });
                    let ddelta = ddelta.map_or(dx, |(ddelta, _)| bench.down(&ddelta));
                    gradient_close(&format!("ddelta {what}"), &ddelta, &delta, roundings, |x| {
                        loss(&sw, x, &ww, &bw)
                    });
                } else {
                    gradient_close(&format!("dx {what}"), &dx, &delta, roundings, |x| loss(&sw, x, &ww, &bw));
                }
                let minus_one =
                    |slice: &Slice| bench.down(slice).iter().map(|x| x - 1.0).collect::<Vec<f32>>();
                gradient_close(&format!("dw {what}"), &minus_one(&dweight), &w, roundings, |w| {
                    loss(&sw, &dw, w, &bw)
                });
                gradient_close(&format!("db {what}"), &minus_one(&dbias), &b, roundings, |b| {
                    loss(&sw, &dw, &ww, b)
                });
            }
        }
    }
}

/// Attention as its definition has it, with the whole matrix; and each row's logsumexp.
fn attention(qkv: &[f64], shape: &AttentionShape, dropout: Option<Dropout>) -> (Vec<f64>, Vec<f64>) {
    let &AttentionShape { batch, context, heads, head_size, scale } = shape;
    let width = heads * head_size;
    let (mut out, mut lse) = (vec![0.0; batch * context * width], vec![0.0; batch * heads * context]);
    for (b, h, t) in
        (0..batch * heads * context).map(|i| (i / context / heads, i / context % heads, i % context))
    {
        let at = |t: usize, third: usize| {
            &qkv[(b * context + t) * 3 * width + third * width + h * head_size..][..head_size]
        };
        let score =
            |s: usize| at(t, 0).iter().zip(at(s, 1)).map(|(q, k)| q * k).sum::<f64>() * f64::from(scale);
        let weights: Vec<f64> = (0..=t).map(|s| score(s).exp()).collect();
        let total: f64 = weights.iter().sum();
        lse[(b * heads + h) * context + t] = total.ln();
        for (s, weight) in weights.iter().enumerate() {
            let index = (((b * heads + h) * context + t) * context + s) as u64;
            let factor = dropout.map_or(1.0, |dropout| f64::from(dropout.factor(index)));
            let out = &mut out[(b * context + t) * width + h * head_size..][..head_size];
            out.iter_mut().zip(at(s, 2)).for_each(|(out, v)| *out += weight / total * factor * v);
        }
    }
    (out, lse)
}

#[test]
fn attentions() {
    let bench = Bench::new();
    // batch, context, heads, head size.
    let shapes = [
        [1, 1, 1, 1],
        [2, 2, 1, 3],
        [1, 7, 3, 5],
        [2, 13, 2, 8],
        [1, 63, 1, 4],
        [1, 65, 2, 3],
        [1, 130, 1, 16],
        [1, 515, 1, 2],
        [1, 600, 1, 1],
    ];
    for ([batch, context, heads, head_size], seed) in shapes.into_iter().zip(200..) {
        for dropout in dropouts() {
            let shape =
                AttentionShape { batch, context, heads, head_size, scale: 1.0 / (head_size as f32).sqrt() };
            let (qkv, r) = (random(seed, 3 * shape.channels()), random(seed + 1, shape.channels()));
            let (input, out, lse) = (bench.up(&qkv), bench.out(shape.channels()), bench.out(shape.rows()));
            bench.run(Op::Attention(Attention {
                qkv: input.clone(),
                out: out.clone(),
                lse: lse.clone(),
                shape,
                dropout,
            }));
            let what = format!("attention {shape:?}, dropout {}", dropout.is_some());
            let (expected, expected_lse) = attention(&wide(&qkv), &shape, dropout);
            close(&what, &bench.down(&out), &expected, 64.0);
            close(&format!("{what}: lse"), &bench.down(&lse), &expected_lse, 16.0);
            let dqkv = bench.out(3 * shape.channels());
            bench.run(Op::AttentionBackward(AttentionBackward {
                dout: bench.up(&r),
                qkv: input,
                out,
                lse,
                dqkv: dqkv.clone(),
                workspace: bench.out(shape.rows()),
                shape,
                dropout,
            }));
            let roundings = 64.0 + 8.0 * (context as f64).sqrt();
            // A difference costs a whole attention: fewer of them where that is long.
            let stride = if context > 100 { 37 } else { 1 };
            let expected: Vec<(usize, f64)> = if stride == 1 {
                differences(&wide(&qkv), |qkv| dot(&attention(qkv, &shape, dropout).0, &r))
            } else {
                let x = wide(&qkv);
                (0..x.len())
                    .step_by(x.len() / stride)
                    .map(|i| {
                        let value = |step: f64| {
                            let mut x = x.clone();
                            x[i] += step;
                            dot(&attention(&x, &shape, dropout).0, &r)
                        };
                        (i, (value(1e-5) - value(-1e-5)) / 2e-5)
                    })
                    .collect()
            };
            let dqkv = bench.down(&dqkv);
            let found: Vec<f32> = expected.iter().map(|&(i, _)| dqkv[i]).collect();
            let expected: Vec<f64> = expected.into_iter().map(|(_, gradient)| gradient).collect();
            close(&format!("{what}: dqkv"), &found, &expected, roundings);
        }
    }
}

#[test]
fn embeddings() {
    let bench = Bench::new();
    for ([batch, context, width, vocabulary], seed) in
        [[1, 1, 1, 1], [2, 3, 5, 4], [3, 17, 33, 7], [1, 64, 130, 11], [2, 40, 300, 3]].into_iter().zip(300..)
    {
        for dropout in dropouts() {
            let rows = batch * context;
            let mut of = fastrand::Rng::with_seed(seed);
            let tokens: Vec<u32> = (0..rows).map(|_| of.u32(..vocabulary as u32)).collect();
            let (wte, wpe) = (random(seed, vocabulary * width), random(seed + 1, context * width));
            let r = random(seed + 2, rows * width);
            let forward = |wte: &[f64], wpe: &[f64]| {
                let element = |row: usize, j: usize| {
                    wte[tokens[row] as usize * width + j] + wpe[row % context * width + j]
                };
                let mut out: Vec<f64> = (0..rows * width).map(|at| element(at / width, at % width)).collect();
                drop_with(dropout, &mut out);
                out
            };
            let (ids, out) = (bench.integers(&tokens), bench.out(rows * width));
            bench.run(Op::Embedding(Embedding {
                tokens: ids.clone(),
                wte: bench.up(&wte),
                wpe: bench.up(&wpe),
                out: out.clone(),
                batch,
                context,
                width,
                vocabulary,
                dropout,
            }));
            let (wtew, wpew) = (wide(&wte), wide(&wpe));
            close("embedding", &bench.down(&out), &forward(&wtew, &wpew), 4.0);
            let (dwte, dwpe) = (bench.zeros(vocabulary * width), bench.zeros(context * width));
            bench.run(Op::EmbeddingBackward(EmbeddingBackward {
                tokens: ids,
                dout: bench.up(&r),
                dwte: dwte.clone(),
                dwpe: dwpe.clone(),
                batch,
                context,
                width,
                vocabulary,
                dropout,
            }));
            let roundings = 8.0 + rows as f64;
            gradient_close("dwte", &bench.down(&dwte), &wte, roundings, |wte| dot(&forward(wte, &wpew), &r));
            gradient_close("dwpe", &bench.down(&dwpe), &wpe, roundings, |wpe| dot(&forward(&wtew, wpe), &r));
        }
    }
}

#[test]
fn cross_entropies() {
    let bench = Bench::new();
    for ([rows, vocabulary], seed) in
        [[1, 1], [1, 7], [5, 2], [7, 33], [3, 1025], [2, 5000]].into_iter().zip(400..)
    {
        let logits: Vec<f32> = random(seed, rows * vocabulary).iter().map(|x| 4.0 * x).collect();
        let mut of = fastrand::Rng::with_seed(seed);
        let targets: Vec<i32> =
            (0..rows).map(|row| if row == 2 { -100 } else { of.i32(..vocabulary as i32) }).collect();
        let loss_of = |row: usize, logits: &[f64]| match usize::try_from(targets[row]) {
            Ok(target) => {
                let row = &logits[row * vocabulary..][..vocabulary];
                row.iter().map(|x| x.exp()).sum::<f64>().ln() - row[target]
            }
            Err(_) => 0.0,
        };
        let expected: Vec<f64> = (0..rows).map(|row| loss_of(row, &wide(&logits))).collect();
        let scale = 0.37f32;
        for gradient_scale in [None, Some(scale)] {
            let (slice, losses) = (bench.up(&logits), bench.out(rows));
            bench.run(Op::CrossEntropy(CrossEntropy {
                logits: slice.clone(),
                targets: bench.integers(&targets),
                losses: losses.clone(),
                rows,
                vocabulary,
                gradient_scale,
                loss_scale: None,
            }));
            close("cross entropy", &bench.down(&losses), &expected, 32.0);
            let after = bench.down(&slice);
            if gradient_scale.is_none() {
                assert_eq!(after, logits, "without a gradient the logits are left alone");
                continue;
            }
            gradient_close("dlogits", &after, &logits, 32.0, |logits| {
                (0..rows).map(|row| loss_of(row, logits)).sum::<f64>() * f64::from(scale)
            });
        }
    }
}

#[test]
fn dropout_scales_what_it_keeps_and_is_its_own_backward() {
    let bench = Bench::new();
    let dropout = dropouts()[1].unwrap();
    for len in [1, 5, 31, 4099, 70_001] {
        let data = random(len as u64, len);
        let slice = bench.up(&data);
        bench.run(Op::Dropout { data: slice.clone(), dropout });
        let mut expected = wide(&data);
        drop_with(Some(dropout), &mut expected);
        close("dropout", &bench.down(&slice), &expected, 2.0);
    }
}

#[test]
fn operands_of_the_wrong_size_are_refused() {
    let bench = Bench::new();
    let (input, out) = (bench.zeros(8), bench.zeros(7));
    let error = bench.stream.submit(Op::Add { input: input.clone(), out }).unwrap_err().to_string();
    assert_eq!(error, "add: operand `input` should be 7 × f32, is 8 × f32");
    let part = |range| input.part(range).unwrap();
    let error = bench.stream.submit(Op::Copy { input: part(0..4), out: part(3..7) }).unwrap_err().to_string();
    assert_eq!(error, "copy: operands `input` and `out` overlap");
    let tokens = bench.integers(&[0u32; 8]);
    let error = bench.stream.submit(Op::Add { input: tokens, out: input }).unwrap_err().to_string();
    assert!(error.contains("should be 8 × f32, is 8 × u32"), "{error}");
    assert_eq!(bench.device.alloc(1, DType::F32, Category::Workspace, "x").unwrap().len(), 1);
}
