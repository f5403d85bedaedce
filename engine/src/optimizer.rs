//! AdamW over a model's flat buffers, clipping by the global norm, and the learning rate's schedule.

use ebbtide_kernels::{Category, DType, Op, Slice, op::AdamW as AdamWOp};
use serde::{Deserialize, Serialize};

use crate::{Engine, Error, Parameters, Result, ops::scalar};

/// AdamW's constants, with decoupled decay for parameters of two or more dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWOptions {
    /// β₁.
    pub beta1: f32,
    /// β₂.
    pub beta2: f32,
    /// ε.
    pub epsilon: f32,
    /// Weight decay.
    pub weight_decay: f32,
    /// Largest global norm of the gradients; larger ones are scaled down to it. 0 to leave them alone.
    pub clip: f32,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        AdamWOptions { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, clip: 1.0 }
    }
}

impl AdamWOptions {
    /// Holds the numbers against what can be.
    ///
    /// # Errors
    /// [`Error::Config`] for a β outside of `[0, 1)`, an ε that is not positive, or a negative decay or clip.
    pub fn check(&self) -> Result<()> {
        let bad = |field, expected: &str, found: f32| {
            Err(Error::Config { field, expected: expected.to_string(), found: found.to_string() })
        };
        for (field, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0.0..1.0).contains(&beta) {
                return bad(field, "a number in [0, 1)", beta);
            }
        }
        if !(self.epsilon.is_finite() && self.epsilon > 0.0) {
            return bad("epsilon", "a positive number", self.epsilon);
        }
        for (field, value) in [("weight_decay", self.weight_decay), ("clip", self.clip)] {
            if !(value.is_finite() && value >= 0.0) {
                return bad(field, "a finite number of at least 0", value);
            }
        }
        Ok(())
    }
}

/// Linear warm-up to a peak, then half a cosine down to a floor, which stays.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// The highest rate.
    pub peak: f32,
    /// The last rate.
    pub floor: f32,
    /// Steps from 0 to the peak.
    pub warmup_steps: u64,
    /// Steps until the floor is reached, warm-up included.
    pub decay_steps: u64,
}

impl Schedule {
    /// The same rate at every step.
    pub fn constant(rate: f32) -> Self {
        Schedule { peak: rate, floor: rate, warmup_steps: 0, decay_steps: 0 }
    }

    /// The rate of a step, counted from 1.
    pub fn rate(&self, step: u64) -> f32 {
        if step < self.warmup_steps {
            return self.peak * step as f32 / self.warmup_steps as f32;
        }
        if step >= self.decay_steps {
            return self.floor;
        }
        let progress = (step - self.warmup_steps) as f64 / (self.decay_steps - self.warmup_steps) as f64;
        let cosine = 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
        (f64::from(self.floor) + f64::from(self.peak - self.floor) * cosine) as f32
    }

    /// Holds the numbers against each other.
    ///
    /// # Errors
    /// [`Error::Config`] for a rate that is negative or not finite.
    pub fn check(&self) -> Result<()> {
        for (field, rate) in [("peak", self.peak), ("floor", self.floor)] {
            if !(rate.is_finite() && rate >= 0.0) {
                let expected = "a finite rate of at least 0".to_string();
                return Err(Error::Config { field, expected, found: rate.to_string() });
            }
        }
        Ok(())
    }
}

/// The optimizer's state on the device: two moments a parameter, f32.
pub struct AdamW {
    options: AdamWOptions,
    first_moment: Slice,
    second_moment: Slice,
    sum_squares: Slice,
    norm: Slice,
    coefficient: Slice,
}

impl AdamW {
    /// Moments of zero.
    ///
    /// # Errors
    /// The device's, above all if the budget cannot hold them.
    pub fn new(engine: &Engine, parameters: &Parameters, options: AdamWOptions) -> Result<Self> {
        let moment = |name| -> Result<Slice> {
            let slice =
                engine.device().alloc(parameters.flat_len(), DType::F32, Category::Optimizer, name)?;
            engine.submit(Op::Fill { out: slice.clone(), value: 0.0 })?;
            Ok(slice)
        };
        Ok(AdamW {
            options,
            first_moment: moment("first moment")?,
            second_moment: moment("second moment")?,
            sum_squares: scalar(engine, "gradient norm")?,
            norm: scalar(engine, "gradient norm")?,
            coefficient: scalar(engine, "gradient norm")?,
        })
    }

    /// Both moments, flat as the parameters are.
    pub fn moments(&self) -> [&Slice; 2] {
        [&self.first_moment, &self.second_moment]
    }

    /// The global norm of the gradients at the last update, before clipping: one f32.
    pub fn norm(&self) -> &Slice {
        &self.norm
    }

    /// Clips the gradients by their global norm and updates the parameters. `step` counts updates from 1.
    ///
    /// # Errors
    /// [`Error::Config`] if the model is not trainable; the device's.
    pub fn update(
        &self,
        engine: &Engine,
        parameters: &Parameters,
        learning_rate: f32,
        step: u64,
    ) -> Result<()> {
        let Some(gradients) = parameters.gradients() else {
            let (expected, found) = ("a model with gradients".to_string(), "none".to_string());
            return Err(Error::Config { field: "trainable", expected, found });
        };
        engine.submit(Op::SumSquares { input: gradients.clone(), out: self.sum_squares.clone() })?;
        let clip = self.options.clip;
        engine.submit(Op::ClipCoefficient {
            sum_squares: self.sum_squares.clone(),
            norm: self.norm.clone(),
            coefficient: self.coefficient.clone(),
            max_norm: if clip > 0.0 { clip } else { f32::INFINITY },
        })?;
        let groups = [(parameters.decayed(), self.options.weight_decay), (parameters.undecayed(), 0.0)];
        for (range, weight_decay) in groups {
            engine.submit(Op::AdamW(AdamWOp {
                parameters: parameters.weights().part(range.clone())?,
                gradients: gradients.part(range.clone())?,
                first_moment: self.first_moment.part(range.clone())?,
                second_moment: self.second_moment.part(range)?,
                gradient_scale: (clip > 0.0).then(|| self.coefficient.clone()),
                learning_rate,
                beta1: self.options.beta1,
                beta2: self.options.beta2,
                epsilon: self.options.epsilon,
                weight_decay,
                step,
            }))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedule_rises_falls_and_stays() {
        let schedule = Schedule { peak: 1.0, floor: 0.1, warmup_steps: 10, decay_steps: 110 };
        assert_eq!(schedule.rate(5), 0.5);
        assert_eq!(schedule.rate(10), 1.0);
        assert!((schedule.rate(60) - 0.55).abs() < 1e-6);
        assert_eq!(schedule.rate(110), 0.1);
        assert_eq!(schedule.rate(10_000), 0.1);
        assert_eq!(Schedule::constant(0.3).rate(1), 0.3);
    }
}
