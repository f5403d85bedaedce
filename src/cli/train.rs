//! `ebbtide train`.

use std::{
    fs,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::Args;
use ebbtide::{
    account::Account,
    config::{Bytes, ComputeDevice, Config, ConfigFile, DataChecksums, DataOrder, Overrides, Precision},
    engine::{
        Batch, Trainer, TrainerOptions, checkpoint,
        generate::{SampleOptions, generate},
        gpt2::Gpt2,
        hugging_face,
        plan::{Fit, StepShape, least_budget, nearest_fit, plan},
    },
    kernels::{Category, bytes, bytes_up},
    loader::{
        BlockOrder, Checksums, Dataset, Identity, Loader, LoaderOptions, LoaderReport, LoaderState, Order,
        Samples, TokenBatch, shuffle_report,
    },
    offload::{Expression, OffloadOptions, OffloadReport, TransferTimes, policy::Builtin},
    tokenizer::Tokenizer,
};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::{Deserialize, Serialize};

use super::{
    TierArgs, per_second,
    run::{Metrics, RunData, RunFolder, engine},
    warn_if_unoptimised,
};

#[derive(Args)]
pub(crate) struct TrainArgs {
    /// A TOML file; without it the quick start
    config: Option<PathBuf>,
    /// Steps of the whole run; the schedule stays as the configuration has it
    #[arg(long)]
    steps: Option<u64>,
    /// Folder for configuration, metrics and checkpoints [default: the first free of runs/1, runs/2, …]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Keys the initial weights, the order of the data and the dropout
    #[arg(long)]
    seed: Option<u64>,
    /// Share of elements dropped, in [0, 1)
    #[arg(long)]
    dropout: Option<f32>,
    /// Where saved activations go: keep, recompute, offload, offload disk, int8, offload int8, or PATTERN: ACTION, …
    #[arg(long)]
    policy: Option<Expression>,
    /// The device's memory budget, such as 512MiB
    #[arg(long)]
    memory: Option<Bytes>,
    /// What the model computes in: f32, f16 or bf16
    #[arg(long)]
    precision: Option<Precision>,
    /// Keep the residual stream in f32
    #[arg(long)]
    residual_f32: bool,
    /// Steps between checkpoints; 0 for one at the end alone
    #[arg(long)]
    checkpoint_every: Option<u64>,
    /// Sequences of a micro-batch
    #[arg(long)]
    batch: Option<usize>,
    /// Micro-batches of a step
    #[arg(long)]
    accumulate: Option<usize>,
    /// Keep the moments in host memory, and in 16 bits the master weights, chunks of which pass through the device at each step
    #[arg(long)]
    offload_optimizer: bool,
    /// What computes: cpu, cuda, cuda:N, or best for the first CUDA device or else the CPU [default: cpu]
    #[arg(long)]
    device: Option<ComputeDevice>,
    /// Threads of the kernels; results do not depend on it
    #[arg(long)]
    threads: Option<usize>,
    /// random, or block for data larger than memory: whole blocks are read, and mixed over a window of them
    #[arg(long)]
    order: Option<DataOrder>,
    /// The most memory of the loader, such as 512MiB [default: half of what is free]
    #[arg(long)]
    ram: Option<Bytes>,
    #[command(flatten)]
    tiers: TierArgs,
    /// Go on from the newest checkpoint of --out
    #[arg(long, requires = "out")]
    resume: bool,
    /// Go on although the files of tokens are not what they were
    #[arg(long, requires = "resume")]
    accept_changed_data: bool,
}

/// What a checkpoint of a run holds beside weights, moments and counts.
#[derive(Serialize, Deserialize)]
struct RunState {
    /// Samples that training has used.
    position: u64,
    /// What those samples were: see [`LoaderState::digest`]. 0 in checkpoints that have none.
    #[serde(default)]
    digest: u64,
    /// The files of tokens.
    data: Identity,
    /// What the order of the samples hangs on beside the seed, 16 hexadecimal digits: the data's fingerprint when the run began.
    order: String,
    seed: u64,
    tokens: u64,
    seconds: f64,
}

#[derive(Serialize)]
struct StepMetrics {
    step: u64,
    loss: f32,
    tokens_per_second: f64,
    learning_rate: f32,
    gradient_norm: f32,
    /// The loss scale after the step, in 16 bits.
    #[serde(skip_serializing_if = "Option::is_none")]
    loss_scale: Option<f32>,
    /// Whether gradients overflowed, so that the step's update was skipped.
    skipped: bool,
    /// Updates skipped so far, in 16 bits.
    #[serde(skip_serializing_if = "Option::is_none")]
    skipped_updates: Option<u32>,
    /// Tokens of the run so far.
    tokens: u64,
    epoch: f64,
    device_bytes: usize,
    peak_device_bytes: usize,
    /// Bytes that forward saved for backward, as they are stored.
    saved_bytes: u64,
    /// Bytes sent to host memory and disk.
    offloaded_bytes: u64,
    /// The offload runtime's account of the step.
    offload: Account,
    loader_wait_seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    validation_loss: Option<f32>,
}

#[derive(Serialize)]
struct Summary {
    steps: u64,
    parameters: usize,
    tokens: u64,
    seconds: f64,
    loss: f32,
    validation_loss: Option<f32>,
    unigram_entropy: f64,
    peak_device_bytes: usize,
    /// The offload runtime's account since the last start.
    offload: Account,
    /// The loader's since then: what it held, read and waited for.
    loader: LoaderReport,
    interrupted: bool,
}

pub(crate) fn train(args: TrainArgs) -> Result<()> {
    warn_if_unoptimised();
    let folder = args.out.clone().map_or_else(RunFolder::next_free, RunFolder::new);
    let resumes = args.resume && folder.holds_a_run();
    if folder.holds_a_run() && !args.resume {
        bail!(
            "{}: already holds a run: go on with it by --resume, or choose another folder by --out",
            folder.path().display()
        );
    }
    let config = if resumes { resumed_config(&args, &folder)? } else { fresh_config(&args)? };
    if args.resume && !resumes {
        eprintln!("{}: nothing to resume, so a new run starts", folder.path().display());
    }
    let shape = step_shape(&config);
    check_policy(&config, &shape)?;
    check_budget(&config, &shape, &folder)?;
    let last = if resumes { checkpoint::latest(&folder.checkpoints())? } else { None };
    check_disk(&config, &folder)?;
    if !resumes {
        check_files(&config)?;
    }
    let (offload, budget) = config.tiers.options(
        config.training.device.0,
        &shape,
        &config.training.policy.0,
        config.training.memory,
        folder.path(),
    )?;
    folder.create()?;
    let data = folder.data(&config)?;
    let accept_changed_data = args.accept_changed_data;
    let mut run = Run::start(config, folder, data, offload, budget)?;
    // A run that goes on keeps what it was asked for this time: its steps above all.
    run.folder.write_config(&run.config)?;
    if let Some(last) = last {
        run.resume(&last, accept_changed_data)?;
    }
    run.train()
}

fn step_shape(config: &Config) -> StepShape {
    StepShape {
        model: config.model,
        batch: config.training.batch,
        context: config.training.context,
        accumulate: config.training.accumulate,
        offload_optimizer: config.training.offload_optimizer,
        numerics: config.training.numerics(),
    }
}

fn overrides(args: &TrainArgs) -> Overrides {
    Overrides {
        steps: args.steps,
        seed: args.seed,
        dropout: args.dropout,
        policy: args.policy.clone(),
        memory: args.memory,
        precision: args.precision,
        residual_f32: args.residual_f32.then_some(true),
        checkpoint_every: args.checkpoint_every,
        batch: args.batch,
        accumulate: args.accumulate,
        device: args.device,
        threads: args.threads,
        order: args.order,
        ram: args.ram,
        offload_optimizer: args.offload_optimizer.then_some(true),
        tiers: args.tiers.tiers(),
    }
}

fn fresh_config(args: &TrainArgs) -> Result<Config> {
    let file = match &args.config {
        Some(path) => ConfigFile::read(path)?,
        None => ConfigFile::quick_start(),
    };
    Ok(file.settle(&overrides(args))?)
}

/// The run's own configuration, with what may change changed.
fn resumed_config(args: &TrainArgs, folder: &RunFolder) -> Result<Config> {
    let ours = folder.config()?;
    let asked = match &args.config {
        Some(path) => ConfigFile::read(path)?.settle(&overrides(args))?,
        None => overrides(args).apply(ours.clone()),
    };
    asked.check()?;
    let differences = ours.differences(&asked);
    if !differences.is_empty() {
        bail!(
            "{}: cannot resume with another configuration: {}",
            folder.path().display(),
            differences.join("; ")
        );
    }
    Ok(asked)
}

/// Holds the files that a run reads before its folder is made.
fn check_files(config: &Config) -> Result<()> {
    for path in config.data.tokens.iter().chain(&config.data.validation) {
        let dataset = Dataset::open(path)?;
        // Of larger data the rest is checked as it is read.
        dataset.check_vocabulary(config.model.vocabulary, 1 << 28)?;
        dataset.samples(0..dataset.len(), config.training.context)?;
    }
    Ok(())
}

/// Holds the policy's patterns against the names that a step has.
fn check_policy(config: &Config, shape: &StepShape) -> Result<()> {
    let policy = &config.training.policy.0;
    plan(shape, policy.clone(), &OffloadOptions::default(), None)?;
    match policy.unmatched().first() {
        Some((pattern, nearest)) => bail!(
            "policy: `{pattern}` matches no segment and no tensor; the nearest names are {}",
            nearest.join(", ")
        ),
        None => Ok(()),
    }
}

/// Holds the budget against what a step needs, and says which setting would fit.
fn check_budget(config: &Config, shape: &StepShape, folder: &RunFolder) -> Result<()> {
    let Some(Bytes(budget)) = config.training.memory else { return Ok(()) };
    let training = &config.training;
    let options = &config.tiers.unsized_options(&training.policy.0, folder.path());
    let needed = least_budget(shape, training.policy.0.clone(), options)?;
    if needed <= budget {
        return Ok(());
    }
    let nearest = match nearest_fit(shape, budget, options)? {
        Some(Fit { policy, batch, accumulate, budget_bytes }) => format!(
            "the nearest setting that fits is --policy {policy} --batch {batch} --accumulate {accumulate}, which needs {}",
            bytes_up(budget_bytes)
        ),
        None => {
            let least = StepShape { batch: 1, ..*shape };
            let needs: Result<Vec<usize>, _> =
                Builtin::ALL.iter().map(|&policy| least_budget(&least, policy, options)).collect();
            let least = needs?.into_iter().min().unwrap_or_default();
            format!("nothing fits: single sequences need {}", bytes_up(least))
        }
    };
    bail!(
        "the memory budget of {} cannot hold one step: --policy {} with --batch {} needs {}, {} more; {nearest}",
        bytes(budget),
        training.policy.0,
        training.batch,
        bytes_up(needed),
        bytes_up(needed - budget),
    );
}

/// Holds the disk's free space against the checkpoints to come.
fn check_disk(config: &Config, folder: &RunFolder) -> Result<()> {
    // Weights and two moments, f32; while a checkpoint is written its predecessors are still there.
    let checkpoint_bytes = 12 * config.model.parameters() as u64;
    let count = config.training.keep_checkpoints.max(1) as u64 + 1;
    // The folder may not be there yet: what it will be made in is.
    let place = std::path::absolute(folder.path()).unwrap_or_default();
    let place = place.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(folder.path());
    let free = fs4::available_space(place)
        .with_context(|| format!("{}: cannot ask for the disk's free space", folder.path().display()))?;
    let have = free + folder_bytes(&folder.checkpoints());
    if have < checkpoint_bytes * count {
        bail!(
            "{}: the disk has {} free, but {count} checkpoints of {} need {}: free some, or choose another disk by --out",
            folder.path().display(),
            bytes(free as usize),
            bytes(checkpoint_bytes as usize),
            bytes((checkpoint_bytes * count) as usize),
        );
    }
    Ok(())
}

/// Bytes of the files below a folder; 0 if there is none.
fn folder_bytes(folder: &std::path::Path) -> u64 {
    let files = walkdir::WalkDir::new(folder).into_iter().filter_map(Result::ok);
    files.filter_map(|entry| entry.metadata().ok()).filter(fs::Metadata::is_file).map(|file| file.len()).sum()
}

/// A run under way.
struct Run {
    config: Config,
    folder: RunFolder,
    data: RunData,
    trainer: Trainer,
    stop: Arc<AtomicBool>,
    position: u64,
    digest: u64,
    /// See [`RunState::order`].
    order: u64,
    tokens: u64,
    seconds: f64,
    entropy: f64,
    moved: OffloadReport,
    times: TransferTimes,
}

impl Run {
    fn start(
        config: Config,
        folder: RunFolder,
        data: RunData,
        offload: OffloadOptions,
        budget: Option<usize>,
    ) -> Result<Self> {
        let engine = engine(&config, offload, budget)?;
        let model = Gpt2::new(&engine, config.model, config.training.seed, true)?;
        if let Some(weights) = &config.data.weights {
            hugging_face::load_weights(&engine, model.parameters(), weights)?;
        }
        let options = TrainerOptions {
            optimizer: config.optimizer,
            schedule: config.schedule,
            seed: config.training.seed,
            loss_scale: config.loss_scale,
        };
        let trainer = Trainer::new(&engine, model, options)?;
        let stop = Arc::new(AtomicBool::new(false));
        let flag = stop.clone();
        ctrlc::set_handler(move || {
            if flag.swap(true, Ordering::SeqCst) {
                std::process::exit(130);
            }
            eprintln!("\nstopping after this step; Ctrl-C again to stop at once");
        })?;
        let entropy = unigram_entropy(&data.training, config.model.vocabulary)?;
        let order = data.training.dataset().fingerprint();
        Ok(Run {
            config,
            folder,
            data,
            trainer,
            stop,
            position: 0,
            digest: 0,
            order,
            tokens: 0,
            seconds: 0.0,
            entropy,
            moved: OffloadReport::default(),
            times: TransferTimes::default(),
        })
    }

    fn resume(&mut self, last: &std::path::Path, accept_changed_data: bool) -> Result<()> {
        let state: RunState = serde_json::from_value(checkpoint::read_state(last)?.extra)
            .with_context(|| format!("{}: state.json: not the state of a run", last.display()))?;
        let dataset = self.data.training.dataset();
        if let Err(error) = dataset.check_identity(&state.data) {
            if !accept_changed_data {
                let what = format!("{}: the run's tokens have changed", dataset.path().display());
                bail!(
                    "{what}: {error}; --accept-changed-data goes on all the same, in the order that the run has"
                );
            }
            eprintln!("warning: {error}; the run goes on with what is there now");
        }
        self.order = u64::from_str_radix(&state.order, 16)
            .with_context(|| format!("{}: state.json: not an order: {}", last.display(), state.order))?;
        checkpoint::load(&mut self.trainer, last)?;
        (self.position, self.digest) = (state.position, state.digest);
        (self.tokens, self.seconds) = (state.tokens, state.seconds);
        Ok(())
    }

    fn train(mut self) -> Result<()> {
        let training = self.config.training.clone();
        if self.trainer.steps_done() >= training.steps {
            println!(
                "{}: at step {} of {} already; --steps asks for more",
                self.folder.path().display(),
                self.trainer.steps_done(),
                training.steps
            );
            return Ok(());
        }
        let mut metrics = self.folder.metrics(self.trainer.steps_done())?;
        self.say_start();
        let windows = self.data.training.count() as f64;
        let options = LoaderOptions {
            order: match self.config.data.order {
                DataOrder::Random => Order::Random,
                DataOrder::Block => Order::Block(BlockOrder::default()),
            },
            seed: training.seed,
            batch: training.batch,
            ram_bytes: self.config.data.ram.map(|ram| ram.0 as u64),
            vocabulary: Some(self.config.model.vocabulary),
            fingerprint: Some(self.order),
            checksums: match self.config.data.checksums {
                DataChecksums::Off => Checksums::Off,
                DataChecksums::Verify => Checksums::Verify,
                DataChecksums::Make => Checksums::Make(None),
            },
            damaged: self.config.data.damaged,
            ..LoaderOptions::default()
        };
        if options.order != Order::Random
            && let Some(warning) = shuffle_report(&self.data.training, &options)?.warning()
        {
            eprintln!("warning: {warning}");
        }
        let mut loader = Loader::new(
            &self.data.training,
            &options,
            LoaderState { position: self.position, digest: self.digest },
        )?;
        let validation =
            validation_batches(&self.data.validation, training.validation_windows, training.batch)?;
        let progress = Progress::new(training.steps, self.trainer.steps_done());
        let (mut last_loss, mut last_validation, mut saved_step) =
            (f32::NAN, None, self.trainer.steps_done());
        while self.trainer.steps_done() < training.steps {
            let start = Instant::now();
            let waited = loader.wait_seconds();
            let mut window = Vec::with_capacity(training.accumulate);
            for _ in 0..training.accumulate {
                window.push(loader.next()?);
            }
            let state = loader.state();
            let batches: Vec<Batch> = window.into_iter().map(batch_of).collect();
            let report = self.trainer.step(&batches)?;
            batches.into_iter().for_each(|batch| loader.recycle(tokens_of(batch)));
            let seconds = start.elapsed().as_secs_f64();
            (self.position, self.digest) = (state.position, state.digest);
            self.tokens += report.tokens as u64;
            self.seconds += seconds;
            // Read once a step: what is decided by it, saving above all, is decided alike.
            let stops = self.stop.load(Ordering::SeqCst);
            let ends = report.step == training.steps;
            let due = |every: u64| ends || (every > 0 && report.step.is_multiple_of(every));
            let validation_loss = match due(training.validate_every) {
                true => Some(self.trainer.evaluate(&validation)?),
                false => None,
            };
            last_loss = report.loss;
            last_validation = validation_loss.or(last_validation);
            let memory = self.trainer.engine().device().memory();
            let account = self.account_for_step()?;
            let line = StepMetrics {
                step: report.step,
                loss: report.loss,
                tokens_per_second: report.tokens as f64 / seconds,
                learning_rate: report.learning_rate,
                gradient_norm: report.gradient_norm,
                loss_scale: report.scaler.map(|state| state.scale),
                skipped: report.skipped,
                skipped_updates: report.scaler.map(|state| state.skipped),
                tokens: self.tokens,
                epoch: self.position as f64 / windows,
                device_bytes: memory.current_bytes,
                peak_device_bytes: memory.peak_bytes,
                saved_bytes: account.saved_bytes,
                offloaded_bytes: account.moved.values().map(|moved| moved.out_bytes).sum(),
                offload: account,
                loader_wait_seconds: loader.wait_seconds() - waited,
                validation_loss,
            };
            progress.step(&line, last_validation);
            self.write_metrics(&mut metrics, &line, saved_step)?;
            if stops || due(training.checkpoint_every) {
                match self.save() {
                    Ok(_) => saved_step = report.step,
                    Err(error) if !(ends || stops) => progress.say(&format!(
                        "warning: no checkpoint at step {}: {error:#}; training goes on and tries again later",
                        report.step
                    )),
                    Err(error) => return Err(error.context(self.lost_since(saved_step))),
                }
            }
            if stops {
                break;
            }
        }
        progress.finish();
        let report = loader.report();
        if report.quarantined_samples > 0 {
            eprintln!(
                "warning: {} samples had tokens of damaged pages and were left out; `ebbtide data sums` names the first",
                report.quarantined_samples
            );
        }
        if let Err(error) = loader.finish() {
            eprintln!("warning: {error}");
        }
        self.finish(last_loss, last_validation, report)
    }

    /// The account of the step that has just run, which is added to the run's.
    fn account_for_step(&mut self) -> Result<Account> {
        let offload = self.trainer.engine().offload();
        let (report, times) = (offload.take_report(), offload.times());
        let memory = self.trainer.engine().device().memory();
        let account = Account::new(offload, &report, &times.since(&self.times), &memory)?;
        self.moved += report;
        self.times = times;
        Ok(account)
    }

    /// A metrics file that cannot be written ends the run, but not before its work is safe.
    fn write_metrics(&self, metrics: &mut Metrics, line: &StepMetrics, saved_step: u64) -> Result<()> {
        metrics.write(line).map_err(|error| match self.save() {
            Ok(checkpoint) => error.context(format!("stopped after saving {}", checkpoint.display())),
            Err(_) => error.context(self.lost_since(saved_step)),
        })
    }

    fn lost_since(&self, saved_step: u64) -> String {
        format!("stopped; the newest checkpoint is of step {saved_step}, and --resume goes on from there")
    }

    fn save(&self) -> Result<PathBuf> {
        let state = RunState {
            position: self.position,
            digest: self.digest,
            data: self.data.training.dataset().identity(),
            order: format!("{:016x}", self.order),
            seed: self.config.training.seed,
            tokens: self.tokens,
            seconds: self.seconds,
        };
        let keep = self.config.training.keep_checkpoints;
        Ok(checkpoint::save(&self.trainer, &self.folder.checkpoints(), serde_json::to_value(&state)?, keep)?)
    }

    fn say_start(&self) {
        let (training, model) = (&self.config.training, &self.config.model);
        let parameters = self.trainer.model().parameters().count();
        println!("run       {}", self.folder.path().display());
        println!(
            "model     GPT-2 of {:.1}M parameters: {} layers × {} channels, {} heads, context {}, vocabulary {}",
            parameters as f64 / 1e6,
            model.layers,
            model.width,
            model.heads,
            model.context,
            model.vocabulary
        );
        if let Some(weights) = &self.config.data.weights {
            println!("weights   {}", weights.display());
        }
        let tokens = self.data.training.tokens();
        println!(
            "data      {} tokens ({}) to train on, {} of {} windows to validate on ({})",
            tokens,
            self.config.data.tokenizer,
            training.validation_windows.min(self.data.validation.count()),
            self.data.validation.count(),
            self.data.training.dataset().path().display()
        );
        let memory =
            training.memory.map_or("no memory budget".to_string(), |memory| format!("budget {memory}"));
        println!(
            "step      {} × {} sequences of {} tokens, policy {}, {memory}",
            training.accumulate, training.batch, training.context, training.policy.0
        );
        println!("baseline  the unigram entropy of the text is {:.3} nats a token", self.entropy);
        let offload = self.trainer.engine().offload();
        if self.config.training.policy.0.offloads() {
            let host = bytes(offload.options().host_bytes.unwrap_or_default());
            let disk = offload.options().disk.as_ref().map_or(String::new(), |disk| {
                let way = offload.disk_buffered().map_or("by direct I/O".to_string(), |reason| {
                    format!("through the page cache, since {reason}")
                });
                format!(", {} of disk in {} {way}", bytes(disk.bytes), disk.folder.display())
            });
            println!("tiers     {host} of host memory{disk}");
        }
        if self.trainer.steps_done() > 0 {
            println!("resumed   at step {}", self.trainer.steps_done());
        }
    }

    /// Says so where the policy did nothing for the peak, and what found no room.
    fn say_what_the_policy_did(&self) -> Result<()> {
        let policy = &self.config.training.policy.0;
        let memory = self.trainer.engine().device().memory();
        let fallbacks = self.moved.fallbacks;
        if fallbacks.total() > 0 {
            println!(
                "tiers     were full: {} slices went on to disk, {} stayed on the device; {} tensors and {} segments were \
                 computed again",
                fallbacks.to_disk, fallbacks.to_device, fallbacks.to_rerun, fallbacks.to_recompute
            );
        }
        if policy.offloads() && self.moved.out_bytes() == 0 {
            println!(
                "note      the policy `{policy}` moved no byte: what it names is small, or backward wanted it at once"
            );
        }
        if *policy == Expression::default() {
            return Ok(());
        }
        let kept = plan(&self.shape(), Builtin::Keep, &OffloadOptions::default(), None)?.memory.peak_bytes;
        if memory.peak_bytes >= kept {
            let parts = Category::ALL.into_iter().filter(|&category| memory.at_peak_of(category) > 0);
            let parts: Vec<String> =
                parts.map(|category| format!("{category} {}", bytes(memory.at_peak_of(category)))).collect();
            println!(
                "note      the policy `{policy}` took the device's peak of {} no lower than keeping everything would, {}; at it: {}",
                bytes(memory.peak_bytes),
                bytes(kept),
                parts.join(", ")
            );
        }
        Ok(())
    }

    fn shape(&self) -> StepShape {
        step_shape(&self.config)
    }

    fn finish(self, loss: f32, validation_loss: Option<f32>, loader: LoaderReport) -> Result<()> {
        let steps = self.trainer.steps_done();
        let interrupted = steps < self.config.training.steps;
        let memory = self.trainer.engine().device().memory();
        let summary = Summary {
            steps,
            parameters: self.trainer.model().parameters().count(),
            tokens: self.tokens,
            seconds: self.seconds,
            loss,
            validation_loss,
            unigram_entropy: self.entropy,
            peak_device_bytes: memory.peak_bytes,
            offload: Account::new(self.trainer.engine().offload(), &self.moved, &self.times, &memory)?,
            loader,
            interrupted,
        };
        self.folder.write_summary(&summary)?;
        self.say_what_the_policy_did()?;
        let folder = self.folder.path().display();
        if interrupted {
            println!("stopped at step {steps}; go on with: ebbtide train --out {folder} --resume");
            return Ok(());
        }
        if let Some(validation_loss) = validation_loss {
            println!(
                "validation loss {validation_loss:.3} nats a token, beside {:.3} for guessing by frequency alone",
                self.entropy
            );
        }
        self.sample()?;
        println!("\nmore of it: ebbtide sample {folder} --prompt \"…\"");
        Ok(())
    }

    /// Lets the model go on from the beginning of the validation data.
    fn sample(&self) -> Result<()> {
        const PROMPT_TOKENS: usize = 32;
        let tokens = self.config.training.sample_tokens;
        if tokens == 0 {
            return Ok(());
        }
        let validation = &self.data.validation;
        let available = validation.context().min(PROMPT_TOKENS);
        let (mut prompt, mut targets) = (vec![0; validation.context()], vec![0; validation.context()]);
        validation.read(0, &mut prompt, &mut targets)?;
        prompt.truncate(available);
        let options = SampleOptions { tokens, temperature: 0.8, top_k: 40, seed: self.config.training.seed };
        let trainer = &self.trainer;
        let written = generate(trainer.engine(), trainer.model(), &prompt, &options, &mut |_| true)?;
        let tokenizer = Tokenizer::new(self.config.data.tokenizer)?;
        println!("\nsample ({} tokens of the validation text, then the model's own):\n", prompt.len());
        println!("{}‖{}", text(&tokenizer, &prompt), text(&tokenizer, &written));
        Ok(())
    }
}

/// Tokens as text; what is not UTF-8, or not a token of the tokenizer, is shown as U+FFFD.
fn text(tokenizer: &Tokenizer, tokens: &[u32]) -> String {
    let decode = |&token: &u32| u16::try_from(token).ok().and_then(|token| tokenizer.decode(&[token]).ok());
    let bytes: Vec<u8> =
        tokens.iter().flat_map(|token| decode(token).unwrap_or_else(|| vec![0xFF])).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Evenly spread windows of the validation data, the same at every validation.
fn validation_batches(windows: &Samples, count: u64, batch: usize) -> Result<Vec<Batch>> {
    let count = count.min(windows.count());
    let context = windows.context();
    let indices: Vec<u64> = (0..count)
        .map(|i| (u128::from(i) * u128::from(windows.count()) / u128::from(count)) as u64)
        .collect();
    let mut batches = Vec::new();
    for indices in indices.chunks(batch) {
        let len = indices.len() * context;
        let mut of = Batch { tokens: vec![0; len], targets: vec![0; len], batch: indices.len(), context };
        let slots = of.tokens.chunks_mut(context).zip(of.targets.chunks_mut(context));
        for (&index, (tokens, targets)) in indices.iter().zip(slots) {
            windows.read(index, tokens, targets)?;
        }
        batches.push(of);
    }
    Ok(batches)
}

/// `-Σ p ln p` of the tokens' frequencies, over at most the first 64 Mi tokens of the training data.
fn unigram_entropy(samples: &Samples, vocabulary: usize) -> Result<f64> {
    const MOST: u64 = 64 << 20;
    let context = samples.context();
    let windows = samples.count().min(MOST.div_ceil(context as u64));
    let mut counts = vec![0u64; vocabulary];
    let (mut tokens, mut targets) = (vec![0; context], vec![0; context]);
    for window in 0..windows {
        samples.read(window, &mut tokens, &mut targets)?;
        for &token in &tokens {
            // One beyond the vocabulary is an error of its own, when the loader comes to it.
            if let Some(count) = counts.get_mut(token as usize) {
                *count += 1;
            }
        }
    }
    let total = counts.iter().sum::<u64>() as f64;
    let shares = counts.iter().filter(|&&count| count > 0).map(|&count| count as f64 / total);
    Ok(shares.map(|share| -share * share.ln()).sum())
}

fn batch_of(batch: TokenBatch) -> Batch {
    Batch { tokens: batch.tokens, targets: batch.targets, batch: batch.batch, context: batch.context }
}

fn tokens_of(batch: Batch) -> TokenBatch {
    TokenBatch {
        tokens: batch.tokens,
        targets: batch.targets,
        batch: batch.batch,
        context: batch.context,
        position: 0,
    }
}

/// A bar on a terminal, a line every few seconds elsewhere.
struct Progress {
    bar: ProgressBar,
    lines: std::cell::Cell<Option<Instant>>,
    steps: u64,
    begun: Instant,
    first: u64,
}

impl Progress {
    const LINE_EVERY: Duration = Duration::from_secs(5);

    fn new(steps: u64, done: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} {msg} eta {eta}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_position(done);
        bar.reset_eta();
        Progress { bar, lines: Default::default(), steps, begun: Instant::now(), first: done }
    }

    fn step(&self, line: &StepMetrics, validation: Option<f32>) {
        let validation = validation.map_or(String::new(), |loss| format!(" val {loss:.3}"));
        let moved = match line.offloaded_bytes {
            0 => String::new(),
            moved => {
                let hidden = line.offload.hidden_share.unwrap_or(1.0);
                format!(" offload {} ({:.0} % hidden)", bytes(moved as usize), 100.0 * hidden)
            }
        };
        let scale = match (line.loss_scale, line.skipped_updates) {
            (Some(scale), Some(skipped)) => format!(" scale {scale} skipped {skipped}"),
            _ => String::new(),
        };
        let text = format!(
            "loss {:.3}{validation}{scale} {} tok/s device {} (peak {}){moved}",
            line.loss,
            per_second(line.tokens_per_second),
            bytes(line.device_bytes),
            bytes(line.peak_device_bytes),
        );
        let ends = line.step == self.steps;
        let due = self.lines.get().is_none_or(|last| last.elapsed() >= Self::LINE_EVERY);
        if self.bar.is_hidden() && (due || ends || line.validation_loss.is_some()) {
            let done = (line.step - self.first).max(1) as f64;
            let eta = self.begun.elapsed().as_secs_f64() / done * (self.steps - line.step) as f64;
            eprintln!("step {}/{} {text} eta {eta:.0}s", line.step, self.steps);
            self.lines.set(Some(Instant::now()));
        }
        self.bar.set_message(text);
        self.bar.set_position(line.step);
    }

    fn say(&self, text: &str) {
        self.bar.suspend(|| eprintln!("{text}"));
    }

    fn finish(&self) {
        self.bar.finish();
    }
}
