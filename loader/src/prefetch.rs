//! Batches read ahead of the training loop.
//!
//! A reader runs on a blocking thread of a tokio runtime that the prefetcher owns, or several do, by turns. They read whole
//! batches in the order of the sampler, put them into a bounded queue, and rest while the queue is full. A mutex and condition variables
//! join them to the caller rather than a channel of tokio's, whose blocking calls panic inside of another runtime.
//!
//! Before a batch is read, the kernel is told of the windows of the one after it, so that a slow disk works on many
//! windows at a time although they are read one by one.
//!
//! Costs: the batches ahead, within both bounds of [`PrefetchOptions`], and one buffer between its return and its next use.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};

use crate::{Error, Result, Sampler};

/// Bytes of one token in a batch: its input and its target.
const TOKEN_BYTES: usize = size_of::<u32>() + size_of::<i32>();
/// The most windows of one batch that the kernel is told of. No disk works on more at a time.
const ADVISED_WINDOWS: u64 = 1024;

/// A batch on the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenBatch {
    /// Inputs, `[batch, context]`.
    pub tokens: Vec<u32>,
    /// Targets, `[batch, context]`: for each input the token after it.
    pub targets: Vec<i32>,
    /// Samples.
    pub batch: usize,
    /// Tokens of a sample.
    pub context: usize,
    /// Samples delivered once this batch is used: where a run that is saved after it goes on.
    pub position: u64,
}

/// How far to read ahead. Both bounds hold, but at least one batch is always read ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchOptions {
    /// The most batches, 4 by default.
    pub batches: usize,
    /// The most bytes of all of them, 64 MiB by default. A token of a batch takes eight.
    pub bytes: usize,
}

impl Default for PrefetchOptions {
    fn default() -> Self {
        Self { batches: 4, bytes: 64 << 20 }
    }
}

/// Reads batches ahead on a background thread, in exactly the order of its [`Sampler`].
///
/// It may be used anywhere, inside of a tokio runtime too, where it blocks the thread that calls. Dropping it waits for the
/// read of at most one window and ends the thread.
#[derive(Debug)]
pub struct Prefetcher {
    shared: Arc<Shared>,
    /// Taken when dropped.
    runtime: Option<Runtime>,
    failed: Option<Error>,
    waited: Duration,
}

impl Prefetcher {
    /// Begins to read batches of `batch` samples, the first of them sample `position`.
    ///
    /// # Errors
    ///
    /// [`Error::BadBatch`] if `batch` is 0 or its bytes cannot be addressed, and [`Error::Start`] if the system cannot start
    /// the runtime.
    pub fn new(sampler: Sampler, batch: usize, position: u64, options: PrefetchOptions) -> Result<Self> {
        let context = sampler.windows().context();
        let path = sampler.windows().file().path().to_path_buf();
        Self::start(
            vec![Box::new(WindowByWindow { sampler, position, begun: false })],
            Shape { batch, context, path },
            options,
        )
    }

    /// Begins to have sources fill batches by turns.
    pub(crate) fn start(
        sources: Vec<Box<dyn Source>>,
        shape: Shape,
        options: PrefetchOptions,
    ) -> Result<Self> {
        let (batch_bytes, readers) = (shape.batch_bytes()?, sources.len());
        let shared = Arc::new(Shared {
            state: Mutex::new(State { running: readers, ..State::default() }),
            filled: Condvar::new(),
            room: Condvar::new(),
            stop: AtomicBool::new(false),
            limit: options.batches.min(options.bytes / batch_bytes).max(1),
            readers,
            shape,
        });
        // No future ever runs here: only blocking threads are wanted, so the scheduler needs no thread of its own.
        let runtime = Builder::new_current_thread()
            .max_blocking_threads(readers.max(1))
            .thread_name("ebbtide-loader")
            .build()
            .map_err(|cause| Error::Start { cause: Arc::new(cause) })?;
        for (turn, source) in (0..).zip(sources) {
            let reader = Reader { shared: shared.clone(), source, turn };
            runtime.spawn_blocking(move || reader.run());
        }
        Ok(Self { shared, runtime: Some(runtime), failed: None, waited: Duration::ZERO })
    }

    /// The next batch; blocks until it is read.
    ///
    /// # Errors
    ///
    /// The errors of [`Windows::read`](crate::Windows::read), after all batches before the bad one; [`Error::NoMemory`] if a
    /// batch cannot be allocated; [`Error::BadPosition`] if the count of samples leaves 64 bits. After an error every call
    /// gives that error again.
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator of results would invite `collect` on an endless one"
    )]
    pub fn next(&mut self) -> Result<TokenBatch> {
        self.next_filled().map(|filled| filled.batch)
    }

    /// The next batch, and what its source says of it.
    pub(crate) fn next_filled(&mut self) -> Result<Filled> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let mut state = self.shared.lock();
        if !state.is_ready() {
            let began = Instant::now();
            state.awaited = true;
            state = self.shared.wait_while(state, |state| !state.is_ready() && state.running > 0);
            state.awaited = false;
            self.waited += began.elapsed();
        }
        let turn = state.next;
        let next = state.ready.remove(&turn).unwrap_or_else(|| Err(self.shared.stopped()));
        state.next += 1;
        // Waking costs as much as a small batch: only who sleeps is woken.
        let asleep = state.asleep > 0;
        drop(state);
        if asleep {
            self.shared.room.notify_all();
        }
        self.failed = next.as_ref().err().cloned();
        next
    }

    /// Gives a batch back, so that its buffers are used again. One of another shape is dropped.
    pub fn recycle(&mut self, batch: TokenBatch) {
        let mut state = self.shared.lock();
        // One more than the queue holds: the buffer that goes round between the caller and the reader.
        let buffers = state.ready.len() + state.reading + state.spare.len();
        if self.shared.fits(&batch) && buffers <= self.shared.limit {
            state.spare.push(batch);
        }
    }

    /// Seconds that [`next`](Self::next) stood waiting, in total. Near 0 if reading keeps up.
    pub fn wait_seconds(&self) -> f64 {
        self.waited.as_secs_f64()
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        let state = self.shared.lock();
        // Set under the lock, or the reader could miss it between its check and its sleep.
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.room.notify_all();
        drop(self.shared.wait_while(state, |state| state.running > 0));
        // The readers are done. Other ways to end a runtime panic inside of another one.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Fills the batches of a [`Prefetcher`], one after another.
pub(crate) trait Source: Send {
    /// Fills the next batch. May ask `stopping` at times, and then end with any error.
    fn fill(&mut self, batch: &mut Slots<'_>, stopping: &dyn Fn() -> bool) -> Result<Filling>;

    /// Goes past a batch of so many samples, which another source fills.
    fn skip(&mut self, batch: usize, stopping: &dyn Fn() -> bool) -> Result<()>;
}

/// A batch to fill: its inputs and its targets, `[batch, context]` each.
pub(crate) struct Slots<'a> {
    pub(crate) context: usize,
    pub(crate) inputs: &'a mut [u32],
    pub(crate) targets: &'a mut [i32],
}

impl Slots<'_> {
    /// The inputs and targets of each sample.
    pub(crate) fn samples(&mut self) -> impl Iterator<Item = (&mut [u32], &mut [i32])> {
        self.inputs.chunks_exact_mut(self.context).zip(self.targets.chunks_exact_mut(self.context))
    }
}

/// What a source says of the batch that it filled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Filling {
    /// Samples delivered once the batch is used.
    pub(crate) position: u64,
    /// The batch's share of the digest, 0 where there is none.
    pub(crate) digest: u64,
}

/// A filled batch.
#[derive(Debug)]
pub(crate) struct Filled {
    pub(crate) batch: TokenBatch,
    pub(crate) digest: u64,
}

/// What batches are like, and whose they are.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) batch: usize,
    pub(crate) context: usize,
    /// The data, for messages.
    pub(crate) path: PathBuf,
}

impl Shape {
    /// Tokens of a batch.
    fn tokens(&self) -> usize {
        self.batch * self.context
    }

    /// Bytes of a batch, above 0.
    pub(crate) fn batch_bytes(&self) -> Result<usize> {
        let &Self { batch, context, .. } = self;
        let bytes = context.checked_mul(batch).and_then(|tokens| tokens.checked_mul(TOKEN_BYTES));
        bytes.filter(|&bytes| bytes > 0).ok_or(Error::BadBatch { batch, context })
    }
}

/// Reads the windows of a sampler one by one.
struct WindowByWindow {
    sampler: Sampler,
    position: u64,
    /// The kernel knows of the first batch.
    begun: bool,
}

impl Source for WindowByWindow {
    fn fill(&mut self, slots: &mut Slots<'_>, stopping: &dyn Fn() -> bool) -> Result<Filling> {
        let batch = slots.inputs.len() / slots.context;
        if !self.begun {
            self.advise(self.position, batch);
            self.begun = true;
        }
        let position = self.position.checked_add(batch as u64);
        let position = position.ok_or(Error::BadPosition { position: self.position, batch })?;
        self.advise(position, batch);
        let windows = self.sampler.windows();
        for (sample, (inputs, targets)) in (self.position..position).zip(slots.samples()) {
            if stopping() {
                return Err(Error::Stopped { path: windows.file().path().to_path_buf() });
            }
            windows.read(self.sampler.window_at(sample), inputs, targets)?;
        }
        self.position = position;
        Ok(Filling { position, digest: 0 })
    }

    fn skip(&mut self, batch: usize, _: &dyn Fn() -> bool) -> Result<()> {
        let position = self.position.checked_add(batch as u64);
        self.position = position.ok_or(Error::BadPosition { position: self.position, batch })?;
        Ok(())
    }
}

impl WindowByWindow {
    /// Tells the kernel of the first windows of the batch at `position`.
    fn advise(&self, position: u64, batch: usize) {
        let count = (batch as u64).min(ADVISED_WINDOWS);
        for sample in position..position.saturating_add(count) {
            self.sampler.windows().advise(self.sampler.window_at(sample));
        }
    }
}

/// What the caller and the reader share.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Batches are ready, or readers have ended.
    filled: Condvar,
    /// There is room for a batch, or it is time to stop.
    room: Condvar,
    stop: AtomicBool,
    /// The most batches ahead, the one being read included.
    limit: usize,
    /// Those that fill batches by turns.
    readers: usize,
    shape: Shape,
}

#[derive(Debug, Default)]
struct State {
    /// Batches by number, of those that were not taken.
    ready: BTreeMap<u64, Result<Filled>>,
    /// The number of the batch to be taken next.
    next: u64,
    spare: Vec<TokenBatch>,
    /// Batches that are being read.
    reading: usize,
    /// Readers that have not ended.
    running: usize,
    /// The caller waits.
    awaited: bool,
    /// Readers that wait for room.
    asleep: usize,
    /// A reader has found the queue full and sleeps.
    #[cfg(test)]
    resting: bool,
}

impl State {
    fn is_ready(&self) -> bool {
        self.ready.contains_key(&self.next)
    }
}

impl Shared {
    /// The state. A panic elsewhere leaves it whole, since nothing can panic between two of its changes.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_while<'a>(
        &self,
        state: MutexGuard<'a, State>,
        condition: impl FnMut(&mut State) -> bool,
    ) -> MutexGuard<'a, State> {
        self.filled.wait_while(state, condition).unwrap_or_else(PoisonError::into_inner)
    }

    fn stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn stopped(&self) -> Error {
        Error::Stopped { path: self.shape.path.clone() }
    }

    /// Whether a batch has the shape of this prefetcher's, so that its buffers need no change.
    fn fits(&self, batch: &TokenBatch) -> bool {
        [batch.tokens.len(), batch.targets.len()] == [self.shape.tokens(); 2]
    }
}

/// The background side: one of those that fill batches by turns.
struct Reader {
    shared: Arc<Shared>,
    source: Box<dyn Source>,
    /// The number of its next batch.
    turn: u64,
}

impl Reader {
    fn run(mut self) {
        let mut skipped = self.skip(self.turn as usize);
        while let Some(buffer) = self.wait_for_room() {
            let read = skipped.and_then(|()| self.read(buffer));
            let failed = read.is_err();
            let mut state = self.shared.lock();
            state.reading -= 1;
            state.ready.insert(self.turn, read);
            let awaited = state.awaited && state.is_ready();
            drop(state);
            if awaited {
                self.shared.filled.notify_all();
            }
            if failed {
                return;
            }
            self.turn += self.shared.readers as u64;
            // Before it rests, so that it holds nothing that others wait for.
            skipped = self.skip(self.shared.readers - 1);
        }
    }

    /// Has the source go past batches of others.
    fn skip(&mut self, batches: usize) -> Result<()> {
        let shared = &self.shared;
        (0..batches).try_for_each(|_| self.source.skip(shared.shape.batch, &|| shared.stopping()))
    }

    /// Sleeps until there is room for a batch: a buffer for it, or `None` when it is time to stop.
    fn wait_for_room(&self) -> Option<TokenBatch> {
        let mut state = self.shared.lock();
        state.asleep += 1;
        let full = |state: &mut State| {
            let full = self.turn - state.next >= self.shared.limit as u64 && !self.shared.stopping();
            #[cfg(test)]
            {
                state.resting = full;
                self.shared.filled.notify_all();
            }
            full
        };
        state = self.shared.room.wait_while(state, full).unwrap_or_else(PoisonError::into_inner);
        state.asleep -= 1;
        if self.shared.stopping() {
            return None;
        }
        state.reading += 1;
        Some(state.spare.pop().unwrap_or_default())
    }

    /// Has the source fill a buffer.
    fn read(&mut self, mut out: TokenBatch) -> Result<Filled> {
        let (shared, shape) = (&self.shared, &self.shared.shape);
        let tokens = shape.tokens();
        let reserved = out.tokens.try_reserve_exact(tokens.saturating_sub(out.tokens.len()));
        reserved
            .and_then(|()| out.targets.try_reserve_exact(tokens.saturating_sub(out.targets.len())))
            .map_err(|_| Error::NoMemory { bytes: tokens * TOKEN_BYTES })?;
        out.tokens.resize(tokens, 0);
        out.targets.resize(tokens, 0);
        let mut slots = Slots { context: shape.context, inputs: &mut out.tokens, targets: &mut out.targets };
        let Filling { position, digest } = self.source.fill(&mut slots, &|| shared.stopping())?;
        Ok(Filled {
            batch: TokenBatch { batch: shape.batch, context: shape.context, position, ..out },
            digest,
        })
    }
}

impl Drop for Reader {
    /// However the reader ends, nobody waits for its batches any longer: one that it did not fill is an error.
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.running -= 1;
        state.ready.entry(self.turn).or_insert_with(|| Err(self.shared.stopped()));
        drop(state);
        self.shared.filled.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::{TokenFile, Windows};

    fn sampler(folder: &Path) -> Sampler {
        let path = folder.join("t.bin");
        let bytes: Vec<u8> = (0..201u16).flat_map(u16::to_le_bytes).collect();
        fs::write(&path, bytes).unwrap();
        let file = TokenFile::open(&path).unwrap();
        Sampler::new(Windows::new(&file, 0..201, 4).unwrap(), 1)
    }

    /// The batches ahead once the reader rests, or has ended.
    fn ahead(batches: &Prefetcher) -> usize {
        let shared = &batches.shared;
        let mut state = shared.lock();
        // The last rest does not count: the reader looks again, and says so.
        state.resting = false;
        shared.room.notify_all();
        shared.wait_while(state, |state| !state.resting && state.running > 0).ready.len()
    }

    #[test]
    fn both_bounds_hold_and_one_batch_is_always_ahead() {
        let folder = tempfile::tempdir().unwrap();
        let sampler = sampler(folder.path());
        // A batch of 3 samples of 4 tokens takes 96 bytes.
        for (batches, bytes, expected) in
            [(4, usize::MAX, 4), (100, 2 * 96, 2), (100, 3 * 96 - 1, 2), (0, 1000, 1), (5, 0, 1), (1, 96, 1)]
        {
            let options = PrefetchOptions { batches, bytes };
            let mut prefetcher = Prefetcher::new(sampler.clone(), 3, 0, options).unwrap();
            for _ in 0..5 {
                assert_eq!(ahead(&prefetcher), expected, "{options:?}");
                prefetcher.next().unwrap();
            }
        }
    }

    #[test]
    fn buffers_go_round() {
        let folder = tempfile::tempdir().unwrap();
        let options = PrefetchOptions { batches: 2, ..Default::default() };
        let mut batches = Prefetcher::new(sampler(folder.path()), 3, 0, options).unwrap();
        let mut seen = std::collections::HashSet::new();
        for _ in 0..20 {
            let batch = batches.next().unwrap();
            seen.insert(batch.tokens.as_ptr() as usize);
            batches.recycle(batch);
        }
        // Two ahead and one in hand.
        assert!(seen.len() <= 3, "{}", seen.len());
        // More than can be used is dropped.
        ahead(&batches);
        for _ in 0..10 {
            batches.recycle(TokenBatch { tokens: vec![0; 12], targets: vec![0; 12], ..Default::default() });
        }
        batches.recycle(TokenBatch::default());
        assert_eq!(batches.shared.lock().spare.len(), 1);
    }

    #[test]
    fn a_reader_that_dies_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let mut batches = Prefetcher::new(sampler(folder.path()), 3, 0, PrefetchOptions::default()).unwrap();
        batches.shared.stop.store(true, Ordering::Relaxed);
        batches.shared.room.notify_all();
        let error = (0..100).find_map(|_| batches.next().err()).unwrap();
        assert!(matches!(error, Error::Stopped { .. }), "{error}");
    }
}
