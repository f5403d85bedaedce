//! A GPU's memory, streams and events, simulated, for a driver to stand on.
//!
//! A [`World`] is one device. Work is queued on streams and runs eagerly, as late as it can, or in a seeded order ([`Order`]); a
//! seed gives one trace. Kernels run from their PTX, with every access checked; products by a plain loop.
//!
//! **Order.** Each op has a vector clock, from what really holds it: its stream, the events that the stream waited for, and
//! what the host had waited for when it queued the op. Each access is held against the earlier accesses to the same bytes: two
//! of which one writes, and of which neither's clock covers the other, are a race, in whatever order they ran.
//!
//! **Memory.** A device's bytes are at addresses that the host cannot touch, never used twice, and unwritten at first.
//! The bytes of a queued copy to the host are overwritten until it runs, and those of a queued copy to the device must not
//! change, so that a host which does not wait shows. Memory that is freed must be in no queue, and known to the host to be.
//!
//! What breaks a rule is a [`Finding`].
//!
//! **What differs from a GPU**: what one host thread has waited for, all know; pinned memory that kernels touch is not
//! looked at for races, since they do it with atomics; a copy or a kernel takes no time.

mod clock;
mod finding;
mod memory;
mod product;
mod shadow;
mod world;

pub use finding::{Finding, FindingKind};
pub use product::{Matrix, Number, Product};
pub use world::{EventId, Order, Progress, Refused, StreamId, Waiting, World};
