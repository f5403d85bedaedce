//! The device layer of Ebbtide: memory, streams, derived order, and every computation.
//!
//! A [`Device`] holds memory and streams; a [`Stream`] runs [`Op`]s in order; a [`Slice`] is a piece of device memory, a
//! [`HostBuffer`] host memory that transfers use. Nobody writes a wait: which op must follow which is derived from what
//! each op reads and writes.
//!
//! ```
//! use ebbtide_kernels::{Category, DType, Device, Op};
//!
//! # fn main() -> ebbtide_kernels::Result<()> {
//! let device = Device::cpu()?;
//! let (compute, copies) = (device.stream("compute"), device.stream("copies"));
//! let x = compute.upload(&[1.0f32, 2.0, 3.0], Category::Activations, "x")?;
//! let y = device.alloc(3, DType::F32, Category::Activations, "y")?;
//! compute.submit(Op::Fill { out: y.clone(), value: 1.0 })?;
//! compute.submit(Op::Add { input: x, out: y.clone() })?;
//! // Another stream: the copy waits for the addition by itself.
//! assert_eq!(copies.download::<f32>(&y)?, [2.0, 3.0, 4.0]);
//! # Ok(())
//! # }
//! ```

// The tests' own list of ops, shared with the tests of the public interface, speaks of the crate by name.
#[cfg(test)]
extern crate self as ebbtide_kernels;

mod arena;
mod backend;
mod buffer;
mod cpu;
mod cuda;
mod device;
mod dtype;
mod error;
mod ledger;
mod memory;
pub mod op;
mod order;
pub mod rng;
mod spill;
mod system;
mod timeline;

pub use arena::Arena;
pub use backend::{DropWaits, SimOptions};
pub use buffer::{HostBuffer, HostSlice, Protection, Slice};
pub use device::{CpuOptions, CudaOptions, Device, DeviceKind, DeviceOptions, OpCount, Stream, StreamReport};
pub use dtype::{DType, Element};
pub use error::{CudaUnavailable, Error, OutOfMemory, Result, bytes, bytes_up};
pub use ledger::{Category, MemoryReport};
pub use op::Op;
pub use spill::{FILE_ALIGNMENT, FileSlice, SpillFile, SpillOptions};
pub use system::available_memory;
pub use timeline::{Link, OpTime, Rates};
