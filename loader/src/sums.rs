//! Checksums of a file's pages: in the file itself, where it is [packed](crate::PackedWriter), or in a sidecar beside it.
//!
//! A page is 4 KiB of a file, from its first byte on; its sum is the low half of the page's XXH3, seeded with the page's number, so that
//! pages that changed places are found too. Reads that have sums are of whole pages, which direct reads are anyway. Sums are read
//! from the disk as they are needed, 4 bytes a page: nothing grows with the data.
//!
//! A sidecar, `NAME.sums`, has the sums of what was read so far: 0 for a page that was not. It is made and added to as pages go by
//! ([`Checksums::Make`]), in a temporary file that takes its place when the loader is dropped.
//!
//! | offset | type | value |
//! | --- | --- | --- |
//! | 0 | 8 bytes | `EBBTSUMS` |
//! | 8 | u32 | version, 1 |
//! | 12 | u32 | bytes of a page, 4096 |
//! | 16 | u64 | bytes of the file |
//! | 24 | u64 | fingerprint of the file |
//! | 32 | u64 | XXH3 of the sums |
//! | 40 | u64 | XXH3 of the 40 bytes before |
//! | 48 | u32 × pages | sums |
//!
//! All numbers are little-endian.

use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tempfile::NamedTempFile;
use xxhash_rust::xxh3::{Xxh3, xxh3_64, xxh3_64_with_seed};

use crate::disk::{Disk, IoMode};
use crate::file::{open_regular, read_exact, write_all_at};
use crate::shard::Shard;
use crate::{Dataset, Error, Result, arena};

/// Bytes of a page.
pub(crate) const PAGE_BYTES: u64 = 4096;
// Reads are of whole pages, and slots have room for them.
const _: () = assert!(PAGE_BYTES == arena::PAGE_BYTES);
/// Bytes of a sum.
pub(crate) const SUM_BYTES: u64 = size_of::<u32>() as u64;

const MAGIC: &[u8; 8] = b"EBBTSUMS";
const VERSION: u32 = 1;
const HEADER_BYTES: u64 = 48;
/// Bytes of sums that are handled at a time.
const PIECE_BYTES: usize = 64 << 10;

/// What a loader does about checksums of pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Checksums {
    /// Nothing, not even where there are some.
    Off,
    /// Holds what is read against the sums that there are: those of packed files, and those of sidecars.
    #[default]
    Verify,
    /// Verifies, and adds the sums of pages that have none to sidecars in the folder, or beside the files.
    Make(Option<PathBuf>),
}

/// What is done about a page that is not what it was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Damaged {
    /// Reading it is [`Error::Damaged`].
    #[default]
    Stop,
    /// Samples with tokens of it come as tokens 0 whose targets are ignored (-100), and are counted. The order and the position
    /// are as they were.
    Quarantine,
}

/// The sum of a page; never 0, which stands for a page without one.
pub(crate) fn page_sum(page: u64, bytes: &[u8]) -> u32 {
    (xxh3_64_with_seed(bytes, page) as u32).max(1)
}

/// Where a packed file has the sums of its own pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OwnSums {
    /// Where they begin, in bytes.
    pub(crate) offset: u64,
    /// The pages that have one.
    pub(crate) pages: (u64, u64),
}

/// The sums of one file.
#[derive(Debug)]
enum Sums {
    None,
    /// In the file itself, for a range of its pages.
    Own(OwnSums),
    /// In a file of their own.
    Sidecar(PathBuf, File),
    /// Being made, in a file that is to take its place.
    Making {
        path: PathBuf,
        file: File,
        temporary: Mutex<Option<NamedTempFile>>,
        added: AtomicBool,
    },
}

/// The sums of a dataset's files.
#[derive(Debug)]
pub(crate) struct Verifier {
    files: Vec<Sums>,
    damaged: Damaged,
    /// Bytes that were held against sums, and bytes whose sums were made.
    pub(crate) verified_bytes: AtomicU64,
    pub(crate) made_bytes: AtomicU64,
    pub(crate) damaged_pages: AtomicU64,
}

impl Verifier {
    /// Opens the sums that there are.
    ///
    /// # Errors
    ///
    /// [`Error::BadHeader`] for a sidecar that is damaged, [`Error::Changed`] for one that is not of this file, and the errors of
    /// reading and of making temporary files.
    pub(crate) fn open(dataset: &Dataset, checksums: &Checksums, damaged: Damaged) -> Result<Self> {
        let files =
            dataset.shards().iter().map(|shard| Sums::open(shard, checksums)).collect::<Result<_>>()?;
        let (verified_bytes, made_bytes, damaged_pages) = Default::default();
        Ok(Self { files, damaged, verified_bytes, made_bytes, damaged_pages })
    }

    /// Whether a file's reads must be of whole pages.
    pub(crate) fn wants_pages(&self, file: usize) -> bool {
        !matches!(self.files[file], Sums::None)
    }

    /// Holds whole pages from `offset` on against their sums, or makes them: the pages that are not what they were.
    pub(crate) fn check(&self, shard: &Shard, file: usize, offset: u64, bytes: &[u8]) -> Result<Vec<u64>> {
        let first = offset / PAGE_BYTES;
        let count = (bytes.len() as u64).div_ceil(PAGE_BYTES);
        let sums = &self.files[file];
        let Some((own, known)) = sums.read(shard, first..first + count)? else { return Ok(Vec::new()) };
        let mut bad = Vec::new();
        let (mut made, mut made_bytes, mut verified) = (Vec::new(), 0, 0);
        for (i, page) in bytes.chunks(PAGE_BYTES as usize).enumerate() {
            let number = first + i as u64;
            let Some(&expected) = number.checked_sub(own).and_then(|at| known.get(at as usize)) else {
                continue;
            };
            let found = page_sum(number, page);
            if expected == 0 {
                if matches!(sums, Sums::Making { .. }) {
                    made.push((number, found));
                    made_bytes += page.len() as u64;
                }
                continue;
            }
            verified += page.len() as u64;
            if expected == found {
                continue;
            }
            self.damaged_pages.fetch_add(1, Ordering::Relaxed);
            if self.damaged == Damaged::Stop {
                let (path, offset) = (shard.path.clone(), number * PAGE_BYTES);
                return Err(Error::Damaged { path, offset, page: number, expected, found });
            }
            bad.push(number);
        }
        self.verified_bytes.fetch_add(verified, Ordering::Relaxed);
        self.made_bytes.fetch_add(made_bytes, Ordering::Relaxed);
        sums.add(&made)?;
        Ok(bad)
    }

    pub(crate) fn report(&self) -> SumsReport {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        SumsReport { made_bytes: load(&self.made_bytes), verified_bytes: load(&self.verified_bytes) }
    }

    /// Puts sidecars that were added to in their place.
    ///
    /// # Errors
    ///
    /// [`Error::WriteSums`]. What could not be written is not there, and what was there before is as it was.
    pub(crate) fn finish(&self, dataset: &Dataset) -> Result<()> {
        self.files.iter().zip(dataset.shards()).try_for_each(|(sums, shard)| sums.finish(shard))
    }
}

impl Sums {
    fn open(shard: &Shard, checksums: &Checksums) -> Result<Self> {
        if *checksums == Checksums::Off {
            return Ok(Sums::None);
        }
        if let Some(own) = shard.sums {
            return Ok(Sums::Own(own));
        }
        let folder = match checksums {
            Checksums::Make(folder) => folder.as_deref(),
            _ => None,
        };
        let path = sidecar_of(&shard.absolute, folder);
        let existing = match fs::symlink_metadata(&path) {
            Ok(_) => Some(open_sidecar(&path, shard)?),
            Err(_) => None,
        };
        match (checksums, existing) {
            (Checksums::Make(_), existing) => {
                let failed = |cause| failed(&path, cause);
                let mut temporary = crate::writer::temporary(&path).map_err(failed)?;
                match existing {
                    Some(mut file) => {
                        std::io::copy(&mut file, &mut temporary).map_err(failed)?;
                    }
                    None => temporary
                        .as_file()
                        .set_len(HEADER_BYTES + SUM_BYTES * shard.file_bytes.div_ceil(PAGE_BYTES))
                        .map_err(failed)?,
                }
                let file = temporary.as_file().try_clone().map_err(failed)?;
                let (temporary, added) = (Mutex::new(Some(temporary)), AtomicBool::new(false));
                Ok(Sums::Making { path, file, temporary, added })
            }
            (_, Some(file)) => Ok(Sums::Sidecar(path, file)),
            (_, None) => Ok(Sums::None),
        }
    }

    /// The first page of those asked for that may have a sum, and the sums from there on.
    fn read(&self, shard: &Shard, pages: Range<u64>) -> Result<Option<(u64, Vec<u32>)>> {
        let (path, file, offset, range) = match self {
            Sums::None => return Ok(None),
            Sums::Own(OwnSums { offset, pages: (first, end) }) => {
                let range = pages.start.max(*first)..pages.end.min(*end);
                let skipped = SUM_BYTES * range.start.saturating_sub(*first);
                (&shard.path, &shard.file, offset + skipped, range)
            }
            Sums::Sidecar(path, file) => (path, file, HEADER_BYTES + SUM_BYTES * pages.start, pages),
            Sums::Making { path, file, .. } => (path, file, HEADER_BYTES + SUM_BYTES * pages.start, pages),
        };
        let count = range.end.saturating_sub(range.start) as usize;
        let mut bytes = vec![0; count * SUM_BYTES as usize];
        read_exact(path, file, offset, &mut bytes)?;
        Ok(Some((range.start, sums_of(&bytes).collect())))
    }

    fn add(&self, made: &[(u64, u32)]) -> Result<()> {
        let Sums::Making { path, file, added, .. } = self else { return Ok(()) };
        for run in made.chunk_by(|a, b| a.0 + 1 == b.0) {
            let bytes: Vec<u8> = run.iter().flat_map(|(_, sum)| sum.to_le_bytes()).collect();
            write_all_at(file, &bytes, HEADER_BYTES + SUM_BYTES * run[0].0)
                .map_err(|cause| failed(path, cause))?;
            added.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Once; what is added later is lost.
    fn finish(&self, shard: &Shard) -> Result<()> {
        let Sums::Making { path, file, temporary, added } = self else { return Ok(()) };
        let temporary = temporary.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(temporary) = temporary.filter(|_| added.load(Ordering::Relaxed)) else { return Ok(()) };
        let bytes = HEADER_BYTES + SUM_BYTES * shard.file_bytes.div_ceil(PAGE_BYTES);
        let header = header(shard, hash_range(path, file, HEADER_BYTES..bytes)?);
        write_all_at(file, &header, 0).and_then(|()| file.sync_all()).map_err(|cause| failed(path, cause))?;
        temporary.persist(path).map_err(|persist| failed(path, persist.error))?;
        Ok(())
    }
}

fn failed(path: &Path, cause: std::io::Error) -> Error {
    Error::WriteSums { path: path.to_path_buf(), cause: Arc::new(cause) }
}

fn sums_of(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.as_chunks().0.iter().map(|&sum| u32::from_le_bytes(sum))
}

/// What [`make_sums`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct SumsReport {
    /// Bytes whose checksums were made.
    pub made_bytes: u64,
    /// Bytes that were held against the checksums that there were.
    pub verified_bytes: u64,
}

/// Reads a dataset's files from end to end, holds them against the checksums that there are, and makes those that there are not, in
/// sidecars in a folder or beside the files. Packed files have their own.
///
/// # Errors
///
/// [`Error::Damaged`] for a page that is not what it was, [`Error::WriteSums`], and the errors of reading.
pub fn make_sums(dataset: &Dataset, folder: Option<PathBuf>) -> Result<SumsReport> {
    const PIECE_BYTES: u64 = 1 << 20;
    let disk = Disk::new(dataset.clone(), IoMode::Dropped, &Checksums::Make(folder), Damaged::Stop)?;
    let mut slots = arena::slots(1, Disk::slot_bytes(PIECE_BYTES) as usize)?;
    for (index, shard) in dataset.shards().iter().enumerate() {
        for start in (0..shard.file_bytes).step_by(PIECE_BYTES as usize) {
            disk.read(index, start..shard.file_bytes.min(start + PIECE_BYTES), &mut slots[0])?;
        }
    }
    disk.finish()?;
    Ok(disk.verifier().report())
}

/// The sidecar of a file: beside it, or in a folder.
pub(crate) fn sidecar_of(file: &Path, folder: Option<&Path>) -> PathBuf {
    let mut name = file.file_name().unwrap_or_default().to_os_string();
    name.push(".sums");
    match folder {
        Some(folder) => folder.join(name),
        None => file.with_file_name(name),
    }
}

/// XXH3 of a range of a file, read in pieces.
pub(crate) fn hash_range(path: &Path, file: &File, range: Range<u64>) -> Result<u64> {
    let mut hash = Xxh3::new();
    let mut piece = vec![0; PIECE_BYTES];
    let mut offset = range.start;
    while offset < range.end {
        let count = (range.end - offset).min(PIECE_BYTES as u64) as usize;
        read_exact(path, file, offset, &mut piece[..count])?;
        hash.update(&piece[..count]);
        offset += count as u64;
    }
    Ok(hash.digest())
}

fn header(shard: &Shard, sums: u64) -> Vec<u8> {
    let mut header = Vec::with_capacity(HEADER_BYTES as usize);
    header.extend(MAGIC);
    header.extend(VERSION.to_le_bytes());
    header.extend((PAGE_BYTES as u32).to_le_bytes());
    for number in [shard.file_bytes, shard.file_fingerprint(), sums] {
        header.extend(number.to_le_bytes());
    }
    header.extend(xxh3_64(&header).to_le_bytes());
    header
}

/// Opens a sidecar, and holds it against itself and its file.
fn open_sidecar(path: &Path, shard: &Shard) -> Result<File> {
    let bad = |offset, field, expected: String, found: String| Error::BadHeader {
        path: path.to_path_buf(),
        offset,
        field,
        expected,
        found,
    };
    let (file, bytes) = open_regular(path)?;
    let expected = HEADER_BYTES + SUM_BYTES * shard.file_bytes.div_ceil(PAGE_BYTES);
    let mut found = [0; HEADER_BYTES as usize];
    if bytes < HEADER_BYTES {
        return Err(bad(0, "length", format!("at least {HEADER_BYTES} bytes"), bytes.to_string()));
    }
    read_exact(path, &file, 0, &mut found)?;
    let word = |at: usize| u64::from_le_bytes(*found[at..].first_chunk().unwrap_or(&[0; 8]));
    if &found[..8] != MAGIC {
        return Err(bad(0, "magic", "EBBTSUMS".to_string(), format!("{:02x?}", &found[..8])));
    }
    if word(40) != xxh3_64(&found[..40]) {
        return Err(bad(40, "checksum of the header", hex(xxh3_64(&found[..40])), hex(word(40))));
    }
    let versions = u64::from(VERSION) | PAGE_BYTES << 32;
    if word(8) != versions {
        let (version, page) = (word(8) as u32, word(8) >> 32);
        let expected = format!("version {VERSION} of pages of {PAGE_BYTES} bytes");
        return Err(bad(8, "version", expected, format!("version {version} of {page}")));
    }
    let changed = |what, expected: String, found: String| Error::Changed {
        path: shard.path.clone(),
        since: "its checksums were made; remove the .sums file if that was meant",
        what,
        expected,
        found,
    };
    if word(16) != shard.file_bytes {
        return Err(changed("a length in bytes of", word(16).to_string(), shard.file_bytes.to_string()));
    }
    if word(24) != shard.file_fingerprint() {
        return Err(changed("the fingerprint", hex(word(24)), hex(shard.file_fingerprint())));
    }
    if bytes != expected {
        return Err(bad(0, "length", format!("{expected} bytes"), bytes.to_string()));
    }
    let sums = hash_range(path, &file, HEADER_BYTES..bytes)?;
    if word(32) != sums {
        return Err(bad(32, "checksum of the sums", hex(word(32)), hex(sums)));
    }
    Ok(file)
}

pub(crate) fn hex(number: u64) -> String {
    format!("{number:016x}")
}
