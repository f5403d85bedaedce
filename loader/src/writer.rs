//! Token files, written whole or not at all.
//!
//! Tokens go to a temporary file in the folder of the file to be. When all are written and on the disk, it is renamed
//! without replacing what may be there by then. A crash leaves at most a hidden `.NAME.*.tmp` behind.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::NamedTempFile;

use crate::{Error, Result};

/// Bytes gathered for one write.
const BUFFER_BYTES: usize = 1 << 20;
/// Tokens converted at a time.
const CHUNK_TOKENS: usize = 4096;

/// Writes a file of little-endian `u16` token ids that appears whole when it is finished. Dropped before that, it leaves
/// nothing. An existing file is never overwritten.
#[derive(Debug)]
pub struct TokenWriter {
    sink: Sink<NamedTempFile>,
}

impl TokenWriter {
    /// Begins a file.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`] if there is something at `path`, and [`Error::Write`] if nothing can be written in its folder.
    pub fn create(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        if fs::symlink_metadata(&path).is_ok() {
            return Err(Error::Exists { path });
        }
        match temporary(&path) {
            Ok(file) => Ok(Self { sink: Sink::new(path, file) }),
            Err(cause) => {
                Err(Error::Write { path, action: "create the file", tokens: 0, cause: Arc::new(cause) })
            }
        }
    }

    /// Adds tokens to the end.
    ///
    /// # Errors
    ///
    /// [`Error::Write`], when the disk is full, say. After an error nothing more is accepted, and every call gives it again.
    pub fn write(&mut self, tokens: &[u16]) -> Result<()> {
        self.sink.write(tokens)
    }

    /// Tokens written so far.
    pub fn len(&self) -> u64 {
        self.sink.tokens
    }

    /// Whether no token is written so far.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Puts the file in its place, once all of it is on the disk: its tokens.
    ///
    /// # Errors
    ///
    /// [`Error::Empty`] without tokens, since no [`TokenFile`](crate::TokenFile) has none; [`Error::Exists`] if something
    /// came to be at the path; [`Error::Write`] if the system fails. Then there is no new file, and no temporary one.
    pub fn finish(self) -> Result<u64> {
        let mut sink = self.sink;
        if sink.tokens == 0 && sink.failed.is_none() {
            return Err(Error::Empty { path: sink.path });
        }
        sink.flush()?;
        let Sink { path, out, tokens, .. } = sink;
        let failed =
            |action, cause| Error::Write { path: path.clone(), action, tokens, cause: Arc::new(cause) };
        let file = out.into_inner().map_err(|error| failed("write the file", error.into_error()))?;
        file.as_file().sync_all().map_err(|cause| failed("flush the file to the disk", cause))?;
        file.persist_noclobber(&path).map_err(|persist| match persist.error.kind() {
            io::ErrorKind::AlreadyExists => Error::Exists { path: path.clone() },
            _ => failed("put the file in its place", persist.error),
        })?;
        // The name is in place, and the file whole, whether or not this folder can be flushed; some systems cannot.
        if cfg!(unix) {
            let _ = File::open(folder(&path)).and_then(|folder| folder.sync_all());
        }
        Ok(tokens)
    }
}

/// An empty hidden file beside `path`.
pub(crate) fn temporary(path: &Path) -> io::Result<NamedTempFile> {
    let name = path.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no file name"))?;
    let mut prefix = std::ffi::OsString::from(".");
    prefix.push(name);
    prefix.push(".");
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).suffix(".tmp");
    // Temporary files are for their owner alone by default, and this one is to become an ordinary file.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder(path))
}

pub(crate) fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

/// Tokens as bytes into anything that can be written to. The first error stays.
#[derive(Debug)]
struct Sink<W: Write> {
    path: PathBuf,
    out: BufWriter<W>,
    tokens: u64,
    failed: Option<Error>,
}

impl<W: Write> Sink<W> {
    fn new(path: PathBuf, out: W) -> Self {
        Self { path, out: BufWriter::with_capacity(BUFFER_BYTES, out), tokens: 0, failed: None }
    }

    fn write(&mut self, tokens: &[u16]) -> Result<()> {
        self.attempt(|out| {
            let mut bytes = [0; 2 * CHUNK_TOKENS];
            for chunk in tokens.chunks(CHUNK_TOKENS) {
                let bytes = &mut bytes[..2 * chunk.len()];
                for (pair, token) in bytes.chunks_exact_mut(2).zip(chunk) {
                    pair.copy_from_slice(&token.to_le_bytes());
                }
                out.write_all(bytes)?;
            }
            Ok(())
        })?;
        self.tokens += tokens.len() as u64;
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.attempt(|out| out.flush())
    }

    fn attempt(&mut self, write: impl FnOnce(&mut BufWriter<W>) -> io::Result<()>) -> Result<()> {
        if self.failed.is_none() {
            self.failed = write(&mut self.out).err().map(|cause| Error::Write {
                path: self.path.clone(),
                action: "write the file",
                tokens: self.tokens,
                cause: Arc::new(cause),
            });
        }
        self.failed.clone().map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk with room for some bytes.
    #[derive(Default)]
    struct Disk {
        room_bytes: usize,
        bytes: Vec<u8>,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let count = bytes.len().min(self.room_bytes - self.bytes.len());
            if count == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.bytes.extend(&bytes[..count]);
            Ok(count)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_full_disk_is_an_error_that_names_the_file_and_stays() {
        let disk = Disk { room_bytes: 3 << 20, ..Default::default() };
        let mut sink = Sink::new("data/train.bin".into(), disk);
        let tokens = vec![7; 1 << 19];
        let error = (0..5).find_map(|_| sink.write(&tokens).err()).unwrap();
        assert!(matches!(&error, Error::Write { tokens, .. } if *tokens >= 3 << 19), "{error:?}");
        assert!(error.to_string().starts_with("data/train.bin: cannot write the file after "), "{error}");
        assert_eq!(sink.write(&[]).unwrap_err().to_string(), error.to_string());
        assert_eq!(sink.flush().unwrap_err().to_string(), error.to_string());
    }

    #[test]
    fn a_disk_that_fills_at_the_end_is_an_error() {
        let mut sink = Sink::new("t.bin".into(), Disk { room_bytes: 3, ..Default::default() });
        sink.write(&[1, 2]).unwrap();
        assert!(matches!(sink.flush(), Err(Error::Write { tokens: 2, .. })));
    }

    #[test]
    fn bytes_are_little_endian() {
        let mut sink = Sink::new("t.bin".into(), Vec::new());
        sink.write(&[0x0102, 0xfffe]).unwrap();
        assert_eq!(sink.out.into_inner().unwrap(), [2, 1, 0xfe, 0xff]);
    }
}
