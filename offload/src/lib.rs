#![forbid(unsafe_code)]
//! What happens to a tensor between the forward pass that saves it and the backward pass that needs it.
//!
//! [`Offload::save`] takes a slice of device memory and a description; a [`Policy`] says whether it is kept, sent to host
//! memory or to disk, or made again. [`Offload::load`] gives it back. The crate knows slices, streams and names, nothing of tensors,
//! layers or models, so any framework can use it.
//!
//! How it works:
//! - A copy out starts as soon as the slice is saved, on a stream of its own. The device memory is held until the bytes
//!   in flight exceed a bound, oldest first, and then given back; whoever gets it next is ordered after the copy by the
//!   device layer, so forward runs on.
//! - Backward visits saved slices in reverse. Each load also starts the copies back of those that come next, as many as
//!   the window and the budget allow, on a third stream.
//! - A slice that is still in flight when it is asked for is handed back as it is. The end of a forward pass, which backward
//!   would want at once, is not sent out at all unless the budget needs its memory.
//! - The host tier is one slab, the disk tier one file without a name, both taken at the start. Where a tier is full a slice
//!   goes to the next, or stays, or is made again where that is allowed: [`Fallbacks`] counts each.
//! - A handle owns what it stands for: when the last [`Saved`] of a slice is dropped, used or not, its device memory and
//!   its host slot are free again. An abandoned step leaves nothing behind.
//!
//! - A [`Codec`] may store a slice in fewer bytes: it runs on the compute stream, before the copy out and after the copy
//!   back, so the link carries the small form.
//!
//! [`Offload::report`] accounts for the bytes, [`Offload::times`] for what the compute stream waited for.
//!
//! Costs, a saved slice: a hash lookup and a submission, to disk one for each mebibyte twice; bytes over the link: each slice
//! once out and once back.
//!
//! ```
//! use ebbtide_kernels::{Category, DType, Device};
//! use ebbtide_offload::{Activation, Offload, OffloadOptions, Role, policy};
//!
//! # fn main() -> ebbtide_offload::Result<()> {
//! let device = Device::cpu()?;
//! let compute = device.stream("compute");
//! let offload = Offload::new(&compute, Box::new(policy::OffloadAll), OffloadOptions::default())?;
//! let x = compute.upload(&vec![1.5f32; 1 << 16], Category::Activations, "x")?;
//! let (shape, dtype) = (&[1 << 16], DType::F32);
//! let activation = Activation { name: "x", shape, dtype, role: Role::Activation, segment: None, rerun: false };
//! let saved = offload.save(x, &activation)?;
//! // … forward goes on; x's device memory is free for others …
//! let back = offload.load(&saved)?;
//! assert_eq!(compute.download::<f32>(&back)?[7], 1.5);
//! assert_eq!(offload.report().out_bytes(), 4 << 16);
//! # Ok(())
//! # }
//! ```

mod codec;
pub mod expression;
pub mod policy;
mod report;
mod runtime;
mod tiers;

pub use codec::Codec;
pub use ebbtide_kernels::{Error, Result};
pub use expression::Expression;
pub use policy::{Activation, Placement, Policy, Role, SegmentPlan, Tier};
pub use report::{CodecKind, Fallbacks, Moved, OffloadReport, Traffic, TransferTimes};
pub use runtime::{Offload, OffloadOptions, Saved};
pub use tiers::DiskOptions;
