//! Order is derived, never written.
//!
//! A stream runs its ops in the order of submission; streams run beside each other. For each byte of device memory and
//! of host buffers and files this layer remembers the last writer and every reader since, as stamps (stream, number). A new op
//! must come after the last writer of what it reads, and after the last writer and all readers of what it writes. From
//! these the waits on other streams follow, less those that are implied already: each stream carries a vector clock of
//! what it has waited for, and a wait brings along what the waited-for op had itself waited for.
//!
//! The memory is by address, not by buffer: when a range is freed and handed out again, its new user is ordered after
//! the old ones by the same rule, so freeing needs no wait either.
//!
//! Costs: O(log n + touched) an operand, n being the number of distinct ranges; a few hundred nanoseconds.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
};

use crate::op::Mode;

/// The number-th op of a stream; numbers start at 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Stamp {
    pub(crate) stream: usize,
    pub(crate) number: u64,
}

/// Which memory an access is to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Space {
    Device,
    Host(u64),
    File(u64),
}

/// One operand, as the order layer sees it.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    pub(crate) space: Space,
    pub(crate) range: Range<usize>,
    pub(crate) mode: Mode,
}

/// For each stream, the number of its last op that is known to come before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock(Vec<u64>);

impl Clock {
    pub(crate) fn get(&self, stream: usize) -> u64 {
        self.0.get(stream).copied().unwrap_or(0)
    }

    pub(crate) fn raise(&mut self, stamp: Stamp) {
        if self.0.len() <= stamp.stream {
            self.0.resize(stamp.stream + 1, 0);
        }
        self.0[stamp.stream] = self.0[stamp.stream].max(stamp.number);
    }

    pub(crate) fn join(&mut self, other: &Clock) {
        for (stream, &number) in other.0.iter().enumerate() {
            self.raise(Stamp { stream, number });
        }
    }

    pub(crate) fn covers(&self, stamp: Stamp) -> bool {
        self.get(stamp.stream) >= stamp.number
    }
}

/// Last writer and readers since, for every byte of one memory.
#[derive(Default)]
pub(crate) struct History {
    /// Start to (end, accesses); disjoint; absent bytes were never accessed.
    segments: BTreeMap<usize, (usize, Accesses)>,
}

#[derive(Clone, Default)]
struct Accesses {
    writer: Option<Stamp>,
    /// At most one a stream: its latest.
    readers: Vec<Stamp>,
}

impl History {
    /// Calls `before` with every stamp that an access of this mode must follow.
    pub(crate) fn conflicts(
        &self,
        range: Range<usize>,
        mode: Mode,
        mut before: impl FnMut(Stamp, Range<usize>),
    ) {
        let first = self.segments.range(..=range.start).next_back().map_or(range.start, |(&start, _)| start);
        for (&start, (end, accesses)) in self.segments.range(first..range.end) {
            if *end <= range.start {
                continue;
            }
            let common = start.max(range.start)..(*end).min(range.end);
            if let Some(writer) = accesses.writer {
                before(writer, common.clone());
            }
            if mode != Mode::Read {
                accesses.readers.iter().for_each(|&reader| before(reader, common.clone()));
            }
        }
    }

    /// Notes an access.
    pub(crate) fn record(&mut self, range: Range<usize>, mode: Mode, stamp: Stamp) {
        if range.is_empty() {
            return;
        }
        self.split(range.start);
        self.split(range.end);
        if mode != Mode::Read {
            let inside: Vec<usize> = self.segments.range(range.clone()).map(|(&start, _)| start).collect();
            inside.iter().for_each(|start| {
                self.segments.remove(start);
            });
            let accesses = Accesses { writer: Some(stamp), readers: Vec::new() };
            self.segments.insert(range.start, (range.end, accesses));
            return;
        }
        let mut gaps = Vec::new();
        let mut covered = range.start;
        for (&start, (end, accesses)) in self.segments.range_mut(range.clone()) {
            if covered < start {
                gaps.push(covered..start);
            }
            covered = *end;
            match accesses.readers.iter_mut().find(|reader| reader.stream == stamp.stream) {
                Some(reader) => *reader = stamp,
                None => accesses.readers.push(stamp),
            }
        }
        if covered < range.end {
            gaps.push(covered..range.end);
        }
        for gap in gaps {
            let accesses = Accesses { writer: None, readers: vec![stamp] };
            self.segments.insert(gap.start, (gap.end, accesses));
        }
    }

    /// Makes `at` a boundary between segments.
    fn split(&mut self, at: usize) {
        if let Some((&start, (end, accesses))) = self.segments.range_mut(..at).next_back()
            && start < at
            && at < *end
        {
            let (old_end, copy) = (*end, accesses.clone());
            *end = at;
            self.segments.insert(at, (old_end, copy));
        }
    }
}

/// Clock changes that a stream remembers. Older ones are forgotten, which can only add a wait that was implied.
const CLOCK_HISTORY: usize = 4096;

#[derive(Default)]
struct StreamOrder {
    submitted: u64,
    clock: Clock,
    /// The clock from an op's number on, where a wait changed it.
    changes: BTreeMap<u64, Clock>,
}

/// The order layer's state.
#[derive(Default)]
pub(crate) struct Order {
    device: History,
    /// Host buffers and files.
    others: HashMap<Space, History>,
    streams: Vec<StreamOrder>,
    /// A negative control of tests: this read, counted from 0, is not remembered.
    forget_read: Option<u64>,
    reads: u64,
}

impl Order {
    pub(crate) fn new(forget_read: Option<u64>) -> Self {
        Order { forget_read, ..Order::default() }
    }

    pub(crate) fn add_stream(&mut self) -> usize {
        self.streams.push(StreamOrder::default());
        self.streams.len() - 1
    }

    /// Numbers an op and derives the waits it needs before it may start.
    pub(crate) fn submit(&mut self, stream: usize, accesses: &[Access]) -> (Stamp, Vec<Stamp>) {
        let mut needed: BTreeMap<usize, u64> = BTreeMap::new();
        for access in accesses {
            self.conflicts(access, |stamp| {
                if stamp.stream != stream {
                    let number = needed.entry(stamp.stream).or_default();
                    *number = stamp.number.max(*number);
                }
            });
        }
        let number = self.streams[stream].submitted + 1;
        let stamp = Stamp { stream, number };
        let mut clock = self.streams[stream].clock.clone();
        let mut waits: Vec<Stamp> = Vec::new();
        for (&stream, &number) in &needed {
            let wait = Stamp { stream, number };
            if !clock.covers(wait) {
                waits.push(wait);
            }
        }
        for wait in &waits {
            clock.join(&self.clock_at(*wait));
        }
        // One wait can imply another: keep those that no other brings along.
        let implied =
            |wait: &Stamp| waits.iter().any(|other| other != wait && self.clock_at(*other).covers(*wait));
        let waits: Vec<Stamp> = waits.iter().filter(|wait| !implied(wait)).copied().collect();
        let own = &mut self.streams[stream];
        own.submitted = number;
        if !waits.is_empty() {
            own.clock = clock.clone();
            own.changes.insert(number, clock);
            if own.changes.len() > CLOCK_HISTORY {
                own.changes.pop_first();
            }
        }
        for access in accesses {
            if access.mode == Mode::Read {
                self.reads += 1;
                if self.forget_read == Some(self.reads - 1) {
                    continue;
                }
            }
            self.history_mut(access.space).record(access.range.clone(), access.mode, stamp);
        }
        (stamp, waits)
    }

    /// What the host must wait for before it touches a part of a host buffer.
    pub(crate) fn host_waits(&self, access: &Access) -> Vec<Stamp> {
        let mut waits = Vec::new();
        self.conflicts(access, |stamp| waits.push(stamp));
        waits
    }

    /// The last op of each stream.
    pub(crate) fn tails(&self) -> Vec<Stamp> {
        let tail = |(stream, order): (usize, &StreamOrder)| Stamp { stream, number: order.submitted };
        self.streams.iter().enumerate().map(tail).collect()
    }

    pub(crate) fn forget(&mut self, space: Space) {
        self.others.remove(&space);
    }

    fn conflicts(&self, access: &Access, mut before: impl FnMut(Stamp)) {
        let history = match access.space {
            Space::Device => Some(&self.device),
            other => self.others.get(&other),
        };
        if let Some(history) = history {
            history.conflicts(access.range.clone(), access.mode, |stamp, _| before(stamp));
        }
    }

    fn history_mut(&mut self, space: Space) -> &mut History {
        match space {
            Space::Device => &mut self.device,
            other => self.others.entry(other).or_default(),
        }
    }

    /// What is known to come before an op is done, itself included.
    fn clock_at(&self, stamp: Stamp) -> Clock {
        let changes = &self.streams[stamp.stream].changes;
        let mut clock =
            changes.range(..=stamp.number).next_back().map(|(_, c)| c.clone()).unwrap_or_default();
        clock.raise(stamp);
        clock
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(range: Range<usize>, mode: Mode) -> Access {
        Access { space: Space::Device, range, mode }
    }

    fn order(streams: usize) -> Order {
        let mut order = Order::default();
        (0..streams).for_each(|_| {
            order.add_stream();
        });
        order
    }

    #[test]
    fn a_writer_waits_for_every_reader() {
        let mut order = order(3);
        let (written, _) = order.submit(0, &[access(0..64, Mode::Write)]);
        let (read1, waits) = order.submit(1, &[access(0..64, Mode::Read)]);
        assert_eq!(waits, [written]);
        let (read2, waits) = order.submit(2, &[access(32..64, Mode::Read)]);
        assert_eq!(waits, [written]);
        let (_, waits) = order.submit(0, &[access(0..64, Mode::Write)]);
        assert_eq!(waits, [read1, read2]);
    }

    #[test]
    fn disjoint_ranges_are_free_of_each_other() {
        let mut order = order(2);
        order.submit(0, &[access(0..64, Mode::Write)]);
        let (_, waits) = order.submit(1, &[access(64..128, Mode::Write)]);
        assert_eq!(waits, []);
    }

    #[test]
    fn implied_waits_are_left_out() {
        let mut order = order(3);
        order.submit(0, &[access(0..64, Mode::Write)]);
        let (second, _) = order.submit(1, &[access(0..64, Mode::Read), access(64..128, Mode::Write)]);
        // Stream 1 has waited for stream 0 already, and brings that along.
        let (_, waits) = order.submit(2, &[access(0..128, Mode::Read)]);
        assert_eq!(waits, [second]);
        let (_, waits) = order.submit(2, &[access(0..128, Mode::Read)]);
        assert_eq!(waits, []);
    }

    #[test]
    fn a_part_written_keeps_the_rest() {
        let mut order = order(2);
        let (whole, _) = order.submit(0, &[access(0..100, Mode::Write)]);
        order.submit(1, &[access(40..60, Mode::Write)]);
        let (_, waits) = order.submit(1, &[access(60..70, Mode::Read)]);
        assert_eq!(waits, [], "stream 1 waited for {whole:?} before it wrote the middle");
        let mut fresh = super::tests::order(3);
        let (whole, _) = fresh.submit(0, &[access(0..100, Mode::Write)]);
        let (middle, _) = fresh.submit(1, &[access(40..60, Mode::Write)]);
        assert_eq!(fresh.submit(2, &[access(0..10, Mode::Read)]).1, [whole]);
        assert_eq!(fresh.submit(2, &[access(30..50, Mode::Read)]).1, [middle]);
    }
}
