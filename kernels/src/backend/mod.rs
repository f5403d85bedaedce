//! Who runs the ops: [`cpu`] and [`cuda`] for real, [`sim`] for tests, or nobody (a dry device), which may say when they would run.

pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod sim;

use std::sync::Mutex;

use crate::{Op, order::Stamp, timeline::Timeline};

pub use sim::{DropWaits, SimOptions};

pub(crate) enum Backend {
    Cpu(cpu::CpuBackend),
    Cuda(Box<cuda::CudaBackend>),
    Sim(Box<Mutex<sim::SimBackend>>),
    /// With virtual time, or without.
    Dry(Option<Box<Mutex<Timeline>>>),
}

/// A numbered op and the waits that the order layer derived for it.
pub(crate) struct Job {
    pub(crate) stamp: Stamp,
    pub(crate) op: Op,
    pub(crate) waits: Vec<Stamp>,
}
