//! The `cuda` backend: queues of the driver's, given work under the device's lock.
//!
//! The order layer numbers ops and says which must be done before one starts; here those waits become events. A transfer is marked
//! with an event at once; kernels are marked where another stream needs one, at the end of the queue as it then is. Launches need no
//! thread of their own: the driver's queues take them in order, and hold the host back when they are full.
//!
//! Device memory is one allocation, of which the arena hands out parts; so ranges are reused without asking the driver, and the
//! order layer's rule, which is by address, holds for what it handed out before.
//!
//! An index out of range is noted by the kernel that meets it, in memory that the host reads when it next waits; a file's thread notes
//! what it cannot read or write. Ops that were queued before then run, and are as wrong as their input, except those that change
//! what outlives a step: updates of weights and of the loss scale look at [`Stop`] first.

mod driver;
mod lane;
mod link;
mod modules;
mod pinned;
mod products;
mod stop;
mod times;

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicU32},
};

use driver::{Context, DeviceMemory, Failed, Pinned};
use lane::{EventPool, FileOp, FirstError, Lane, Word};
use modules::Modules;
use pinned::{Slabs, pieces};
use products::{Products, WORKSPACE_BYTES};
use stop::Stop;

pub(crate) use pinned::{PinOnUse, PinnedBlock};

use super::Job;
use crate::{
    CudaUnavailable, Error, HostSlice, Link, Op, Result, Slice, StreamReport,
    arena::ALIGNMENT,
    cuda::{Call, FAILURE_WORDS, Launch, SCRATCH_BYTES, Target, check, plan},
    error::bytes,
    memory::HostBlock,
    op::CustomOp,
    order::Stamp,
};

/// Bytes that the backend leaves to the driver where no budget is set, beside a sixteenth of what is free: its own allocations,
/// and streams' scratch.
const LEFT_BYTES: usize = 256 << 20;
/// A page of pinned memory: the failure that kernels note, then a word a stream for its files.
const CONTROL_BYTES: usize = 4096;
/// Where the streams' words begin in it.
const WORDS: usize = 64;
/// Streams that have a word.
const MOST_STREAMS: usize = (CONTROL_BYTES - WORDS) / 4;
/// Ops that can fail of which is remembered what they were; more than any queue of the driver's holds.
const MOST_FALLIBLE: usize = 1 << 16;

pub(crate) struct CudaBackend {
    state: Mutex<State>,
    errors: FirstError,
    stop: Arc<Stop>,
    control: Pinned,
    memory: DeviceMemory,
    /// Its bytes.
    budget: usize,
    slabs: Arc<Slabs>,
    link: Mutex<Option<Link>>,
    context: Arc<Context>,
}

struct State {
    lanes: Vec<Option<Lane>>,
    pool: EventPool,
    modules: Modules,
    products: Products,
    fallible: VecDeque<Fallible>,
    /// Number of the last op that can fail.
    submission: u32,
}

/// An op that fails where an index leaves its vocabulary.
struct Fallible {
    submission: u32,
    op: &'static str,
    index: &'static str,
    vocabulary: usize,
}

impl CudaBackend {
    /// Opens a device and takes its memory: the budget, or nearly all that is free. Also says how much that is.
    pub(crate) fn new(ordinal: usize, budget_bytes: Option<usize>) -> Result<(Self, usize)> {
        let unavailable = |reason| Error::Cuda { ordinal, reason };
        let starting = |failed: Failed| failed.doing(format!("starting CUDA device {ordinal}"));
        let context = Context::open(ordinal)?;
        if !products::is_present() {
            return Err(unavailable(CudaUnavailable::NoCublasLt));
        }
        let modules = Modules::load(&context).map_err(starting)?;
        let products = Products::new().map_err(starting)?;
        let free = context.free_bytes().map_err(starting)?;
        let fitting = free.saturating_sub(LEFT_BYTES + free / 16) / ALIGNMENT * ALIGNMENT;
        let bytes = budget_bytes.unwrap_or(fitting);
        let (name, total) = (context.name.clone(), context.total_bytes);
        let too_much = |_| unavailable(CudaUnavailable::Memory { name, wanted: bytes, free, total, fitting });
        let memory = DeviceMemory::new(&context, bytes).map_err(too_much)?;
        let control = Pinned::new(&context, CONTROL_BYTES).map_err(starting)?;
        let state = State {
            lanes: Vec::new(),
            pool: EventPool::default(),
            modules,
            products,
            fallible: VecDeque::new(),
            submission: 0,
        };
        let stop = Arc::new(Stop::new(&context).map_err(starting)?);
        let (state, errors, slabs) = (Mutex::new(state), FirstError::default(), Slabs::new(&context));
        Ok((
            CudaBackend {
                state,
                errors,
                stop,
                control,
                memory,
                budget: bytes,
                slabs,
                link: Mutex::default(),
                context,
            },
            bytes,
        ))
    }

    /// The link's rates, measured when first asked for.
    pub(crate) fn link(&self) -> Result<Link> {
        let doing = |failed: Failed| failed.doing("measuring the link to the device");
        let mut known = self.link.lock().unwrap_or_else(PoisonError::into_inner);
        match &*known {
            Some(link) => Ok(link.clone()),
            None => Ok(known.insert(link::probe(&self.context).map_err(doing)?).clone()),
        }
    }

    /// The card's name.
    pub(crate) fn name(&self) -> &str {
        &self.context.name
    }

    pub(crate) fn add_stream(&self) {
        let mut state = self.lock();
        let lane = match state.lanes.len() < MOST_STREAMS {
            true => Lane::new(&self.context).map_err(|failed| failed.doing("making a stream")),
            false => Err(Error::Start(format!("more than {MOST_STREAMS} streams"))),
        };
        let lane = lane.map_err(|error| self.errors.set(error)).ok();
        state.lanes.push(lane);
    }

    /// Whether there are kernels for an op.
    pub(crate) fn check(&self, op: &Op) -> Result<()> {
        check(op)
    }

    /// Pinned memory, zeroed.
    pub(crate) fn host_block(&self, bytes: usize) -> Result<HostBlock, String> {
        let block =
            self.slabs.block(bytes).map_err(|failed| format!("{} failed: {}", failed.call, failed.error))?;
        Ok(HostBlock::pinned(block, bytes))
    }

    /// What has address space of its own is pinned as it is used.
    pub(crate) fn pin_on_use(&self) -> PinOnUse {
        PinOnUse::new(&self.context)
    }

    /// Gives an op to its stream's queue. After an error ops are skipped, until the host has taken it.
    pub(crate) fn enqueue(&self, job: Job) {
        if self.errors.get().is_none()
            && let Err(error) = self.issue(&mut self.lock(), job)
        {
            self.errors.set(error);
        }
    }

    /// Waits on the host.
    pub(crate) fn wait(&self, stamps: &[Stamp]) -> Result<()> {
        if let Err(error) = self.points(stamps).and_then(|points| {
            points
                .iter()
                .try_for_each(|point| point.wait())
                .map_err(|failed| failed.doing("waiting for the device"))
        }) {
            self.errors.set(error);
        }
        self.note_failure();
        self.errors.get().map_or(Ok(()), Err)
    }

    /// What each stream's time went to, as far as it is over.
    pub(crate) fn fill_times(&self, reports: &mut [StreamReport]) {
        let names: Vec<String> = reports.iter().map(|report| report.name.clone()).collect();
        for (report, lane) in reports.iter_mut().zip(&mut self.lock().lanes) {
            // A device that does not answer says so where it is waited for.
            let totals = lane.as_mut().and_then(|lane| lane.totals().ok()).unwrap_or_default();
            report.busy_seconds = totals.busy;
            report.wait_seconds = totals.waited.values().sum();
            report.wait_seconds_on =
                totals.waited.into_iter().map(|(on, s)| (names[on].clone(), s)).collect();
        }
    }

    pub(crate) fn take_error(&self) -> Result<()> {
        let error = self.errors.take();
        if error.is_some() {
            // A device that does not answer says so again at the next call.
            let _ = self.stop.clear();
        }
        error.map_or(Ok(()), Err)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn points(&self, stamps: &[Stamp]) -> Result<Vec<lane::Point>> {
        let mut state = self.lock();
        let State { lanes, pool, .. } = &mut *state;
        let doing = |failed: Failed| failed.doing("waiting for the device");
        self.context.bind().map_err(doing)?;
        let mut points = Vec::new();
        for stamp in stamps.iter().filter(|stamp| stamp.number > 0) {
            if let Some(lane) = &mut lanes[stamp.stream] {
                lane.rest().map_err(doing)?;
                points.extend(lane.point(stamp.number, pool).map_err(doing)?);
            }
        }
        Ok(points)
    }

    fn issue(&self, state: &mut State, Job { stamp, op, waits }: Job) -> Result<()> {
        let name = op.name().to_string();
        let doing = |failed: Failed| failed.doing(&name);
        self.context.bind().map_err(doing)?;
        let mut points = Vec::new();
        for wait in waits {
            if let Some(lane) = &mut state.lanes[wait.stream] {
                let point = lane.point(wait.number, &mut state.pool).map_err(doing)?;
                points.extend(point.map(|point| (wait.stream, point)));
            }
        }
        let word = self.word(stamp.stream);
        let no_stream =
            || Error::OpFailed { op: name.clone(), message: "its stream could not be made".to_string() };
        let lane = state.lanes[stamp.stream].as_mut().ok_or_else(no_stream)?;
        let file_op = match op {
            Op::WriteFile { input, file } => FileOp::Write { input, file },
            Op::ReadFile { file, out } => FileOp::Read { file, out },
            op => {
                lane.follow_files().map_err(doing)?;
                points.iter().try_for_each(|(on, point)| lane.wait(*on, point)).map_err(doing)?;
                lane.begin().map_err(doing)?;
                self.queue(state, stamp, op)?;
                return Ok(());
            }
        };
        lane.transfer(stamp.number, points, file_op, (&mut state.pool, &self.errors, &self.stop, word))
    }

    /// What goes into the driver's queue.
    fn queue(&self, state: &mut State, stamp: Stamp, op: Op) -> Result<()> {
        let doing = |failed: Failed| failed.doing(op.name());
        match &op {
            Op::CopyOut { input, out } => {
                let from = self.memory.start + input.range().start as u64;
                self.transfer(state, stamp, out, |lane, host, at, bytes| {
                    // SAFETY: the op's waits are queued before, so by the order layer nobody else touches the host's bytes until
                    // it is done; they are kept until then. The slice lies inside the device's memory.
                    unsafe { lane.stream.copy_to_host(host, from + at as u64, bytes) }
                })
                .map_err(doing)
            }
            Op::CopyIn { input, out } => {
                let to = self.memory.start + out.range().start as u64;
                self.transfer(state, stamp, input, |lane, host, at, bytes| {
                    // SAFETY: as above.
                    unsafe { lane.stream.copy_to_device(to + at as u64, host, bytes) }
                })
                .map_err(doing)
            }
            Op::Custom { custom, inputs, outputs } => self.custom(state, stamp, &**custom, inputs, outputs),
            op => self.launch(state, stamp, op).map_err(doing),
        }
    }

    /// Copies the pieces of a host slice that lie in one pinned block each, and marks the end.
    fn transfer(
        &self,
        state: &mut State,
        stamp: Stamp,
        slice: &HostSlice,
        copy: impl Fn(&Lane, *mut u8, usize, usize) -> driver::Result<()>,
    ) -> driver::Result<()> {
        let State { lanes, pool, .. } = state;
        let lane = lanes[stamp.stream].as_mut().expect("looked up before");
        let (block, range) = slice.place();
        let start = block.start().as_ptr();
        match block.pinned_on_use() {
            Some(pin) => {
                // SAFETY: the block owns what pins it.
                unsafe { pin.pin(start, block.len(), range.clone()) }?;
                for piece in pieces(&range) {
                    copy(lane, start.wrapping_add(piece.start), piece.start - range.start, piece.len())?;
                }
            }
            None if range.is_empty() => {}
            None => copy(lane, start.wrapping_add(range.start), 0, range.len())?,
        }
        lane.reap(pool)?;
        lane.issued(stamp.number);
        lane.hold(stamp.number, slice.clone());
        lane.rest()?;
        lane.record(pool)?;
        Ok(())
    }

    fn launch(&self, state: &mut State, stamp: Stamp, op: &Op) -> driver::Result<()> {
        let submission = state.remember(op);
        let State { lanes, modules, products, .. } = state;
        let lane = lanes[stamp.stream].as_mut().expect("looked up before");
        let scratch = self.beside(&mut lane.scratch, SCRATCH_BYTES)?;
        let failure = self.control.start.as_ptr() as u64;
        let target =
            Target { base: self.memory.start, scratch, failure, stop: self.stop.address(), submission };
        for call in plan(op, &target) {
            // SAFETY: the op passed its check, so what the calls touch is its operands' memory, the stream's scratch and the
            // failure's record; its waits are queued before, so by the order layer nobody else uses those.
            unsafe {
                match call {
                    Call::Launch(launch) => run(modules, lane, &launch)?,
                    Call::Product(product, own) => {
                        let workspace = self.beside(&mut lane.workspace, WORKSPACE_BYTES)?;
                        if !products.run(&product, &lane.stream, workspace)? {
                            run(modules, lane, &own)?;
                        }
                    }
                    Call::Copy { from, to, bytes } => lane.stream.copy(to, from, bytes)?,
                    Call::Set { at, value, bytes } => lane.stream.set(at, value, bytes)?,
                }
            }
        }
        lane.issued(stamp.number);
        Ok(())
    }

    /// Memory beside the budget that a stream keeps once it has needed it.
    fn beside(&self, memory: &mut Option<DeviceMemory>, wanted: usize) -> driver::Result<u64> {
        if let Some(memory) = memory {
            return Ok(memory.start);
        }
        let made = DeviceMemory::new(&self.context, wanted).map_err(|failed| {
            let free = self.context.free_bytes().unwrap_or(0);
            let fitting = self.budget.saturating_sub(wanted.saturating_sub(free)) / ALIGNMENT * ALIGNMENT;
            let error = format!(
                "{}: {} wanted beside the budget of {}; the driver has {} free of {}, so a budget of {} would fit",
                failed.error,
                bytes(wanted),
                bytes(self.budget),
                bytes(free),
                bytes(self.context.total_bytes),
                bytes(fitting),
            );
            Failed { error, ..failed }
        })?;
        Ok(memory.insert(made).start)
    }

    /// Runs on the host: all it reads comes down first, all it wrote goes up again.
    fn custom(
        &self,
        state: &mut State,
        stamp: Stamp,
        custom: &dyn CustomOp,
        inputs: &[Slice],
        outputs: &[Slice],
    ) -> Result<()> {
        let doing = |failed: Failed| failed.doing(custom.name());
        let lane = state.lanes[stamp.stream].as_mut().expect("looked up before");
        let down = |slice: &Slice| {
            let block = self.slabs.block(slice.bytes())?;
            let from = self.memory.start + slice.range().start as u64;
            // SAFETY: a block that nobody else has; the queue has waited for the slice.
            unsafe { lane.stream.copy_to_host(block.start().as_ptr(), from, slice.bytes()) }?;
            Ok(HostBlock::pinned(block, slice.bytes()))
        };
        let read = inputs.iter().map(down).collect::<driver::Result<Vec<_>>>().map_err(doing)?;
        let written = outputs.iter().map(down).collect::<driver::Result<Vec<_>>>().map_err(doing)?;
        lane.stream.synchronize().map_err(doing)?;
        // SAFETY: the copies are done, and each block is this call's own.
        let inputs: Vec<&[u8]> = read.iter().map(|block| unsafe { block.bytes(0, block.len()) }).collect();
        catch_unwind(AssertUnwindSafe(|| {
            let mut outputs: Vec<&mut [u8]> =
                // SAFETY: as above.
                written.iter().map(|block| unsafe { block.bytes_mut(0, block.len()) }).collect();
            custom.run_cpu(&inputs, &mut outputs)
        }))
        .unwrap_or_else(|_| Err("its kernel panicked".to_string()))
        .map_err(|message| Error::OpFailed { op: custom.name().to_string(), message })?;
        for (block, slice) in written.iter().zip(outputs) {
            let to = self.memory.start + slice.range().start as u64;
            // SAFETY: as above; the block lives until the queue is empty.
            unsafe { lane.stream.copy_to_device(to, block.start().as_ptr(), slice.bytes()) }
                .map_err(doing)?;
        }
        lane.rest().map_err(doing)?;
        lane.stream.synchronize().map_err(doing)?;
        lane.issued(stamp.number);
        Ok(())
    }

    /// The word of a stream's files.
    fn word(&self, stream: usize) -> Word {
        let words = self.control.start.as_ptr().wrapping_add(WORDS).cast::<AtomicU32>();
        Word(words.wrapping_add(stream))
    }

    /// Turns what a kernel noted into an error.
    fn note_failure(&self) {
        let record = self.control.start.as_ptr().cast::<u32>();
        // SAFETY: the record lies in the page. A kernel may be writing it: the words are read one by one, and the first says that
        // one has; which it is shows when its stream is waited for.
        let [noted, submission, element, value] =
            [0, 1, 2, 3].map(|word| unsafe { record.add(word).read_volatile() });
        const { assert!(FAILURE_WORDS == 4) };
        if noted == 0 {
            return;
        }
        let state = self.lock();
        let known = state.fallible.iter().find(|fallible| fallible.submission == submission);
        let error = match known {
            Some(Fallible { op, index, vocabulary, .. }) => Error::OpFailed {
                op: op.to_string(),
                // A token is unsigned, a target signed.
                message: match *index {
                    "token" => format!(
                        "token {value} at index {element} is outside of the vocabulary of {vocabulary}"
                    ),
                    _ => format!(
                        "target {} at index {element} is outside of the vocabulary of {vocabulary}",
                        value as i32
                    ),
                },
            },
            None => Error::OpFailed {
                op: "an op".to_string(),
                message: format!("value {value} at index {element} is outside of its vocabulary"),
            },
        };
        self.errors.set(error);
        // SAFETY: as above; streams are waited for before the error is taken, so no kernel still means to note one.
        unsafe { record.write_bytes(0, FAILURE_WORDS) };
    }
}

impl State {
    /// A number for an op that can fail.
    fn remember(&mut self, op: &Op) -> u32 {
        let (name, index, vocabulary) = match op {
            Op::Embedding(op) => ("embedding", "token", op.vocabulary),
            Op::EmbeddingBackward(op) => ("embedding_backward", "token", op.vocabulary),
            Op::CrossEntropy(op) => ("cross_entropy", "target", op.vocabulary),
            _ => return self.submission,
        };
        self.submission = self.submission.wrapping_add(1);
        if self.fallible.len() == MOST_FALLIBLE {
            self.fallible.pop_front();
        }
        self.fallible.push_back(Fallible { submission: self.submission, op: name, index, vocabulary });
        self.submission
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        let _ = self.context.bind();
        self.lock().lanes.iter_mut().flatten().for_each(Lane::finish);
    }
}

/// # Safety
/// As for [`driver::Stream::launch`].
unsafe fn run(modules: &mut Modules, lane: &Lane, launch: &Launch) -> driver::Result<()> {
    let kernel = modules.kernel(launch)?;
    // SAFETY: the caller's contract.
    unsafe { lane.stream.launch(kernel, launch.grid, launch.block, &launch.argument) }
}
