//! A policy moves bytes, never bits.

mod common;

use common::{
    Mixed, batch, bits, configs, device, device_with, numerics, small, tiny_windows, trainer_in, trainer_on,
};
use ebbtide::{
    engine::{
        Batch, Numerics, Precision,
        gpt2::Gpt2Config,
        plan::{StepShape, plan},
    },
    kernels::{Device, SimOptions},
    offload::{OffloadOptions, Policy, policy::Builtin},
};
use proptest::prelude::*;

fn policies(mix: u64) -> Vec<Box<dyn Policy>> {
    let mut policies: Vec<Box<dyn Policy>> = Builtin::ALL.map(Builtin::policy).into();
    policies.extend((0..3).map(|i| Box::new(Mixed(mix.wrapping_add(i))) as Box<dyn Policy>));
    policies
}

/// Two steps of two micro-batches.
fn windows(config: &Gpt2Config, sequences: usize, seed: u64) -> Vec<Vec<Batch>> {
    let micro = |i| batch(config, sequences, config.context, seed.wrapping_add(i));
    vec![vec![micro(0), micro(1)], vec![micro(2), micro(3)]]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if std::env::var_os("EBBTIDE_SOAK").is_some() { 2000 } else { 48 }))]

    #[test]
    fn every_policy_gives_the_same_bits(
        config in configs(), numerics in numerics(), sequences in 1usize..4, seed: u64, mix: u64,
    ) {
        let windows = windows(&config, sequences, seed);
        let keep = Builtin::Keep.policy();
        let mut reference = trainer_in(&device(), keep, OffloadOptions::default(), config, numerics).unwrap();
        let expected = bits(&mut reference, &windows).unwrap();
        for (i, policy) in policies(mix).into_iter().enumerate() {
            let options = if i % 2 == 0 { tiny_windows() } else { OffloadOptions { min_bytes: 0, ..Default::default() } };
            let mut trainer = trainer_in(&device(), policy, options, config, numerics).unwrap();
            prop_assert_eq!(&bits(&mut trainer, &windows).unwrap(), &expected, "policy {}", i);
            prop_assert_eq!(trainer.engine().offload().live(), 0);
        }
    }

    /// The copies as late as can be, and every access checked.
    #[test]
    fn slow_copies_change_nothing(config in configs(), numerics in numerics(), seed: u64, mix: u64) {
        let windows = windows(&config, 1, seed);
        let keep = Builtin::Keep.policy();
        let mut reference = trainer_in(&Device::cpu().unwrap(), keep, OffloadOptions::default(), config, numerics).unwrap();
        let expected = bits(&mut reference, &windows).unwrap();
        let slow = [vec![], vec!["offload out"], vec!["offload in"], vec!["offload out", "offload in", "upload"]];
        for (policy, slow) in policies(mix).into_iter().zip(slow.iter().cycle()) {
            let slow_streams = slow.iter().map(|name| name.to_string()).collect();
            let device = Device::sim(SimOptions { seed: mix, slow_streams, ..SimOptions::default() }).unwrap();
            let mut trainer = trainer_in(&device, policy, tiny_windows(), config, numerics).unwrap();
            prop_assert_eq!(&bits(&mut trainer, &windows).unwrap(), &expected, "slow {:?}", slow);
        }
    }
}

#[test]
fn thread_counts_give_the_same_bits() {
    // Wide enough that the kernels cut their work.
    let config = Gpt2Config { width: 96, context: 64, vocabulary: 999, ..small(0.1) };
    let windows = windows(&config, 3, 1);
    for precision in Precision::ALL {
        let numerics = Numerics { precision, residual_f32: false };
        let run = |threads| {
            let device = device_with(Some(threads), None);
            let (policy, options) = (Builtin::Offload.policy(), OffloadOptions::default());
            bits(&mut trainer_in(&device, policy, options, config, numerics).unwrap(), &windows).unwrap()
        };
        let expected = run(1);
        for threads in [2, 3, 7] {
            assert_eq!(run(threads), expected, "{precision}, {threads} threads");
        }
    }
}

/// Four micro-batches of 8 give what one of 32 gives, with ragged targets, up to the order of the sums.
#[test]
fn accumulation_weighs_targets_not_batches() {
    let config = small(0.0);
    let whole = batch(&config, 32, 16, 3);
    let part = |i: usize| {
        let range = i * 8 * 16..(i + 1) * 8 * 16;
        let targets = whole.targets[range.clone()].to_vec();
        Batch { tokens: whole.tokens[range].to_vec(), targets, batch: 8, context: 16 }
    };
    let mut parts: Vec<Batch> = (0..4).map(part).collect();
    // As ragged as can be: one micro-batch has a single target.
    let mut whole = whole.clone();
    parts[2].targets[1..].fill(-100);
    whole.targets[2 * 8 * 16 + 1..3 * 8 * 16].fill(-100);
    let gradients = |window: &[Batch]| {
        let mut trainer =
            trainer_on(&device(), Builtin::Keep.policy(), OffloadOptions::default(), config).unwrap();
        let loss = trainer.step(window).unwrap().loss;
        let gradients = trainer.model().parameters().gradients().unwrap().clone();
        (loss, trainer.engine().compute().download::<f32>(&gradients).unwrap())
    };
    let (loss, expected) = gradients(&[whole]);
    let (loss_of_parts, found) = gradients(&parts);
    // Sums of 512 products in two orders: √512 · 2^-24 relative, with room for what cancels.
    assert!((loss - loss_of_parts).abs() <= 1e-6 * loss, "{loss} and {loss_of_parts}");
    let norm =
        |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let difference = norm(&mut found.iter().zip(&expected).map(|(a, b)| a - b));
    assert!(difference <= 1e-5 * norm(&mut expected.iter().copied()), "{difference}");
}

/// A forward pass that nobody takes back leaves nothing.
#[test]
fn an_abandoned_step_leaves_nothing() {
    use ebbtide::{
        engine::{LossInto, Tape, TokenBatch},
        kernels::{Category, DType, Op},
    };
    let config = small(0.1);
    for policy in Builtin::ALL {
        let mut trainer = trainer_on(&device(), policy.policy(), tiny_windows(), config).unwrap();
        let of_step = batch(&config, 2, 16, 1);
        trainer.step(std::slice::from_ref(&of_step)).unwrap();
        let engine = trainer.engine().clone();
        engine.device().synchronize().unwrap();
        let before = engine.device().memory();
        {
            let tokens = engine.compute().upload(&of_step.tokens, Category::Staging, "tokens").unwrap();
            let targets = engine.compute().upload(&of_step.targets, Category::Staging, "targets").unwrap();
            let sum = engine.device().alloc(1, DType::F32, Category::Workspace, "loss").unwrap();
            engine.compute().submit(Op::Fill { out: sum.clone(), value: 0.0 }).unwrap();
            let batch = TokenBatch { tokens, targets: Some(targets), batch: 2, context: 16 };
            let mut tape = Tape::train(&engine, 0, 9);
            trainer
                .model()
                .loss(&mut tape, &batch, &LossInto { sum, weight: 1.0, loss_scale: None })
                .unwrap();
            assert!(engine.offload().live() > 0);
        }
        assert_eq!(engine.offload().live(), 0, "{policy}");
        engine.device().synchronize().unwrap();
        assert_eq!(engine.device().memory().current_bytes, before.current_bytes, "{policy}");
    }
}

/// GPT-2 124M at B = 4, T = 1024: a block saves 14 tensors' worth of C a token (x, qkv, attention's output, the residual
/// after it, and both sides of GELU at 4 C each: 1 + 3 + 1 + 1 + 4 + 4), 56 C bytes, and 4 + heads statistics.
#[test]
fn keep_all_saves_at_most_64_c_bytes_a_token_and_layer() {
    let model = Gpt2Config::named("gpt2").unwrap();
    let shape = StepShape {
        model,
        batch: 4,
        context: 1024,
        accumulate: 1,
        offload_optimizer: false,
        numerics: Default::default(),
    };
    let saved =
        plan(&shape, Builtin::Keep, &OffloadOptions::default(), None).unwrap().offload.saved_bytes as usize;
    let (tokens, width, layers) = (4 * 1024, model.width, model.layers);
    let block = 56 * width + 4 * (4 + model.heads);
    // The last norm keeps what it normalised and two statistics.
    let head = 4 * width + 8;
    assert_eq!(saved, tokens * (layers * block + head));
    assert!(saved <= tokens * layers * 64 * width);
}
