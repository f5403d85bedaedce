//! What a step will hold, found by running it without memory.
//!
//! The same code that trains runs on a dry device: it allocates from the same ledger and submits the same ops, and only
//! the execution is left out. So the prediction is exact, byte for byte, and takes milliseconds.

use std::collections::BTreeMap;

use ebbtide_kernels::{Device, MemoryReport, OpCount, OpTime, Rates};
use ebbtide_offload::{Expression, OffloadOptions, OffloadReport, Policy, Tier, policy::Builtin};
use serde::Serialize;

use crate::{
    Batch, Engine, Error, Flat, Numerics, Result, Trainer, TrainerOptions,
    gpt2::{Gpt2, Gpt2Config},
    optimizer::{AdamWOptions, Schedule},
};

/// The shape of a training step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepShape {
    /// The model.
    pub model: Gpt2Config,
    /// Sequences of a micro-batch.
    pub batch: usize,
    /// Positions of a sequence.
    pub context: usize,
    /// Micro-batches of a window.
    pub accumulate: usize,
    /// Whether what only the optimizer needs is in host memory: see [`Engine::offload_optimizer`].
    pub offload_optimizer: bool,
    /// What it computes in.
    pub numerics: Numerics,
}

/// What a step holds and moves.
#[derive(Clone, Debug, PartialEq)]
pub struct StepPlan {
    /// The device's memory; [`MemoryReport::extent_bytes`] is what a budget must hold.
    pub memory: MemoryReport,
    /// The offload runtime's account.
    pub offload: OffloadReport,
    /// Floating-point operations of the step.
    pub flops: u64,
    /// Host memory that the offloaded slices took.
    pub host_bytes: usize,
    /// Disk space that they took.
    pub disk_bytes: usize,
    /// Host memory of what only the optimizer needs, where it is there.
    pub optimizer_host_bytes: usize,
}

/// The least time that a step takes on a card, by the rates that were given: see [`ebbtide_kernels::Device::timed`].
#[derive(Clone, Debug, PartialEq)]
pub struct StepTime {
    /// Of the whole step.
    pub seconds: f64,
    /// Of it, that kernels ran.
    pub compute_seconds: f64,
    /// Of it, that the compute stream stood still for offloaded tensors.
    pub exposed_seconds: f64,
    /// Of all copies, reads and writes of offloaded tensors, summed over their streams.
    pub transfer_seconds: f64,
    /// Kernels, copies and fills that the host queued.
    pub launches: u64,
    /// Micro-batches of the window that ran, two at most: each beyond the first adds the same.
    pub micro_batches: usize,
    /// The step's ops, those first that took longest.
    pub ops: Vec<OpPart>,
}

/// The part of a step that is one kind of op.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OpPart {
    /// The op's name.
    pub name: String,
    /// Ops.
    pub count: u64,
    /// Kernels, copies and fills for them.
    pub launches: u64,
    /// Floating-point operations of products.
    pub flops: u64,
    /// Device bytes read and written, each operand once.
    pub bytes: u64,
    /// Seconds that they take at least.
    pub seconds: f64,
}

/// The most tokens of a micro-batch, and micro-batches of a window.
const MOST_TOKENS: usize = 1 << 26;
const MOST_MICRO_BATCHES: usize = 1 << 20;

impl StepShape {
    /// Holds the sizes against what can be.
    ///
    /// # Errors
    /// [`Error::Config`] for no sequences, positions or micro-batches, for more than 2^26 tokens of a micro-batch, and for more than
    /// 2^20 micro-batches.
    pub fn check(&self) -> Result<()> {
        let bad = |field, expected: String, found: &dyn std::fmt::Display| {
            Err(Error::Config { field, expected, found: found.to_string() })
        };
        let tokens = self.batch.checked_mul(self.context).filter(|tokens| (1..=MOST_TOKENS).contains(tokens));
        if tokens.is_none() {
            let expected = format!("from 1 to {MOST_TOKENS} tokens");
            return bad("batch", expected, &format_args!("{} × {}", self.batch, self.context));
        }
        if !(1..=MOST_MICRO_BATCHES).contains(&self.accumulate) {
            return bad("accumulate", format!("from 1 to {MOST_MICRO_BATCHES}"), &self.accumulate);
        }
        Ok(())
    }
}

/// Micro-batches beyond it repeat what those before them did.
const ENOUGH_MICRO_BATCHES: usize = 2;

/// A disk tier of 0 bytes is planned as one of this size, more than any step spills: a dry run takes none of it.
const ANY_BYTES: usize = 1 << 50;

/// Runs a step on a dry device. Two steps, since the second also holds what the first left: nothing, or it shows; and a
/// validation after them.
///
/// # Errors
/// A configuration that cannot be; [`ebbtide_kernels::Error::OutOfMemory`] if a budget is given that does not hold it.
pub fn plan(
    shape: &StepShape,
    policy: impl Into<Expression>,
    options: &OffloadOptions,
    budget_bytes: Option<usize>,
) -> Result<StepPlan> {
    plan_with(shape, Box::new(policy.into()), options, budget_bytes)
}

/// As [`plan`], for any policy.
///
/// # Errors
/// As for [`plan`].
pub fn plan_with(
    shape: &StepShape,
    policy: Box<dyn Policy>,
    options: &OffloadOptions,
    budget_bytes: Option<usize>,
) -> Result<StepPlan> {
    Ok(run(shape, policy, options, &Device::dry(budget_bytes))?.0)
}

/// As [`plan`], and how long the step would take on a card of these rates at least.
///
/// # Errors
/// As for [`plan`].
pub fn timed(
    shape: &StepShape,
    policy: impl Into<Expression>,
    options: &OffloadOptions,
    budget_bytes: Option<usize>,
    rates: &Rates,
) -> Result<(StepPlan, StepTime)> {
    run(shape, Box::new(policy.into()), options, &Device::timed(rates.clone(), budget_bytes))
}

fn run(
    shape: &StepShape,
    policy: Box<dyn Policy>,
    options: &OffloadOptions,
    device: &Device,
) -> Result<(StepPlan, StepTime)> {
    shape.check()?;
    let mut options = options.clone();
    if let Some(disk) = options.disk.as_mut().filter(|disk| disk.bytes == 0) {
        disk.bytes = ANY_BYTES;
    }
    let engine = Engine::with_numerics(device, policy, options, shape.numerics)?
        .offload_optimizer(shape.offload_optimizer);
    let model = Gpt2::new(&engine, shape.model, 0, true)?;
    let optimizer = AdamWOptions::default();
    let trainer_options = TrainerOptions {
        optimizer,
        schedule: Schedule::constant(0.0),
        seed: 0,
        loss_scale: Default::default(),
    };
    let mut trainer = Trainer::new(&engine, model, trainer_options)?;
    let len = shape.batch * shape.context;
    let batch =
        Batch { tokens: vec![0; len], targets: vec![0; len], batch: shape.batch, context: shape.context };
    let window = vec![batch; shape.accumulate.min(ENOUGH_MICRO_BATCHES)];
    trainer.step(&window)?;
    engine.offload().take_report();
    let flops_of = |ops: &Ops| -> u64 { ops.0.values().map(|count| count.flops).sum() };
    let ops = || (device.op_counts(), device.op_times());
    let ops_before = ops();
    let clock = || {
        let (seconds, launches) = device.virtual_time().unwrap_or_default();
        (seconds, launches, engine.compute().report().busy_seconds, engine.offload().times())
    };
    let before = clock();
    trainer.step(&window)?;
    let (after, ops_after) = (clock(), ops());
    let times = after.3.since(&before.3);
    let time = StepTime {
        seconds: after.0 - before.0,
        compute_seconds: after.2 - before.2,
        exposed_seconds: times.exposed_seconds,
        transfer_seconds: times.transfer_seconds,
        launches: after.1 - before.1,
        micro_batches: window.len(),
        ops: parts(&ops_before, &ops_after),
    };
    let flops = flops_of(&ops_after) - flops_of(&ops_before);
    let offload = engine.offload().report();
    trainer.evaluate(&window[..1])?;
    let used = |tier| engine.offload().tier_usage(tier).1;
    let (host_bytes, disk_bytes) = (used(Tier::Host), used(Tier::Disk));
    let [first, second] = trainer.optimizer().moments();
    let state = [trainer.model().parameters().weights(), first, second];
    let on_host = state.iter().filter(|flat| matches!(flat, Flat::Host(_)));
    let optimizer_host_bytes = on_host.map(|flat| 4 * flat.len()).sum();
    let memory = device.memory();
    let planned = StepPlan { memory, offload, flops, host_bytes, disk_bytes, optimizer_host_bytes };
    Ok((planned, time))
}

type Ops = (BTreeMap<String, OpCount>, BTreeMap<String, OpTime>);

fn parts(before: &Ops, after: &Ops) -> Vec<OpPart> {
    let mut parts = Vec::new();
    for (name, time) in &after.1 {
        let (count, earlier) = (after.0.get(name), before.0.get(name));
        let (count, earlier) = (count.copied().unwrap_or_default(), earlier.copied().unwrap_or_default());
        let earlier_time = before.1.get(name).copied().unwrap_or_default();
        if count.count > earlier.count {
            parts.push(OpPart {
                name: name.clone(),
                count: count.count - earlier.count,
                launches: time.launches - earlier_time.launches,
                flops: count.flops - earlier.flops,
                bytes: count.bytes - earlier.bytes,
                seconds: time.seconds - earlier_time.seconds,
            });
        }
    }
    parts.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    parts
}

/// The options made to fit a step: tiers as large as it needs, the host's where no size is given, the disk's where it is 0; windows
/// of fewer slices where the budget does not lay out those asked for; and as few segments recomputed for want of room as the budget allows, where the policy lets them be.
///
/// # Errors
/// As for [`plan`].
pub fn sized(
    shape: &StepShape,
    policy: impl Into<Expression>,
    options: &OffloadOptions,
    budget_bytes: Option<usize>,
) -> Result<OffloadOptions> {
    let policy = policy.into();
    let mut sized = options.clone();
    let mut planned = plan(shape, policy.clone(), &sized, budget_bytes);
    while sized.window_slices > 0 && planned.as_ref().is_err_and(is_out_of_memory) {
        sized.window_slices /= 2;
        planned = plan(shape, policy.clone(), &sized, budget_bytes);
    }
    let planned = match planned {
        Err(error) if is_out_of_memory(&error) => {
            let first = recompute_first(shape, &policy, &sized, budget_bytes, error)?;
            sized.recompute_first = first;
            plan(shape, policy, &sized, budget_bytes)?
        }
        planned => planned?,
    };
    sized.host_bytes.get_or_insert(planned.host_bytes);
    if let Some(disk) = sized.disk.as_mut().filter(|disk| disk.bytes == 0) {
        disk.bytes = planned.disk_bytes;
        if planned.disk_bytes == 0 {
            sized.disk = None;
        }
    }
    Ok(sized)
}

/// The budget that a device should have that may have so many bytes: that many, or fewer where a step would find its memory in
/// pieces with them and does not with fewer.
///
/// # Errors
/// As for [`plan`].
pub fn fitting_budget(
    shape: &StepShape,
    policy: impl Into<Expression>,
    options: &OffloadOptions,
    budget_bytes: usize,
) -> Result<usize> {
    let policy = policy.into();
    match sized(shape, policy.clone(), options, Some(budget_bytes)) {
        Err(error) if is_out_of_memory(&error) => match least_budget(shape, policy, options)? {
            least if least <= budget_bytes => Ok(least),
            _ => Err(error),
        },
        sized => sized.map(|_| budget_bytes),
    }
}

/// The fewest segments to recompute for want of room with which a step fits that does not without; `error` if none does.
fn recompute_first(
    shape: &StepShape,
    policy: &Expression,
    options: &OffloadOptions,
    budget_bytes: Option<usize>,
    error: Error,
) -> Result<usize> {
    let with = |recompute_first| OffloadOptions { recompute_first, ..options.clone() };
    let all = plan(shape, policy.clone(), &with(usize::MAX), None)?.offload.fallbacks.to_recompute as usize;
    let fits = |first| match plan(shape, policy.clone(), &with(first), budget_bytes) {
        Ok(_) => Ok(true),
        Err(error) if is_out_of_memory(&error) => Ok(false),
        Err(error) => Err(error),
    };
    if all == 0 || !fits(all)? {
        return Err(error);
    }
    let (mut too_few, mut enough) = (0, all);
    while enough - too_few > 1 {
        let middle = (too_few + enough) / 2;
        if fits(middle)? { enough = middle } else { too_few = middle }
    }
    Ok(enough)
}

fn is_out_of_memory(error: &Error) -> bool {
    matches!(error, Error::Device(ebbtide_kernels::Error::OutOfMemory(_)))
}

/// The smallest budget, to 4 KiB, that a step runs in. Under the offload policy a small budget makes the runtime hold less
/// ahead of need, so it can be far below the extent of a step that has room. Segments that may be recomputed for want of room
/// are: see [`sized`] for the options that a trainer then needs.
///
/// # Errors
/// A configuration that cannot be.
pub fn least_budget(
    shape: &StepShape,
    policy: impl Into<Expression>,
    options: &OffloadOptions,
) -> Result<usize> {
    let policy = policy.into();
    let options = &OffloadOptions { recompute_first: usize::MAX, window_slices: 0, ..options.clone() };
    const STEP: usize = 4096;
    let mut enough = plan(shape, policy.clone(), options, None)?.memory.extent_bytes.next_multiple_of(STEP);
    let mut too_little = 0;
    while enough - too_little > STEP {
        let middle = ((enough + too_little) / 2).next_multiple_of(STEP);
        match plan(shape, policy.clone(), options, Some(middle)) {
            Ok(_) if middle < enough => enough = middle,
            Ok(_) => break,
            Err(error) if is_out_of_memory(&error) => too_little = middle,
            Err(error) => return Err(error),
        }
    }
    Ok(enough)
}

/// A setting that fits a budget.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// The policy.
    pub policy: Builtin,
    /// Sequences of a micro-batch; with `accumulate` as many of the window as asked for.
    pub batch: usize,
    /// Micro-batches of a window.
    pub accumulate: usize,
    /// The smallest budget that it runs in.
    pub budget_bytes: usize,
}

/// The nearest setting to the one asked for that fits: first another policy, then smaller micro-batches of the same
/// window. `None` if not even single sequences fit.
///
/// # Errors
/// A configuration that cannot be.
pub fn nearest_fit(shape: &StepShape, budget_bytes: usize, options: &OffloadOptions) -> Result<Option<Fit>> {
    let options = &OffloadOptions { window_slices: 0, ..options.clone() };
    for batch in (1..=shape.batch).rev().filter(|batch| shape.batch.is_multiple_of(*batch)) {
        let accumulate = shape.accumulate * (shape.batch / batch);
        for policy in Builtin::ALL {
            let smaller = StepShape { batch, accumulate, ..*shape };
            match plan(&smaller, policy, options, Some(budget_bytes)) {
                Ok(_) => {
                    let budget_bytes = least_budget(&smaller, policy, options)?;
                    return Ok(Some(Fit { policy, batch, accumulate, budget_bytes }));
                }
                Err(error) if is_out_of_memory(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(None)
}
