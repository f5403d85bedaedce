//! How fast the disk is: a dataset's files from end to end, with the loader's own reads and slots.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::disk::{Disk, IoMode};
use crate::sums::{Checksums, Damaged};
use crate::{Dataset, Result, arena};

/// What [`read_through`] found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sequential {
    /// Bytes of the files that were read.
    pub bytes: u64,
    /// Seconds it took.
    pub seconds: f64,
}

/// Reads a dataset's files one after another in pieces of `piece_bytes`, on so many threads with two slots each, until all
/// is read or the time is over.
///
/// # Errors
///
/// [`Error::NoMemory`](crate::Error::NoMemory) if there is none for the slots, and the errors of reading.
pub fn read_through(
    dataset: &Dataset,
    mode: IoMode,
    piece_bytes: u64,
    threads: usize,
    most: Duration,
) -> Result<Sequential> {
    let (piece_bytes, threads) = (piece_bytes.max(1), threads.max(1));
    let disk = Disk::new(dataset.clone(), mode, &Checksums::Off, Damaged::Stop)?;
    let shards = dataset.shards();
    let pieces = |shard: usize| shards[shard].file_bytes.div_ceil(piece_bytes);
    let next = Mutex::new((0, 0));
    let take = || {
        let mut next = next.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        while next.0 < shards.len() {
            let (shard, piece) = *next;
            if piece < pieces(shard) {
                next.1 += 1;
                let start = piece * piece_bytes;
                return Some((shard, start..(start + piece_bytes).min(shards[shard].file_bytes)));
            }
            *next = (shard + 1, 0);
        }
        None
    };
    let slots = arena::slots(2 * threads, Disk::slot_bytes(piece_bytes) as usize)?;
    let slots = Mutex::new(slots);
    let (bytes, failed) = (AtomicU64::new(0), AtomicBool::new(false));
    let read = || -> Result<()> {
        let own: Vec<_> = {
            let mut slots = slots.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let left = slots.len() - 2;
            slots.drain(left..).collect()
        };
        let began = Instant::now();
        let mut own = own;
        for turn in 0.. {
            if failed.load(Ordering::Relaxed) || began.elapsed() >= most {
                break;
            }
            let Some((shard, range)) = take() else { break };
            let length = range.end - range.start;
            let slot = &mut own[turn % 2];
            disk.read(shard, range, slot).inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
            bytes.fetch_add(length, Ordering::Relaxed);
        }
        Ok(())
    };
    let began = Instant::now();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(read)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or(Ok(())))
    })?;
    Ok(Sequential { bytes: bytes.into_inner(), seconds: began.elapsed().as_secs_f64() })
}
