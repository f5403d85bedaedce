//! [`Engine`]: a device, its compute stream, and the offload runtime beside it.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
};

use ebbtide_kernels::{Category, DType, Device, Op, Slice, Stream};
use ebbtide_offload::{Offload, OffloadOptions, Policy};

use crate::{Numerics, Result};

/// Where a model runs. Cloning is cheap and shares everything.
#[derive(Clone)]
pub struct Engine {
    compute: Stream,
    offload: Offload,
    numerics: Numerics,
    offloads_optimizer: bool,
    notes: Arc<Mutex<BTreeSet<String>>>,
}

impl Engine {
    /// An engine on a device that computes in f32, whose saved tensors go where the policy says.
    ///
    /// # Errors
    /// The offload runtime's, should it not start.
    pub fn new(device: &Device, policy: Box<dyn Policy>, options: OffloadOptions) -> Result<Self> {
        Self::with_numerics(device, policy, options, Numerics::default())
    }

    /// An engine that computes in another precision: see [`crate::autocast`].
    ///
    /// # Errors
    /// The offload runtime's, should it not start.
    pub fn with_numerics(
        device: &Device,
        policy: Box<dyn Policy>,
        options: OffloadOptions,
        numerics: Numerics,
    ) -> Result<Self> {
        let compute = device.stream("compute");
        let offload = Offload::new(&compute, policy, options)?;
        Ok(Engine { compute, offload, numerics, offloads_optimizer: false, notes: Arc::default() })
    }

    /// Keeps what only the optimizer needs of models made from here on in host memory: AdamW's moments, and the f32 masters
    /// where the engine computes in 16 bits. An update takes them chunk by chunk. The bits are the same.
    pub fn offload_optimizer(self, offloads_optimizer: bool) -> Self {
        Engine { offloads_optimizer, ..self }
    }

    /// Whether what only the optimizer needs is in host memory.
    pub fn offloads_optimizer(&self) -> bool {
        self.offloads_optimizer
    }

    /// The device.
    pub fn device(&self) -> &Device {
        self.compute.device()
    }

    /// What it computes in.
    pub fn numerics(&self) -> Numerics {
        self.numerics
    }

    /// The stream that computes.
    pub fn compute(&self) -> &Stream {
        &self.compute
    }

    /// The runtime that holds saved tensors.
    pub fn offload(&self) -> &Offload {
        &self.offload
    }

    /// What a user may want to know of how the model runs, each once.
    pub fn notes(&self) -> Vec<String> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    pub(crate) fn note(&self, note: String) {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).insert(note);
    }

    pub(crate) fn submit(&self, op: Op) -> Result<()> {
        Ok(self.compute.submit(op)?)
    }

    /// Memory for something that forward computes.
    pub(crate) fn activation(&self, len: usize, dtype: DType, name: &str) -> Result<Slice> {
        Ok(self.offload.alloc(len, dtype, Category::Activations, name)?)
    }

    /// f32 memory for scratch.
    pub(crate) fn workspace(&self, len: usize, name: &str) -> Result<Slice> {
        self.gradient(len, DType::F32, name)
    }

    /// Memory for a gradient of an activation.
    pub(crate) fn gradient(&self, len: usize, dtype: DType, name: &str) -> Result<Slice> {
        Ok(self.offload.alloc(len, dtype, Category::Workspace, name)?)
    }

    /// The slice in another type, itself if it is of that type.
    pub(crate) fn cast(&self, slice: Slice, dtype: DType, category: Category, name: &str) -> Result<Slice> {
        if slice.dtype() == dtype {
            return Ok(slice);
        }
        let out = self.offload.alloc(slice.len(), dtype, category, name)?;
        self.submit(Op::Cast { input: slice, out: out.clone() })?;
        Ok(out)
    }

    /// A checksum of what a slice holds; the device is waited for.
    pub(crate) fn checksum(&self, slice: &Slice) -> Result<u64> {
        let out = self.offload.alloc(2, DType::U32, Category::Workspace, "checksum")?;
        self.submit(Op::Checksum { input: slice.clone(), out: out.clone() })?;
        let words = self.compute.download::<u32>(&out)?;
        Ok(u64::from(words[0]) | u64::from(words[1]) << 32)
    }

    /// Whether every element is finite; the device is waited for.
    pub(crate) fn is_finite(&self, slice: &Slice) -> Result<bool> {
        let wide = self.cast(slice.clone(), DType::F32, Category::Workspace, "watched")?;
        Ok(self.compute.download::<f32>(&wide)?.iter().all(|x| x.is_finite()))
    }

    /// A slice that may be written, with the same elements: the slice itself if nobody else holds it and it is not saved, in
    /// whatever tier.
    pub(crate) fn owned(&self, slice: Slice) -> Result<Slice> {
        if slice.is_unique() && !slice.is_protected() {
            return Ok(slice);
        }
        let copy = self.gradient(slice.len(), slice.dtype(), "gradient")?;
        self.submit(Op::Copy { input: slice, out: copy.clone() })?;
        Ok(copy)
    }
}
