//! What a step will hold, found by running it without memory.
//!
//! The same code that trains runs on a dry device: it allocates from the same ledger and submits the same ops, and only
//! the execution is left out. So the prediction is exact, byte for byte, and takes milliseconds.

use ebbtide_kernels::{Device, MemoryReport};
use ebbtide_offload::{OffloadOptions, OffloadReport, policy::Builtin};

use crate::{
    Batch, Engine, Result, Trainer, TrainerOptions,
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
}

/// Runs a step on a dry device. Two steps, since the second also holds what the first left: nothing, or it shows.
///
/// # Errors
/// A configuration that cannot be.
pub fn plan(shape: &StepShape, policy: Builtin, options: OffloadOptions) -> Result<StepPlan> {
    let device = Device::dry(None);
    let engine = Engine::new(&device, policy.policy(), options)?;
    let model = Gpt2::new(&engine, shape.model, 0, true)?;
    let optimizer = AdamWOptions::default();
    let trainer_options = TrainerOptions { optimizer, schedule: Schedule::constant(0.0), seed: 0 };
    let mut trainer = Trainer::new(&engine, model, trainer_options)?;
    let len = shape.batch * shape.context;
    let batch =
        Batch { tokens: vec![0; len], targets: vec![0; len], batch: shape.batch, context: shape.context };
    let window = vec![batch; shape.accumulate];
    trainer.step(&window)?;
    engine.offload().take_report();
    let flops_of = |device: &Device| -> u64 { device.op_counts().values().map(|count| count.flops).sum() };
    let flops_before = flops_of(&device);
    trainer.step(&window)?;
    let flops = flops_of(&device) - flops_before;
    Ok(StepPlan { memory: device.memory(), offload: engine.offload().report(), flops })
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
    /// What it needs.
    pub extent_bytes: usize,
}

/// The nearest setting to the one asked for that fits: first another policy, then smaller micro-batches of the same
/// window. `None` if not even single sequences fit.
///
/// # Errors
/// A configuration that cannot be.
pub fn nearest_fit(shape: &StepShape, budget_bytes: usize, options: OffloadOptions) -> Result<Option<Fit>> {
    let sizes = (0..).map(|i| shape.batch >> i).take_while(|&batch| batch >= 1);
    for batch in sizes.filter(|batch| shape.batch % batch == 0) {
        let accumulate = shape.accumulate * (shape.batch / batch);
        for policy in Builtin::ALL {
            let plan = plan(&StepShape { batch, accumulate, ..*shape }, policy, options)?;
            let extent_bytes = plan.memory.extent_bytes;
            if extent_bytes <= budget_bytes {
                return Ok(Some(Fit { policy, batch, accumulate, extent_bytes }));
            }
        }
    }
    Ok(None)
}
