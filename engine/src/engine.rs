//! [`Engine`]: a device, its compute stream, and the offload runtime beside it.

use ebbtide_kernels::{Category, DType, Device, Op, Slice, Stream};
use ebbtide_offload::{Offload, OffloadOptions, Policy};

use crate::Result;

/// Where a model runs. Cloning is cheap and shares everything.
#[derive(Clone)]
pub struct Engine {
    compute: Stream,
    offload: Offload,
}

impl Engine {
    /// An engine on a device, whose saved tensors go where the policy says.
    ///
    /// # Errors
    /// The offload runtime's, should it not start.
    pub fn new(device: &Device, policy: Box<dyn Policy>, options: OffloadOptions) -> Result<Self> {
        let compute = device.stream("compute");
        let offload = Offload::new(&compute, policy, options)?;
        Ok(Engine { compute, offload })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        self.compute.device()
    }

    /// The stream that computes.
    pub fn compute(&self) -> &Stream {
        &self.compute
    }

    /// The runtime that holds saved tensors.
    pub fn offload(&self) -> &Offload {
        &self.offload
    }

    pub(crate) fn submit(&self, op: Op) -> Result<()> {
        Ok(self.compute.submit(op)?)
    }

    /// f32 memory for something that forward computes.
    pub(crate) fn activation(&self, len: usize, name: &str) -> Result<Slice> {
        Ok(self.offload.alloc(len, DType::F32, Category::Activations, name)?)
    }

    /// f32 memory for a gradient of an activation, or scratch.
    pub(crate) fn workspace(&self, len: usize, name: &str) -> Result<Slice> {
        Ok(self.offload.alloc(len, DType::F32, Category::Workspace, name)?)
    }

    /// A checksum of what a slice holds; the device is waited for.
    pub(crate) fn checksum(&self, slice: &Slice) -> Result<u64> {
        let out = self.offload.alloc(2, DType::U32, Category::Workspace, "checksum")?;
        self.submit(Op::Checksum { input: slice.clone(), out: out.clone() })?;
        let words = self.compute.download::<u32>(&out)?;
        Ok(u64::from(words[0]) | u64::from(words[1]) << 32)
    }

    /// A slice that may be written, with the same elements: the slice itself if nobody else holds it and it is not saved, in
    /// whatever tier.
    pub(crate) fn owned(&self, slice: Slice) -> Result<Slice> {
        if slice.is_unique() && !slice.is_protected() {
            return Ok(slice);
        }
        let copy = self.workspace(slice.len(), "gradient")?;
        self.submit(Op::Copy { input: slice, out: copy.clone() })?;
        Ok(copy)
    }
}
