//! [`Arena`]: an address space, best fit, coalescing, no memory of its own.
//!
//! A freed range can be handed out again at once, although queued ops may still use it: whoever gets it is ordered after
//! them by the order layer, which knows bytes rather than buffers. So the layout is a function of the program alone,
//! never of timing, and a range's end is at most the highest end ever in use: the device's real footprint.
//!
//! Costs: O(log free ranges) an allocation.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

/// On the device every allocation starts at a multiple of it, and takes a multiple of it.
pub(crate) const ALIGNMENT: usize = 256;

/// Hands out ranges of an address space: of the device's, of a slab of host memory, of a file.
pub struct Arena {
    capacity: usize,
    alignment: usize,
    /// Free ranges: start to length.
    free: BTreeMap<usize, usize>,
    /// The same, by (length, start).
    by_len: BTreeSet<(usize, usize)>,
    high_water: usize,
}

impl Arena {
    /// An arena of `capacity` bytes, whose ranges start at multiples of `alignment` and take multiples of it.
    pub fn new(capacity: usize, alignment: usize) -> Self {
        let capacity = capacity / alignment * alignment;
        let mut arena =
            Arena { capacity, alignment, free: BTreeMap::new(), by_len: BTreeSet::new(), high_water: 0 };
        arena.insert(0, capacity);
        arena
    }

    /// Its size.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// One past the last byte ever in use.
    pub fn high_water(&self) -> usize {
        self.high_water
    }

    /// Forgets the past: the high water mark becomes the end of what is in use now.
    pub fn reset_high_water(&mut self) {
        self.high_water = match self.free.last_key_value() {
            Some((&start, &len)) if start + len == self.capacity => start,
            _ => self.capacity,
        };
    }

    /// The largest contiguous free range.
    pub fn largest_free(&self) -> usize {
        self.by_len.last().map_or(0, |&(len, _)| len)
    }

    /// The smallest free range that holds `bytes`, the lowest of equals; the end of the space only where nothing else holds
    /// them. So the layout does not depend on the capacity: what fits once fits in a space as large as its high water mark.
    pub fn alloc(&mut self, bytes: usize) -> Option<Range<usize>> {
        let bytes = bytes.max(1).checked_next_multiple_of(self.alignment)?;
        let mut fitting = self.by_len.range((bytes, 0)..);
        let mut found = *fitting.next()?;
        if found.0 + found.1 == self.capacity
            && let Some(&next) = fitting.next()
        {
            found = next;
        }
        let (len, start) = found;
        self.remove(start, len);
        if len > bytes {
            self.insert(start + bytes, len - bytes);
        }
        self.high_water = self.high_water.max(start + bytes);
        Some(start..start + bytes)
    }

    /// Gives back a range that [`Arena::alloc`] returned.
    pub fn free(&mut self, range: Range<usize>) {
        let (mut start, mut end) = (range.start, range.end);
        if let Some((&before, &len)) = self.free.range(..start).next_back()
            && before + len == start
        {
            self.remove(before, len);
            start = before;
        }
        if let Some(&len) = self.free.get(&end) {
            self.remove(end, len);
            end += len;
        }
        self.insert(start, end - start);
    }

    fn insert(&mut self, start: usize, len: usize) {
        if len > 0 {
            self.free.insert(start, len);
            self.by_len.insert((len, start));
        }
    }

    fn remove(&mut self, start: usize, len: usize) {
        self.free.remove(&start);
        self.by_len.remove(&(len, start));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Live ranges never overlap, stay inside, and everything freed coalesces back to one range.
        #[test]
        fn live_ranges_are_disjoint(steps in prop::collection::vec((0usize..5000, any::<prop::sample::Index>()), 1..200)) {
            let mut arena = Arena::new(1 << 16, ALIGNMENT);
            let mut live: Vec<Range<usize>> = Vec::new();
            for (bytes, pick) in steps {
                if bytes % 3 == 0 && !live.is_empty() {
                    arena.free(live.swap_remove(pick.index(live.len())));
                } else if let Some(range) = arena.alloc(bytes) {
                    prop_assert!(range.end <= arena.capacity() && range.len() >= bytes);
                    prop_assert!(live.iter().all(|other| range.end <= other.start || other.end <= range.start));
                    prop_assert!(range.end <= arena.high_water());
                    live.push(range);
                } else {
                    prop_assert!(arena.largest_free() < bytes.max(1).next_multiple_of(ALIGNMENT));
                }
            }
            live.into_iter().for_each(|range| arena.free(range));
            prop_assert_eq!(arena.largest_free(), arena.capacity());
            arena.reset_high_water();
            prop_assert_eq!(arena.high_water(), 0);
        }
    }
}
