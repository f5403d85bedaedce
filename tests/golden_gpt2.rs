//! GPT-2 against reference values: logits, every gradient, five AdamW steps.
//!
//! Cases are folders of `tests/golden`, or of the folder that `EBBTIDE_GOLDEN_DIR` names. Each holds the weights, one
//! batch, and what a reference implementation gave in f32: see `tests/golden/README.md`.

mod common;

use std::{collections::BTreeMap, fs, path::PathBuf};

use ebbtide::{
    engine::{
        Batch, Engine, Numerics, Precision, Tape, TokenBatch, Trainer, TrainerOptions,
        gpt2::{Gpt2, Gpt2Config},
        hugging_face,
        optimizer::{AdamWOptions, Schedule},
    },
    kernels::Category,
    offload::{OffloadOptions, policy::Builtin},
};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// f32 sums in another order than the reference's.
const TOLERANCE: f64 = 1e-4;
/// After five steps of AdamW, which divides by the root of a squared gradient.
const FINAL_TOLERANCE: f64 = 1e-3;

type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

struct Case {
    folder: PathBuf,
    meta: Value,
    config: Gpt2Config,
    batch: Batch,
    expected: Tensors,
}

fn cases() -> Vec<Case> {
    let root = common::golden_folder();
    let mut folders: Vec<PathBuf> = fs::read_dir(&root)
        .unwrap_or_else(|e| panic!("{}: {e}", root.display()))
        .map(|e| e.unwrap().path())
        .collect();
    folders.sort();
    let cases: Vec<Case> = folders.into_iter().filter_map(case).collect();
    assert!(!cases.is_empty(), "no GPT-2 case in {}", root.display());
    cases
}

/// `None` for what is not a GPT-2 case.
fn case(folder: PathBuf) -> Option<Case> {
    let meta: Value = serde_json::from_slice(&fs::read(folder.join("case.json")).ok()?).unwrap();
    let note = &meta["note"];
    if note["family"] != "gpt2" {
        return None;
    }
    let size = |key: &str| note[key].as_u64().unwrap_or_else(|| panic!("no {key}")) as usize;
    let config = Gpt2Config {
        vocabulary: size("vocab_size"),
        context: size("n_positions"),
        width: size("n_embd"),
        layers: size("n_layer"),
        heads: size("n_head"),
        dropout: 0.0,
        exact_gelu: !note["gelu"].as_str().unwrap().contains("tanh"),
        epsilon: note["layer_norm_eps"].as_f64().unwrap() as f32,
    };
    let bytes = fs::read(folder.join("inputs.safetensors")).unwrap();
    let inputs = SafeTensors::deserialize(&bytes).unwrap();
    let integers = |name: &str| -> Vec<i64> {
        let tensor = inputs.tensor(name).unwrap();
        assert_eq!(tensor.dtype(), Dtype::I64);
        tensor.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let shape = inputs.tensor("input_ids").unwrap().shape().to_vec();
    let batch = Batch {
        tokens: integers("input_ids").iter().map(|&id| u32::try_from(id).unwrap()).collect(),
        targets: integers("targets").iter().map(|&id| i32::try_from(id).unwrap()).collect(),
        batch: shape[0],
        context: shape[1],
    };
    let expected = floats(&fs::read(folder.join("expected.safetensors")).unwrap());
    Some(Case { folder, meta, config, batch, expected })
}

fn floats(bytes: &[u8]) -> Tensors {
    let tensors = SafeTensors::deserialize(bytes).unwrap();
    let float =
        |data: &[u8]| data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    tensors.iter().map(|(name, t)| (name.to_string(), (t.shape().to_vec(), float(t.data())))).collect()
}

/// `‖a − b‖ / ‖b‖`.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |x: f64| x * x;
    let difference: f64 = a.iter().zip(b).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
    let norm: f64 = b.iter().map(|&b| square(f64::from(b))).sum();
    (difference / norm.max(f64::MIN_POSITIVE)).sqrt()
}

fn close(case: &Case, what: &str, found: &[f32], expected: &[f32], tolerance: f64) {
    let distance = distance(found, expected);
    assert!(
        distance <= tolerance,
        "{}: {what} is {distance:.2e} off, over {tolerance:.0e}",
        case.folder.display()
    );
}

fn trainer(case: &Case, policy: Builtin) -> Trainer {
    trainer_at(case, policy, Precision::F32)
}

fn trainer_at(case: &Case, policy: Builtin, precision: Precision) -> Trainer {
    let options = OffloadOptions { min_bytes: 0, ..Default::default() };
    let numerics = Numerics { precision, residual_f32: false };
    let engine = Engine::with_numerics(&common::device(), policy.policy(), options, numerics).unwrap();
    let model = Gpt2::new(&engine, case.config, 0, true).unwrap();
    hugging_face::load_weights(&engine, model.parameters(), &case.folder.join("weights.safetensors"))
        .unwrap();
    let settings = &case.meta["optimizer"];
    assert_eq!(settings["kind"], "AdamW");
    let float = |value: &Value| value.as_f64().unwrap() as f32;
    let optimizer = AdamWOptions {
        beta1: float(&settings["betas"][0]),
        beta2: float(&settings["betas"][1]),
        epsilon: float(&settings["eps"]),
        weight_decay: float(&settings["weight_decay"]),
        clip: 0.0,
    };
    let options = TrainerOptions {
        optimizer,
        schedule: Schedule::constant(float(&settings["lr"])),
        seed: 0,
        loss_scale: Default::default(),
    };
    Trainer::new(&engine, model, options).unwrap()
}

/// Every parameter's part of a flat buffer holds what the reference has under `prefix`.
fn parameters_close(case: &Case, trainer: &Trainer, flat: &[f32], prefix: &str, tolerance: f64) {
    let mut seen = 0;
    for (name, shape, range) in trainer.model().parameters().iter() {
        let name = format!("{prefix}{name}");
        let (expected_shape, expected) = &case.expected[&name];
        assert_eq!(shape, expected_shape, "{name}");
        close(case, &name, &flat[range], expected, tolerance);
        seen += 1;
    }
    let expected = case.expected.keys().filter(|name| name.starts_with(prefix)).count();
    assert_eq!(seen, expected, "{}: parameters under {prefix}", case.folder.display());
}

#[test]
fn golden_gpt2_logits() {
    for case in cases() {
        let trainer = trainer(&case, Builtin::Keep);
        let engine = trainer.engine();
        let tokens = engine.compute().upload(&case.batch.tokens, Category::Staging, "tokens").unwrap();
        let batch =
            TokenBatch { tokens, targets: None, batch: case.batch.batch, context: case.batch.context };
        let mut tape = Tape::eval(engine);
        let logits = trainer.model().logits(&mut tape, &batch).unwrap();
        let (shape, expected) = &case.expected["logits"];
        assert_eq!(logits.shape(), shape);
        let logits = engine.compute().download::<f32>(logits.slice()).unwrap();
        close(&case, "logits", &logits, expected, TOLERANCE);
    }
}

#[test]
fn golden_gpt2_gradients() {
    for case in cases() {
        for policy in Builtin::ALL {
            let mut trainer = trainer(&case, policy);
            let weight = 1.0 / case.batch.target_count() as f32;
            trainer.accumulate(std::slice::from_ref(&case.batch), weight).unwrap();
            let gradients = trainer.model().parameters().gradients().unwrap().clone();
            let gradients = trainer.engine().compute().download::<f32>(&gradients).unwrap();
            parameters_close(&case, &trainer, &gradients, "grad.", TOLERANCE);
        }
    }
}

/// What 16 bits cost, of the f32 reference's gradients: 11 bits of precision, or 8.
#[test]
fn golden_gpt2_in_16_bits() {
    for case in cases() {
        for (precision, tolerance) in [(Precision::F16, 1e-2), (Precision::BF16, 2e-2)] {
            let mut trainer = trainer_at(&case, Builtin::Keep, precision);
            let weight = 1.0 / case.batch.target_count() as f32;
            trainer.accumulate(std::slice::from_ref(&case.batch), weight).unwrap();
            let engine = trainer.engine();
            let loss = engine.compute().download::<f32>(trainer.loss_slice()).unwrap();
            let expected = case.meta["losses"][0].as_f64().unwrap() as f32;
            close(&case, "the loss", &loss, &[expected], tolerance / 10.0);
            let scale = trainer.scaler().unwrap().state(engine).unwrap().scale;
            let gradients = trainer.model().parameters().gradients().unwrap().clone();
            let gradients = engine.compute().download::<f32>(&gradients).unwrap();
            let unscaled: Vec<f32> = gradients.into_iter().map(|g| g / scale).collect();
            parameters_close(&case, &trainer, &unscaled, "grad.", tolerance);
        }
    }
}

#[test]
fn golden_gpt2_training() {
    for case in cases() {
        for policy in Builtin::ALL {
            let mut trainer = trainer(&case, policy);
            let losses = case.meta["losses"].as_array().unwrap();
            let norms = case.meta["grad_norms"].as_array().unwrap();
            assert!(!losses.is_empty() && losses.len() == norms.len());
            for (loss, norm) in losses.iter().zip(norms) {
                let report = trainer.step(std::slice::from_ref(&case.batch)).unwrap();
                close(&case, "the loss", &[report.loss], &[loss.as_f64().unwrap() as f32], TOLERANCE);
                close(
                    &case,
                    "the norm",
                    &[report.gradient_norm],
                    &[norm.as_f64().unwrap() as f32],
                    TOLERANCE,
                );
            }
            let weights = trainer.model().parameters().weights().to_vec(trainer.engine()).unwrap();
            parameters_close(&case, &trainer, &weights, "final.", FINAL_TOLERANCE);
        }
    }
}
