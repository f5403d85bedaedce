//! `ebbtide data`.

use std::{
    io::{self, BufWriter, ErrorKind, Write},
    path::PathBuf,
};

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use ebbtide::{
    kernels::bytes,
    loader::{Dataset, LoaderOptions, Order, Sample, Samples, Share, make_sums, order_of, shuffle_report},
};

use super::bench_loader::OrderArgs;

#[derive(Args)]
pub(crate) struct DataArgs {
    #[command(subcommand)]
    command: DataCommand,
}

#[derive(Subcommand)]
enum DataCommand {
    /// List the windows that a step sees, and where in the data they lie
    Order(DataOrderArgs),
    /// Make checksums of files beside them, or hold files against those that they have
    Sums(DataSumsArgs),
    /// Say how well an order mixes the data, and whether the data looks sorted
    Shuffle(DataShuffleArgs),
}

#[derive(Args)]
struct DataSumsArgs {
    /// A file of tokens, or a folder of them
    file: PathBuf,
    /// A folder for the checksums, instead of beside the files
    #[arg(long)]
    folder: Option<PathBuf>,
}

#[derive(Args)]
struct DataShuffleArgs {
    /// A file of tokens, or a folder of them
    file: PathBuf,
    /// Inputs of a window
    #[arg(long, default_value_t = 1024)]
    context: usize,
    /// Windows of a batch
    #[arg(long, default_value_t = 32)]
    batch: usize,
    #[command(flatten)]
    order: OrderArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct DataOrderArgs {
    /// A file of tokens, or a folder of them
    file: PathBuf,
    /// Inputs of a window
    #[arg(long, default_value_t = 1024)]
    context: usize,
    /// Windows of a step, of all ranks
    #[arg(long, default_value_t = 32)]
    batch: u64,
    #[command(flatten)]
    order: OrderArgs,
    /// The run's seed
    #[arg(long, default_value_t = 1337)]
    seed: u64,
    /// Count steps from the start of this epoch
    #[arg(long, default_value_t = 0)]
    epoch: u64,
    /// The step of the epoch, from 0 on
    #[arg(long, default_value_t = 0)]
    step: u64,
    /// Share of the data at its end that is for validation
    #[arg(long, default_value_t = 0.0)]
    validation: f64,
    /// Only what this rank sees
    #[arg(long, default_value_t = 0, requires = "world")]
    rank: u64,
    /// Ranks that share the windows of a step
    #[arg(long, default_value_t = 1)]
    world: u64,
    /// Print a JSON object a line
    #[arg(long)]
    json: bool,
}

pub(super) fn data(args: DataArgs) -> Result<()> {
    match args.command {
        DataCommand::Order(args) => order(args),
        DataCommand::Sums(args) => sums(args),
        DataCommand::Shuffle(args) => shuffle(args),
    }
}

fn sums(args: DataSumsArgs) -> Result<()> {
    let dataset = Dataset::open(&args.file)?;
    let report = make_sums(&dataset, args.folder)?;
    println!(
        "{} were as their checksums say, {} have checksums now",
        bytes(report.verified_bytes as usize),
        bytes(report.made_bytes as usize)
    );
    Ok(())
}

fn shuffle(args: DataShuffleArgs) -> Result<()> {
    let dataset = Dataset::open(&args.file)?;
    let samples = dataset.samples(0..dataset.len(), args.context)?;
    let options = LoaderOptions { order: args.order.order(), batch: args.batch, ..LoaderOptions::default() };
    let report = shuffle_report(&samples, &options)?;
    if args.json {
        println!("{}", serde_json::to_value(&report)?);
        return Ok(());
    }
    println!(
        "a sample is mixed with {} others, {:.1} % of all; a batch of {} comes from {:.1} blocks of at most {}",
        report.window_samples.saturating_sub(1),
        100.0 * report.window_share,
        args.batch,
        report.blocks_in_batch,
        report.most_blocks_in_batch
    );
    println!(
        "like beside like: {} runs where chance makes {:.0} ({:+.1} standard deviations)",
        report.runs, report.runs_by_chance, report.runs_score
    );
    if let Some(warning) = report.warning() {
        println!("warning: {warning}");
    }
    Ok(())
}

fn order(args: DataOrderArgs) -> Result<()> {
    let dataset = Dataset::open(&args.file)?;
    let (samples, _) = dataset.split(args.validation, args.context)?;
    let options = LoaderOptions {
        order: args.order.order(),
        seed: args.seed,
        share: Share { rank: args.rank, world: args.world },
        ..LoaderOptions::default()
    };
    let from = args.epoch.checked_mul(samples.count()).zip(args.step.checked_mul(args.batch));
    let from = from.and_then(|(epoch, step)| epoch.checked_add(step));
    let from = from.with_context(|| format!("step {} of epoch {} is beyond 2^64", args.step, args.epoch))?;
    let end = from.saturating_add(args.batch);
    let listed = order_of(&samples, &options, from)?.take_while(|sample| sample.position < end);
    match list(&args, &samples, listed) {
        // Whoever read the list has seen enough.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        result => result.context("cannot write the list"),
    }
}

fn list(args: &DataOrderArgs, samples: &Samples, listed: impl Iterator<Item = Sample>) -> io::Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    if !args.json {
        let kind = if args.order.order() == Order::Random { "random" } else { "block" };
        writeln!(
            out,
            "# {} windows an epoch, {kind} order, fingerprint {:016x}",
            samples.count(),
            samples.dataset().fingerprint()
        )?;
    }
    for sample in listed {
        let Some(place) = samples.place(sample.window) else { continue };
        let (first, last) = (place.tokens.start, place.tokens.end);
        if args.json {
            let line = serde_json::json!({
                "position": sample.position,
                "epoch": sample.position / samples.count(),
                "window": sample.window,
                "file": place.path,
                "tokens": [first, last],
            });
            writeln!(out, "{line}")?;
        } else {
            let (position, window) = (sample.position, sample.window);
            writeln!(out, "{position}  window {window}  {}: tokens {first}..{last}", place.path.display())?;
        }
    }
    out.flush()
}
