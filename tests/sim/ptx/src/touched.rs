//! Which bytes of global memory a launch read and wrote, and whether its blocks got into each other's way.

use crate::instruction::Place;
use crate::shared::Access;
use std::collections::BTreeMap;
use std::ops::Range;

/// Disjoint ranges that do not touch.
#[derive(Debug, Default, Clone)]
pub(crate) struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    pub(crate) fn insert(&mut self, range: Range<u64>) {
        let (mut start, mut end) = (range.start, range.end);
        while let Some((&near, &until)) = self.0.range(..=end).next_back() {
            if until < start {
                break;
            }
            (start, end) = (start.min(near), end.max(until));
            self.0.remove(&near);
        }
        self.0.insert(start, end);
    }

    /// The first common address.
    pub(crate) fn overlap(&self, range: &Range<u64>) -> Option<u64> {
        let (&start, &end) = self.0.range(..range.end).next_back()?;
        // The last range that starts before the end overlaps, or none does.
        (end > range.start).then_some(start.max(range.start))
    }

    pub(crate) fn to_vec(&self) -> Vec<Range<u64>> {
        self.0.iter().map(|(&start, &end)| start..end).collect()
    }
}

/// A piece that a block touched, and where in the source.
type Piece = (Range<u64>, Place);

/// Accesses of the running block, and of those before it.
#[derive(Debug, Default)]
pub(crate) struct Touched {
    /// Of this block, by kind of access; neighbours from one line are one piece.
    block: [Vec<Piece>; 3],
    before: [Ranges; 3],
}

/// Pieces that a block collects before they are sorted and joined.
const PIECES: usize = 1 << 14;

impl Touched {
    pub(crate) fn add(&mut self, kind: Access, address: u64, length: usize, place: Place) {
        let pieces = &mut self.block[kind as usize];
        let range = address..address + length as u64;
        if let Some((last, at)) = pieces.last_mut()
            && *at == place
            && last.start <= range.start
            && range.start <= last.end
        {
            last.end = last.end.max(range.end);
            return;
        }
        pieces.push((range, place));
        // Twice the pieces that were left last time, so that joining stays a small part of the work.
        if pieces.len() >= PIECES && pieces.len().is_power_of_two() {
            join(pieces);
        }
    }

    /// The block is done. Where it touched what an earlier block wrote, or wrote what one read, without both being atomic, there
    /// is a race: the address and the place.
    pub(crate) fn end_block(&mut self, check: bool) -> Option<(u64, Place)> {
        const CONFLICTS: &[(Access, Access)] = &[
            (Access::Read, Access::Write),
            (Access::Read, Access::Atomic),
            (Access::Write, Access::Read),
            (Access::Write, Access::Write),
            (Access::Write, Access::Atomic),
            (Access::Atomic, Access::Read),
            (Access::Atomic, Access::Write),
        ];
        self.block.iter_mut().for_each(join);
        let clash = |&(now, earlier): &(Access, Access)| {
            let pieces = self.block[now as usize].iter();
            pieces
                .filter_map(|(range, place)| Some((self.before[earlier as usize].overlap(range)?, *place)))
                .next()
        };
        let race = if check { CONFLICTS.iter().find_map(clash) } else { None };
        for (pieces, ranges) in self.block.iter_mut().zip(&mut self.before) {
            pieces.drain(..).for_each(|(range, _)| ranges.insert(range));
        }
        race
    }

    /// All ranges read, and all written; atomics did both.
    pub(crate) fn finish(mut self) -> (Vec<Range<u64>>, Vec<Range<u64>>) {
        self.end_block(false);
        let [mut reads, mut writes, atomics] = self.before;
        for range in atomics.to_vec() {
            reads.insert(range.clone());
            writes.insert(range);
        }
        (reads.to_vec(), writes.to_vec())
    }
}

/// Sorts, and joins what overlaps or touches within one line.
fn join(pieces: &mut Vec<Piece>) {
    pieces.sort_unstable_by_key(|(range, place)| (place.file, place.line, range.start));
    pieces.dedup_by(|(next, place), (last, at)| {
        let joined = place == at && next.start <= last.end;
        if joined {
            last.end = last.end.max(next.end);
        }
        joined
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_join_what_touches() {
        let mut ranges = Ranges::default();
        for range in [10..20, 30..40, 20..22, 5..9] {
            ranges.insert(range);
        }
        assert_eq!(ranges.to_vec(), [5..9, 10..22, 30..40]);
        assert_eq!(
            (ranges.overlap(&(22..30)), ranges.overlap(&(21..35)), ranges.overlap(&(0..6))),
            (None, Some(30), Some(5))
        );
        ranges.insert(8..31);
        assert_eq!(ranges.to_vec(), vec![(5..40)]);
    }
}
