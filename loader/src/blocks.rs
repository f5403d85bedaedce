//! Blocks read ahead by several threads, and batches gathered from them.
//!
//! Readers and gatherers follow the same stages ([`Stages`] and [`Walk`]), so that neither tells the other what to do.
//! A reader takes a free slot and, with it, the next block that a stage opens. A gatherer takes the blocks that its
//! stage opens, waiting for those that are not there yet, and frees those that the stage closes. Slots go to blocks in the
//! order in which they are wanted, and there are more slots than blocks open at a time, so it always goes on. There is
//! nothing to fill but the slots: when none is free, readers rest.
//!
//! Several gatherers take batches by turns. Each goes through every stage and holds its blocks; a slot is free when the last
//! of them lets go of it. None rests before it has gone past the batches of the others, to the start of its next: then
//! the one that rests is ahead, and the one that is behind has all that it needs, or waits for what nobody is past.
//!
//! Blocks of one window, which the random order has, are taken and freed many at a time.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::arena::{self, Slot};
use crate::disk::{Brought, Disk};
use crate::order::{Plan, Share, Span, Stage, Stages, Step, Walk};
use crate::prefetch::{Filling, Slots, Source};
use crate::shard::Shard;
use crate::sums::PAGE_BYTES;
use crate::{Error, Result, Samples};

/// Bytes of small blocks that are handed over at a time.
const HANDOVER_BYTES: usize = 128 << 10;

/// The target of a token that is not to count.
const IGNORED: i32 = -100;

/// Windows that are found before they are copied.
const GROUP: usize = 8;
/// Bytes that the processor fetches at a time.
const CACHE_LINE_BYTES: usize = 64;

/// An epoch, and a block of it.
type Key = (u64, u64);

/// A block in its slot.
#[derive(Debug)]
struct Loaded {
    slot: Slot,
    /// Where in the slot its first window begins.
    skip: usize,
    shard: usize,
    /// Where in the file that is.
    offset: u64,
    span: Span,
    /// Pages of the file that are not what they were.
    damaged: Vec<u64>,
}

/// What was done, in nanoseconds and bytes.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) disk_nanos: AtomicU64,
    pub(crate) disk_wait_nanos: AtomicU64,
    pub(crate) room_wait_nanos: AtomicU64,
    pub(crate) copy_nanos: AtomicU64,
    pub(crate) read_bytes: AtomicU64,
    pub(crate) needed_bytes: AtomicU64,
    pub(crate) gathered_bytes: AtomicU64,
    pub(crate) most_slots: AtomicU64,
    pub(crate) quarantined_windows: AtomicU64,
}

impl Counters {
    fn add(counter: &AtomicU64, amount: u64) {
        counter.fetch_add(amount, Ordering::Relaxed);
    }

    fn add_since(counter: &AtomicU64, began: Instant) {
        Self::add(counter, began.elapsed().as_nanos() as u64);
    }

    pub(crate) fn seconds(counter: &AtomicU64) -> f64 {
        Duration::from_nanos(counter.load(Ordering::Relaxed)).as_secs_f64()
    }
}

/// What readers and the gatherer share.
#[derive(Debug)]
pub(crate) struct Shared {
    samples: Samples,
    plan: Arc<Plan>,
    pub(crate) disk: Disk,
    pub(crate) counters: Counters,
    slots: usize,
    /// Blocks handed over at a time.
    handover: usize,
    state: Mutex<State>,
    /// Slots are free, or it is time to stop.
    room: Condvar,
    /// Blocks are loaded, or readers have ended.
    loaded: Condvar,
}

#[derive(Debug)]
struct State {
    stages: Stages,
    /// Blocks of the last stage taken that no reader has yet.
    wanted: VecDeque<Key>,
    free: Vec<Slot>,
    /// For each gatherer the blocks that were loaded since it looked.
    inboxes: Vec<Vec<(Key, Result<Arc<Loaded>>)>>,
    readers: usize,
    stopping: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stopped(&self) -> Error {
        Error::Stopped { path: self.path() }
    }

    fn path(&self) -> PathBuf {
        self.samples.dataset().path().to_path_buf()
    }

    /// Takes free slots, each with a block for it. Sleeps while there is none; empty when it is time to end.
    fn take(&self) -> Vec<(Slot, Key)> {
        let mut state = self.lock();
        if state.free.is_empty() && !state.stopping {
            let began = Instant::now();
            state = self
                .room
                .wait_while(state, |state| state.free.is_empty() && !state.stopping)
                .unwrap_or_else(PoisonError::into_inner);
            Counters::add_since(&self.counters.room_wait_nanos, began);
        }
        let mut taken = Vec::new();
        while taken.len() < self.handover && !state.stopping {
            let Some(slot) = state.free.pop() else { break };
            let Some(key) = state.next_key() else {
                state.free.push(slot);
                break;
            };
            taken.push((slot, key));
        }
        let used = (self.slots - state.free.len()) as u64;
        self.counters.most_slots.fetch_max(used, Ordering::Relaxed);
        taken
    }

    /// Reads a block.
    fn load(&self, mut slot: Slot, (_, block): Key) -> Result<Loaded> {
        let span = self.plan.layout().span(block);
        let (shard, range) = self.samples.bytes_of(span.part, span.first_in_part, span.windows);
        let began = Instant::now();
        let brought = self.disk.read(shard, range.clone(), &mut slot)?;
        let counters = &self.counters;
        Counters::add_since(&counters.disk_nanos, began);
        Counters::add(&counters.read_bytes, brought.bytes);
        let width = self.samples.dataset().shards()[shard].encoding.bytes();
        Counters::add(&counters.needed_bytes, range.end - range.start - width);
        let Brought { skip, damaged, .. } = brought;
        Ok(Loaded { slot, skip, shard, offset: range.start, span, damaged })
    }

    fn stop(&self) {
        self.lock().stopping = true;
        self.room.notify_all();
        self.loaded.notify_all();
    }
}

impl State {
    /// The next block to be read.
    fn next_key(&mut self) -> Option<Key> {
        loop {
            if let Some(key) = self.wanted.pop_front() {
                return Some(key);
            }
            let stage = self.stages.next()?;
            self.wanted.extend(stage.opened.iter().map(|&(_, block)| (stage.epoch, block)));
        }
    }
}

/// What the readers are to do.
pub(crate) struct Reading {
    pub(crate) samples: Samples,
    pub(crate) plan: Arc<Plan>,
    pub(crate) disk: Disk,
    pub(crate) position: u64,
    pub(crate) share: Share,
    pub(crate) threads: usize,
    pub(crate) slots: usize,
    pub(crate) slot_bytes: usize,
    pub(crate) gatherers: usize,
}

/// The readers' threads. They end when it is dropped, after at most one read each.
#[derive(Debug)]
pub(crate) struct Readers {
    pub(crate) shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Readers {
    /// Begins to read.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] if there is none for the slots, and [`Error::Start`] if no thread can be started.
    pub(crate) fn start(reading: Reading) -> Result<Self> {
        let Reading { samples, plan, disk, position, share, threads, slots, slot_bytes, gatherers } = reading;
        // Slots that are handed over wait for their fellows, so they are few of all.
        let handover = (HANDOVER_BYTES / slot_bytes).min(slots / (4 * threads)).max(1);
        let state = State {
            stages: Stages::new(&plan, position, share),
            wanted: VecDeque::new(),
            free: arena::slots(slots, slot_bytes)?,
            inboxes: vec![Vec::new(); gatherers],
            readers: 0,
            stopping: false,
        };
        let shared = Arc::new(Shared {
            samples,
            plan,
            disk,
            counters: Counters::default(),
            slots,
            handover,
            state: Mutex::new(state),
            room: Condvar::new(),
            loaded: Condvar::new(),
        });
        let mut readers = Self { shared, threads: Vec::new() };
        for index in 0..threads {
            let reader = Reader::new(readers.shared.clone());
            let thread = std::thread::Builder::new().name(format!("ebbtide-reader-{index}"));
            let started = thread.spawn(move || reader.run());
            readers.threads.push(started.map_err(|cause| Error::Start { cause: Arc::new(cause) })?);
        }
        Ok(readers)
    }

    /// Has readers and the gatherer end soon.
    pub(crate) fn stop(&self) {
        self.shared.stop();
    }
}

impl Readers {
    /// Waits for the threads to end, and puts checksums that were made in their place.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.stop();
        for thread in self.threads.drain(..) {
            // A reader that panicked has said so.
            let _ = thread.join();
        }
        self.shared.disk.finish()
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        // Who wants to know asks before.
        let _ = self.finish();
    }
}

/// A thread's side.
struct Reader {
    shared: Arc<Shared>,
}

impl Reader {
    fn new(shared: Arc<Shared>) -> Self {
        shared.lock().readers += 1;
        Self { shared }
    }

    fn run(self) {
        let shared = &self.shared;
        loop {
            let taken = shared.take();
            if taken.is_empty() {
                return;
            }
            let mut failed = false;
            let mut loaded = Vec::with_capacity(taken.len());
            for (slot, key) in taken {
                let block = shared.load(slot, key).map(Arc::new);
                failed |= block.is_err();
                loaded.push((key, block));
            }
            let mut state = shared.lock();
            if let Some((last, others)) = state.inboxes.split_last_mut() {
                others.iter_mut().for_each(|inbox| inbox.extend_from_slice(&loaded));
                // Handed over, not copied: the last gatherer to let go of a block must be the last holder of it.
                last.append(&mut loaded);
            }
            drop(state);
            shared.loaded.notify_all();
            // What comes after a bad block is not wanted.
            if failed {
                return;
            }
        }
    }
}

impl Drop for Reader {
    /// However a reader ends, nobody waits for it any longer.
    fn drop(&mut self) {
        self.shared.lock().readers -= 1;
        self.shared.loaded.notify_all();
    }
}

/// A window in an open block.
struct Found {
    stream: usize,
    /// The block's place among those of the stream.
    place: u64,
    /// Where the window begins, in bytes of the block.
    at: usize,
    bytes: usize,
    position: u64,
}

/// Gathers batches from the blocks that the readers load.
pub(crate) struct Gatherer {
    shared: Arc<Shared>,
    inbox: usize,
    walk: Walk,
    position: u64,
    world: u64,
    /// Every token is below it.
    vocabulary: u64,
    epoch: u64,
    /// For each stream the place of its first open block, and those from there on.
    open: Vec<(u64, VecDeque<Arc<Loaded>>)>,
    /// Blocks that came before they were asked for.
    arrived: HashMap<Key, Result<Arc<Loaded>>>,
    freed: Vec<Slot>,
    /// Windows to be copied, of blocks that are open.
    found: Vec<Found>,
    /// Not counted yet.
    gathered_bytes: u64,
    waited: Duration,
}

impl Gatherer {
    /// Gathers the share's samples from a position on.
    pub(crate) fn new(
        shared: Arc<Shared>,
        inbox: usize,
        position: u64,
        share: Share,
        vocabulary: u64,
    ) -> Self {
        let walk = Walk::new(&shared.plan, position, share);
        let open = (0..shared.plan.streams()).map(|_| (0, VecDeque::new())).collect();
        let (world, arrived, freed) = (share.world, HashMap::new(), Vec::new());
        Self {
            shared,
            inbox,
            walk,
            position,
            world,
            vocabulary,
            epoch: 0,
            open,
            arrived,
            freed,
            found: Vec::new(),
            gathered_bytes: 0,
            waited: Duration::ZERO,
        }
    }

    fn release(&mut self, at_least: usize) {
        if self.freed.len() < at_least.max(1) {
            return;
        }
        self.shared.lock().free.append(&mut self.freed);
        self.shared.room.notify_all();
    }

    /// The block, once it is there.
    fn wait_for(&mut self, key: Key) -> Result<Arc<Loaded>> {
        if let Some(block) = self.arrived.remove(&key) {
            return block;
        }
        // Readers may have no slot but these.
        self.release(1);
        let mut state = self.shared.lock();
        let mut began = None;
        loop {
            self.arrived.extend(state.inboxes[self.inbox].drain(..));
            let block = self.arrived.remove(&key);
            if block.is_some() || state.readers == 0 || state.stopping {
                self.waited += began.map_or(Duration::ZERO, |began: Instant| began.elapsed());
                drop(state);
                return block.unwrap_or_else(|| Err(self.failure()));
            }
            began.get_or_insert_with(Instant::now);
            state = self.shared.loaded.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Why a block never came: a reader's error, if there is one.
    fn failure(&mut self) -> Error {
        let error = self.arrived.values().find_map(|block| block.as_ref().err().cloned());
        error.unwrap_or_else(|| self.shared.stopped())
    }

    /// Frees the blocks that a stage closes, then takes those that it opens.
    fn enter(&mut self, stage: &Stage) -> Result<()> {
        if stage.epoch != self.epoch {
            self.epoch = stage.epoch;
            for (_, open) in &mut self.open {
                self.freed.extend(open.drain(..).filter_map(slot_of));
            }
        }
        let (first, open) = &mut self.open[stage.stream];
        while !open.is_empty() && *first < stage.closed_below {
            self.freed.extend(open.pop_front().and_then(slot_of));
            *first += 1;
        }
        self.release(self.shared.handover);
        for &(place, block) in &stage.opened {
            let loaded = self.wait_for((stage.epoch, block))?;
            let (first, open) = &mut self.open[stage.stream];
            if open.is_empty() {
                *first = place;
            }
            open.push_back(loaded);
        }
        Ok(())
    }

    /// The position after a batch.
    fn position_after(&self, batch: usize) -> Result<u64> {
        let count = (batch as u64).checked_mul(self.world);
        let position = count.and_then(|count| self.position.checked_add(count));
        position.ok_or(Error::BadPosition { position: self.position, batch })
    }

    /// Goes to the next sample. `before` is done first where that closes blocks.
    fn step(&mut self, batch: usize, before: &mut dyn FnMut(&mut Self) -> Result<()>) -> Result<Step> {
        let step = self.walk.next().ok_or(Error::BadPosition { position: self.position, batch })?;
        if let Some(stage) = &step.entered {
            before(self)?;
            self.enter(stage)?;
        }
        Ok(step)
    }

    /// Finds the window of a step, and has it come into the processor's cache meanwhile.
    fn find(&mut self, step: &Step, context: usize) -> Result<()> {
        let (sample, place) = self.walk.sample(step).ok_or_else(|| self.shared.stopped())?;
        let block = self.block(step.stream, place);
        let width = self.shard(block).encoding.bytes() as usize;
        let at = (sample.window - block.span.first) as usize * context * width;
        let bytes = (context + 1) * width;
        touch(&block.slot[block.skip + at..][..bytes]);
        let position = sample.position;
        self.found.push(Found { stream: step.stream, place, at, bytes, position });
        Ok(())
    }

    /// Copies the windows that were found into the next samples: their share of the digest.
    fn copy<'a>(
        &mut self,
        samples: &mut impl Iterator<Item = (&'a mut [u32], &'a mut [i32])>,
    ) -> Result<u64> {
        let mut digest = 0u64;
        for (found, (inputs, targets)) in self.found.iter().zip(samples) {
            let block = self.block(found.stream, found.place);
            let window = &block.slot[block.skip + found.at..][..found.bytes];
            let offset = block.offset + found.at as u64;
            let pages = offset / PAGE_BYTES..(offset + found.bytes as u64).div_ceil(PAGE_BYTES);
            if block.damaged.iter().any(|page| pages.contains(page)) {
                inputs.fill(0);
                targets.fill(IGNORED);
                digest = digest.wrapping_add(xxh3_64_with_seed(&[], found.position));
                Counters::add(&self.shared.counters.quarantined_windows, 1);
                continue;
            }
            self.shard(block).widen(window, offset, self.vocabulary, inputs, targets)?;
            digest = digest.wrapping_add(xxh3_64_with_seed(window, found.position));
        }
        let width = |found: &Found| self.shard(self.block(found.stream, found.place)).encoding.bytes();
        self.gathered_bytes += self.found.iter().map(|found| found.bytes as u64 - width(found)).sum::<u64>();
        self.found.clear();
        Ok(digest)
    }

    fn block(&self, stream: usize, place: u64) -> &Loaded {
        let (first, open) = &self.open[stream];
        &open[(place - first) as usize]
    }

    fn shard(&self, block: &Loaded) -> &Shard {
        &self.shared.samples.dataset().shards()[block.shard]
    }
}

/// Reads a byte of each cache line, all at once, so that what follows need not wait for one after another.
fn touch(window: &[u8]) {
    std::hint::black_box(window.iter().step_by(CACHE_LINE_BYTES).fold(0, |all, byte| all | byte));
}

impl Source for Gatherer {
    fn fill(&mut self, slots: &mut Slots<'_>, stopping: &dyn Fn() -> bool) -> Result<Filling> {
        let batch = slots.inputs.len() / slots.context;
        let position = self.position_after(batch)?;
        let began = Instant::now();
        let (mut digest, context) = (0u64, slots.context);
        let mut samples = slots.samples();
        let mut copy = |gatherer: &mut Self| {
            digest = digest.wrapping_add(gatherer.copy(&mut samples)?);
            Ok(())
        };
        self.found.clear();
        for _ in 0..batch {
            if stopping() {
                return Err(self.shared.stopped());
            }
            let step = self.step(batch, &mut copy)?;
            self.find(&step, context)?;
            if self.found.len() == GROUP {
                copy(self)?;
            }
        }
        copy(self)?;
        let (waited, counters) = (std::mem::take(&mut self.waited), &self.shared.counters);
        Counters::add(&counters.disk_wait_nanos, waited.as_nanos() as u64);
        Counters::add(&counters.copy_nanos, began.elapsed().saturating_sub(waited).as_nanos() as u64);
        Counters::add(&counters.gathered_bytes, std::mem::take(&mut self.gathered_bytes));
        self.position = position;
        Ok(Filling { position, digest })
    }

    fn skip(&mut self, batch: usize, stopping: &dyn Fn() -> bool) -> Result<()> {
        let position = self.position_after(batch)?;
        for _ in 0..batch {
            if stopping() {
                return Err(self.shared.stopped());
            }
            self.step(batch, &mut |_| Ok(()))?;
        }
        // The other may need them, and this one may sleep now.
        self.release(1);
        self.position = position;
        Ok(())
    }
}

/// The slot of a block, if nobody else holds it.
fn slot_of(block: Arc<Loaded>) -> Option<Slot> {
    Arc::into_inner(block).map(|block| block.slot)
}
