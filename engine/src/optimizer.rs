//! AdamW over a model's flat buffers, clipping by the global norm, and the learning rate's schedule.

use std::ops::Range;

use ebbtide_kernels::{Category, DType, Op, Slice, Stream, op::AdamW as AdamWOp};
use serde::{Deserialize, Serialize};

use crate::{Engine, Error, Flat, Parameters, Result, flat::CHUNK, ops::scalar, scaler::LossScaler};

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

/// The optimizer's state: two moments a parameter, f32, on the device or in host memory.
pub struct AdamW {
    options: AdamWOptions,
    moments: [Flat; 2],
    /// Where the moments are in host memory: how they come and go.
    streaming: Option<[Stream; 2]>,
    sum_squares: Slice,
    norm: Slice,
    coefficient: Slice,
}

impl AdamW {
    /// Moments of zero; in host memory if the engine offloads the optimizer, from which an update takes them chunk by chunk and
    /// brings them back, over a stream for each direction.
    ///
    /// # Errors
    /// The device's, above all if the budget cannot hold them, or host memory.
    pub fn new(engine: &Engine, parameters: &Parameters, options: AdamWOptions) -> Result<Self> {
        let (device, len, offload) = (engine.device(), parameters.flat_len(), engine.offloads_optimizer());
        let moment = |name| -> Result<Flat> {
            if offload {
                return Ok(Flat::Host(device.host_slab(4 * len, name)?));
            }
            let slice = device.alloc(len, DType::F32, Category::Optimizer, name)?;
            engine.submit(Op::Fill { out: slice.clone(), value: 0.0 })?;
            Ok(Flat::Device(slice))
        };
        Ok(AdamW {
            options,
            moments: [moment("first moment")?, moment("second moment")?],
            streaming: offload.then(|| ["optimizer in", "optimizer out"].map(|name| device.stream(name))),
            sum_squares: scalar(engine, "gradient norm")?,
            norm: scalar(engine, "gradient norm")?,
            coefficient: scalar(engine, "gradient norm")?,
        })
    }

    /// Both moments, flat as the parameters are.
    pub fn moments(&self) -> [&Flat; 2] {
        [&self.moments[0], &self.moments[1]]
    }

    /// The global norm of the gradients at the last update, before clipping: one f32.
    pub fn norm(&self) -> &Slice {
        &self.norm
    }

    /// Clips the gradients by their global norm and updates the parameters. `step` counts updates from 1. Under a loss scale the
    /// gradients are divided by it first, an overflow skips the update, and the scaler counts the updates.
    ///
    /// # Errors
    /// [`Error::Config`] if the model is not trainable; the device's.
    pub fn update(
        &self,
        engine: &Engine,
        parameters: &Parameters,
        learning_rate: f32,
        step: u64,
        scaler: Option<&LossScaler>,
    ) -> Result<()> {
        let Some(gradients) = parameters.gradients() else {
            let (expected, found) = ("a model with gradients".to_string(), "none".to_string());
            return Err(Error::Config { field: "trainable", expected, found });
        };
        match scaler {
            Some(scaler) => scaler.unscale(engine, gradients.clone(), self.sum_squares.clone())?,
            None => {
                engine.submit(Op::SumSquares { input: gradients.clone(), out: self.sum_squares.clone() })?;
            }
        }
        let clip = self.options.clip;
        engine.submit(Op::ClipCoefficient {
            sum_squares: self.sum_squares.clone(),
            norm: self.norm.clone(),
            coefficient: self.coefficient.clone(),
            max_norm: if clip > 0.0 { clip } else { f32::INFINITY },
        })?;
        let groups = [(parameters.decayed(), self.options.weight_decay), (parameters.undecayed(), 0.0)];
        let mut ring = Ring::default();
        for (range, weight_decay) in groups {
            let chunk_len = if self.streaming.is_some() { CHUNK } else { range.len().max(1) };
            for start in range.clone().step_by(chunk_len) {
                let chunk = start..range.end.min(start + chunk_len);
                let state = self.bring(engine, &mut ring, parameters, chunk.clone())?;
                let [masters, first_moment, second_moment] = state.clone();
                engine.submit(Op::AdamW(AdamWOp {
                    parameters: masters.clone(),
                    gradients: gradients.part(chunk.clone())?,
                    first_moment,
                    second_moment,
                    gradient_scale: (clip > 0.0).then(|| self.coefficient.clone()),
                    scaled: scaler.map(LossScaler::scaled),
                    learning_rate,
                    beta1: self.options.beta1,
                    beta2: self.options.beta2,
                    epsilon: self.options.epsilon,
                    weight_decay,
                    step,
                }))?;
                parameters.publish(engine, chunk.clone(), masters)?;
                self.send(parameters, state, chunk)?;
            }
        }
        scaler.map_or(Ok(()), |scaler| scaler.update(engine))
    }

    /// What an update reads and writes of every parameter.
    fn state<'a>(&'a self, parameters: &'a Parameters) -> [&'a Flat; 3] {
        [parameters.weights(), &self.moments[0], &self.moments[1]]
    }

    /// The weights and moments of a chunk, on the device.
    fn bring(
        &self,
        engine: &Engine,
        ring: &mut Ring,
        parameters: &Parameters,
        chunk: Range<usize>,
    ) -> Result<[Slice; 3]> {
        let mut state = Vec::with_capacity(3);
        for flat in self.state(parameters) {
            state.push(match (flat, &self.streaming) {
                (Flat::Host(buffer), Some([back, _])) => {
                    let out = ring.next(engine)?.part(0..chunk.len())?;
                    let input = buffer.part(4 * chunk.start..4 * chunk.end)?;
                    back.submit(Op::CopyIn { input, out: out.clone() })?;
                    out
                }
                (Flat::Device(slice), _) => slice.part(chunk.clone())?,
                (Flat::Host(_), None) => unreachable!("host memory and its streams are made together"),
            });
        }
        state.try_into().map_err(|_| unreachable!("three of them"))
    }

    /// Takes a chunk's weights and moments back to where they live.
    fn send(&self, parameters: &Parameters, state: [Slice; 3], chunk: Range<usize>) -> Result<()> {
        let Some([_, out]) = &self.streaming else { return Ok(()) };
        for (flat, input) in self.state(parameters).into_iter().zip(state) {
            if let Flat::Host(buffer) = flat {
                out.submit(Op::CopyOut { input, out: buffer.part(4 * chunk.start..4 * chunk.end)? })?;
            }
        }
        Ok(())
    }
}

/// Device memory for the chunks of an update: a few, so that one comes and one goes while one is used. Who uses one anew is
/// ordered after its last use by the device layer.
#[derive(Default)]
struct Ring {
    chunks: Vec<Slice>,
    turn: usize,
}

impl Ring {
    /// Weights and moments of three chunks.
    const LEN: usize = 9;

    fn next(&mut self, engine: &Engine) -> Result<Slice> {
        self.turn += 1;
        if self.chunks.len() < Self::LEN {
            let alloc =
                engine.offload().alloc(CHUNK, DType::F32, Category::Optimizer, "optimizer's chunk")?;
            self.chunks.push(alloc);
        }
        Ok(self.chunks[(self.turn - 1) % Self::LEN].clone())
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
