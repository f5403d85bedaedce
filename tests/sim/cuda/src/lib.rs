//! A `libcuda.so` without a GPU: the driver's calls that the backend makes, on simulated devices ([`ebbtide_simgpu`]).
//!
//! Built as a shared library whose name, for the dynamic loader, is `libcuda.so`: a process that has loaded it by its path
//! ([`Simulator::load`]), or finds it first (`LD_LIBRARY_PATH`, as `scripts/cuda-sim.sh` sets it up), uses it in place of CUDA's
//! driver, unmodified. There, `EBBTIDE_SIM_ORDER` is `eager`, `lazy` or `random:SEED`, and a broken rule ends the process.
//!
//! Calls can be made to fail, once or for good, or to do nothing, which is how a missing wait is played ([`Rule`]).

mod calls;
mod control;
mod driver;

pub use control::{Action, Card, Rule, Simulator};
pub use ebbtide_simgpu::{FindingKind, Order};
