//! [`Offload`]: saves, loads, and keeps both directions of the link busy.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use ebbtide_kernels::{Category, DType, Device, Error, Op, OutOfMemory, Protection, Result, Slice, Stream};

use crate::{
    Codec, CodecKind, OffloadReport, Tier, TransferTimes,
    policy::{Activation, Placement, Policy, SegmentPlan},
    tiers::{DiskOptions, DiskTier, HostTier, Slot, Tiers},
};

/// The bounds of the runtime, and its tiers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OffloadOptions {
    /// Bytes whose copies out have started and whose device memory is still held. More delays its reuse, so that forward
    /// need not wait for copies; less saves memory.
    pub in_flight_bytes: usize,
    /// Bytes on the device ahead of backward's need. Under a budget more of them where the step before left more room.
    pub prefetch_bytes: usize,
    /// Of the largest slices, at least this many are held and brought back so, whatever their bytes: a window that is smaller than a
    /// slice would hide nothing.
    pub window_slices: usize,
    /// Smaller slices stay on the device.
    pub min_bytes: usize,
    /// Host memory for offloaded slices, all of it taken from the system at the start; as much as there is, taken as it is
    /// used, if not given.
    pub host_bytes: Option<usize>,
    /// The disk tier, if there is one.
    pub disk: Option<DiskOptions>,
    /// Of the segments that a policy lets be recomputed for want of room ([`SegmentPlan::RunIfRoom`]), the first so many in each
    /// forward pass are: backward comes to them last, when there is room again.
    pub recompute_first: usize,
    /// Measures the largest error that each lossy codec made: see [`Offload::worst_errors`]. It costs a decoding each.
    pub measure_errors: bool,
    /// Holds a checksum of what each recomputed segment gives against that of its first run. Each costs a wait for the device.
    pub verify_recompute: bool,
}

impl Default for OffloadOptions {
    fn default() -> Self {
        OffloadOptions {
            in_flight_bytes: 32 << 20,
            prefetch_bytes: 32 << 20,
            window_slices: 3,
            min_bytes: 16 << 10,
            host_bytes: None,
            disk: None,
            recompute_first: 0,
            measure_errors: false,
            verify_recompute: false,
        }
    }
}

/// The offload runtime of one compute stream. Cloning is cheap and shares it.
#[derive(Clone)]
pub struct Offload(Arc<Inner>);

struct Inner {
    device: Device,
    compute: Stream,
    policy: Box<dyn Policy>,
    options: OffloadOptions,
    tiers: Tiers,
    /// Bytes prefetched and not loaded yet.
    ahead_bytes: AtomicUsize,
    /// Most bytes in use beside those, in this backward pass; kept where there is a budget.
    others_bytes: AtomicUsize,
    backward: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What is saved, by identity.
    entries: HashMap<Key, Weak<Entry>>,
    /// What was saved and may be offloaded, in order.
    order: Vec<Weak<Entry>>,
    /// Entries that hold device memory until it is needed, oldest first: on their way out, or not sent.
    in_flight: VecDeque<(Weak<Entry>, usize)>,
    in_flight_bytes: usize,
    /// The largest slice that was to leave.
    largest_bytes: usize,
    /// Bytes that this forward pass saved to be offloaded, and the last one that went through to its backward.
    leaving_bytes: usize,
    last_leaving_bytes: Option<usize>,
    /// Segments of this forward pass that may be recomputed for want of room.
    flexible_segments: usize,
    /// Bytes that this backward pass brought back ahead of need and gave up, and those of the passes before it.
    given_up_bytes: usize,
    apart_bytes: usize,
    /// Bytes that may be ahead of backward's need.
    window_bytes: usize,
    /// Which forward pass this is: a key of stochastic rounding.
    step: u32,
    report: OffloadReport,
    worst: HashMap<CodecKind, Slice>,
}

/// A slice's identity: never an address, which others use later, nor a size.
type Key = (u64, usize, usize, DType);

/// A handle of a saved slice. Cloning is cheap; when the last is dropped, so is what it stands for.
#[derive(Clone)]
pub struct Saved(Arc<Entry>);

struct Entry {
    /// Bytes in stored form.
    bytes: usize,
    /// Length and dtype as it was saved.
    plain: (usize, DType),
    codec: Codec,
    /// Length and dtype in stored form.
    stored: (usize, DType),
    tier: Tier,
    name: String,
    /// Its index in [`State::order`]; `None` where it never leaves the device.
    position: Option<usize>,
    place: Mutex<Place>,
    /// What was saved must not change until it has been used, wherever the policy put it.
    _protection: Protection,
    /// Of what was brought back, so that it is there again for who loads it again.
    reloaded: Mutex<Option<Protection>>,
}

/// All but the first hold the stored form.
enum Place {
    /// On the device as it was saved, to stay.
    Device(Slice),
    /// On the device in stored form, to stay.
    Encoded(Slice),
    /// On the device, sent out only if its memory is needed: backward comes for it soon.
    Held(Slice),
    /// A copy out was started, and the device memory is still held.
    Leaving(Slice, Slot),
    /// In a tier.
    Away(Slot),
    /// A copy back was started ahead of need; the copy in the tier stands by.
    Prefetched(Slice, Slot),
    /// Between two places, while the entry's lock is held.
    Moving,
}

impl Offload {
    /// A runtime beside `compute`, with streams of its own for each direction, and its tiers.
    ///
    /// # Errors
    /// [`Error::HostMemory`] and [`Error::Disk`] if a tier cannot be had in its full size.
    pub fn new(compute: &Stream, policy: Box<dyn Policy>, options: OffloadOptions) -> Result<Self> {
        let device = compute.device().clone();
        let host = HostTier::new(&device, options.host_bytes)?;
        let disk = options.disk.as_ref().map(|disk| DiskTier::new(&device, disk)).transpose()?;
        let state = State { window_bytes: options.prefetch_bytes, ..State::default() };
        Ok(Offload(Arc::new(Inner {
            device,
            compute: compute.clone(),
            policy,
            options,
            tiers: Tiers { host, disk },
            ahead_bytes: AtomicUsize::new(0),
            others_bytes: AtomicUsize::new(0),
            backward: AtomicBool::new(false),
            state: Mutex::new(state),
        })))
    }

    /// The options it was made with.
    pub fn options(&self) -> &OffloadOptions {
        &self.0.options
    }

    /// Why the disk tier's transfers go through the page cache; `None` where they do not, or there is no disk tier.
    pub fn disk_buffered(&self) -> Option<&str> {
        self.0.tiers.disk.as_ref().and_then(|disk| disk.buffered())
    }

    /// What becomes of the next segment of a forward pass: what the policy says, or by
    /// [`OffloadOptions::recompute_first`] its recomputation for want of room.
    pub fn segment(&self, name: &str) -> SegmentPlan {
        match self.0.policy.segment(name) {
            SegmentPlan::RunIfRoom => {
                let mut state = self.lock();
                state.flexible_segments += 1;
                if state.flexible_segments > self.0.options.recompute_first {
                    return SegmentPlan::RunIfRoom;
                }
                state.report.fallbacks.to_recompute += 1;
                SegmentPlan::Recompute
            }
            plan => plan,
        }
    }

    /// What the policy says about a tensor, less what cannot be: nothing is made again that has no recipe, and no codec
    /// applies to what it is not for. Under a budget, what finds its tier full and can be made again is.
    pub fn placement(&self, activation: &Activation<'_>) -> Placement {
        let (placement, fell_back) = self.resolve(activation);
        if fell_back {
            self.lock().report.fallbacks.to_rerun += 1;
        }
        placement
    }

    /// A placement, and whether it is one for want of room.
    fn resolve(&self, activation: &Activation<'_>) -> (Placement, bool) {
        let codec = |codec: Codec| codec.for_tensor(activation.dtype, activation.role);
        match self.0.policy.activation(activation) {
            Placement::Rerun if !activation.rerun => (Placement::Keep(Codec::Raw), false),
            Placement::Rerun => (Placement::Rerun, false),
            Placement::Keep(wanted) => (Placement::Keep(codec(wanted)), false),
            Placement::Offload(tier, wanted) => {
                let codec = codec(wanted);
                let (len, dtype) = codec.stored(activation.len(), activation.dtype);
                let fits = || self.0.tiers.has_room(tier, len * dtype.size_bytes());
                // What a lossy codec does must not depend on what there is room for.
                let may_rerun = activation.rerun && !codec.is_lossy();
                match may_rerun && self.0.device.budget_bytes().is_some() && !fits() {
                    true => (Placement::Rerun, true),
                    false => (Placement::Offload(tier, codec), false),
                }
            }
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

    /// Notes that a segment which the policy lets be recomputed will be, since there was no room for what it saves.
    pub fn note_recompute_fallback(&self) {
        self.lock().report.fallbacks.to_recompute += 1;
    }

    /// Saves a slice until it is loaded. Call it when the op that produces the slice has been submitted.
    ///
    /// As long as the handle lives, an op that would write the slice is refused: what backward needs would change under it,
    /// or not, as the policy has it. Saved twice, a slice moves once. Parameters and slices below
    /// [`OffloadOptions::min_bytes`] stay on the device. Where its tier is full a slice goes to the next, or stays.
    ///
    /// # Errors
    /// Those of device memory for a codec, and of submission.
    pub fn save(&self, slice: Slice, activation: &Activation<'_>) -> Result<Saved> {
        let key = (slice.buffer_id(), slice.offset_bytes(), slice.len(), slice.dtype());
        let bytes = slice.bytes();
        let mut state = self.lock();
        let exact = |codec: Codec| !codec.for_tensor(slice.dtype(), activation.role).is_lossy();
        if let Some(entry) = state.entries.get(&key).and_then(Weak::upgrade)
            // What loses nothing is not to share what was stored with loss before.
            && !(entry.codec.is_lossy() && exact(entry.codec))
        {
            state.report.shared_bytes += bytes as u64;
            return Ok(Saved(entry));
        }
        let is_parameter = slice.category() == Some(Category::Weights);
        let stays = is_parameter || bytes < self.0.options.min_bytes;
        let (tier, codec) = match self.resolve(activation).0 {
            _ if stays => (None, Codec::Raw),
            Placement::Offload(tier, codec) => (Some(tier), codec),
            Placement::Keep(codec) => (None, codec),
            Placement::Rerun => (None, Codec::Raw),
        };
        let codec = codec.for_tensor(slice.dtype(), activation.role);
        let (plain, stored) = ((slice.len(), slice.dtype()), codec.stored(slice.len(), slice.dtype()));
        let protection = slice.protect(activation.name);
        let slice = self.encode(&mut state, slice, codec, activation)?;
        let stored_bytes = slice.bytes();
        let backward = self.0.backward.load(Ordering::Relaxed);
        if !backward && !is_parameter {
            state.report.saved_bytes += stored_bytes as u64;
        }
        let stay = |slice| if codec == Codec::Raw { Place::Device(slice) } else { Place::Encoded(slice) };
        let place = match tier {
            None => stay(slice),
            Some(_) if backward || self.is_tail(&state, stored_bytes) => Place::Held(slice),
            Some(tier) => match self.send(&mut state, tier, &slice, codec)? {
                Some(slot) => Place::Leaving(slice, slot),
                None => {
                    state.report.fallbacks.to_device += 1;
                    stay(slice)
                }
            },
        };
        let leaves = matches!(place, Place::Held(_) | Place::Leaving(..));
        let entry = Arc::new(Entry {
            bytes: stored_bytes,
            plain,
            codec,
            stored,
            tier: tier.unwrap_or_default(),
            name: activation.name.to_string(),
            position: leaves.then_some(state.order.len()),
            place: Mutex::new(place),
            _protection: protection,
            reloaded: Mutex::default(),
        });
        state.entries.insert(key, Arc::downgrade(&entry));
        if leaves {
            state.order.push(Arc::downgrade(&entry));
            state.in_flight.push_back((Arc::downgrade(&entry), stored_bytes));
            state.in_flight_bytes += stored_bytes;
            state.leaving_bytes += stored_bytes;
            state.largest_bytes = state.largest_bytes.max(stored_bytes);
            let window_bytes = self.at_least_slices(&state, self.0.options.in_flight_bytes);
            // What backward itself saves it loads at once: that is held while there is room.
            while !backward && state.in_flight_bytes > window_bytes && self.release_oldest(&mut state) {}
        }
        Ok(Saved(entry))
    }

    /// Whether a slice is among the last that this forward pass saves, if it goes as the one before: backward would ask for
    /// it as soon as it had gone.
    fn is_tail(&self, state: &State, bytes: usize) -> bool {
        let options = &self.0.options;
        let tail = self.at_least_slices(state, options.prefetch_bytes.min(options.in_flight_bytes));
        state.last_leaving_bytes.is_some_and(|last| state.leaving_bytes + bytes > last.saturating_sub(tail))
    }

    /// A window of so many bytes, or of a few slices if those are more.
    fn at_least_slices(&self, state: &State, bytes: usize) -> usize {
        bytes.max(self.0.options.window_slices.saturating_mul(state.largest_bytes))
    }

    /// Starts a copy out; `None` if no tier has room.
    fn send(&self, state: &mut State, tier: Tier, stored: &Slice, codec: Codec) -> Result<Option<Slot>> {
        let Some(slot) = self.0.tiers.take(tier, stored.bytes()) else { return Ok(None) };
        slot.send(stored)?;
        let report = &mut state.report;
        report.moved.of_mut(slot.tier(), codec.kind()).out_bytes += stored.bytes() as u64;
        if slot.tier() != tier {
            report.fallbacks.to_disk += 1;
        }
        Ok(Some(slot))
    }

    /// The stored form, made on the compute stream; the slice itself where it is stored raw.
    fn encode(
        &self,
        state: &mut State,
        slice: Slice,
        codec: Codec,
        activation: &Activation<'_>,
    ) -> Result<Slice> {
        if codec == Codec::Raw {
            return Ok(slice);
        }
        let (len, dtype) = codec.stored(slice.len(), slice.dtype());
        let out = self.alloc_in(state, len, dtype, Category::Activations, activation.name)?;
        state.report.plain_bytes += slice.bytes() as u64;
        state.report.encoded_bytes += out.bytes() as u64;
        if let Some(op) = codec.encode(slice.clone(), out.clone(), site(activation.name), state.step) {
            self.0.compute.submit(op)?;
        }
        if self.0.options.measure_errors && codec.is_lossy() {
            self.measure(state, slice, out.clone(), codec)?;
        }
        Ok(out)
    }

    /// Raises the worst error of a codec by what it did to a slice.
    fn measure(&self, state: &mut State, plain: Slice, stored: Slice, codec: Codec) -> Result<()> {
        let worst = match state.worst.get(&codec.kind()) {
            Some(worst) => worst.clone(),
            None => {
                let worst = self.alloc_in(state, 1, DType::F32, Category::Workspace, "worst error")?;
                self.0.compute.submit(Op::Fill { out: worst.clone(), value: 0.0 })?;
                state.worst.insert(codec.kind(), worst.clone());
                worst
            }
        };
        let decoded = self.alloc_in(state, plain.len(), plain.dtype(), Category::Workspace, "worst error")?;
        if let Some(op) = codec.decode(stored, decoded.clone()) {
            self.0.compute.submit(op)?;
        }
        self.0.compute.submit(Op::MaxDifference { input: decoded, other: plain, out: worst })
    }

    /// What was saved, from the stored form.
    fn decode(&self, state: &mut State, entry: &Entry, stored: Slice) -> Result<Slice> {
        if entry.codec == Codec::Raw {
            return Ok(stored);
        }
        let (len, dtype) = entry.plain;
        let out = self.alloc_in(state, len, dtype, Category::Activations, &entry.name)?;
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
        let entry = &saved.0;
        let mut place = entry.lock();
        let late = matches!(*place, Place::Away(_));
        let stored = match std::mem::replace(&mut *place, Place::Moving) {
            Place::Device(slice) => {
                *place = Place::Device(slice.clone());
                state.report.ready_loads += 1;
                return Ok(slice);
            }
            Place::Encoded(stored) => stored,
            Place::Held(stored) => {
                state.report.held_bytes += entry.bytes as u64;
                stored
            }
            Place::Leaving(stored, _) => {
                state.report.forwarded_bytes += entry.bytes as u64;
                stored
            }
            Place::Prefetched(stored, _) => stored,
            Place::Away(slot) => match self.copy_back(&mut state, entry, &slot) {
                Ok(stored) => stored,
                Err(error) => {
                    *place = Place::Away(slot);
                    return Err(error);
                }
            },
            Place::Moving => unreachable!("an entry's place is set while its lock is held"),
        };
        let slice = match self.decode(&mut state, entry, stored.clone()) {
            Ok(slice) => slice,
            Err(error) => {
                *place = Place::Encoded(stored);
                return Err(error);
            }
        };
        *entry.reloaded.lock().unwrap_or_else(PoisonError::into_inner) = Some(slice.protect(&entry.name));
        *place = Place::Device(slice.clone());
        drop(place);
        if late {
            state.report.late_loads += 1;
        } else {
            state.report.ready_loads += 1;
        }
        if let Some(position) = entry.position {
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
        let slice = match self.0.device.alloc(len, dtype, category, name) {
            Err(Error::OutOfMemory(facts)) => {
                self.alloc_relieved(&mut self.lock(), facts, len, dtype, category, name)
            }
            other => other,
        };
        if self.0.device.budget_bytes().is_some() && self.0.backward.load(Ordering::Relaxed) {
            let ahead = self.0.ahead_bytes.load(Ordering::Relaxed);
            let others = self.0.device.in_use_bytes().saturating_sub(ahead);
            self.0.others_bytes.fetch_max(others, Ordering::Relaxed);
        }
        slice
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
        self.0.backward.store(false, Ordering::Relaxed);
        state.step = step;
        (state.leaving_bytes, state.flexible_segments) = (0, 0);
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
        self.0.backward.store(true, Ordering::Relaxed);
        state.last_leaving_bytes = Some(state.leaving_bytes);
        let others = self.0.others_bytes.swap(0, Ordering::Relaxed);
        if let Some(budget) = self.0.device.budget_bytes()
            && others > 0
        {
            // As deep as the step before had room for, less what it brought back and had to give up: memory that does not lie
            // side by side.
            state.apart_bytes += std::mem::take(&mut state.given_up_bytes);
            state.window_bytes = budget.saturating_sub(others + state.apart_bytes);
        } else {
            state.window_bytes = self.at_least_slices(&state, self.0.options.prefetch_bytes);
        }
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

    /// Where time went since the runtime was made.
    pub fn times(&self) -> TransferTimes {
        let reports: Vec<_> = self.0.tiers.streams().into_iter().map(Stream::report).collect();
        let wait_seconds = self.0.compute.report().wait_seconds_on;
        let exposed = reports.iter().filter_map(|report| wait_seconds.get(&report.name));
        TransferTimes {
            transfer_seconds: reports.iter().map(|report| report.busy_seconds).sum(),
            exposed_seconds: exposed.sum(),
            wait_seconds,
        }
    }

    /// Bytes of a tier in use now, and the most that its space has been used up to.
    pub fn tier_usage(&self, tier: Tier) -> (usize, usize) {
        self.0.tiers.usage(tier)
    }

    /// The largest absolute error that each lossy codec made to a finite element since the runtime was made, if
    /// [`OffloadOptions::measure_errors`] asks for it. Infinite if a finite element came back as none, or the other way round.
    ///
    /// # Errors
    /// The device's; it is waited for.
    pub fn worst_errors(&self) -> Result<Vec<(CodecKind, f32)>> {
        let mut worst: Vec<(CodecKind, Slice)> =
            self.lock().worst.iter().map(|(&codec, slice)| (codec, slice.clone())).collect();
        worst.sort_by_key(|(codec, _)| *codec);
        worst
            .into_iter()
            .map(|(codec, slice)| Ok((codec, self.0.compute.download::<f32>(&slice)?[0])))
            .collect()
    }

    /// Slices saved and not dropped yet.
    pub fn live(&self) -> usize {
        self.lock().entries.values().filter(|entry| entry.strong_count() > 0).count()
    }

    /// Starts copies back of entries before `position`, nearest first, as far as window and budget allow.
    fn prefetch(&self, state: &mut State, position: usize) {
        let ahead = self.fill_window(state, position);
        self.0.ahead_bytes.store(ahead, Ordering::Relaxed);
    }

    /// Does it, and returns the bytes that are ahead then.
    fn fill_window(&self, state: &mut State, position: usize) -> usize {
        let mut ahead = 0;
        for index in (0..position.min(state.order.len())).rev() {
            let Some(entry) = state.order[index].upgrade() else { continue };
            let mut place = entry.lock();
            match std::mem::replace(&mut *place, Place::Moving) {
                Place::Away(slot) if ahead + entry.bytes <= state.window_bytes => {
                    match self.start_copy_back(state, &entry, &slot) {
                        Ok(slice) => *place = Place::Prefetched(slice, slot),
                        Err(_) => {
                            // No room now: the load itself will make some, or report it.
                            *place = Place::Away(slot);
                            return ahead;
                        }
                    }
                    ahead += entry.bytes;
                }
                Place::Away(slot) => {
                    *place = Place::Away(slot);
                    return ahead;
                }
                other => {
                    if matches!(other, Place::Prefetched(..)) {
                        ahead += entry.bytes;
                    }
                    *place = other;
                }
            }
        }
        ahead
    }

    /// A copy back that must happen: makes room if need be.
    fn copy_back(&self, state: &mut State, entry: &Entry, slot: &Slot) -> Result<Slice> {
        match self.start_copy_back(state, entry, slot) {
            Err(Error::OutOfMemory(facts)) => {
                let ((len, dtype), category) = (entry.stored, Category::Activations);
                let slice = self.alloc_relieved(state, facts, len, dtype, category, &entry.name)?;
                self.submit_copy_back(state, entry, slot, slice)
            }
            other => other,
        }
    }

    fn start_copy_back(&self, state: &mut State, entry: &Entry, slot: &Slot) -> Result<Slice> {
        let (len, dtype) = entry.stored;
        let slice = self.0.device.alloc(len, dtype, Category::Activations, &entry.name)?;
        self.submit_copy_back(state, entry, slot, slice)
    }

    fn submit_copy_back(&self, state: &mut State, entry: &Entry, slot: &Slot, slice: Slice) -> Result<Slice> {
        slot.fetch(&slice)?;
        state.report.moved.of_mut(slot.tier(), entry.codec.kind()).in_bytes += slice.bytes() as u64;
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
        while self.release_oldest(state) || self.release_furthest(state) {
            state.report.relieved += 1;
            match self.0.device.alloc(len, dtype, category, name) {
                Err(Error::OutOfMemory(again)) => facts = again,
                other => return other,
            }
        }
        Err(Error::OutOfMemory(facts))
    }

    /// Lets go of the device memory of the oldest slice on its way out, sending it first if it was only held; false if there
    /// is none. A copy under way is unaffected.
    fn release_oldest(&self, state: &mut State) -> bool {
        while let Some((entry, bytes)) = state.in_flight.pop_front() {
            state.in_flight_bytes -= bytes;
            let Some(entry) = entry.upgrade() else { continue };
            // Locked by a load, which calls this: its own entry holds nothing.
            let Ok(mut place) = entry.place.try_lock() else { continue };
            match std::mem::replace(&mut *place, Place::Moving) {
                Place::Leaving(_, slot) => {
                    *place = Place::Away(slot);
                    return true;
                }
                Place::Held(slice) => match self.send(state, entry.tier, &slice, entry.codec) {
                    Ok(Some(slot)) => {
                        *place = Place::Away(slot);
                        return true;
                    }
                    Ok(None) | Err(_) => {
                        // It stays: there is no room for it elsewhere.
                        state.report.fallbacks.to_device += 1;
                        *place = Place::Held(slice);
                    }
                },
                other => *place = other,
            }
        }
        false
    }

    /// Undoes the prefetch that is needed last; false if there is none.
    fn release_furthest(&self, state: &mut State) -> bool {
        for entry in state.order.iter().filter_map(Weak::upgrade) {
            // Locked by a load, which calls this: its own entry is not ahead of need.
            let Ok(mut place) = entry.place.try_lock() else { continue };
            match std::mem::replace(&mut *place, Place::Moving) {
                Place::Prefetched(_, slot) => {
                    *place = Place::Away(slot);
                    state.given_up_bytes += entry.bytes;
                    return true;
                }
                other => *place = other,
            }
        }
        false
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A tensor's key of stochastic rounding: FNV-1a of its name.
fn site(name: &str) -> u32 {
    name.bytes().fold(0x811C_9DC5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

impl Entry {
    fn lock(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Saved {
    /// Whether what is loaded may differ from what was saved.
    pub fn is_lossy(&self) -> bool {
        self.0.codec.is_lossy()
    }

    /// The name it was saved under first.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its bytes in stored form.
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }
}
