//! A training step of GPT-2 124M under each policy, beside PyTorch's, in one paired run.
//!
//! ```text
//! EBBTIDE_PEER_PYTHON=/path/to/venv/bin/python cargo bench --bench gpt2 -- [--batch 2] [--context 512] [--rounds 3] [--steps 2] \
//!     [--device cpu] [--precision f32] [--policies 'keep; recompute; …'] [--peers 'none; compile; …']
//! ```
//!
//! Ebbtide and the peer take turns, A B A B, `--rounds` each of `--steps` steps; the medians over all steps stand beside each
//! other. The floor of a step is its products (six operations a weight and token, and attention's) at the speed of this
//! machine's best product, which is measured too. Without `EBBTIDE_PEER_PYTHON` only Ebbtide runs. It also says what the
//! runtime adds to a step: the time in which the compute stream had nothing to do.
#![allow(missing_docs)]

use std::{error::Error, path::PathBuf, process::Command};

use ebbtide::{
    bench::{Bench, BenchOptions, BenchReport, median},
    config::{Numerics, Precision, Tiers},
    engine::gpt2::Gpt2Config,
    kernels::{Device, DeviceKind, DeviceOptions, bytes},
};

/// The first is what the others, and the peer, are held against. In the last GELU's output is made again, for it is cheap to, and
/// the rest is sent out as int8.
const POLICIES: &str = "keep; recompute; int8; offload; offload int8; offload disk; offload int8 disk; \
    offload int8, *gelu.output: rerun";

/// The peer's ways to save memory; the first is what ours are held against.
const PEER_POLICIES: &str = "none; checkpoint; save_on_cpu; int8; disk";

/// The same where a card computes: what matters there.
const CARD_POLICIES: &str = "keep; rerun; int8; recompute; recompute, h.*/input: offload; offload int8";
const CARD_PEER_POLICIES: &str = "none; compile; checkpoint; save_on_cpu";

struct Settings {
    batch: usize,
    context: usize,
    rounds: usize,
    steps: usize,
    threads: usize,
    device: DeviceKind,
    precision: Precision,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let text = |flag: &str| {
        let at = arguments.iter().position(|argument| argument == flag);
        at.map(|at| arguments.get(at + 1).cloned().ok_or(format!("{flag} needs a value"))).transpose()
    };
    let value = |flag: &str, default: usize| -> Result<usize, Box<dyn Error>> {
        Ok(text(flag)?.map_or(Ok(default), |number| number.parse())?)
    };
    let settings = Settings {
        batch: value("--batch", 2)?,
        context: value("--context", 512)?,
        rounds: value("--rounds", 3)?,
        steps: value("--steps", 2)?,
        threads: 2,
        device: text("--device")?.map_or(Ok(DeviceKind::Cpu), |kind| kind.parse())?,
        precision: text("--precision")?.map_or(Ok(Precision::F32), |precision| precision.parse())?,
    };
    let of_cpu = settings.device == DeviceKind::Cpu;
    let (policies, peer_policies) =
        if of_cpu { (POLICIES, PEER_POLICIES) } else { (CARD_POLICIES, CARD_PEER_POLICIES) };
    let list = |flag: &str, default: &str| -> Result<Vec<String>, Box<dyn Error>> {
        let listed = text(flag)?.unwrap_or_else(|| default.to_string());
        Ok(listed.split(';').map(|policy| policy.trim().to_string()).collect())
    };
    let (policies, peer_policies) = (list("--policies", policies)?, list("--peers", peer_policies)?);
    let python = std::env::var_os("EBBTIDE_PEER_PYTHON");
    let mut ours: Vec<Vec<f64>> = vec![Vec::new(); policies.len()];
    let mut reports: Vec<Option<BenchReport>> = vec![None; policies.len()];
    let mut theirs: Vec<Vec<f64>> = vec![Vec::new(); peer_policies.len()];
    let mut peers = vec![serde_json::Value::Null; peer_policies.len()];
    let mut idle = Vec::new();
    let mut name = String::new();
    for _ in 0..settings.rounds {
        for (i, policy) in policies.iter().enumerate() {
            let mut bench = Bench::new(&BenchOptions {
                model: Gpt2Config::named("gpt2")?,
                batch: settings.batch,
                context: settings.context,
                policy: policy.parse()?,
                device: settings.device,
                threads: Some(settings.threads),
                budget_bytes: None,
                numerics: Numerics { precision: settings.precision, residual_f32: false },
                offload_optimizer: false,
                tiers: Tiers::default(),
            })?;
            name = bench.trainer().engine().device().name().to_string();
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
            for (i, policy) in peer_policies.iter().enumerate() {
                peers[i] = run_peer(python, &settings, policy)?;
                theirs[i].push(peers[i]["seconds_per_step"].as_f64().ok_or("the peer gave no time")?);
            }
        }
    }
    let tokens = (settings.batch * settings.context) as f64;
    let flops = Gpt2Config::named("gpt2")?.flops_per_token(settings.context) as f64 * tokens;
    let ceiling = product_ceiling(&settings)?;
    let place = if of_cpu { format!("{} threads", settings.threads) } else { name };
    println!(
        "GPT-2 124M, batch {}, context {}, {}, {place}: forward, backward, AdamW\n",
        settings.batch, settings.context, settings.precision
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
    for (i, policy) in policies.iter().enumerate() {
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
        let (mut none, mut fastest) = (f64::NAN, f64::INFINITY);
        for (i, policy) in peer_policies.iter().enumerate() {
            let seconds = median(&mut theirs[i]);
            if i == 0 {
                none = seconds;
            }
            fastest = fastest.min(seconds);
            let count = |key: &str| peers[i][key].as_u64().unwrap_or_default();
            row(policy, seconds, none, count("saved_bytes"), count("peak_step_bytes"));
            println!();
        }
        println!("\nebbtide, {}, over PyTorch: {:.2} × the tokens a second", policies[0], none / keep);
        println!("ebbtide, {}, over PyTorch's fastest: {:.2} ×", policies[0], fastest / keep);
    }
    println!(
        "ebbtide, {}, over the floor: {:.2} × ({:.0} GFLOP/s at best)",
        policies[0],
        floor / keep,
        ceiling / 1e9
    );
    println!("the compute stream idle: {:.2} % of a step", 100.0 * median(&mut idle));
    Ok(())
}

fn run_peer(
    python: &std::ffi::OsStr,
    settings: &Settings,
    policy: &str,
) -> Result<serde_json::Value, Box<dyn Error>> {
    // Where the sources are now, which cargo says; a program that was carried elsewhere is told.
    let root =
        std::env::var_os("CARGO_MANIFEST_DIR").map_or(env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    let script = root.join("benches/peers/gpt2_step.py");
    let numbers = [settings.batch, settings.context, settings.steps, settings.threads];
    let output = Command::new(python)
        .arg(script)
        .args(numbers.map(|number| number.to_string()))
        .args([policy, &settings.device.to_string(), &settings.precision.to_string()])
        .output()?;
    if !output.status.success() {
        return Err(format!("the peer failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Operations a second of a large square product, the best of several: what the machine's products can do.
fn product_ceiling(settings: &Settings) -> Result<f64, Box<dyn Error>> {
    use ebbtide::kernels::{
        Category, Op,
        op::{Gemm, Layout},
    };
    let size = if settings.device == DeviceKind::Cpu { 2048 } else { 8192 };
    let dtype = settings.precision.dtype();
    let device = Device::open(&DeviceOptions {
        kind: settings.device,
        threads: Some(settings.threads),
        budget_bytes: Some(4 * size * size * 4),
    })?;
    let stream = device.stream("compute");
    let matrix = |name| device.alloc(size * size, dtype, Category::Workspace, name);
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
            m: size,
            n: size,
            k: size,
        }))?;
        stream.synchronize()?;
        best = best.max(2.0 * (size as f64).powi(3) / start.elapsed().as_secs_f64());
    }
    Ok(best)
}
