//! The commands, and what they share.

mod bench;
mod bench_loader;
mod data;
mod eval;
mod export;
mod pack;
mod plan;
mod run;
mod sample;
mod train;

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, Parser, Subcommand};
use ebbtide::config::{Bytes, Tiers};

/// Trains models larger than the device, within one memory budget.
#[derive(Parser)]
#[command(version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Turn text files, or folders of them, into a token file
    Pack(pack::PackArgs),
    /// Train a GPT-2; without arguments a small one on the bundled text
    Train(train::TrainArgs),
    /// Loss of a run's model on its validation data, or on a token file
    Eval(eval::EvalArgs),
    /// Let a run's model write
    Sample(sample::SampleArgs),
    /// Write a run's model as `transformers` reads it
    Export(export::ExportArgs),
    /// What a training step will need, without running it
    Plan(plan::PlanArgs),
    /// Time and weigh training steps
    Bench(bench::BenchArgs),
    /// Ask what a run sees of its data
    Data(data::DataArgs),
    /// Time how fast a dataset's windows come, beside the disk itself
    BenchLoader(bench_loader::BenchLoaderArgs),
}

pub(crate) fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Pack(args) => pack::pack(args),
        Command::Train(args) => train::train(args),
        Command::Eval(args) => eval::eval(args),
        Command::Sample(args) => sample::sample(args),
        Command::Export(args) => export::export(args),
        Command::Plan(args) => plan::plan_step(args),
        Command::Bench(args) => bench::bench(args),
        Command::Data(args) => data::data(args),
        Command::BenchLoader(args) => bench_loader::bench_loader(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Where offloaded activations go.
#[derive(Args)]
struct TierArgs {
    /// Most host memory for offloaded activations, such as 4GiB [default: what a step needs]
    #[arg(long)]
    host_memory: Option<Bytes>,
    /// Disk space for them: for a policy that names the disk, and for what host memory does not hold [default: what a step needs
    /// of a policy that names it, else none]
    #[arg(long)]
    disk_memory: Option<Bytes>,
    /// A folder of the disk to use; nothing is seen in it [default: the run's own]
    #[arg(long)]
    spill: Option<PathBuf>,
    /// Hold checksums of what comes back from disk and of what is computed again
    #[arg(long)]
    verify: bool,
    /// Measure the largest error of each lossy codec
    #[arg(long)]
    measure_errors: bool,
}

impl TierArgs {
    fn tiers(&self) -> Tiers {
        Tiers {
            host_memory: self.host_memory,
            disk_memory: self.disk_memory,
            spill: self.spill.clone(),
            verify: self.verify,
            measure_errors: self.measure_errors,
        }
    }
}

/// Says so where the build is not optimised: its times mean nothing.
fn warn_if_unoptimised() {
    if cfg!(debug_assertions) {
        eprintln!("warning: this is an unoptimised build; `cargo run --release` is several times faster");
    }
}

/// A rate for people: `950`, `12.3k`.
fn per_second(rate: f64) -> String {
    if rate < 1000.0 { format!("{rate:.0}") } else { format!("{:.1}k", rate / 1000.0) }
}
