//! A training step of GPT-2 124M under each policy, beside PyTorch's, in one paired run.
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
    config::{Numerics, Tiers},
    engine::gpt2::Gpt2Config,
    kernels::{CpuOptions, Device, DeviceKind, bytes},
};

/// The first is what the others, and the peer, are held against.
const POLICIES: [&str; 8] =
    ["keep", "recompute", "int8", "offload", "offload int8", "offload disk", "offload int8 disk", BEST_MIX];

/// GELU's output is cheap to make again; the rest is sent out as int8.
const BEST_MIX: &str = "offload int8, *gelu.output: rerun";

/// The peer's ways to save memory; the first is what ours are held against.
const PEER_POLICIES: [&str; 5] = ["none", "checkpoint", "save_on_cpu", "int8", "disk"];

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
    let mut theirs: Vec<Vec<f64>> = vec![Vec::new(); PEER_POLICIES.len()];
    let mut peers = vec![serde_json::Value::Null; PEER_POLICIES.len()];
    let mut idle = Vec::new();
    for _ in 0..settings.rounds {
        for (i, policy) in POLICIES.into_iter().enumerate() {
            let mut bench = Bench::new(&BenchOptions {
                model: Gpt2Config::named("gpt2")?,
                batch: settings.batch,
                context: settings.context,
                policy: policy.parse()?,
                device: DeviceKind::Cpu,
                threads: Some(threads),
                budget_bytes: None,
                numerics: Numerics::default(),
                offload_optimizer: false,
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
            for (i, policy) in PEER_POLICIES.into_iter().enumerate() {
                peers[i] = run_peer(python, &settings, threads, policy)?;
                theirs[i].push(peers[i]["seconds_per_step"].as_f64().ok_or("the peer gave no time")?);
            }
        }
    }
    let tokens = (settings.batch * settings.context) as f64;
    let flops = Gpt2Config::named("gpt2")?.flops_per_token(settings.context) as f64 * tokens;
    let ceiling = product_ceiling(threads)?;
    println!(
        "GPT-2 124M, batch {}, context {}, f32, {threads} threads: forward, backward, AdamW\n",
        settings.batch, settings.context
    );
    println!(
        "{:<30}{:>8}{:>10}{:>8}{:>12}{:>13}{:>12}{:>8}",
        "", "s/step", "tokens/s", "of keep", "saved", "step's peak", "sent out", "hidden"
    );
    let row = |name: &str, seconds: f64, of: f64, saved: u64, peak: u64| {
        let shorter: String = name.chars().take(29).collect();
        let (saved, peak) = (bytes(saved as usize), bytes(peak as usize));
        print!(
            "{shorter:<30}{seconds:>8.3}{:>10.1}{:>8.2}{saved:>12}{peak:>13}",
            tokens / seconds,
            of / seconds
        );
    };
    let mut keep = f64::NAN;
    for (i, policy) in POLICIES.into_iter().enumerate() {
        let seconds = median(&mut ours[i]);
        if i == 0 {
            keep = seconds;
        }
        if let Some(report) = &reports[i] {
            row(policy, seconds, keep, report.saved_bytes, report.peak_step_bytes as u64);
            let hidden = report.offload.hidden_share.filter(|_| report.offloaded_bytes > 0);
            let hidden = hidden.map_or(String::new(), |share| format!("{:.1} %", 100.0 * share));
            println!("{:>12}{hidden:>8}", bytes(report.offloaded_bytes as usize));
        }
    }
    let floor = flops / ceiling;
    println!("{:<30}{floor:>8.3}{:>10.1}{:>8.2}", "floor (products)", tokens / floor, keep / floor);
    if python.is_some() {
        println!("PyTorch {}", peers[0]["version"].as_str().unwrap_or_default());
        let mut none = f64::NAN;
        for (i, policy) in PEER_POLICIES.into_iter().enumerate() {
            let seconds = median(&mut theirs[i]);
            if i == 0 {
                none = seconds;
            }
            let count = |key: &str| peers[i][key].as_u64().unwrap_or_default();
            row(policy, seconds, none, count("saved_bytes"), count("peak_step_bytes"));
            println!();
        }
        println!("\nebbtide, keep, over PyTorch: {:.2} × the tokens a second", none / keep);
    }
    println!("ebbtide, keep, over the floor: {:.2} × ({:.0} GFLOP/s at best)", floor / keep, ceiling / 1e9);
    println!("the compute stream idle: {:.2} % of a step", 100.0 * median(&mut idle));
    Ok(())
}

fn run_peer(
    python: &std::ffi::OsStr,
    settings: &Settings,
    threads: usize,
    policy: &str,
) -> Result<serde_json::Value, Box<dyn Error>> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/peers/gpt2_step.py");
    let numbers = [settings.batch, settings.context, settings.steps, threads];
    let output = Command::new(python)
        .arg(script)
        .args(numbers.map(|number| number.to_string()))
        .arg(policy)
        .output()?;
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
