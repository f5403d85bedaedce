//! `ebbtide plan`.

use anyhow::{Context, Result, bail};
use clap::{Args, builder::PossibleValuesParser};
use ebbtide::{
    config::{Bytes, Numerics, Precision},
    engine::{
        gpt2::Gpt2Config,
        plan::{OpPart, StepPlan, StepShape, StepTime, plan, sized, timed},
    },
    kernels::{Category, CudaOptions, Device, Rates, bytes},
    offload::{DiskOptions, Expression, OffloadOptions},
};
use serde::Serialize;

#[derive(Args)]
pub(crate) struct PlanArgs {
    /// gpt2, gpt2-medium, gpt2-large or gpt2-xl
    #[arg(long, default_value = "gpt2")]
    model: String,
    /// Sequences of a micro-batch
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Positions of each
    #[arg(long, default_value_t = 1024)]
    context: usize,
    /// Micro-batches of a step
    #[arg(long, default_value_t = 1)]
    accumulate: usize,
    /// What the model computes in: f32, f16 or bf16
    #[arg(long, default_value_t = Precision::F32)]
    precision: Precision,
    /// Keep the residual stream in f32
    #[arg(long)]
    residual_f32: bool,
    /// Where saved activations go
    #[arg(long, default_value_t = Expression::default())]
    policy: Expression,
    /// Keep the moments in host memory, and in 16 bits the master weights
    #[arg(long)]
    offload_optimizer: bool,
    /// The device's memory budget, such as 3GiB
    #[arg(long)]
    memory: Option<Bytes>,
    /// A row for each of the usual policies rather than --policy
    #[arg(long, conflicts_with_all = ["policy", "offload_optimizer"])]
    table: bool,
    /// Say too how long the step takes at least on this card; `here` is this machine's, with its link measured
    #[arg(long, value_parser = PossibleValuesParser::new(Rates::NAMES.into_iter().chain([HERE])))]
    card: Option<String>,
    /// And what each kind of op takes of it
    #[arg(long, requires = "card", conflicts_with = "table")]
    ops: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The card of this machine.
const HERE: &str = "here";

/// A policy as a table names it: its expression, and whether the optimizer's state is in host memory.
const TABLE: [(&str, &str, bool); 6] = [
    ("keep", "keep", false),
    ("rerun-cheap", "rerun", false),
    ("int8", "int8, *gelu.output: rerun", false),
    ("recompute", "recompute", false),
    ("recompute-offload", "recompute, h.*/input: offload", false),
    ("recompute-offload-optimizer", "recompute, h.*/input: offload", true),
];

/// What a step needs under a policy, in bytes.
#[derive(Serialize)]
struct Row {
    policy: String,
    /// Most device bytes of saved and other activations.
    activation_bytes: usize,
    /// Most device bytes at once: weights, gradients, moments and scratch included.
    total_bytes: usize,
    /// The smallest budget under which the step runs as it would without one.
    extent_bytes: usize,
    weight_bytes: usize,
    gradient_bytes: usize,
    optimizer_bytes: usize,
    /// Host memory for offloaded activations and the optimizer's state.
    host_bytes: usize,
    /// Disk space for offloaded activations.
    disk_bytes: usize,
    /// Bytes sent out a step.
    moved_bytes: u64,
    /// How long a step takes at least.
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<Time>,
}

/// What a step takes at least on a card.
#[derive(Serialize)]
struct Time {
    seconds: f64,
    tokens_per_second: f64,
    /// That kernels run.
    compute_seconds: f64,
    /// That they wait for offloaded tensors.
    exposed_seconds: f64,
    /// Of all transfers of offloaded tensors.
    transfer_seconds: f64,
    launches: u64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ops: Vec<OpPart>,
}

pub(super) fn plan_step(args: PlanArgs) -> Result<()> {
    let shape = StepShape {
        model: Gpt2Config::named(&args.model)?,
        batch: args.batch,
        context: args.context,
        accumulate: args.accumulate,
        offload_optimizer: args.offload_optimizer,
        numerics: Numerics { precision: args.precision, residual_f32: args.residual_f32 },
    };
    if args.batch == 0 || args.context == 0 || args.accumulate == 0 {
        bail!("--batch, --context and --accumulate: expected at least 1");
    }
    if args.context > shape.model.context {
        bail!(
            "--context {}: expected at most the {} positions of {}",
            args.context,
            shape.model.context,
            args.model
        );
    }
    let rates = args.card.as_deref().map(rates).transpose()?;
    let row = |name: &str, policy: &Expression, offload_optimizer| -> Result<Row> {
        let shape = StepShape { offload_optimizer, ..shape };
        let disk = policy.uses_disk().then(|| DiskOptions::new(std::env::temp_dir(), 0));
        let options = OffloadOptions { disk, ..OffloadOptions::default() };
        let budget = args.memory.map(|memory| memory.0);
        let options = sized(&shape, policy.clone(), &options, budget)?;
        let (planned, time) = match &rates {
            Some(rates) => {
                let (planned, time) = timed(&shape, policy.clone(), &options, budget, rates)?;
                (planned, Some(Time::new(&shape, time, args.ops)))
            }
            None => (plan(&shape, policy.clone(), &options, budget)?, None),
        };
        if let Some((pattern, nearest)) = policy.unmatched().first() {
            bail!(
                "policy: `{pattern}` matches no segment and no tensor; the nearest names are {}",
                nearest.join(", ")
            );
        }
        Ok(Row { time, ..Row::new(name, &planned) })
    };
    let rows = match args.table {
        true => TABLE
            .iter()
            .map(|(name, policy, optimizer)| {
                let policy = policy.parse().map_err(anyhow::Error::msg)?;
                row(name, &policy, *optimizer)
            })
            .collect::<Result<Vec<Row>>>()?,
        false => vec![row(&args.policy.to_string(), &args.policy, args.offload_optimizer)?],
    };
    if args.json {
        let settings = serde_json::json!({
            "model": args.model,
            "batch": args.batch,
            "context": args.context,
            "accumulate": args.accumulate,
            "precision": args.precision.to_string(),
            "card": args.card,
            "rows": rows,
        });
        println!("{settings}");
        return Ok(());
    }
    println!(
        "{} at {} × {} sequences of {} tokens, {}",
        args.model, args.accumulate, args.batch, args.context, args.precision
    );
    if let Some(rates) = &rates {
        println!(
            "with the least that a step takes on {}, {:.1} GB/s out and {:.1} GB/s in at once",
            rates.name,
            rates.out_bytes / 1e9,
            rates.in_bytes / 1e9
        );
    }
    print!("\n{:<30}{:>13}{:>12}{:>12}{:>12}", "policy", "activations", "total", "host", "sent out");
    println!("{}", if args.card.is_some() { "       step   waits   tokens/s  launches" } else { "" });
    for row in &rows {
        print!(
            "{:<30}{:>13}{:>12}{:>12}{:>12}",
            row.policy,
            bytes(row.activation_bytes),
            bytes(row.total_bytes),
            bytes(row.host_bytes),
            bytes(row.moved_bytes as usize)
        );
        if let Some(time) = &row.time {
            print!(
                "{:>8.1} ms{:>6.1} %{:>11.0}{:>10}",
                1e3 * time.seconds,
                100.0 * time.exposed_seconds / time.seconds,
                time.tokens_per_second,
                time.launches
            );
        }
        println!();
    }
    for time in rows.iter().filter_map(|row| row.time.as_ref()).filter(|time| !time.ops.is_empty()) {
        println!(
            "\n{:<26}{:>8}{:>10}{:>12}{:>12}{:>14}",
            "op", "count", "launches", "GFLOP", "bytes", "at least"
        );
        for op in &time.ops {
            println!(
                "{:<26}{:>8}{:>10}{:>12.1}{:>12}{:>11.3} ms",
                op.name,
                op.count,
                op.launches,
                op.flops as f64 / 1e9,
                bytes(op.bytes as usize),
                1e3 * op.seconds
            );
        }
    }
    Ok(())
}

/// A card's rates by its name here.
fn rates(card: &str) -> Result<Rates> {
    if card != HERE {
        return Rates::named(card).with_context(|| format!("--card {card}: not known"));
    }
    // A budget that any card has: only the link is used.
    let device = Device::cuda_with(CudaOptions { ordinal: 0, budget_bytes: Some(1 << 20) })
        .context("--card here: it cannot be asked")?;
    let Some(rates) = Rates::of_card(device.name()) else {
        bail!(
            "--card here: the peaks of `{}` are not known; expected a card with those of {}, or one of them by name",
            device.name(),
            Rates::NAMES.join(", ")
        );
    };
    Ok(device.link()?.map_or(rates.clone(), |link| rates.with_link(&link)))
}

impl Time {
    fn new(shape: &StepShape, time: StepTime, with_ops: bool) -> Self {
        // A plan runs two micro-batches of a window at most.
        let tokens = shape.batch * shape.context * time.micro_batches;
        Time {
            seconds: time.seconds,
            tokens_per_second: tokens as f64 / time.seconds,
            compute_seconds: time.compute_seconds,
            exposed_seconds: time.exposed_seconds,
            transfer_seconds: time.transfer_seconds,
            launches: time.launches,
            ops: if with_ops { time.ops } else { Vec::new() },
        }
    }
}

impl Row {
    fn new(policy: &str, planned: &StepPlan) -> Self {
        let memory = &planned.memory;
        Row {
            policy: policy.to_string(),
            activation_bytes: memory.peak_of(Category::Activations),
            total_bytes: memory.peak_bytes,
            extent_bytes: memory.extent_bytes,
            weight_bytes: memory.peak_of(Category::Weights),
            gradient_bytes: memory.peak_of(Category::Gradients),
            optimizer_bytes: memory.peak_of(Category::Optimizer),
            host_bytes: planned.host_bytes + planned.optimizer_host_bytes,
            disk_bytes: planned.disk_bytes,
            moved_bytes: planned.offload.out_bytes(),
            time: None,
        }
    }
}
