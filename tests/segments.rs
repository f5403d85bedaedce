//! Segments that run twice: what they do besides, and what happens when they are not the same the second time.

mod common;

use std::{cell::Cell, sync::Arc};

use common::{batch, bits, device, device_with, small, tiny_windows, trainer_on};
use ebbtide::{
    engine::{
        Batch, DropoutSite, Engine, Error, Init, LossInto, ParametersBuilder, Result, Tape, TokenBatch,
        gpt2::Gpt2Config,
        plan::{StepShape, least_budget, plan, sized},
    },
    kernels::{Category, Device, Op, SimOptions, Slice, op::CustomOp, op::GeluKind},
    offload::{Expression, OffloadOptions, policy::Builtin},
};

/// `statistics[0] += 1; statistics[1] = 0.9 · statistics[1] + 0.1 · mean(x)`.
struct UpdateStatistics;

impl CustomOp for UpdateStatistics {
    fn name(&self) -> &str {
        "update_statistics"
    }
    fn run_cpu(&self, inputs: &[&[u8]], outputs: &mut [&mut [u8]]) -> Result<(), String> {
        let floats = |bytes: &[u8]| -> Vec<f32> {
            bytes.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect()
        };
        let (x, old) = (floats(inputs[0]), floats(outputs[0]));
        let mean = x.iter().sum::<f32>() / x.len() as f32;
        let new = [old[0] + 1.0, 0.9 * old[1] + 0.1 * mean];
        outputs[0].copy_from_slice(&new.map(f32::to_ne_bytes).concat());
        Ok(())
    }
}

/// One pass of a model with one segment, whose body is `inside`.
fn pass(
    device: &Device,
    policy: &str,
    options: OffloadOptions,
    inside: impl Fn(&mut Tape<'_>, &Slice, ebbtide::engine::Tensor) -> Result<ebbtide::engine::Tensor>,
) -> Result<(Vec<f32>, Vec<f32>)> {
    let policy: Expression = policy.parse().unwrap();
    let engine = Engine::new(device, Box::new(policy), options)?;
    let mut builder = ParametersBuilder::default();
    builder.add("wte", &[5, 8], Init::Normal { deviation: 1.0 });
    builder.add("wpe", &[4, 8], Init::Normal { deviation: 1.0 });
    let parameters = builder.build(&engine, 1, true)?;
    let (wte, wpe) = (parameters.get("wte")?, parameters.get("wpe")?);
    let compute = engine.compute().clone();
    let statistics = compute.upload(&[0f32, 0.0], Category::Weights, "statistics")?;
    let up = |values: &[u32]| compute.upload(values, Category::Staging, "tokens");
    let targets = Some(compute.upload(&[1i32, 2, 3, 4], Category::Staging, "targets")?);
    let batch = TokenBatch { tokens: up(&[0, 1, 2, 3])?, targets, batch: 1, context: 4 };
    let sum = compute.upload(&[0f32], Category::Workspace, "loss")?;
    let mut tape = Tape::train(&engine, 1, 1);
    let x = tape.embedding(&batch, &wte, &wpe, DropoutSite::default())?;
    let (inside, of_step) = (&inside, &statistics);
    let y = tape.segment("body", x, move |tape, x| inside(tape, of_step, x))?;
    let loss = tape.head_loss(&y, &wte, &batch, &LossInto { sum, weight: 0.25, loss_scale: None })?;
    drop(y);
    tape.backward(loss)?;
    let gradients = parameters.gradients().expect("a trained model").clone();
    Ok((compute.download(&statistics)?, compute.download(&gradients)?))
}

#[test]
fn running_statistics_are_updated_once_under_recompute() {
    let inside = |tape: &mut Tape<'_>, statistics: &Slice, x: ebbtide::engine::Tensor| {
        let (input, out) = (x.slice().clone(), statistics.clone());
        tape.once("statistics", |engine| {
            let op =
                Op::Custom { custom: Arc::new(UpdateStatistics), inputs: vec![input], outputs: vec![out] };
            Ok(engine.compute().submit(op)?)
        })?;
        tape.gelu(x, GeluKind::Tanh)
    };
    let sim = || Device::sim(SimOptions::default()).unwrap();
    let expected = pass(&sim(), "keep", tiny_windows(), inside).unwrap();
    assert_eq!(expected.0[0], 1.0);
    for policy in ["recompute", "offload", "keep or recompute", "body: recompute"] {
        assert_eq!(pass(&sim(), policy, tiny_windows(), inside).unwrap(), expected, "{policy}");
    }
    // Also where the first try of a segment ran out of memory after it had updated them.
    let mut tried = 0;
    for n in 0..60 {
        let device = Device::sim(SimOptions { fail_alloc: Some(n), ..SimOptions::default() }).unwrap();
        if let Ok(found) = pass(&device, "keep or recompute", tiny_windows(), inside) {
            assert_eq!(found, expected, "allocation {n}");
            tried += 1;
        }
    }
    assert!(tried > 0);
}

#[test]
fn a_segment_that_is_not_reproducible_is_an_error_that_names_it() {
    // Another shape.
    let runs = Cell::new(0);
    let other_shape = |tape: &mut Tape<'_>, _: &Slice, x: ebbtide::engine::Tensor| {
        runs.set(runs.get() + 1);
        let slice = x.slice().clone();
        let x = tape.gelu(x, GeluKind::Tanh)?;
        if runs.get() == 1 { Ok(x) } else { tape.constant(slice.part(0..8)?, &[1, 1, 8]) }
    };
    let error = pass(&device(), "recompute", tiny_windows(), other_shape).unwrap_err();
    assert!(matches!(&error, Error::NotReproducible { segment, .. } if segment == "body"));
    assert!(
        error.to_string().contains("`body` is not reproducible: its output was of shape [1, 4, 8]"),
        "{error}"
    );

    // Other values: seen where that is asked for.
    let runs = Cell::new(0);
    let other_values = |tape: &mut Tape<'_>, _: &Slice, x: ebbtide::engine::Tensor| {
        runs.set(runs.get() + 1);
        tape.gelu(x, if runs.get() == 1 { GeluKind::Tanh } else { GeluKind::Erf })
    };
    let verified = || OffloadOptions { verify_recompute: true, ..tiny_windows() };
    let error = pass(&device(), "recompute", verified(), other_values).unwrap_err();
    assert!(error.to_string().contains("segment `body` is not reproducible"), "{error}");
    assert!(error.to_string().contains("checksum"), "{error}");
    // A segment that is reproducible passes, with the same bits.
    let same = |tape: &mut Tape<'_>, _: &Slice, x: ebbtide::engine::Tensor| tape.gelu(x, GeluKind::Tanh);
    let expected = pass(&device(), "keep", tiny_windows(), same).unwrap();
    assert_eq!(pass(&device(), "recompute", verified(), same).unwrap(), expected);
}

/// Under a budget that holds what a few blocks save, those run once and the rest twice, with the same bits; the plan knows.
#[test]
fn segments_are_recomputed_where_the_budget_has_no_room() {
    let shape = StepShape {
        model: Gpt2Config { layers: 6, ..small(0.1) },
        batch: 4,
        context: 16,
        accumulate: 1,
        offload_optimizer: false,
        numerics: Default::default(),
    };
    let options = tiny_windows();
    let window: Vec<Batch> = vec![batch(&shape.model, 4, 16, 3)];
    let windows = vec![window.clone(), window];
    let cpu = |budget_bytes| device_with(None, budget_bytes);
    let mut kept = trainer_on(&cpu(None), Builtin::Keep.policy(), options.clone(), shape.model).unwrap();
    let expected = bits(&mut kept, &windows).unwrap();
    let policy: Expression = "keep or recompute".parse().unwrap();
    let keep = least_budget(&shape, Builtin::Keep, &options).unwrap();
    let least = least_budget(&shape, policy.clone(), &options).unwrap();
    assert!(least < keep, "{least} < {keep}");
    let mut counts = Vec::new();
    for budget in [least, (least + keep) / 2, keep] {
        let device = cpu(Some(budget));
        let options = sized(&shape, policy.clone(), &options, Some(budget)).unwrap();
        let mut trainer =
            trainer_on(&device, Box::new(policy.clone()), options.clone(), shape.model).unwrap();
        assert_eq!(bits(&mut trainer, &windows).unwrap(), expected);
        let planned = plan(&shape, policy.clone(), &options, Some(budget)).unwrap().offload;
        let found = trainer.engine().offload().report().fallbacks.to_recompute;
        assert_eq!(found, 2 * planned.fallbacks.to_recompute, "two steps beside one");
        counts.push(planned.recomputed_segments);
    }
    assert!(counts[0] > counts[1] && counts[1] > 0 && counts[2] == 0, "{counts:?}");
}

/// Rounding draws from a generator of its own: dropout's masks, and so the loss, are those of every other policy.
#[test]
fn dropout_is_the_same_under_every_policy_and_stochastic_rounding() {
    let config = Gpt2Config { width: 64, ..small(0.3) };
    let window = [batch(&config, 2, 16, 1), batch(&config, 2, 16, 2)];
    let run = |policy: &str| {
        let policy: Expression = policy.parse().unwrap();
        let options = common::with_disk(tiny_windows());
        let mut trainer = trainer_on(&device(), Box::new(policy), options, config).unwrap();
        trainer.step(&window).unwrap().loss
    };
    let expected = run("keep");
    for policy in [
        "recompute",
        "rerun",
        "offload",
        "offload disk",
        "int8",
        "int8~",
        "int8~1",
        "offload int8~2",
        "offload int8/64~3 disk",
        "h.0: recompute, h.1: int8~9, h.2: offload bf16 disk",
    ] {
        assert_eq!(run(policy), expected, "{policy}");
    }
    // Of the same seed rounding is the same too, and of another it is not.
    let gradients = |policy: &str| {
        let policy: Expression = policy.parse().unwrap();
        let mut trainer = trainer_on(&device(), Box::new(policy), tiny_windows(), config).unwrap();
        trainer.step(&window).unwrap();
        let gradients = trainer.model().parameters().gradients().unwrap().clone();
        trainer.engine().compute().download::<f32>(&gradients).unwrap()
    };
    assert!(gradients("int8~1") == gradients("offload int8~1"));
    assert!(gradients("int8~1") != gradients("int8~2"));
}
