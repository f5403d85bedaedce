//! The dynamic loss scale: PyTorch's figures, a plain model of the rules, and the holes that are known of other scalers.

mod common;

use std::fs;

use common::{batch, device, golden_folder, set_parameter, small, trainer_in};
use ebbtide::{
    engine::{
        Engine, Error, Init, Numerics, Parameters, ParametersBuilder, Precision, Trainer, TrainerOptions,
        gpt2::Gpt2,
        optimizer::{AdamW, AdamWOptions, Schedule},
        scaler::{LossScaler, LossScalerOptions, ScalerState},
    },
    kernels::{Category, DType, Device, SimOptions, Slice},
    offload::{OffloadOptions, policy::Builtin},
};
use proptest::prelude::*;
use serde_json::Value;

const F16: Numerics = Numerics { precision: Precision::F16, residual_f32: false };

fn engine_on(device: &Device) -> Engine {
    Engine::with_numerics(device, Builtin::Keep.policy(), OffloadOptions::default(), F16).unwrap()
}

/// A scaler, and gradients that it is given.
struct Bench {
    engine: Engine,
    scaler: LossScaler,
    sum_squares: Slice,
}

/// What one window came to.
struct Window {
    skipped: bool,
    unscaled: Vec<f32>,
}

impl Bench {
    fn new(device: &Device, options: LossScalerOptions) -> Self {
        let engine = engine_on(device);
        let scaler = LossScaler::new(&engine, options).unwrap();
        let sum_squares = device.alloc(1, DType::F32, Category::Workspace, "sum").unwrap();
        Bench { engine, scaler, sum_squares }
    }

    fn state(&self) -> ScalerState {
        self.scaler.state(&self.engine).unwrap()
    }

    /// Unscales what a backward pass left, and moves the scale.
    fn window(&self, scaled: &[f32]) -> Window {
        let compute = self.engine.compute();
        let gradients = compute.upload(scaled, Category::Gradients, "gradients").unwrap();
        let before = self.state();
        self.scaler.unscale(&self.engine, gradients.clone(), self.sum_squares.clone()).unwrap();
        self.scaler.update(&self.engine).unwrap();
        let skipped = self.state().skipped > before.skipped;
        assert_eq!(self.state().applied - before.applied, u32::from(!skipped), "applied or skipped");
        Window { skipped, unscaled: compute.download::<f32>(&gradients).unwrap() }
    }
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

/// Scale, counter and parameters after every step of `torch.amp.GradScaler` with SGD, exactly.
#[test]
fn golden_grad_scaler() {
    let runs: Value =
        serde_json::from_slice(&fs::read(golden_folder().join("grad_scaler.json")).unwrap()).unwrap();
    let runs = runs.as_array().unwrap();
    assert_eq!(runs.len(), 4);
    for run in runs {
        let float = |key: &str| run[key].as_f64().unwrap() as f32;
        let options = LossScalerOptions {
            initial: float("init_scale"),
            growth: float("growth_factor"),
            backoff: float("backoff_factor"),
            interval: run["growth_interval"].as_u64().unwrap() as u32,
            // PyTorch has none.
            floor: f32::MIN_POSITIVE,
            ..LossScalerOptions::default()
        };
        let bench = Bench::new(&device(), options);
        let (gradient, rate) = (floats(&run["grad"]), float("lr"));
        let mut parameters: Option<Vec<f32>> = None;
        for row in run["rows"].as_array().unwrap() {
            let scale = bench.state().scale;
            let mut scaled: Vec<f32> = gradient.iter().map(|g| g * scale).collect();
            let overflow = row["overflow"].as_bool().unwrap();
            if overflow {
                scaled[1] = f32::INFINITY;
            }
            let window = bench.window(&scaled);
            assert_eq!(window.skipped, overflow);
            let expected = floats(&row["p"]);
            match &mut parameters {
                Some(parameters) if !overflow => {
                    parameters.iter_mut().zip(&window.unscaled).for_each(|(p, g)| *p -= rate * g);
                }
                Some(_) => {}
                // The file does not say where they start.
                None => parameters = Some(expected.clone()),
            }
            let state = bench.state();
            assert_eq!(parameters.as_ref(), Some(&expected));
            assert_eq!(f64::from(state.scale), row["scale"].as_f64().unwrap());
            assert_eq!(u64::from(state.growth), row["growth_tracker"].as_u64().unwrap());
        }
    }
}

/// The rules, as plainly as they can be written.
#[derive(Clone, Copy, Debug)]
struct Model {
    options: LossScalerOptions,
    state: ScalerState,
}

impl Model {
    fn window(&mut self, overflow: bool) {
        let (options, state) = (self.options, &mut self.state);
        if overflow {
            state.skipped += 1;
            state.growth = 0;
            state.at_floor = if state.scale <= options.floor { state.at_floor + 1 } else { 0 };
            state.overflows += 1;
            if state.overflows >= options.hysteresis {
                state.scale = f32::max(state.scale * options.backoff, options.floor);
            }
        } else {
            state.applied += 1;
            state.at_floor = 0;
            state.growth += 1;
            if state.growth == options.interval {
                state.growth = 0;
                state.overflows = 0;
                if (state.scale * options.growth).is_finite() {
                    state.scale *= options.growth;
                }
            }
        }
    }
}

/// What one window's gradients hold.
#[derive(Clone, Copy, Debug)]
enum Spoiled {
    No,
    /// The scaled gradient at an index is this.
    At(usize, f32),
    /// The scaled gradient is finite, and dividing it by the scale overflows, if the scale is below 1.
    Unscaled(usize),
}

fn spoiled() -> impl Strategy<Value = Spoiled> {
    let value = prop_oneof![Just(f32::NAN), Just(f32::INFINITY), Just(f32::NEG_INFINITY)];
    prop_oneof![
        3 => Just(Spoiled::No),
        2 => (0usize..999, value).prop_map(|(i, x)| Spoiled::At(i, x)),
        1 => (0usize..999).prop_map(Spoiled::Unscaled),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if std::env::var_os("EBBTIDE_SOAK").is_some() { 20_000 } else { 200 }))]

    #[test]
    fn the_scale_follows_the_rules(
        (initial, floor) in (-40i32..40, -60i32..20).prop_map(|(a, b)| (2f32.powi(a.max(b)), 2f32.powi(b))),
        growth in prop_oneof![Just(1.0f32), Just(2.0), 1.0f32..1e30],
        backoff in prop_oneof![Just(0.5f32), Just(1.0), 1e-30f32..1.0],
        interval in 1u32..5,
        hysteresis in 1u32..4,
        windows in prop::collection::vec(spoiled(), 1..60),
        len in 1usize..1000,
        simulated: bool,
    ) {
        let options = LossScalerOptions { initial, floor, growth, backoff, interval, hysteresis, patience: 1000 };
        let start = ScalerState { scale: initial, growth: 0, overflows: 0, at_floor: 0, applied: 0, skipped: 0 };
        let mut model = Model { options, state: start };
        let device = if simulated { Device::sim(SimOptions::default()).unwrap() } else { device() };
        let bench = Bench::new(&device, options);
        for window in windows {
            let mut scaled: Vec<f32> = (0..len).map(|i| i as f32 * 1e-3 - 0.1).collect();
            match window {
                Spoiled::No => {}
                Spoiled::At(i, x) => scaled[i % len] = x,
                Spoiled::Unscaled(i) => scaled[i % len] = f32::MAX,
            }
            let inverse = (1.0 / f64::from(model.state.scale)) as f32;
            let finite = scaled.iter().all(|g| g.is_finite() && (g * inverse).is_finite());
            let found = bench.window(&scaled);
            model.window(!finite);
            prop_assert_eq!(found.skipped, !finite, "{:?}", window);
            prop_assert_eq!(bench.state(), model.state);
        }
    }
}

/// 166 overflows take PyTorch's scale from 65,536 to 0, where it stays.
#[test]
fn the_scale_never_reaches_zero_and_comes_back() {
    let bench = Bench::new(&device(), LossScalerOptions { interval: 2, ..LossScalerOptions::default() });
    for _ in 0..400 {
        assert!(bench.window(&[f32::INFINITY]).skipped);
    }
    let state = bench.state();
    assert_eq!((state.scale, state.skipped), (1.0, 400));
    // 16 halvings to the floor, then one overflow after another there.
    assert_eq!(state.at_floor, 400 - 16);
    for _ in 0..2 {
        assert!(!bench.window(&[1.0]).skipped);
    }
    assert_eq!((bench.state().scale, bench.state().at_floor), (2.0, 0));
}

#[test]
fn the_scale_never_reaches_infinity() {
    let options = LossScalerOptions { initial: 2f32.powi(126), interval: 1, ..LossScalerOptions::default() };
    let bench = Bench::new(&device(), options);
    for _ in 0..10 {
        assert!(!bench.window(&[1.0]).skipped);
    }
    assert_eq!(bench.state().scale, 2f32.powi(127));
}

/// Not flagged by a scaler that looks at scaled gradients alone: 1e30 · 1e20 = ∞.
#[test]
fn a_finite_scaled_gradient_whose_unscaled_value_overflows_is_skipped() {
    let options = LossScalerOptions { initial: 1e-20, floor: 1e-30, ..LossScalerOptions::default() };
    let bench = Bench::new(&device(), options);
    assert!(bench.window(&[1.0, 1e30]).skipped);
    assert!(!Bench::new(&device(), options).window(&[1.0, 1e10]).skipped);
}

/// Matrices and the rest, of which an update sees gradients `scale` times too large.
struct Updated {
    parameters: Parameters,
    engine: Engine,
    optimizer: AdamW,
    scaler: LossScaler,
}

impl Updated {
    fn new(scale: f32, clip: f32) -> Self {
        let engine = engine_on(&device());
        let mut builder = ParametersBuilder::default();
        builder.add("matrix", &[5, 7], Init::Normal { deviation: 1.0 });
        builder.add("bias", &[7], Init::Normal { deviation: 1.0 });
        let parameters = builder.build(&engine, 1, true).unwrap();
        let options = AdamWOptions { clip, ..AdamWOptions::default() };
        let optimizer = AdamW::new(&engine, &parameters, options).unwrap();
        let options = LossScalerOptions { initial: scale, ..LossScalerOptions::default() };
        let scaler = LossScaler::new(&engine, options).unwrap();
        Updated { parameters, engine, optimizer, scaler }
    }

    /// An update by these gradients, times the scale.
    fn update(&self, gradient: impl Fn(usize) -> f32, step: u64) {
        let scale = self.scaler.state(&self.engine).unwrap().scale;
        let all = self.parameters.gradients().unwrap();
        let values: Vec<f32> = (0..all.len()).map(|i| scale * gradient(i)).collect();
        let scaled = self.engine.compute().upload(&values, Category::Staging, "gradients").unwrap();
        let copy = ebbtide::kernels::Op::Copy { input: scaled, out: all.clone() };
        self.engine.compute().submit(copy).unwrap();
        self.optimizer.update(&self.engine, &self.parameters, 0.1, step, Some(&self.scaler)).unwrap();
    }

    fn bits(&self) -> Vec<u32> {
        let [first, second] = self.optimizer.moments();
        let flats = [self.parameters.weights(), first, second];
        flats.iter().flat_map(|flat| flat.to_vec(&self.engine).unwrap()).map(f32::to_bits).collect()
    }

    fn norm(&self) -> f32 {
        self.engine.compute().download::<f32>(self.optimizer.norm()).unwrap()[0]
    }
}

fn gradient(i: usize) -> f32 {
    (i as f32 * 0.37).sin()
}

/// A scale of a power of two is no part of an update, clipped or not: the clip and the norm see unscaled gradients.
#[test]
fn clipping_sees_unscaled_gradients() {
    for clip in [0.0, 0.5, 100.0] {
        let [plain, scaled] = [1.0, 65_536.0].map(|scale| {
            let updated = Updated::new(scale, clip);
            (1..4).for_each(|step| updated.update(gradient, step));
            (updated.bits(), updated.norm())
        });
        assert_eq!(plain, scaled, "clip {clip}");
        assert!(plain.1 > 0.5 && plain.1 < 100.0);
    }
}

/// An overflow anywhere skips the update everywhere, the other group of parameters included, and leaves every bit.
#[test]
fn an_overflow_in_one_part_of_the_gradients_skips_all() {
    for at in [0, 34, 64, 70] {
        let updated = Updated::new(1024.0, 1.0);
        updated.update(gradient, 1);
        let before = updated.bits();
        updated.update(|i| if i == at { f32::NEG_INFINITY } else { gradient(i) }, 2);
        assert_eq!(updated.bits(), before, "at {at}");
        assert_eq!(updated.scaler.state(&updated.engine).unwrap().scale, 512.0);
    }
}

/// The bias correction counts updates that were applied, whatever the host counts.
#[test]
fn a_skipped_update_does_not_advance_the_bias_correction() {
    let (skips, straight) = (Updated::new(1024.0, 1.0), Updated::new(1024.0, 1.0));
    for step in 1..6 {
        skips.update(|_| f32::NAN, step);
    }
    for updated in [&skips, &straight] {
        (6..9).for_each(|step| updated.update(gradient, step));
    }
    assert_eq!(skips.bits(), straight.bits());
}

fn gpt2_trainer(
    loss_scale: LossScalerOptions,
    schedule: Schedule,
    change: impl Fn(&Engine, &Gpt2),
) -> Trainer {
    let engine = engine_on(&device());
    let model = Gpt2::new(&engine, small(0.0), 11, true).unwrap();
    change(&engine, &model);
    let options = TrainerOptions { optimizer: AdamWOptions::default(), schedule, seed: 5, loss_scale };
    Trainer::new(&engine, model, options).unwrap()
}

/// A run whose first steps overflow ends bitwise where one ends that starts with the scale that they led to.
#[test]
fn skipped_steps_advance_neither_schedule_nor_moments() {
    let schedule = Schedule { peak: 1e-2, floor: 1e-3, warmup_steps: 4, decay_steps: 8 };
    let window = |i| vec![batch(&small(0.0), 2, 16, i)];
    let run = |initial: f32| {
        let options = LossScalerOptions { initial, ..LossScalerOptions::default() };
        let mut trainer = gpt2_trainer(options, schedule, |_, _| {});
        let mut skipped = 0;
        loop {
            let report = trainer.step(&window(0)).unwrap();
            if !report.skipped {
                break;
            }
            skipped += 1;
            assert_eq!((report.step, report.learning_rate), (skipped, schedule.rate(1)));
        }
        let rates: Vec<f32> = (1..6).map(|i| trainer.step(&window(i)).unwrap().learning_rate).collect();
        let weights = trainer.model().parameters().weights().to_vec(trainer.engine()).unwrap();
        let weights: Vec<u32> = weights.into_iter().map(f32::to_bits).collect();
        (skipped, trainer.scaler().unwrap().state(trainer.engine()).unwrap().scale, rates, weights)
    };
    let (skipped, scale, rates, weights) = run(2f32.powi(60));
    assert!(skipped > 20, "{skipped}");
    let (none, same_scale, same_rates, same_weights) = run(scale);
    assert_eq!((none, same_scale), (0, scale));
    assert_eq!((rates, weights), (same_rates, same_weights));
}

/// Four micro-batches are unscaled once, at the end, by the scale that all of them had.
#[test]
fn accumulation_unscales_once() {
    let parts: Vec<_> = (0..4).map(|i| batch(&small(0.0), 2, 16, i)).collect();
    let run = |numerics: Numerics| {
        let mut trainer =
            trainer_in(&device(), Builtin::Keep.policy(), OffloadOptions::default(), small(0.0), numerics)
                .unwrap();
        trainer.step(&parts).unwrap()
    };
    let (narrow, wide) = (run(F16), run(Numerics::default()));
    assert!((narrow.gradient_norm / wide.gradient_norm - 1.0).abs() < 2e-3, "{narrow:?} {wide:?}");
    let state = narrow.scaler.unwrap();
    assert_eq!((state.applied, state.growth, state.scale), (1, 1, 65_536.0));
}

/// Scales that would move within a window were the scale moved by micro-batches: one overflow in four spoils the window once.
#[test]
fn an_overflow_in_one_micro_batch_skips_the_window_once() {
    let options = LossScalerOptions { initial: 2f32.powi(40), ..LossScalerOptions::default() };
    let mut trainer = gpt2_trainer(options, Schedule::constant(1e-2), |_, _| {});
    let parts: Vec<_> = (0..4).map(|i| batch(&small(0.0), 2, 16, i)).collect();
    let report = trainer.step(&parts).unwrap();
    let state = report.scaler.unwrap();
    assert_eq!((report.skipped, state.skipped, state.scale), (true, 1, 2f32.powi(39)));
}

#[test]
fn skips_at_the_floor_stop_with_the_name_of_what_overflows() {
    let options = LossScalerOptions { initial: 4.0, patience: 3, ..LossScalerOptions::default() };
    let mut trainer = gpt2_trainer(options, Schedule::constant(1e-2), |engine, model| {
        set_parameter(engine, model, "transformer.h.1.mlp.c_fc.bias", 1e5);
    });
    let window = [batch(&small(0.0), 2, 16, 0)];
    // 4, 2, 1, then the floor itself three times.
    let mut steps = 0;
    let error = loop {
        match trainer.step(&window) {
            Ok(report) => assert!(report.skipped),
            Err(error) => break error,
        }
        steps += 1;
    };
    assert_eq!(steps, 2 + 2);
    let Error::Overflow { skips: 3, scale: 1.0, first: Some(first) } = &error else { panic!("{error}") };
    assert_eq!(first, "h.1/mlp/linear", "{error}");
    assert!(error.to_string().contains("h.1/mlp/linear"), "{error}");
}
