//! A stream's queue on the device, the points of it that others can wait for, and its file transfers.
//!
//! Copies and kernels go into a queue of the driver's; a file is read and written by a thread of the stream's own. The two halves
//! follow one another through events, on which the thread waits, and a word of pinned memory, which counts the thread's work and
//! on which the driver's queue waits.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
    time::Instant,
};

use super::{
    driver::{Context, DeviceMemory, Event, Result, Stream},
    stop::Stop,
    times::{Times, Totals},
};
use crate::{Error, FileSlice, HostSlice};

/// The first error since it was last taken; the others follow from it.
#[derive(Clone, Default)]
pub(super) struct FirstError(Arc<Mutex<Option<Error>>>);

impl FirstError {
    fn lock(&self) -> MutexGuard<'_, Option<Error>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set(&self, error: Error) {
        self.lock().get_or_insert(error);
    }

    pub(super) fn get(&self) -> Option<Error> {
        self.lock().clone()
    }

    pub(super) fn take(&self) -> Option<Error> {
        self.lock().take()
    }
}

/// Events that nobody waits for any more.
#[derive(Default)]
pub(super) struct EventPool(Vec<Event>);

impl EventPool {
    fn take(&mut self, context: &Arc<Context>) -> Result<Event> {
        self.0.pop().map_or_else(|| Event::new(context, false), Ok)
    }

    /// An event that a host thread still holds dies with it.
    fn put(&mut self, event: Arc<Event>) {
        self.0.extend(Arc::into_inner(event));
    }
}

/// A stream, as the backend has it.
pub(super) struct Lane {
    context: Arc<Context>,
    pub(super) stream: Stream,
    /// What kernels and cuBLASLt use beside their operands, once one has run.
    pub(super) scratch: Option<DeviceMemory>,
    pub(super) workspace: Option<DeviceMemory>,
    /// Number of the last op that the driver's queue was given.
    issued: u64,
    /// Number of an op that is known to be done, with all before it.
    done: u64,
    /// Points of the queue, after the ops of these numbers.
    recorded: VecDeque<(u64, Arc<Event>)>,
    /// Host memory of queued copies, by number.
    held: VecDeque<(u64, HostSlice)>,
    times: Times,
    files: Option<Files>,
}

/// The file transfers of a stream.
struct Files {
    jobs: Option<Sender<FileJob>>,
    thread: Option<JoinHandle<()>>,
    progress: Arc<Progress>,
    /// Numbers of transfers that may not be done yet.
    pending: BTreeSet<u64>,
    last: u64,
    /// The last that the driver's queue waits for.
    waited: u64,
}

/// How far the thread is.
pub(super) struct Progress {
    done: Mutex<u64>,
    changed: Condvar,
    word: Word,
    times: Mutex<Totals>,
}

/// The low half of the number of the last transfer that is done, in pinned memory that outlives the thread and the queue.
#[derive(Clone, Copy)]
pub(super) struct Word(pub(super) *const AtomicU32);

// SAFETY: an atomic in memory that lives as long as the backend.
unsafe impl Send for Word {}
// SAFETY: as above.
unsafe impl Sync for Word {}

impl Progress {
    fn done(&self) -> u64 {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn times(&self) -> MutexGuard<'_, Totals> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn finish(&self, number: u64) {
        *self.lock() = number;
        // SAFETY: the word is there, see `Word`.
        unsafe { &*self.word.0 }.store(number as u32, Ordering::Release);
        self.changed.notify_all();
    }

    fn wait(&self, number: u64) {
        let waited = self.changed.wait_while(self.lock(), |done| *done < number);
        drop(waited);
    }
}

/// What a host thread waits for.
#[derive(Clone)]
pub(super) enum Point {
    Event(Arc<Event>),
    File(Arc<Progress>, u64),
}

impl Point {
    pub(super) fn wait(&self) -> Result<()> {
        match self {
            Point::Event(event) => event.synchronize(),
            Point::File(progress, number) => {
                progress.wait(*number);
                Ok(())
            }
        }
    }
}

/// A transfer between host memory and a file.
pub(super) enum FileOp {
    Write { input: HostSlice, file: FileSlice },
    Read { file: FileSlice, out: HostSlice },
}

struct FileJob {
    number: u64,
    /// With the numbers of their streams, this one not named.
    after: Vec<(Option<usize>, Point)>,
    op: FileOp,
}

impl Lane {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        Ok(Lane {
            context: context.clone(),
            stream: Stream::new(context)?,
            scratch: None,
            workspace: None,
            issued: 0,
            done: 0,
            recorded: VecDeque::new(),
            held: VecDeque::new(),
            times: Times::new(context),
            files: None,
        })
    }

    /// What comes next is in the driver's queue, after this stream's files.
    pub(super) fn follow_files(&mut self) -> Result<()> {
        if let Some(files) = self.files.as_mut().filter(|files| files.waited < files.last) {
            if files.progress.done() < files.last {
                self.times.before_wait(&self.stream)?;
                // SAFETY: the word lives as long as the backend, which waits for its streams at its end.
                unsafe { self.stream.wait_value(files.progress.word.0.cast(), files.last as u32) }?;
                // The thread times them itself.
                self.times.after_wait(&self.stream, None)?;
            }
            files.waited = files.last;
        }
        Ok(())
    }

    /// The driver's queue is about to be given an op.
    pub(super) fn begin(&mut self) -> Result<()> {
        self.times.begin(&self.stream)
    }

    /// The queue has nothing more to do for now, as far as its times go.
    pub(super) fn rest(&mut self) -> Result<()> {
        self.times.end(&self.stream)
    }

    /// What its time went to.
    pub(super) fn totals(&mut self) -> Result<Totals> {
        let mut totals = self.times.settle()?.clone();
        if let Some(files) = &self.files {
            let Totals { busy, waited } = &*files.progress.times();
            totals.busy += busy;
            waited.iter().for_each(|(&on, seconds)| *totals.waited.entry(on).or_default() += seconds);
        }
        Ok(totals)
    }

    /// An op was given to the driver's queue.
    pub(super) fn issued(&mut self, number: u64) {
        self.issued = number;
    }

    /// Keeps host memory until the op is done.
    pub(super) fn hold(&mut self, number: u64, slice: HostSlice) {
        self.held.push_back((number, slice));
    }

    /// Marks the end of the queue.
    pub(super) fn record(&mut self, pool: &mut EventPool) -> Result<Arc<Event>> {
        let event = pool.take(&self.context)?;
        event.record(&self.stream)?;
        let event = Arc::new(event);
        self.recorded.push_back((self.issued, event.clone()));
        Ok(event)
    }

    /// Where an op is done; `None` if it is known to be already.
    pub(super) fn point(&mut self, number: u64, pool: &mut EventPool) -> Result<Option<Point>> {
        if let Some(files) = self.files.as_mut().filter(|files| files.pending.contains(&number)) {
            let done = files.progress.done() >= number;
            return Ok((!done).then(|| Point::File(files.progress.clone(), number)));
        }
        // An op that was skipped after an error is as good as done.
        let number = number.min(self.issued);
        self.reap(pool)?;
        if number <= self.done {
            return Ok(None);
        }
        // Transfers are marked one by one, so that who needs one need not wait for those after it.
        let marked = self.recorded.iter().find(|(at, _)| *at >= number).map(|(_, event)| event.clone());
        let event = marked.map_or_else(|| self.record(pool), Ok)?;
        Ok(Some(Point::Event(event)))
    }

    /// What is queued from now on comes after a point of the stream `on`.
    pub(super) fn wait(&mut self, on: usize, point: &Point) -> Result<()> {
        self.times.before_wait(&self.stream)?;
        match point {
            Point::Event(event) => self.stream.wait(event),
            // SAFETY: as in `follow_files`.
            Point::File(progress, number) => unsafe {
                self.stream.wait_value(progress.word.0.cast(), *number as u32)
            },
        }?;
        self.times.after_wait(&self.stream, Some(on))
    }

    /// Hands a file transfer to the stream's thread, which is started by the first.
    pub(super) fn transfer(
        &mut self,
        number: u64,
        after: Vec<(usize, Point)>,
        op: FileOp,
        (pool, errors, stop, word): (&mut EventPool, &FirstError, &Arc<Stop>, Word),
    ) -> Result<(), Error> {
        let own = self.point(self.issued, pool).map_err(|failed| failed.doing("a file transfer"))?;
        let after = after.into_iter().map(|(on, point)| (Some(on), point));
        let after = own.into_iter().map(|point| (None, point)).chain(after).collect();
        let files = match &mut self.files {
            Some(files) => files,
            None => self.files.insert(Files::start(errors.clone(), stop.clone(), word)?),
        };
        let done = files.progress.done();
        files.pending = files.pending.split_off(&(done + 1));
        files.pending.insert(number);
        files.last = number;
        let gone = || Error::Start("the thread of a stream's files is gone".to_string());
        files.jobs.as_ref().ok_or_else(gone)?.send(FileJob { number, after, op }).map_err(|_| gone())
    }

    /// Forgets what is done.
    pub(super) fn reap(&mut self, pool: &mut EventPool) -> Result<()> {
        while let Some((number, event)) = self.recorded.front()
            && event.is_done()?
        {
            self.done = *number;
            let (_, event) = self.recorded.pop_front().expect("there is a front");
            pool.put(event);
        }
        while self.held.front().is_some_and(|(number, _)| *number <= self.done) {
            self.held.pop_front();
        }
        Ok(())
    }

    /// Waits for the thread, and then for the driver's queue.
    pub(super) fn finish(&mut self) {
        if let Some(files) = &mut self.files {
            files.jobs = None;
            let _ = files.thread.take().map(JoinHandle::join);
        }
        let _ = self.stream.synchronize();
    }
}

impl Files {
    fn start(errors: FirstError, stop: Arc<Stop>, word: Word) -> Result<Self, Error> {
        let (sender, receiver) = channel();
        let progress = Arc::new(Progress {
            done: Mutex::new(0),
            changed: Condvar::new(),
            word,
            times: Mutex::default(),
        });
        let of_thread = progress.clone();
        let thread = std::thread::Builder::new()
            .name("ebbtide-files".to_string())
            .spawn(move || run(&receiver, &of_thread, &errors, &stop))
            .map_err(|cause| Error::Start(format!("a thread for a stream's files: {cause}")))?;
        let (jobs, thread) = (Some(sender), Some(thread));
        Ok(Files { jobs, thread, progress, pending: BTreeSet::new(), last: 0, waited: 0 })
    }
}

fn run(jobs: &Receiver<FileJob>, progress: &Progress, errors: &FirstError, stop: &Stop) {
    while let Ok(FileJob { number, after, op }) = jobs.recv() {
        for (on, point) in after {
            let start = Instant::now();
            if let Err(failed) = point.wait() {
                errors.set(failed.doing("waiting to transfer a file"));
                break;
            }
            if on.is_some() {
                progress.times().add(on, start.elapsed());
            }
        }
        let start = Instant::now();
        if errors.get().is_none()
            && let Err(message) = op.run()
        {
            errors.set(Error::OpFailed { op: op.name().to_string(), message });
            // Before what waits for this goes on. A device that does not answer runs nothing that would.
            let _ = stop.raise();
        }
        progress.times().add(None, start.elapsed());
        progress.finish(number);
    }
}

impl FileOp {
    fn name(&self) -> &'static str {
        match self {
            FileOp::Write { .. } => "write_file",
            FileOp::Read { .. } => "read_file",
        }
    }

    fn run(&self) -> Result<(), String> {
        match self {
            // SAFETY: the op's waits are over, so by the order layer nobody writes what it reads.
            FileOp::Write { input, file } => file.write(unsafe { input.op_bytes() }),
            // SAFETY: as above, and nobody else touches what it writes.
            FileOp::Read { file, out } => file.read(unsafe { out.op_bytes_mut() }),
        }
    }
}
