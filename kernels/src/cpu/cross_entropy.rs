//! Softmax cross-entropy, and its gradient in place of the logits.
//!
//! A row a task: the maximum, then `e^(x - max)` with its sum, then the scaling: three passes over a row that mostly stays
//! in L2 (200 KB at GPT-2's vocabulary). The sum is in f64 over stretches of [`STRETCH`] in f32. Without a gradient nothing
//! is written.

use multiversion::multiversion;

use super::{
    float::{FloatParts, Floats},
    math::{exp, maximum, sum, sum_of},
    threads::{Parts, Threads},
};

/// Elements that are summed in f32 before the sum goes to f64.
const STRETCH: usize = 1024;

/// See [`crate::op::CrossEntropy`].
///
/// # Errors
/// Names the first target outside of the vocabulary, and its place.
pub(crate) fn cross_entropy(
    threads: &Threads,
    logits: &FloatParts<'_>,
    targets: &[i32],
    losses: &mut [f32],
    vocabulary: usize,
    gradient_scale: f32,
) -> Result<(), String> {
    check(targets, vocabulary)?;
    let losses = Parts::new(losses);
    threads.for_each(targets.len(), 4 * logits.len(), |row| {
        let range = row * vocabulary..(row + 1) * vocabulary;
        // SAFETY: each row belongs to one task.
        let loss = unsafe { losses.slice(row, 1) };
        let gradient = |logits: &mut [f32]| {
            let Ok(target) = usize::try_from(targets[row]) else {
                logits.fill(0.0);
                loss[0] = 0.0;
                return;
            };
            let of_target = logits[target];
            let max = row_maximum(logits);
            let sum = exponentials(logits, max);
            loss[0] = loss_of(max, sum, of_target);
            scale_row(logits, (f64::from(gradient_scale) / sum) as f32);
            logits[target] -= gradient_scale;
        };
        // SAFETY: as above.
        unsafe { logits.update(range, &mut Vec::new(), gradient) };
    });
    Ok(())
}

/// [`cross_entropy`] without the gradient.
///
/// # Errors
/// As for [`cross_entropy`].
pub(crate) fn cross_entropy_loss(
    threads: &Threads,
    logits: Floats<'_>,
    targets: &[i32],
    losses: &mut [f32],
    vocabulary: usize,
) -> Result<(), String> {
    check(targets, vocabulary)?;
    let losses = Parts::new(losses);
    threads.for_each(targets.len(), logits.bytes(), |row| {
        // SAFETY: each row belongs to one task.
        let loss = unsafe { losses.slice(row, 1) };
        let mut scratch = Vec::new();
        let logits = logits.part(row * vocabulary..(row + 1) * vocabulary, &mut scratch);
        loss[0] = match usize::try_from(targets[row]) {
            Ok(target) => {
                let max = row_maximum(logits);
                loss_of(max, sum_exponentials(logits, max), logits[target])
            }
            Err(_) => 0.0,
        };
    });
    Ok(())
}

fn check(targets: &[i32], vocabulary: usize) -> Result<(), String> {
    let outside = |&target: &i32| usize::try_from(target).is_ok_and(|target| target >= vocabulary);
    match targets.iter().position(outside) {
        Some(index) => Err(format!(
            "target {} at index {index} is outside of the vocabulary of {vocabulary}",
            targets[index]
        )),
        None => Ok(()),
    }
}

fn loss_of(max: f32, sum: f64, of_target: f32) -> f32 {
    (f64::from(max) + sum.ln() - f64::from(of_target)) as f32
}

#[multiversion(targets("x86_64+avx2+fma"))]
fn row_maximum(row: &[f32]) -> f32 {
    maximum(row)
}

/// `x = e^(x - max)` in place, and the sum.
#[multiversion(targets("x86_64+avx2+fma"))]
fn exponentials(row: &mut [f32], max: f32) -> f64 {
    let mut total = 0.0;
    for stretch in row.chunks_mut(STRETCH) {
        stretch.iter_mut().for_each(|x| *x = exp(*x - max));
        total += f64::from(sum(stretch));
    }
    total
}

/// The sum that [`exponentials`] gives, up to rounding, with nothing written.
#[multiversion(targets("x86_64+avx2+fma"))]
fn sum_exponentials(row: &[f32], max: f32) -> f64 {
    row.chunks(STRETCH).map(|stretch| f64::from(sum_of(stretch, stretch, |x, _| exp(x - max)))).sum()
}

#[multiversion(targets("x86_64+avx2+fma"))]
fn scale_row(row: &mut [f32], factor: f32) {
    row.iter_mut().for_each(|x| *x *= factor);
}
