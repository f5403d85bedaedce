//! The bytes behind the CPU backends, one anonymous map for the device, and the host's zeroed blocks.
//!
//! This file is where addresses become Rust slices; the rest of the crate handles offsets.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    io,
    ptr::NonNull,
    sync::atomic::{AtomicBool, Ordering},
};

use crate::{
    DType, Element, Slice,
    backend::cuda::{PinOnUse, PinnedBlock},
    cpu::{
        float::{FloatParts, Floats},
        threads::Parts,
    },
};

/// Address space asked for where no budget is set; pages are taken from the system when first touched.
const UNLIMITED_BYTES: usize = 1 << 40;

/// The device memory of the CPU backends. Pages are zero until written.
pub(crate) struct Memory {
    map: memmap2::MmapRaw,
}

impl Memory {
    /// Reserves `bytes`, or without a budget as much address space as the system allows.
    pub(crate) fn reserve(budget_bytes: Option<usize>) -> io::Result<Self> {
        let map = match budget_bytes {
            Some(bytes) => map(bytes)?,
            None => map_unlimited()?,
        };
        // Fewer page faults and TLB misses; a system without huge pages works all the same.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Memory { map: map.into() })
    }

    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// A slice of the device's memory, to read.
    ///
    /// # Safety
    /// No other thread writes these bytes while the result lives: the caller runs an op whose waits are over.
    pub(crate) unsafe fn read<T: Element>(&self, slice: &Slice) -> &[T] {
        let start = self.start::<T>(slice);
        // SAFETY: `start` checked that the range lies inside the map and is aligned; the map lives as long as `self`,
        // its pages are initialised (zero) and any bit pattern is a `T: Pod`; the caller rules out concurrent writes.
        unsafe { std::slice::from_raw_parts(start, slice.len()) }
    }

    /// A slice of the device's memory, to write.
    ///
    /// # Safety
    /// No other reference to these bytes exists while the result lives: the caller runs an op whose waits are over, and
    /// takes each of its operands once.
    #[allow(clippy::mut_from_ref)] // The map is shared memory; exclusive access is what the order layer grants.
    pub(crate) unsafe fn write<T: Element>(&self, slice: &Slice) -> &mut [T] {
        let start = self.start::<T>(slice);
        // SAFETY: as in `read`; the caller grants exclusive access.
        unsafe { std::slice::from_raw_parts_mut(start, slice.len()) }
    }

    /// Floats of any type, to read.
    ///
    /// # Safety
    /// As for [`Memory::read`].
    pub(crate) unsafe fn floats(&self, slice: &Slice) -> Floats<'_> {
        // SAFETY: the caller keeps the contract.
        unsafe {
            match slice.dtype() {
                DType::F16 => Floats::F16(self.read(slice)),
                DType::BF16 => Floats::BF16(self.read(slice)),
                _ => Floats::F32(self.read(slice)),
            }
        }
    }

    /// Floats of any type, to write.
    ///
    /// # Safety
    /// As for [`Memory::write`].
    pub(crate) unsafe fn float_parts(&self, slice: &Slice) -> FloatParts<'_> {
        // SAFETY: the caller keeps the contract.
        unsafe {
            match slice.dtype() {
                DType::F16 => FloatParts::F16(Parts::new(self.write(slice))),
                DType::BF16 => FloatParts::BF16(Parts::new(self.write(slice))),
                _ => FloatParts::F32(Parts::new(self.write(slice))),
            }
        }
    }

    /// The bytes of a slice, to read.
    ///
    /// # Safety
    /// As for [`Memory::read`].
    pub(crate) unsafe fn read_bytes(&self, slice: &Slice) -> &[u8] {
        // SAFETY: the caller keeps the contract of `read`.
        unsafe { self.read::<u8>(&slice.as_bytes()) }
    }

    /// The bytes of a slice, to write.
    ///
    /// # Safety
    /// As for [`Memory::write`].
    #[allow(clippy::mut_from_ref)] // As in `write`.
    pub(crate) unsafe fn write_bytes(&self, slice: &Slice) -> &mut [u8] {
        // SAFETY: the caller keeps the contract of `write`.
        unsafe { self.write::<u8>(&slice.as_bytes()) }
    }

    /// Sets device bytes.
    ///
    /// # Safety
    /// As for [`Memory::write`].
    pub(crate) unsafe fn fill_bytes(&self, range: std::ops::Range<usize>, value: u8) {
        assert!(range.start <= range.end && range.end <= self.map.len());
        // SAFETY: inside the map; the caller grants exclusive access.
        unsafe { self.map.as_mut_ptr().add(range.start).write_bytes(value, range.len()) }
    }

    fn start<T: Element>(&self, slice: &Slice) -> *mut T {
        let range = slice.range();
        assert_eq!(T::DTYPE, slice.dtype(), "a {} slice taken as {}", slice.dtype(), T::DTYPE);
        assert!(range.end <= self.map.len(), "{range:?} outside of {}", self.map.len());
        // SAFETY: `range.start` is inside the map, checked above.
        let start = unsafe { self.map.as_mut_ptr().add(range.start) }.cast::<T>();
        assert!(start.is_aligned(), "{range:?} not aligned for {}", T::DTYPE);
        start
    }
}

/// Address space whose pages, zero until written, are taken from the system when first touched.
fn map(bytes: usize) -> io::Result<memmap2::MmapMut> {
    memmap2::MmapOptions::new().len(bytes.max(1)).no_reserve_swap().map_anon()
}

/// As much address space as the system allows, up to [`UNLIMITED_BYTES`].
fn map_unlimited() -> io::Result<memmap2::MmapMut> {
    let mut bytes = UNLIMITED_BYTES;
    loop {
        match map(bytes) {
            Err(_) if bytes > 1 << 30 => bytes /= 2,
            result => return result,
        }
    }
}

/// Alignment of host blocks: a page, as direct I/O and pinning want it.
const HOST_ALIGNMENT: usize = 4096;

/// A zeroed block of host memory that device ops and the host take turns with.
pub(crate) struct HostBlock {
    start: NonNull<u8>,
    len: usize,
    owner: Owner,
    /// The host is reading or writing it; guarded by the device's lock.
    pub(crate) busy: AtomicBool,
}

/// Where a block's memory is from.
enum Owner {
    Allocator,
    Map {
        _map: memmap2::MmapRaw,
    },
    Pinned {
        _block: PinnedBlock,
    },
    /// What pins it goes before it does.
    PinnedOnUse {
        pin: PinOnUse,
        _map: memmap2::MmapRaw,
    },
}

// SAFETY: the block is plain memory; who may touch it when is decided by the order layer and the `busy` flag.
unsafe impl Send for HostBlock {}
// SAFETY: as above.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    /// `None` if the system has no memory for it.
    pub(crate) fn new(len: usize) -> Option<Self> {
        // The allocator writes zeros to aligned memory; pages of a map are zero without being touched.
        if len >= 64 << 10 {
            return memmap2::MmapOptions::new().len(len).map_anon().and_then(Self::of_map).ok();
        }
        let layout = Self::layout(len)?;
        // SAFETY: the layout is not empty.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(HostBlock { start, len, owner: Owner::Allocator, busy: AtomicBool::new(false) })
    }

    /// Pinned memory of `len` bytes, zeroed.
    pub(crate) fn pinned(block: PinnedBlock, len: usize) -> Self {
        let start = block.start();
        HostBlock { start, len, owner: Owner::Pinned { _block: block }, busy: AtomicBool::new(false) }
    }

    /// Address space whose pages are taken from the system when first touched: as much as it allows.
    pub(crate) fn reserve() -> io::Result<Self> {
        map_unlimited().and_then(Self::of_map)
    }

    fn of_map(map: memmap2::MmapMut) -> io::Result<Self> {
        let map = memmap2::MmapRaw::from(map);
        let start = NonNull::new(map.as_mut_ptr()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(HostBlock { start, len: map.len(), owner: Owner::Map { _map: map }, busy: AtomicBool::new(false) })
    }

    /// The same block, whose parts a backend pins as it uses them.
    pub(crate) fn pin_with(mut self, pin: PinOnUse) -> Self {
        self.owner = match std::mem::replace(&mut self.owner, Owner::Allocator) {
            Owner::Map { _map } => Owner::PinnedOnUse { pin, _map },
            other => other,
        };
        self
    }

    /// What pins the block's parts, where that is left to be done.
    pub(crate) fn pinned_on_use(&self) -> Option<&PinOnUse> {
        match &self.owner {
            Owner::PinnedOnUse { pin, .. } => Some(pin),
            _ => None,
        }
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Takes every page from the system now, not when it is first used.
    pub(crate) fn touch(&self) {
        for at in (0..self.len).step_by(HOST_ALIGNMENT) {
            // SAFETY: inside the block, which nobody else has yet.
            unsafe { self.start.as_ptr().add(at).write_volatile(0) };
        }
    }

    fn layout(len: usize) -> Option<Layout> {
        Layout::from_size_align(len.max(1), HOST_ALIGNMENT).ok()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Relaxed)
    }

    /// A part of the block, to read.
    ///
    /// # Safety
    /// No one writes these bytes while the result lives.
    pub(crate) unsafe fn bytes(&self, start: usize, len: usize) -> &[u8] {
        assert!(start <= self.len && len <= self.len - start);
        // SAFETY: inside the block, which is initialised (zeroed) and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(start), len) }
    }

    /// A part of the block, to write.
    ///
    /// # Safety
    /// No other reference to these bytes exists while the result lives.
    #[allow(clippy::mut_from_ref)] // Shared memory, as in `Memory::write`.
    pub(crate) unsafe fn bytes_mut(&self, start: usize, len: usize) -> &mut [u8] {
        assert!(start <= self.len && len <= self.len - start);
        // SAFETY: as in `bytes`; the caller grants exclusive access.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(start), len) }
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        if matches!(self.owner, Owner::Allocator)
            && let Some(layout) = Self::layout(self.len)
        {
            // SAFETY: allocated in `new` with the same layout.
            unsafe { dealloc(self.start.as_ptr(), layout) }
        }
    }
}
