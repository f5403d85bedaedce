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
    scaler::ScalerState,
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
    /// Where the loss scale was, where there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaler: Option<ScalerState>,
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
/// one counted; 0 keeps all. A whole checkpoint of the same step is left as it is: a folder is one run's.
///
/// # Errors
/// [`Error::File`] if the same step of another model is there.
/// [`Error::Io`], such as for a full disk: nothing is left of the attempt then, and older checkpoints stay. The device's.
pub fn save(trainer: &Trainer, folder: &Path, extra: serde_json::Value, keep_last: usize) -> Result<PathBuf> {
    let step = trainer.steps_done();
    let path = folder.join(format!("step-{step:06}"));
    fs::create_dir_all(folder).map_err(io(folder, "make the folder"))?;
    remove_leftovers(folder)?;
    if path.is_dir() {
        if let Ok(there) = verify(&path) {
            check_model(&there.model, trainer.model().config(), &path)?;
            return Ok(path);
        }
        remove(&path)?;
    }
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
    tensor_file::write(engine, &partial.join(WEIGHTS), entries(parameters, parameters.weights(), ""))?;
    let mut moments = Vec::new();
    for (prefix, moment) in MOMENTS.iter().zip(trainer.optimizer().moments()) {
        moments.extend(entries(parameters, moment, prefix));
    }
    tensor_file::write(engine, &partial.join(OPTIMIZER), moments)?;
    let file = |name: &str| Ok((name.to_string(), file_state(&partial.join(name))?));
    let state = CheckpointState {
        format: FORMAT,
        model: *trainer.model().config(),
        steps_done: trainer.steps_done(),
        forwards_done: trainer.forwards_done(),
        scaler: trainer.scaler().map(|scaler| scaler.state(engine)).transpose()?,
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
        parameters.weights().write(&engine, range.clone(), &weights.read(name)?)?;
        for (prefix, moment) in MOMENTS.iter().zip([first, second]) {
            let values = optimizer.read(&format!("{prefix}{name}"))?;
            moment.write(&engine, range.clone(), &values)?;
        }
    }
    parameters.refresh(&engine)?;
    trainer.set_progress(state.steps_done, state.forwards_done, state.scaler.as_ref())?;
    engine.compute().synchronize()?;
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
        parameters.weights().write(engine, range, &weights.read(name)?)?;
    }
    parameters.refresh(engine)?;
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
    move |reason| Error::Io { path, action, reason }
}

#[cfg(test)]
mod tests {
    use ebbtide_kernels::Device;
    use ebbtide_offload::{OffloadOptions, policy::Builtin};
    use serde_json::json;

    use super::*;
    use crate::{
        Flat, TrainerOptions,
        gpt2::Gpt2,
        optimizer::{AdamWOptions, Schedule},
        tensor_file::Entry,
    };

    const CONFIG: Gpt2Config = Gpt2Config {
        vocabulary: 13,
        context: 8,
        width: 8,
        layers: 1,
        heads: 2,
        dropout: 0.0,
        exact_gelu: false,
        epsilon: 1e-5,
    };

    fn trainer(config: Gpt2Config, seed: u64) -> Trainer {
        let device = Device::cpu().unwrap();
        let engine = Engine::new(&device, Builtin::Keep.policy(), OffloadOptions::default()).unwrap();
        let model = Gpt2::new(&engine, config, seed, true).unwrap();
        let schedule = Schedule::constant(1e-3);
        let options = TrainerOptions {
            optimizer: AdamWOptions::default(),
            schedule,
            seed,
            loss_scale: Default::default(),
        };
        Trainer::new(&engine, model, options).unwrap()
    }

    /// Weights and both moments.
    fn flats(trainer: &Trainer) -> [Flat; 3] {
        let [first, second] = trainer.optimizer().moments();
        [trainer.model().parameters().weights().clone(), first.clone(), second.clone()]
    }

    /// Every parameter's weights and moments, and the counts: all that a checkpoint brings back.
    fn state(trainer: &Trainer) -> (Vec<u32>, u64, u64) {
        let mut bits = Vec::new();
        for flat in flats(trainer) {
            for (_, _, range) in trainer.model().parameters().iter() {
                let values = flat.read(trainer.engine(), range).unwrap();
                bits.extend(values.into_iter().map(f32::to_bits));
            }
        }
        (bits, trainer.steps_done(), trainer.forwards_done())
    }

    /// Bits of every kind: NaNs with payloads, both zeros, subnormals, infinities.
    fn fill_with_any_bits(trainer: &Trainer) {
        const ODD: [u32; 8] = [
            0x7fc0_0001,
            0xffc1_2345,
            0x7f80_0001,
            0xff80_0000,
            0x7f80_0000,
            0x8000_0000,
            0x0000_0001,
            0x3f80_0001,
        ];
        for (n, flat) in flats(trainer).into_iter().enumerate() {
            for (_, _, range) in trainer.model().parameters().iter() {
                let values: Vec<f32> = range.clone().map(|i| f32::from_bits(ODD[(i + n) % 8])).collect();
                flat.write(trainer.engine(), range, &values).unwrap();
            }
        }
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn any_bits_come_back() {
        let folder = tempfile::tempdir().unwrap();
        let mut source = trainer(CONFIG, 1);
        source.set_progress(123, 456, None).unwrap();
        fill_with_any_bits(&source);
        let extra = json!({"position": 7, "seed": u64::MAX});
        let path = save(&source, folder.path(), extra.clone(), 0).unwrap();
        assert_eq!(path, folder.path().join("step-000123"));
        let mut target = trainer(CONFIG, 2);
        assert_ne!(state(&target), state(&source));
        let read = load(&mut target, &path).unwrap();
        assert_eq!(state(&target), state(&source));
        assert_eq!((read.model, read.steps_done, read.forwards_done, read.extra), (CONFIG, 123, 456, extra));

        let other = trainer(CONFIG, 3);
        load_weights(other.engine(), other.model().parameters(), &path).unwrap();
        let weights = source.model().parameters().count();
        assert_eq!(state(&other).0[..weights], state(&source).0[..weights]);
    }

    #[test]
    fn files_cut_or_flipped_anywhere_change_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = save(&trainer(CONFIG, 1), folder.path(), json!(null), 0).unwrap();
        let mut target = trainer(CONFIG, 2);
        let before = state(&target);
        for name in [WEIGHTS, OPTIMIZER] {
            let file = path.join(name);
            let good = fs::read(&file).unwrap();
            let data = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
            let mut check = |bytes: &[u8], expected: &str| {
                fs::write(&file, bytes).unwrap();
                let error = load(&mut target, &path).unwrap_err().to_string();
                assert!(error.contains(name) && error.contains(expected), "{error}");
                assert_eq!(state(&target), before, "{error}");
            };
            // In the header's length, at its end, in the header, at the data, in the data.
            for len in [0, 7, 8, 9, data - 1, data, data + 3, good.len() - 1] {
                let expected = format!("cut short: {len} bytes, expected {}", good.len());
                check(&good[..len], &expected);
            }
            for at in [0, 8, data - 1, data, good.len() - 1] {
                let mut bad = good.clone();
                bad[at] ^= 0x10;
                check(&bad, "changed since it was saved");
            }
            check(&[&good[..], b"x"].concat(), "changed since it was saved");
            fs::write(&file, good).unwrap();
        }
        let good = fs::read(path.join(STATE)).unwrap();
        for len in 0..good.len() {
            fs::write(path.join(STATE), &good[..len]).unwrap();
            let error = load(&mut target, &path).unwrap_err().to_string();
            assert!(error.contains("state.json: not a checkpoint's state"), "{len}: {error}");
            assert_eq!(state(&target), before);
        }
        fs::write(path.join(STATE), good).unwrap();
        load(&mut target, &path).unwrap();
    }

    /// Writes other tensors to a checkpoint and signs them, as another program might have.
    fn replace(trainer: &Trainer, path: &Path, name: &str, change: impl Fn(&mut Vec<Entry>)) {
        let parameters = trainer.model().parameters();
        let [weights, first, second] = flats(trainer);
        let mut all = match name {
            WEIGHTS => entries(parameters, &weights, ""),
            _ => {
                let mut all = entries(parameters, &first, MOMENTS[0]);
                all.extend(entries(parameters, &second, MOMENTS[1]));
                all
            }
        };
        change(&mut all);
        tensor_file::write(trainer.engine(), &path.join(name), all).unwrap();
        let mut state = read_state(path).unwrap();
        state.files.insert(name.to_string(), file_state(&path.join(name)).unwrap());
        fs::write(path.join(STATE), serde_json::to_vec(&state).unwrap()).unwrap();
    }

    #[test]
    fn tensors_that_do_not_fit_change_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let source = trainer(CONFIG, 1);
        let path = save(&source, folder.path(), json!(null), 0).unwrap();
        let mut target = trainer(CONFIG, 2);
        let before = state(&target);
        for name in [WEIGHTS, OPTIMIZER] {
            let mut check = |change: &dyn Fn(&mut Vec<Entry>), expected: &str| {
                replace(&source, &path, name, change);
                let error = load(&mut target, &path).unwrap_err().to_string();
                assert!(error.contains(name) && error.contains(expected), "{error}");
                assert_eq!(state(&target), before, "{error}");
            };
            let first = entries(source.model().parameters(), &flats(&source)[0], "")[0].0.clone();
            check(&|all| drop(all.remove(0)), &format!("{first}`"));
            check(&|all| all.push(("stray".to_string(), vec![13, 8], all[0].2.clone())), "tensor `stray`");
            check(&|all| all[0].1 = vec![8, 13], "has the shape [8, 13], the model's is [13, 8]");
            replace(&source, &path, name, |_| {});
        }
        load(&mut target, &path).unwrap();
        assert_eq!(state(&target), state(&source));
    }

    #[test]
    fn another_model_is_told_field_by_field() {
        let folder = tempfile::tempdir().unwrap();
        let path = save(&trainer(CONFIG, 1), folder.path(), json!(null), 0).unwrap();
        let mut target = trainer(Gpt2Config { heads: 4, epsilon: 1e-3, ..CONFIG }, 2);
        let before = state(&target);
        let error = load(&mut target, &path).unwrap_err().to_string();
        assert!(error.contains("heads is 2 in the checkpoint, 4 in the model"), "{error}");
        assert!(error.contains("epsilon is ") && !error.contains("width"), "{error}");
        assert_eq!(state(&target), before);
    }

    #[test]
    fn what_killed_saves_left_is_passed_over_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let mut run = trainer(CONFIG, 1);
        run.set_progress(2, 2, None).unwrap();
        let good = save(&run, folder, json!(null), 0).unwrap();
        // Killed between files, and while a bad checkpoint of the next step was being removed.
        let partial = folder.join(".step-000009.partial-1");
        fs::create_dir(&partial).unwrap();
        fs::copy(good.join(WEIGHTS), partial.join(WEIGHTS)).unwrap();
        let removed = folder.join(".step-000003.partial-removed");
        fs::create_dir(&removed).unwrap();
        fs::write(removed.join(WEIGHTS), b"half").unwrap();
        fs::create_dir(folder.join("step-000003")).unwrap();
        assert_eq!(latest(folder).unwrap(), Some(good));
        run.set_progress(3, 3, None).unwrap();
        let next = save(&run, folder, json!(null), 0).unwrap();
        assert_eq!(names(folder), ["step-000002", "step-000003"]);
        assert_eq!(latest(folder).unwrap(), Some(next));
    }

    #[test]
    fn the_newest_stay_and_steps_count_as_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let mut run = trainer(CONFIG, 1);
        for step in [9, 10, 999_999, 1_000_000] {
            run.set_progress(step, step, None).unwrap();
            save(&run, folder.path(), json!(null), 2).unwrap();
        }
        assert_eq!(names(folder.path()), ["step-1000000", "step-999999"]);
        assert_eq!(latest(folder.path()).unwrap(), Some(folder.path().join("step-1000000")));
    }
}
