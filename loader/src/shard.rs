//! One file of a dataset: where its tokens are, and whether it is still the file that was opened.

use std::fs::{self, File, Metadata};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::encoding::Encoding;
use crate::file::{FNV_BASIS, fingerprint, fnv1a};
use crate::format::{self, ArrayHeader, Format, Tokens};
use crate::sums::OwnSums;
use crate::{Error, Result, TokenFile};

/// Token ids are held in 31 bits.
const MOST_TOKENS: u64 = 1 << 31;

/// An open file of a dataset.
#[derive(Debug)]
pub(crate) struct Shard {
    pub(crate) path: PathBuf,
    /// The same path from the root on: the process may change its folder.
    pub(crate) absolute: PathBuf,
    pub(crate) file: File,
    /// The file's length when it was opened.
    pub(crate) file_bytes: u64,
    /// Where the first token begins, in bytes.
    pub(crate) offset: u64,
    pub(crate) tokens: u64,
    pub(crate) encoding: Encoding,
    /// Of the file and of its index, if it has one.
    pub(crate) fingerprint: u64,
    /// A second file that says what is in the first.
    pub(crate) index: Option<(PathBuf, File)>,
    /// Where the file itself has checksums of its pages.
    pub(crate) sums: Option<OwnSums>,
    /// Of the file alone.
    file_fingerprint: u64,
    stamp: Mutex<Stamp>,
}

/// What the system says of a file that may tell that it changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    bytes: u64,
    /// Nanoseconds, as far as the system has them.
    modified: Option<i128>,
    /// Device and number.
    #[cfg(unix)]
    file: (u64, u64),
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        let modified =
            metadata.modified().ok().map(|time| match time.duration_since(std::time::UNIX_EPOCH) {
                Ok(since) => since.as_nanos() as i128,
                Err(before) => -(before.duration().as_nanos() as i128),
            });
        Self {
            bytes: metadata.len(),
            modified,
            #[cfg(unix)]
            file: {
                use std::os::unix::fs::MetadataExt;
                (metadata.dev(), metadata.ino())
            },
        }
    }
}

impl Shard {
    /// Opens a file in a format, or in the one that it seems to have.
    pub(crate) fn open(path: &Path, format: Option<&Format>) -> Result<Self> {
        let tokens = format::find(path, format)?;
        let file_fingerprint = fingerprint(&tokens.path, &tokens.file, tokens.file_bytes)?;
        let fingerprint = match &tokens.index {
            None => file_fingerprint,
            Some((path, file, bytes)) => fnv1a(
                fnv1a(FNV_BASIS, &file_fingerprint.to_le_bytes()),
                &fingerprint(path, file, *bytes)?.to_le_bytes(),
            ),
        };
        Self::new(tokens, fingerprint, file_fingerprint)
    }

    /// Opens a `.npy` array of numbers of any kind, with what its header says.
    pub(crate) fn open_array(path: &Path) -> Result<(Self, ArrayHeader)> {
        let (file, file_bytes, header) = format::open_array(path)?;
        let fingerprint = fingerprint(path, &file, file_bytes)?;
        let tokens = Tokens {
            path: path.to_path_buf(),
            file,
            file_bytes,
            offset: header.offset,
            count: 0,
            encoding: Encoding::U16,
            index: None,
            sums: None,
        };
        Ok((Self::new(tokens, fingerprint, fingerprint)?, header))
    }

    /// The tokens of a file that is open already.
    pub(crate) fn of(file: &TokenFile) -> Result<Self> {
        let path = file.path().to_path_buf();
        let failed = |cause| Error::Open { path: path.clone(), cause: Arc::new(cause) };
        let tokens = Tokens {
            file: file.file().try_clone().map_err(failed)?,
            path: path.clone(),
            file_bytes: file.len() * Encoding::U16.bytes(),
            offset: 0,
            count: file.len(),
            encoding: Encoding::U16,
            index: None,
            sums: None,
        };
        Self::new(tokens, file.fingerprint(), file.fingerprint())
    }

    fn new(tokens: Tokens, fingerprint: u64, file_fingerprint: u64) -> Result<Self> {
        let Tokens { path, file, file_bytes, offset, count, encoding, index, sums } = tokens;
        let metadata =
            file.metadata().map_err(|cause| Error::Open { path: path.clone(), cause: Arc::new(cause) })?;
        let stamp = Stamp { bytes: file_bytes, ..Stamp::of(&metadata) };
        let absolute = std::path::absolute(&path).unwrap_or_else(|_| path.clone());
        Ok(Self {
            path,
            absolute,
            file,
            file_bytes,
            offset,
            tokens: count,
            encoding,
            fingerprint,
            index: index.map(|(path, file, _)| (path, file)),
            sums,
            file_fingerprint,
            stamp: Mutex::new(stamp),
        })
    }

    /// The fingerprint of the file alone.
    pub(crate) fn file_fingerprint(&self) -> u64 {
        self.file_fingerprint
    }

    /// An error if the file was cut, written to or replaced since it was opened. A file that was only touched is read
    /// again as far as its fingerprint goes.
    pub(crate) fn check_unchanged(&self) -> Result<()> {
        let changed = |what, expected: &dyn ToString, found: &dyn ToString| Error::Changed {
            path: self.path.clone(),
            since: "it was opened",
            what,
            expected: expected.to_string(),
            found: found.to_string(),
        };
        let failed = |cause| Error::Read {
            path: self.path.clone(),
            offset: 0,
            expected: self.file_bytes,
            cause: Arc::new(cause),
        };
        let opened = *self.stamp.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Stamp::of(&self.file.metadata().map_err(failed)?);
        if now.bytes != opened.bytes {
            return Err(changed("a length in bytes of", &opened.bytes, &now.bytes));
        }
        #[cfg(unix)]
        match fs::metadata(&self.absolute) {
            Ok(named) if Stamp::of(&named).file == opened.file => {}
            Ok(_) => return Err(changed("to find", &"the same file", &"another")),
            Err(cause) => return Err(changed("to find", &"the file", &cause)),
        }
        if now.modified != opened.modified {
            let found = fingerprint(&self.path, &self.file, self.file_bytes)?;
            if found != self.file_fingerprint {
                let hex = |value| format!("{value:016x}");
                return Err(changed("the fingerprint", &hex(self.file_fingerprint), &hex(found)));
            }
            *self.stamp.lock().unwrap_or_else(PoisonError::into_inner) = now;
        }
        Ok(())
    }

    /// Widens a window whose bytes begin at `offset` in the file.
    ///
    /// # Errors
    ///
    /// [`Error::NotAToken`] for a number that is none, or not below `limit`.
    pub(crate) fn widen(
        &self,
        window: &[u8],
        offset: u64,
        limit: u64,
        inputs: &mut [u32],
        targets: &mut [i32],
    ) -> Result<()> {
        let limit = limit.min(MOST_TOKENS);
        let bad = |index: usize, value| {
            let offset = offset + index as u64 * self.encoding.bytes();
            let index = (offset - self.offset) / self.encoding.bytes();
            Error::NotAToken { path: self.path.clone(), index, offset, value, limit }
        };
        self.encoding.widen(window, inputs, targets).map_err(|(index, value)| bad(index, value))?;
        if limit < MOST_TOKENS {
            let tokens = || inputs[..1].iter().copied().chain(targets.iter().map(|&target| target as u32));
            let largest = inputs[0].max(targets.iter().fold(0, |most, &target| most.max(target as u32)));
            if u64::from(largest) >= limit {
                let index = tokens().position(|token| u64::from(token) >= limit).unwrap_or(0);
                return Err(bad(index, tokens().nth(index).unwrap_or(largest).into()));
            }
        }
        Ok(())
    }
}
