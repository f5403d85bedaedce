//! What several test files need: a device of n threads, memory in and out of it, seeded numbers.

#![allow(dead_code, unreachable_pub)] // Each test uses its part.

pub(crate) mod compare;
#[cfg(target_os = "linux")]
pub(crate) mod failures;
pub(crate) mod ops;
pub(crate) mod programs;

use ebbtide_kernels::{Category, CpuOptions, DType, Device, Element, Op, Slice, Stream};

/// The CPU with so many threads.
pub(crate) fn cpu(threads: usize) -> Device {
    Device::cpu_with(CpuOptions { threads: Some(threads), budget_bytes: None }).unwrap()
}

/// Numbers in `[-1, 1)`.
pub(crate) fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..len).map(|_| 2.0 * random.f32() - 1.0).collect()
}

/// A device with one stream.
pub(crate) struct Bench {
    pub(crate) device: Device,
    pub(crate) stream: Stream,
}

impl Bench {
    pub(crate) fn new(device: Device) -> Self {
        Bench { stream: device.stream("compute"), device }
    }

    pub(crate) fn up<T: Element>(&self, values: &[T]) -> Slice {
        self.stream.upload(values, Category::Workspace, "operand").unwrap()
    }

    pub(crate) fn alloc(&self, len: usize, dtype: DType) -> Slice {
        self.device.alloc(len, dtype, Category::Workspace, "operand").unwrap()
    }

    pub(crate) fn run(&self, op: Op) {
        self.stream.submit(op).unwrap();
    }

    pub(crate) fn down<T: Element>(&self, slice: &Slice) -> Vec<T> {
        self.stream.download(slice).unwrap()
    }
}
