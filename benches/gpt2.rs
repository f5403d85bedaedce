//! A training step of GPT-2 124M beside PyTorch's, in one paired run.
//!
//! ```text
//! EBBTIDE_PEER_PYTHON=/path/to/venv/bin/python cargo bench --bench gpt2 -- [--batch 2] [--context 512] [--rounds 3] [--steps 2]
//! ```
//!
//! Ebbtide and the peer take turns, A B A B, `--rounds` each of `--steps` steps; the medians over all steps stand beside each
//! other. The floor of a step is its products (six operations a weight and token, and attention's) at the speed of this
//! machine's best product, which is measured too. Without `EBBTIDE_PEER_PYTHON` only Ebbtide runs. It also says what the
//! runtime adds to a step: the time in which the compute stream had nothing to do.
#![allow(missing_docs)]

use std::{error::Error, process::Command};

use ebbtide::{
    bench::{Bench, BenchOptions, BenchReport, median},
    config::Tiers,
    engine::gpt2::Gpt2Config,
    kernels::{CpuOptions, Device, bytes},
};

/// The first is what the others, and the peer, are held against.
const POLICIES: [&str; 5] = ["keep", "offload", "recompute", "int8", "offload int8"];

struct Settings {
    batch: usize,
    context: usize,
    rounds: usize,
    steps: usize,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let value = |flag: &str, default: usize| -> Result<usize, Box<dyn Error>> {
        match arguments.iter().position(|argument| argument == flag) {
            Some(at) => Ok(arguments.get(at + 1).ok_or(format!("{flag} needs a number"))?.parse()?),
            None => Ok(default),
        }
    };
    let settings = Settings {
        batch: value("--batch", 2)?,
        context: value("--context", 512)?,
        rounds: value("--rounds", 3)?,
        steps: value("--steps", 2)?,
    };
    let python = std::env::var_os("EBBTIDE_PEER_PYTHON");
    let threads = 2;
    let mut ours: Vec<Vec<f64>> = vec![Vec::new(); POLICIES.len()];
    let mut reports: Vec<Option<BenchReport>> = vec![None; POLICIES.len()];
    let (mut theirs, mut peer, mut idle) = (Vec::new(), serde_json::Value::Null, Vec::new());
    for _ in 0..settings.rounds {
        for (i, policy) in POLICIES.into_iter().enumerate() {
            let mut bench = Bench::new(&BenchOptions {
                model: Gpt2Config::named("gpt2")?,
                batch: settings.batch,
                context: settings.context,
                policy: policy.parse()?,
                threads: Some(threads),
                budget_bytes: None,
                tiers: Tiers::default(),
            })?;
            let busy = |bench: &Bench| -> f64 { bench.trainer().engine().device().streams()[0].busy_seconds };
            for _ in 0..settings.steps {
                let before = busy(&bench);
                let (seconds, _) = bench.step()?;
                ours[i].push(seconds);
                if i == 0 {
                    idle.push((seconds - (busy(&bench) - before)) / seconds);
                }
            }
            reports[i] = Some(bench.run(1)?);
        }
        if let Some(python) = &python {
            peer = run_peer(python, &settings, threads)?;
            theirs.push(peer["seconds_per_step"].as_f64().ok_or("the peer gave no time")?);
        }
    }
    let tokens = (settings.batch * settings.context) as f64;
    let flops = Gpt2Config::named("gpt2")?.flops_per_token(settings.context) as f64 * tokens;
    let ceiling = product_ceiling(threads)?;
    println!(
        "GPT-2 124M, batch {}, context {}, f32, {threads} threads: forward, backward, AdamW\n",
        settings.batch, settings.context
    );
    println!("{:<22}{:>10}{:>12}{:>14}{:>14}", "", "s/step", "tokens/s", "saved", "step's peak");
    let row = |name: &str, seconds: f64, saved: u64, peak: u64| {
        let (saved, peak) = (bytes(saved as usize), bytes(peak as usize));
        println!("{name:<22}{seconds:>10.3}{:>12.1}{saved:>14}{peak:>14}", tokens / seconds);
    };
    let mut keep = f64::NAN;
    for (i, policy) in POLICIES.into_iter().enumerate() {
        let seconds = median(&mut ours[i]);
        if i == 0 {
            keep = seconds;
        }
        if let Some(report) = &reports[i] {
            row(&format!("ebbtide, {policy}"), seconds, report.saved_bytes, report.peak_step_bytes as u64);
        }
    }
    let floor = flops / ceiling;
    println!("{:<22}{floor:>10.3}{:>12.1}", "floor (products)", tokens / floor);
    if !theirs.is_empty() {
        let seconds = median(&mut theirs);
        let count = |key: &str| peer[key].as_u64().unwrap_or_default();
        let name = format!("PyTorch {}", peer["version"].as_str().unwrap_or_default());
        row(&name, seconds, count("saved_bytes"), count("peak_step_bytes"));
        println!("\nebbtide, keep, over PyTorch: {:.2} × the tokens a second", seconds / keep);
    }
    println!("ebbtide, keep, over the floor: {:.2} × ({:.0} GFLOP/s at best)", floor / keep, ceiling / 1e9);
    println!("the compute stream idle: {:.2} % of a step", 100.0 * median(&mut idle));
    Ok(())
}

fn run_peer(
    python: &std::ffi::OsStr,
    settings: &Settings,
    threads: usize,
) -> Result<serde_json::Value, Box<dyn Error>> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/peers/gpt2_step.py");
    let numbers = [settings.batch, settings.context, settings.steps, threads];
    let output = Command::new(python).arg(script).args(numbers.map(|number| number.to_string())).output()?;
    if !output.status.success() {
        return Err(format!("the peer failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Operations a second of a large square product, the best of several: what the machine's products can do.
fn product_ceiling(threads: usize) -> Result<f64, Box<dyn Error>> {
    use ebbtide::kernels::{
        Category, DType, Op,
        op::{Gemm, Layout},
    };
    const SIZE: usize = 2048;
    let device = Device::cpu_with(CpuOptions { threads: Some(threads), budget_bytes: None })?;
    let stream = device.stream("compute");
    let matrix = |name| device.alloc(SIZE * SIZE, DType::F32, Category::Workspace, name);
    let (a, b, out) = (matrix("a")?, matrix("b")?, matrix("out")?);
    for (slice, value) in [(&a, 0.5), (&b, 0.25)] {
        stream.submit(Op::Fill { out: slice.clone(), value })?;
    }
    let mut best = 0.0f64;
    for _ in 0..8 {
        stream.synchronize()?;
        let start = std::time::Instant::now();
        stream.submit(Op::Gemm(Gemm {
            a: a.clone(),
            a_layout: Layout::Normal,
            b: b.clone(),
            b_layout: Layout::Normal,
            bias: None,
            out: out.clone(),
            accumulate: false,
            m: SIZE,
            n: SIZE,
            k: SIZE,
        }))?;
        stream.synchronize()?;
        best = best.max(2.0 * (SIZE as f64).powi(3) / start.elapsed().as_secs_f64());
    }
    Ok(best)
}
