//! [`Offload`]: saves, loads, and keeps both directions of the link busy.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use ebbtide_kernels::{Category, DType, Device, Error, Op, OutOfMemory, Protection, Result, Slice, Stream};

use crate::{
    Codec, Role,
    host_pool::{HostPool, HostSlot},
    policy::{Activation, Placement, Policy, SegmentPlan},
};

/// The bounds of the runtime's queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadOptions {
    /// Bytes whose copies out have started and whose device memory is still held. More delays its reuse, so that forward
    /// need not wait for copies; less saves memory.
    pub in_flight_bytes: usize,
    /// Bytes on the device ahead of backward's need.
    pub prefetch_bytes: usize,
    /// Smaller slices stay on the device.
    pub min_bytes: usize,
}

impl Default for OffloadOptions {
    fn default() -> Self {
        OffloadOptions { in_flight_bytes: 32 << 20, prefetch_bytes: 32 << 20, min_bytes: 16 << 10 }
    }
}

/// What the runtime did since it was made, or since [`Offload::take_report`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OffloadReport {
    /// Bytes saved for backward during forward passes, each slice once: kept and sent out together.
    pub saved_bytes: u64,
    /// Bytes that lossy codecs were given, and [`OffloadReport::encoded_bytes`] is what they made of them.
    pub lossy_bytes: u64,
    /// Bytes that lossy codecs made.
    pub encoded_bytes: u64,
    /// Bytes copied out, in stored form.
    pub out_bytes: u64,
    /// Bytes copied back, in stored form.
    pub in_bytes: u64,
    /// Bytes handed back while their copy out was in flight, so that no copy back was needed.
    pub forwarded_bytes: u64,
    /// Bytes that were saved again by another op and not counted twice.
    pub shared_bytes: u64,
    /// Bytes not saved, to be made again from others.
    pub rerun_bytes: u64,
    /// Loads that found their slice on the device: kept, handed back or prefetched.
    pub ready_loads: u64,
    /// Loads that had to start the copy back themselves.
    pub late_loads: u64,
    /// Segments that ran a second time.
    pub recomputed_segments: u64,
    /// Times that the budget made the runtime give up a held or prefetched copy.
    pub relieved: u64,
}

/// The offload runtime of one compute stream. Cloning is cheap and shares it.
#[derive(Clone)]
pub struct Offload(Arc<Inner>);

struct Inner {
    device: Device,
    compute: Stream,
    out: Stream,
    back: Stream,
    policy: Box<dyn Policy>,
    options: OffloadOptions,
    pool: Arc<HostPool>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What is saved, by identity.
    entries: HashMap<Key, Weak<Entry>>,
    /// What was saved and may be offloaded, in order.
    order: Vec<Weak<Entry>>,
    /// Entries whose copy out holds device memory, oldest first.
    in_flight: VecDeque<(Weak<Entry>, usize)>,
    in_flight_bytes: usize,
    backward: bool,
    /// Which forward pass this is: a key of stochastic rounding.
    step: u32,
    report: OffloadReport,
}

/// A slice's identity: never an address, which others use later, nor a size.
type Key = (u64, usize, usize, DType);

/// A handle of a saved slice. Cloning is cheap; when the last is dropped, so is what it stands for.
#[derive(Clone)]
pub struct Saved(Arc<Entry>);

struct Entry {
    /// Bytes in stored form.
    bytes: usize,
    /// Length as it was saved; lossy codecs apply to f32 alone.
    len: usize,
    codec: Codec,
    /// Length and dtype in stored form.
    stored: (usize, DType),
    name: String,
    /// Its index in [`State::order`]; `None` where it never leaves the device.
    position: Option<usize>,
    place: Mutex<Place>,
    /// What was saved must not change until it has been used, wherever the policy put it.
    _protection: Protection,
}

/// All but the first hold the stored form.
enum Place {
    /// On the device as it was saved, to stay.
    Device(Slice),
    /// On the device in stored form, to stay.
    Encoded(Slice),
    /// A copy out was started, and the device memory is still held.
    Leaving(Slice, HostSlot),
    /// In host memory.
    Host(HostSlot),
    /// A copy back was started ahead of need; the host copy stands by.
    Prefetched(Slice, HostSlot),
    /// Between two places, while the entry's lock is held.
    Moving,
}

impl Offload {
    /// A runtime beside `compute`, with a stream of its own for each direction.
    ///
    /// # Errors
    /// None today; the device's, should a stream not start.
    pub fn new(compute: &Stream, policy: Box<dyn Policy>, options: OffloadOptions) -> Result<Self> {
        let device = compute.device().clone();
        let (out, back) = (device.stream("offload out"), device.stream("offload in"));
        let pool = HostPool::new(device.clone());
        Ok(Offload(Arc::new(Inner {
            device,
            compute: compute.clone(),
            out,
            back,
            policy,
            options,
            pool,
            state: Mutex::default(),
        })))
    }

    /// What the policy says about a segment.
    pub fn segment(&self, name: &str) -> SegmentPlan {
        self.0.policy.segment(name)
    }

    /// What the policy says about a tensor; raw and on the device where it asks for what cannot be. Statistics are never
    /// lossy.
    pub fn placement(&self, activation: &Activation<'_>) -> Placement {
        let exact = activation.role == Role::Statistic;
        match self.0.policy.activation(activation) {
            Placement::Rerun if !activation.rerun => Placement::Keep(Codec::Raw),
            Placement::Keep(_) if exact => Placement::Keep(Codec::Raw),
            Placement::Offload(_) if exact => Placement::Offload(Codec::Raw),
            placement => placement,
        }
    }

    /// Notes that a tensor of `bytes` is made again rather than saved, as [`Offload::placement`] said.
    pub fn note_rerun(&self, bytes: usize) {
        self.lock().report.rerun_bytes += bytes as u64;
    }

    /// Notes that a segment runs a second time.
    pub fn note_recompute(&self) {
        self.lock().report.recomputed_segments += 1;
    }

    /// Saves a slice until it is loaded. Call it when the op that produces the slice has been submitted.
    ///
    /// As long as the handle lives, an op that would write the slice is refused: what backward needs would change under it, or
    /// not, as the policy has it. Saved twice, a slice moves once. Parameters and slices below [`OffloadOptions::min_bytes`] stay on the device.
    ///
    /// # Errors
    /// Those of allocation, on the host or for a codec, and of submission.
    pub fn save(&self, slice: Slice, activation: &Activation<'_>) -> Result<Saved> {
        let key = (slice.buffer_id(), slice.offset_bytes(), slice.len(), slice.dtype());
        let bytes = slice.bytes();
        let mut state = self.lock();
        if let Some(entry) = state.entries.get(&key).and_then(Weak::upgrade) {
            state.report.shared_bytes += bytes as u64;
            return Ok(Saved(entry));
        }
        let is_parameter = slice.category() == Some(Category::Weights);
        let stays = is_parameter || bytes < self.0.options.min_bytes;
        let (leaves, codec) = match self.placement(activation) {
            _ if stays => (false, Codec::Raw),
            Placement::Offload(codec) => (true, codec),
            Placement::Keep(codec) => (false, codec),
            Placement::Rerun => (false, Codec::Raw),
        };
        let codec = if slice.dtype() == DType::F32 { codec } else { Codec::Raw };
        let (len, stored) = (slice.len(), codec.stored(slice.len(), slice.dtype()));
        let protection = slice.protect(activation.name);
        let slice = self.encode(&mut state, slice, codec, activation)?;
        let stored_bytes = slice.bytes();
        if !state.backward && !is_parameter {
            state.report.saved_bytes += stored_bytes as u64;
        }
        let (place, position) = if leaves {
            let slot = self.0.pool.take(stored_bytes)?;
            self.0.out.submit(Op::CopyOut { input: slice.clone(), out: slot.buffer().all() })?;
            state.report.out_bytes += stored_bytes as u64;
            (Place::Leaving(slice, slot), Some(state.order.len()))
        } else if codec.is_lossy() {
            (Place::Encoded(slice), None)
        } else {
            (Place::Device(slice), None)
        };
        let entry = Arc::new(Entry {
            bytes: stored_bytes,
            len,
            codec,
            stored,
            name: activation.name.to_string(),
            position,
            place: Mutex::new(place),
            _protection: protection,
        });
        state.entries.insert(key, Arc::downgrade(&entry));
        if leaves {
            state.order.push(Arc::downgrade(&entry));
            state.in_flight.push_back((Arc::downgrade(&entry), stored_bytes));
            state.in_flight_bytes += stored_bytes;
            while state.in_flight_bytes > self.0.options.in_flight_bytes && state.release_oldest() {}
        }
        Ok(Saved(entry))
    }

    /// The stored form, made on the compute stream; the slice itself where it is stored raw.
    fn encode(
        &self,
        state: &mut State,
        slice: Slice,
        codec: Codec,
        activation: &Activation<'_>,
    ) -> Result<Slice> {
        if !codec.is_lossy() {
            return Ok(slice);
        }
        let (len, dtype) = codec.stored(slice.len(), slice.dtype());
        let out = self.alloc_in(state, len, dtype, Category::Activations, activation.name)?;
        state.report.lossy_bytes += slice.bytes() as u64;
        state.report.encoded_bytes += out.bytes() as u64;
        if let Some(op) = codec.encode(slice, out.clone(), site(activation.name), state.step) {
            self.0.compute.submit(op)?;
        }
        Ok(out)
    }

    /// What was saved, from the stored form.
    fn decode(&self, state: &mut State, entry: &Entry, stored: Slice) -> Result<Slice> {
        if !entry.codec.is_lossy() {
            return Ok(stored);
        }
        let out = self.alloc_in(state, entry.len, DType::F32, Category::Activations, &entry.name)?;
        if let Some(op) = entry.codec.decode(stored, out.clone()) {
            self.0.compute.submit(op)?;
        }
        Ok(out)
    }

    /// Gives a saved slice back, and starts the copies back of those saved before it, which backward needs next.
    ///
    /// The slice can be submitted to any op at once: the device layer orders it after its copy. It may be loaded again
    /// as long as the handle lives.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the budget has no room for it even after everything held ahead of need was given up.
    pub fn load(&self, saved: &Saved) -> Result<Slice> {
        let mut state = self.lock();
        let mut place = saved.0.lock();
        let late = matches!(*place, Place::Host(_));
        let stored = match std::mem::replace(&mut *place, Place::Moving) {
            Place::Device(slice) => {
                *place = Place::Device(slice.clone());
                state.report.ready_loads += 1;
                return Ok(slice);
            }
            Place::Encoded(stored) => stored,
            Place::Leaving(stored, _) => {
                state.report.forwarded_bytes += saved.0.bytes as u64;
                stored
            }
            Place::Prefetched(stored, _) => stored,
            Place::Host(slot) => match self.copy_back(&mut state, &saved.0, &slot) {
                Ok(stored) => stored,
                Err(error) => {
                    *place = Place::Host(slot);
                    return Err(error);
                }
            },
            Place::Moving => unreachable!("an entry's place is set while its lock is held"),
        };
        let slice = match self.decode(&mut state, &saved.0, stored.clone()) {
            Ok(slice) => slice,
            Err(error) => {
                *place = Place::Encoded(stored);
                return Err(error);
            }
        };
        *place = Place::Device(slice.clone());
        drop(place);
        if late {
            state.report.late_loads += 1;
        } else {
            state.report.ready_loads += 1;
        }
        if let Some(position) = saved.0.position {
            self.prefetch(&mut state, position);
        }
        Ok(slice)
    }

    /// Device memory; where the budget has no room, copies held or made ahead of need are given up for it.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if that does not suffice.
    pub fn alloc(&self, len: usize, dtype: DType, category: Category, name: &str) -> Result<Slice> {
        // Without the lock first: mostly there is room.
        match self.0.device.alloc(len, dtype, category, name) {
            Err(Error::OutOfMemory(facts)) => {
                self.alloc_relieved(&mut self.lock(), facts, len, dtype, category, name)
            }
            other => other,
        }
    }

    fn alloc_in(
        &self,
        state: &mut State,
        len: usize,
        dtype: DType,
        category: Category,
        name: &str,
    ) -> Result<Slice> {
        match self.0.device.alloc(len, dtype, category, name) {
            Err(Error::OutOfMemory(facts)) => self.alloc_relieved(state, facts, len, dtype, category, name),
            other => other,
        }
    }

    /// Tells that a forward pass begins: what is saved from now on counts as saved bytes. `step` keys stochastic rounding:
    /// no two forward passes of a run share one.
    pub fn begin_forward(&self, step: u32) {
        let mut state = self.lock();
        state.backward = false;
        state.step = step;
        state.entries.retain(|_, entry| entry.strong_count() > 0);
        if state.entries.is_empty() {
            state.order.clear();
            state.in_flight.clear();
            state.in_flight_bytes = 0;
        }
    }

    /// Tells that a backward pass begins: the last saved come first, and their copies back may start.
    pub fn begin_backward(&self) {
        let mut state = self.lock();
        state.backward = true;
        let end = state.order.len();
        self.prefetch(&mut state, end);
    }

    /// What was done so far.
    pub fn report(&self) -> OffloadReport {
        self.lock().report
    }

    /// What was done since the last call.
    pub fn take_report(&self) -> OffloadReport {
        std::mem::take(&mut self.lock().report)
    }

    /// Slices saved and not dropped yet.
    pub fn live(&self) -> usize {
        self.lock().entries.values().filter(|entry| entry.strong_count() > 0).count()
    }

    /// Starts copies back of entries before `position`, nearest first, as far as window and budget allow.
    fn prefetch(&self, state: &mut State, position: usize) {
        let mut ahead = 0;
        for index in (0..position.min(state.order.len())).rev() {
            let Some(entry) = state.order[index].upgrade() else { continue };
            let mut place = entry.lock();
            match std::mem::replace(&mut *place, Place::Moving) {
                Place::Host(slot) if ahead + entry.bytes <= self.0.options.prefetch_bytes => {
                    match self.start_copy_back(state, &entry, &slot) {
                        Ok(slice) => *place = Place::Prefetched(slice, slot),
                        Err(_) => {
                            // No room now: the load itself will make some, or report it.
                            *place = Place::Host(slot);
                            return;
                        }
                    }
                    ahead += entry.bytes;
                }
                Place::Host(slot) => {
                    *place = Place::Host(slot);
                    return;
                }
                other => {
                    if matches!(other, Place::Prefetched(..)) {
                        ahead += entry.bytes;
                    }
                    *place = other;
                }
            }
        }
    }

    /// A copy back that must happen: makes room if need be.
    fn copy_back(&self, state: &mut State, entry: &Entry, slot: &HostSlot) -> Result<Slice> {
        match self.start_copy_back(state, entry, slot) {
            Err(Error::OutOfMemory(facts)) => {
                let ((len, dtype), category) = (entry.stored, Category::Activations);
                let slice = self.alloc_relieved(state, facts, len, dtype, category, &entry.name)?;
                self.submit_copy_back(state, slot, slice)
            }
            other => other,
        }
    }

    fn start_copy_back(&self, state: &mut State, entry: &Entry, slot: &HostSlot) -> Result<Slice> {
        let (len, dtype) = entry.stored;
        let slice = self.0.device.alloc(len, dtype, Category::Activations, &entry.name)?;
        self.submit_copy_back(state, slot, slice)
    }

    fn submit_copy_back(&self, state: &mut State, slot: &HostSlot, slice: Slice) -> Result<Slice> {
        self.0.back.submit(Op::CopyIn { input: slot.buffer().all(), out: slice.clone() })?;
        state.report.in_bytes += slice.bytes() as u64;
        Ok(slice)
    }

    /// An allocation that failed, tried again as copies are given up one by one.
    fn alloc_relieved(
        &self,
        state: &mut State,
        mut facts: OutOfMemory,
        len: usize,
        dtype: DType,
        category: Category,
        name: &str,
    ) -> Result<Slice> {
        while state.relieve() {
            state.report.relieved += 1;
            match self.0.device.alloc(len, dtype, category, name) {
                Err(Error::OutOfMemory(again)) => facts = again,
                other => return other,
            }
        }
        Err(Error::OutOfMemory(facts))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A tensor's key of stochastic rounding: FNV-1a of its name.
fn site(name: &str) -> u32 {
    name.bytes().fold(0x811C_9DC5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

impl State {
    /// Gives up one copy that is held without need; false if there is none.
    fn relieve(&mut self) -> bool {
        self.release_oldest() || self.release_furthest()
    }

    /// Lets go of the device memory of the oldest copy in flight: the copy itself is unaffected.
    fn release_oldest(&mut self) -> bool {
        while let Some((entry, bytes)) = self.in_flight.pop_front() {
            self.in_flight_bytes -= bytes;
            let Some(entry) = entry.upgrade() else { continue };
            // Locked by a load, which calls this: its own entry holds nothing.
            let Ok(mut place) = entry.place.try_lock() else { continue };
            match std::mem::replace(&mut *place, Place::Moving) {
                Place::Leaving(_, slot) => {
                    *place = Place::Host(slot);
                    return true;
                }
                other => *place = other,
            }
        }
        false
    }

    /// Undoes the prefetch that is needed last.
    fn release_furthest(&mut self) -> bool {
        for entry in self.order.iter().filter_map(Weak::upgrade) {
            // Locked by a load, which calls this: its own entry is not ahead of need.
            let Ok(mut place) = entry.place.try_lock() else { continue };
            match std::mem::replace(&mut *place, Place::Moving) {
                Place::Prefetched(_, slot) => {
                    *place = Place::Host(slot);
                    return true;
                }
                other => *place = other,
            }
        }
        false
    }
}

impl Entry {
    fn lock(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Saved {
    /// The name it was saved under first.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its bytes in stored form.
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }
}
