//! [`Trainer`]: one optimizer step over an accumulation window, and evaluation.

use ebbtide_kernels::{Category, DType, HostBuffer, Op, Slice, Stream};

use crate::{
    Engine, Error, LossInto, Result,
    gpt2::Gpt2,
    ops::{TokenBatch, scalar},
    optimizer::{AdamW, AdamWOptions, Schedule},
    tape::Tape,
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
    /// Whether the optimizer's moments are in host memory.
    pub offload_optimizer: bool,
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
}

/// A model, its optimizer, and where training stands.
pub struct Trainer {
    engine: Engine,
    model: Gpt2,
    optimizer: AdamW,
    options: TrainerOptions,
    steps_done: u64,
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
        let optimizer = AdamW::new(engine, model.parameters(), options.optimizer, options.offload_optimizer)?;
        Ok(Trainer {
            engine: engine.clone(),
            model,
            optimizer,
            options,
            steps_done: 0,
            forwards_done: 0,
            evaluator: Evaluator::new(engine)?,
            results: engine.device().host_buffer(8, "results")?,
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

    /// Steps done.
    pub fn steps_done(&self) -> u64 {
        self.steps_done
    }

    /// Forward passes recorded so far: the dropout's counter.
    pub fn forwards_done(&self) -> u64 {
        self.forwards_done
    }

    /// Goes on from another run's place: its counts; weights and moments are loaded apart.
    pub fn set_progress(&mut self, steps_done: u64, forwards_done: u64) {
        (self.steps_done, self.forwards_done) = (steps_done, forwards_done);
    }

    /// One optimizer step over the micro-batches of an accumulation window. Each target weighs the same, whichever
    /// micro-batch it is in: four of 8 sequences give what one of 32 gives, also with ignored targets.
    ///
    /// # Errors
    /// [`Error::Shape`] for a window without targets, or tokens outside of the vocabulary; the device's. Nothing that
    /// was saved for backward is left behind.
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
        let [loss, gradient_norm] = result?;
        let step = self.steps_done;
        let learning_rate = self.options.schedule.rate(step);
        let tokens = window.iter().map(|batch| batch.tokens.len()).sum();
        Ok(StepReport { step, loss, gradient_norm, learning_rate, tokens })
    }

    fn run_window(&mut self, window: &[Batch], weight: f32) -> Result<[f32; 2]> {
        self.accumulate(window, weight)?;
        let step = self.steps_done + 1;
        let rate = self.options.schedule.rate(step);
        self.optimizer.update(&self.engine, self.model.parameters(), rate, step)?;
        let norm = self.optimizer.norm().clone();
        for (i, input) in [self.evaluator.loss.clone(), norm].into_iter().enumerate() {
            self.engine.submit(Op::CopyOut { input, out: self.results.part(4 * i..4 * i + 4)? })?;
        }
        let results = self.results.all().to_vec::<f32>()?;
        self.engine.device().synchronize()?;
        self.steps_done = step;
        Ok([results[0], results[1]])
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
            let loss =
                self.model.loss(&mut tape, &batch, &LossInto { sum: self.evaluator.loss.clone(), weight })?;
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
    /// [`Error::Shape`] for batches without targets, or tokens outside of the vocabulary; the device's.
    pub fn evaluate(&mut self, engine: &Engine, model: &Gpt2, batches: &[Batch]) -> Result<f32> {
        batches.iter().try_for_each(|batch| batch.check(model.config().vocabulary))?;
        let targets: usize = batches.iter().map(Batch::target_count).sum();
        if targets == 0 {
            let (expected, found) = ("batches with at least one target".to_string(), "none".to_string());
            return Err(Error::Shape { op: "evaluate", expected, found });
        }
        let weight = 1.0 / targets as f32;
        engine.submit(Op::Fill { out: self.loss.clone(), value: 0.0 })?;
        for batch in batches {
            let batch = self.upload(engine, batch)?;
            let mut tape = Tape::eval(engine);
            model.loss(&mut tape, &batch, &LossInto { sum: self.loss.clone(), weight })?;
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
