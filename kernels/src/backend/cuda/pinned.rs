//! Pinned host memory: small blocks out of slabs, large ones of their own, and memory that is pinned as it is used.
//!
//! Pinning takes the driver a millisecond and more, so what is asked for often, to hand over a batch or fetch a loss, never does it.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    ops::Range,
    ptr::NonNull,
    sync::{Arc, Mutex, PoisonError},
};

use super::driver::{Context, Pinned, Registered, Result};
use crate::arena::Arena;

/// Blocks up to this size come out of a slab.
const SMALL: usize = 256 << 10;
/// Size of a slab.
const SLAB: usize = 8 << 20;
/// Alignment of blocks in a slab: a page, as direct I/O wants it.
const ALIGNMENT: usize = 4096;
/// What is pinned at once of memory that is pinned as it is used.
pub(super) const CHUNK: usize = 64 << 20;

/// The slabs of a device. They are kept: a run's small blocks are of the same sizes at every step.
pub(super) struct Slabs {
    context: Arc<Context>,
    slabs: Mutex<Vec<Slab>>,
}

struct Slab {
    memory: Pinned,
    free: Arena,
}

/// A block of pinned memory.
pub(crate) enum PinnedBlock {
    Own(Pinned),
    Part(Part),
}

/// A block of a slab.
pub(crate) struct Part {
    slabs: Arc<Slabs>,
    slab: usize,
    range: Range<usize>,
    start: NonNull<u8>,
}

// SAFETY: plain memory; who touches it when is for its owner to say.
unsafe impl Send for Part {}
// SAFETY: as above.
unsafe impl Sync for Part {}

impl Slabs {
    pub(super) fn new(context: &Arc<Context>) -> Arc<Self> {
        Arc::new(Slabs { context: context.clone(), slabs: Mutex::default() })
    }

    /// A block, zeroed.
    pub(super) fn block(self: &Arc<Self>, bytes: usize) -> Result<PinnedBlock> {
        if bytes > SMALL {
            return Pinned::new(&self.context, bytes).map(PinnedBlock::Own);
        }
        let mut slabs = self.slabs.lock().unwrap_or_else(PoisonError::into_inner);
        let fitting = |(at, slab): (usize, &mut Slab)| slab.free.alloc(bytes).map(|range| (at, range));
        let found = slabs.iter_mut().enumerate().find_map(fitting);
        let (slab, range) = match found {
            Some(found) => found,
            None => {
                let memory = Pinned::new(&self.context, SLAB)?;
                slabs.push(Slab { memory, free: Arena::new(SLAB, ALIGNMENT) });
                let at = slabs.len() - 1;
                (at, slabs[at].free.alloc(bytes).expect("a fresh slab holds a small block"))
            }
        };
        // SAFETY: the range lies inside the slab.
        let start = unsafe { slabs[slab].memory.start.add(range.start) };
        // SAFETY: as above, and the block is not in use: its last user is done before it is given back.
        unsafe { start.as_ptr().write_bytes(0, bytes) };
        Ok(PinnedBlock::Part(Part { slabs: self.clone(), slab, range, start }))
    }
}

impl PinnedBlock {
    pub(crate) fn start(&self) -> NonNull<u8> {
        match self {
            PinnedBlock::Own(memory) => memory.start,
            PinnedBlock::Part(part) => part.start,
        }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let mut slabs = self.slabs.slabs.lock().unwrap_or_else(PoisonError::into_inner);
        slabs[self.slab].free.free(self.range.clone());
    }
}

/// Pins a large block of address space chunk by chunk, when a chunk is first used.
pub(crate) struct PinOnUse {
    context: Arc<Context>,
    chunks: Mutex<BTreeMap<usize, Registered>>,
}

impl PinOnUse {
    pub(super) fn new(context: &Arc<Context>) -> Self {
        PinOnUse { context: context.clone(), chunks: Mutex::default() }
    }

    /// Pins a range of the block that begins at `start` and is `len` bytes long.
    ///
    /// # Safety
    /// The block outlives `self`.
    pub(super) unsafe fn pin(&self, start: *mut u8, len: usize, range: Range<usize>) -> Result<()> {
        let mut chunks = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
        for at in pieces(&range).map(|piece| piece.start / CHUNK * CHUNK) {
            if let Entry::Vacant(chunk) = chunks.entry(at) {
                let bytes = CHUNK.min(len - at);
                // SAFETY: inside the caller's block, which lives as long as it has to.
                chunk.insert(unsafe { Registered::new(&self.context, start.add(at), bytes) }?);
            }
        }
        Ok(())
    }
}

/// A range cut at the borders of chunks: no copy may cross from one pinned chunk to another.
pub(super) fn pieces(range: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let (mut at, end) = (range.start, range.end);
    std::iter::from_fn(move || {
        let piece = at..end.min((at / CHUNK + 1) * CHUNK);
        at = piece.end;
        (!piece.is_empty()).then_some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_end_at_chunks() {
        let cut = |range| pieces(&range).map(|piece| (piece.start, piece.end)).collect::<Vec<_>>();
        assert_eq!(cut(0..0), []);
        assert_eq!(cut(5..CHUNK), [(5, CHUNK)]);
        let end = 2 * CHUNK + 1;
        assert_eq!(cut(CHUNK - 1..end), [(CHUNK - 1, CHUNK), (CHUNK, 2 * CHUNK), (2 * CHUNK, end)]);
    }
}
