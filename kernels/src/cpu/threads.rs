//! The CPU kernels' thread pool.

use std::marker::PhantomData;

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

/// A mutable slice that the pieces of one kernel write at once, each its own part.
///
/// The slice stays borrowed as long as this lives, so nothing else reads or writes it; that the parts are disjoint is
/// what the unsafe methods leave to their caller.
pub(crate) struct Parts<'a, T> {
    start: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: it is a mutable borrow that several threads use, on disjoint parts by the contract of its methods; the
// elements move between threads, hence `T: Send`.
unsafe impl<T: Send> Sync for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Parts { start: slice.as_mut_ptr(), len: slice.len(), borrow: PhantomData }
    }

    /// Elements in all.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// `len` elements from `first`.
    ///
    /// # Safety
    /// While the result lives nothing else touches these elements.
    #[expect(clippy::mut_from_ref, reason = "disjoint parts of one mutable borrow")]
    pub(crate) unsafe fn slice(&self, first: usize, len: usize) -> &mut [T] {
        assert!(first <= self.len && len <= self.len - first, "a part outside its slice");
        // SAFETY: within the slice that is borrowed for `'a`, as asserted; alone there by contract.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(first), len) }
    }

    /// Where element `first` lies, for code that writes strided parts.
    pub(crate) fn at(&self, first: usize) -> *mut T {
        assert!(first < self.len, "a part outside its slice");
        // SAFETY: within the slice, as asserted.
        unsafe { self.start.add(first) }
    }
}
