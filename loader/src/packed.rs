//! Packed files: records of tokens, or of numbers of any kind, with an index and a checksum a page.
//!
//! A [`PackedWriter`] is shared between the threads that make records. Each gives a batch of records and its place among the
//! batches; batches before it are waited for only until they have their place in the file, then all write at once. Memory does not
//! grow with the file: the index and the checksums go to temporary files. The file appears whole, or not at all.
//!
//! As a [`Dataset`](crate::Dataset) a packed file is its records one after another; a [`PackedFile`] reads them one by one. Both
//! hold what they read against its checksums.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use tempfile::NamedTempFile;

use crate::encoding::Encoding;
use crate::file::{read_exact, write_all_at};
use crate::format;
use crate::format::packed::{ENTRY_BYTES, HEADER_BYTES, Packed};
use crate::sums::{PAGE_BYTES, SUM_BYTES, hash_range, page_sum};
use crate::writer::{folder, temporary};
use crate::{Error, Result};

/// Sums that are looked at, and bytes that are copied, at a time.
const PIECE_BYTES: usize = 64 << 10;

/// How long a packed file's records are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Records {
    /// As many tokens each.
    Fixed(u64),
    /// Any number each, none too; the file has an index of them.
    Variable,
}

/// Writes a packed file, from one thread or from many.
///
/// ```
/// use ebbtide_loader::{Encoding, PackedFile, PackedWriter, Records};
///
/// # fn main() -> ebbtide_loader::Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("books.bin");
/// let writer = PackedWriter::create(&path, Encoding::U16, Records::Variable)?;
/// std::thread::scope(|scope| {
///     for place in 0..4u64 {
///         let writer = &writer;
///         // Batch `place` holds two records; the batches end up in order.
///         scope.spawn(move || writer.put(place, &[&[place as u16; 3][..], &[7]]));
///     }
/// });
/// assert_eq!(writer.finish()?, 8);
///
/// let file = PackedFile::open(&path)?;
/// assert_eq!((file.records(), file.tokens()), (8, 16));
/// assert_eq!(file.read(4)?, [2, 0, 2, 0, 2, 0]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct PackedWriter {
    path: PathBuf,
    encoding: Encoding,
    records: Records,
    file: NamedTempFile,
    /// The ends of records, in tokens.
    index: File,
    /// A sum a page, 0 where it is still to be made.
    sums: File,
    state: Mutex<State>,
    turn: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The batch whose turn it is.
    next: u64,
    records: u64,
    tokens: u64,
    failed: Option<Error>,
}

/// A number that a packed file may be made of.
pub trait Number: bytemuck::Pod + Send + Sync {
    /// How it is stored.
    const ENCODING: Encoding;
    /// Its bytes in little-endian order.
    fn to_little_endian(self) -> Self;
}

macro_rules! numbers {
    ($($number:ty: $signed:literal),*) => {$(
        impl Number for $number {
            const ENCODING: Encoding = Encoding::of(size_of::<$number>() as u8, $signed);
            fn to_little_endian(self) -> Self {
                self.to_le()
            }
        }
    )*};
}

numbers!(u8: false, u16: false, u32: false, u64: false, i8: true, i16: true, i32: true, i64: true);

impl PackedWriter {
    /// Begins a file.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`] if there is something at `path`, [`Error::BadHeader`] for fixed records of no tokens, and
    /// [`Error::Write`] if nothing can be written in its folder.
    pub fn create(path: impl AsRef<Path>, encoding: Encoding, records: Records) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        if fs::symlink_metadata(&path).is_ok() {
            return Err(Error::Exists { path });
        }
        if records == Records::Fixed(0) {
            let (expected, found) = ("at least 1".to_string(), "0".to_string());
            return Err(Error::BadHeader { path, offset: 24, field: "tokens of a record", expected, found });
        }
        let failed = |cause| Error::Write {
            path: path.clone(),
            action: "create the file",
            tokens: 0,
            cause: Arc::new(cause),
        };
        let file = temporary(&path).map_err(failed)?;
        let unnamed = || tempfile::tempfile_in(folder(&path)).map_err(failed);
        let (index, sums) = (unnamed()?, unnamed()?);
        Ok(Self { encoding, records, file, index, sums, state: Mutex::default(), turn: Condvar::new(), path })
    }

    /// Adds batch number `place`, counted from 0, to the file. Waits until all batches before it have their place, so each number must
    /// come, from one thread in order or from several that are each in order; an empty batch is one too.
    ///
    /// # Errors
    ///
    /// [`Error::BadHeader`] for numbers of another encoding or records of another length than the file's, or a place that was given
    /// already; [`Error::Write`]. After an error every call gives it again, and so does [`finish`](Self::finish).
    pub fn put<N: Number>(&self, place: u64, records: &[&[N]]) -> Result<()> {
        let result = self.try_put(place, records);
        if let Err(error) = &result {
            let mut state = self.lock();
            state.failed.get_or_insert_with(|| error.clone());
            drop(state);
            self.turn.notify_all();
        }
        result
    }

    fn try_put<N: Number>(&self, place: u64, records: &[&[N]]) -> Result<()> {
        if N::ENCODING != self.encoding {
            return Err(self.bad(12, "encoding", self.encoding, N::ENCODING));
        }
        if let Records::Fixed(tokens) = self.records
            && let Some(other) = records.iter().find(|record| record.len() as u64 != tokens)
        {
            return Err(self.bad(24, "tokens of a record", tokens, other.len()));
        }
        let tokens: u64 = records.iter().map(|record| record.len() as u64).sum();
        let (first_record, first_token) = {
            let state = self.lock();
            let mut state = self
                .turn
                .wait_while(state, |state| state.failed.is_none() && state.next < place)
                .unwrap_or_else(PoisonError::into_inner);
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            if state.next != place {
                return Err(self.bad(16, "batch", state.next, place));
            }
            let begin = (state.records, state.tokens);
            state.next += 1;
            state.records += records.len() as u64;
            state.tokens += tokens;
            begin
        };
        self.turn.notify_all();
        let failed = |cause| self.failed("write the file", first_token, cause);
        if self.records == Records::Variable {
            let mut end = first_token;
            let ends = records.iter().flat_map(|record| {
                end += record.len() as u64;
                end.to_le_bytes()
            });
            write_all_at(&self.index, &ends.collect::<Vec<u8>>(), first_record * ENTRY_BYTES)
                .map_err(failed)?;
        }
        let width = self.encoding.bytes();
        let mut bytes = Vec::with_capacity((tokens * width) as usize);
        for record in records {
            match cfg!(target_endian = "little") {
                true => bytes.extend_from_slice(bytemuck::cast_slice(record)),
                false => {
                    let ordered: Vec<N> = record.iter().map(|number| number.to_little_endian()).collect();
                    bytes.extend_from_slice(bytemuck::cast_slice(&ordered));
                }
            }
        }
        let offset = HEADER_BYTES + first_token * width;
        write_all_at(self.file.as_file(), &bytes, offset).map_err(failed)?;
        self.sum_whole_pages(offset, &bytes).map_err(failed)
    }

    /// Sums of the pages that lie within a batch; those that it shares with its neighbours come at the end.
    fn sum_whole_pages(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let first = offset.div_ceil(PAGE_BYTES);
        let skipped = (first * PAGE_BYTES - offset) as usize;
        let pages = bytes.get(skipped..).unwrap_or_default().chunks_exact(PAGE_BYTES as usize);
        let sums: Vec<u8> =
            (first..).zip(pages).flat_map(|(number, page)| page_sum(number, page).to_le_bytes()).collect();
        write_all_at(&self.sums, &sums, SUM_BYTES * (first - 1))
    }

    /// Puts the file in its place, once all of it is on the disk: its records.
    ///
    /// # Errors
    ///
    /// That of the first call that failed; [`Error::Empty`] without tokens; [`Error::Exists`] if something came to be at the path;
    /// [`Error::Write`]. Then there is no new file, and no temporary one.
    pub fn finish(self) -> Result<u64> {
        let (tokens, records) = {
            let state = self.lock();
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            (state.tokens, state.records)
        };
        if tokens == 0 {
            return Err(Error::Empty { path: self.path });
        }
        let record_tokens = match self.records {
            Records::Fixed(tokens) => tokens,
            Records::Variable => 0,
        };
        let mut packed = Packed { encoding: self.encoding, records, record_tokens, tokens, sums_hash: 0 };
        let (file, sums) = (self.file.as_file(), packed.sums());
        let failed = |cause| self.failed("write the file", tokens, cause);
        file.set_len(sums.offset).map_err(failed)?;
        if self.records == Records::Variable {
            self.copy(&self.index, 0..records * ENTRY_BYTES, packed.index_offset())?;
        }
        self.sums.set_len(packed.file_bytes() - sums.offset).map_err(failed)?;
        self.sum_remaining_pages(sums.pages)?;
        self.copy(&self.sums, 0..packed.file_bytes() - sums.offset, sums.offset)?;
        packed.sums_hash = hash_range(&self.path, file, sums.offset..packed.file_bytes())?;
        write_all_at(file, &packed.header(), 0).and_then(|()| file.sync_all()).map_err(failed)?;
        let Self { path, file, .. } = self;
        file.persist_noclobber(&path).map_err(|persist| match persist.error.kind() {
            io::ErrorKind::AlreadyExists => Error::Exists { path: path.clone() },
            _ => {
                let cause = Arc::new(persist.error);
                Error::Write { path: path.clone(), action: "put the file in its place", tokens, cause }
            }
        })?;
        if cfg!(unix) {
            let _ = File::open(folder(&path)).and_then(|folder| folder.sync_all());
        }
        Ok(records)
    }

    /// Makes the sums that are not made.
    fn sum_remaining_pages(&self, (first, end): (u64, u64)) -> Result<()> {
        let failed = |cause| self.failed("write checksums", 0, cause);
        let mut page = vec![0; PAGE_BYTES as usize];
        let mut sums = vec![0; PIECE_BYTES];
        let mut at = first;
        while at < end {
            let count = (end - at).min(PIECE_BYTES as u64 / SUM_BYTES);
            let sums = &mut sums[..(count * SUM_BYTES) as usize];
            let offset = SUM_BYTES * (at - first);
            read_exact(&self.path, &self.sums, offset, sums)?;
            for (number, sum) in (at..).zip(sums.as_chunks_mut::<4>().0) {
                if *sum == [0; 4] {
                    read_exact(&self.path, self.file.as_file(), number * PAGE_BYTES, &mut page)?;
                    *sum = page_sum(number, &page).to_le_bytes();
                }
            }
            write_all_at(&self.sums, sums, offset).map_err(failed)?;
            at += count;
        }
        Ok(())
    }

    fn copy(&self, from: &File, range: Range<u64>, to: u64) -> Result<()> {
        let mut piece = vec![0; PIECE_BYTES];
        for start in range.clone().step_by(PIECE_BYTES) {
            let piece = &mut piece[..(range.end - start).min(PIECE_BYTES as u64) as usize];
            read_exact(&self.path, from, start, piece)?;
            write_all_at(self.file.as_file(), piece, to + start - range.start)
                .map_err(|cause| self.failed("write the file", 0, cause))?;
        }
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, action: &'static str, tokens: u64, cause: io::Error) -> Error {
        Error::Write { path: self.path.clone(), action, tokens, cause: Arc::new(cause) }
    }

    fn bad(&self, offset: u64, field: &'static str, expected: impl ToString, found: impl ToString) -> Error {
        let (expected, found) = (expected.to_string(), found.to_string());
        Error::BadHeader { path: self.path.clone(), offset, field, expected, found }
    }
}

/// The records of a packed file, read one by one.
#[derive(Debug)]
pub struct PackedFile {
    path: PathBuf,
    file: File,
    packed: Packed,
}

impl PackedFile {
    /// Opens a packed file.
    ///
    /// # Errors
    ///
    /// [`Error::Open`], [`Error::NotAFile`]; [`Error::BadHeader`] for a file that is damaged or no packed one.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (file, packed) = format::open_packed(path)?;
        Ok(Self { path: path.to_path_buf(), file, packed })
    }

    /// Its records.
    pub fn records(&self) -> u64 {
        self.packed.records
    }

    /// The tokens of all of them.
    pub fn tokens(&self) -> u64 {
        self.packed.tokens
    }

    /// How they are stored.
    pub fn encoding(&self) -> Encoding {
        self.packed.encoding
    }

    /// The tokens of a record, counted over the whole file.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] for a record that there is not; [`Error::Damaged`], and [`Error::BadHeader`] for an index that contradicts
    /// itself.
    pub fn range(&self, record: u64) -> Result<Range<u64>> {
        let Packed { records, record_tokens, tokens, .. } = self.packed;
        if record >= records {
            let end = record.saturating_add(1);
            return Err(Error::OutOfRange { path: self.path.clone(), start: record, end, tokens: records });
        }
        if record_tokens > 0 {
            return Ok(record * record_tokens..(record + 1) * record_tokens);
        }
        let offset = self.packed.index_offset() + record * ENTRY_BYTES;
        // Its own end, and before it the end of the one before.
        let bytes = match record {
            0 => [[0; 8], *self.verified(offset, ENTRY_BYTES)?.first_chunk().unwrap_or(&[0; 8])].concat(),
            _ => self.verified(offset - ENTRY_BYTES, 2 * ENTRY_BYTES)?,
        };
        let ends: Vec<u64> = bytes.as_chunks().0.iter().map(|&end| u64::from_le_bytes(end)).collect();
        let range = ends[0]..ends[1];
        if range.start > range.end || range.end > tokens {
            let expected = format!("an end from {} to {tokens}", range.start);
            let (field, found) = ("entry of the index", range.end.to_string());
            return Err(Error::BadHeader { path: self.path.clone(), offset, field, expected, found });
        }
        Ok(range)
    }

    /// A record's bytes, little-endian.
    ///
    /// # Errors
    ///
    /// As for [`range`](Self::range).
    pub fn read(&self, record: u64) -> Result<Vec<u8>> {
        let (range, width) = (self.range(record)?, self.packed.encoding.bytes());
        self.verified(HEADER_BYTES + range.start * width, (range.end - range.start) * width)
    }

    /// Bytes of the file, held against the sums of their pages.
    fn verified(&self, offset: u64, count: u64) -> Result<Vec<u8>> {
        let sums = self.packed.sums();
        let pages = offset / PAGE_BYTES..(offset + count).div_ceil(PAGE_BYTES);
        let mut bytes = vec![0; ((pages.end - pages.start) * PAGE_BYTES) as usize];
        read_exact(&self.path, &self.file, pages.start * PAGE_BYTES, &mut bytes)?;
        let mut expected = vec![0; ((pages.end - pages.start) * SUM_BYTES) as usize];
        read_exact(
            &self.path,
            &self.file,
            sums.offset + SUM_BYTES * (pages.start - sums.pages.0),
            &mut expected,
        )?;
        let pieces = bytes.chunks(PAGE_BYTES as usize).zip(expected.as_chunks().0);
        for (page, (piece, &expected)) in pages.clone().zip(pieces) {
            let (expected, found) = (u32::from_le_bytes(expected), page_sum(page, piece));
            if expected != found {
                let (path, offset) = (self.path.clone(), page * PAGE_BYTES);
                return Err(Error::Damaged { path, offset, page, expected, found });
            }
        }
        let skip = (offset - pages.start * PAGE_BYTES) as usize;
        bytes.truncate(skip + count as usize);
        bytes.drain(..skip);
        Ok(bytes)
    }
}
