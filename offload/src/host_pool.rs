//! Host memory for offloaded slices, reused from step to step.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use ebbtide_kernels::{Device, HostBuffer, Result};

/// Buffers by exact size. A step asks for the sizes that the step before asked for, so after the first step nothing is
/// allocated.
pub(crate) struct HostPool {
    device: Device,
    free: Mutex<HashMap<usize, Vec<HostBuffer>>>,
}

/// Host memory for one slice; back in the pool when dropped. Ops that still use it are no concern: whatever is copied
/// into it next is ordered after them by the device layer.
pub(crate) struct HostSlot {
    buffer: HostBuffer,
    pool: Arc<HostPool>,
}

impl HostPool {
    pub(crate) fn new(device: Device) -> Arc<Self> {
        Arc::new(HostPool { device, free: Mutex::default() })
    }

    pub(crate) fn take(self: &Arc<Self>, bytes: usize) -> Result<HostSlot> {
        let free =
            self.free.lock().unwrap_or_else(PoisonError::into_inner).get_mut(&bytes).and_then(Vec::pop);
        let buffer = match free {
            Some(buffer) => buffer,
            None => self.device.host_buffer(bytes, "offload")?,
        };
        Ok(HostSlot { buffer, pool: self.clone() })
    }
}

impl HostSlot {
    pub(crate) fn buffer(&self) -> &HostBuffer {
        &self.buffer
    }
}

impl Drop for HostSlot {
    fn drop(&mut self) {
        let mut free = self.pool.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.entry(self.buffer.bytes()).or_default().push(self.buffer.clone());
    }
}
