//! Every op at a GPT-2's sizes, beside what copies and products of the same device reach, in one run.
//!
//! ```text
//! cargo bench -p ebbtide-kernels --bench kernels -- [--device cpu] [--batch 2] [--context 512] [--runs 10] \
//!     [--only NAME] [--copy-mib 256] [--product 1024]
//! ```
//!
//! An op's floor is its bytes, each operand once, at the rate of a large copy inside device memory (`--copy-mib`), or its
//! floating-point operations at the rate of a large square product of its type (`--product`), whichever takes longer; the last
//! column is the floor's share of its time. Times are the device's, medians over `--runs`; what stays in a cache can be above its
//! floor. Where there is a link, transfers from and to pinned memory stand beside a bare probe.
#![allow(missing_docs)]

#[path = "../tests/common/mod.rs"]
mod common;

use std::error::Error;

use common::{
    Bench,
    compare::may_be_narrow,
    ops::{New, OPS, Sizes, operands},
    random,
};
use ebbtide_kernels::{
    Category, DType, Device, DeviceKind, DeviceOptions, Op, Slice,
    op::{Gemm, Layout, Mode},
};

/// GPT-2 124M's.
const HEADS: usize = 12;
const HEAD_SIZE: usize = 64;
const VOCABULARY: usize = 50257;

type Made<T> = Result<T, Box<dyn Error>>;

/// Numbers of each type, of which operands are filled.
struct Numbers(Vec<Slice>);

impl Numbers {
    fn new(bench: &Bench) -> Self {
        let numbers = bench.up(&random(1, 1 << 20));
        let narrow = |dtype| {
            let out = bench.alloc(numbers.len(), dtype);
            bench.run(Op::Cast { input: numbers.clone(), out: out.clone() });
            out
        };
        Numbers(vec![narrow(DType::F16), narrow(DType::BF16), numbers.clone()])
    }

    /// Random numbers, and positive ones where others make no sense; tokens and targets inside the vocabulary.
    fn write(&self, bench: &Bench, name: &str, out: &Slice) -> Made<()> {
        let mut random = fastrand::Rng::with_seed(out.len() as u64);
        match out.dtype() {
            _ if ["counters", "found_inf"].contains(&name) => {
                bench.run(Op::Fill { out: out.clone(), value: 0.0 })
            }
            DType::U32 | DType::I32 => {
                let indices: Vec<u32> = (0..out.len()).map(|_| random.u32(..VOCABULARY as u32)).collect();
                let up = bench.up(&indices);
                bench.run(Op::Copy { input: up.as_bytes(), out: out.as_bytes() });
            }
            DType::U8 => bench.run(Op::Fill { out: out.clone(), value: 1.0 }),
            _ if ["second_moment", "sum_squares", "rstd", "scale", "loss_scale"].contains(&name) => {
                bench.run(Op::Fill { out: out.clone(), value: 1.0 });
            }
            dtype => {
                let numbers = self.0.iter().find(|numbers| numbers.dtype() == dtype).ok_or("numbers")?;
                for start in (0..out.len()).step_by(numbers.len()) {
                    let part = out.part(start..out.len().min(start + numbers.len()))?;
                    bench.run(Op::Copy { input: numbers.part(0..part.len())?, out: part });
                }
            }
        }
        Ok(())
    }
}

fn main() -> Made<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let value = |flag: &str| {
        let at = arguments.iter().position(|argument| argument == flag);
        at.map(|at| arguments.get(at + 1).ok_or(format!("{flag} needs a value"))).transpose()
    };
    let number = |flag: &str, default: usize| -> Made<usize> {
        Ok(value(flag)?.map_or(Ok(default), |number| number.parse())?)
    };
    let kind: DeviceKind = value("--device")?.map_or(Ok(DeviceKind::Cpu), |kind| kind.parse())?;
    let (batch, context, runs) = (number("--batch", 2)?, number("--context", 512)?, number("--runs", 10)?);
    let only = value("--only")?;
    let device = Device::open(&DeviceOptions { kind, ..DeviceOptions::default() })?;
    let bench = Bench::new(device);
    let numbers = Numbers::new(&bench);
    // A device with memory of its own has caches and products that need more to be filled.
    let (mib, size) = if kind == DeviceKind::Cpu { (256, 1024) } else { (1024, 8192) };
    let (mib, size) = (number("--copy-mib", mib)?, number("--product", size)?);
    let copied = copy_rate(&bench, mib << 20, runs)?;
    println!("{}, {batch} × {context} tokens; a copy moves {:.1} GB/s", bench.device.name(), copied / 1e9);
    println!(
        "\n{:<24}{:>6}{:>12}{:>12}{:>10}{:>10}{:>10}",
        "", "", "bytes", "GFLOP", "µs", "floor µs", "of floor"
    );
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let multiplied = product_rate(&bench, &numbers, dtype, size, runs)?;
        println!("products of {size}³ in {dtype}: {:.1} TFLOP/s", multiplied / 1e12);
        for &make in OPS {
            let Some(op) = self::op(&bench, &numbers, make, dtype, (batch, context))? else { continue };
            if only.is_some_and(|only| only != op.name()) {
                continue;
            }
            let seconds = time(&bench, &op, runs)?;
            let floor = (op.bytes() as f64 / copied).max(op.flops() as f64 / multiplied);
            println!(
                "{:<24}{:>6}{:>12}{:>12.2}{:>10.1}{:>10.1}{:>9.0}%",
                op.name(),
                dtype.to_string(),
                op.bytes(),
                op.flops() as f64 / 1e9,
                1e6 * seconds,
                1e6 * floor,
                100.0 * floor / seconds
            );
        }
    }
    transfers(&bench.device, runs)
}

/// The op at GPT-2's sizes, its inputs written; `None` if it has no operand that could be of the type.
fn op(
    bench: &Bench,
    numbers: &Numbers,
    make: fn(Sizes, New<'_>) -> Op,
    dtype: DType,
    (batch, context): (usize, usize),
) -> Made<Option<Op>> {
    let small = Bench::new(Device::dry(None));
    let mut narrow = Vec::new();
    let name = make(common::ops::SMALL, &mut |len, dtype| {
        narrow.push(narrow.len());
        small.alloc(len, dtype)
    })
    .name()
    .to_string();
    let narrow: Vec<bool> = narrow.iter().map(|&at| may_be_narrow(make, &small, at)).collect();
    if dtype != DType::F32 && !narrow.contains(&true) {
        return Ok(None);
    }
    // Logits of all rows would be most of the memory.
    let batch = if name == "cross_entropy" { batch.div_ceil(16) } else { batch };
    let sizes = Sizes {
        batch,
        context,
        heads: HEADS,
        head_size: HEAD_SIZE,
        vocabulary: VOCABULARY,
        probability: 0.1,
    };
    let mut at = 0;
    let op = make(sizes, &mut |len, own| {
        at += 1;
        bench.alloc(len, if narrow[at - 1] { dtype } else { own })
    });
    if op.check().is_err() {
        return Ok(None);
    }
    for (name, slice, mode) in operands(&op) {
        if mode != Mode::Write {
            numbers.write(bench, name, &slice)?;
        }
    }
    Ok(Some(op))
}

/// Seconds that the device takes for an op. A card is given several at once, so that starting one counts as little as in a step.
fn time(bench: &Bench, op: &Op, runs: usize) -> Made<f64> {
    let repeats = if bench.device.backend_name() == "cuda" { 8 } else { 1 };
    bench.run(op.clone());
    bench.device.synchronize()?;
    let mut seconds = Vec::with_capacity(runs);
    for _ in 0..runs.max(1) {
        let before = bench.stream.report().busy_seconds;
        (0..repeats).for_each(|_| bench.run(op.clone()));
        bench.device.synchronize()?;
        seconds.push((bench.stream.report().busy_seconds - before) / f64::from(repeats));
    }
    Ok(median(&mut seconds))
}

/// Bytes read and written a second.
fn copy_rate(bench: &Bench, bytes: usize, runs: usize) -> Made<f64> {
    let [input, out] = [(); 2].map(|()| bench.alloc(bytes / 4, DType::F32));
    bench.run(Op::Fill { out: input.clone(), value: 0.5 });
    let op = Op::Copy { input, out };
    Ok(op.bytes() as f64 / time(bench, &op, runs)?)
}

/// Floating-point operations a second.
fn product_rate(bench: &Bench, numbers: &Numbers, dtype: DType, size: usize, runs: usize) -> Made<f64> {
    let [a, b, out] = [(); 3].map(|()| bench.alloc(size * size, dtype));
    for slice in [&a, &b] {
        numbers.write(bench, "", slice)?;
    }
    let (a_layout, b_layout) = (Layout::Normal, Layout::Normal);
    let gemm =
        Gemm { a, a_layout, b, b_layout, bias: None, out, accumulate: false, m: size, n: size, k: size };
    let op = Op::Gemm(gemm);
    Ok(op.flops() as f64 / time(bench, &op, runs)?)
}

/// Transfers beside the probe.
fn transfers(device: &Device, runs: usize) -> Made<()> {
    const BYTES: usize = 64 << 20;
    let Some(link) = device.link()? else { return Ok(()) };
    let [out, back] = ["out", "in"].map(|name| device.stream(name));
    let slice = |name| device.alloc(BYTES / 4, DType::F32, Category::Workspace, name);
    let (sent, received) = (slice("sent")?, slice("received")?);
    out.submit(Op::Fill { out: sent.clone(), value: 0.5 })?;
    let hosts = [device.host_slab(BYTES, "sent")?, device.host_slab(BYTES, "received")?];
    let mut rates = [const { Vec::new() }; 4];
    for _ in 0..=runs {
        for (at, ways) in [[true, false], [false, true], [true, true]].into_iter().enumerate() {
            let before = [&out, &back].map(|stream| stream.report().busy_seconds);
            if ways[0] {
                out.submit(Op::CopyOut { input: sent.clone(), out: hosts[0].all() })?;
            }
            if ways[1] {
                back.submit(Op::CopyIn { input: hosts[1].all(), out: received.clone() })?;
            }
            device.synchronize()?;
            let seconds = [&out, &back].map(|stream| stream.report().busy_seconds);
            for way in (0..2).filter(|&way| ways[way]) {
                rates[at + if ways == [true; 2] { way } else { 0 }]
                    .push(BYTES as f64 / (seconds[way] - before[way]));
            }
        }
    }
    println!("\n{:<24}{:>12}{:>12}{:>12}", "", "GB/s", "probe GB/s", "of probe");
    let probes = [link.out_bytes, link.in_bytes, link.out_together_bytes, link.in_together_bytes];
    let names = ["copy_out", "copy_in", "copy_out, both ways", "copy_in, both ways"];
    for ((name, rates), probe) in names.into_iter().zip(&mut rates).zip(probes) {
        let rate = median(rates);
        println!("{name:<24}{:>12.1}{:>12.1}{:>11.0}%", rate / 1e9, probe / 1e9, 100.0 * rate / probe);
    }
    Ok(())
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
