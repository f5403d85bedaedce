//! The products of a GPT-2 step beside the machine's ceiling.
//!
//! ```text
//! cargo bench -p ebbtide-kernels --bench gemm -- [threads]
//! ```
//!
//! The ceiling is what as many threads do of fused multiply-adds on registers, with no memory in the way. Rounds of ceiling
//! and products take turns; the figures are medians.
#![allow(missing_docs)]

use std::{error::Error, hint::black_box, time::Instant};

use ebbtide_kernels::{
    Category, CpuOptions, DType, Device, Op,
    op::{Gemm, Layout},
};
use multiversion::multiversion;

const ROUNDS: usize = 7;

/// Rows of a batch of 2 × 512, and GPT-2's width.
const ROWS: usize = 1024;
const WIDTH: usize = 768;
/// Rows of the vocabulary that a chunk of the head covers at once is what fits; here a tenth of it.
const VOCABULARY: usize = 5026;

/// Name, m, n, k, layouts of a and b, and whether it accumulates.
type Product = (&'static str, usize, usize, usize, Layout, Layout, bool);

fn main() -> Result<(), Box<dyn Error>> {
    let threads = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(2);
    use Layout::{Normal, Transposed};
    let products: [Product; 8] = [
        ("qkv forward", ROWS, 3 * WIDTH, WIDTH, Normal, Normal, false),
        ("mlp up forward", ROWS, 4 * WIDTH, WIDTH, Normal, Normal, false),
        ("mlp down forward", ROWS, WIDTH, 4 * WIDTH, Normal, Normal, false),
        ("mlp up input gradient", ROWS, WIDTH, 4 * WIDTH, Normal, Transposed, false),
        ("mlp up weight gradient", WIDTH, 4 * WIDTH, ROWS, Transposed, Normal, true),
        ("mlp down weight gradient", 4 * WIDTH, WIDTH, ROWS, Transposed, Normal, true),
        ("head forward", ROWS, VOCABULARY, WIDTH, Normal, Transposed, false),
        ("head weight gradient", VOCABULARY, WIDTH, ROWS, Transposed, Normal, true),
    ];
    let mut ceilings = Vec::new();
    let mut rates = vec![Vec::new(); products.len()];
    for _ in 0..ROUNDS {
        ceilings.push(ceiling(threads));
        for (rate, product) in rates.iter_mut().zip(&products) {
            rate.push(time(threads, product)?);
        }
    }
    let ceiling = median(&mut ceilings);
    println!("{threads} threads, f32; ceiling {:.0} GFLOP/s of multiply-adds on registers\n", ceiling / 1e9);
    println!("{:<26}{:>20}{:>10}{:>12}", "", "m × n × k", "GFLOP/s", "of ceiling");
    for ((name, m, n, k, ..), rate) in products.iter().zip(&mut rates) {
        let rate = median(rate);
        let shape = format!("{m} × {n} × {k}");
        println!("{name:<26}{shape:>20}{:>10.0}{:>11.0}%", rate / 1e9, 100.0 * rate / ceiling);
    }
    Ok(())
}

/// Operations a second of one product.
fn time(threads: usize, product: &Product) -> Result<f64, Box<dyn Error>> {
    let &(_, m, n, k, a_layout, b_layout, accumulate) = product;
    let device = Device::cpu_with(CpuOptions { threads: Some(threads), budget_bytes: None })?;
    let stream = device.stream("compute");
    let matrix = |len: usize| -> ebbtide_kernels::Result<_> {
        let out = device.alloc(len, DType::F32, Category::Workspace, "matrix")?;
        stream.submit(Op::Fill { out: out.clone(), value: 0.5 })?;
        Ok(out)
    };
    let (a, b, out) = (matrix(m * k)?, matrix(k * n)?, matrix(m * n)?);
    let mut seconds = f64::INFINITY;
    for _ in 0..4 {
        stream.synchronize()?;
        let start = Instant::now();
        let (a, b, out) = (a.clone(), b.clone(), out.clone());
        stream.submit(Op::Gemm(Gemm { a, a_layout, b, b_layout, bias: None, out, accumulate, m, n, k }))?;
        stream.synchronize()?;
        seconds = seconds.min(start.elapsed().as_secs_f64());
    }
    Ok(2.0 * (m * n * k) as f64 / seconds)
}

/// Operations a second of multiply-adds that depend on nothing but themselves: the best of several numbers of registers,
/// enough to hide the latency and few enough to fit.
fn ceiling(threads: usize) -> f64 {
    let rates = [
        rate::<128>(threads, multiply_adds_128),
        rate::<192>(threads, multiply_adds_192),
        rate::<384>(threads, multiply_adds_384),
    ];
    rates.into_iter().fold(0.0, f64::max)
}

fn rate<const LANES: usize>(threads: usize, multiply_adds: fn(usize, f32, f32) -> f32) -> f64 {
    const REPEATS: usize = 1_500_000;
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| black_box(multiply_adds(REPEATS, black_box(0.999), black_box(1e-3))));
        }
    });
    (threads * 2 * LANES * REPEATS) as f64 / start.elapsed().as_secs_f64()
}

#[inline(always)]
fn multiply_adds<const LANES: usize>(repeats: usize, factor: f32, summand: f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for _ in 0..repeats {
        lanes.iter_mut().for_each(|lane| *lane = lane.mul_add(factor, summand));
    }
    lanes.iter().sum()
}

macro_rules! multiply_adds {
    ($($name:ident $lanes:literal),*) => {$(
        #[multiversion(targets("x86_64+avx512f+avx2+fma", "x86_64+avx2+fma", "aarch64+neon"))]
        fn $name(repeats: usize, factor: f32, summand: f32) -> f32 {
            multiply_adds::<$lanes>(repeats, factor, summand)
        }
    )*};
}
multiply_adds!(multiply_adds_128 128, multiply_adds_192 192, multiply_adds_384 384);

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
