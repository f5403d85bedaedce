//! Where offloaded slices lie: a slab of host memory, and a file.

use std::{
    ops::Range,
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use ebbtide_kernels::{
    Arena, Device, FILE_ALIGNMENT, HostBuffer, HostSlice, Op, Result, Slice, SpillFile, SpillOptions, Stream,
};

use crate::Tier;

/// The disk tier's options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskOptions {
    /// A folder of the disk to use. Nothing is ever seen in it.
    pub folder: PathBuf,
    /// Space, taken at the start.
    pub bytes: usize,
    /// Holds what is read against a checksum of what was written.
    pub verify: bool,
    /// Requests under way at once, in each direction.
    pub requests: usize,
}

impl DiskOptions {
    /// Two requests at once in each direction; checksums in debug builds.
    pub fn new(folder: impl Into<PathBuf>, bytes: usize) -> Self {
        DiskOptions { folder: folder.into(), bytes, verify: cfg!(debug_assertions), requests: 2 }
    }
}

/// Ranges of a tier. They are free again as soon as their slot is dropped, whatever ops still use them: who gets the bytes
/// next is ordered after those by the device layer.
struct Space {
    arena: Mutex<Arena>,
    in_use: AtomicUsize,
}

impl Space {
    fn new(capacity: usize, alignment: usize) -> Arc<Self> {
        Arc::new(Space { arena: Mutex::new(Arena::new(capacity, alignment)), in_use: AtomicUsize::new(0) })
    }

    fn with<R>(&self, f: impl FnOnce(&mut Arena) -> R) -> R {
        f(&mut self.arena.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn take(self: &Arc<Self>, bytes: usize) -> Option<Taken> {
        let range = self.with(|arena| arena.alloc(bytes))?;
        self.in_use.fetch_add(range.len(), Ordering::Relaxed);
        Some(Taken { space: self.clone(), range })
    }
}

/// A range of a tier; free again when dropped.
struct Taken {
    space: Arc<Space>,
    range: Range<usize>,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.space.in_use.fetch_sub(self.range.len(), Ordering::Relaxed);
        self.space.with(|arena| arena.free(self.range.clone()));
    }
}

/// Space of a tier for one slice.
pub(crate) enum Slot {
    Host(HostSlot),
    Disk(DiskSlot),
}

impl Slot {
    pub(crate) fn tier(&self) -> Tier {
        match self {
            Slot::Host(_) => Tier::Host,
            Slot::Disk(_) => Tier::Disk,
        }
    }

    /// Copies a slice out, into it.
    pub(crate) fn send(&self, input: &Slice) -> Result<()> {
        match self {
            Slot::Host(slot) => {
                slot.tier.out.submit(Op::CopyOut { input: input.clone(), out: slot.slice()? })
            }
            Slot::Disk(slot) => slot.send(input),
        }
    }

    /// Copies it back.
    pub(crate) fn fetch(&self, out: &Slice) -> Result<()> {
        match self {
            Slot::Host(slot) => slot.tier.back.submit(Op::CopyIn { input: slot.slice()?, out: out.clone() }),
            Slot::Disk(slot) => slot.fetch(out),
        }
    }
}

/// One slab of host memory, and a stream for each direction.
pub(crate) struct HostTier {
    slab: HostBuffer,
    space: Arc<Space>,
    out: Stream,
    back: Stream,
}

/// Bytes that a slot starts at multiples of: a cache line.
const HOST_ALIGNMENT: usize = 64;

impl HostTier {
    /// A tier of `bytes`, all of them taken from the system now; `None` for as many as it has, taken as they are used.
    pub(crate) fn new(device: &Device, bytes: Option<usize>) -> Result<Arc<Self>> {
        let slab = match bytes {
            Some(bytes) => device.host_slab(bytes, "the host tier")?,
            None => device.host_unlimited("the host tier")?,
        };
        let space = Space::new(slab.bytes(), HOST_ALIGNMENT);
        let (out, back) = (device.stream("offload out"), device.stream("offload in"));
        Ok(Arc::new(HostTier { slab, space, out, back }))
    }

    pub(crate) fn take(self: &Arc<Self>, bytes: usize) -> Option<Slot> {
        let taken = self.space.take(bytes)?;
        Some(Slot::Host(HostSlot { tier: self.clone(), taken, bytes }))
    }
}

pub(crate) struct HostSlot {
    tier: Arc<HostTier>,
    taken: Taken,
    bytes: usize,
}

impl HostSlot {
    fn slice(&self) -> Result<HostSlice> {
        let start = self.taken.range.start;
        self.tier.slab.part(start..start + self.bytes)
    }
}

/// A spill file. Slices go through a few pieces of host memory, in either direction, so that several requests are under way
/// and the memory is bounded. Who fills a piece anew is ordered after its last use by the device layer, which is all the
/// back-pressure there is.
pub(crate) struct DiskTier {
    file: SpillFile,
    space: Arc<Space>,
    outward: Pipe,
    inward: Pipe,
}

/// Pieces of host memory between the device and the file, for one direction.
struct Pipe {
    pieces: HostBuffer,
    count: usize,
    next: AtomicUsize,
    copies: Stream,
    requests: Vec<Stream>,
}

/// Bytes of a request.
const PIECE: usize = 1 << 20;

impl Pipe {
    fn new(device: &Device, name: &str, requests: usize) -> Result<Self> {
        let requests = requests.max(1);
        // One piece for each request under way, and as many that are being filled or emptied.
        let count = 2 * requests;
        Ok(Pipe {
            pieces: device.host_slab(count * PIECE, name)?,
            count,
            next: AtomicUsize::new(0),
            copies: device.stream(name),
            requests: (0..requests).map(|i| device.stream(&format!("{name} {i}"))).collect(),
        })
    }

    /// The piece whose last use is the longest ago, and the stream for its request.
    fn piece(&self, bytes: usize) -> Result<(HostSlice, &Stream)> {
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        let start = turn % self.count * PIECE;
        Ok((self.pieces.part(start..start + bytes)?, &self.requests[turn % self.requests.len()]))
    }
}

impl DiskTier {
    pub(crate) fn new(device: &Device, options: &DiskOptions) -> Result<Arc<Self>> {
        let DiskOptions { folder, bytes, verify, requests } = options.clone();
        let file = device.spill_file(&SpillOptions { folder, bytes, verify })?;
        let space = Space::new(file.bytes(), FILE_ALIGNMENT);
        let outward = Pipe::new(device, "disk out", requests)?;
        let inward = Pipe::new(device, "disk in", requests)?;
        Ok(Arc::new(DiskTier { file, space, outward, inward }))
    }

    pub(crate) fn take(self: &Arc<Self>, bytes: usize) -> Option<Slot> {
        let taken = self.space.take(bytes)?;
        Some(Slot::Disk(DiskSlot { tier: self.clone(), taken }))
    }

    /// Why transfers go through the page cache, if they do.
    pub(crate) fn buffered(&self) -> Option<&str> {
        self.file.buffered()
    }
}

pub(crate) struct DiskSlot {
    tier: Arc<DiskTier>,
    taken: Taken,
}

impl DiskSlot {
    fn send(&self, input: &Slice) -> Result<()> {
        let pipe = &self.tier.outward;
        self.in_pieces(input, |part, range| {
            let (piece, request) = pipe.piece(range.len())?;
            pipe.copies.submit(Op::CopyOut { input: part.clone(), out: piece.part(0..part.bytes())? })?;
            request.submit(Op::WriteFile { input: piece, file: self.tier.file.part(range)? })
        })
    }

    fn fetch(&self, out: &Slice) -> Result<()> {
        let pipe = &self.tier.inward;
        self.in_pieces(out, |part, range| {
            let (piece, request) = pipe.piece(range.len())?;
            request.submit(Op::ReadFile { file: self.tier.file.part(range)?, out: piece.clone() })?;
            pipe.copies.submit(Op::CopyIn { input: piece.part(0..part.bytes())?, out: part })
        })
    }

    /// Calls `work` with the parts of a slice and the bytes of the file that are theirs.
    fn in_pieces(&self, slice: &Slice, work: impl Fn(Slice, Range<usize>) -> Result<()>) -> Result<()> {
        let element = slice.dtype().size_bytes();
        let mut start = self.taken.range.start;
        for first in (0..slice.len()).step_by(PIECE / element) {
            let part = slice.part(first..slice.len().min(first + PIECE / element))?;
            let bytes = part.bytes().next_multiple_of(FILE_ALIGNMENT);
            work(part, start..start + bytes)?;
            start += bytes;
        }
        Ok(())
    }
}

/// The tiers there are.
pub(crate) struct Tiers {
    pub(crate) host: Arc<HostTier>,
    pub(crate) disk: Option<Arc<DiskTier>>,
}

impl Tiers {
    /// Space for `bytes`, in the tier or the next one that has it.
    pub(crate) fn take(&self, tier: Tier, bytes: usize) -> Option<Slot> {
        let in_host = || self.host.take(bytes);
        let on_disk = || self.disk.as_ref().and_then(|disk| disk.take(bytes));
        match tier {
            Tier::Host => in_host().or_else(on_disk),
            Tier::Disk => on_disk(),
        }
    }

    /// Whether [`Tiers::take`] would succeed.
    pub(crate) fn has_room(&self, tier: Tier, bytes: usize) -> bool {
        let room = |space: &Arc<Space>| space.with(|arena| arena.largest_free()) >= bytes;
        let on_disk = self.disk.as_ref().is_some_and(|disk| room(&disk.space));
        on_disk || tier == Tier::Host && room(&self.host.space)
    }

    /// Bytes of a tier in use, and the most its space has been used up to.
    pub(crate) fn usage(&self, tier: Tier) -> (usize, usize) {
        let usage = |space: &Arc<Space>| {
            (space.in_use.load(Ordering::Relaxed), space.with(|arena| arena.high_water()))
        };
        match tier {
            Tier::Host => usage(&self.host.space),
            Tier::Disk => self.disk.as_ref().map_or((0, 0), |disk| usage(&disk.space)),
        }
    }

    /// The streams that move bytes.
    pub(crate) fn streams(&self) -> Vec<&Stream> {
        let mut streams = vec![&self.host.out, &self.host.back];
        for pipe in self.disk.iter().flat_map(|disk| [&disk.outward, &disk.inward]) {
            streams.push(&pipe.copies);
            streams.extend(&pipe.requests);
        }
        streams
    }
}
