//! Checkpoints: a training run's whole state in a folder, there whole or not at all.
//!
//! A folder `step-N` holds `weights.safetensors` (Hugging Face's names), `optimizer.safetensors` (`first_moment.NAME`,
//! `second_moment.NAME`), and `state.json` with the counts, the model's sizes, the caller's own state, and each file's
//! length and checksum (XXH3, 64 bits). It is written under another name, put on the disk, and renamed: a kill at any
//! instant leaves the checkpoint before it.
//!
//! Loading holds everything against the model first, so a bad checkpoint changes nothing.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{Read, Write},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    Engine, Error, Parameters, Result, Trainer,
    gpt2::Gpt2Config,
    hugging_face::entries,
    parameters::write_flat,
    tensor_file::{self, TensorFile},
};

const FORMAT: u32 = 1;
const WEIGHTS: &str = "weights.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const STATE: &str = "state.json";
const MOMENTS: [&str; 2] = ["first_moment.", "second_moment."];

/// What a checkpoint says of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointState {
    /// Version of the format.
    pub format: u32,
    /// The model's sizes.
    pub model: Gpt2Config,
    /// Optimizer steps done.
    pub steps_done: u64,
    /// Forward passes done: the dropout's counter.
    pub forwards_done: u64,
    /// Whatever the caller keeps beside.
    pub extra: serde_json::Value,
    files: BTreeMap<String, FileState>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct FileState {
    bytes: u64,
    xxh3: String,
}

/// Saves a trainer's state as `step-N` in a folder, and gives its path. Of the older ones the newest `keep_last` stay, this
/// one counted; 0 keeps all. A whole checkpoint of the same step is left as it is.
///
/// # Errors
/// [`Error::Io`], such as for a full disk: nothing is left of the attempt then, and older checkpoints stay. The device's.
pub fn save(trainer: &Trainer, folder: &Path, extra: serde_json::Value, keep_last: usize) -> Result<PathBuf> {
    let step = trainer.steps_done();
    let path = folder.join(format!("step-{step:06}"));
    if path.is_dir() {
        if verify(&path).is_ok() {
            return Ok(path);
        }
        remove(&path)?;
    }
    fs::create_dir_all(folder).map_err(io(folder, "make the folder"))?;
    remove_leftovers(folder)?;
    let partial = folder.join(format!(".step-{step:06}.partial-{}", std::process::id()));
    let written = write(trainer, &partial, extra)
        .and_then(|()| fs::rename(&partial, &path).map_err(io(&path, "put in place")));
    if let Err(error) = written {
        let _ = fs::remove_dir_all(&partial);
        return Err(error);
    }
    sync_folder(folder)?;
    if keep_last > 0 {
        let steps = steps(folder)?;
        let old = steps.len().saturating_sub(keep_last);
        steps[..old].iter().filter(|(_, old)| *old != path).try_for_each(|(_, old)| remove(old))?;
    }
    Ok(path)
}

fn write(trainer: &Trainer, partial: &Path, extra: serde_json::Value) -> Result<()> {
    let (engine, parameters) = (trainer.engine(), trainer.model().parameters());
    fs::create_dir(partial).map_err(io(partial, "make the folder"))?;
    tensor_file::write(engine, &partial.join(WEIGHTS), entries(parameters, parameters.weights(), "")?)?;
    let mut moments = Vec::new();
    for (prefix, moment) in MOMENTS.iter().zip(trainer.optimizer().moments()) {
        moments.extend(entries(parameters, moment, prefix)?);
    }
    tensor_file::write(engine, &partial.join(OPTIMIZER), moments)?;
    let file = |name: &str| Ok((name.to_string(), file_state(&partial.join(name))?));
    let state = CheckpointState {
        format: FORMAT,
        model: *trainer.model().config(),
        steps_done: trainer.steps_done(),
        forwards_done: trainer.forwards_done(),
        extra,
        files: [WEIGHTS, OPTIMIZER].into_iter().map(file).collect::<Result<_>>()?,
    };
    let path = partial.join(STATE);
    let text = serde_json::to_vec_pretty(&state)
        .map_err(|error| Error::File { path: path.clone(), message: error.to_string() })?;
    let write = || {
        let mut file = File::create(&path)?;
        file.write_all(&text)?;
        file.sync_all()
    };
    write().map_err(io(&path, "write"))?;
    sync_folder(partial)
}

/// The newest checkpoint of a folder; `None` if there is none, or no folder. What a killed save left is passed over.
///
/// # Errors
/// [`Error::Io`].
pub fn latest(folder: &Path) -> Result<Option<PathBuf>> {
    Ok(steps(folder)?.pop().map(|(_, path)| path))
}

/// What a checkpoint says of itself. Its files are not looked at.
///
/// # Errors
/// [`Error::Io`]; [`Error::File`] for a state that is cut short or of another format.
pub fn read_state(checkpoint: &Path) -> Result<CheckpointState> {
    let path = checkpoint.join(STATE);
    let text = fs::read(&path).map_err(io(&path, "read"))?;
    let wrong = |message: String| Error::File { path: path.clone(), message };
    let value: serde_json::Value = serde_json::from_slice(&text)
        .map_err(|error| wrong(format!("not a checkpoint's state, or cut short: {error}")))?;
    if value["format"] != FORMAT {
        return Err(wrong(format!("of format {}: expected {FORMAT}", value["format"])));
    }
    serde_json::from_value(value).map_err(|error| wrong(format!("not a checkpoint's state: {error}")))
}

/// Brings a trainer to where a checkpoint was saved, bitwise, and gives what it says of itself.
///
/// # Errors
/// [`Error::Io`]; [`Error::File`] for files that are cut short or changed, tensors that are missing, unknown or of another
/// shape, or a model of other sizes. The trainer is as it was then. The device's.
pub fn load(trainer: &mut Trainer, checkpoint: &Path) -> Result<CheckpointState> {
    let state = verify(checkpoint)?;
    check_model(&state.model, trainer.model().config(), checkpoint)?;
    let engine = trainer.engine().clone();
    let parameters = trainer.model().parameters();
    let mut weights = TensorFile::open(&checkpoint.join(WEIGHTS))?;
    let mut optimizer = TensorFile::open(&checkpoint.join(OPTIMIZER))?;
    check_tensors(&weights, parameters, &[""])?;
    check_tensors(&optimizer, parameters, &MOMENTS)?;
    let [first, second] = trainer.optimizer().moments();
    for (name, _, range) in parameters.iter() {
        write_flat(&engine, &parameters.weights().part(range.clone())?, &weights.read(name)?)?;
        for (prefix, moment) in MOMENTS.iter().zip([first, second]) {
            let values = optimizer.read(&format!("{prefix}{name}"))?;
            write_flat(&engine, &moment.part(range.clone())?, &values)?;
        }
    }
    engine.compute().synchronize()?;
    trainer.set_progress(state.steps_done, state.forwards_done);
    Ok(state)
}

/// Loads a checkpoint's weights alone.
///
/// # Errors
/// As for [`load`], the optimizer's file aside.
pub fn load_weights(engine: &Engine, parameters: &Parameters, checkpoint: &Path) -> Result<()> {
    let state = read_state(checkpoint)?;
    verify_file(&state, checkpoint, WEIGHTS)?;
    let mut weights = TensorFile::open(&checkpoint.join(WEIGHTS))?;
    check_tensors(&weights, parameters, &[""])?;
    for (name, _, range) in parameters.iter() {
        write_flat(engine, &parameters.weights().part(range)?, &weights.read(name)?)?;
    }
    engine.compute().synchronize()?;
    Ok(())
}

/// Holds a checkpoint's files against its state.
fn verify(checkpoint: &Path) -> Result<CheckpointState> {
    let state = read_state(checkpoint)?;
    [WEIGHTS, OPTIMIZER].into_iter().try_for_each(|name| verify_file(&state, checkpoint, name))?;
    Ok(state)
}

fn verify_file(state: &CheckpointState, checkpoint: &Path, name: &str) -> Result<()> {
    let path = checkpoint.join(name);
    let wrong = |message: String| Err(Error::File { path: path.clone(), message });
    let Some(expected) = state.files.get(name) else {
        return wrong(format!("not listed in {STATE}"));
    };
    let bytes = fs::metadata(&path).map_err(io(&path, "open"))?.len();
    if bytes < expected.bytes {
        return wrong(format!("cut short: {bytes} bytes, expected {}", expected.bytes));
    }
    let found = file_state(&path)?;
    if found != *expected {
        return wrong(format!(
            "changed since it was saved: {} bytes with checksum {}, expected {} with {}",
            found.bytes, found.xxh3, expected.bytes, expected.xxh3
        ));
    }
    Ok(())
}

fn check_model(of_checkpoint: &Gpt2Config, of_model: &Gpt2Config, checkpoint: &Path) -> Result<()> {
    let value = |config: &Gpt2Config| serde_json::to_value(config).unwrap_or_default();
    let (theirs, ours) = (value(of_checkpoint), value(of_model));
    let fields = ours.as_object().into_iter().flatten();
    let differences: Vec<String> = fields
        .filter(|(field, ours)| theirs[field.as_str()] != **ours)
        .map(|(field, ours)| {
            format!("{field} is {} in the checkpoint, {ours} in the model", theirs[field.as_str()])
        })
        .collect();
    if differences.is_empty() {
        return Ok(());
    }
    let message = format!("of another model: {}", differences.join("; "));
    Err(Error::File { path: checkpoint.to_path_buf(), message })
}

/// Each parameter is there under each prefix, and nothing else is.
fn check_tensors(file: &TensorFile, parameters: &Parameters, prefixes: &[&str]) -> Result<()> {
    let mut expected = std::collections::HashSet::new();
    for (name, shape, _) in parameters.iter() {
        for prefix in prefixes {
            let name = format!("{prefix}{name}");
            file.check(&name, shape)?;
            expected.insert(name);
        }
    }
    match file.names().into_iter().find(|name| !expected.contains(name)) {
        Some(unknown) => Err(file.wrong(format!("tensor `{unknown}` is not one of the model's"))),
        None => Ok(()),
    }
}

/// Checkpoints of a folder by step, oldest first.
fn steps(folder: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(io(folder, "list")(error)),
    };
    let mut steps = Vec::new();
    for entry in entries {
        let entry = entry.map_err(io(folder, "list"))?;
        let name = entry.file_name();
        let step = name.to_str().and_then(|name| name.strip_prefix("step-")?.parse().ok());
        if let Some(step) = step
            && entry.path().join(STATE).is_file()
        {
            steps.push((step, entry.path()));
        }
    }
    steps.sort();
    Ok(steps)
}

/// Removes a checkpoint so that a kill in between leaves none that looks whole.
fn remove(checkpoint: &Path) -> Result<()> {
    let name = checkpoint.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let removed = checkpoint.with_file_name(format!(".{name}.partial-removed"));
    fs::rename(checkpoint, &removed).map_err(io(checkpoint, "remove"))?;
    fs::remove_dir_all(&removed).map_err(io(&removed, "remove"))
}

/// Removes what killed saves left.
fn remove_leftovers(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(io(folder, "list"))?.filter_map(|entry| entry.ok()) {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(".step-") && name.contains(".partial-") {
            fs::remove_dir_all(entry.path()).map_err(io(&entry.path(), "remove"))?;
        }
    }
    Ok(())
}

fn file_state(path: &Path) -> Result<FileState> {
    let mut file = File::open(path).map_err(io(path, "open"))?;
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    let (mut buffer, mut bytes) = (vec![0; 1 << 20], 0);
    loop {
        match file.read(&mut buffer).map_err(io(path, "read"))? {
            0 => return Ok(FileState { bytes, xxh3: format!("{:016x}", hash.digest()) }),
            count => {
                hash.update(&buffer[..count]);
                bytes += count as u64;
            }
        }
    }
}

/// Makes new names survive a power cut.
fn sync_folder(folder: &Path) -> Result<()> {
    if cfg!(unix) {
        File::open(folder).and_then(|file| file.sync_all()).map_err(io(folder, "write"))?;
    }
    Ok(())
}

fn io(path: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::Io { path, action, source }
}
