//! One device: its streams, what is queued on them, and the order in which it runs.

use std::{
    collections::{BTreeMap, VecDeque},
    hash::{DefaultHasher, Hash, Hasher},
    ops::Range,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use ebbtide_ptx::{FaultKind, Launch, Memory, Module, Problem};

use crate::{
    Finding, FindingKind, Product,
    clock::{Clock, Stamp},
    memory::Addresses,
    shadow::{Access, Shadow},
};

/// What an unread copy's target holds until the copy runs.
const POISON: u8 = 0xcd;
/// Questions about one event in a row to which a lazy world says no.
const PATIENCE: u32 = 100;

/// When queued work runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// As soon as it can.
    Eager,
    /// When the host waits for it.
    #[default]
    Lazy,
    /// At times, and among streams, as the seed has it.
    Random(u64),
}

/// What a world says no with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// An argument makes no sense.
    InvalidValue,
    /// A handle that is not there.
    InvalidHandle,
    /// No memory of that size is left.
    OutOfMemory,
    /// The module has no such kernel.
    NotFound,
    /// The host's memory is pinned already.
    AlreadyRegistered,
    /// The host's memory is not pinned.
    NotRegistered,
    /// A kernel touched what it must not; nothing works after that.
    IllegalAddress,
}

/// A stream of a world.
pub type StreamId = usize;
/// An event of a world.
pub type EventId = usize;

/// How far a wait of the host's is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// At its end.
    Done,
    /// A stream waits for a word that the host has to write first.
    Blocked,
}

/// A point of a stream; it has a clock once it is passed.
#[derive(Clone, Debug)]
struct Point {
    stream: StreamId,
    passed: Arc<OnceLock<Clock>>,
}

/// What the host waits for.
#[derive(Clone, Debug)]
pub struct Waiting(Option<Point>);

#[derive(Debug, Default)]
struct Stream {
    queue: VecDeque<Queued>,
    /// Number of the last op queued.
    last: u64,
    /// What is known to be done where the queue stands.
    clock: Clock,
}

#[derive(Debug)]
struct Queued {
    number: u64,
    /// What the host knew to be done.
    host: Arc<Clock>,
    op: Arc<str>,
    work: Work,
}

#[derive(Debug)]
enum Work {
    Kernel {
        code: Arc<Module>,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: usize,
        arguments: Vec<Vec<u8>>,
    },
    Product(Product),
    /// The checksum is of the host's bytes when the copy was queued, where nothing else could still change them.
    Copy {
        from: u64,
        to: u64,
        bytes: usize,
        checksum: Option<u64>,
    },
    Set {
        at: u64,
        value: u8,
        bytes: usize,
    },
    Record(Arc<OnceLock<Clock>>),
    Wait(Point),
    WaitWord {
        word: u64,
        value: u32,
    },
}

impl Work {
    /// What it takes.
    fn nanos(&self) -> u64 {
        match self {
            Work::Kernel { .. } | Work::Product(_) => 1000,
            Work::Copy { bytes, .. } | Work::Set { bytes, .. } => 1000 + *bytes as u64,
            Work::Record(_) | Work::Wait(_) | Work::WaitWord { .. } => 0,
        }
    }
}

#[derive(Debug, Default)]
struct Event {
    timed: bool,
    recorded: Option<Point>,
    refusals: u32,
}

/// A device.
#[derive(Debug)]
pub struct World {
    order: Order,
    random: fastrand::Rng,
    memory: Addresses,
    shadow: Shadow,
    streams: BTreeMap<StreamId, Stream>,
    events: BTreeMap<EventId, Event>,
    modules: BTreeMap<usize, Arc<Module>>,
    handles: usize,
    host: Arc<Clock>,
    lost: bool,
    findings: Vec<Finding>,
    trace: DefaultHasher,
    launches: u64,
}

impl World {
    /// A device with so much memory.
    pub fn new(memory_bytes: usize, order: Order) -> Self {
        let seed = if let Order::Random(seed) = order { seed } else { 0 };
        World {
            order,
            random: fastrand::Rng::with_seed(seed),
            memory: Addresses::new(memory_bytes),
            shadow: Shadow::default(),
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
            modules: BTreeMap::new(),
            handles: 0,
            host: Arc::default(),
            lost: false,
            findings: Vec::new(),
            trace: DefaultHasher::new(),
            launches: 0,
        }
    }

    /// Broken rules so far.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// The same for the same calls and seed.
    pub fn trace(&self) -> u64 {
        self.trace.finish()
    }

    /// Kernels and products that were queued.
    pub fn launches(&self) -> u64 {
        self.launches
    }

    /// Bytes that can still be allocated.
    pub fn free_bytes(&self) -> usize {
        self.memory.free_bytes()
    }

    /// The device is gone: what is queued does not run.
    pub fn lose(&mut self) {
        self.lost = true;
    }

    /// Whether a kernel has broken the device, or it is gone.
    pub fn is_lost(&self) -> bool {
        self.lost
    }

    fn find(&mut self, kind: FindingKind, what: impl Into<String>) {
        self.findings.push(Finding::new(kind, what));
    }

    fn handle(&mut self) -> usize {
        self.handles += 1;
        self.handles
    }

    /// A call of the host's: in a seeded order some work runs now.
    pub fn breathe(&mut self) {
        if !matches!(self.order, Order::Random(_)) || self.lost {
            return;
        }
        for _ in 0..self.random.u32(0..4) {
            let ready: Vec<_> =
                self.streams.keys().copied().filter(|&stream| self.is_ready(stream)).collect();
            let Some(&stream) = self.random.choice(&ready) else { return };
            self.step(stream);
        }
    }

    /// Device memory, unwritten.
    ///
    /// # Errors
    /// None of that size is left.
    pub fn alloc(&mut self, bytes: usize) -> Result<u64, Refused> {
        self.memory.alloc(bytes)
    }

    /// Gives device memory back; what is queued is run before.
    ///
    /// # Errors
    /// There is none at the address.
    pub fn free(&mut self, start: u64) -> Result<(), Refused> {
        let Some(range) = self.memory.allocated(start) else {
            self.find(FindingKind::Stray, format!("device memory at {start:#x} is freed, but not allocated"));
            return Err(Refused::InvalidValue);
        };
        self.retire(&range, "device memory");
        self.memory.free(start);
        Ok(())
    }

    /// Pinned host memory, zeroed.
    ///
    /// # Errors
    /// None of that size is left.
    pub fn pin(&mut self, bytes: usize) -> Result<*mut u8, Refused> {
        self.memory.pin(bytes)
    }

    /// Pins memory of the host's.
    ///
    /// # Errors
    /// A part is pinned already.
    pub fn register(&mut self, start: u64, bytes: usize) -> Result<(), Refused> {
        self.memory.register(start, bytes)
    }

    /// Gives pinned memory back (`owned`), or unpins the host's.
    ///
    /// # Errors
    /// There is none at the address.
    pub fn unpin(&mut self, start: u64, owned: bool) -> Result<(), Refused> {
        let Some(range) = self.memory.pinned_at(start, owned) else {
            self.find(FindingKind::Stray, format!("memory at {start:#x} is unpinned, but not pinned"));
            return Err(if owned { Refused::InvalidValue } else { Refused::NotRegistered });
        };
        self.retire(&range, "pinned memory");
        self.memory.unpin(start);
        Ok(())
    }

    /// Memory that goes must not be in use.
    fn retire(&mut self, range: &Range<u64>, what: &str) {
        self.drain();
        if let Some(access) = self.shadow.uncovered(range, &self.host) {
            let (op, stream) = (access.op.clone(), access.stamp.stream);
            let what = format!(
                "{what} at {:#x} is freed; the host has not waited for {op} on stream {stream}",
                range.start
            );
            self.find(FindingKind::FreedInUse, what);
        }
        self.shadow.forget(range);
    }

    /// A stream.
    pub fn stream(&mut self) -> StreamId {
        let id = self.handle();
        self.streams.insert(id, Stream::default());
        id
    }

    /// Ends a stream, whose work is run before.
    ///
    /// # Errors
    /// There is no such stream.
    pub fn end_stream(&mut self, stream: StreamId) -> Result<(), Refused> {
        self.stream_mut(stream)?;
        self.drain();
        self.streams.remove(&stream);
        Ok(())
    }

    /// An event, which may say when it was.
    pub fn event(&mut self, timed: bool) -> EventId {
        let id = self.handle();
        self.events.insert(id, Event { timed, ..Event::default() });
        id
    }

    /// Ends an event; who waits for it still does.
    ///
    /// # Errors
    /// There is no such event.
    pub fn end_event(&mut self, event: EventId) -> Result<(), Refused> {
        self.event_mut(event)?;
        self.events.remove(&event);
        Ok(())
    }

    /// Kernels' code.
    pub fn module(&mut self, code: Arc<Module>) -> usize {
        let id = self.handle();
        self.modules.insert(id, code);
        id
    }

    /// The code of a module.
    ///
    /// # Errors
    /// There is no such module.
    pub fn code(&self, module: usize) -> Result<&Arc<Module>, Refused> {
        self.modules.get(&module).ok_or(Refused::InvalidHandle)
    }

    /// Unloads a module; what is queued is run before.
    ///
    /// # Errors
    /// There is no such module.
    pub fn unload(&mut self, module: usize) -> Result<(), Refused> {
        self.drain();
        self.modules.remove(&module).map(|_| ()).ok_or(Refused::InvalidHandle)
    }

    fn stream_mut(&mut self, stream: StreamId) -> Result<&mut Stream, Refused> {
        if !self.streams.contains_key(&stream) {
            self.find(FindingKind::Stray, format!("stream {stream} is used, but not there"));
        }
        self.streams.get_mut(&stream).ok_or(Refused::InvalidHandle)
    }

    fn event_mut(&mut self, event: EventId) -> Result<&mut Event, Refused> {
        if !self.events.contains_key(&event) {
            self.find(FindingKind::Stray, format!("event {event} is used, but not there"));
        }
        self.events.get_mut(&event).ok_or(Refused::InvalidHandle)
    }

    fn queue(&mut self, stream: StreamId, op: impl Into<Arc<str>>, work: Work) -> Result<(), Refused> {
        let (host, op) = (self.host.clone(), op.into());
        let stream = self.stream_mut(stream)?;
        stream.last += 1;
        stream.queue.push_back(Queued { number: stream.last, host, op, work });
        if self.order == Order::Eager {
            self.drain();
        }
        Ok(())
    }

    /// Queues a kernel of a module.
    ///
    /// # Errors
    /// There is no such module or stream.
    pub fn launch(
        &mut self,
        stream: StreamId,
        (module, kernel): (usize, &str),
        (grid, block): ([u32; 3], [u32; 3]),
        shared_bytes: usize,
        arguments: Vec<Vec<u8>>,
    ) -> Result<(), Refused> {
        let code = self.code(module)?.clone();
        self.launches += 1;
        self.queue(stream, kernel, Work::Kernel { code, grid, block, shared_bytes, arguments })
    }

    /// Queues a product.
    ///
    /// # Errors
    /// There is no such stream.
    pub fn product(&mut self, stream: StreamId, product: Product) -> Result<(), Refused> {
        self.launches += 1;
        self.queue(stream, "product", Work::Product(product))
    }

    /// Queues a copy.
    ///
    /// # Errors
    /// There is no such stream, or a copy inside the host's memory.
    pub fn copy(&mut self, stream: StreamId, to: u64, from: u64, bytes: usize) -> Result<(), Refused> {
        let range = |start| start..start + bytes as u64;
        let [to_device, from_device] = [to, from].map(|start| self.memory.is_device(start));
        let (name, host) = match (from_device, to_device) {
            (true, true) => ("copy", None),
            (true, false) => ("copy to host", Some(to)),
            (false, true) => ("copy to device", Some(from)),
            (false, false) => return Err(Refused::InvalidValue),
        };
        let mut checksum = None;
        if let Some(start) = host {
            if !self.memory.is_pinned(&range(start)) {
                let what = format!(
                    "{name} of {bytes} bytes at {start:#x}, which are not pinned, or not in one piece"
                );
                self.find(FindingKind::Unpinned, what);
                return Err(Refused::InvalidValue);
            }
            if self.is_settled(&range(start)) {
                checksum = (!from_device).then(|| checksum_of(start, bytes));
                if from_device && self.order != Order::Eager {
                    // SAFETY: pinned memory of that length, which until the copy has run nobody may read.
                    unsafe { (start as *mut u8).write_bytes(POISON, bytes) };
                }
            }
        }
        self.queue(stream, name, Work::Copy { from, to, bytes, checksum })
    }

    /// Whether nothing that is queued changes or reads bytes of the host's, nor any other thread of the host's may.
    fn is_settled(&self, range: &Range<u64>) -> bool {
        let mut queued = self.streams.values().flat_map(|stream| &stream.queue);
        queued.all(|queued| match queued.work {
            Work::WaitWord { .. } => false,
            Work::Copy { from, to, bytes, .. } => {
                [from, to].iter().all(|&start| start >= range.end || start + bytes as u64 <= range.start)
            }
            _ => true,
        })
    }

    /// Queues a fill.
    ///
    /// # Errors
    /// There is no such stream.
    pub fn set(&mut self, stream: StreamId, at: u64, value: u8, bytes: usize) -> Result<(), Refused> {
        self.queue(stream, "set", Work::Set { at, value, bytes })
    }

    /// Marks where a stream's queue ends.
    ///
    /// # Errors
    /// There is no such stream or event.
    pub fn record(&mut self, event: EventId, stream: StreamId) -> Result<(), Refused> {
        let passed = Arc::<OnceLock<Clock>>::default();
        let recorded = Some(Point { stream, passed: passed.clone() });
        let event = self.event_mut(event)?;
        *event = Event { recorded, refusals: 0, ..*event };
        self.queue(stream, "record", Work::Record(passed))
    }

    /// What the stream is given from now on runs after what the event has recorded.
    ///
    /// # Errors
    /// There is no such stream or event.
    pub fn wait_event(&mut self, stream: StreamId, event: EventId) -> Result<(), Refused> {
        match self.event_mut(event)?.recorded.clone() {
            Some(point) => self.queue(stream, "wait", Work::Wait(point)),
            None => Ok(()),
        }
    }

    /// What the stream is given from now on runs after a word of pinned memory has reached a value.
    ///
    /// # Errors
    /// There is no such stream.
    pub fn wait_word(&mut self, stream: StreamId, word: u64, value: u32) -> Result<(), Refused> {
        if !self.memory.is_pinned(&(word..word + 4)) {
            self.find(
                FindingKind::Unpinned,
                format!("a wait for the word at {word:#x}, which is not pinned"),
            );
            return Err(Refused::InvalidValue);
        }
        self.queue(stream, "wait for a word", Work::WaitWord { word, value })
    }

    /// Whether an event's record is passed; the host then knows it.
    ///
    /// # Errors
    /// There is no such event.
    pub fn query(&mut self, event: EventId) -> Result<bool, Refused> {
        let known = self.event_mut(event)?;
        let Some(point) = known.recorded.clone() else { return Ok(true) };
        known.refusals += 1;
        if known.refusals > PATIENCE {
            self.pursue(&point);
        }
        let Some(clock) = point.passed.get() else { return Ok(self.lost) };
        self.learn(clock);
        Ok(true)
    }

    /// Virtual nanoseconds between two events; `None` where one is not passed yet. Each stream has a clock of its own, which a wait
    /// sets to that of what was waited for: a kernel takes 1000, and so does a copy, and one more a byte.
    ///
    /// # Errors
    /// There is no such event, it does not say when it was, or was never recorded.
    pub fn elapsed(&mut self, start: EventId, end: EventId) -> Result<Option<i64>, Refused> {
        let mut at = [Some(0); 2];
        for (event, at) in [start, end].into_iter().zip(&mut at) {
            let event = self.event_mut(event)?;
            let point = event.recorded.as_ref().filter(|_| event.timed).ok_or(Refused::InvalidHandle)?;
            *at = point.passed.get().map(|clock| clock.nanos as i64);
        }
        Ok(at[0].zip(at[1]).map(|(start, end)| end - start))
    }

    /// A wait for an event.
    ///
    /// # Errors
    /// There is no such event.
    pub fn waiting_for_event(&mut self, event: EventId) -> Result<Waiting, Refused> {
        Ok(Waiting(self.event_mut(event)?.recorded.clone()))
    }

    /// A wait for all that a stream has.
    ///
    /// # Errors
    /// There is no such stream.
    pub fn waiting_for_stream(&mut self, stream: StreamId) -> Result<Waiting, Refused> {
        let passed = Arc::<OnceLock<Clock>>::default();
        self.queue(stream, "record", Work::Record(passed.clone()))?;
        Ok(Waiting(Some(Point { stream, passed })))
    }

    /// Runs what a wait needs.
    ///
    /// # Errors
    /// The device is lost.
    pub fn wait(&mut self, waiting: &Waiting) -> Result<Progress, Refused> {
        let Some(point) = &waiting.0 else { return Ok(Progress::Done) };
        while matches!(self.order, Order::Random(_)) && point.passed.get().is_none() && !self.lost {
            let ready: Vec<_> =
                self.streams.keys().copied().filter(|&stream| self.is_ready(stream)).collect();
            let Some(&stream) = self.random.choice(&ready) else { return Ok(Progress::Blocked) };
            self.step(stream);
        }
        self.pursue(point);
        if self.lost {
            return Err(Refused::IllegalAddress);
        }
        match point.passed.get() {
            Some(clock) => {
                self.learn(clock);
                Ok(Progress::Done)
            }
            None => Ok(Progress::Blocked),
        }
    }

    fn learn(&mut self, clock: &Clock) {
        if !self.host.covers_all(clock) {
            Arc::make_mut(&mut self.host).join(clock);
        }
    }

    /// A wait that did not end.
    pub fn give_up(&mut self) {
        let blocked: Vec<_> = self
            .streams
            .iter()
            .filter_map(|(id, stream)| Some(format!("stream {id} at {}", stream.queue.front()?.op)))
            .collect();
        self.find(FindingKind::Deadlock, format!("the host waits for ever: {}", blocked.join(", ")));
        self.lost = true;
    }

    /// What is still there; the device is closed.
    pub fn close(&mut self) {
        self.drain();
        let mut left = self.memory.left();
        left.extend(self.streams.keys().map(|id| format!("stream {id}")));
        left.extend(self.events.keys().map(|id| format!("event {id}")));
        left.extend(self.modules.keys().map(|id| format!("module {id}")));
        if !left.is_empty() && !self.lost {
            self.find(FindingKind::Leak, format!("the device was closed with {}", left.join(", ")));
        }
    }

    /// Runs a stream up to a point, and of the others what that waits for.
    fn pursue(&mut self, point: &Point) {
        let mut path = vec![point.clone()];
        while let Some(point) = path.last().cloned() {
            if self.lost || point.passed.get().is_some() {
                path.pop();
                continue;
            }
            let front = self.streams.get(&point.stream).and_then(|stream| stream.queue.front());
            match front.map(|queued| &queued.work) {
                Some(Work::Wait(other)) if other.passed.get().is_none() => path.push(other.clone()),
                Some(_) if self.is_ready(point.stream) => self.step(point.stream),
                _ => return,
            }
        }
    }

    /// Runs all that can run.
    fn drain(&mut self) {
        while let Some(stream) = self.streams.keys().copied().find(|&stream| self.is_ready(stream)) {
            self.step(stream);
        }
    }

    fn is_ready(&self, stream: StreamId) -> bool {
        let front = self.streams.get(&stream).and_then(|stream| stream.queue.front());
        !self.lost
            && front.is_some_and(|queued| match &queued.work {
                Work::Wait(point) => point.passed.get().is_some(),
                Work::WaitWord { word, value } => {
                    // SAFETY: a word of pinned memory, which the host only writes as an atomic.
                    let found = unsafe { &*(*word as *const AtomicU32) }.load(Ordering::Acquire);
                    found.wrapping_sub(*value) as i32 >= 0
                }
                _ => true,
            })
    }

    /// Runs the first op of a stream, which is ready.
    fn step(&mut self, id: StreamId) {
        let stream = self.streams.get_mut(&id).expect("a stream that is there");
        let Queued { number, host, op, work } = stream.queue.pop_front().expect("an op that is ready");
        let stamp = Stamp { stream: id, number };
        stream.clock.join(&host);
        match &work {
            Work::Wait(point) => stream.clock.join(point.passed.get().expect("an op that is ready")),
            Work::WaitWord { .. } => stream.clock.join(&self.host),
            _ => {}
        }
        stream.clock.add(stamp);
        stream.clock.nanos += work.nanos();
        let clock = stream.clock.clone();
        if let Work::Record(passed) = &work {
            passed.set(clock.clone()).expect("recorded once");
        }
        (id, number, &*op).hash(&mut self.trace);
        match self.run(&op, &work) {
            Ok((reads, writes)) => {
                let access = Access { stamp, op };
                reads.iter().for_each(|range| self.access(range, false, &access, &clock));
                writes.iter().for_each(|range| self.access(range, true, &access, &clock));
            }
            Err(finding) => {
                self.findings
                    .push(Finding { what: format!("{op} on stream {id}: {}", finding.what), ..finding });
                self.lost = true;
            }
        }
    }

    fn access(&mut self, range: &Range<u64>, writes: bool, access: &Access, clock: &Clock) {
        (range.start, range.end, writes).hash(&mut self.trace);
        if let Some((earlier, bytes)) = self.shadow.access(range, writes, access, clock) {
            let what = format!(
                "{} on stream {} {} {} bytes at {:#x} that {} on stream {} uses, and waits for it in no way",
                access.op,
                access.stamp.stream,
                if writes { "writes" } else { "reads" },
                bytes.end - bytes.start,
                bytes.start,
                earlier.op,
                earlier.stamp.stream,
            );
            self.find(FindingKind::Race, what);
        }
    }

    /// Runs an op; what it read and what it wrote.
    fn run(&mut self, op: &str, work: &Work) -> Result<Touched, Finding> {
        match work {
            Work::Kernel { code, grid, block, shared_bytes, arguments } => {
                let arguments: Vec<_> = arguments.iter().map(Vec::as_slice).collect();
                let seed = if let Order::Random(_) = self.order { self.random.u64(1..) } else { 0 };
                let launch = Launch {
                    grid: *grid,
                    block: *block,
                    shared_bytes: *shared_bytes,
                    arguments: &arguments,
                    seed,
                    ..Launch::new(op)
                };
                let report = code
                    .launch(&launch, &mut self.memory)
                    .map_err(|error| Finding::new(FindingKind::Kernel, error.to_string()))?;
                // Kernels meet in pinned memory by atomics alone.
                let of_device = |ranges: Vec<Range<u64>>| {
                    ranges.into_iter().filter(|range| self.memory.is_device(range.start)).collect()
                };
                Ok((of_device(report.reads), of_device(report.writes)))
            }
            Work::Product(product) => {
                let ranges = product.ranges();
                product.run(&mut self.memory).map_err(|problem| of_memory(&problem))?;
                Ok(ranges)
            }
            &Work::Copy { from, to, bytes, checksum } => {
                if let Some(before) = checksum
                    && before != checksum_of(from, bytes)
                {
                    let what = format!(
                        "the host changed some of {bytes} bytes at {from:#x} before they were copied to the device"
                    );
                    self.find(FindingKind::HostWrote, what);
                }
                let mut copied = vec![0; bytes];
                let doing = |problem| of_memory(&problem);
                self.memory.read(from, &mut copied).map_err(doing)?;
                self.memory.write(to, &copied).map_err(doing)?;
                Ok((one(from, bytes), one(to, bytes)))
            }
            &Work::Set { at, value, bytes } => {
                self.memory.write(at, &vec![value; bytes]).map_err(|problem| of_memory(&problem))?;
                Ok((Vec::new(), one(at, bytes)))
            }
            Work::Record(_) | Work::Wait(_) | Work::WaitWord { .. } => Ok(Touched::default()),
        }
    }
}

/// Ranges that were read, and ranges that were written.
type Touched = (Vec<Range<u64>>, Vec<Range<u64>>);

fn one(start: u64, bytes: usize) -> Vec<Range<u64>> {
    std::iter::once(start..start + bytes as u64).collect()
}

fn of_memory(problem: &Problem) -> Finding {
    let kind = match problem.kind() {
        FaultKind::Uninitialised => FindingKind::Uninitialised,
        _ => FindingKind::OutOfBounds,
    };
    Finding::new(kind, problem.to_string())
}

/// Of the host's bytes.
fn checksum_of(start: u64, bytes: usize) -> u64 {
    let mut hasher = DefaultHasher::new();
    // SAFETY: pinned memory of that length; that nobody writes it is what the checksum is to show, and where somebody does, any
    // value shows it.
    hasher.write(unsafe { std::slice::from_raw_parts(start as *const u8, bytes) });
    hasher.finish()
}
