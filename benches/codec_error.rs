//! What lossy codecs do to gradients, by the role of the tensors that they store.
//!
//! ```text
//! cargo bench --bench codec_error -- [--steps 60]
//! ```
//!
//! The quick start's model trains for a while, so that its weights are not random; then the gradients of one batch are taken
//! with everything kept, and with the tensors of one role stored by one codec. A figure is |g' - g| / |g| over all parameters.
//! The seed of stochastic rounding does not matter; its error is larger than that of rounding to nearest, but right in the mean.
#![allow(missing_docs)]

use std::{
    error::Error,
    sync::{Arc, Mutex},
};

use ebbtide::{
    engine::{
        Batch, Engine, Trainer, TrainerOptions,
        gpt2::{Gpt2, Gpt2Config},
        optimizer::{AdamWOptions, Schedule},
    },
    kernels::Device,
    offload::{Activation, Codec, OffloadOptions, Placement, Role},
};

const MODEL: Gpt2Config = Gpt2Config {
    vocabulary: 256,
    context: 128,
    width: 256,
    layers: 4,
    heads: 4,
    dropout: 0.0,
    exact_gelu: false,
    epsilon: 1e-5,
};

/// By name; `None` is all of them.
const ROLES: [(&str, Option<Role>); 5] = [
    ("norm's input", Some(Role::NormInput)),
    ("attention (qkv, output)", Some(Role::Attention)),
    ("GELU's input", Some(Role::GeluInput)),
    ("linear's input", Some(Role::Activation)),
    ("all", None),
];

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let steps = match arguments.iter().position(|argument| argument == "--steps") {
        Some(at) => arguments.get(at + 1).ok_or("--steps needs a number")?.parse()?,
        None => 60,
    };
    let chosen: Arc<Mutex<(Option<Role>, Codec)>> = Arc::default();
    let of_policy = chosen.clone();
    let policy = move |activation: &Activation<'_>| {
        let (role, codec) = *of_policy.lock().expect("nobody panics with it");
        match role.is_none_or(|role| role == activation.role) {
            true => Placement::Keep(codec),
            false => Placement::Keep(Codec::Raw),
        }
    };
    let engine = Engine::new(&Device::cpu()?, Box::new(policy), OffloadOptions::default())?;
    let model = Gpt2::new(&engine, MODEL, 1, true)?;
    let schedule = Schedule { peak: 2e-3, floor: 2e-4, warmup_steps: 20, decay_steps: 1000 };
    let options = TrainerOptions {
        optimizer: AdamWOptions::default(),
        schedule,
        seed: 1,
        loss_scale: Default::default(),
    };
    let mut trainer = Trainer::new(&engine, model, options)?;
    let text = include_bytes!("../data/kjv.txt");
    let batch = |step: usize| {
        let starts: Vec<usize> = (0..16).map(|i| (step * 16 + i) * 1009 % (text.len() - 200)).collect();
        let tokens = starts.iter().flat_map(|&start| &text[start..start + 128]);
        let targets = starts.iter().flat_map(|&start| &text[start + 1..start + 129]);
        Batch {
            tokens: tokens.map(|&byte| u32::from(byte)).collect(),
            targets: targets.map(|&byte| i32::from(byte)).collect(),
            batch: 16,
            context: 128,
        }
    };
    let mut loss = f32::NAN;
    for step in 0..steps {
        loss = trainer.step(&[batch(step)])?.loss;
    }
    println!("after {steps} steps, loss {loss:.3}\n");
    let window = [batch(steps)];
    let weight = 1.0 / (16.0 * 128.0);
    let mut gradients = |role, codec| -> Result<Vec<f32>, Box<dyn Error>> {
        *chosen.lock().expect("nobody panics with it") = (role, codec);
        trainer.accumulate(&window, weight)?;
        let gradients = trainer.model().parameters().gradients().ok_or("a trained model")?.clone();
        Ok(engine.compute().download(&gradients)?)
    };
    let exact = gradients(None, Codec::Raw)?;
    let norm =
        |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let codecs = ["f16", "bf16", "int8/64", "int8", "int8/256", "int8~"];
    print!("{:<26}", "");
    codecs.iter().for_each(|codec| print!("{codec:>10}"));
    println!();
    for (name, role) in ROLES {
        print!("{name:<26}");
        for codec in codecs {
            let found = gradients(role, codec.parse()?)?;
            let error =
                norm(&mut found.iter().zip(&exact).map(|(a, b)| a - b)) / norm(&mut exact.iter().copied());
            print!("{:>9.3}%", 100.0 * error);
        }
        println!();
    }
    Ok(())
}
