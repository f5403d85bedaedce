//! A run that is saved and goes on ends bitwise where the unbroken run ends; a bad checkpoint changes nothing.

mod common;

use std::{fs, path::Path};

use common::{batch, device, small, tiny_windows, trainer_in, trainer_on};
use ebbtide::{
    engine::{Numerics, Precision, Trainer, checkpoint, gpt2::Gpt2Config, hugging_face},
    offload::policy::Builtin,
};
use serde_json::json;

fn trainer(config: Gpt2Config, policy: Builtin) -> Trainer {
    trainer_on(&device(), policy.policy(), tiny_windows(), config).unwrap()
}

fn trainer_at(precision: Precision, policy: Builtin) -> Trainer {
    let numerics = Numerics { precision, residual_f32: false };
    trainer_in(&device(), policy.policy(), tiny_windows(), small(0.1), numerics).unwrap()
}

fn train(trainer: &mut Trainer, until: u64) -> Vec<u32> {
    let config = *trainer.model().config();
    let step = |trainer: &mut Trainer| {
        let at = trainer.steps_done();
        trainer.step(&[batch(&config, 2, 16, at), batch(&config, 1, 16, 100 + at)]).unwrap().loss.to_bits()
    };
    (trainer.steps_done()..until).map(|_| step(trainer)).collect()
}

fn weights(trainer: &Trainer) -> Vec<u32> {
    let weights = trainer.model().parameters().weights();
    weights.to_vec(trainer.engine()).unwrap().iter().map(|x| x.to_bits()).collect()
}

#[test]
fn resumed_runs_end_where_unbroken_ones_do() {
    let folder = tempfile::tempdir().unwrap();
    for (precision, policy, other) in [
        (Precision::F32, Builtin::Keep, Builtin::Offload),
        (Precision::F32, Builtin::Recompute, Builtin::Keep),
        (Precision::F16, Builtin::Offload, Builtin::Recompute),
        (Precision::BF16, Builtin::Keep, Builtin::Offload),
    ] {
        let folder = folder.path().join(format!("{precision}-{policy}"));
        let mut unbroken = trainer_at(precision, policy);
        let losses = train(&mut unbroken, 20);
        let mut first = trainer_at(precision, policy);
        train(&mut first, 10);
        let saved = checkpoint::save(&first, &folder, json!({"position": 20}), 0).unwrap();
        drop(first);
        // Another policy is another way to the same bits.
        let mut second = trainer_at(precision, other);
        train(&mut second, 3);
        let state = checkpoint::load(&mut second, &saved).unwrap();
        assert_eq!((state.steps_done, state.extra["position"].as_u64()), (10, Some(20)));
        assert_eq!(train(&mut second, 20), losses[10..]);
        assert_eq!(weights(&second), weights(&unbroken));
        let scale = |trainer: &Trainer| trainer.scaler().map(|s| s.state(trainer.engine()).unwrap());
        assert_eq!(scale(&second), scale(&unbroken));
    }
}

#[test]
fn round_trips_are_bitwise() {
    let folder = tempfile::tempdir().unwrap();
    let mut source = trainer(small(0.0), Builtin::Keep);
    train(&mut source, 2);
    let exported = folder.path().join("model");
    hugging_face::export(source.engine(), source.model(), &exported).unwrap();
    assert_eq!(hugging_face::read_config(&exported).unwrap(), small(0.0));
    let target = trainer(small(0.0), Builtin::Keep);
    hugging_face::load_weights(target.engine(), target.model().parameters(), &exported).unwrap();
    assert_eq!(weights(&target), weights(&source));
    let again = hugging_face::export(source.engine(), source.model(), &exported).unwrap_err().to_string();
    assert!(again.contains("exists already"), "{again}");
}

#[test]
fn the_newest_whole_checkpoint_counts() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    assert_eq!(checkpoint::latest(&folder.join("none")).unwrap(), None);
    let mut run = trainer(small(0.0), Builtin::Keep);
    for step in 1..=4 {
        train(&mut run, step);
        checkpoint::save(&run, folder, json!(null), 2).unwrap();
    }
    let names = |folder: &Path| {
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    assert_eq!(names(folder), ["step-000003", "step-000004"]);
    // What a kill in the middle of a save leaves is neither taken for a checkpoint nor kept for long.
    let partial = folder.join(".step-000009.partial-1");
    fs::create_dir(&partial).unwrap();
    fs::write(partial.join("weights.safetensors"), b"half").unwrap();
    fs::create_dir(folder.join("step-000008")).unwrap();
    assert_eq!(checkpoint::latest(folder).unwrap(), Some(folder.join("step-000004")));
    train(&mut run, 5);
    checkpoint::save(&run, folder, json!(null), 2).unwrap();
    assert!(!partial.exists());
    // Saved twice, the first stays.
    let path = checkpoint::save(&run, folder, json!("other"), 2).unwrap();
    assert_eq!(checkpoint::read_state(&path).unwrap().extra, json!(null));
}

#[test]
fn bad_checkpoints_are_errors_that_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut source = trainer(small(0.0), Builtin::Keep);
    train(&mut source, 2);
    let good = checkpoint::save(&source, folder.path(), json!(null), 0).unwrap();
    let mut target = trainer(small(0.0), Builtin::Keep);
    train(&mut target, 1);
    let before = weights(&target);
    let mut check = |name: &str, damage: &dyn Fn(&Path), expected: &str| {
        let bad = folder.path().join("bad");
        let _ = fs::remove_dir_all(&bad);
        fs::create_dir(&bad).unwrap();
        for file in ["weights.safetensors", "optimizer.safetensors", "state.json"] {
            fs::copy(good.join(file), bad.join(file)).unwrap();
        }
        damage(&bad.join(name));
        let error = checkpoint::load(&mut target, &bad).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(expected), "{name}: {error}");
        assert_eq!((weights(&target), target.steps_done()), (before.clone(), 1), "{name}: {error}");
    };
    let cut = |share: f64| {
        move |path: &Path| {
            let len = fs::metadata(path).unwrap().len();
            let file = fs::OpenOptions::new().write(true).open(path).unwrap();
            file.set_len((len as f64 * share) as u64).unwrap();
        }
    };
    for share in [0.0, 0.001, 0.5, 0.999] {
        for name in ["weights.safetensors", "optimizer.safetensors"] {
            check(name, &cut(share), "cut short");
        }
        check("state.json", &cut(share), "cut short");
    }
    let flip = |path: &Path| {
        let mut bytes = fs::read(path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    check("weights.safetensors", &flip, "changed since it was saved");
    check("optimizer.safetensors", &flip, "changed since it was saved");
    check("optimizer.safetensors", &|path| fs::remove_file(path).unwrap(), "cannot open");
    let edit = |path: &Path| {
        let text = fs::read_to_string(path).unwrap();
        fs::write(path, text.replace("\"format\": 1", "\"format\": 7")).unwrap();
    };
    check("state.json", &edit, "of format 7: expected 1");

    let wider = Gpt2Config { width: 32, ..small(0.0) };
    let error = checkpoint::load(&mut trainer(wider, Builtin::Keep), &good).unwrap_err().to_string();
    assert!(error.contains("width is 24 in the checkpoint, 32 in the model"), "{error}");
}
