//! [`Trainer`]: one optimizer step over an accumulation window, and evaluation.

use ebbtide_kernels::{Category, DType, HostBuffer, Op, Slice, Stream, op::ScalerCounter};

use crate::{
    Engine, Error, LossInto, Precision, Result,
    gpt2::Gpt2,
    ops::{TokenBatch, scalar},
    optimizer::{AdamW, AdamWOptions, Schedule},
    scaler::{LossScaler, LossScalerOptions, ScalerState},
    tape::{Tape, Watch},
};

/// How a model is trained.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainerOptions {
    /// The optimizer's constants.
    pub optimizer: AdamWOptions,
    /// The learning rate.
    pub schedule: Schedule,
    /// Keys the dropout.
    pub seed: u64,
    /// The loss scale, where the engine computes in 16 bits.
    pub loss_scale: LossScalerOptions,
}

/// A micro-batch on the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Token ids, `batch × context`.
    pub tokens: Vec<u32>,
    /// Targets, `batch × context`; negative ones are ignored.
    pub targets: Vec<i32>,
    /// Sequences.
    pub batch: usize,
    /// Positions of each.
    pub context: usize,
}

impl Batch {
    fn check(&self, vocabulary: usize) -> Result<()> {
        let expected = self.batch * self.context;
        if expected == 0 || self.tokens.len() != expected || self.targets.len() != expected {
            return Err(Error::Shape {
                op: "batch",
                expected: format!("{} × {} tokens and targets, not none", self.batch, self.context),
                found: format!("{} tokens and {} targets", self.tokens.len(), self.targets.len()),
            });
        }
        let token = self.tokens.iter().position(|&token| token as usize >= vocabulary);
        let target = self.targets.iter().position(|&target| target >= 0 && target as usize >= vocabulary);
        let bad = |what: &str, index: usize, value: i64| Error::Shape {
            op: "batch",
            expected: format!("{what}s below the vocabulary's {vocabulary}"),
            found: format!("{value} at {index}"),
        };
        match (token, target) {
            (Some(index), _) => Err(bad("token", index, i64::from(self.tokens[index]))),
            (_, Some(index)) => Err(bad("target", index, i64::from(self.targets[index]))),
            _ => Ok(()),
        }
    }

    /// Targets that count.
    pub fn target_count(&self) -> usize {
        self.targets.iter().filter(|&&target| target >= 0).count()
    }
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// The step's number, from 1.
    pub step: u64,
    /// Mean loss over the window's targets, before the update, in nats.
    pub loss: f32,
    /// Global norm of the gradients, before clipping.
    pub gradient_norm: f32,
    /// The rate of the update.
    pub learning_rate: f32,
    /// Tokens of the window.
    pub tokens: usize,
    /// Where the loss scale is after it, where there is one.
    pub scaler: Option<ScalerState>,
    /// Whether the gradients overflowed, so that the update was skipped.
    pub skipped: bool,
}

/// A model, its optimizer, and where training stands.
pub struct Trainer {
    engine: Engine,
    model: Gpt2,
    optimizer: AdamW,
    options: TrainerOptions,
    scaler: Option<LossScaler>,
    steps_done: u64,
    updates_done: u64,
    forwards_done: u64,
    evaluator: Evaluator,
    results: HostBuffer,
}

impl Trainer {
    /// A trainer at step 0.
    ///
    /// # Errors
    /// The device's, above all if the budget cannot hold the optimizer's state.
    pub fn new(engine: &Engine, model: Gpt2, options: TrainerOptions) -> Result<Self> {
        options.schedule.check()?;
        let optimizer = AdamW::new(engine, model.parameters(), options.optimizer)?;
        let precision = engine.numerics().precision;
        let scaler = match precision {
            Precision::F32 => None,
            _ => Some(LossScaler::new(engine, options.loss_scale.of(precision))?),
        };
        Ok(Trainer {
            scaler,
            updates_done: 0,
            engine: engine.clone(),
            model,
            optimizer,
            options,
            steps_done: 0,
            forwards_done: 0,
            evaluator: Evaluator::new(engine)?,
            results: engine.device().host_buffer(12 + 4 * ScalerCounter::COUNT, "results")?,
        })
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The model.
    pub fn model(&self) -> &Gpt2 {
        &self.model
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &AdamW {
        &self.optimizer
    }

    /// The loss scale, where the engine computes in 16 bits.
    pub fn scaler(&self) -> Option<&LossScaler> {
        self.scaler.as_ref()
    }

    /// Steps done, those whose update was skipped included.
    pub fn steps_done(&self) -> u64 {
        self.steps_done
    }

    /// Forward passes recorded so far: the dropout's counter.
    pub fn forwards_done(&self) -> u64 {
        self.forwards_done
    }

    /// Goes on from another run's place: its counts, and its loss scale if it had one; weights and moments are loaded apart.
    ///
    /// # Errors
    /// The device's.
    pub fn set_progress(
        &mut self,
        steps_done: u64,
        forwards_done: u64,
        scaler: Option<&ScalerState>,
    ) -> Result<()> {
        (self.steps_done, self.updates_done, self.forwards_done) = (steps_done, steps_done, forwards_done);
        if let (Some(own), Some(state)) = (&self.scaler, scaler) {
            own.set_state(&self.engine, state)?;
            self.updates_done = u64::from(state.applied);
        }
        Ok(())
    }

    /// One optimizer step over the micro-batches of an accumulation window. Each target weighs the same, whichever
    /// micro-batch it is in: four of 8 sequences give what one of 32 gives, also with ignored targets.
    ///
    /// # Errors
    /// [`Error::Shape`] for a window without targets, or tokens outside of the vocabulary; [`Error::Overflow`] if the loss
    /// scale is at its floor and gradients overflow all the same; the device's. Nothing that was saved for backward is
    /// left behind.
    pub fn step(&mut self, window: &[Batch]) -> Result<StepReport> {
        window.iter().try_for_each(|batch| batch.check(self.model.config().vocabulary))?;
        let targets: usize = window.iter().map(Batch::target_count).sum();
        if targets == 0 {
            let (expected, found) = ("a window with at least one target".to_string(), "none".to_string());
            return Err(Error::Shape { op: "step", expected, found });
        }
        let result = self.run_window(window, 1.0 / targets as f32);
        if result.is_err() {
            // Takes the device's error, so that the next step starts clean.
            let _ = self.engine.device().synchronize();
        }
        let (loss, gradient_norm, learning_rate, scaler) = result?;
        let updates_before = self.updates_done;
        self.updates_done = scaler.map_or(self.steps_done, |state| u64::from(state.applied));
        let skipped = scaler.is_some() && self.updates_done == updates_before;
        if let (Some(own), Some(state)) = (&self.scaler, scaler)
            && state.at_floor >= own.patience()
        {
            let first = self.first_not_finite(window, 1.0 / targets as f32)?;
            return Err(Error::Overflow { skips: state.at_floor, scale: state.scale, first });
        }
        let tokens = window.iter().map(|batch| batch.tokens.len()).sum();
        let step = self.steps_done;
        Ok(StepReport { step, loss, gradient_norm, learning_rate, tokens, scaler, skipped })
    }

    /// The loss, the norm, the rate, and where the loss scale is.
    fn run_window(&mut self, window: &[Batch], weight: f32) -> Result<(f32, f32, f32, Option<ScalerState>)> {
        self.accumulate(window, weight)?;
        // The schedule counts updates that were applied, as the bias correction does.
        let update = self.updates_done + 1;
        let rate = self.options.schedule.rate(update);
        let (parameters, scaler) = (self.model.parameters(), self.scaler.as_ref());
        self.optimizer.update(&self.engine, parameters, rate, update, scaler)?;
        let mut results = vec![self.evaluator.loss.clone(), self.optimizer.norm().clone()];
        results.extend(
            self.scaler.iter().flat_map(|scaler| [scaler.scale().clone(), scaler.counters().clone()]),
        );
        let mut at = 0;
        for input in results {
            let part = self.results.part(at..at + input.bytes())?;
            at += input.bytes();
            self.engine.submit(Op::CopyOut { input, out: part })?;
        }
        let words = self.results.all().to_vec::<u32>()?;
        self.engine.device().synchronize()?;
        self.steps_done += 1;
        let float = |i: usize| f32::from_bits(words[i]);
        let scaler = self.scaler.as_ref().map(|_| ScalerState::new(float(2), &words[3..]));
        Ok((float(0), float(1), rate, scaler))
    }

    /// Runs a window again, and looks at everything that it makes: the name of the first tensor that is not finite, in a
    /// forward pass, or if there is none, of the first such gradient.
    ///
    /// # Errors
    /// The device's.
    pub fn first_not_finite(&mut self, window: &[Batch], weight: f32) -> Result<Option<String>> {
        let watch = Watch::default();
        for batch in window {
            let batch = self.evaluator.upload(&self.engine, batch)?;
            let mut tape = Tape::train(&self.engine, self.options.seed, self.forwards_done as u32);
            tape.watch(&watch);
            let loss = self.model.loss(&mut tape, &batch, &self.loss_into(weight))?;
            tape.backward(loss)?;
        }
        self.engine.device().synchronize()?;
        Ok(watch.first())
    }

    fn loss_into(&self, weight: f32) -> LossInto {
        let loss_scale = self.scaler.as_ref().map(|scaler| scaler.scale().clone());
        LossInto { sum: self.evaluator.loss.clone(), weight, loss_scale }
    }

    /// Clears the gradients and accumulates the window's, each target weighing `weight`. The loss is in
    /// [`Trainer::loss_slice`] after it.
    ///
    /// # Errors
    /// The device's.
    pub fn accumulate(&mut self, window: &[Batch], weight: f32) -> Result<()> {
        if let Some(gradients) = self.model.parameters().gradients() {
            self.engine.submit(Op::Fill { out: gradients.clone(), value: 0.0 })?;
        }
        self.engine.submit(Op::Fill { out: self.evaluator.loss.clone(), value: 0.0 })?;
        for batch in window {
            let batch = self.evaluator.upload(&self.engine, batch)?;
            self.forwards_done += 1;
            let mut tape = Tape::train(&self.engine, self.options.seed, self.forwards_done as u32);
            let loss = self.model.loss(&mut tape, &batch, &self.loss_into(weight))?;
            tape.backward(loss)?;
        }
        Ok(())
    }

    /// The loss that the last window added up, one f32 on the device.
    pub fn loss_slice(&self) -> &Slice {
        &self.evaluator.loss
    }

    /// Mean loss over the targets of some batches, without dropout, in nats.
    ///
    /// # Errors
    /// As for [`Trainer::step`].
    pub fn evaluate(&mut self, batches: &[Batch]) -> Result<f32> {
        self.evaluator.evaluate(&self.engine, &self.model, batches)
    }
}

/// Measures a model's loss. It holds what batches go to the device through.
pub struct Evaluator {
    upload: Stream,
    staging: Vec<HostBuffer>,
    loss: Slice,
}

impl Evaluator {
    /// An evaluator on an engine's device.
    ///
    /// # Errors
    /// The device's.
    pub fn new(engine: &Engine) -> Result<Self> {
        let upload = engine.device().stream("upload");
        Ok(Evaluator { upload, staging: Vec::new(), loss: scalar(engine, "loss")? })
    }

    /// Mean loss over the targets of some batches, without dropout, in nats.
    ///
    /// # Errors
    /// [`Error::Shape`] for batches without targets, or tokens outside of the vocabulary; [`Error::NotFinite`] for a loss that
    /// is not finite, with the first tensor that was not; the device's.
    pub fn evaluate(&mut self, engine: &Engine, model: &Gpt2, batches: &[Batch]) -> Result<f32> {
        batches.iter().try_for_each(|batch| batch.check(model.config().vocabulary))?;
        let targets: usize = batches.iter().map(Batch::target_count).sum();
        if targets == 0 {
            let (expected, found) = ("batches with at least one target".to_string(), "none".to_string());
            return Err(Error::Shape { op: "evaluate", expected, found });
        }
        let weight = 1.0 / targets as f32;
        let loss = self.run(engine, model, batches, weight, None)?;
        if !loss.is_finite() {
            let watch = Watch::default();
            self.run(engine, model, batches, weight, Some(&watch))?;
            return Err(Error::NotFinite { what: "the loss", first: watch.first() });
        }
        Ok(loss)
    }

    fn run(
        &mut self,
        engine: &Engine,
        model: &Gpt2,
        batches: &[Batch],
        weight: f32,
        watch: Option<&Watch>,
    ) -> Result<f32> {
        engine.submit(Op::Fill { out: self.loss.clone(), value: 0.0 })?;
        for batch in batches {
            let batch = self.upload(engine, batch)?;
            let mut tape = Tape::eval(engine);
            watch.into_iter().for_each(|watch| tape.watch(watch));
            model.loss(&mut tape, &batch, &LossInto { sum: self.loss.clone(), weight, loss_scale: None })?;
        }
        Ok(engine.compute().download::<f32>(&self.loss)?[0])
    }

    /// Sends a batch to the device on a stream of its own.
    fn upload(&mut self, engine: &Engine, batch: &Batch) -> Result<TokenBatch> {
        let bytes = 4 * batch.tokens.len();
        if self.staging.first().is_none_or(|staging| staging.bytes() < bytes) {
            let device = engine.device();
            self.staging = vec![device.host_buffer(bytes, "tokens")?, device.host_buffer(bytes, "targets")?];
        }
        let send = |host: &HostBuffer, data: &[u8], dtype, name| -> Result<Slice> {
            let out = engine.offload().alloc(batch.tokens.len(), dtype, Category::Staging, name)?;
            let host = host.part(0..data.len())?;
            host.write(|bytes| bytes.copy_from_slice(data))?;
            self.upload.submit(Op::CopyIn { input: host, out: out.clone() })?;
            Ok(out)
        };
        let tokens = send(&self.staging[0], bytemuck::cast_slice(&batch.tokens), DType::U32, "tokens")?;
        let targets = send(&self.staging[1], bytemuck::cast_slice(&batch.targets), DType::I32, "targets")?;
        Ok(TokenBatch { tokens, targets: Some(targets), batch: batch.batch, context: batch.context })
    }
}
