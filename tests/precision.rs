//! Training in 16 bits: what needs a loss scale, what overflows and how it is said, and what it costs.

mod common;

use std::rc::Rc;

use common::{batch, device, set_parameter, small, tiny_windows, trainer_in};
use ebbtide::{
    engine::{
        Batch, CustomLayer, Engine, Error, LossInto, Numerics, Precision, Result, Tape, TokenBatch, Trainer,
        TrainerOptions,
        autocast::Class,
        generate::{SampleOptions, generate},
        gpt2::{Gpt2, Gpt2Config},
        optimizer::{AdamWOptions, Schedule},
        plan::{StepShape, plan},
        scaler::LossScalerOptions,
    },
    kernels::{Category, DType, Op, Slice, Stream},
    offload::{Expression, OffloadOptions, policy::Builtin},
};

const F16: Numerics = Numerics { precision: Precision::F16, residual_f32: false };
const F16_STREAM: Numerics = Numerics { precision: Precision::F16, residual_f32: true };

fn engine(policy: &str, numerics: Numerics) -> Engine {
    let policy: Expression = policy.parse().unwrap();
    Engine::with_numerics(&device(), Box::new(policy), tiny_windows(), numerics).unwrap()
}

fn trainer_of(engine: &Engine, model: Gpt2, rate: f32, loss_scale: LossScalerOptions) -> Trainer {
    let (optimizer, schedule) = (AdamWOptions::default(), Schedule::constant(rate));
    Trainer::new(engine, model, TrainerOptions { optimizer, schedule, seed: 5, loss_scale }).unwrap()
}

/// p / targets = 1 / 50,257 / 2,457 = 8e-9 is less than half of f16's least number, 6e-8: without a scale the gradients of all
/// tokens but the targets are 0, and with it none is.
#[test]
fn without_a_loss_scale_the_tail_of_the_gradients_is_zero() {
    let config = Gpt2Config { vocabulary: 50_257, context: 64, width: 16, layers: 1, heads: 2, ..small(0.0) };
    let window = [batch(&Gpt2Config { vocabulary: 100, ..config }, 48, 64, 1)];
    let zeros = |initial: f32| {
        let engine = engine("keep", F16);
        let model = Gpt2::new(&engine, config, 3, true).unwrap();
        let options = LossScalerOptions { initial, ..LossScalerOptions::default() };
        let mut trainer = trainer_of(&engine, model, 1e-3, options);
        trainer.accumulate(&window, 1.0 / window[0].target_count() as f32).unwrap();
        let table = trainer.model().parameters().get("transformer.wte.weight").unwrap().gradient.unwrap();
        let gradients = engine.compute().download::<f32>(&table).unwrap();
        // Of tokens that are neither input nor target.
        gradients[100 * 16..].iter().filter(|&&g| g == 0.0).count()
    };
    let tail = (50_257 - 100) * 16;
    assert_eq!(zeros(1.0), tail);
    assert_eq!(zeros(65_536.0), 0);
}

/// Two blocks each add 40,000 to the residual stream: more than f16's 65,504 together.
fn with_a_large_stream(engine: &Engine) -> Gpt2 {
    let model = Gpt2::new(engine, small(0.0), 3, true).unwrap();
    for block in [0, 2] {
        set_parameter(engine, &model, &format!("transformer.h.{block}.mlp.c_proj.bias"), 40_000.0);
    }
    model
}

#[test]
fn a_stream_that_overflows_is_named_and_trains_in_f32() {
    let window = [batch(&small(0.0), 2, 16, 1)];
    for policy in ["keep", "recompute", "offload"] {
        let engine = engine(policy, F16);
        let options = LossScalerOptions { initial: 1.0, patience: 2, ..LossScalerOptions::default() };
        let mut trainer = trainer_of(&engine, with_a_large_stream(&engine), 1e-2, options);
        assert!(trainer.step(&window).unwrap().skipped);
        match trainer.step(&window) {
            Err(Error::Overflow { skips: 2, first: Some(first), .. }) => {
                assert!(first.starts_with("h.2/mlp/"), "{policy}: {first}");
            }
            other => panic!("{policy}: {other:?}"),
        }
        assert_eq!(engine.offload().live(), 0);

        let engine = self::engine(policy, F16_STREAM);
        let mut trainer =
            trainer_of(&engine, with_a_large_stream(&engine), 1e-2, LossScalerOptions::default());
        let losses: Vec<f32> = (0..12).map(|_| trainer.step(&window).unwrap().loss).collect();
        assert!(losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
        assert!(losses[11] < losses[0] - 0.5, "{losses:?}");
    }
}

/// An infinity inside of an activation that goes out as int8 spoils the gradients, as it would have from memory.
#[test]
fn an_overflow_inside_an_offloaded_int8_activation_is_seen() {
    let window = [batch(&small(0.0), 2, 16, 1)];
    for policy in ["keep", "offload int8", "int8", "offload disk"] {
        let engine = engine(policy, F16);
        let model = Gpt2::new(&engine, small(0.0), 3, true).unwrap();
        set_parameter(&engine, &model, "transformer.h.1.mlp.c_fc.bias", 1e5);
        let options = LossScalerOptions { initial: 1.0, patience: 1, ..LossScalerOptions::default() };
        let mut trainer = trainer_of(&engine, model, 1e-2, options);
        match trainer.step(&window) {
            Err(Error::Overflow { first: Some(first), .. }) => {
                assert_eq!(first, "h.1/mlp/linear", "{policy}")
            }
            other => panic!("{policy}: {other:?}"),
        }
    }
}

/// The gradient alone comes from the int8 copy here: the forward pass is finite and so is its loss.
#[test]
fn what_int8_brings_back_not_finite_skips_the_update() {
    let config = small(0.0);
    let engine = engine("offload int8", F16);
    let model = Gpt2::new(&engine, config, 3, true).unwrap();
    let mut trainer = trainer_of(&engine, model, 1e-2, LossScalerOptions::default());
    let before = trainer.model().parameters().weights().to_vec(&engine).unwrap();
    let window = [batch(&config, 2, 16, 1)];
    // A scale at which the gradients overflow on their way back, past activations that are 8 bits wide.
    let huge = ebbtide::engine::scaler::ScalerState {
        scale: 2f32.powi(30),
        growth: 0,
        overflows: 0,
        at_floor: 0,
        applied: 0,
        skipped: 0,
    };
    trainer.set_progress(0, 0, Some(&huge)).unwrap();
    let report = trainer.step(&window).unwrap();
    assert!(report.skipped && report.loss.is_finite(), "{report:?}");
    assert_eq!(trainer.model().parameters().weights().to_vec(&engine).unwrap(), before);
}

#[test]
fn evaluation_and_sampling_name_what_is_not_finite() {
    for numerics in [F16, Numerics { precision: Precision::BF16, residual_f32: false }] {
        let engine = engine("keep", numerics);
        let model = Gpt2::new(&engine, small(0.0), 3, true).unwrap();
        set_parameter(&engine, &model, "transformer.h.1.attn.c_attn.bias", f32::INFINITY);
        let mut trainer = trainer_of(&engine, model, 1e-2, LossScalerOptions::default());
        let expected = "the first tensor that is not finite is `h.1/attn/linear`";
        let error = trainer.evaluate(&[batch(&small(0.0), 2, 16, 1)]).unwrap_err();
        assert!(matches!(&error, Error::NotFinite { what: "the loss", .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
        let options = SampleOptions { tokens: 3, temperature: 1.0, top_k: 0, seed: 0 };
        let error = generate(&engine, trainer.model(), &[1, 2], &options, &mut |_| true).unwrap_err();
        assert!(matches!(&error, Error::NotFinite { what: "a logit", .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
}

/// bf16 has f32's range: the scale is 1 and stays so, and a step that is not finite is skipped all the same.
#[test]
fn bf16_has_a_scale_of_one() {
    let numerics = Numerics { precision: Precision::BF16, residual_f32: false };
    let engine = engine("keep", numerics);
    let model = Gpt2::new(&engine, small(0.0), 3, true).unwrap();
    let options = LossScalerOptions { interval: 1, ..LossScalerOptions::default() };
    let mut trainer = trainer_of(&engine, model, 1e-2, options);
    for i in 0..4 {
        let state = trainer.step(&[batch(&small(0.0), 2, 16, i)]).unwrap().scaler.unwrap();
        assert_eq!((state.scale, state.applied), (1.0, i as u32 + 1));
    }
    set_parameter(&engine, trainer.model(), "transformer.ln_f.bias", f32::NAN);
    let report = trainer.step(&[batch(&small(0.0), 2, 16, 9)]).unwrap();
    assert!(report.skipped);
    assert_eq!(report.scaler.unwrap().scale, 1.0);
}

/// Learning is learning: the losses of a few steps stay near f32's.
#[test]
fn every_precision_learns() {
    let window = [batch(&small(0.0), 4, 16, 1)];
    let losses = |numerics| -> Vec<f32> {
        let (policy, options) = (Builtin::Offload.policy(), tiny_windows());
        let mut trainer = trainer_in(&device(), policy, options, small(0.0), numerics).unwrap();
        (0..15).map(|_| trainer.step(&window).unwrap().loss).collect()
    };
    let expected = losses(Numerics::default());
    assert!(expected[14] < expected[0] - 1.0, "{expected:?}");
    for precision in [Precision::F16, Precision::BF16] {
        for residual_f32 in [false, true] {
            let found = losses(Numerics { precision, residual_f32 });
            for (found, expected) in found.iter().zip(&expected) {
                let most = if precision == Precision::F16 { 5e-3 } else { 3e-2 };
                assert!((found - expected).abs() < most, "{precision}: {found} and {expected}");
            }
        }
    }
}

/// Gradients accumulate in f32 as they do without: a window of four holds no more than a little over one micro-batch.
#[test]
fn accumulation_costs_little_memory_and_equals_the_large_batch() {
    let model = Gpt2Config::named("gpt2").unwrap();
    let peak = |accumulate| {
        let shape =
            StepShape { model, batch: 2, context: 1024, accumulate, offload_optimizer: false, numerics: F16 };
        plan(&shape, Builtin::Keep, &OffloadOptions::default(), None).unwrap().memory.peak_bytes as f64
    };
    let ratio = peak(4) / peak(1);
    assert!(ratio <= 1.1, "{ratio}");

    let config = small(0.0);
    let whole = batch(&config, 32, 16, 3);
    let part = |i: usize| {
        let range = i * 8 * 16..(i + 1) * 8 * 16;
        let targets = whole.targets[range.clone()].to_vec();
        Batch { tokens: whole.tokens[range].to_vec(), targets, batch: 8, context: 16 }
    };
    let parts: Vec<Batch> = (0..4).map(part).collect();
    let gradients = |window: &[Batch]| {
        let engine = engine("keep", F16);
        let model = Gpt2::new(&engine, config, 3, true).unwrap();
        let mut trainer = trainer_of(&engine, model, 1e-2, LossScalerOptions::default());
        trainer.step(window).unwrap();
        engine.compute().download::<f32>(trainer.model().parameters().gradients().unwrap()).unwrap()
    };
    let (found, expected) = (gradients(&parts), gradients(std::slice::from_ref(&whole)));
    let norm =
        |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let difference = norm(&mut found.iter().zip(&expected).map(|(a, b)| a - b));
    // Rows of a batch do not meet but in sums over it, which are in f32.
    assert!(difference <= 1e-5 * norm(&mut expected.iter().copied()), "{difference}");
}

/// Twice its input, whose gradient is twice the output's.
struct Doubled(Option<Class>);

impl CustomLayer for Doubled {
    fn name(&self) -> &str {
        "doubled"
    }
    fn class(&self) -> Option<Class> {
        self.0
    }
    fn output(&self, inputs: &[&[usize]]) -> std::result::Result<Vec<usize>, String> {
        match inputs {
            [one] => Ok(one.to_vec()),
            _ => Err("one input".to_string()),
        }
    }
    fn forward(&self, stream: &Stream, inputs: &[Slice], out: &Slice) -> ebbtide::kernels::Result<()> {
        stream.submit(Op::Copy { input: inputs[0].clone(), out: out.clone() })?;
        stream.submit(Op::Add { input: inputs[0].clone(), out: out.clone() })
    }
    fn backward(
        &self,
        stream: &Stream,
        _: &[Slice],
        dout: &Slice,
        dinputs: &[Slice],
    ) -> ebbtide::kernels::Result<()> {
        self.forward(stream, std::slice::from_ref(dout), &dinputs[0])
    }
}

/// Gradients of the embedding under a layer, and the type that the layer's output has.
fn through(layer: Rc<Doubled>, engine: &Engine) -> Result<(DType, Vec<f32>)> {
    let config = small(0.0);
    let model = Gpt2::new(engine, config, 3, true)?;
    let of_step = batch(&config, 2, 16, 1);
    let tokens = engine.compute().upload(&of_step.tokens, Category::Staging, "tokens")?;
    let targets = Some(engine.compute().upload(&of_step.targets, Category::Staging, "targets")?);
    let batch = TokenBatch { tokens, targets, batch: 2, context: 16 };
    let sum = engine.device().alloc(1, DType::F32, Category::Workspace, "loss")?;
    engine.compute().submit(Op::Fill { out: sum.clone(), value: 0.0 })?;
    let mut tape = Tape::train(engine, 0, 1);
    let hidden = model.hidden(&mut tape, &batch)?;
    let doubled = tape.custom(layer, &[hidden])?;
    let dtype = doubled.slice().dtype();
    let table = model.parameters().get("transformer.wte.weight")?;
    let loss = tape.head_loss(&doubled, &table, &batch, &LossInto { sum, weight: 1.0, loss_scale: None })?;
    drop(doubled);
    tape.backward(loss)?;
    let gradients = model.parameters().gradients().expect("a trained model");
    Ok((dtype, engine.compute().download(gradients)?))
}

#[test]
fn a_layer_of_ones_own_says_what_it_computes_in() {
    let (_, expected) = through(Rc::new(Doubled(None)), &engine("keep", Numerics::default())).unwrap();
    for (class, dtype, notes) in [
        (Some(Class::Narrow), DType::F16, 0),
        (Some(Class::Input), DType::F16, 0),
        (Some(Class::Full), DType::F32, 0),
        (None, DType::F32, 1),
    ] {
        for policy in ["keep", "offload", "recompute"] {
            let engine = engine(policy, F16);
            for _ in 0..2 {
                let (found, gradients) = through(Rc::new(Doubled(class)), &engine).unwrap();
                assert_eq!(found, dtype, "{class:?}");
                let square =
                    |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>().sqrt();
                let off = square(&mut gradients.iter().zip(&expected).map(|(a, b)| a - b));
                assert!(off < 1e-2 * square(&mut expected.iter().copied()), "{class:?}: {off}");
            }
            assert_eq!(engine.notes().len(), notes, "{class:?}: {:?}", engine.notes());
        }
    }
    let engine = engine("keep", F16);
    through(Rc::new(Doubled(None)), &engine).unwrap();
    assert_eq!(engine.notes(), ["layer `doubled` states no precision class: it computes in f32"]);
}

/// GPT-2 124M at B = 8, T = 1024 in f16, in bytes of the device: the same code as a step, without its memory.
#[test]
fn sixteen_bit_training_fits_where_it_is_said_to() {
    let model = Gpt2Config::named("gpt2").unwrap();
    let total = |policy: &str, offload_optimizer| {
        let policy: Expression = policy.parse().unwrap();
        let shape =
            StepShape { model, batch: 8, context: 1024, accumulate: 1, offload_optimizer, numerics: F16 };
        let planned = plan(&shape, policy, &OffloadOptions::default(), None).unwrap();
        planned.memory.peak_bytes as f64 / f64::from(1 << 30)
    };
    for (policy, offload_optimizer, most) in [
        ("keep", false, 4.5),
        ("rerun", false, 3.7),
        ("int8, *gelu.output: rerun", false, 3.0),
        ("recompute", false, 2.6),
        ("recompute, h.*/input: offload", false, 2.5),
        ("recompute, h.*/input: offload", true, 1.1),
    ] {
        let total = total(policy, offload_optimizer);
        assert!(total <= most, "{policy}: {total:.2} GiB");
    }
}
