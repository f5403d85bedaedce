//! Who used which bytes last.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use crate::clock::{Clock, Stamp};

/// An op that used some bytes.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    pub(crate) stamp: Stamp,
    pub(crate) op: Arc<str>,
}

/// The last write of some bytes, and the reads since: of each stream the last.
#[derive(Clone, Debug, Default)]
struct Uses {
    write: Option<Access>,
    reads: Vec<Access>,
}

/// Disjoint ranges by their start, each with its end.
#[derive(Debug, Default)]
pub(crate) struct Shadow(BTreeMap<u64, (u64, Uses)>);

impl Shadow {
    /// Notes an access; where an earlier one conflicts that the clock does not cover, that one and the bytes.
    pub(crate) fn access(
        &mut self,
        range: &Range<u64>,
        writes: bool,
        access: &Access,
        clock: &Clock,
    ) -> Option<(Access, Range<u64>)> {
        if range.is_empty() {
            return None;
        }
        self.cut(range.start);
        self.cut(range.end);
        let mut conflict = None;
        let mut at = range.start;
        let mut gaps = Vec::new();
        for (&start, (end, uses)) in self.0.range_mut(range.clone()) {
            if at < start {
                gaps.push(at..start);
            }
            at = *end;
            let reads = uses.reads.iter().filter(|_| writes);
            let earlier = uses.write.iter().chain(reads).find(|earlier| !clock.covers(earlier.stamp));
            conflict = conflict.or_else(|| earlier.map(|earlier| (earlier.clone(), start..*end)));
            uses.note(writes, access);
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        for gap in gaps {
            let mut uses = Uses::default();
            uses.note(writes, access);
            self.0.insert(gap.start, (gap.end, uses));
        }
        if writes {
            self.join(range);
        }
        conflict
    }

    /// The first use of a range that a clock does not cover.
    pub(crate) fn uncovered(&self, range: &Range<u64>, clock: &Clock) -> Option<&Access> {
        let before = self.0.range(..range.start).next_back().filter(|(_, (end, _))| *end > range.start);
        let uses = before.into_iter().chain(self.0.range(range.clone())).map(|(_, (_, uses))| uses);
        uses.flat_map(|uses| uses.write.iter().chain(&uses.reads)).find(|access| !clock.covers(access.stamp))
    }

    /// Forgets a range.
    pub(crate) fn forget(&mut self, range: &Range<u64>) {
        self.cut(range.start);
        self.cut(range.end);
        let starts: Vec<_> = self.0.range(range.clone()).map(|(&start, _)| start).collect();
        starts.iter().for_each(|start| {
            self.0.remove(start);
        });
    }

    fn cut(&mut self, at: u64) {
        if let Some((_, (end, uses))) = self.0.range_mut(..at).next_back()
            && *end > at
        {
            let rest = (std::mem::replace(end, at), uses.clone());
            self.0.insert(at, rest);
        }
    }

    /// What one op wrote is one range again.
    fn join(&mut self, range: &Range<u64>) {
        let starts: Vec<_> = self.0.range(range.clone()).map(|(&start, _)| start).skip(1).collect();
        starts.iter().for_each(|start| {
            self.0.remove(start);
        });
        self.0.get_mut(&range.start).expect("written just now").0 = range.end;
    }
}

impl Uses {
    fn note(&mut self, writes: bool, access: &Access) {
        if writes {
            *self = Uses { write: Some(access.clone()), reads: Vec::new() };
            return;
        }
        self.reads.retain(|read| read.stamp.stream != access.stamp.stream);
        self.reads.push(access.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(stream: usize, number: u64) -> Access {
        Access { stamp: Stamp { stream, number }, op: "op".into() }
    }

    fn knowing(stamps: &[(usize, u64)]) -> Clock {
        let mut clock = Clock::default();
        stamps.iter().for_each(|&(stream, number)| clock.add(Stamp { stream, number }));
        clock
    }

    #[test]
    fn conflicts_are_by_byte() {
        let mut shadow = Shadow::default();
        assert!(shadow.access(&(0..100), true, &access(0, 1), &Clock::default()).is_none());
        assert!(shadow.access(&(100..200), true, &access(1, 1), &Clock::default()).is_none());
        let (earlier, bytes) = shadow.access(&(50..150), false, &access(2, 1), &knowing(&[(0, 1)])).unwrap();
        assert_eq!((earlier.stamp.stream, bytes), (1, 100..150));
        // A read is no conflict with a read; a write must know of both the write and the reads, also of the second reader.
        assert!(shadow.access(&(60..70), false, &access(3, 1), &knowing(&[(0, 1)])).is_none());
        let clock = knowing(&[(0, 1), (3, 1)]);
        let (earlier, bytes) = shadow.access(&(40..65), true, &access(0, 2), &clock).unwrap();
        assert_eq!((earlier.stamp.stream, bytes), (2, 50..60));
        // Only what was just written is to be known.
        assert!(shadow.access(&(40..65), true, &access(1, 2), &knowing(&[(0, 2)])).is_none());
        assert!(shadow.uncovered(&(0..40), &knowing(&[(0, 1)])).is_none());
        assert!(shadow.uncovered(&(0..41), &knowing(&[(0, 1)])).is_some());
        shadow.forget(&(30..1000));
        assert!(shadow.uncovered(&(0..1000), &knowing(&[(0, 1)])).is_none());
    }
}
