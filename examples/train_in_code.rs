//! A training loop of one's own: a small GPT-2 learns a pattern under the offload policy.
//!
//! ```text
//! cargo run --example train_in_code
//! ```

use ebbtide::{
    engine::{
        Batch, Engine, Result, Trainer, TrainerOptions,
        generate::{SampleOptions, generate},
        gpt2::{Gpt2, Gpt2Config},
        optimizer::{AdamWOptions, Schedule},
    },
    kernels::Device,
    offload::{OffloadOptions, policy::Builtin},
};

fn main() -> Result<()> {
    let config = Gpt2Config {
        vocabulary: 16,
        context: 32,
        width: 32,
        layers: 2,
        heads: 4,
        dropout: 0.0,
        exact_gelu: false,
        epsilon: 1e-5,
    };
    let device = Device::cpu()?;
    let engine = Engine::new(&device, Builtin::Offload.policy(), OffloadOptions::default())?;
    let model = Gpt2::new(&engine, config, 1, true)?;
    let schedule = Schedule { peak: 3e-3, floor: 3e-4, warmup_steps: 10, decay_steps: 150 };
    let options = TrainerOptions {
        optimizer: AdamWOptions::default(),
        schedule,
        seed: 1,
        loss_scale: Default::default(),
    };
    let mut trainer = Trainer::new(&engine, model, options)?;

    // Each sequence counts on by three from another start.
    let token = |sequence: usize, position: usize| (7 * sequence + 3 * position) % 16;
    for step in 0..150 {
        let places = || (0..8).flat_map(|sequence| (0..32).map(move |position| (sequence + step, position)));
        let batch = Batch {
            tokens: places().map(|(s, p)| token(s, p) as u32).collect(),
            targets: places().map(|(s, p)| token(s, p + 1) as i32).collect(),
            batch: 8,
            context: 32,
        };
        let report = trainer.step(&[batch])?;
        if report.step.is_multiple_of(25) {
            println!("step {:>3}  loss {:.3}", report.step, report.loss);
        }
    }
    let greedy = SampleOptions { tokens: 8, temperature: 0.0, top_k: 0, seed: 0 };
    let written = generate(&engine, trainer.model(), &[1, 4, 7], &greedy, &mut |_| true)?;
    println!("1, 4, 7, … goes on as {written:?}");
    Ok(())
}
