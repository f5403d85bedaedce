//! The memory that blocks are read into: one piece, taken once, cut into equal slots.
//!
//! Slots begin at pages, as direct I/O demands. On Linux the piece begins at a huge page and asks for huge ones: the fewer
//! pieces a read is scattered over, the faster the disk fills it. A slot has one owner at a time and moves from hand to
//! hand: free, being read into, being gathered from.
//!
//! Costs: address space for one huge page more than is asked for; memory only as slots are first used.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::MmapMut;

use crate::{Error, Result};

/// What offsets, lengths and addresses are multiples of: enough for direct I/O on any disk in use.
pub(crate) const PAGE_BYTES: u64 = 4096;
/// Where the piece begins.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Takes memory for `count` slots of `bytes`, which is a multiple of [`PAGE_BYTES`] and not 0.
///
/// # Errors
///
/// [`Error::NoMemory`] if the system has not as much.
pub(crate) fn slots(count: usize, bytes: usize) -> Result<Vec<Slot>> {
    debug_assert!(bytes > 0 && (bytes as u64).is_multiple_of(PAGE_BYTES));
    let no_memory = |total: Option<usize>| Error::NoMemory { bytes: total.unwrap_or(usize::MAX) };
    let total = count.checked_mul(bytes).and_then(|total| total.checked_add(HUGE_PAGE_BYTES));
    let mut map = MmapMut::map_anon(total.ok_or_else(|| no_memory(None))?).map_err(|_| no_memory(total))?;
    let start = map.as_mut_ptr();
    let skip = start.align_offset(HUGE_PAGE_BYTES).min(HUGE_PAGE_BYTES);
    // Whole huge pages alone, or the last would take more than was asked for. Where none can be had, ordinary ones do.
    #[cfg(target_os = "linux")]
    let _ =
        map.advise_range(memmap2::Advice::HugePage, skip, count * bytes / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES);
    let map = Arc::new(map);
    let slot = |index: usize| {
        // SAFETY: `skip + count * bytes` is at most the length of the map, so the address is within it and not null.
        let start = unsafe { NonNull::new_unchecked(start.add(skip + index * bytes)) };
        Slot { start, bytes, _map: map.clone() }
    };
    Ok((0..count).map(slot).collect())
}

/// A part of the arena that its owner alone may touch.
#[derive(Debug)]
pub(crate) struct Slot {
    start: NonNull<u8>,
    bytes: usize,
    /// Keeps the memory. Nobody reads or writes through it.
    _map: Arc<MmapMut>,
}

// SAFETY: a slot is the only way to its bytes: `slots` makes each from a range of its own, it cannot be cloned, and the map
// behind it is not used but to be freed after the last slot. So it may move between threads and be shared as `[u8]` may.
unsafe impl Send for Slot {}
// SAFETY: as above; a shared slot only gives `&[u8]`.
unsafe impl Sync for Slot {}

impl Deref for Slot {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range lies in the map, which the slot keeps and which was zeroed when taken; it overlaps no other
        // slot's, and the borrow of this slot keeps it from being written to.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }
}

impl DerefMut for Slot {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; the borrow is exclusive, and no other slot has these bytes.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_begin_at_pages_and_share_nothing() {
        let mut slots = slots(5, 3 * PAGE_BYTES as usize).unwrap();
        for (index, slot) in slots.iter_mut().enumerate() {
            assert_eq!((slot.len(), slot.as_ptr() as u64 % PAGE_BYTES), (3 * 4096, 0));
            slot.fill(index as u8 + 1);
        }
        let kept = slots.split_off(3);
        drop(slots);
        for (index, slot) in (4..).zip(kept) {
            let seen = std::thread::spawn(move || slot.iter().all(|&byte| byte == index));
            assert!(seen.join().unwrap());
        }
    }

    #[test]
    fn more_than_there_is() {
        assert!(matches!(slots(usize::MAX / 8192, 8192), Err(Error::NoMemory { .. })));
        assert!(matches!(slots(usize::MAX, 8192), Err(Error::NoMemory { .. })));
    }
}
