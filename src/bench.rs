//! One training step, timed and weighed.

use std::time::Instant;

use ebbtide_engine::{
    Batch, Engine, Result, Trainer, TrainerOptions,
    gpt2::{Gpt2, Gpt2Config},
    optimizer::{AdamWOptions, Schedule},
    plan::StepShape,
};
use ebbtide_kernels::{Device, DeviceKind, DeviceOptions};
use ebbtide_offload::Expression;
use serde::Serialize;

use crate::{
    account::Account,
    config::{Bytes, Numerics, Tiers},
};

/// What is measured.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// The model.
    pub model: Gpt2Config,
    /// Sequences of a step.
    pub batch: usize,
    /// Positions of each.
    pub context: usize,
    /// Where saved activations go.
    pub policy: Expression,
    /// What computes.
    pub device: DeviceKind,
    /// Threads of the kernels; the machine's cores if not given.
    pub threads: Option<usize>,
    /// Most bytes on the device.
    pub budget_bytes: Option<usize>,
    /// What the model computes in.
    pub numerics: Numerics,
    /// Whether the optimizer's moments are in host memory.
    pub offload_optimizer: bool,
    /// Where offloaded activations go; their space in the system's folder for temporary files unless it says so.
    pub tiers: Tiers,
}

/// What steps took.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BenchReport {
    /// Tokens of a step over [`BenchReport::seconds_per_step`].
    pub tokens_per_second: f64,
    /// Median over the steps, after one to warm up: forward, backward and AdamW.
    pub seconds_per_step: f64,
    /// Bytes that one forward pass saved for backward.
    pub saved_bytes: u64,
    /// Most device bytes in use at once: weights, gradients and optimizer included.
    pub peak_device_bytes: usize,
    /// Most device bytes in use at once less the weights, gradients and moments.
    pub peak_step_bytes: usize,
    /// The smallest budget under which the step runs as it did.
    pub extent_bytes: usize,
    /// Bytes sent to host memory and disk a step.
    pub offloaded_bytes: u64,
    /// The offload runtime's account of the steps together.
    pub offload: Account,
    /// Floating-point operations of a step's products, over its seconds.
    pub flops_per_second: f64,
    /// Loss of the first step, on random tokens with random weights.
    pub first_loss: f32,
    /// Loss of the last step.
    pub last_loss: f32,
}

/// A model in training on random tokens.
pub struct Bench {
    trainer: Trainer,
    batch: Batch,
    first_loss: f32,
}

impl Bench {
    /// Sets up the model and takes one step to warm up.
    ///
    /// # Errors
    /// A configuration that cannot be, or a budget that does not hold it.
    pub fn new(options: &BenchOptions) -> Result<Self> {
        let shape = StepShape {
            model: options.model,
            batch: options.batch,
            context: options.context,
            accumulate: 1,
            offload_optimizer: options.offload_optimizer,
            numerics: options.numerics,
        };
        let budget = options.budget_bytes.map(Bytes);
        let (tiers, budget_bytes) =
            options.tiers.options(options.device, &shape, &options.policy, budget, &std::env::temp_dir())?;
        let device =
            Device::open(&DeviceOptions { kind: options.device, threads: options.threads, budget_bytes })?;
        let policy = Box::new(options.policy.clone());
        let engine = Engine::with_numerics(&device, policy, tiers, options.numerics)?
            .offload_optimizer(options.offload_optimizer);
        let model = Gpt2::new(&engine, options.model, 0, true)?;
        let schedule = Schedule::constant(3e-4);
        let trainer_options = TrainerOptions {
            optimizer: AdamWOptions::default(),
            schedule,
            seed: 0,
            loss_scale: Default::default(),
        };
        let mut trainer = Trainer::new(&engine, model, trainer_options)?;
        let batch = random_batch(options);
        let first_loss = trainer.step(std::slice::from_ref(&batch))?.loss;
        Ok(Bench { trainer, batch, first_loss })
    }

    /// Seconds of one more step, and its loss.
    ///
    /// # Errors
    /// The device's.
    pub fn step(&mut self) -> Result<(f64, f32)> {
        let start = Instant::now();
        let report = self.trainer.step(std::slice::from_ref(&self.batch))?;
        Ok((start.elapsed().as_secs_f64(), report.loss))
    }

    /// Takes `steps` steps, at least one.
    ///
    /// # Errors
    /// The device's.
    pub fn run(&mut self, steps: usize) -> Result<BenchReport> {
        let (engine, device) = (self.trainer.engine().clone(), self.trainer.engine().device().clone());
        engine.offload().take_report();
        let times_before = engine.offload().times();
        let flops_of = |device: &Device| -> u64 { device.op_counts().values().map(|c| c.flops).sum() };
        let flops_before = flops_of(&device);
        let steps = steps.max(1);
        let mut seconds = Vec::with_capacity(steps);
        let mut last_loss = self.first_loss;
        for _ in 0..steps {
            let (taken, loss) = self.step()?;
            seconds.push(taken);
            last_loss = loss;
        }
        let flops = (flops_of(&device) - flops_before) / steps as u64;
        let seconds_per_step = median(&mut seconds);
        let (memory, offload) = (device.memory(), engine.offload().report());
        let times = engine.offload().times().since(&times_before);
        let parameters = self.trainer.model().parameters().flat_len();
        Ok(BenchReport {
            tokens_per_second: self.batch.tokens.len() as f64 / seconds_per_step,
            seconds_per_step,
            saved_bytes: offload.saved_bytes / steps as u64,
            peak_device_bytes: memory.peak_bytes,
            peak_step_bytes: memory.peak_bytes.saturating_sub(16 * parameters),
            extent_bytes: memory.extent_bytes,
            offloaded_bytes: offload.out_bytes() / steps as u64,
            offload: Account::new(engine.offload(), &offload, &times, &memory)?,
            flops_per_second: flops as f64 / seconds_per_step,
            first_loss: self.first_loss,
            last_loss,
        })
    }

    /// The trainer, for more about its device.
    pub fn trainer(&self) -> &Trainer {
        &self.trainer
    }
}

/// Tokens from a fixed linear congruence: every run times the same work.
fn random_batch(options: &BenchOptions) -> Batch {
    let vocabulary = options.model.vocabulary as u64;
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % vocabulary
    };
    let len = options.batch * options.context;
    Batch {
        tokens: (0..len).map(|_| next() as u32).collect(),
        targets: (0..len).map(|_| next() as i32).collect(),
        batch: options.batch,
        context: options.context,
    }
}

/// The median, or the mean of the middle two; 0 of none.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}
