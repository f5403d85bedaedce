//! The optimizer's moments in host memory: the same bits, less of the device.

mod common;

use common::{batch, bits, small, tiny_windows};
use ebbtide::{
    engine::{
        Engine, Trainer, TrainerOptions, checkpoint,
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

fn trainer(device: &Device, config: Gpt2Config, offload_optimizer: bool) -> Trainer {
    let engine = Engine::new(device, Builtin::Offload.policy(), tiny_windows()).unwrap();
    let model = Gpt2::new(&engine, config, 3, true).unwrap();
    let optimizer = AdamWOptions::default();
    let options = TrainerOptions {
        optimizer,
        schedule: Schedule::constant(1e-2),
        seed: 1,
        offload_optimizer,
        loss_scale: Default::default(),
    };
    Trainer::new(&engine, model, options).unwrap()
}

#[test]
fn moments_in_host_memory_give_the_same_bits() {
    for (config, slow) in
        [(wide(), vec![]), (wide(), vec!["optimizer in", "optimizer out"]), (small(0.1), vec![])]
    {
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
        let mut kept = trainer(&device(), config, false);
        let expected = bits(&mut kept, &windows).unwrap();
        let on_sim = device();
        let mut offloaded = trainer(&on_sim, config, true);
        assert_eq!(bits(&mut offloaded, &windows).unwrap(), expected);
        assert_eq!(on_sim.memory().current_of(Category::Optimizer), 0);
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
    let device = || Device::cpu().unwrap();
    let mut unbroken = trainer(&device(), config, false);
    let losses: Vec<f32> = (0..6).map(|i| step(&mut unbroken, i)).collect();
    for (first, then) in [(true, false), (false, true)] {
        let mut begun = trainer(&device(), config, first);
        for i in 0..3 {
            step(&mut begun, i);
        }
        let folder = folder.path().join(first.to_string());
        let saved = checkpoint::save(&begun, &folder, serde_json::Value::Null, 0).unwrap();
        let mut resumed = trainer(&device(), config, then);
        checkpoint::load(&mut resumed, &saved).unwrap();
        assert_eq!((3..6).map(|i| step(&mut resumed, i)).collect::<Vec<_>>(), losses[3..]);
    }
}

#[test]
fn the_device_holds_eight_bytes_a_parameter_less() {
    let model = Gpt2Config::named("gpt2").unwrap();
    let peak = |offload_optimizer| {
        let shape = StepShape {
            model,
            batch: 1,
            context: 1024,
            accumulate: 1,
            offload_optimizer,
            numerics: Default::default(),
        };
        plan(&shape, Builtin::Recompute, &tiny_windows(), None).unwrap().memory.peak_bytes
    };
    let saved = peak(false) - peak(true);
    let most = 8 * model.parameters();
    assert!(saved > most - most / 50 && saved < most + most / 50, "{saved} of {most}");
}
