//! Lossy codecs: the loss is exact, gradients are near, and what decides is the codec alone, never where or when bytes move.

mod common;

use common::{batch, device, small, tiny_windows, trainer_on};
use ebbtide::{
    engine::{
        Batch, Trainer,
        gpt2::Gpt2Config,
        plan::{StepShape, plan},
    },
    kernels::{Device, SimOptions},
    offload::{Expression, OffloadOptions},
};

fn config() -> Gpt2Config {
    Gpt2Config { width: 64, context: 32, ..small(0.1) }
}

fn window() -> Vec<Batch> {
    (0..2).map(|i| batch(&config(), 3, 32, i)).collect()
}

fn trainer(device: &Device, policy: &str, options: OffloadOptions) -> Trainer {
    let policy: Expression = policy.parse().unwrap();
    trainer_on(device, Box::new(policy), options, config()).unwrap()
}

/// The loss and the gradients of one window.
fn gradients(mut trainer: Trainer) -> (f32, Vec<f32>) {
    let loss = trainer.step(&window()).unwrap().loss;
    let gradients = trainer.model().parameters().gradients().unwrap().clone();
    (loss, trainer.engine().compute().download::<f32>(&gradients).unwrap())
}

#[test]
fn the_codec_alone_decides() {
    let exact = OffloadOptions { min_bytes: 0, ..OffloadOptions::default() };
    for codec in ["f16", "bf16", "int8", "int8/64", "int8/256"] {
        let expected = gradients(trainer(&device(), codec, exact.clone()));
        let offload = format!("offload {codec}");
        for options in [exact.clone(), tiny_windows()] {
            assert!(gradients(trainer(&device(), &offload, options)) == expected, "{offload}");
        }
        // The simulation computes what the CPU does.
        if device().backend_name() != "cpu" {
            continue;
        }
        let slow_streams = vec!["offload out".to_string(), "offload in".to_string()];
        let sim = Device::sim(SimOptions { seed: 3, slow_streams, ..SimOptions::default() }).unwrap();
        assert!(gradients(trainer(&sim, &offload, tiny_windows())) == expected, "{offload} in simulation");
    }
}

#[test]
fn the_loss_is_exact_and_gradients_are_near() {
    let exact = OffloadOptions { min_bytes: 0, ..OffloadOptions::default() };
    let (loss, expected) = gradients(trainer(&device(), "keep", exact.clone()));
    let norm =
        |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let error = |policy: &str| {
        let (found_loss, found) = gradients(trainer(&device(), policy, exact.clone()));
        assert_eq!(found_loss, loss, "{policy}: forward is not touched");
        norm(&mut found.iter().zip(&expected).map(|(a, b)| a - b)) / norm(&mut expected.iter().copied())
    };
    // An element is off by at most 2^-12 of itself in f16, 2^-9 in bf16, and 1/254 of its group's largest in int8, of which a
    // typical element is a third; errors of a sum's terms add up as their root.
    for (policy, most) in [("offload f16", 1e-3), ("bf16", 5e-3), ("offload int8", 3e-2), ("int8/64", 3e-2)] {
        let error = error(policy);
        assert!(error > 0.0 && error <= most, "{policy}: {error:.1e}");
    }
    assert!(error("int8/64") < error("int8/256"), "smaller groups are finer");
}

#[test]
fn an_overflow_is_not_hidden() {
    let mut trainer = trainer(&device(), "offload int8", tiny_windows());
    let weight = trainer.model().parameters().get("transformer.h.1.mlp.c_fc.bias").unwrap().value;
    let one = weight.part(3..4).unwrap();
    let infinity = ebbtide::kernels::Op::Fill { out: one, value: f32::INFINITY };
    trainer.engine().compute().submit(infinity).unwrap();
    let report = trainer.step(&window()).unwrap();
    assert!(!report.gradient_norm.is_finite(), "{}", report.gradient_norm);
}

#[test]
fn bytes_shrink_as_the_codec_says() {
    let shape = StepShape {
        model: config(),
        batch: 4,
        context: 32,
        accumulate: 1,
        offload_optimizer: false,
        numerics: Default::default(),
    };
    let options = tiny_windows();
    let report =
        |policy: &str| plan(&shape, policy.parse::<Expression>().unwrap(), &options, None).unwrap().offload;
    let int8 = report("offload int8");
    // 1 byte and 4 of 128, of 4.
    let ratio = int8.plain_bytes as f64 / int8.encoded_bytes as f64;
    assert!((ratio - 4.0 / (1.0 + 4.0 / 128.0)).abs() < 0.02, "{ratio}");
    assert_eq!(int8.out_bytes() + int8.held_bytes, int8.encoded_bytes);
    assert_eq!(report("f16").encoded_bytes * 2, report("f16").plain_bytes);
    assert_eq!((report("int8").out_bytes(), report("int8").in_bytes()), (0, 0));
    assert_eq!(report("keep").plain_bytes, 0);
}
