//! The budget is a promise, and what a step needs is known before it runs.

mod common;

use common::{batch, bits, device, device_error, device_with, small, tiny_windows, trainer_in, trainer_on};
use ebbtide::{
    engine::{
        Batch, Numerics, Precision,
        gpt2::Gpt2Config,
        plan::{StepShape, least_budget, nearest_fit, plan},
    },
    kernels::{Device, Error, SimOptions},
    offload::{Expression, OffloadOptions, policy::Builtin},
};

fn shape(config: Gpt2Config) -> StepShape {
    StepShape {
        model: config,
        batch: 4,
        context: 16,
        accumulate: 2,
        offload_optimizer: false,
        numerics: Default::default(),
    }
}

fn window(shape: &StepShape) -> Vec<Batch> {
    (0..shape.accumulate).map(|i| batch(&shape.model, shape.batch, shape.context, i as u64)).collect()
}

fn budgeted(bytes: usize) -> Device {
    device_with(None, Some(bytes))
}

#[test]
fn a_plan_is_exact() {
    let lossy = ["offload int8", "int8, *gelu.output: rerun", "recompute, h.*/input: offload"];
    let policies = Builtin::ALL.map(|policy| policy.to_string()).into_iter();
    let policies: Vec<String> = policies.chain(lossy.map(str::to_string)).collect();
    let combinations = Precision::ALL.into_iter().flat_map(|p| [(p, false), (p, true)]);
    for ((precision, residual_f32), policy) in
        combinations.flat_map(|numerics| policies.iter().map(move |policy| (numerics, policy)))
    {
        let numerics = Numerics { precision, residual_f32 };
        let shape = StepShape { numerics, ..shape(small(0.1)) };
        let policy: Expression = policy.parse().unwrap();
        for options in [OffloadOptions::default(), tiny_windows()] {
            let planned = plan(&shape, policy.clone(), &options, None).unwrap();
            let boxed = Box::new(policy.clone());
            let mut trainer = trainer_in(&device(), boxed, options.clone(), shape.model, numerics).unwrap();
            let window = window(&shape);
            trainer.step(&window).unwrap();
            trainer.engine().offload().take_report();
            trainer.step(&window).unwrap();
            let report = trainer.engine().offload().report();
            trainer.evaluate(&window[..1]).unwrap();
            let memory = trainer.engine().device().memory();
            assert_eq!(memory.peak_bytes, planned.memory.peak_bytes, "{precision}, {policy}");
            assert_eq!(memory.at_peak, planned.memory.at_peak, "{precision}, {policy}");
            assert_eq!(memory.extent_bytes, planned.memory.extent_bytes, "{precision}, {policy}");
            assert_eq!(report, planned.offload, "{precision}, {policy}");
        }
    }
}

#[test]
fn the_least_budget_trains_with_the_same_bits_and_less_does_not_fit() {
    let shape = shape(small(0.1));
    let windows = vec![window(&shape), window(&shape)];
    let options = OffloadOptions { min_bytes: 0, ..OffloadOptions::default() };
    let mut free = trainer_on(&device(), Builtin::Keep.policy(), options.clone(), shape.model).unwrap();
    let expected = bits(&mut free, &windows).unwrap();
    for policy in Builtin::ALL {
        let least = least_budget(&shape, policy, &options).unwrap();
        let device = budgeted(least);
        let mut trainer = trainer_on(&device, policy.policy(), options.clone(), shape.model).unwrap();
        assert_eq!(bits(&mut trainer, &windows).unwrap(), expected, "{policy}");
        assert!(device.memory().extent_bytes <= least, "{policy}");

        let device = budgeted(least - 4096);
        let result =
            trainer_on(&device, policy.policy(), options.clone(), shape.model).and_then(|mut trainer| {
                let result = bits(&mut trainer, &windows);
                assert_eq!(trainer.engine().offload().live(), 0);
                result
            });
        match device_error(result) {
            Err(Error::OutOfMemory(facts)) => {
                assert_eq!(facts.budget_bytes, least - 4096);
                assert!(!facts.name.is_empty() && facts.bytes > 0 && !facts.largest.is_empty(), "{facts}");
            }
            other => panic!("{policy}: expected to run out of memory, found {other:?}"),
        }
        assert_eq!(device.memory().current_bytes, 0, "{policy}: something was left behind");
    }
}

#[test]
fn policies_save_memory() {
    let shape = StepShape { batch: 16, accumulate: 1, ..shape(Gpt2Config { layers: 8, ..small(0.0) }) };
    let options = tiny_windows();
    let least = |policy| least_budget(&shape, policy, &options).unwrap();
    let (keep, offload, recompute) =
        (least(Builtin::Keep), least(Builtin::Offload), least(Builtin::Recompute));
    assert!(offload < keep && recompute < keep, "keep {keep}, offload {offload}, recompute {recompute}");

    let fit = nearest_fit(&shape, keep - 4096, &options).unwrap().unwrap();
    assert_eq!((fit.batch, fit.accumulate), (16, 1));
    assert_ne!(fit.policy, Builtin::Keep);
    let fit = nearest_fit(&shape, offload.min(recompute) - 4096, &options).unwrap().unwrap();
    assert_eq!(fit.batch * fit.accumulate, 16);
    assert!(fit.batch < 16 && fit.budget_bytes <= offload.min(recompute) - 4096);
    assert_eq!(nearest_fit(&shape, 4096, &options).unwrap(), None);
}

/// Each allocation and each op fails in turn: always an error, never a leak, and a device that goes on.
#[test]
fn every_fault_is_an_error_that_leaves_nothing() {
    let config = Gpt2Config { layers: 2, ..small(0.1) };
    let window = [batch(&config, 1, 5, 0)];
    for policy in Builtin::ALL {
        let run = |options: SimOptions| {
            let device = Device::sim(options).unwrap();
            let result =
                trainer_on(&device, policy.policy(), tiny_windows(), config).and_then(|mut trainer| {
                    let first = trainer.step(&window);
                    assert_eq!(trainer.engine().offload().live(), 0, "{policy}");
                    // One fault is one failure: the device is whole again.
                    if first.is_err() {
                        trainer.step(&window).unwrap();
                    }
                    first
                });
            // A fault while the trainer was made has not been taken yet.
            let rest = device.synchronize();
            assert_eq!(device.memory().current_bytes, 0, "{policy}: something was left behind");
            let ops: u64 = device.op_counts().values().map(|count| count.count).sum();
            let loss = device_error(result).map(|report| report.loss).and_then(|loss| rest.map(|()| loss));
            (loss, device.memory().allocations, ops)
        };
        let (expected, allocations, ops) = run(SimOptions::default());
        assert!(expected.is_ok() && allocations > 50 && ops > 80, "{allocations} allocations, {ops} ops");
        let mut failed = 0;
        for n in 0..allocations {
            match run(SimOptions { fail_alloc: Some(n), ..SimOptions::default() }).0 {
                Err(error) => {
                    assert!(matches!(error, Error::OutOfMemory(_)), "{error}");
                    failed += 1;
                }
                // The runtime gave up a copy that it held without need, and tried again.
                relieved => {
                    assert!(policy == Builtin::Offload && relieved == expected, "{policy}: {relieved:?}")
                }
            }
        }
        assert!(failed > 20, "{policy}: {failed} of {allocations} allocations");
        for n in 0..ops {
            let error = run(SimOptions { fail_op: Some(n), ..SimOptions::default() }).0.unwrap_err();
            assert!(matches!(error, Error::OpFailed { .. }), "{error}");
        }
    }
}
