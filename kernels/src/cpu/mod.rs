//! The computations on the CPU, one file a family.

pub(crate) mod execute;
pub(crate) mod threads;
