//! [`LossScaler`]: a factor of the loss that keeps 16-bit gradients from vanishing.
//!
//! The gradients of a window are those of `scale · loss`; one pass at the window's end divides them by the scale, looks for
//! elements that are not finite before or after, and measures their norm; an update whose gradients overflowed is skipped, on
//! the device. The scale then moves as `torch.amp.GradScaler`'s does, above a floor. All of its state is on the device, so
//! that a step waits for nothing.

use ebbtide_kernels::{
    Category, DType, Op, Slice,
    op::{Scaled, ScalerCounter, ScalerRules},
};
use serde::{Deserialize, Serialize};

use crate::{Engine, Error, Precision, Result};

/// How a loss scale starts and moves.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LossScalerOptions {
    /// The first scale.
    pub initial: f32,
    /// Multiplies it after `interval` updates without overflow.
    pub growth: f32,
    /// Multiplies it after an overflow.
    pub backoff: f32,
    /// Updates without overflow until it grows.
    pub interval: u32,
    /// It never falls below.
    pub floor: f32,
    /// Overflows since it last grew that it takes before it falls.
    pub hysteresis: u32,
    /// Skips in a row at the floor after which training stops.
    pub patience: u32,
}

impl Default for LossScalerOptions {
    fn default() -> Self {
        LossScalerOptions {
            initial: 65_536.0,
            growth: 2.0,
            backoff: 0.5,
            interval: 2000,
            floor: 1.0,
            hysteresis: 1,
            patience: 16,
        }
    }
}

impl LossScalerOptions {
    /// Those of a precision: as they are for f16; for bf16, whose range is f32's, a scale that stays 1.
    pub fn of(self, precision: Precision) -> Self {
        match precision {
            Precision::BF16 => {
                LossScalerOptions { initial: 1.0, growth: 1.0, backoff: 1.0, floor: 1.0, ..self }
            }
            _ => self,
        }
    }

    /// Holds the numbers against what can be.
    ///
    /// # Errors
    /// [`Error::Config`] names the number.
    pub fn check(&self) -> Result<()> {
        let bad = |field, expected: &str, found: &dyn std::fmt::Display| {
            Err(Error::Config { field, expected: expected.to_string(), found: found.to_string() })
        };
        if !(self.floor.is_finite() && self.floor > 0.0) {
            return bad("loss_scale.floor", "a finite number above 0", &self.floor);
        }
        if !(self.initial.is_finite() && self.initial >= self.floor) {
            return bad("loss_scale.initial", "a finite number of at least the floor", &self.initial);
        }
        if !(self.growth.is_finite() && self.growth >= 1.0) {
            return bad("loss_scale.growth", "a finite number of at least 1", &self.growth);
        }
        if !(self.backoff > 0.0 && self.backoff <= 1.0) {
            return bad("loss_scale.backoff", "a number in (0, 1]", &self.backoff);
        }
        for (field, count) in [
            ("loss_scale.interval", self.interval),
            ("loss_scale.hysteresis", self.hysteresis),
            ("loss_scale.patience", self.patience),
        ] {
            if count == 0 {
                return bad(field, "at least 1", &count);
            }
        }
        Ok(())
    }
}

/// Where a loss scale is: what a checkpoint keeps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScalerState {
    /// The scale.
    pub scale: f32,
    /// Updates without overflow since it last moved.
    pub growth: u32,
    /// Overflows since it last grew.
    pub overflows: u32,
    /// Skips in a row at the floor.
    pub at_floor: u32,
    /// Updates that were applied.
    pub applied: u32,
    /// Updates that were skipped.
    pub skipped: u32,
}

/// A dynamic loss scale on the device.
pub struct LossScaler {
    rules: ScalerRules,
    patience: u32,
    scale: Slice,
    counters: Slice,
    found_inf: Slice,
}

impl LossScaler {
    /// A scaler at its start.
    ///
    /// # Errors
    /// Those of [`LossScalerOptions::check`]; the device's.
    pub fn new(engine: &Engine, options: LossScalerOptions) -> Result<Self> {
        options.check()?;
        let LossScalerOptions { growth, backoff, interval, floor, hysteresis, patience, initial } = options;
        let alloc = |len, dtype| engine.device().alloc(len, dtype, Category::Optimizer, "loss scale");
        let (scale, found_inf) = (alloc(1, DType::F32)?, alloc(1, DType::F32)?);
        let counters = alloc(ScalerCounter::COUNT, DType::U32)?;
        engine.submit(Op::Fill { out: scale.clone(), value: initial })?;
        engine.submit(Op::Fill { out: found_inf.clone(), value: 0.0 })?;
        engine.submit(Op::Fill { out: counters.clone(), value: 0.0 })?;
        let rules = ScalerRules { growth, backoff, interval, floor, hysteresis };
        Ok(LossScaler { rules, patience, scale, counters, found_inf })
    }

    /// The scale, one f32 on the device: what a loss's gradient is multiplied by.
    pub fn scale(&self) -> &Slice {
        &self.scale
    }

    /// Its counters on the device, [`ScalerCounter::COUNT`] u32.
    pub fn counters(&self) -> &Slice {
        &self.counters
    }

    /// Skips in a row at the floor after which training stops.
    pub fn patience(&self) -> u32 {
        self.patience
    }

    /// Divides gradients by the scale, and looks for what is not finite; `sum_squares` is that of the result.
    ///
    /// # Errors
    /// The device's.
    pub fn unscale(&self, engine: &Engine, gradients: Slice, sum_squares: Slice) -> Result<()> {
        let (scale, found_inf) = (self.scale.clone(), self.found_inf.clone());
        engine.submit(Op::Unscale { gradients, scale, found_inf, sum_squares })
    }

    /// What an update hangs on.
    pub fn scaled(&self) -> Scaled {
        Scaled { found_inf: self.found_inf.clone(), counters: self.counters.clone() }
    }

    /// Moves the scale, once a window, after its update.
    ///
    /// # Errors
    /// The device's.
    pub fn update(&self, engine: &Engine) -> Result<()> {
        engine.submit(Op::ScalerUpdate {
            scale: self.scale.clone(),
            counters: self.counters.clone(),
            found_inf: self.found_inf.clone(),
            rules: self.rules,
        })
    }

    /// Where it is; the device is waited for.
    ///
    /// # Errors
    /// The device's.
    pub fn state(&self, engine: &Engine) -> Result<ScalerState> {
        let scale = engine.compute().download::<f32>(&self.scale)?[0];
        let counters = engine.compute().download::<u32>(&self.counters)?;
        Ok(ScalerState::new(scale, &counters))
    }

    /// Goes on from where another was.
    ///
    /// # Errors
    /// The device's.
    pub fn set_state(&self, engine: &Engine, state: &ScalerState) -> Result<()> {
        let ScalerState { scale, growth, overflows, at_floor, applied, skipped } = *state;
        engine.submit(Op::Fill { out: self.scale.clone(), value: scale })?;
        let counters = [growth, overflows, at_floor, applied, skipped];
        let input = engine.compute().upload(&counters, Category::Staging, "loss scale")?;
        engine.submit(Op::Copy { input, out: self.counters.clone() })
    }
}

impl ScalerState {
    pub(crate) fn new(scale: f32, counters: &[u32]) -> Self {
        let of = |counter: ScalerCounter| counters[counter as usize];
        ScalerState {
            scale,
            growth: of(ScalerCounter::Growth),
            overflows: of(ScalerCounter::Overflows),
            at_floor: of(ScalerCounter::AtFloor),
            applied: of(ScalerCounter::Applied),
            skipped: of(ScalerCounter::Skipped),
        }
    }
}
