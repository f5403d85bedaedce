#![forbid(unsafe_code)]
//! The training engine of Ebbtide: tensors, a tape, layers, GPT-2, AdamW, and the training step.
//!
//! A [`Tape`] records a forward pass; [`Tape::backward`] consumes it. What backward needs of the forward pass goes
//! through [`ebbtide_offload`] and nowhere else, so one policy decides what is kept, sent to host memory, or made again.

pub mod autocast;
pub mod checkpoint;
mod engine;
mod error;
mod flat;
pub mod generate;
pub mod gpt2;
pub mod hugging_face;
mod layer;
mod ops;
pub mod optimizer;
mod parameters;
pub mod plan;
pub mod scaler;
mod tape;
mod tensor_file;
mod trainer;

pub use autocast::{Numerics, Precision};
pub use engine::Engine;
pub use error::{Error, Result};
pub use flat::Flat;
pub use layer::CustomLayer;
pub use ops::{HeadLoss, LossInto, Norm, TokenBatch};
pub use parameters::{Init, Parameter, Parameters, ParametersBuilder};
pub use tape::{Backward, DropoutSite, Tape, Tensor, Watch};
pub use trainer::{Batch, Evaluator, StepReport, Trainer, TrainerOptions};
