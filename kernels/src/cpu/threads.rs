//! The CPU kernels' thread pool.

use rayon::prelude::*;

/// A fixed number of threads that run the pieces of one kernel.
///
/// Kernels cut their work into pieces whose bounds depend on the shape alone, never on the thread count, so results are
/// bitwise the same for any count.
pub(crate) struct Threads {
    pool: rayon::ThreadPool,
}

impl Threads {
    /// A pool of `count` threads, at least one.
    ///
    /// # Errors
    /// The system's, if threads cannot be started.
    pub(crate) fn new(count: usize) -> Result<Self, rayon::ThreadPoolBuildError> {
        let builder = rayon::ThreadPoolBuilder::new().num_threads(count.max(1));
        Ok(Threads { pool: builder.thread_name(|i| format!("ebbtide-cpu-{i}")).build()? })
    }

    /// Threads in the pool.
    pub(crate) fn count(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Runs `work` inside the pool, so that rayon's iterators use its threads.
    pub(crate) fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.pool.install(work)
    }

    /// Calls `work(i)` for each `i` below `pieces`: on the caller's thread if the whole is small (`total_bytes` under
    /// [`SERIAL_BYTES`]) or one thread is all there is, else across the pool.
    pub(crate) fn for_each(&self, pieces: usize, total_bytes: usize, work: impl Fn(usize) + Send + Sync) {
        if pieces <= 1 || self.count() == 1 || total_bytes < SERIAL_BYTES {
            (0..pieces).for_each(work);
        } else {
            self.pool.install(|| (0..pieces).into_par_iter().for_each(work));
        }
    }
}

/// Below it, waking the pool costs more than it saves.
pub(crate) const SERIAL_BYTES: usize = 64 << 10;
