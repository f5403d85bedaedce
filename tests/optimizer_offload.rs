//! The optimizer's moments in host memory: the same bits, less of the device.

mod common;

use common::{batch, bits, device, small, tiny_windows};
use ebbtide::{
    engine::{
        Engine, Numerics, Precision, Trainer, TrainerOptions, checkpoint,
        gpt2::{Gpt2, Gpt2Config},
        optimizer::{AdamWOptions, Schedule},
        plan::{StepShape, plan},
    },
    kernels::{Category, Device, SimOptions},
    offload::policy::Builtin,
};

/// Several chunks of parameters, and little to compute.
fn wide() -> Gpt2Config {
    Gpt2Config { vocabulary: 9000, width: 512, heads: 2, layers: 1, ..small(0.1) }
}

fn trainer(device: &Device, config: Gpt2Config, precision: Precision, offload_optimizer: bool) -> Trainer {
    let numerics = Numerics { precision, residual_f32: false };
    let engine = Engine::with_numerics(device, Builtin::Offload.policy(), tiny_windows(), numerics)
        .unwrap()
        .offload_optimizer(offload_optimizer);
    let model = Gpt2::new(&engine, config, 3, true).unwrap();
    let optimizer = AdamWOptions::default();
    let options = TrainerOptions {
        optimizer,
        schedule: Schedule::constant(1e-2),
        seed: 1,
        loss_scale: Default::default(),
    };
    Trainer::new(&engine, model, options).unwrap()
}

#[test]
fn moments_in_host_memory_give_the_same_bits() {
    let slow_both = vec!["optimizer in", "optimizer out"];
    for (config, precision, slow) in [
        (wide(), Precision::F32, vec![]),
        (wide(), Precision::F32, slow_both.clone()),
        (small(0.1), Precision::F32, vec![]),
        (wide(), Precision::F16, slow_both),
        (small(0.1), Precision::BF16, vec![]),
    ] {
        let windows: Vec<_> = (0..3).map(|i| vec![batch(&config, 1, 4, i)]).collect();
        let slow_streams = slow.into_iter().map(str::to_string).collect();
        let device = || {
            Device::sim(SimOptions {
                seed: 4,
                slow_streams: Vec::clone(&slow_streams),
                ..SimOptions::default()
            })
            .unwrap()
        };
        let mut kept = trainer(&device(), config, precision, false);
        let expected = bits(&mut kept, &windows).unwrap();
        let on_sim = device();
        let mut offloaded = trainer(&on_sim, config, precision, true);
        assert_eq!(bits(&mut offloaded, &windows).unwrap(), expected);
        // The loss scale stays, and the f32 weights only where products read them.
        assert!(on_sim.memory().current_of(Category::Optimizer) < 1024);
        let (all, matrices) =
            (offloaded.model().parameters().flat_len(), offloaded.model().parameters().decayed().len());
        let on_device =
            if precision == Precision::F32 { 4 * all } else { 2 * matrices + 4 * (all - matrices) };
        // Up to what the allocator rounds by.
        assert!(on_sim.memory().current_of(Category::Weights) - on_device < 512);
        let [kept, offloaded] = [&kept, &offloaded].map(|trainer| {
            let moments = trainer.optimizer().moments();
            moments.map(|moment| moment.read(trainer.engine(), 0..moment.len()).unwrap())
        });
        assert!(kept == offloaded, "the moments themselves");
    }
}

/// Where they are is no part of a run: saved from one place, loaded to the other.
#[test]
fn checkpoints_do_not_depend_on_where_moments_are() {
    let folder = tempfile::tempdir().unwrap();
    let config = small(0.1);
    let step = |trainer: &mut Trainer, i| trainer.step(&[batch(&config, 2, 16, i)]).unwrap().loss;
    let mut unbroken = trainer(&device(), config, Precision::F16, false);
    let losses: Vec<f32> = (0..6).map(|i| step(&mut unbroken, i)).collect();
    for (first, then) in [(true, false), (false, true)] {
        let mut begun = trainer(&device(), config, Precision::F16, first);
        for i in 0..3 {
            step(&mut begun, i);
        }
        let folder = folder.path().join(first.to_string());
        let saved = checkpoint::save(&begun, &folder, serde_json::Value::Null, 0).unwrap();
        let mut resumed = trainer(&device(), config, Precision::F16, then);
        checkpoint::load(&mut resumed, &saved).unwrap();
        assert_eq!((3..6).map(|i| step(&mut resumed, i)).collect::<Vec<_>>(), losses[3..]);
    }
}

#[test]
fn the_device_holds_eight_or_twelve_bytes_a_parameter_less() {
    let model = Gpt2Config::named("gpt2").unwrap();
    for (precision, bytes) in [(Precision::F32, 8), (Precision::F16, 12)] {
        let numerics = Numerics { precision, residual_f32: false };
        let peak = |offload_optimizer| {
            let shape =
                StepShape { model, batch: 1, context: 1024, accumulate: 1, offload_optimizer, numerics };
            plan(&shape, Builtin::Recompute, &tiny_windows(), None).unwrap().memory.peak_bytes
        };
        let saved = peak(false) - peak(true);
        let most = bytes * model.parameters();
        assert!(saved > most - most / 50 && saved < most + most / 50, "{precision}: {saved} of {most}");
    }
}
