//! Device memory, and what of the host's the device may touch.

use std::{collections::BTreeMap, ops::Range};

use ebbtide_ptx::{FaultKind, Memory, Problem};
use memmap2::{MmapMut, MmapOptions};

use crate::Refused;

/// Bytes between allocations.
const GAP: u64 = 1 << 20;
/// What every allocation's address is a multiple of, as CUDA's are.
const ALIGNMENT: u64 = 256;
/// The first address: one that no process of the host has.
const BASE: u64 = 1 << 52;

/// All that a device can address.
#[derive(Debug)]
pub(crate) struct Addresses {
    device: BTreeMap<u64, Allocation>,
    next: u64,
    /// Bytes that are allocated, and that can be.
    used: usize,
    capacity: usize,
    /// Pinned ranges of the host by their start: the length, and whether the host owns them.
    pinned: BTreeMap<u64, Pinned>,
}

#[derive(Debug)]
struct Allocation {
    bytes: MmapMut,
    /// One byte a byte: whether it was written.
    written: MmapMut,
}

#[derive(Debug)]
struct Pinned {
    len: u64,
    /// The memory itself, unless it is only registered.
    memory: Option<MmapMut>,
}

fn lazily(bytes: usize) -> Result<MmapMut, Refused> {
    MmapOptions::new().len(bytes).no_reserve_swap().map_anon().map_err(|_| Refused::OutOfMemory)
}

impl Addresses {
    pub(crate) fn new(capacity: usize) -> Self {
        Addresses { device: BTreeMap::new(), next: BASE, used: 0, capacity, pinned: BTreeMap::new() }
    }

    pub(crate) fn free_bytes(&self) -> usize {
        self.capacity - self.used
    }

    pub(crate) fn alloc(&mut self, bytes: usize) -> Result<u64, Refused> {
        if bytes == 0 {
            return Err(Refused::InvalidValue);
        }
        if bytes > self.free_bytes() {
            return Err(Refused::OutOfMemory);
        }
        let start = self.next;
        self.device.insert(start, Allocation { bytes: lazily(bytes)?, written: lazily(bytes)? });
        self.next = (start + bytes as u64 + GAP).next_multiple_of(ALIGNMENT);
        self.used += bytes;
        Ok(start)
    }

    /// The range that was freed.
    pub(crate) fn free(&mut self, start: u64) -> Option<Range<u64>> {
        let bytes = self.device.remove(&start)?.bytes.len();
        self.used -= bytes;
        Some(start..start + bytes as u64)
    }

    /// Bytes of an allocation that begins there.
    pub(crate) fn allocated(&self, start: u64) -> Option<Range<u64>> {
        self.device.get(&start).map(|allocation| start..start + allocation.bytes.len() as u64)
    }

    pub(crate) fn pin(&mut self, bytes: usize) -> Result<*mut u8, Refused> {
        if bytes == 0 {
            return Err(Refused::InvalidValue);
        }
        let mut memory = lazily(bytes)?;
        let start = memory.as_mut_ptr();
        self.pinned.insert(start as u64, Pinned { len: bytes as u64, memory: Some(memory) });
        Ok(start)
    }

    pub(crate) fn register(&mut self, start: u64, bytes: usize) -> Result<(), Refused> {
        let end = start + bytes as u64;
        let before = self.pinned.range(..end).next_back();
        if before.is_some_and(|(at, pinned)| at + pinned.len > start) {
            return Err(Refused::AlreadyRegistered);
        }
        self.pinned.insert(start, Pinned { len: bytes as u64, memory: None });
        Ok(())
    }

    /// The range that begins there, if it is the device's (`owned`) or registered.
    pub(crate) fn pinned_at(&self, start: u64, owned: bool) -> Option<Range<u64>> {
        let pinned = self.pinned.get(&start).filter(|pinned| pinned.memory.is_some() == owned)?;
        Some(start..start + pinned.len)
    }

    pub(crate) fn unpin(&mut self, start: u64) {
        self.pinned.remove(&start);
    }

    /// Whether a range of the host's lies inside one pinned piece.
    pub(crate) fn is_pinned(&self, range: &Range<u64>) -> bool {
        let piece = self.pinned.range(..=range.start).next_back();
        piece.is_some_and(|(start, pinned)| range.end <= start + pinned.len)
    }

    pub(crate) fn is_device(&self, address: u64) -> bool {
        address >= BASE
    }

    /// What is still there, for people.
    pub(crate) fn left(&self) -> Vec<String> {
        let device = self.device.iter();
        let device = device.map(|(at, kept)| format!("{} bytes at {at:#x}", kept.bytes.len()));
        let pinned = self.pinned.iter();
        let pinned = pinned.map(|(at, kept)| format!("{} pinned bytes at {at:#x}", kept.len));
        device.chain(pinned).collect()
    }

    fn place(&mut self, address: u64, len: usize) -> Result<(&mut Allocation, Range<usize>), Problem> {
        let next = self.next;
        let found = self.device.range_mut(..=address).next_back();
        let place = found.and_then(|(start, allocation)| {
            let at = (address - start) as usize;
            (at + len <= allocation.bytes.len()).then_some((allocation, at..at + len))
        });
        place.ok_or_else(|| {
            let was = if address < next { "no allocation that is there now" } else { "no allocation" };
            Problem::new(FaultKind::OutOfBounds, format!("{len} bytes at {address:#x} lie in {was}"))
        })
    }

    fn host(&self, address: u64, len: usize) -> Result<*mut u8, Problem> {
        if self.is_pinned(&(address..address + len as u64)) {
            return Ok(address as *mut u8);
        }
        let what = format!("{len} bytes at {address:#x} are the host's, and not pinned");
        Err(Problem::new(FaultKind::OutOfBounds, what))
    }
}

impl Memory for Addresses {
    fn read(&mut self, address: u64, into: &mut [u8]) -> Result<(), Problem> {
        if !self.is_device(address) {
            let from = self.host(address, into.len())?;
            // SAFETY: pinned memory, which its owner unpins before it frees it.
            unsafe { from.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
            return Ok(());
        }
        let (allocation, range) = self.place(address, into.len())?;
        if let Some(hole) = allocation.written[range.clone()].iter().position(|&written| written == 0) {
            let what = format!("{:#x} is read before it is written", address + hole as u64);
            return Err(Problem::new(FaultKind::Uninitialised, what));
        }
        into.copy_from_slice(&allocation.bytes[range]);
        Ok(())
    }

    fn write(&mut self, address: u64, from: &[u8]) -> Result<(), Problem> {
        if !self.is_device(address) {
            let to = self.host(address, from.len())?;
            // SAFETY: as above.
            unsafe { to.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
            return Ok(());
        }
        let (allocation, range) = self.place(address, from.len())?;
        allocation.written[range.clone()].fill(1);
        allocation.bytes[range].copy_from_slice(from);
        Ok(())
    }
}
