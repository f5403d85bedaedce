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

    /// A slice that nobody else holds, with the same elements: the slice itself if that is so already.
    pub(crate) fn owned(&self, slice: Slice) -> Result<Slice> {
        if slice.is_unique() {
            return Ok(slice);
        }
        let copy = self.workspace(slice.len(), "gradient")?;
        self.submit(Op::Copy { input: slice, out: copy.clone() })?;
        Ok(copy)
    }
}
