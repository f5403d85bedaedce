//! Codecs beside a copy of the bytes that they read, in one paired run.
//!
//! ```text
//! cargo bench -p ebbtide-kernels --bench codecs -- [--mib 64] [--rounds 9] [--threads 2]
//! ```
//!
//! Each op and a copy of its larger side take turns, A B A B; medians. A ratio of 1 is the copy's speed: an encoder writes less
//! than the copy does, and computes more. The floor of each is its bytes at the copy's rate.
#![allow(missing_docs)]

use std::{error::Error, time::Instant};

use ebbtide_kernels::{
    Category, CpuOptions, DType, Device, Op, Stream,
    op::{Rounding, int8_bytes},
};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let value = |flag: &str, default: usize| -> Result<usize, Box<dyn Error>> {
        match arguments.iter().position(|argument| argument == flag) {
            Some(at) => Ok(arguments.get(at + 1).ok_or(format!("{flag} needs a number"))?.parse()?),
            None => Ok(default),
        }
    };
    let (mib, rounds, threads) = (value("--mib", 64)?, value("--rounds", 9)?, value("--threads", 2)?);
    let device = Device::cpu_with(CpuOptions { threads: Some(threads), budget_bytes: None })?;
    let stream = device.stream("compute");
    let len = (mib << 20) / 4;
    let alloc = |len, dtype| device.alloc(len, dtype, Category::Workspace, "bench");
    let plain = alloc(len, DType::F32)?;
    let numbers: Vec<f32> =
        (0..1 << 16).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 1e7 - 0.8).collect();
    for start in (0..len).step_by(numbers.len()) {
        let part = plain.part(start..len.min(start + numbers.len()))?;
        let input = stream.upload(&numbers[..part.len()], Category::Workspace, "numbers")?;
        stream.submit(Op::Copy { input, out: part })?;
    }
    let (copied, decoded) = (alloc(len, DType::F32)?, alloc(len, DType::F32)?);
    let halves = alloc(len, DType::F16)?;
    let (mask, bits) = (alloc(4 * len, DType::U8)?, alloc(len / 2, DType::U8)?);
    stream.submit(Op::Fill { out: mask.clone(), value: 1.0 })?;
    println!("{mib} MiB plain, {threads} threads\n");
    println!("{:<28}{:>14}{:>14}{:>10}", "", "copy GB/s", "op GB/s", "of copy");
    let copy = Op::Copy { input: plain.clone(), out: copied };
    let stochastic = Rounding::Stochastic { seed: 1, site: 2, step: 3 };
    let mut ops = Vec::new();
    for group in [64, 128, 256] {
        let stored = alloc(int8_bytes(len, group), DType::U8)?;
        for (name, rounding) in [("nearest", Rounding::Nearest), ("stochastic", stochastic)] {
            let op = Op::Int8Encode { input: plain.clone(), out: stored.clone(), group, rounding };
            ops.push((format!("int8/{group} encode, {name}"), op));
        }
        ops.push((
            format!("int8/{group} decode"),
            Op::Int8Decode { input: stored, out: decoded.clone(), group },
        ));
    }
    ops.push(("f16 encode".into(), Op::Cast { input: plain.clone(), out: halves.clone() }));
    ops.push(("f16 decode".into(), Op::Cast { input: halves, out: decoded.clone() }));
    ops.push(("bits encode".into(), Op::BitsEncode { input: mask.clone(), out: bits.clone() }));
    ops.push(("bits decode".into(), Op::BitsDecode { input: bits, out: mask }));
    for (name, op) in ops {
        let (mut copies, mut times) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            copies.push(time(&stream, &copy)?);
            times.push(time(&stream, &op)?);
        }
        let (copy, op) = (median(&mut copies), median(&mut times));
        let rate = |seconds: f64| (4 * len) as f64 / seconds / 1e9;
        println!("{name:<28}{:>14.1}{:>14.1}{:>10.2}", rate(copy), rate(op), copy / op);
    }
    Ok(())
}

fn time(stream: &Stream, op: &Op) -> Result<f64, Box<dyn Error>> {
    stream.synchronize()?;
    let start = Instant::now();
    stream.submit(op.clone())?;
    stream.synchronize()?;
    Ok(start.elapsed().as_secs_f64())
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
