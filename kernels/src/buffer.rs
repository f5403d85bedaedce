//! Handles of memory: a [`Slice`] of the device's, a [`HostBuffer`] of the host's.

use std::{
    fmt,
    ops::Range,
    sync::{Arc, atomic::Ordering},
};

use crate::{
    DType, Element, Error, Result,
    device::Shared,
    ledger::Category,
    memory::HostBlock,
    op::Mode,
    order::{Access, Space},
};

/// An allocation of device memory; dropping the last handle gives it back.
pub(crate) struct Buffer {
    pub(crate) device: Arc<Shared>,
    pub(crate) id: u64,
    pub(crate) range: Range<usize>,
    pub(crate) name: String,
    pub(crate) category: Category,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.device.free(self);
    }
}

/// A contiguous run of elements in device memory: (buffer, offset, length, dtype).
///
/// Cloning is cheap and shares the memory. The allocation lives until its last slice is dropped; ops that were submitted
/// before are unaffected, since whoever gets the bytes next is ordered after them.
#[derive(Clone)]
pub struct Slice {
    /// `None` once the op that holds the slice was queued: queued ops need the place, not the ownership.
    buffer: Option<Arc<Buffer>>,
    id: u64,
    buffer_start: usize,
    start: usize,
    len: usize,
    dtype: DType,
}

impl Slice {
    pub(crate) fn new(buffer: Arc<Buffer>, len: usize, dtype: DType) -> Self {
        let (id, start) = (buffer.id, buffer.range.start);
        Slice { buffer: Some(buffer), id, buffer_start: start, start, len, dtype }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements' type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.size_bytes()
    }

    /// Identity of the allocation; never used again, unlike an address.
    pub fn buffer_id(&self) -> u64 {
        self.id
    }

    /// Bytes from the start of the allocation.
    pub fn offset_bytes(&self) -> usize {
        self.start - self.buffer_start
    }

    /// The allocation's name, for reports.
    pub fn name(&self) -> &str {
        self.buffer.as_ref().map_or("", |buffer| &buffer.name)
    }

    /// What the allocation is for.
    pub fn category(&self) -> Option<Category> {
        self.buffer.as_ref().map(|buffer| buffer.category)
    }

    /// Whether this is the only handle of its allocation.
    pub fn is_unique(&self) -> bool {
        self.buffer.as_ref().is_some_and(|buffer| Arc::strong_count(buffer) == 1)
    }

    /// A part of the slice, in elements.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if the range leaves the slice.
    pub fn part(&self, elements: Range<usize>) -> Result<Slice> {
        if elements.start > elements.end || elements.end > self.len {
            let Range { start, end } = elements;
            return Err(Error::OutOfBounds { what: "elements", start, end, len: self.len });
        }
        let start = self.start + elements.start * self.dtype.size_bytes();
        Ok(Slice { start, len: elements.len(), ..self.clone() })
    }

    /// Refuses ops that write these bytes, as long as the result lives: whoever relies on what the slice holds now is told
    /// of the op that would change it.
    pub fn protect(&self, name: &str) -> Protection {
        let device = self.buffer.as_ref().map(|buffer| buffer.device.clone());
        let key = device.as_ref().map(|device| device.protect(self.id, self.range(), name));
        Protection { device, buffer: self.id, key: key.unwrap_or_default() }
    }

    /// Whether ops that write these bytes are refused: see [`Slice::protect`].
    pub fn is_protected(&self) -> bool {
        self.device().is_some_and(|device| device.is_protected(self.id, &self.range()))
    }

    /// The same memory as bytes.
    pub fn as_bytes(&self) -> Slice {
        Slice { len: self.bytes(), dtype: DType::U8, ..self.clone() }
    }

    /// Device addresses.
    pub(crate) fn range(&self) -> Range<usize> {
        self.start..self.start + self.bytes()
    }

    pub(crate) fn device(&self) -> Option<&Arc<Shared>> {
        self.buffer.as_ref().map(|buffer| &buffer.device)
    }

    /// Lets go of the allocation and keeps the place. The result may be the last handle, whose drop locks the device.
    pub(crate) fn detach(&mut self) -> Option<Arc<Buffer>> {
        self.buffer.take()
    }
}

/// Keeps bytes from being written: see [`Slice::protect`]. It does not keep them allocated.
pub struct Protection {
    device: Option<Arc<Shared>>,
    buffer: u64,
    key: u64,
}

impl Drop for Protection {
    fn drop(&mut self) {
        if let Some(device) = &self.device {
            device.unprotect(self.buffer, self.key);
        }
    }
}

impl fmt::Debug for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}+{}[{} × {}]", self.name(), self.id, self.offset_bytes(), self.len, self.dtype)
    }
}

pub(crate) struct HostInner {
    pub(crate) device: Arc<Shared>,
    pub(crate) id: u64,
    pub(crate) name: String,
    pub(crate) block: Arc<HostBlock>,
    /// What the ledger counts for it.
    pub(crate) counted: usize,
}

impl Drop for HostInner {
    fn drop(&mut self) {
        self.device.free_host(self);
    }
}

/// Host memory that transfers read and write. Zero when new.
///
/// Cloning is cheap and shares the memory.
#[derive(Clone)]
pub struct HostBuffer(pub(crate) Arc<HostInner>);

impl HostBuffer {
    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.0.block.len()
    }

    /// The name given at allocation.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The whole buffer.
    pub fn all(&self) -> HostSlice {
        HostSlice {
            id: self.0.id,
            block: self.0.block.clone(),
            start: 0,
            len: self.bytes(),
            owner: Some(self.clone()),
        }
    }

    /// A part of it, in bytes.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if the range leaves the buffer.
    pub fn part(&self, bytes: Range<usize>) -> Result<HostSlice> {
        self.all().part(bytes)
    }
}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}[{}]", self.name(), self.0.id, self.bytes())
    }
}

/// A contiguous run of bytes of a [`HostBuffer`].
#[derive(Clone)]
pub struct HostSlice {
    id: u64,
    block: Arc<HostBlock>,
    start: usize,
    len: usize,
    owner: Option<HostBuffer>,
}

impl HostSlice {
    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.len
    }

    /// A part of it, in bytes.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if the range leaves the slice.
    pub fn part(&self, bytes: Range<usize>) -> Result<HostSlice> {
        if bytes.start > bytes.end || bytes.end > self.len {
            let Range { start, end } = bytes;
            return Err(Error::OutOfBounds { what: "bytes", start, end, len: self.len });
        }
        Ok(HostSlice { start: self.start + bytes.start, len: bytes.len(), ..self.clone() })
    }

    /// Hands the bytes to `f`, after every op that writes them is done.
    ///
    /// # Errors
    /// An op's error, if one failed; [`Error::HostBusy`] if the host is using the buffer already.
    pub fn read<R>(&self, f: impl FnOnce(&[u8]) -> R) -> Result<R> {
        let _claim = self.claim(Mode::Read)?;
        // SAFETY: `claim` waited for the writers, and while it lives no op on this buffer is accepted.
        Ok(f(unsafe { self.block.bytes(self.start, self.len) }))
    }

    /// Hands the bytes to `f` to write, after every op that reads or writes them is done.
    ///
    /// # Errors
    /// As for [`HostSlice::read`].
    pub fn write<R>(&self, f: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
        let _claim = self.claim(Mode::Update)?;
        // SAFETY: `claim` waited for readers and writers, and while it lives no op on this buffer is accepted and no
        // other claim is granted.
        Ok(f(unsafe { self.block.bytes_mut(self.start, self.len) }))
    }

    /// Copies the bytes out as elements; a trailing part of an element is left out.
    ///
    /// # Errors
    /// As for [`HostSlice::read`].
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.read(|bytes| bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect())
    }

    fn claim(&self, mode: Mode) -> Result<Claim<'_>> {
        let owner = self.owner.as_ref().expect("a host slice in a user's hands owns its buffer");
        owner.0.device.claim_host(&owner.0, &self.access(mode))?;
        Ok(Claim(&self.block))
    }

    pub(crate) fn access(&self, mode: Mode) -> Access {
        Access { space: Space::Host(self.id), range: self.start..self.start + self.len, mode }
    }

    pub(crate) fn overlaps(&self, other: &HostSlice) -> bool {
        self.id == other.id && self.start < other.start + other.len && other.start < self.start + self.len
    }

    pub(crate) fn device(&self) -> Option<&Arc<Shared>> {
        self.owner.as_ref().map(|owner| &owner.0.device)
    }

    pub(crate) fn name(&self) -> &str {
        self.owner.as_ref().map_or("", |owner| owner.name())
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.block.is_busy()
    }

    /// The block, and the bytes of it.
    pub(crate) fn place(&self) -> (&HostBlock, Range<usize>) {
        (&self.block, self.start..self.start + self.len)
    }

    /// Lets go of the buffer's accounting; the block itself lives until the op is done.
    pub(crate) fn detach(&mut self) {
        self.owner = None;
    }

    /// The bytes, for an op to read.
    ///
    /// # Safety
    /// No one writes them while the result lives: the caller runs an op whose waits are over.
    pub(crate) unsafe fn op_bytes(&self) -> &[u8] {
        // SAFETY: the caller keeps the contract.
        unsafe { self.block.bytes(self.start, self.len) }
    }

    /// The bytes, for an op to write.
    ///
    /// # Safety
    /// No other reference to them exists while the result lives: the caller runs an op whose waits are over.
    #[allow(clippy::mut_from_ref)] // Shared memory; the order layer grants exclusive access.
    pub(crate) unsafe fn op_bytes_mut(&self) -> &mut [u8] {
        // SAFETY: the caller keeps the contract.
        unsafe { self.block.bytes_mut(self.start, self.len) }
    }
}

impl fmt::Debug for HostSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}+{}[{}]", self.name(), self.id, self.start, self.len)
    }
}

/// The host's turn with a buffer; ops on it are refused until it ends.
struct Claim<'a>(&'a HostBlock);

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.0.busy.store(false, Ordering::Release);
    }
}
