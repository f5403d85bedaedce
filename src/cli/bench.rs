//! `ebbtide bench`.

use anyhow::Result;
use clap::Args;
use ebbtide::{
    bench::{Bench, BenchOptions},
    config::{Bytes, ComputeDevice, Numerics, Precision},
    engine::gpt2::Gpt2Config,
    kernels::bytes,
    offload::Expression,
};

use super::{TierArgs, per_second, warn_if_unoptimised};

#[derive(Args)]
pub(crate) struct BenchArgs {
    /// gpt2, gpt2-medium, gpt2-large or gpt2-xl
    #[arg(long, default_value = "gpt2")]
    model: String,
    /// Sequences of a step
    #[arg(long, default_value_t = 2)]
    batch: usize,
    /// Positions of each
    #[arg(long, default_value_t = 512)]
    context: usize,
    /// What the model computes in: f32, f16 or bf16
    #[arg(long, default_value_t = Precision::F32)]
    precision: Precision,
    /// Keep the residual stream in f32
    #[arg(long)]
    residual_f32: bool,
    /// Where saved activations go: keep, recompute, offload, offload disk, int8, offload int8, or PATTERN: ACTION, …
    #[arg(long, default_value_t = Expression::default())]
    policy: Expression,
    /// Steps to take the median of, after one to warm up
    #[arg(long, default_value_t = 5)]
    steps: usize,
    /// The device's memory budget, such as 3GiB
    #[arg(long)]
    memory: Option<Bytes>,
    /// Keep the moments in host memory, and in 16 bits the master weights
    #[arg(long)]
    offload_optimizer: bool,
    /// What computes: cpu, cuda, cuda:N, or best for the first CUDA device or else the CPU
    #[arg(long, default_value = "cpu")]
    device: ComputeDevice,
    /// Threads of the kernels
    #[arg(long)]
    threads: Option<usize>,
    #[command(flatten)]
    tiers: TierArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn bench(args: BenchArgs) -> Result<()> {
    warn_if_unoptimised();
    let options = BenchOptions {
        model: Gpt2Config::named(&args.model)?,
        batch: args.batch,
        context: args.context,
        policy: args.policy.clone(),
        device: args.device.0,
        threads: args.threads,
        budget_bytes: args.memory.map(|memory| memory.0),
        numerics: Numerics { precision: args.precision, residual_f32: args.residual_f32 },
        offload_optimizer: args.offload_optimizer,
        tiers: args.tiers.tiers(),
    };
    let report = Bench::new(&options)?.run(args.steps)?;
    if args.json {
        let mut value = serde_json::to_value(&report)?;
        let settings = [
            ("model", args.model.into()),
            ("batch", args.batch.into()),
            ("context", args.context.into()),
            ("policy", args.policy.to_string().into()),
            ("precision", args.precision.to_string().into()),
            ("steps", args.steps.into()),
        ];
        settings.into_iter().for_each(|(key, setting)| value[key] = setting);
        println!("{value}");
        return Ok(());
    }
    println!("{} tokens/s, {:.3} s a step", per_second(report.tokens_per_second), report.seconds_per_step);
    println!("{:.1} GFLOP/s in products", report.flops_per_second / 1e9);
    println!("saved for backward  {}", bytes(report.saved_bytes as usize));
    println!("sent out            {}", bytes(report.offloaded_bytes as usize));
    if let Some(hidden) = report.offload.hidden_share {
        println!("transfers hidden    {:.1} %", 100.0 * hidden);
    }
    println!(
        "device at most      {}, {} of it beside weights, gradients and moments",
        bytes(report.peak_device_bytes),
        bytes(report.peak_step_bytes)
    );
    Ok(())
}
