//! A block's shared memory, which knows who wrote and read each of its bytes and whether anything orders them.
//!
//! Order is kept as in FastTrack (Flanagan and Freund, "FastTrack: efficient and precise dynamic race detection", 2009), with
//! warps as its threads: each warp has a time, which a barrier or a warp barrier moves on, and knows up to which time of every
//! other warp it comes after. Lanes of one warp are ordered by a warp barrier alone: that they run together is no promise. A
//! warp barrier of some lanes counts as one of all.
//!
//! Accesses are tracked in granules as large as the kernel's narrowest access, so an access covers whole granules.

use crate::scalar::WARP;
use crate::{FaultKind, Problem};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Access {
    Read,
    Write,
    /// Atomics do not race with each other, only with what is not atomic.
    Atomic,
}

/// The last write of a granule.
#[derive(Clone, Copy, Default)]
struct Write {
    /// 0: never written.
    time: u32,
    thread: u16,
    atomic: bool,
    /// A `cp.async` on its way.
    flying: bool,
}

/// The last read of a granule by a warp.
#[derive(Clone, Copy, Default)]
struct Read {
    time: u32,
    /// `WARP` stands for several lanes.
    lane: u8,
}

pub(crate) struct Shared {
    pub(crate) bytes: Vec<u8>,
    granule: usize,
    writes: Vec<Write>,
    /// Of each granule, by warp.
    reads: Vec<Read>,
    /// `seen[w][v]`: up to which time of warp `v` warp `w` comes after; `seen[w][w]` is its own time.
    seen: Vec<Vec<u32>>,
}

impl Shared {
    pub(crate) fn new(bytes: usize, granule: usize, warps: usize) -> Self {
        let granules = bytes.div_ceil(granule);
        let seen = (0..warps).map(|warp| (0..warps).map(|other| u32::from(warp == other)).collect());
        Self {
            bytes: vec![crate::Heap::POISON; bytes],
            granule,
            writes: vec![Write::default(); granules],
            reads: vec![Read::default(); granules * warps],
            seen: seen.collect(),
        }
    }

    /// All threads of `warps` have met.
    pub(crate) fn barrier(&mut self, warps: &[usize]) {
        let mut joined = vec![0; self.seen.len()];
        for &warp in warps {
            for (time, seen) in joined.iter_mut().zip(&self.seen[warp]) {
                *time = seen.max(time).to_owned();
            }
        }
        for &warp in warps {
            self.seen[warp].clone_from(&joined);
            self.seen[warp][warp] += 1;
        }
    }

    pub(crate) fn warp_barrier(&mut self, warp: usize) {
        self.seen[warp][warp] += 1;
    }

    /// Whether what `thread` did at `time` comes before what `me` does now.
    fn ordered(&self, me: usize, thread: usize, time: u32) -> bool {
        let (warp, other) = (me / WARP, thread / WARP);
        me == thread
            || if warp == other { time < self.seen[warp][warp] } else { time <= self.seen[warp][other] }
    }

    fn range(&self, address: u64, length: usize) -> Result<std::ops::Range<usize>, Problem> {
        let end = address
            .checked_add(length as u64)
            .filter(|end| *end <= self.bytes.len() as u64)
            .ok_or_else(|| {
                let size = self.bytes.len();
                Problem::new(
                    FaultKind::OutOfBounds,
                    format!("access of {length} bytes at {address} of {size} bytes of shared memory"),
                )
            })?;
        Ok(address as usize..end as usize)
    }

    /// Checks an access of `thread`, remembers it, and returns its bytes.
    pub(crate) fn access(
        &mut self,
        kind: Access,
        thread: usize,
        address: u64,
        length: usize,
    ) -> Result<&mut [u8], Problem> {
        let range = self.range(address, length)?;
        for granule in range.start / self.granule..range.end.div_ceil(self.granule) {
            self.check_writer(kind, thread, granule)?;
            if kind != Access::Read {
                self.check_readers(thread, granule)?;
            }
            let (warp, lane) = (thread / WARP, (thread % WARP) as u8);
            let time = self.seen[warp][warp];
            if kind == Access::Read {
                let warps = self.seen.len();
                let read = &mut self.reads[granule * warps + warp];
                let several = read.time == time && read.lane != lane;
                *read = Read { time, lane: if several { WARP as u8 } else { lane } };
            } else {
                self.writes[granule] =
                    Write { time, thread: thread as u16, atomic: kind == Access::Atomic, flying: false };
            }
        }
        Ok(&mut self.bytes[range])
    }

    fn check_writer(&self, kind: Access, thread: usize, granule: usize) -> Result<(), Problem> {
        let write = self.writes[granule];
        let at = granule * self.granule;
        if write.time == 0 {
            let what = || format!("read of shared memory at {at}, which was never written");
            return if kind == Access::Write {
                Ok(())
            } else {
                Err(Problem::new(FaultKind::Uninitialised, what()))
            };
        }
        let writer = usize::from(write.thread);
        if write.flying {
            let what = format!(
                "shared memory at {at} is still being written by a cp.async of thread {writer}, which has not waited for it"
            );
            return Err(Problem::new(FaultKind::InFlight, what));
        }
        let both_atomic = write.atomic && kind == Access::Atomic;
        if !both_atomic && !self.ordered(thread, writer, write.time) {
            return Err(race(thread, kind, at, &format!("thread {writer} wrote")));
        }
        Ok(())
    }

    fn check_readers(&self, thread: usize, granule: usize) -> Result<(), Problem> {
        let warps = self.seen.len();
        for (warp, read) in
            self.reads[granule * warps..][..warps].iter().enumerate().filter(|(_, read)| read.time > 0)
        {
            let several = usize::from(read.lane) == WARP;
            // Several lanes: at least one is not the writer, so any other lane of the warp stands for them.
            let reader = if several {
                warp * WARP + usize::from(thread.is_multiple_of(WARP))
            } else {
                warp * WARP + usize::from(read.lane)
            };
            if !self.ordered(thread, reader, read.time) {
                let who = if several {
                    format!("several threads of warp {warp} read")
                } else {
                    format!("thread {reader} read")
                };
                return Err(race(thread, Access::Write, granule * self.granule, &who));
            }
        }
        Ok(())
    }

    /// A `cp.async` of `thread` begins: until [`Shared::land`] nobody may use the bytes.
    pub(crate) fn launch(&mut self, thread: usize, address: u64, length: usize) -> Result<(), Problem> {
        self.access(Access::Write, thread, address, length)?;
        let range = self.range(address, length)?;
        self.writes[range.start / self.granule..range.end.div_ceil(self.granule)]
            .iter_mut()
            .for_each(|write| write.flying = true);
        Ok(())
    }

    /// The copy has arrived, as a write of `thread` now.
    pub(crate) fn land(&mut self, thread: usize, address: u64, data: &[u8]) {
        let at = address as usize;
        let time = self.seen[thread / WARP][thread / WARP];
        self.bytes[at..at + data.len()].copy_from_slice(data);
        for write in &mut self.writes[at / self.granule..(at + data.len()).div_ceil(self.granule)] {
            *write = Write { time, thread: thread as u16, atomic: false, flying: false };
        }
    }
}

fn race(thread: usize, kind: Access, at: usize, before: &str) -> Problem {
    let what = match kind {
        Access::Read => "reads",
        Access::Write => "writes",
        Access::Atomic => "atomically changes",
    };
    let what =
        format!("race: thread {thread} {what} shared memory at {at}, which {before} with no barrier between");
    Problem::new(FaultKind::Race, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(result: Result<&mut [u8], Problem>) -> Option<FaultKind> {
        result.err().map(|problem| problem.kind)
    }

    #[test]
    fn a_barrier_orders_only_the_warps_that_took_part() {
        let mut shared = Shared::new(64, 4, 3);
        assert_eq!(outcome(shared.access(Access::Write, 0, 0, 4)), None);
        shared.barrier(&[0, 1]);
        assert_eq!(outcome(shared.access(Access::Read, 33, 0, 4)), None);
        assert_eq!(outcome(shared.access(Access::Read, 70, 0, 4)), Some(FaultKind::Race));
        // Order is passed on: warp 2 meets warp 1, which had met warp 0.
        shared.barrier(&[1, 2]);
        assert_eq!(outcome(shared.access(Access::Read, 70, 0, 4)), None);
        assert_eq!(outcome(shared.access(Access::Write, 0, 0, 4)), Some(FaultKind::Race));
    }

    #[test]
    fn atomics_race_only_with_plain_accesses() {
        let mut shared = Shared::new(4, 4, 2);
        assert_eq!(outcome(shared.access(Access::Write, 0, 0, 4)), None);
        shared.barrier(&[0, 1]);
        assert_eq!(outcome(shared.access(Access::Atomic, 1, 0, 4)), None);
        assert_eq!(outcome(shared.access(Access::Atomic, 40, 0, 4)), None);
        assert_eq!(outcome(shared.access(Access::Read, 1, 0, 4)), Some(FaultKind::Race));
    }

    #[test]
    fn neighbouring_granules_do_not_race() {
        let mut shared = Shared::new(4, 1, 1);
        assert_eq!(outcome(shared.access(Access::Write, 0, 0, 1)), None);
        assert_eq!(outcome(shared.access(Access::Write, 1, 1, 1)), None);
        assert_eq!(outcome(shared.access(Access::Write, 2, 1, 1)), Some(FaultKind::Race));
        assert_eq!(outcome(shared.access(Access::Read, 0, 2, 1)), Some(FaultKind::Uninitialised));
        assert_eq!(outcome(shared.access(Access::Read, 0, 2, 4)), Some(FaultKind::OutOfBounds));
    }
}
