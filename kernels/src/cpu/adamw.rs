//! AdamW, as `torch.optim.AdamW` computes it.
//!
//! Cost: four reads and three writes of f32 a parameter; nothing else counts.

use multiversion::multiversion;

use super::{
    elementwise::PIECE,
    threads::{Parts, Threads},
};

/// Constants of an update.
#[derive(Clone, Copy)]
pub(crate) struct AdamWConstants {
    pub(crate) gradient_scale: f32,
    pub(crate) learning_rate: f32,
    pub(crate) beta1: f32,
    pub(crate) beta2: f32,
    pub(crate) epsilon: f32,
    pub(crate) weight_decay: f32,
    pub(crate) step: u64,
}

/// The constants as the loop wants them, each worked out in f64.
#[derive(Clone, Copy)]
struct Factors {
    gradient_scale: f32,
    /// `1 - lr · decay`.
    keep: f32,
    /// `1 - β₁`.
    blend1: f32,
    beta2: f32,
    /// `1 - β₂`.
    blend2: f32,
    /// `1 / √(1 - β₂ᵗ)`.
    root: f32,
    epsilon: f32,
    /// `lr / (1 - β₁ᵗ)`.
    rate: f32,
}

/// See [`crate::op::AdamW`].
pub(crate) fn adamw(
    threads: &Threads,
    parameters: &mut [f32],
    gradients: &[f32],
    first_moment: &mut [f32],
    second_moment: &mut [f32],
    constants: AdamWConstants,
) {
    let AdamWConstants { gradient_scale, learning_rate, beta1, beta2, epsilon, weight_decay, step } =
        constants;
    let (rate, b1, b2) = (f64::from(learning_rate), f64::from(beta1), f64::from(beta2));
    let factors = Factors {
        gradient_scale,
        keep: (1.0 - rate * f64::from(weight_decay)) as f32,
        blend1: (1.0 - b1) as f32,
        beta2,
        blend2: (1.0 - b2) as f32,
        root: (1.0 / (1.0 - b2.powf(step as f64)).sqrt()) as f32,
        epsilon,
        rate: (rate / (1.0 - b1.powf(step as f64))) as f32,
    };
    let len = parameters.len();
    let parts = (Parts::new(parameters), Parts::new(first_moment), Parts::new(second_moment));
    threads.for_each(len.div_ceil(PIECE), 28 * len, |piece| {
        let first = piece * PIECE;
        let count = PIECE.min(len - first);
        // SAFETY: pieces do not overlap.
        let (p, m, v) = unsafe {
            (parts.0.slice(first, count), parts.1.slice(first, count), parts.2.slice(first, count))
        };
        update(p, &gradients[first..first + count], m, v, &factors);
    });
}

#[multiversion(targets("x86_64+avx2+fma"))]
fn update(p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], factors: &Factors) {
    let &Factors { gradient_scale, keep, blend1, beta2, blend2, root, epsilon, rate } = factors;
    for (((p, &g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
        let g = g * gradient_scale;
        *m += blend1 * (g - *m);
        *v = beta2 * *v + blend2 * g * g;
        *p = *p * keep - rate * *m / (v.sqrt() * root + epsilon);
    }
}
