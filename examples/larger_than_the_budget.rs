//! Trains a model whose activations do not fit the memory budget: the step that keeps everything is refused with the nearest
//! setting that fits, and the one that offloads gives the bits that keeping everything gives where there is room.
//!
//! ```text
//! cargo run --release --example larger_than_the_budget
//! ```

use ebbtide::{
    engine::{
        Batch, Engine, Error, Result, Trainer, TrainerOptions,
        gpt2::{Gpt2, Gpt2Config},
        optimizer::{AdamWOptions, Schedule},
        plan::{StepShape, least_budget, nearest_fit, sized},
    },
    kernels::{self, CpuOptions, Device, bytes},
    offload::{Expression, OffloadOptions, policy::Builtin},
};

const MODEL: Gpt2Config = Gpt2Config {
    vocabulary: 256,
    context: 128,
    width: 128,
    layers: 8,
    heads: 4,
    dropout: 0.1,
    exact_gelu: false,
    epsilon: 1e-5,
};

fn main() -> Result<()> {
    let shape = StepShape {
        model: MODEL,
        batch: 16,
        context: 128,
        accumulate: 1,
        offload_optimizer: false,
        numerics: Default::default(),
    };
    let offload: Expression = "offload".parse().expect("a policy");
    let options = OffloadOptions { in_flight_bytes: 4 << 20, prefetch_bytes: 4 << 20, ..Default::default() };
    let keep = least_budget(&shape, Builtin::Keep, &options)?;
    let least = least_budget(&shape, offload.clone(), &options)?;
    let budget = least + (keep - least) / 8;
    println!(
        "keeping everything needs {}, offloading {}: the budget is {}",
        bytes(keep),
        bytes(least),
        bytes(budget)
    );

    let error = train(Builtin::Keep.into(), Some(budget), &options).expect_err("it does not fit");
    let Error::Device(kernels::Error::OutOfMemory(facts)) = error else { return Err(error) };
    println!("keep      {facts}");
    if let Some(fit) = nearest_fit(&shape, budget, &options)? {
        println!("nearest   --policy {} --batch {} --accumulate {}", fit.policy, fit.batch, fit.accumulate);
    }

    let sized = sized(&shape, offload.clone(), &options, Some(budget))?;
    let within = train(offload, Some(budget), &sized)?;
    let without = train(Builtin::Keep.into(), None, &options)?;
    println!("offload   losses {within:?} within the budget");
    println!("keep      losses {without:?} without one");
    assert_eq!(within, without, "the same bits");
    Ok(())
}

fn train(policy: Expression, budget_bytes: Option<usize>, options: &OffloadOptions) -> Result<Vec<f32>> {
    let device = Device::cpu_with(CpuOptions { threads: None, budget_bytes })?;
    let engine = Engine::new(&device, Box::new(policy), options.clone())?;
    let model = Gpt2::new(&engine, MODEL, 1, true)?;
    let schedule = Schedule::constant(1e-3);
    let mut trainer = Trainer::new(
        &engine,
        model,
        TrainerOptions {
            optimizer: AdamWOptions::default(),
            schedule,
            seed: 1,
            loss_scale: Default::default(),
        },
    )?;
    let token = |step: usize, i: usize| (step * 31 + i * i % 97) % 256;
    let batch = |step| Batch {
        tokens: (0..16 * 128).map(|i| token(step, i) as u32).collect(),
        targets: (0..16 * 128).map(|i| token(step, i + 1) as i32).collect(),
        batch: 16,
        context: 128,
    };
    (0..3).map(|step| Ok(trainer.step(&[batch(step)])?.loss)).collect()
}
