#![forbid(unsafe_code)]
//! The training engine of Ebbtide: tensors, a tape, layers, GPT-2, AdamW, and the training step.
//!
//! A [`Tape`] records a forward pass; [`Tape::backward`] consumes it. What backward needs of the forward pass goes
//! through [`ebbtide_offload`] and nowhere else, so one policy decides what is kept, sent to host memory, or made again.

mod engine;
mod error;
pub mod gpt2;
mod ops;
pub mod optimizer;
pub mod plan;
mod parameters;
mod tape;
mod trainer;

pub use engine::Engine;
pub use error::{Error, Result};
pub use ops::{HeadLoss, LossInto, Norm, TokenBatch};
pub use parameters::{Init, Parameter, Parameters, ParametersBuilder};
pub use tape::{Backward, DropoutSite, Tape, Tensor};
pub use trainer::{Batch, StepReport, Trainer, TrainerOptions};
