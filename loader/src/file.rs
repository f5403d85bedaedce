//! A file of tokens, read by position.
//!
//! Every read is a positional read into the caller's slice and checks that all of its bytes came, so a file that is cut
//! short while it is in use is an error that names the place. On Unix the file is mapped as well, only because that is
//! how the kernel is told which pages are wanted soon. The map is never read.
//!
//! Costs: open reads at most 256 KiB for the fingerprint; the map takes address space and no memory.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::{Error, Result};

/// Bytes of one token.
const TOKEN_BYTES: u64 = size_of::<u16>() as u64;
/// Tokens of the buffer that scans a file: 1 MiB.
const SCAN_TOKENS: usize = 1 << 19;
/// Pieces of content that the fingerprint reads.
const PIECES: u64 = 64;
/// Where FNV-1a begins.
pub(crate) const FNV_BASIS: u64 = 0xcbf2_9ce4_8422_2325;
/// Bytes of one piece.
const PIECE_BYTES: u64 = 4096;

/// An open file of little-endian `u16` token ids, larger than memory if need be. A clone is cheap and shares the file.
#[derive(Clone)]
pub struct TokenFile {
    inner: Arc<Inner>,
}

struct Inner {
    path: PathBuf,
    file: File,
    tokens: u64,
    fingerprint: u64,
    /// For advice alone. `None` where the address space is too small: reads do not need it.
    #[cfg(unix)]
    map: Option<memmap2::Mmap>,
}

impl TokenFile {
    /// Opens a file of tokens and takes its fingerprint.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] if it is missing or may not be read, [`Error::NotAFile`] for a folder or a device,
    /// [`Error::Empty`] and [`Error::OddLength`] for a length that is no whole number of tokens, and the errors of
    /// [`read`](Self::read) from taking the fingerprint.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        let (file, bytes) = open_regular(&path)?;
        if bytes == 0 {
            return Err(Error::Empty { path });
        }
        if !bytes.is_multiple_of(TOKEN_BYTES) {
            return Err(Error::OddLength { path, bytes });
        }
        let fingerprint = fingerprint(&path, &file, bytes)?;
        Ok(Self {
            inner: Arc::new(Inner {
                #[cfg(unix)]
                map: map(&file, bytes),
                path,
                file,
                tokens: bytes / TOKEN_BYTES,
                fingerprint,
            }),
        })
    }

    /// The path that it was opened by.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// Its tokens, as counted when it was opened.
    pub fn len(&self) -> u64 {
        self.inner.tokens
    }

    /// Whether it has no tokens. An open file always has some.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What tells this dataset from another when a run is resumed: the 64-bit FNV-1a hash of the length in bytes (eight
    /// bytes, little-endian) and of the content. Of a file above 256 KiB, 64 pieces of 4 KiB stand for the content,
    /// spread evenly from the first byte to the last, so a change between them goes unseen.
    ///
    /// Taken once, when the file is opened.
    pub fn fingerprint(&self) -> u64 {
        self.inner.fingerprint
    }

    /// Scans the file for a token id outside of the vocabulary, with a buffer of 1 MiB.
    ///
    /// # Errors
    ///
    /// [`Error::BadToken`] with the first id that is `vocabulary` or more, and the errors of [`read`](Self::read).
    pub fn check_vocabulary(&self, vocabulary: usize) -> Result<()> {
        let mut buffer = vec![0; SCAN_TOKENS.min(usize::try_from(self.len()).unwrap_or(SCAN_TOKENS))];
        let mut start = 0;
        while start < self.len() {
            let count = (self.len() - start).min(buffer.len() as u64);
            let tokens = &mut buffer[..count as usize];
            self.read(start, tokens)?;
            // The maximum is quick to take, and the place only matters once.
            let largest = tokens.iter().copied().max().unwrap_or(0);
            if usize::from(largest) >= vocabulary {
                let found = tokens.iter().enumerate().find(|(_, token)| usize::from(**token) >= vocabulary);
                if let Some((at, &value)) = found {
                    let index = start + at as u64;
                    return Err(Error::BadToken {
                        path: self.path().to_path_buf(),
                        index,
                        offset: index * TOKEN_BYTES,
                        value,
                        vocabulary,
                    });
                }
            }
            start += count;
        }
        Ok(())
    }

    /// Reads tokens `start..start + out.len()` into `out`. After an error what `out` holds is unspecified.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] if the file had fewer tokens when it was opened, [`Error::CutShort`] if it has fewer now, and
    /// [`Error::Read`] if the system cannot read it.
    pub fn read(&self, start: u64, out: &mut [u16]) -> Result<()> {
        self.check_range(start, start.saturating_add(out.len() as u64))?;
        read_exact(self.path(), &self.inner.file, start * TOKEN_BYTES, bytemuck::cast_slice_mut(out))?;
        if cfg!(target_endian = "big") {
            for token in out {
                *token = u16::from_le(*token);
            }
        }
        Ok(())
    }

    /// The open file.
    pub(crate) fn file(&self) -> &File {
        &self.inner.file
    }

    /// An error unless `start..end` is a range within the file.
    pub(crate) fn check_range(&self, start: u64, end: u64) -> Result<()> {
        if start <= end && end <= self.len() {
            return Ok(());
        }
        Err(Error::OutOfRange { path: self.path().to_path_buf(), start, end, tokens: self.len() })
    }

    /// Tells the kernel that tokens `start..start + count` will be read soon, so that it begins to fetch them. Only a
    /// hint: what it cannot do is left undone.
    pub(crate) fn advise(&self, start: u64, count: u64) {
        #[cfg(unix)]
        if let Some(map) = &self.inner.map
            && self.check_range(start, start.saturating_add(count)).is_ok()
        {
            let (offset, bytes) = ((start * TOKEN_BYTES) as usize, (count * TOKEN_BYTES) as usize);
            let _ = map.advise_range(memmap2::Advice::WillNeed, offset, bytes);
        }
        #[cfg(not(unix))]
        let _ = (start, count);
    }
}

impl fmt::Debug for TokenFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenFile")
            .field("path", &self.path())
            .field("tokens", &self.len())
            .field("fingerprint", &format_args!("{:#018x}", self.fingerprint()))
            .finish()
    }
}

#[cfg(unix)]
fn map(file: &File, bytes: u64) -> Option<memmap2::Mmap> {
    let bytes = usize::try_from(bytes).ok()?;
    // SAFETY: a map is unsound only if its bytes change or vanish under someone who reads them through it. No code reads
    // through this one: it is private to `Inner`, is never dereferenced, and only its address goes to `madvise`.
    unsafe { memmap2::MmapOptions::new().len(bytes).map(file) }.ok()
}

/// Opens a file that is one, for reading: it and its length in bytes.
pub(crate) fn open_regular(path: &Path) -> Result<(File, u64)> {
    let failed = |cause| Error::Open { path: path.to_path_buf(), cause: Arc::new(cause) };
    // Asked before opening, because opening a pipe would wait for its writer.
    let kind = fs::metadata(path).map_err(failed)?;
    if !kind.is_file() {
        let found = if kind.is_dir() { "a folder" } else { "no regular file" };
        return Err(Error::NotAFile { path: path.to_path_buf(), found });
    }
    let file = File::open(path).map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    Ok((file, bytes))
}

/// Fills `out` from `offset` on, or says how many bytes there were.
pub(crate) fn read_exact(path: &Path, file: &File, offset: u64, out: &mut [u8]) -> Result<()> {
    let expected = out.len() as u64;
    let mut done = 0;
    while done < out.len() {
        match read_at(file, &mut out[done..], offset + done as u64) {
            Ok(0) => {
                return Err(Error::CutShort {
                    path: path.to_path_buf(),
                    offset,
                    expected,
                    found: done as u64,
                });
            }
            Ok(read) => done += read,
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
            Err(cause) => {
                return Err(Error::Read {
                    path: path.to_path_buf(),
                    offset,
                    expected,
                    cause: Arc::new(cause),
                });
            }
        }
    }
    Ok(())
}

#[cfg(unix)]
pub(crate) fn read_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, out, offset)
}

#[cfg(unix)]
pub(crate) fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

#[cfg(windows)]
pub(crate) fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match std::os::windows::fs::FileExt::seek_write(file, &bytes[done..], offset + done as u64)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written => done += written,
        }
    }
    Ok(())
}

#[cfg(windows)]
pub(crate) fn read_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, out, offset)
}

/// The fingerprint of a file of so many bytes, as [`TokenFile::fingerprint`] has it.
pub(crate) fn fingerprint(path: &Path, file: &File, bytes: u64) -> Result<u64> {
    let mut hash = fnv1a(FNV_BASIS, &bytes.to_le_bytes());
    let mut piece = [0; PIECE_BYTES as usize];
    for (offset, count) in pieces(bytes) {
        let piece = &mut piece[..count];
        read_exact(path, file, offset, piece)?;
        hash = fnv1a(hash, piece);
    }
    Ok(hash)
}

/// Byte offsets and lengths of the pieces that stand for the content of a file.
fn pieces(bytes: u64) -> impl Iterator<Item = (u64, usize)> {
    let whole = bytes <= PIECES * PIECE_BYTES;
    let count = if whole { bytes.div_ceil(PIECE_BYTES) } else { PIECES };
    (0..count).map(move |piece| {
        // In 128 bits, because the product of a huge length and a piece does not fit 64.
        let spread =
            u128::from(piece) * u128::from(bytes.saturating_sub(PIECE_BYTES)) / u128::from(PIECES - 1);
        let offset = if whole { piece * PIECE_BYTES } else { spread as u64 };
        (offset, (bytes - offset).min(PIECE_BYTES) as usize)
    })
}

/// The 64-bit FNV-1a hash (RFC 9923), going on from `hash`.
pub(crate) fn fnv1a(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fnv1a_of_known_strings() {
        // From the test vectors of RFC 9923.
        assert_eq!(fnv1a(0xcbf2_9ce4_8422_2325, b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(0xcbf2_9ce4_8422_2325, b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a(0xcbf2_9ce4_8422_2325, b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn pieces_cover_a_small_file_and_both_ends_of_a_large_one() {
        assert_eq!(pieces(2).collect::<Vec<_>>(), [(0, 2)]);
        assert_eq!(pieces(4098).collect::<Vec<_>>(), [(0, 4096), (4096, 2)]);
        for bytes in [1 << 18, (1 << 18) + 2, 1 << 40, u64::MAX - 1] {
            let pieces: Vec<_> = pieces(bytes).collect();
            assert_eq!((pieces.len(), pieces[0]), (64, (0, 4096)));
            assert_eq!(pieces[63], (bytes - 4096, 4096));
            assert!(pieces.windows(2).all(|pair| pair[0].0 < pair[1].0));
        }
    }

    #[test]
    fn advice_is_harmless_inside_outside_and_after_a_cut() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.bin");
        fs::write(&path, vec![1; 1 << 20]).unwrap();
        let file = TokenFile::open(&path).unwrap();
        file.advise(3, 70_000);
        file.advise(u64::MAX, u64::MAX);
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(0).unwrap();
        file.advise(300_000, 1025);
        assert!(matches!(file.read(300_000, &mut [0; 1025]), Err(Error::CutShort { offset: 600_000, .. })));
    }
}
