//! [`SpillFile`]: disk space for what host memory does not hold.

use std::{
    collections::BTreeMap,
    fmt,
    fs::File,
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use xxhash_rust::xxh3::xxh3_64;

use crate::{
    Error, Result,
    device::Shared,
    memory::HostBlock,
    op::Mode,
    order::{Access, Space},
};

/// Every part of a spill file starts at a multiple of it and is a multiple of it long, as direct I/O wants.
pub const FILE_ALIGNMENT: usize = 4096;

/// How a [`SpillFile`] is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpillOptions {
    /// A folder of the disk to use. Nothing is ever seen in it: the file has no name.
    pub folder: PathBuf,
    /// Its size; rounded up to [`FILE_ALIGNMENT`].
    pub bytes: usize,
    /// Holds what is read against an XXH3 checksum of what was written.
    pub verify: bool,
}

/// A file of a fixed size, all of it reserved when it is made, that has no name: when the process ends, however it ends, so
/// does the file.
///
/// Reads and writes pass the system's page cache by where the file system allows it ([`SpillFile::buffered`] says), so
/// that what is spilled does not come back as memory. Cloning is cheap and shares the file.
#[derive(Clone)]
pub struct SpillFile(Arc<FileInner>);

pub(crate) struct FileInner {
    pub(crate) device: Arc<Shared>,
    pub(crate) id: u64,
    block: Arc<FileBlock>,
}

impl Drop for FileInner {
    fn drop(&mut self) {
        self.device.forget(Space::File(self.id));
    }
}

/// The file itself, which queued ops share.
pub(crate) struct FileBlock {
    folder: PathBuf,
    len: usize,
    /// `None` on a dry device.
    file: Option<File>,
    buffered: Option<String>,
    /// Start to (length, checksum) of what was written.
    checksums: Option<Mutex<BTreeMap<usize, (usize, u64)>>>,
}

impl FileBlock {
    /// A file that takes no space, for a dry device.
    pub(crate) fn dry(options: &SpillOptions) -> Self {
        // What does not fit an address is refused when the space is reserved.
        let most = usize::MAX / FILE_ALIGNMENT * FILE_ALIGNMENT;
        let len = options.bytes.checked_next_multiple_of(FILE_ALIGNMENT).unwrap_or(most);
        FileBlock { folder: options.folder.clone(), len, file: None, buffered: None, checksums: None }
    }

    pub(crate) fn new(options: &SpillOptions) -> Result<Self> {
        let mut block = Self::dry(options);
        let failed = |what: &str, cause: io::Error| Error::Disk {
            what: what.to_string(),
            folder: options.folder.clone(),
            message: cause.to_string(),
        };
        let file = tempfile::tempfile_in(&options.folder).map_err(|cause| failed("a spill file", cause))?;
        reserve(&file, block.len)
            .map_err(|cause| failed(&format!("a spill file of {}", crate::bytes(block.len)), cause))?;
        block.buffered = direct(&file).err();
        block.checksums = options.verify.then(Mutex::default);
        block.file = Some(file);
        Ok(block)
    }

    fn write(&self, start: usize, bytes: &[u8]) -> Result<(), String> {
        let Some(file) = &self.file else { return Ok(()) };
        write_all_at(file, bytes, start as u64)
            .map_err(|cause| self.message("writing", start, bytes.len(), &cause))?;
        if let Some(checksums) = &self.checksums {
            let mut checksums = checksums.lock().unwrap_or_else(PoisonError::into_inner);
            let end = start + bytes.len();
            let stale: Vec<usize> = checksums
                .range(..end)
                .filter(|(at, (len, _))| *at + len > start)
                .map(|(&at, _)| at)
                .collect();
            stale.iter().for_each(|at| {
                checksums.remove(at);
            });
            checksums.insert(start, (bytes.len(), xxh3_64(bytes)));
        }
        Ok(())
    }

    fn read(&self, start: usize, out: &mut [u8]) -> Result<(), String> {
        let Some(file) = &self.file else { return Ok(()) };
        let len = out.len();
        read_exact_at(file, out, start as u64)
            .map_err(|cause| self.message("reading", start, len, &cause))?;
        let Some(checksums) = &self.checksums else { return Ok(()) };
        let written = checksums.lock().unwrap_or_else(PoisonError::into_inner).get(&start).copied();
        match written {
            Some((written, sum)) if written == len && sum != xxh3_64(out) => Err(format!(
                "the spill file in {} has changed: bytes {start}..{} are not those that were written",
                self.folder.display(),
                start + len
            )),
            _ => Ok(()),
        }
    }

    fn message(&self, doing: &str, start: usize, len: usize, cause: &io::Error) -> String {
        let end = start + len;
        format!("{doing} bytes {start}..{end} of the spill file in {}: {cause}", self.folder.display())
    }
}

impl SpillFile {
    pub(crate) fn new(device: Arc<Shared>, id: u64, block: FileBlock) -> Self {
        SpillFile(Arc::new(FileInner { device, id, block: Arc::new(block) }))
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> usize {
        self.0.block.len
    }

    /// The folder whose disk it is on.
    pub fn folder(&self) -> &Path {
        &self.0.block.folder
    }

    /// Why reads and writes go through the page cache; `None` where they do not.
    pub fn buffered(&self) -> Option<&str> {
        self.0.block.buffered.as_deref()
    }

    /// A part of it, in bytes.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if the range leaves the file; [`Error::Unaligned`] unless both its ends are multiples of
    /// [`FILE_ALIGNMENT`].
    pub fn part(&self, bytes: Range<usize>) -> Result<FileSlice> {
        let Range { start, end } = bytes;
        if start > end || end > self.bytes() {
            return Err(Error::OutOfBounds { what: "bytes", start, end, len: self.bytes() });
        }
        if !start.is_multiple_of(FILE_ALIGNMENT) || !end.is_multiple_of(FILE_ALIGNMENT) {
            return Err(Error::Unaligned { start, end, alignment: FILE_ALIGNMENT });
        }
        let (id, block) = (self.0.id, self.0.block.clone());
        Ok(FileSlice { id, block, start, len: end - start, owner: Some(self.clone()) })
    }
}

impl fmt::Debug for SpillFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "spill@{}[{}]", self.0.id, self.bytes())
    }
}

/// A contiguous run of bytes of a [`SpillFile`].
#[derive(Clone)]
pub struct FileSlice {
    id: u64,
    block: Arc<FileBlock>,
    start: usize,
    len: usize,
    owner: Option<SpillFile>,
}

impl FileSlice {
    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.len
    }

    pub(crate) fn access(&self, mode: Mode) -> Access {
        Access { space: Space::File(self.id), range: self.start..self.start + self.len, mode }
    }

    pub(crate) fn overlaps(&self, other: &FileSlice) -> bool {
        self.id == other.id && self.start < other.start + other.len && other.start < self.start + self.len
    }

    pub(crate) fn device(&self) -> Option<&Arc<Shared>> {
        self.owner.as_ref().map(|owner| &owner.0.device)
    }

    /// Lets go of the file's accounting; the file itself lives until the op is done.
    pub(crate) fn detach(&mut self) {
        self.owner = None;
    }

    pub(crate) fn write(&self, bytes: &[u8]) -> Result<(), String> {
        self.block.write(self.start, bytes)
    }

    pub(crate) fn read(&self, out: &mut [u8]) -> Result<(), String> {
        self.block.read(self.start, out)
    }
}

impl fmt::Debug for FileSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "spill@{}+{}[{}]", self.id, self.start, self.len)
    }
}

/// Takes the whole of the file's space, so that no write finds the disk full.
fn reserve(file: &File, len: usize) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, len as u64) {
        Err(rustix::io::Errno::OPNOTSUPP) => {}
        other => return Ok(other?),
    }
    let zeros = vec![0u8; 1 << 20];
    for start in (0..len).step_by(zeros.len()) {
        write_all_at(file, &zeros[..zeros.len().min(len - start)], start as u64)?;
    }
    Ok(())
}

/// Turns the page cache off, and tries whether reads and writes still work.
///
/// # Errors
/// Why it stays on.
#[cfg(target_os = "linux")]
fn direct(file: &File) -> Result<(), String> {
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
    let attempt = || -> io::Result<()> {
        let flags = fcntl_getfl(file)?;
        fcntl_setfl(file, flags | OFlags::DIRECT)?;
        let block = HostBlock::new(FILE_ALIGNMENT).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: nobody else has the block.
        let bytes = unsafe { block.bytes_mut(0, FILE_ALIGNMENT) };
        let tried = write_all_at(file, bytes, 0).and_then(|()| read_exact_at(file, bytes, 0));
        if tried.is_err() {
            fcntl_setfl(file, flags)?;
        }
        tried
    };
    attempt().map_err(|cause| format!("the file system refuses direct I/O: {cause}"))
}

#[cfg(not(target_os = "linux"))]
fn direct(_: &File) -> Result<(), String> {
    Err("direct I/O is used on Linux alone".to_string())
}

#[cfg(unix)]
use std::os::unix::fs::FileExt;

#[cfg(unix)]
fn write_all_at(file: &File, bytes: &[u8], start: u64) -> io::Result<()> {
    file.write_all_at(bytes, start)
}

#[cfg(unix)]
fn read_exact_at(file: &File, out: &mut [u8], start: u64) -> io::Result<()> {
    file.read_exact_at(out, start)
}

#[cfg(windows)]
fn write_all_at(file: &File, mut bytes: &[u8], mut start: u64) -> io::Result<()> {
    use std::os::windows::fs::FileExt;
    while !bytes.is_empty() {
        let written = file.seek_write(bytes, start)?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        (bytes, start) = (&bytes[written..], start + written as u64);
    }
    Ok(())
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut out: &mut [u8], mut start: u64) -> io::Result<()> {
    use std::os::windows::fs::FileExt;
    while !out.is_empty() {
        let read = file.seek_read(out, start)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        (out, start) = (&mut out[read..], start + read as u64);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(folder: &Path, verify: bool) -> SpillOptions {
        SpillOptions { folder: folder.to_path_buf(), bytes: 5 * FILE_ALIGNMENT - 1, verify }
    }

    #[test]
    fn what_is_written_is_read_and_nothing_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let block = FileBlock::new(&options(folder.path(), true)).unwrap();
        assert_eq!(block.len, 5 * FILE_ALIGNMENT);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "the file has no name");
        let memory = HostBlock::new(2 * FILE_ALIGNMENT).unwrap();
        // SAFETY: nobody else has the block.
        let bytes = unsafe { memory.bytes_mut(0, 2 * FILE_ALIGNMENT) };
        bytes.iter_mut().enumerate().for_each(|(i, byte)| *byte = i as u8);
        let expected = bytes.to_vec();
        block.write(FILE_ALIGNMENT, bytes).unwrap();
        bytes.fill(0);
        block.read(FILE_ALIGNMENT, bytes).unwrap();
        assert_eq!(bytes, expected);
    }

    #[test]
    fn a_changed_byte_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let block = FileBlock::new(&options(folder.path(), true)).unwrap();
        let memory = HostBlock::new(FILE_ALIGNMENT).unwrap();
        // SAFETY: nobody else has the block.
        let bytes = unsafe { memory.bytes_mut(0, FILE_ALIGNMENT) };
        block.write(0, bytes).unwrap();
        bytes[100] = 1;
        write_all_at(block.file.as_ref().unwrap(), bytes, 0).unwrap();
        let error = block.read(0, bytes).unwrap_err();
        assert!(error.contains("bytes 0..4096 are not those that were written"), "{error}");
        // What is written anew is what counts, also over a part of what was there.
        block.write(0, bytes).unwrap();
        block.read(0, bytes).unwrap();
    }

    #[test]
    fn a_folder_that_is_not_there_and_a_disk_too_small_are_errors() {
        let missing = options(Path::new("/nowhere/at/all"), false);
        let error = FileBlock::new(&missing).err().unwrap().to_string();
        assert!(error.contains("/nowhere/at/all"), "{error}");
        let folder = tempfile::tempdir().unwrap();
        let huge = SpillOptions { bytes: 1 << 60, ..options(folder.path(), false) };
        assert!(matches!(FileBlock::new(&huge), Err(Error::Disk { .. })));
    }
}
