//! Batches in any order from data of any size, within a limit of memory.
//!
//! Threads read blocks into an arena ([`BlockOrder`](crate::BlockOrder) says which and when), two more gather batches from
//! it by turns, a few batches ahead of the caller. The memory is as much whatever the data's size: the blocks that the order
//! keeps open, some more that are being read, and the batches ahead. The limit is on these; beside them there are the
//! threads' stacks and some hundred KiB of lists.
//!
//! A run goes on from a position and a digest. The digest adds up a hash of each sample's bytes and position, so it does not
//! hang on ranks, batches or threads: those of all ranks added are that of one, and it is the same if and only if the same
//! samples came at the same positions.

use crate::blocks::{Counters, Gatherer, Readers, Reading};
use crate::disk::{Disk, IoMode};
use crate::memory::{self, MemoryLimit};
use crate::order::{Order, Plan, Sample, Share, Walk};
use crate::prefetch::{PrefetchOptions, Prefetcher, Shape, Source, TokenBatch};
use crate::sums::{Checksums, Damaged};
use crate::{Error, Result, Samples};

/// The most threads that read.
const MOST_THREADS: usize = 4;
/// Threads that gather from blocks, a batch each.
const GATHERERS: usize = 2;
/// Bytes of the arena for windows that are read one by one.
const RANDOM_ARENA_BYTES: u64 = 16 << 20;
/// Bytes of batches ahead, at most.
const AHEAD_BYTES: usize = 64 << 20;

/// What a [`Loader`] delivers, and with what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoaderOptions {
    /// The order of the samples.
    pub order: Order,
    /// What the order hangs on beside the data.
    pub seed: u64,
    /// Samples of a batch of this rank.
    pub batch: usize,
    /// Which of the samples are this rank's: a batch is those of `batch * world` positions.
    pub share: Share,
    /// Threads that read, 2 by default; at least 1 and at most 4 are used.
    pub threads: usize,
    /// The most bytes of memory, for blocks and batches. Without it, half of what there is.
    pub ram_bytes: Option<u64>,
    /// The most batches ahead of the caller, 4 by default. Fewer where memory is short, but at least one.
    pub batches_ahead: usize,
    /// How files are read. Without it: single windows and data that fits into the limit of memory through the page cache,
    /// larger data past it.
    pub io: Option<IoMode>,
    /// The size of the vocabulary: a token outside of it is an error. Without it anything below 2^31 is a token.
    pub vocabulary: Option<usize>,
    /// What the order takes for the data's fingerprint, if not that of the data: that of a run whose data was changed and
    /// which is to go on in its order.
    pub fingerprint: Option<u64>,
    /// What is done about checksums of the data: verified where there are some, by default.
    pub checksums: Checksums,
    /// What is done about data that its checksum says is damaged.
    pub damaged: Damaged,
}

impl Default for LoaderOptions {
    fn default() -> Self {
        Self {
            order: Order::default(),
            seed: 0,
            batch: 1,
            share: Share::default(),
            threads: 2,
            ram_bytes: None,
            batches_ahead: 4,
            io: None,
            vocabulary: None,
            fingerprint: None,
            checksums: Checksums::default(),
            damaged: Damaged::default(),
        }
    }
}

/// Where a run is in its data: all that it needs to go on, beside its options.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LoaderState {
    /// Samples delivered, to all ranks.
    pub position: u64,
    /// The sum, modulo 2^64, of the XXH3 hash of each sample delivered to this rank: of the bytes of its window as they
    /// are stored, seeded with its position. The sum over ranks is that of a run of one.
    pub digest: u64,
}

/// What a [`Loader`] did so far.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct LoaderReport {
    /// Bytes of tokens gathered into batches, as they are stored.
    pub gathered_bytes: u64,
    /// Bytes read from files.
    pub read_bytes: u64,
    /// Bytes read for each byte of the blocks asked for: 1 if nothing is read in vain.
    pub read_amplification: f64,
    /// Seconds that readers were reading, of all threads together.
    pub disk_seconds: f64,
    /// Seconds that gathering waited for blocks, of both threads together: the disk is too slow, or readers too few.
    pub disk_wait_seconds: f64,
    /// Seconds that readers waited for free memory, of all threads together: they are ahead.
    pub room_wait_seconds: f64,
    /// Seconds that gathering copied, of both threads together.
    pub copy_seconds: f64,
    /// Seconds that the caller waited for a batch.
    pub consumer_wait_seconds: f64,
    /// Threads that read.
    pub threads: usize,
    /// Bytes of the arena: slots times their size.
    pub arena_bytes: u64,
    /// The most of it that was in use.
    pub peak_arena_bytes: u64,
    /// Bytes of the batches that may be held at a time.
    pub batch_bytes: u64,
    /// The limit on both.
    pub limit_bytes: u64,
    /// Where the limit comes from.
    pub limit_source: String,
    /// Bytes that were held against checksums.
    pub verified_bytes: u64,
    /// Bytes whose checksums were made.
    pub summed_bytes: u64,
    /// Pages of 4 KiB that were not what they were, each time that they were read.
    pub damaged_pages: u64,
    /// Samples that came as tokens 0 with targets that are ignored, since tokens of theirs were damaged.
    pub quarantined_samples: u64,
    /// How files are read.
    pub io: String,
    /// Why they are read so.
    pub io_reason: String,
}

/// Delivers batches in an order, from a position on.
///
/// It may be used anywhere, inside of a tokio runtime too, where it blocks the thread that calls. Dropping it waits for at
/// most one read of each thread.
#[derive(Debug)]
pub struct Loader {
    // Dropped in this order: the gatherer ends before the readers do.
    batches: Prefetcher,
    readers: Readers,
    state: LoaderState,
    memory: Memory,
    reason: String,
    threads: usize,
}

/// The memory of a loader.
#[derive(Clone, Debug)]
struct Memory {
    slots: u64,
    slot_bytes: u64,
    ahead: u64,
    batch_bytes: u64,
    limit: MemoryLimit,
}

impl Loader {
    /// Begins to read batches, from where a run is.
    ///
    /// # Errors
    ///
    /// [`Error::BadOrder`], [`Error::BadShare`] and [`Error::BadBatch`] for options that cannot be,
    /// [`Error::MemoryTooSmall`] if the limit does not hold the order's open blocks, [`Error::NoMemory`] if the system does
    /// not, and [`Error::Start`] if it cannot start threads.
    pub fn new(samples: &Samples, options: &LoaderOptions, state: LoaderState) -> Result<Self> {
        options.order.check()?;
        options.share.check()?;
        let path = samples.dataset().path().to_path_buf();
        let shape = Shape { batch: options.batch, context: samples.context(), path };
        let threads = options.threads.clamp(1, MOST_THREADS);
        let plan = plan(samples, options);
        let memory = Memory::new(samples, options, &plan, threads, shape.batch_bytes()? as u64)?;
        let (mode, reason) = mode(samples, options, &memory.limit);
        // Handing single windows to two costs more than their copies.
        let gatherers = match options.order {
            Order::Random => 1,
            Order::Block(_) => GATHERERS,
        };
        let readers = Readers::start(Reading {
            samples: samples.clone(),
            plan,
            disk: Disk::new(samples.dataset().clone(), mode, &options.checksums, options.damaged)?,
            position: state.position,
            share: options.share,
            threads,
            slots: memory.slots as usize,
            slot_bytes: memory.slot_bytes as usize,
            gatherers,
        })?;
        let vocabulary = options.vocabulary.map_or(u64::MAX, |vocabulary| vocabulary as u64);
        let gatherers = (0..gatherers).map(|inbox| -> Box<dyn Source> {
            let shared = readers.shared.clone();
            Box::new(Gatherer::new(shared, inbox, state.position, options.share, vocabulary))
        });
        let ahead = PrefetchOptions { batches: memory.ahead as usize, bytes: usize::MAX };
        let batches = Prefetcher::start(gatherers.collect(), shape, ahead)?;
        Ok(Self { batches, readers, state, memory, reason, threads })
    }

    /// The next batch; blocks until it is there.
    ///
    /// # Errors
    ///
    /// [`Error::CutShort`], [`Error::Changed`] and [`Error::Read`] if a file cannot be read as it was, after all batches
    /// before the bad one; [`Error::NotAToken`] for a number that is none, or none of the vocabulary; [`Error::BadPosition`] if the count of samples
    /// leaves 64 bits; [`Error::NoMemory`] if a batch cannot be allocated. After an error every call gives it again.
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator of results would invite `collect` on an endless one"
    )]
    pub fn next(&mut self) -> Result<TokenBatch> {
        let filled = self.batches.next_filled()?;
        let digest = self.state.digest.wrapping_add(filled.digest);
        self.state = LoaderState { position: filled.batch.position, digest };
        Ok(filled.batch)
    }

    /// Gives a batch back, so that its buffers are used again. One of another shape is dropped.
    pub fn recycle(&mut self, batch: TokenBatch) {
        self.batches.recycle(batch);
    }

    /// Where the run is, once all batches that were taken are used.
    pub fn state(&self) -> LoaderState {
        self.state
    }

    /// Seconds that [`next`](Self::next) stood waiting, in total. Near 0 if reading keeps up.
    pub fn wait_seconds(&self) -> f64 {
        self.batches.wait_seconds()
    }

    /// Ends it, and puts checksums that were made ([`Checksums::Make`]) in their place; dropping it does so too, without a word if that
    /// fails.
    ///
    /// # Errors
    ///
    /// [`Error::WriteSums`].
    pub fn finish(mut self) -> Result<LoaderState> {
        self.readers.finish()?;
        Ok(self.state)
    }

    /// What was read, waited for and held so far.
    pub fn report(&self) -> LoaderReport {
        let (shared, memory) = (&self.readers.shared, &self.memory);
        let counters = &shared.counters;
        let load =
            |counter: &std::sync::atomic::AtomicU64| counter.load(std::sync::atomic::Ordering::Relaxed);
        let (read_bytes, needed_bytes) = (load(&counters.read_bytes), load(&counters.needed_bytes));
        let (mode, fallback) = shared.disk.mode();
        let sums = shared.disk.verifier().report();
        LoaderReport {
            gathered_bytes: load(&counters.gathered_bytes),
            read_bytes,
            read_amplification: if needed_bytes == 0 { 1.0 } else { read_bytes as f64 / needed_bytes as f64 },
            disk_seconds: Counters::seconds(&counters.disk_nanos),
            disk_wait_seconds: Counters::seconds(&counters.disk_wait_nanos),
            room_wait_seconds: Counters::seconds(&counters.room_wait_nanos),
            copy_seconds: Counters::seconds(&counters.copy_nanos),
            consumer_wait_seconds: self.wait_seconds(),
            threads: self.threads,
            arena_bytes: memory.slots * memory.slot_bytes,
            peak_arena_bytes: load(&counters.most_slots) * memory.slot_bytes,
            batch_bytes: memory.batches() * memory.batch_bytes,
            limit_bytes: memory.limit.bytes,
            limit_source: memory.limit.source.clone(),
            verified_bytes: sums.verified_bytes,
            summed_bytes: sums.made_bytes,
            damaged_pages: load(&shared.disk.verifier().damaged_pages),
            quarantined_samples: load(&counters.quarantined_windows),
            io: mode.to_string(),
            io_reason: fallback.unwrap_or_else(|| self.reason.clone()),
        }
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // The gatherer may be waiting for a block, and is waited for first.
        self.readers.stop();
    }
}

/// The samples that a loader with these options delivers from a position on, without reading any. Ends with the last epoch
/// whose positions fit 64 bits.
///
/// # Errors
///
/// [`Error::BadOrder`] and [`Error::BadShare`] for options that cannot be.
pub fn order_of(
    samples: &Samples,
    options: &LoaderOptions,
    position: u64,
) -> Result<impl Iterator<Item = Sample> + use<>> {
    options.order.check()?;
    options.share.check()?;
    Ok(Walk::new(&plan(samples, options), position, options.share).samples())
}

fn plan(samples: &Samples, options: &LoaderOptions) -> std::sync::Arc<Plan> {
    let fingerprint = options.fingerprint.unwrap_or_else(|| samples.dataset().fingerprint());
    std::sync::Arc::new(Plan::new(samples.layout(options.order), options.order, options.seed, fingerprint))
}

/// How files are read, and why.
fn mode(samples: &Samples, options: &LoaderOptions, limit: &MemoryLimit) -> (IoMode, String) {
    let bytes = samples.dataset().bytes();
    match (options.io, options.order) {
        (Some(mode), _) => (mode, "as asked for".to_owned()),
        (None, Order::Random) => {
            (IoMode::Cached, "single windows are read, and the page cache keeps their neighbours".to_owned())
        }
        (None, Order::Block(_)) if bytes > limit.bytes => {
            let reason =
                format!("the data's {bytes} bytes are more than the {} that may be used", limit.bytes);
            (IoMode::Direct, reason)
        }
        (None, Order::Block(_)) => {
            let reason = format!("the data's {bytes} bytes fit into the {} that may be used", limit.bytes);
            (IoMode::Cached, reason)
        }
    }
}

impl Memory {
    /// Shares the limit out between batches and slots. The order's open blocks and one batch ahead must fit; what is
    /// beyond them serves to be ahead, and is not taken beyond what helps.
    fn new(
        samples: &Samples,
        options: &LoaderOptions,
        plan: &Plan,
        threads: usize,
        batch_bytes: u64,
    ) -> Result<Self> {
        let limit = match options.ram_bytes {
            Some(bytes) => MemoryLimit { bytes, source: "as asked for".to_owned() },
            None => {
                let MemoryLimit { bytes, source } = memory::available();
                MemoryLimit { bytes: bytes / 2, source: format!("half of what is left: {source}") }
            }
        };
        let range_bytes = samples.most_bytes(plan.layout().most_windows());
        let slot_bytes = Disk::slot_bytes(range_bytes);
        let least_slots = plan.most_open() + 1;
        let wanted_slots = match options.order {
            Order::Random => (RANDOM_ARENA_BYTES / slot_bytes).max(4 * threads as u64),
            // A block for each stream and two for each thread may be on their way.
            Order::Block(_) => plan.most_open() + (2 * plan.streams()).max(2 * threads as u64),
        };
        let wanted_ahead = options.batches_ahead.min(AHEAD_BYTES / batch_bytes.max(1) as usize).max(1) as u64;
        let bytes_of = |slots: u64, ahead: u64| {
            let batches = u128::from(ahead + 1) * u128::from(batch_bytes);
            u128::from(slots) * u128::from(slot_bytes) + batches
        };
        if bytes_of(least_slots, 1) > limit.bytes.into() {
            return Err(Error::MemoryTooSmall {
                needed: u64::try_from(bytes_of(least_slots, 1)).unwrap_or(u64::MAX),
                blocks: least_slots,
                block_bytes: slot_bytes,
                batches: 2,
                batch_bytes,
                limit: limit.bytes,
                source_of_limit: limit.source,
            });
        }
        let fits = |slots, ahead| bytes_of(slots, ahead) <= limit.bytes.into();
        let ahead = (1..=wanted_ahead).rev().find(|&ahead| fits(least_slots, ahead)).unwrap_or(1);
        let slots = (least_slots..=wanted_slots.max(least_slots)).rev().find(|&slots| fits(slots, ahead));
        Ok(Self { slots: slots.unwrap_or(least_slots), slot_bytes, ahead, batch_bytes, limit })
    }

    /// Batches that may be held: those ahead, and the one that goes round.
    fn batches(&self) -> u64 {
        self.ahead + 1
    }
}
