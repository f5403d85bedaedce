//! `ebbtide bench-loader`.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use clap::Args;
use ebbtide::{
    config::Bytes,
    kernels::bytes,
    loader::{
        BlockOrder, Dataset, IoMode, Loader, LoaderOptions, LoaderState, Order, drop_from_cache, memory,
        read_through,
    },
};

use super::{per_second, warn_if_unoptimised};

#[derive(Args)]
pub(crate) struct BenchLoaderArgs {
    /// A file of tokens, or a folder of them
    file: PathBuf,
    /// Inputs of a window
    #[arg(long, default_value_t = 1024)]
    context: usize,
    #[command(flatten)]
    order: OrderArgs,
    /// The memory that the loader may use, such as 512MiB; without it half of what is free
    #[arg(long)]
    memory_limit: Option<Bytes>,
    /// Windows of a batch
    #[arg(long, default_value_t = 32)]
    batch: usize,
    /// Threads that read, 1 to 4
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Batches ahead of the caller at most
    #[arg(long, default_value_t = LoaderOptions::default().batches_ahead)]
    ahead: usize,
    /// Seconds at most for the raw reads, and for the loader's first epoch
    #[arg(long, default_value_t = 60.0)]
    seconds: f64,
    /// Leave the page cache as it is, instead of reading cold
    #[arg(long)]
    warm: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// An order, as commands take it.
#[derive(Args)]
pub(crate) struct OrderArgs {
    /// random (each window a read of its own) or block (whole blocks, once an epoch, mixed over a window of them)
    #[arg(long, default_value = "random", value_parser = ["random", "block"])]
    order: String,
    /// Bytes of a block
    #[arg(long, default_value = "1MiB")]
    block: Bytes,
    /// Blocks open at a time
    #[arg(long, default_value_t = BlockOrder::default().window_blocks)]
    window: u32,
    /// Streams that ranks share out
    #[arg(long, default_value_t = BlockOrder::default().streams)]
    streams: u32,
}

impl OrderArgs {
    pub(crate) fn order(&self) -> Order {
        match &*self.order {
            "block" => Order::Block(BlockOrder {
                block_bytes: self.block.0 as u64,
                window_blocks: self.window,
                streams: self.streams,
            }),
            _ => Order::Random,
        }
    }
}

pub(super) fn bench_loader(args: BenchLoaderArgs) -> Result<()> {
    warn_if_unoptimised();
    let dataset = Dataset::open(&args.file)?;
    let samples = dataset.samples(0..dataset.len(), args.context)?;
    let most = match Duration::try_from_secs_f64(args.seconds) {
        Ok(most) if !most.is_zero() => most,
        _ => bail!("--seconds: expected a time above 0, found {}", args.seconds),
    };
    let options = LoaderOptions {
        order: args.order.order(),
        batch: args.batch,
        threads: args.threads,
        batches_ahead: args.ahead,
        ram_bytes: args.memory_limit.map(|limit| limit.0 as u64),
        ..LoaderOptions::default()
    };
    let cold = || {
        if !args.warm {
            drop_from_cache(&dataset);
        }
    };
    // Raw reads go the way that the loader's do; which that is, it says itself.
    let mode = match &*Loader::new(&samples, &options, LoaderState::default())?.report().io {
        "direct" => IoMode::Direct,
        "dropped" => IoMode::Dropped,
        _ => IoMode::Cached,
    };
    cold();
    let raw = read_through(&dataset, mode, args.order.block.0 as u64, args.threads, most)?;
    cold();
    let began = Instant::now();
    let mut loader = Loader::new(&samples, &options, LoaderState::default())?;
    let mut windows = 0u64;
    while windows < samples.count() && began.elapsed() < most {
        let batch = loader.next()?;
        windows += batch.batch as u64;
        loader.recycle(batch);
    }
    let seconds = began.elapsed().as_secs_f64();
    let (report, state) = (loader.report(), loader.state());
    let rate = |bytes: u64, seconds: f64| if seconds > 0.0 { bytes as f64 / seconds } else { 0.0 };
    let bytes_per_second = rate(report.gathered_bytes, seconds);
    let raw_rate = rate(raw.bytes, raw.seconds);
    let peak_resident = memory::peak_resident_bytes();
    let wait_share = report.consumer_wait_seconds / seconds;
    if args.json {
        let mut value = serde_json::to_value(&report)?;
        let settings = [
            ("bytes_per_second", bytes_per_second.into()),
            ("raw_sequential_bytes_per_second", raw_rate.into()),
            ("windows_per_second", (windows as f64 / seconds).into()),
            ("peak_resident_bytes", peak_resident.into()),
            ("wait_share", wait_share.into()),
            ("windows", windows.into()),
            ("seconds", seconds.into()),
            ("context", args.context.into()),
            ("batch", args.batch.into()),
            ("order", serde_json::to_value(options.order)?),
            ("dataset_bytes", dataset.bytes().into()),
            ("digest", format!("{:016x}", state.digest).into()),
        ];
        settings.into_iter().for_each(|(key, setting)| value[key] = setting);
        println!("{value}");
        return Ok(());
    }
    println!(
        "{}/s, {} windows/s; raw reads one after another {}/s",
        bytes(bytes_per_second as usize),
        per_second(windows as f64 / seconds),
        bytes(raw_rate as usize)
    );
    println!("read for each byte  {:.3}", report.read_amplification);
    println!("read                {}: {}", report.io, report.io_reason);
    println!(
        "memory              {} of blocks and {} of batches, of {} ({})",
        bytes(report.arena_bytes as usize),
        bytes(report.batch_bytes as usize),
        bytes(usize::try_from(report.limit_bytes).unwrap_or(usize::MAX)),
        report.limit_source
    );
    if let Some(peak) = peak_resident {
        println!("resident at most    {}", bytes(peak as usize));
    }
    println!(
        "waits               caller {:.0}% of the time; {:.2} s for the disk, {:.2} s for room, {:.2} s copying",
        100.0 * wait_share,
        report.disk_wait_seconds,
        report.room_wait_seconds,
        report.copy_seconds
    );
    Ok(())
}
