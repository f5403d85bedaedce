//! What the whole-system tests share: small models, random batches, and training under any policy.
#![allow(dead_code, unreachable_pub)] // Each test uses its part.

use ebbtide::{
    engine::{
        Batch, Engine, Numerics, Precision, Trainer, TrainerOptions,
        gpt2::{Gpt2, Gpt2Config},
        optimizer::{AdamWOptions, Schedule},
    },
    kernels::{Device, DeviceKind, DeviceOptions, Result},
    offload::{Activation, Codec, DiskOptions, OffloadOptions, Placement, Policy, Role, SegmentPlan, Tier},
};
use proptest::prelude::*;
use std::path::{Path, PathBuf};

/// A small GPT of any shape.
pub fn configs() -> impl Strategy<Value = Gpt2Config> {
    (2usize..40, 1usize..24, 1usize..4, 1usize..9, 1usize..4, any::<bool>(), any::<bool>()).prop_map(
        |(vocabulary, context, heads, head_size, layers, drops, exact_gelu)| Gpt2Config {
            vocabulary,
            context,
            width: heads * head_size,
            layers,
            heads,
            dropout: if drops { 0.1 } else { 0.0 },
            exact_gelu,
            epsilon: 1e-5,
        },
    )
}

/// A model that is large enough to matter and quick enough to test with.
pub fn small(dropout: f32) -> Gpt2Config {
    Gpt2Config {
        vocabulary: 61,
        context: 16,
        width: 24,
        layers: 3,
        heads: 4,
        dropout,
        exact_gelu: false,
        epsilon: 1e-5,
    }
}

/// Random tokens and targets, some of which are ignored; the first never is.
pub fn batch(config: &Gpt2Config, sequences: usize, context: usize, seed: u64) -> Batch {
    let mut random = fastrand::Rng::with_seed(seed);
    let len = sequences * context;
    let vocabulary = config.vocabulary as u32;
    let tokens = (0..len).map(|_| random.u32(..vocabulary)).collect();
    let target = |i: usize| if i > 0 && random.u8(..5) == 0 { -100 } else { random.u32(..vocabulary) as i32 };
    Batch { tokens, targets: (0..len).map(target).collect(), batch: sequences, context }
}

/// Nothing is too small to leave, and next to nothing is held ahead of need.
pub fn tiny_windows() -> OffloadOptions {
    OffloadOptions {
        in_flight_bytes: 64,
        prefetch_bytes: 256,
        min_bytes: 0,
        window_slices: 0,
        ..OffloadOptions::default()
    }
}

/// With a disk tier of its own, and host memory too small for all.
pub fn with_disk(options: OffloadOptions) -> OffloadOptions {
    let disk = Some(DiskOptions::new(std::env::temp_dir(), 8 << 20));
    OffloadOptions { host_bytes: Some(4 << 10), disk, ..options }
}

pub fn trainer_on(
    device: &Device,
    policy: Box<dyn Policy>,
    options: OffloadOptions,
    config: Gpt2Config,
) -> ebbtide::engine::Result<Trainer> {
    trainer_in(device, policy, options, config, Numerics::default())
}

pub fn trainer_in(
    device: &Device,
    policy: Box<dyn Policy>,
    options: OffloadOptions,
    config: Gpt2Config,
    numerics: Numerics,
) -> ebbtide::engine::Result<Trainer> {
    let engine = Engine::with_numerics(device, policy, options, numerics)?;
    let model = Gpt2::new(&engine, config, 11, true)?;
    let schedule = Schedule { peak: 1e-2, floor: 1e-3, warmup_steps: 2, decay_steps: 12 };
    Trainer::new(
        &engine,
        model,
        TrainerOptions {
            optimizer: AdamWOptions::default(),
            schedule,
            seed: 5,
            loss_scale: Default::default(),
        },
    )
}

/// Every precision, with the residual stream in f32 and without.
pub fn numerics() -> impl Strategy<Value = Numerics> {
    (prop::sample::select(Precision::ALL.to_vec()), any::<bool>())
        .prop_map(|(precision, residual_f32)| Numerics { precision, residual_f32 })
}

/// Overwrites every element of a parameter.
pub fn set_parameter(engine: &Engine, model: &Gpt2, name: &str, value: f32) {
    let parameters = model.parameters();
    let (_, _, range) = parameters.iter().find(|(found, ..)| *found == name).unwrap();
    parameters.weights().write(engine, range.clone(), &vec![value; range.len()]).unwrap();
    parameters.refresh(engine).unwrap();
}

/// All that training leaves, as bits: losses, then gradients, then weights.
pub fn bits(trainer: &mut Trainer, windows: &[Vec<Batch>]) -> ebbtide::engine::Result<Vec<Vec<u32>>> {
    let mut losses = Vec::new();
    for window in windows {
        let report = trainer.step(window)?;
        losses.push(report.loss.to_bits());
        losses.push(report.gradient_norm.to_bits());
    }
    let parameters = trainer.model().parameters();
    let gradients = parameters.gradients().unwrap().clone();
    let gradients = trainer.engine().compute().download::<f32>(&gradients)?;
    let weights = parameters.weights().to_vec(trainer.engine())?;
    let bits = |values: Vec<f32>| values.iter().map(|x| x.to_bits()).collect();
    Ok(vec![losses, bits(gradients), bits(weights)])
}

/// A policy that decides by a hash of the name: any mix of all there is.
pub struct Mixed(pub u64);

impl Mixed {
    fn draw(&self, name: &str) -> u64 {
        name.bytes().fold(self.0 ^ 0xCBF2_9CE4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
        }) >> 20
    }
}

const KEEP: Placement = Placement::Keep(Codec::Raw);
const DISK: Placement = Placement::Offload(Tier::Disk, Codec::Raw);

impl Policy for Mixed {
    fn activation(&self, activation: &Activation<'_>) -> Placement {
        let choices: &[Placement] = match activation.rerun {
            true => &[KEEP, Placement::Offload(Tier::Host, Codec::Raw), DISK, Placement::Rerun],
            false => &[KEEP, Placement::Offload(Tier::Host, Codec::Raw), DISK],
        };
        match activation.role {
            Role::Statistic => KEEP,
            _ => choices[(self.draw(activation.name) % choices.len() as u64) as usize],
        }
    }
    fn segment(&self, name: &str) -> SegmentPlan {
        let plans = [SegmentPlan::Run, SegmentPlan::Recompute, SegmentPlan::RunIfRoom];
        plans[(self.draw(name) % 3) as usize]
    }
}

/// A device of the kind that `EBBTIDE_DEVICE` names, as `--device` takes it; else the CPU.
pub fn device_with(threads: Option<usize>, budget_bytes: Option<usize>) -> Device {
    let kind = std::env::var("EBBTIDE_DEVICE").map_or(DeviceKind::Cpu, |kind| kind.parse().unwrap());
    // All of a card takes longer to get than what runs on it.
    const OF_A_CARD: usize = 2 << 30;
    let budget_bytes = budget_bytes.or((kind != DeviceKind::Cpu).then_some(OF_A_CARD));
    Device::open(&DeviceOptions { kind, threads, budget_bytes }).unwrap()
}

/// Where the reference values are: `EBBTIDE_GOLDEN_DIR`, or else where this was built.
pub fn golden_folder() -> PathBuf {
    std::env::var_os("EBBTIDE_GOLDEN_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden"), PathBuf::from)
}

/// The same, with what it has.
pub fn device() -> Device {
    device_with(None, None)
}

/// A device's error, out of the engine's.
pub fn device_error<T>(result: ebbtide::engine::Result<T>) -> Result<T> {
    match result {
        Ok(value) => Ok(value),
        Err(ebbtide::engine::Error::Device(error)) => Err(error),
        Err(error) => panic!("not the device's: {error}"),
    }
}
