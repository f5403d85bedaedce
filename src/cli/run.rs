//! A run's folder, and what opens its model and data.
//!
//! A folder holds `config.toml` (every value settled), `metrics.jsonl` (a line a step), `checkpoints/step-N/`,
//! `summary.json` once the run has ended, and `data/` where the run uses the bundled text.

use std::{
    fs::{self, File, OpenOptions},
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use ebbtide::{
    config::{Config, Training},
    engine::{Engine, checkpoint, gpt2::Gpt2},
    kernels::{Device, DeviceOptions},
    loader::{Dataset, Samples, TokenWriter},
    offload::OffloadOptions,
    tokenizer::Tokenizer,
};
use serde::Serialize;

/// The bundled text: see `data/README.md`.
const BUNDLED_TEXT: &str = include_str!("../../data/kjv.txt");

pub(super) struct RunFolder(PathBuf);

impl RunFolder {
    pub(super) fn new(path: impl Into<PathBuf>) -> Self {
        RunFolder(path.into())
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// A folder that no run has: `runs/1`, `runs/2`, …
    pub(super) fn next_free() -> Self {
        let mut paths = (1..).map(|n: u32| Path::new("runs").join(n.to_string()));
        RunFolder(paths.find(|path| !path.exists()).unwrap_or_default())
    }

    pub(super) fn config_path(&self) -> PathBuf {
        self.0.join("config.toml")
    }

    pub(super) fn metrics_path(&self) -> PathBuf {
        self.0.join("metrics.jsonl")
    }

    pub(super) fn checkpoints(&self) -> PathBuf {
        self.0.join("checkpoints")
    }

    pub(super) fn holds_a_run(&self) -> bool {
        self.config_path().exists() || self.metrics_path().exists() || self.checkpoints().exists()
    }

    /// The run's configuration.
    pub(super) fn config(&self) -> Result<Config> {
        if !self.config_path().exists() {
            bail!("{}: no run here: expected a folder that `ebbtide train --out` made", self.0.display());
        }
        Ok(Config::read(&self.config_path())?)
    }

    /// The newest checkpoint.
    pub(super) fn latest(&self) -> Result<PathBuf> {
        let found = checkpoint::latest(&self.checkpoints())?;
        found.with_context(|| format!("{}: the run has no checkpoint yet", self.0.display()))
    }

    /// Makes the folder.
    pub(super) fn create(&self) -> Result<()> {
        fs::create_dir_all(&self.0).with_context(|| format!("{}: cannot make the folder", self.0.display()))
    }

    /// Writes the configuration: from then on the folder holds a run.
    pub(super) fn write_config(&self, config: &Config) -> Result<()> {
        let text =
            format!("# Every value of the run, settled; written by `ebbtide train`.\n{}", config.to_toml());
        write_whole(&self.config_path(), text.as_bytes())
    }

    pub(super) fn write_summary(&self, summary: &impl Serialize) -> Result<()> {
        write_whole(&self.0.join("summary.json"), &serde_json::to_vec_pretty(summary)?)
    }

    /// Opens the metrics to append to, with the lines up to a step kept: those after it will be written again.
    pub(super) fn metrics(&self, last_step: u64) -> Result<Metrics> {
        let path = self.metrics_path();
        let mut kept = Vec::new();
        if let Ok(file) = File::open(&path) {
            for line in BufReader::new(file).lines() {
                let line = line.with_context(|| format!("{}: cannot read", path.display()))?;
                let value: Option<serde_json::Value> = serde_json::from_str(&line).ok();
                // A line cut short by a kill is the last, and of a step that will run again.
                let Some(step) = value.and_then(|value| value["step"].as_u64()) else { break };
                if step > last_step {
                    break;
                }
                kept.extend_from_slice(line.as_bytes());
                kept.push(b'\n');
            }
        }
        write_whole(&path, &kept)?;
        let file = OpenOptions::new().append(true).open(&path);
        Ok(Metrics { file: file.with_context(|| format!("{}: cannot open", path.display()))?, path })
    }

    /// The training and the validation windows of a run, the bundled text made into tokens first where it is used.
    pub(super) fn data(&self, config: &Config) -> Result<RunData> {
        let path = match &config.data.tokens {
            Some(path) => path.clone(),
            None => self.bundled_tokens(config)?,
        };
        let tokens = Dataset::open(&path)?;
        let context = config.training.context;
        let (training, validation) = match &config.data.validation {
            Some(path) => {
                let other = Dataset::open(path)?;
                (tokens.samples(0..tokens.len(), context)?, other.samples(0..other.len(), context)?)
            }
            None => {
                let (training, validation) = tokens.split(config.data.validation_fraction, context)?;
                (training, validation.context("no validation data: data.validation_fraction is 0")?)
            }
        };
        Ok(RunData { training, validation })
    }

    fn bundled_tokens(&self, config: &Config) -> Result<PathBuf> {
        let folder = self.0.join("data");
        let path = folder.join("kjv.bin");
        if !path.exists() {
            fs::create_dir_all(&folder)
                .with_context(|| format!("{}: cannot make the folder", folder.display()))?;
            // What a kill in the middle of it left.
            for entry in fs::read_dir(&folder).into_iter().flatten().filter_map(Result::ok) {
                let name = entry.file_name().to_string_lossy().into_owned();
                if name.starts_with(".kjv.bin.") && name.ends_with(".tmp") {
                    let _ = fs::remove_file(entry.path());
                }
            }
            let mut writer = TokenWriter::create(&path)?;
            writer.write(&Tokenizer::new(config.data.tokenizer)?.encode(BUNDLED_TEXT))?;
            writer.finish()?;
        }
        Ok(path)
    }
}

/// What a run reads.
pub(super) struct RunData {
    pub(super) training: Samples,
    pub(super) validation: Samples,
}

/// `metrics.jsonl`.
pub(super) struct Metrics {
    file: File,
    path: PathBuf,
}

impl Metrics {
    /// Appends a line, in one write.
    pub(super) fn write(&mut self, line: &impl Serialize) -> Result<()> {
        let mut bytes = serde_json::to_vec(line)?;
        bytes.push(b'\n');
        self.file.write_all(&bytes).with_context(|| format!("{}: cannot write", self.path.display()))
    }
}

/// The engine that a run computes on.
pub(super) fn engine(
    config: &Config,
    offload: OffloadOptions,
    budget_bytes: Option<usize>,
) -> Result<Engine> {
    let Training { device, threads, .. } = config.training;
    let device = Device::open(&DeviceOptions { kind: device.0, threads, budget_bytes })?;
    let policy = Box::new(config.training.policy.0.clone());
    let engine = Engine::with_numerics(&device, policy, offload, config.training.numerics())?;
    Ok(engine.offload_optimizer(config.training.offload_optimizer))
}

/// A run's model for inference, from its newest checkpoint, with its engine.
pub(super) fn open_model(folder: &RunFolder, config: &Config) -> Result<(Engine, Gpt2)> {
    let checkpoint = folder.latest()?;
    let engine = engine(config, OffloadOptions::default(), config.training.memory.map(|memory| memory.0))?;
    let model = Gpt2::new(&engine, config.model, 0, false)?;
    checkpoint::load_weights(&engine, model.parameters(), &checkpoint)?;
    Ok((engine, model))
}

/// Writes a small file whole or not at all.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let partial = path.with_extension("partial");
    let write = || {
        let mut file = File::create(&partial)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&partial, path)
    };
    write().with_context(|| format!("{}: cannot write", path.display()))
}
