//! The `sim` backend: the CPU's kernels under a seeded scheduler, with a checker that trusts nobody.
//!
//! Ops queue up and run only when the host waits; then a seeded choice among the streams' heads whose recorded waits are
//! done decides who runs next. One seed is one schedule, replayed exactly.
//!
//! Beside it, and independent of the order layer's own reasoning, every op gets a vector clock from what really holds
//! it: its stream's order, its recorded waits, and what the host had waited for when it submitted it. Each access is held
//! against every earlier access to the same bytes; two of which one writes and neither's clock covers the other are
//! reported, whatever the schedule. So a missing wait is found even where the schedule happened to do no harm.
//!
//! Bytes of a fresh allocation are unwritten: to read them is reported, and what an op is about to write for the first
//! time is filled with 0xFF (NaN as f32, f16 and bf16) just before it runs, so that a kernel that leaves a hole shows.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    ops::Range,
    sync::Arc,
};

use super::Job;
use crate::{
    Error, Result,
    cpu::{execute::execute, threads::Threads},
    memory::Memory,
    op::Mode,
    order::{Access, Clock, History, Space, Stamp},
};

/// Which of the waits that the order layer derives are left out: negative controls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DropWaits {
    /// None: the real thing.
    #[default]
    None,
    /// All of them.
    All,
    /// Only the n-th, counted from 0 over the device's life.
    Nth(u64),
}

/// How a simulated device is set up.
#[derive(Clone, Debug, Default)]
pub struct SimOptions {
    /// Decides the schedule.
    pub seed: u64,
    /// Most bytes the device may hold.
    pub budget_bytes: Option<usize>,
    /// Waits to leave out.
    pub drop_waits: DropWaits,
    /// The n-th read, counted from 0 over the device's life, that the order layer forgets, so that nothing waits for it: a
    /// negative control.
    pub forget_read: Option<u64>,
    /// The n-th allocation fails, counted from 0.
    pub fail_alloc: Option<u64>,
    /// The n-th op fails when it runs, counted from 0.
    pub fail_op: Option<u64>,
    /// Most bytes of host memory that the system gives.
    pub host_bytes: Option<usize>,
    /// Most bytes of host memory that the system lets be locked.
    pub locked_bytes: Option<usize>,
    /// Streams that run only when no other can: slow copies.
    pub slow_streams: Vec<String>,
}

/// The host's place in the checker's clocks; streams come after it.
const HOST: usize = 0;

pub(crate) struct SimBackend {
    memory: Arc<Memory>,
    threads: Threads,
    options: SimOptions,
    random: fastrand::Rng,
    streams: Vec<SimStream>,
    host_clock: Clock,
    /// Clocks of ops that are not known to the host yet, by checker stamp.
    clocks: HashMap<(usize, u64), Clock>,
    histories: HashMap<Space, History>,
    names: HashMap<(usize, u64), String>,
    /// Bytes that have been written, of the device and of files.
    written: HashMap<Space, Intervals>,
    waits_seen: u64,
    allocs_seen: u64,
    ops_run: u64,
    error: Option<Error>,
}

struct SimStream {
    slow: bool,
    queue: VecDeque<(Job, Vec<Range<usize>>)>,
    done: u64,
    clock: Clock,
}

impl SimBackend {
    pub(crate) fn new(memory: Arc<Memory>, options: SimOptions) -> Result<Self> {
        let threads = Threads::new(1).map_err(|error| Error::Start(format!("a thread: {error}")))?;
        let random = fastrand::Rng::with_seed(options.seed);
        Ok(SimBackend {
            memory,
            threads,
            options,
            random,
            streams: Vec::new(),
            host_clock: Clock::default(),
            clocks: HashMap::new(),
            histories: HashMap::new(),
            names: HashMap::new(),
            written: HashMap::new(),
            waits_seen: 0,
            allocs_seen: 0,
            ops_run: 0,
            error: None,
        })
    }

    pub(crate) fn add_stream(&mut self, name: &str) {
        let slow = self.options.slow_streams.iter().any(|slow| slow == name);
        self.streams.push(SimStream { slow, queue: VecDeque::new(), done: 0, clock: Clock::default() });
    }

    pub(crate) fn fails_alloc(&mut self) -> bool {
        self.allocs_seen += 1;
        self.options.fail_alloc == Some(self.allocs_seen - 1)
    }

    pub(crate) fn forget_read(&self) -> Option<u64> {
        self.options.forget_read
    }

    pub(crate) fn allocated(&mut self, range: Range<usize>) {
        self.written.entry(Space::Device).or_default().remove(range);
    }

    /// Whether the simulated system gives that much host memory beside what it gave.
    pub(crate) fn check_host(&self, in_use: usize, bytes: usize) -> Result<(), String> {
        let over = |limit: Option<usize>| limit.is_some_and(|limit| bytes > limit.saturating_sub(in_use));
        if over(self.options.host_bytes) {
            return Err("the system has not that much".to_string());
        }
        if over(self.options.locked_bytes) {
            return Err("beyond the limit of locked memory (ulimit -l), which may be raised".to_string());
        }
        Ok(())
    }

    pub(crate) fn enqueue(&mut self, mut job: Job, accesses: &[Access]) {
        job.waits.retain(|_| {
            self.waits_seen += 1;
            match self.options.drop_waits {
                DropWaits::None => true,
                DropWaits::All => false,
                DropWaits::Nth(n) => n != self.waits_seen - 1,
            }
        });
        let fresh = self.check(&job, accesses);
        self.streams[job.stamp.stream].queue.push_back((job, fresh));
    }

    /// Runs until the stamps are done.
    pub(crate) fn wait(&mut self, stamps: &[Stamp]) -> Result<()> {
        while !stamps.iter().all(|stamp| self.streams[stamp.stream].done >= stamp.number) {
            if !self.step() {
                let error = Error::Violation("deadlock: no stream's head can run".to_string());
                self.error.get_or_insert(error);
                break;
            }
        }
        for stamp in stamps {
            let key = checker(*stamp);
            if let Some(clock) = self.clocks.get(&(key.stream, key.number)) {
                self.host_clock.join(&clock.clone());
            }
        }
        self.error.clone().map_or(Ok(()), Err)
    }

    pub(crate) fn take_error(&mut self) -> Result<()> {
        self.error.take().map_or(Ok(()), Err)
    }

    /// The host touches a host buffer, after it waited for what the order layer said.
    pub(crate) fn host_access(&mut self, access: &Access) -> Result<()> {
        let number = self.host_clock.get(HOST) + 1;
        let stamp = Stamp { stream: HOST, number };
        self.host_clock.raise(stamp);
        let clock = self.host_clock.clone();
        self.check_access("the host", stamp, &clock, access);
        self.names.insert((HOST, number), "the host".to_string());
        self.error.clone().map_or(Ok(()), Err)
    }

    /// Holds an op against every earlier access, and returns the bytes it is the first to write.
    fn check(&mut self, job: &Job, accesses: &[Access]) -> Vec<Range<usize>> {
        let stamp = checker(job.stamp);
        let mut clock = self.host_clock.clone();
        clock.join(&self.streams[job.stamp.stream].clock);
        for wait in &job.waits {
            let key = checker(*wait);
            if let Some(waited) = self.clocks.get(&(key.stream, key.number)) {
                clock.join(waited);
            }
        }
        clock.raise(stamp);
        let mut fresh = Vec::new();
        for (access, operand) in accesses.iter().zip(job.op.operands()) {
            self.check_access(job.op.name(), stamp, &clock, access);
            if matches!(access.space, Space::Host(_)) {
                continue;
            }
            let unwritten = self.written.entry(access.space).or_default().missing(access.range.clone());
            if access.mode != Mode::Write
                && let Some(hole) = unwritten.first()
            {
                self.violation(format!(
                    "{} reads operand `{}` at byte {} of {}, which was never written",
                    job.op.name(),
                    operand.name,
                    hole.start - access.range.start,
                    access.range.len()
                ));
            }
            if access.space == Space::Device {
                fresh.extend(unwritten);
            }
        }
        for access in accesses.iter().filter(|access| access.mode != Mode::Read) {
            if !matches!(access.space, Space::Host(_)) {
                self.written.entry(access.space).or_default().insert(access.range.clone());
            }
        }
        self.streams[job.stamp.stream].clock = clock.clone();
        self.clocks.insert((stamp.stream, stamp.number), clock);
        self.names.insert((stamp.stream, stamp.number), job.op.name().to_string());
        fresh
    }

    fn check_access(&mut self, name: &str, stamp: Stamp, clock: &Clock, access: &Access) {
        let mut races = Vec::new();
        let history = self.histories.entry(access.space).or_default();
        history.conflicts(access.range.clone(), access.mode, |before, bytes| {
            if before != stamp && !clock.covers(before) {
                races.push((before, bytes));
            }
        });
        history.record(access.range.clone(), access.mode, stamp);
        if let Some((before, bytes)) = races.into_iter().next() {
            let other = self.names.get(&(before.stream, before.number)).cloned().unwrap_or_default();
            self.violation(format!(
                "{name} (op {} of stream {}) and {other} (op {} of stream {}) touch {} bytes at {:?} {} in no order",
                stamp.number,
                stamp.stream,
                before.number,
                before.stream,
                bytes.len(),
                access.space,
                bytes.start,
            ));
        }
    }

    /// Runs one op; false if none can.
    fn step(&mut self) -> bool {
        let ready = |stream: &SimStream| {
            stream.queue.front().is_some_and(|(job, _)| {
                job.waits.iter().all(|wait| self.streams[wait.stream].done >= wait.number)
            })
        };
        let heads: Vec<usize> = (0..self.streams.len()).filter(|&i| ready(&self.streams[i])).collect();
        let quick: Vec<usize> = heads.iter().copied().filter(|&i| !self.streams[i].slow).collect();
        let choices = if quick.is_empty() { heads } else { quick };
        if choices.is_empty() {
            return false;
        }
        let stream = &mut self.streams[choices[self.random.usize(..choices.len())]];
        let Some((job, fresh)) = stream.queue.pop_front() else { return false };
        stream.done = job.stamp.number;
        self.run(&job, &fresh);
        true
    }

    fn run(&mut self, job: &Job, fresh: &[Range<usize>]) {
        let number = self.ops_run;
        self.ops_run += 1;
        if self.error.is_some() {
            return;
        }
        if self.options.fail_op == Some(number) {
            let message = "injected fault".to_string();
            self.error = Some(Error::OpFailed { op: job.op.name().to_string(), message });
            return;
        }
        for range in fresh {
            // SAFETY: the op runs now, alone: `sim` runs one op at a time. The range lies inside one of its operands.
            unsafe { self.memory.fill_bytes(range.clone(), 0xFF) };
        }
        // SAFETY: `sim` runs one op at a time, and the op passed `Op::check`.
        if let Err(message) = unsafe { execute(&job.op, &self.memory, &self.threads) } {
            self.error = Some(Error::OpFailed { op: job.op.name().to_string(), message });
        }
    }

    fn violation(&mut self, message: String) {
        self.error.get_or_insert(Error::Violation(message));
    }
}

/// A stream's stamp among the checker's, where the host comes first.
fn checker(stamp: Stamp) -> Stamp {
    Stamp { stream: stamp.stream + 1, number: stamp.number }
}

/// A set of bytes, as disjoint ranges.
#[derive(Default)]
struct Intervals(BTreeMap<usize, usize>);

impl Intervals {
    fn insert(&mut self, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        let (mut start, mut end) = (range.start, range.end);
        let touching: Vec<(usize, usize)> = self
            .0
            .range(..=end)
            .rev()
            .take_while(|&(_, &other_end)| other_end >= start)
            .map(|(&s, &e)| (s, e))
            .collect();
        for (s, e) in touching {
            self.0.remove(&s);
            start = start.min(s);
            end = end.max(e);
        }
        self.0.insert(start, end);
    }

    fn remove(&mut self, range: Range<usize>) {
        let touching: Vec<(usize, usize)> = self
            .0
            .range(..range.end)
            .rev()
            .take_while(|&(_, &end)| end > range.start)
            .map(|(&s, &e)| (s, e))
            .collect();
        for (s, e) in touching {
            self.0.remove(&s);
            if s < range.start {
                self.0.insert(s, range.start);
            }
            if e > range.end {
                self.0.insert(range.end, e);
            }
        }
    }

    /// The parts of a range that are not in the set.
    fn missing(&self, range: Range<usize>) -> Vec<Range<usize>> {
        let mut holes = Vec::new();
        let mut at = range.start;
        let before = self.0.range(..=range.start).next_back().map(|(&s, &e)| (s, e));
        let inside = self.0.range(range.start + 1..range.end.max(range.start + 1)).map(|(&s, &e)| (s, e));
        for (start, end) in before.into_iter().chain(inside) {
            if end <= at {
                continue;
            }
            if start > at {
                holes.push(at..start.min(range.end));
            }
            at = at.max(end);
        }
        if at < range.end {
            holes.push(at..range.end);
        }
        holes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The set agrees with one flag a byte.
        #[test]
        fn intervals_agree_with_flags(steps in prop::collection::vec((any::<bool>(), 0usize..64, 0usize..20), 1..40)) {
            let mut set = Intervals::default();
            let mut flags = [false; 96];
            for (insert, start, len) in steps {
                let range = start..start + len;
                flags[range.clone()].fill(insert);
                if insert { set.insert(range) } else { set.remove(range) }
                let missing: Vec<usize> = set.missing(3..90).into_iter().flatten().collect();
                let expected: Vec<usize> = (3..90).filter(|&i| !flags[i]).collect();
                prop_assert_eq!(missing, expected);
            }
        }
    }
}
