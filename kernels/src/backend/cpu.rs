//! The `cpu` backend: a worker thread a stream, kernels on a shared pool.
//!
//! A worker takes its stream's jobs in order, waits until the jobs' waits are done, runs the kernel, and says so. After
//! an error jobs are skipped, though still counted as done, until the host has taken the error: so nobody hangs, and
//! nothing is computed from garbage.

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use super::Job;
use crate::{
    Error, Result, StreamReport,
    cpu::{execute::execute, threads::Threads},
    memory::Memory,
    order::Stamp,
};

/// Jobs that may be queued on a stream; the host waits beyond that.
const QUEUE_JOBS: u64 = 4096;

pub(crate) struct CpuBackend {
    memory: Arc<Memory>,
    threads: Arc<Threads>,
    progress: Arc<Progress>,
    streams: Mutex<Vec<Worker>>,
}

struct Worker {
    /// `None` once the backend shuts down.
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Progress {
    state: Mutex<ProgressState>,
    changed: Condvar,
}

#[derive(Default)]
struct ProgressState {
    /// For each stream, the number of its last job.
    queued: Vec<u64>,
    /// For each stream, the number of its last job that is done.
    done: Vec<u64>,
    busy: Vec<Duration>,
    /// For each stream, by the stream waited for.
    waiting: Vec<BTreeMap<usize, Duration>>,
    error: Option<Error>,
}

impl CpuBackend {
    pub(crate) fn new(memory: Arc<Memory>, threads: Option<usize>) -> Result<Self> {
        let count =
            threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get));
        let threads =
            Threads::new(count).map_err(|error| Error::Start(format!("{count} threads: {error}")))?;
        Ok(CpuBackend {
            memory,
            threads: Arc::new(threads),
            progress: Arc::default(),
            streams: Mutex::default(),
        })
    }

    pub(crate) fn add_stream(&self, name: &str) {
        let (sender, receiver) = channel();
        let (memory, threads, progress) = (self.memory.clone(), self.threads.clone(), self.progress.clone());
        progress.lock().add_stream();
        let work = move || run(&receiver, &memory, &threads, &progress);
        let thread = std::thread::Builder::new()
            .name(format!("ebbtide-{name}"))
            .spawn(work)
            .map_err(|error| self.progress.lock().fail(Error::Start(format!("stream `{name}`: {error}"))))
            .ok();
        self.workers().push(Worker { jobs: Some(sender), thread });
    }

    /// Waits until the stream has room for another job. Not done while queueing, which happens under the device's lock:
    /// a job's drop may need that lock.
    pub(crate) fn throttle(&self, stream: usize) {
        let has_room = |state: &ProgressState| state.queued[stream] - state.done[stream] < QUEUE_JOBS;
        let state = self.progress.lock();
        drop(self.progress.changed.wait_while(state, |state| !has_room(state)));
    }

    pub(crate) fn enqueue(&self, job: Job) {
        self.progress.lock().queued[job.stamp.stream] = job.stamp.number;
        let jobs = self.workers()[job.stamp.stream].jobs.clone();
        let (stamp, name) = (job.stamp, job.op.name().to_string());
        if jobs.is_none_or(|jobs| jobs.send(job).is_err()) {
            let mut state = self.progress.lock();
            state.fail(Error::OpFailed { op: name, message: "its stream's thread is gone".to_string() });
            state.done[stamp.stream] = stamp.number;
            drop(state);
            self.progress.changed.notify_all();
        }
    }

    pub(crate) fn wait(&self, stamps: &[Stamp]) -> Result<()> {
        match &self.progress.wait(self.progress.lock(), stamps).error {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    pub(crate) fn take_error(&self) -> Result<()> {
        match self.progress.lock().error.take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    pub(crate) fn fill_times(&self, reports: &mut [StreamReport]) {
        let names: Vec<String> = reports.iter().map(|report| report.name.clone()).collect();
        let state = self.progress.lock();
        for (report, (busy, waiting)) in reports.iter_mut().zip(state.busy.iter().zip(&state.waiting)) {
            report.busy_seconds = busy.as_secs_f64();
            report.wait_seconds = waiting.values().sum::<Duration>().as_secs_f64();
            report.wait_seconds_on =
                waiting.iter().map(|(&on, time)| (names[on].clone(), time.as_secs_f64())).collect();
        }
    }

    fn workers(&self) -> MutexGuard<'_, Vec<Worker>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for CpuBackend {
    fn drop(&mut self) {
        let mut workers = self.workers();
        // All queues are closed before the first thread is joined: a worker may be waiting for another's job.
        workers.iter_mut().for_each(|worker| worker.jobs = None);
        for thread in workers.iter_mut().filter_map(|worker| worker.thread.take()) {
            let _ = thread.join();
        }
    }
}

impl Progress {
    fn lock(&self) -> MutexGuard<'_, ProgressState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(
        &'a self,
        state: MutexGuard<'a, ProgressState>,
        stamps: &[Stamp],
    ) -> MutexGuard<'a, ProgressState> {
        self.changed
            .wait_while(state, |state| !stamps.iter().all(|stamp| state.done[stamp.stream] >= stamp.number))
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl ProgressState {
    fn add_stream(&mut self) {
        self.queued.push(0);
        self.done.push(0);
        self.busy.push(Duration::ZERO);
        self.waiting.push(BTreeMap::new());
    }

    /// Keeps the first error: the others follow from it.
    fn fail(&mut self, error: Error) {
        self.error.get_or_insert(error);
    }
}

fn run(jobs: &Receiver<Job>, memory: &Memory, threads: &Threads, progress: &Progress) {
    while let Ok(Job { stamp, op, waits }) = jobs.recv() {
        let mut waited = Vec::new();
        let failed = {
            let mut state = progress.lock();
            // One after the other, so that each wait is put down to the stream that was waited for.
            for wait in waits {
                let start = Instant::now();
                state = progress.wait(state, &[wait]);
                waited.push((wait.stream, start.elapsed()));
            }
            state.error.is_some()
        };
        let start = Instant::now();
        let result = if failed {
            Ok(())
        } else {
            // SAFETY: the op passed `Op::check`; it is the head of its stream and its waits are over, so by the order
            // layer nobody else touches what it writes, nor writes what it reads.
            catch_unwind(AssertUnwindSafe(|| unsafe { execute(&op, memory, threads) }))
                .unwrap_or_else(|_| Err("its kernel panicked".to_string()))
        };
        let busy = start.elapsed();
        let mut state = progress.lock();
        if let Err(message) = result {
            state.fail(Error::OpFailed { op: op.name().to_string(), message });
        }
        state.done[stamp.stream] = stamp.number;
        state.busy[stamp.stream] += busy;
        for (on, time) in waited {
            *state.waiting[stamp.stream].entry(on).or_default() += time;
        }
        drop(state);
        progress.changed.notify_all();
    }
}
