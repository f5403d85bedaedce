//! Reads of ranges of a dataset's files into slots, past the page cache where that is better.
//!
//! There are three ways. *Direct* reads leave the page cache alone and move the disk's bytes into the slot without a copy;
//! they take whole pages of the file, so what was asked for begins a little into the slot. *Dropped* reads go through the
//! cache and tell the kernel to forget them. *Cached* reads go through it and stay. A file system that knows no direct
//! reads gets dropped ones, and the report says so.
//!
//! Every read is held to the bytes it should bring. A file that was cut, written to or replaced is noticed at the read
//! itself or at the check that follows the reads of each 64 KiB, before the last of them is used.

use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::arena::PAGE_BYTES;
use crate::file::{read_at, read_exact};
use crate::shard::Shard;
use crate::sums::{Checksums, Damaged, Verifier};
use crate::{Dataset, Error, Result};

/// Bytes of reads after which a file is looked at again.
const CHECK_BYTES: u64 = 64 << 10;

/// How files are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoMode {
    /// Past the page cache.
    Direct,
    /// Through the page cache, which is told to forget what was read.
    Dropped,
    /// Through the page cache.
    Cached,
}

impl fmt::Display for IoMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Direct => "direct",
            Self::Dropped => "dropped",
            Self::Cached => "cached",
        })
    }
}

/// The files of a dataset, ready to be read.
#[derive(Debug)]
pub(crate) struct Disk {
    dataset: Dataset,
    mode: IoMode,
    files: Vec<Reads>,
    /// Why a file is not read as the mode says.
    fallback: Mutex<Option<String>>,
    verifier: Verifier,
}

/// How one file is read.
#[derive(Debug, Default)]
struct Reads {
    /// A handle for direct reads, if there is one. Opened at the first.
    direct: OnceLock<Option<File>>,
    /// Direct reads of this file failed.
    refused: OnceLock<()>,
    /// Bytes read since the file was looked at.
    unchecked_bytes: AtomicU64,
}

/// What a read brought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Brought {
    /// Where in the slot the range begins.
    pub(crate) skip: usize,
    /// Bytes that were read.
    pub(crate) bytes: u64,
    /// The pages of the file among them that are not what they were.
    pub(crate) damaged: Vec<u64>,
}

impl Disk {
    /// # Errors
    ///
    /// Those of opening checksums.
    pub(crate) fn new(
        dataset: Dataset,
        mode: IoMode,
        checksums: &Checksums,
        damaged: Damaged,
    ) -> Result<Self> {
        let files = dataset.shards().iter().map(|_| Reads::default()).collect();
        let verifier = Verifier::open(&dataset, checksums, damaged)?;
        Ok(Self { dataset, mode, files, fallback: Mutex::new(None), verifier })
    }

    /// The files' checksums.
    pub(crate) fn verifier(&self) -> &Verifier {
        &self.verifier
    }

    /// Puts checksums that were made in their place, when nothing is read any more.
    pub(crate) fn finish(&self) -> Result<()> {
        self.verifier.finish(&self.dataset)
    }

    /// How files are read, and why some are not, if so.
    pub(crate) fn mode(&self) -> (IoMode, Option<String>) {
        let fallback = self.fallback.lock().unwrap_or_else(PoisonError::into_inner).clone();
        (if fallback.is_some() { IoMode::Dropped } else { self.mode }, fallback)
    }

    /// Bytes of a slot for ranges of so many.
    pub(crate) fn slot_bytes(range_bytes: u64) -> u64 {
        range_bytes.saturating_add(2 * PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES
    }

    /// Reads a range of a file into a slot of [`slot_bytes`](Self::slot_bytes).
    ///
    /// # Errors
    ///
    /// [`Error::CutShort`] and [`Error::Changed`] if the file is not what it was, [`Error::Read`] if the system fails.
    pub(crate) fn read(&self, shard: usize, range: Range<u64>, slot: &mut [u8]) -> Result<Brought> {
        let (file, reads) = (&self.dataset.shards()[shard], &self.files[shard]);
        let direct = match self.mode {
            IoMode::Direct if reads.refused.get().is_none() => {
                reads.direct.get_or_init(|| self.open_direct(file)).as_ref()
            }
            _ => None,
        };
        // Checksums are of whole pages.
        let asked_for = range.clone();
        let range = match self.verifier.wants_pages(shard) {
            true => {
                range.start / PAGE_BYTES * PAGE_BYTES
                    ..range.end.next_multiple_of(PAGE_BYTES).min(file.file_bytes)
            }
            false => range,
        };
        let brought = direct.map(|direct| self.read_direct(file, direct, reads, &range, slot)).transpose()?;
        let mut brought = match brought.flatten() {
            Some(brought) => brought,
            None => {
                let bytes = range.end - range.start;
                read_exact(&file.path, &file.file, range.start, &mut slot[..bytes as usize])?;
                if self.mode != IoMode::Cached {
                    forget(&file.file, &range);
                }
                Brought { skip: 0, bytes, damaged: Vec::new() }
            }
        };
        let unchecked = reads.unchecked_bytes.fetch_add(brought.bytes, Ordering::Relaxed) + brought.bytes;
        if unchecked >= CHECK_BYTES {
            reads.unchecked_bytes.store(0, Ordering::Relaxed);
            file.check_unchanged()?;
        }
        if self.verifier.wants_pages(shard) {
            let pages = &slot[..(range.end - range.start) as usize];
            brought.damaged = self.verifier.check(file, shard, range.start, pages).map_err(|error| {
                // A file that was replaced is more than damaged.
                match error {
                    Error::Damaged { .. } => file.check_unchanged().err().unwrap_or(error),
                    other => other,
                }
            })?;
            brought.skip = (asked_for.start - range.start) as usize;
        }
        Ok(brought)
    }

    /// Reads whole pages around a range; `None` where the file system refuses.
    fn read_direct(
        &self,
        shard: &Shard,
        direct: &File,
        reads: &Reads,
        range: &Range<u64>,
        slot: &mut [u8],
    ) -> Result<Option<Brought>> {
        let start = range.start / PAGE_BYTES * PAGE_BYTES;
        let (skip, needed) = ((range.start - start) as usize, (range.end - start) as usize);
        let wanted = needed.next_multiple_of(PAGE_BYTES as usize);
        let mut done = 0;
        while done < needed {
            // A read that ends within a page is one at the file's end; what else may come does so without direct I/O.
            if !(done as u64).is_multiple_of(PAGE_BYTES) {
                read_exact(&shard.path, &shard.file, start + done as u64, &mut slot[done..needed])
                    .map_err(|error| from(error, range))?;
                done = needed;
                break;
            }
            match read_at(direct, &mut slot[done..wanted], start + done as u64) {
                Ok(0) => {
                    return Err(Error::CutShort {
                        path: shard.path.clone(),
                        offset: range.start,
                        expected: range.end - range.start,
                        found: done.saturating_sub(skip) as u64,
                    });
                }
                Ok(read) => done += read,
                Err(cause) if cause.kind() == std::io::ErrorKind::Interrupted => {}
                Err(cause) if cause.kind() == std::io::ErrorKind::InvalidInput => {
                    self.fall_back(shard, &format!("direct reads are refused: {cause}"));
                    let _ = reads.refused.set(());
                    return Ok(None);
                }
                Err(cause) => {
                    return Err(Error::Read {
                        path: shard.path.clone(),
                        offset: start + done as u64,
                        expected: (wanted - done) as u64,
                        cause: cause.into(),
                    });
                }
            }
        }
        Ok(Some(Brought { skip, bytes: done as u64, damaged: Vec::new() }))
    }

    fn open_direct(&self, shard: &Shard) -> Option<File> {
        match open_direct(shard) {
            Ok(file) => Some(file),
            Err(cause) => {
                self.fall_back(shard, &format!("cannot be opened for direct reads: {cause}"));
                None
            }
        }
    }

    fn fall_back(&self, shard: &Shard, why: &str) {
        let mut fallback = self.fallback.lock().unwrap_or_else(PoisonError::into_inner);
        fallback.get_or_insert_with(|| format!("{}: {why}", shard.path.display()));
    }
}

/// The rest of a range was cut short: the error, for all of it.
fn from(error: Error, range: &Range<u64>) -> Error {
    match error {
        Error::CutShort { path, offset, found, .. } => Error::CutShort {
            path,
            offset: range.start,
            expected: range.end - range.start,
            found: (offset + found).saturating_sub(range.start),
        },
        other => other,
    }
}

/// A second handle of a shard's file. It must be the same file: the path may lead to another by now.
#[cfg(target_os = "linux")]
fn open_direct(shard: &Shard) -> std::io::Result<File> {
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

    let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
    let file = File::options().read(true).custom_flags(flags).open(&shard.absolute)?;
    let (ours, theirs) = (shard.file.metadata()?, file.metadata()?);
    if (ours.dev(), ours.ino()) != (theirs.dev(), theirs.ino()) {
        return Err(std::io::Error::other("the path leads to another file"));
    }
    Ok(file)
}

#[cfg(not(target_os = "linux"))]
fn open_direct(_: &Shard) -> std::io::Result<File> {
    Err(std::io::ErrorKind::Unsupported.into())
}

/// Tells the kernel that a range will not be wanted again. Only a hint.
fn forget(file: &File, range: &Range<u64>) {
    #[cfg(target_os = "linux")]
    let _ = rustix::fs::fadvise(
        file,
        range.start,
        std::num::NonZeroU64::new(range.end - range.start),
        rustix::fs::Advice::DontNeed,
    );
    #[cfg(not(target_os = "linux"))]
    let _ = (file, range);
}

/// Has the kernel write what it has of a dataset's files to the disk and forget it, so that the next reads are the disk's.
/// A hint: files that others map or write stay.
pub fn drop_from_cache(dataset: &Dataset) {
    for shard in dataset.shards() {
        let _ = shard.file.sync_data();
        forget(&shard.file, &(0..shard.file_bytes));
    }
}
