//! What is known to be done, and when it was.

use std::collections::BTreeMap;

/// An op: the stream it is on, and its number there, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Stamp {
    pub(crate) stream: usize,
    pub(crate) number: u64,
}

/// For each stream the number up to which its ops are done; and the virtual nanoseconds at which the last of them was.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Clock {
    done: BTreeMap<usize, u64>,
    pub(crate) nanos: u64,
}

impl Clock {
    pub(crate) fn add(&mut self, stamp: Stamp) {
        let known = self.done.entry(stamp.stream).or_default();
        *known = stamp.number.max(*known);
    }

    pub(crate) fn join(&mut self, other: &Clock) {
        other.done.iter().for_each(|(&stream, &number)| self.add(Stamp { stream, number }));
        self.nanos = self.nanos.max(other.nanos);
    }

    pub(crate) fn covers(&self, stamp: Stamp) -> bool {
        self.done.get(&stamp.stream).is_some_and(|&known| known >= stamp.number)
    }

    pub(crate) fn covers_all(&self, other: &Clock) -> bool {
        other.done.iter().all(|(&stream, &number)| self.covers(Stamp { stream, number }))
    }
}
