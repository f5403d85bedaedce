//! The commands, and what they share.

mod bench;
mod bench_loader;
mod data;
mod eval;
mod export;
mod pack;
mod run;
mod sample;
mod train;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

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
