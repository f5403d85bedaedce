//! What a run is: read from TOML, overridden by flags, and written whole into the run's folder.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    str::FromStr,
};

pub use ebbtide_engine::{Numerics, Precision};
use ebbtide_engine::{
    gpt2::Gpt2Config,
    hugging_face,
    optimizer::{AdamWOptions, Schedule},
    plan::{self, StepShape},
    scaler::LossScalerOptions,
};
use ebbtide_kernels::DeviceKind;
use ebbtide_loader::Damaged;
use ebbtide_offload::{DiskOptions, Expression, OffloadOptions};
use serde::{Deserialize, Serialize};

use crate::tokenizer::TokenizerKind;

/// A run as a user writes it: everything has a default.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ConfigFile {
    /// The model's sizes.
    pub model: ModelFile,
    /// Where the tokens are.
    pub data: DataFile,
    /// Steps, batches, policy and budget.
    pub training: TrainingFile,
    /// AdamW's constants.
    pub optimizer: AdamWOptions,
    /// The learning rate.
    pub schedule: ScheduleFile,
    /// Where offloaded activations go.
    pub tiers: Tiers,
    /// How the loss scale moves, in f16.
    pub loss_scale: LossScalerOptions,
}

/// `[model]`: a published size by name, or sizes one by one, or both, where the latter win.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelFile {
    /// `gpt2`, `gpt2-medium`, `gpt2-large` or `gpt2-xl`.
    pub name: Option<String>,
    /// Tokens; the tokenizer's if not given.
    pub vocabulary: Option<usize>,
    /// Longest sequence.
    pub context: Option<usize>,
    /// Channels.
    pub width: Option<usize>,
    /// Blocks.
    pub layers: Option<usize>,
    /// Attention heads.
    pub heads: Option<usize>,
    /// Share of elements dropped in training.
    pub dropout: Option<f32>,
    /// The exact GELU rather than GPT-2's approximation.
    pub exact_gelu: Option<bool>,
    /// Added to variances.
    pub epsilon: Option<f32>,
    /// Where the first weights come from: a `model.safetensors` under Hugging Face's names, or a folder that holds one
    /// beside its `config.json`, which then gives the sizes. Random if not given.
    pub weights: Option<PathBuf>,
}

/// `[data]`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataFile {
    /// A file of little-endian u16 tokens; the bundled text if not given.
    pub tokens: Option<PathBuf>,
    /// What the tokens are; as the file's description says, where `ebbtide pack` made it.
    pub tokenizer: Option<TokenizerKind>,
    /// A file of its own to validate on; if not given, the end of `tokens` is set aside.
    pub validation: Option<PathBuf>,
    /// Share of `tokens` that is set aside; 0.05 if not given.
    pub validation_fraction: Option<f64>,
    /// `random` or `block`.
    pub order: Option<DataOrder>,
    /// The most memory of the loader, such as `"512MiB"`; half of what is free if not given.
    pub ram: Option<Bytes>,
    /// `verify`, `make` or `off`: what is done about checksums of the data.
    pub checksums: Option<DataChecksums>,
    /// `stop` or `quarantine`: what is done about data that its checksum says is damaged.
    pub damaged: Option<Damaged>,
}

/// `[training]`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainingFile {
    /// Steps of the whole run.
    pub steps: Option<u64>,
    /// Sequences of a micro-batch.
    pub batch: Option<usize>,
    /// Micro-batches of a step.
    pub accumulate: Option<usize>,
    /// Positions of a sequence; the model's if not given.
    pub context: Option<usize>,
    /// Keys the initial weights, the order of the data and the dropout.
    pub seed: Option<u64>,
    /// `keep`, `recompute`, `offload`, or an expression: see [`ebbtide_offload::expression`].
    pub policy: Option<Policy>,
    /// The device's memory budget, such as `"512MiB"`.
    pub memory: Option<Bytes>,
    /// `f32`, `f16` or `bf16`.
    pub precision: Option<Precision>,
    /// Keeps the residual stream in f32; false if not given.
    pub residual_f32: Option<bool>,
    /// Whether the moments are in host memory, and in 16 bits the master weights; false if not given.
    pub offload_optimizer: Option<bool>,
    /// `cpu`, `cuda`, `cuda:N` or `best`; `cpu` if not given.
    pub device: Option<ComputeDevice>,
    /// Threads of the kernels; the machine's cores if not given.
    pub threads: Option<usize>,
    /// Steps between checkpoints; 0 for one at the end alone.
    pub checkpoint_every: Option<u64>,
    /// Checkpoints that are kept, the newest; 0 for all.
    pub keep_checkpoints: Option<usize>,
    /// Steps between validations; 0 for one at the end alone.
    pub validate_every: Option<u64>,
    /// Windows of the validation data that a validation reads.
    pub validation_windows: Option<u64>,
    /// Tokens of the sample that a run ends with; 0 for none.
    pub sample_tokens: Option<usize>,
}

/// `[schedule]`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ScheduleFile {
    /// The highest rate.
    pub peak: Option<f32>,
    /// The last rate; a tenth of the peak if not given.
    pub floor: Option<f32>,
    /// Steps from 0 to the peak; a twentieth of the decay if not given.
    pub warmup_steps: Option<u64>,
    /// Steps until the floor; `training.steps` of the file if not given. The flag `--steps` does not change it, so that
    /// a run cut short and resumed takes the same path.
    pub decay_steps: Option<u64>,
}

/// `[tiers]`: memory that is not the device's.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tiers {
    /// Most host memory for offloaded activations, taken at the start; as much as a step needs if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_memory: Option<Bytes>,
    /// Disk space for them, taken at the start. If not given, as much as a step needs where the policy sends anything to disk,
    /// else none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_memory: Option<Bytes>,
    /// A folder of the disk to use; the run's own if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spill: Option<PathBuf>,
    /// Holds checksums of what comes back from disk, and of what is computed again.
    pub verify: bool,
    /// Measures the largest error of each lossy codec.
    pub measure_errors: bool,
}

impl Tiers {
    /// What `other` says, and what it leaves open as it is here.
    fn or(self, other: &Tiers) -> Tiers {
        Tiers {
            host_memory: other.host_memory.or(self.host_memory),
            disk_memory: other.disk_memory.or(self.disk_memory),
            spill: other.spill.clone().map(absolute).or(self.spill),
            verify: other.verify || self.verify,
            measure_errors: other.measure_errors || self.measure_errors,
        }
    }

    /// The offload runtime's options, with the sizes that are said here: see [`plan::sized`] for the others.
    pub fn unsized_options(&self, policy: &Expression, folder: &Path) -> OffloadOptions {
        let disk = (self.disk_memory.is_some() || policy.uses_disk()).then(|| {
            let folder = self.spill.as_deref().unwrap_or(folder);
            let mut disk = DiskOptions::new(folder, self.disk_memory.map_or(0, |bytes| bytes.0));
            disk.verify |= self.verify;
            disk
        });
        OffloadOptions {
            host_bytes: self.host_memory.map(|bytes| bytes.0),
            disk,
            measure_errors: self.measure_errors,
            verify_recompute: self.verify,
            ..OffloadOptions::default()
        }
    }

    /// The offload runtime's options for a step: tiers as large as is said here, or as the step needs; and the budget that the
    /// device gets, at most the one given: see [`plan::fitting_budget`].
    ///
    /// # Errors
    /// A configuration that cannot be; out of memory, if the budget does not hold the step, or the machine not the host tier,
    /// and the step beside it where the device is the CPU.
    pub fn options(
        &self,
        device: DeviceKind,
        shape: &StepShape,
        policy: &Expression,
        budget: Option<Bytes>,
        folder: &Path,
    ) -> ebbtide_engine::Result<(OffloadOptions, Option<usize>)> {
        let options = self.unsized_options(policy, folder);
        let budget =
            budget.map(|bytes| plan::fitting_budget(shape, policy.clone(), &options, bytes.0)).transpose()?;
        let sized = plan::sized(shape, policy.clone(), &options, budget)?;
        let planned = plan::plan(shape, policy.clone(), &sized, budget)?;
        check_machine(
            if device == DeviceKind::Cpu { planned.memory.extent_bytes } else { 0 },
            sized.host_bytes.unwrap_or_default() + planned.optimizer_host_bytes,
        )?;
        Ok((sized, budget))
    }
}

/// The most threads that may be asked for.
const MOST_THREADS: usize = 1024;

/// A run with every value settled: what `config.toml` in its folder holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The model's sizes.
    pub model: Gpt2Config,
    /// Where the tokens are.
    pub data: Data,
    /// Steps, batches, policy and budget.
    pub training: Training,
    /// AdamW's constants.
    pub optimizer: AdamWOptions,
    /// The learning rate.
    pub schedule: Schedule,
    /// Where offloaded activations go.
    #[serde(default)]
    pub tiers: Tiers,
    /// How the loss scale moves, in f16.
    #[serde(default)]
    pub loss_scale: LossScalerOptions,
}

/// See [`DataFile`]; paths are absolute.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Data {
    /// A token file; `None` for the bundled text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<PathBuf>,
    /// What the tokens are.
    pub tokenizer: TokenizerKind,
    /// A token file to validate on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation: Option<PathBuf>,
    /// Share of `tokens` that is set aside where there is no such file.
    pub validation_fraction: f64,
    /// The order of the training windows.
    #[serde(default)]
    pub order: DataOrder,
    /// The most memory of the loader.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram: Option<Bytes>,
    /// What is done about checksums of the data.
    #[serde(default)]
    pub checksums: DataChecksums,
    /// What is done about data that its checksum says is damaged.
    #[serde(default)]
    pub damaged: Damaged,
    /// Where the first weights came from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<PathBuf>,
}

/// See [`TrainingFile`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Training {
    /// Steps of the whole run.
    pub steps: u64,
    /// Sequences of a micro-batch.
    pub batch: usize,
    /// Micro-batches of a step.
    pub accumulate: usize,
    /// Positions of a sequence.
    pub context: usize,
    /// Keys the initial weights, the order of the data and the dropout.
    pub seed: u64,
    /// Where saved activations go.
    pub policy: Policy,
    /// The device's memory budget.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Bytes>,
    /// What the model computes in.
    pub precision: Precision,
    /// Keeps the residual stream in f32.
    #[serde(default)]
    pub residual_f32: bool,
    /// Whether the moments are in host memory, and in 16 bits the master weights.
    #[serde(default)]
    pub offload_optimizer: bool,
    /// What computes.
    #[serde(default)]
    pub device: ComputeDevice,
    /// Threads of the kernels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Steps between checkpoints; 0 for one at the end alone.
    pub checkpoint_every: u64,
    /// Checkpoints that are kept; 0 for all.
    pub keep_checkpoints: usize,
    /// Steps between validations; 0 for one at the end alone.
    pub validate_every: u64,
    /// Windows that a validation reads.
    pub validation_windows: u64,
    /// Tokens of the sample that a run ends with.
    pub sample_tokens: usize,
}

/// What the command line says over a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overrides {
    /// `--steps`.
    pub steps: Option<u64>,
    /// `--seed`.
    pub seed: Option<u64>,
    /// `--dropout`.
    pub dropout: Option<f32>,
    /// `--policy`.
    pub policy: Option<Expression>,
    /// `--memory`.
    pub memory: Option<Bytes>,
    /// `--precision`.
    pub precision: Option<Precision>,
    /// `--residual-f32`.
    pub residual_f32: Option<bool>,
    /// `--checkpoint-every`.
    pub checkpoint_every: Option<u64>,
    /// `--batch`.
    pub batch: Option<usize>,
    /// `--accumulate`.
    pub accumulate: Option<usize>,
    /// `--offload-optimizer`.
    pub offload_optimizer: Option<bool>,
    /// `--device`.
    pub device: Option<ComputeDevice>,
    /// `--threads`.
    pub threads: Option<usize>,
    /// `--order`.
    pub order: Option<DataOrder>,
    /// `--ram`.
    pub ram: Option<Bytes>,
    /// `--host-memory` and its like.
    pub tiers: Tiers,
}

impl Overrides {
    /// A settled configuration with what was said on the command line changed.
    pub fn apply(&self, mut config: Config) -> Config {
        let training = &mut config.training;
        training.steps = self.steps.unwrap_or(training.steps);
        training.seed = self.seed.unwrap_or(training.seed);
        config.model.dropout = self.dropout.unwrap_or(config.model.dropout);
        if let Some(policy) = &self.policy {
            training.policy = Policy(policy.clone());
        }
        training.memory = self.memory.or(training.memory);
        training.precision = self.precision.unwrap_or(training.precision);
        training.residual_f32 = self.residual_f32.unwrap_or(training.residual_f32);
        training.checkpoint_every = self.checkpoint_every.unwrap_or(training.checkpoint_every);
        training.batch = self.batch.unwrap_or(training.batch);
        training.accumulate = self.accumulate.unwrap_or(training.accumulate);
        training.offload_optimizer = self.offload_optimizer.unwrap_or(training.offload_optimizer);
        training.device = self.device.unwrap_or(training.device);
        training.threads = self.threads.or(training.threads);
        config.data.order = self.order.unwrap_or(config.data.order);
        config.data.ram = self.ram.or(config.data.ram);
        config.tiers = config.tiers.or(&self.tiers);
        config
    }
}

/// What is wrong with a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{path}: cannot read the configuration: {reason}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        reason: std::io::Error,
    },
    /// The file is not TOML, or has a key or a type that it should not.
    #[error("{path}: {reason}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and what.
        reason: Box<toml::de::Error>,
    },
    /// A value that cannot be.
    #[error("{field}: expected {expected}, found {found}")]
    Value {
        /// The key, with its section.
        field: &'static str,
        /// What would do.
        expected: String,
        /// What it is.
        found: String,
    },
    /// The model's sizes cannot be, or its weights' configuration cannot be read.
    #[error(transparent)]
    Model(#[from] ebbtide_engine::Error),
    /// The tokens' description cannot be read.
    #[error(transparent)]
    Pack(#[from] crate::pack::PackError),
}

impl ConfigFile {
    /// The quick start: a byte-level GPT of 3.2 million parameters, for the bundled text.
    pub fn quick_start() -> Self {
        let model = ModelFile {
            context: Some(128),
            width: Some(256),
            layers: Some(4),
            heads: Some(4),
            ..ModelFile::default()
        };
        let training = TrainingFile {
            steps: Some(1000),
            batch: Some(16),
            validate_every: Some(250),
            checkpoint_every: Some(250),
            keep_checkpoints: Some(2),
            ..TrainingFile::default()
        };
        let schedule = ScheduleFile { peak: Some(2e-3), ..ScheduleFile::default() };
        let optimizer = AdamWOptions { beta2: 0.99, ..AdamWOptions::default() };
        ConfigFile { model, training, schedule, optimizer, ..ConfigFile::default() }
    }

    /// Reads a file. Paths in it are relative to its folder.
    ///
    /// # Errors
    /// [`ConfigError::Read`], or [`ConfigError::Parse`] with the line and the keys that would do.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = fs::read_to_string(path)
            .map_err(|reason| ConfigError::Read { path: path.to_path_buf(), reason })?;
        let mut config: ConfigFile = toml::from_str(&text)
            .map_err(|reason| ConfigError::Parse { path: path.to_path_buf(), reason: Box::new(reason) })?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let paths = [
            &mut config.data.tokens,
            &mut config.data.validation,
            &mut config.model.weights,
            &mut config.tiers.spill,
        ];
        for path in paths.into_iter().flatten() {
            *path = folder.join(&*path);
        }
        Ok(config)
    }

    /// Settles every value.
    ///
    /// # Errors
    /// [`ConfigError`] names the value that cannot be.
    pub fn settle(self, overrides: &Overrides) -> Result<Config, ConfigError> {
        let ConfigFile { model, data, training, optimizer, schedule, tiers, loss_scale } = self;
        let tokenizer = match (data.tokenizer, &data.tokens) {
            (Some(tokenizer), _) => tokenizer,
            (None, Some(tokens)) => {
                crate::pack::read_sidecar(tokens)?.map_or(TokenizerKind::Gpt2, |sidecar| sidecar.tokenizer)
            }
            (None, None) => TokenizerKind::Bytes,
        };
        let model_config = settle_model(&model, tokenizer, overrides)?;
        let file_steps = training.steps.unwrap_or(1000);
        let decay_steps = schedule.decay_steps.unwrap_or(file_steps);
        let peak = schedule.peak.unwrap_or(6e-4);
        let config = Config {
            data: Data {
                tokens: data.tokens.map(absolute),
                tokenizer,
                validation: data.validation.map(absolute),
                validation_fraction: data.validation_fraction.unwrap_or(0.05),
                order: overrides.order.or(data.order).unwrap_or_default(),
                ram: overrides.ram.or(data.ram),
                checksums: data.checksums.unwrap_or_default(),
                damaged: data.damaged.unwrap_or_default(),
                weights: model.weights.map(absolute),
            },
            training: Training {
                steps: overrides.steps.unwrap_or(file_steps),
                batch: overrides.batch.or(training.batch).unwrap_or(8),
                accumulate: overrides.accumulate.or(training.accumulate).unwrap_or(1),
                context: training.context.unwrap_or(model_config.context),
                seed: overrides.seed.or(training.seed).unwrap_or(1337),
                policy: overrides.policy.clone().map(Policy).or(training.policy).unwrap_or_default(),
                memory: overrides.memory.or(training.memory),
                precision: overrides.precision.or(training.precision).unwrap_or_default(),
                residual_f32: overrides.residual_f32.or(training.residual_f32).unwrap_or_default(),
                offload_optimizer: overrides
                    .offload_optimizer
                    .or(training.offload_optimizer)
                    .unwrap_or_default(),
                device: overrides.device.or(training.device).unwrap_or_default(),
                threads: overrides.threads.or(training.threads),
                checkpoint_every: overrides.checkpoint_every.or(training.checkpoint_every).unwrap_or(500),
                keep_checkpoints: training.keep_checkpoints.unwrap_or(2),
                validate_every: training.validate_every.unwrap_or(500),
                validation_windows: training.validation_windows.unwrap_or(64),
                sample_tokens: training.sample_tokens.unwrap_or(300),
            },
            optimizer,
            schedule: Schedule {
                peak,
                floor: schedule.floor.unwrap_or(peak / 10.0),
                warmup_steps: schedule.warmup_steps.unwrap_or(decay_steps / 20),
                decay_steps,
            },
            tiers: tiers.or(&overrides.tiers),
            loss_scale,
            model: model_config,
        };
        config.check()?;
        Ok(config)
    }
}

fn settle_model(
    model: &ModelFile,
    tokenizer: TokenizerKind,
    overrides: &Overrides,
) -> Result<Gpt2Config, ConfigError> {
    let base = match (&model.name, &model.weights) {
        (Some(name), _) => Gpt2Config::named(name)?,
        (None, Some(weights)) if weights.is_dir() => hugging_face::read_config(weights)?,
        (None, _) => Gpt2Config { vocabulary: tokenizer.vocabulary(), ..Gpt2Config::named("gpt2")? },
    };
    let named_vocabulary = model.name.is_some() && tokenizer == TokenizerKind::Bytes;
    let vocabulary = if named_vocabulary { tokenizer.vocabulary() } else { base.vocabulary };
    let config = Gpt2Config {
        vocabulary: model.vocabulary.unwrap_or(vocabulary),
        context: model.context.unwrap_or(base.context),
        width: model.width.unwrap_or(base.width),
        layers: model.layers.unwrap_or(base.layers),
        heads: model.heads.unwrap_or(base.heads),
        dropout: overrides.dropout.or(model.dropout).unwrap_or(base.dropout),
        exact_gelu: model.exact_gelu.unwrap_or(base.exact_gelu),
        epsilon: model.epsilon.unwrap_or(base.epsilon),
    };
    config.check()?;
    Ok(config)
}

impl Training {
    /// What the engine computes in.
    pub fn numerics(&self) -> Numerics {
        Numerics { precision: self.precision, residual_f32: self.residual_f32 }
    }
}

impl Config {
    /// Reads the `config.toml` of a run's folder.
    ///
    /// # Errors
    /// [`ConfigError::Read`], [`ConfigError::Parse`], and those of [`Config::check`].
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = fs::read_to_string(path)
            .map_err(|reason| ConfigError::Read { path: path.to_path_buf(), reason })?;
        let config: Config = toml::from_str(&text)
            .map_err(|reason| ConfigError::Parse { path: path.to_path_buf(), reason: Box::new(reason) })?;
        config.check()?;
        Ok(config)
    }

    /// Holds the values against each other.
    ///
    /// # Errors
    /// [`ConfigError`] names the value that cannot be.
    pub fn check(&self) -> Result<(), ConfigError> {
        let value = |field, expected: &str, found: &dyn fmt::Display| {
            Err(ConfigError::Value { field, expected: expected.to_string(), found: found.to_string() })
        };
        self.model.check()?;
        self.schedule.check()?;
        self.optimizer.check()?;
        self.loss_scale.check()?;
        let training = &self.training;
        if training.batch == 0 {
            return value("training.batch", "at least 1", &0);
        }
        if training.accumulate == 0 {
            return value("training.accumulate", "at least 1", &0);
        }
        if training.steps == 0 {
            return value("training.steps", "at least 1", &0);
        }
        if let Some(threads) = training.threads
            && !(1..=MOST_THREADS).contains(&threads)
        {
            return value("training.threads", &format!("from 1 to {MOST_THREADS}"), &threads);
        }
        if training.context == 0 || training.context > self.model.context {
            let expected = format!("from 1 to the model's context of {}", self.model.context);
            return value("training.context", &expected, &training.context);
        }
        if training.validation_windows == 0 {
            return value("training.validation_windows", "at least 1", &0);
        }
        if self.data.validation.is_none()
            && !(self.data.validation_fraction > 0.0 && self.data.validation_fraction < 1.0)
        {
            let found = self.data.validation_fraction;
            return value(
                "data.validation_fraction",
                "a share between 0 and 1, or a file in data.validation",
                &found,
            );
        }
        if self.model.vocabulary < self.data.tokenizer.vocabulary() {
            let expected = format!(
                "at least the {} tokens of the tokenizer `{}`",
                self.data.tokenizer.vocabulary(),
                self.data.tokenizer
            );
            return value("model.vocabulary", &expected, &self.model.vocabulary);
        }
        Ok(())
    }

    /// As TOML.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).unwrap_or_else(|error| unreachable!("a configuration is plain data: {error}"))
    }

    /// What of another configuration would make a run end elsewhere than this one: one line a key, or nothing. How many
    /// steps, where activations go without loss, the budget and the tiers, and what is written when do not count.
    pub fn differences(&self, other: &Config) -> Vec<String> {
        let lossy = self.training.policy.0.is_lossy() || other.training.policy.0.is_lossy();
        let settled = |config: &Config| {
            let mut config = config.clone();
            let training = &mut config.training;
            if !lossy {
                training.policy = Policy::default();
            }
            (training.steps, training.memory, training.threads) = (1, None, None);
            training.device = ComputeDevice::default();
            (training.offload_optimizer, config.tiers) = (false, Tiers::default());
            (training.checkpoint_every, training.keep_checkpoints) = (0, 0);
            (training.validate_every, training.validation_windows, training.sample_tokens) = (0, 1, 0);
            (config.data.ram, config.data.checksums) = (None, DataChecksums::default());
            serde_json::to_value(config).unwrap_or_default()
        };
        let (ours, theirs) = (settled(self), settled(other));
        let mut lines = Vec::new();
        for (section, values) in ours.as_object().into_iter().flatten() {
            let other = &theirs[section];
            let mut keys: Vec<&String> =
                values.as_object().into_iter().flatten().map(|(key, _)| key).collect();
            keys.extend(other.as_object().into_iter().flatten().map(|(key, _)| key));
            keys.sort();
            keys.dedup();
            for key in keys.into_iter().filter(|key| values[key] != other[key]) {
                lines
                    .push(format!("{section}.{key} is {} in the run, {} asked for", values[key], other[key]));
            }
        }
        lines
    }
}

/// Where the device is the CPU, its memory and the host tier's are the machine's both; elsewhere its bytes here are 0.
fn check_machine(device_bytes: usize, host_bytes: usize) -> ebbtide_kernels::Result<()> {
    let available = ebbtide_kernels::available_memory();
    if device_bytes + host_bytes <= available {
        return Ok(());
    }
    Err(ebbtide_kernels::Error::HostMemory {
        name: "a step".to_string(),
        bytes: device_bytes + host_bytes,
        reason: format!(
            "{} are available; it needs {} on the CPU as the device, and {} for what is offloaded: a policy with `offload \
             disk` needs none of the latter, and a --memory budget less of the former",
            ebbtide_kernels::bytes(available),
            ebbtide_kernels::bytes(device_bytes),
            ebbtide_kernels::bytes(host_bytes),
        ),
    })
}

fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}

/// A policy as files write it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Policy(pub Expression);

/// What computes, as files write it: `cpu`, `cuda`, `cuda:N`, or `best` for the first CUDA device or else the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ComputeDevice(pub DeviceKind);

/// A count of bytes, written with or without a unit: `536870912`, `512MiB`, `1.5GB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub usize);

/// What is done about checksums of the data: see [`ebbtide_loader::Checksums`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DataChecksums {
    /// Nothing.
    Off,
    /// What is read is held against those that there are.
    #[default]
    Verify,
    /// And those that there are not are made as the data goes by, beside the files.
    Make,
}

/// The order of the training windows: see [`ebbtide_loader::Order`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DataOrder {
    /// Each window a read of its own.
    #[default]
    Random,
    /// Whole blocks, mixed over a window of them: for data larger than memory.
    Block,
}

impl fmt::Display for DataOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DataOrder::Random => "random",
            DataOrder::Block => "block",
        })
    }
}

impl FromStr for DataOrder {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "random" => Ok(DataOrder::Random),
            "block" => Ok(DataOrder::Block),
            _ => Err(format!("unknown order `{text}`: expected random or block")),
        }
    }
}

impl FromStr for Bytes {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a size: expected bytes such as 512MiB, 1.5GiB or 800MB");
        let size: bytesize::ByteSize = text.trim().parse().map_err(|_| wrong())?;
        match usize::try_from(size.as_u64()) {
            Ok(bytes) if bytes > 0 => Ok(Bytes(bytes)),
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&ebbtide_kernels::bytes(self.0))
    }
}

impl Serialize for Policy {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Policy {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Policy).map_err(serde::de::Error::custom)
    }
}

impl FromStr for ComputeDevice {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(ComputeDevice)
    }
}

impl Serialize for ComputeDevice {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for ComputeDevice {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl Serialize for Bytes {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0 as u64)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Number(u64),
            Text(String),
        }
        let text = match Written::deserialize(deserializer)? {
            Written::Number(number) => number.to_string(),
            Written::Text(text) => text,
        };
        text.parse().map_err(serde::de::Error::custom)
    }
}
