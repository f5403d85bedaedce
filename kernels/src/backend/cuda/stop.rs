//! The word at which queued updates look before they change weights.
//!
//! The host hears of an op's failure when it next waits, and by then has queued more: also the update that would make weights of what
//! came of the failure. Whatever fails while work is queued behind it raises the word first.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::driver::{Context, DeviceMemory, Result, Stream};

const BYTES: usize = 4;

pub(super) struct Stop {
    /// Of its own: what else is queued cannot hold it up.
    stream: Mutex<Stream>,
    memory: DeviceMemory,
    context: Arc<Context>,
}

impl Stop {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        let (stream, memory) = (Mutex::new(Stream::new(context)?), DeviceMemory::new(context, BYTES)?);
        let stop = Stop { stream, memory, context: context.clone() };
        stop.clear()?;
        Ok(stop)
    }

    pub(super) fn address(&self) -> u64 {
        self.memory.start
    }

    /// What is ordered after this changes nothing.
    pub(super) fn raise(&self) -> Result<()> {
        self.set(1)
    }

    /// Once the streams are done.
    pub(super) fn clear(&self) -> Result<()> {
        self.set(0)
    }

    fn set(&self, value: u8) -> Result<()> {
        let stream: MutexGuard<'_, Stream> = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        self.context.bind()?;
        // SAFETY: memory of that length; kernels read the word whole.
        unsafe { stream.set(self.memory.start, value, BYTES) }?;
        stream.synchronize()
    }
}
