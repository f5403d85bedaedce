//! [`Flat`]: a model's weights or moments in one run of f32, on the device or in host memory.

use std::ops::Range;

use ebbtide_kernels::{HostBuffer, Op, Slice};

use crate::{Engine, Result};

/// Elements of a chunk of what is in host memory.
pub(crate) const CHUNK: usize = 1 << 20;

/// f32 elements, laid out as [`crate::Parameters`] are.
#[derive(Clone, Debug)]
pub enum Flat {
    /// In device memory.
    Device(Slice),
    /// In host memory, of which the device sees a chunk at a time.
    Host(HostBuffer),
}

impl Flat {
    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            Flat::Device(slice) => slice.len(),
            Flat::Host(buffer) => buffer.bytes() / 4,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies elements to the host, when everything that writes them is done.
    ///
    /// # Errors
    /// The device's; [`ebbtide_kernels::Error::OutOfBounds`] for a range that leaves the elements.
    pub fn read(&self, engine: &Engine, range: Range<usize>) -> Result<Vec<f32>> {
        Ok(match self {
            Flat::Device(slice) => engine.compute().download(&slice.part(range)?)?,
            Flat::Host(buffer) => buffer.part(4 * range.start..4 * range.end)?.to_vec()?,
        })
    }

    /// Copies all elements to the host.
    ///
    /// # Errors
    /// The device's.
    pub fn to_vec(&self, engine: &Engine) -> Result<Vec<f32>> {
        self.read(engine, 0..self.len())
    }

    /// Overwrites elements, when everything that uses them is done.
    ///
    /// # Errors
    /// As for [`Flat::read`], and if there are not as many values as elements.
    pub fn write(&self, engine: &Engine, range: Range<usize>, values: &[f32]) -> Result<()> {
        let bytes = bytemuck::cast_slice(values);
        match self {
            Flat::Device(slice) => {
                let out = slice.part(range)?;
                let host = engine.device().host_buffer(bytes.len(), "upload")?;
                host.all().write(|to| to.copy_from_slice(bytes))?;
                engine.submit(Op::CopyIn { input: host.all(), out })
            }
            Flat::Host(buffer) => {
                let part = buffer.part(4 * range.start..4 * range.end)?;
                if part.bytes() != bytes.len() {
                    let (len, end) = (bytes.len() / 4, range.end);
                    let start = range.start;
                    return Err(
                        ebbtide_kernels::Error::OutOfBounds { what: "elements", start, end, len }.into()
                    );
                }
                Ok(part.write(|to| to.copy_from_slice(bytes))?)
            }
        }
    }
}
