//! Where the tokens lie in files of several formats.
//!
//! A format finds the place, the count and the encoding of a file's tokens from its header, and holds each field of the
//! header against the file before it is used. Nothing is converted: tokens are read where they lie.

mod llm_c;
mod megatron;
mod npy;
pub(crate) mod packed;
mod safetensors;

pub(crate) use megatron::document_starts;

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::encoding::Encoding;
use crate::file::{open_regular, read_exact};
use crate::sums::OwnSums;
use crate::{Error, Result};

/// A format of a file of tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Format {
    /// Numbers from the first byte to the last, with no header: nanoGPT's `.bin` files.
    Raw(Encoding),
    /// A `.npy` array of integers, versions 1 to 3. One of more dimensions is taken row after row.
    Npy,
    /// A shard of llm.c's: a header of 1024 bytes, then `u16` (version 1) or `u32` (version 7).
    LlmC,
    /// Megatron's `.bin` with its `.idx`: all sequences, one after another.
    Megatron,
    /// A file of a [`PackedWriter`](crate::PackedWriter), whose records are taken one after another.
    Packed,
    /// An integer tensor of a safetensors file: the one of this name, or the only one.
    Safetensors(Option<String>),
}

/// Where a file's tokens are.
#[derive(Debug)]
pub(crate) struct Tokens {
    /// The file they are in.
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    /// The file's length.
    pub(crate) file_bytes: u64,
    /// Where the first begins, in bytes.
    pub(crate) offset: u64,
    pub(crate) count: u64,
    pub(crate) encoding: Encoding,
    /// A second file that says what is in the first.
    pub(crate) index: Option<(PathBuf, File, u64)>,
    /// Where the file has checksums of its own pages.
    pub(crate) sums: Option<OwnSums>,
}

/// Finds the tokens of a file, in the format given or in the one that its name and its first bytes say.
pub(crate) fn find(path: &Path, format: Option<&Format>) -> Result<Tokens> {
    let (file, bytes) = open_regular(path)?;
    if bytes == 0 {
        return Err(Error::Empty { path: path.to_path_buf() });
    }
    let header = Header { path, file: &file, bytes };
    let format = match format {
        Some(format) => format.clone(),
        None => header.guess()?,
    };
    let mut sums = None;
    let (offset, count, encoding) = match &format {
        Format::Raw(encoding) => header.raw(*encoding)?,
        Format::Npy => npy::parse(&header)?,
        Format::LlmC => llm_c::parse(&header)?,
        Format::Megatron => return megatron::find(path),
        Format::Safetensors(name) => safetensors::parse(&header, name.as_deref())?,
        Format::Packed => {
            let packed = packed::parse(&header)?;
            sums = Some(packed.sums());
            (packed::HEADER_BYTES, packed.tokens, packed.encoding)
        }
    };
    if count == 0 {
        return Err(Error::Empty { path: path.to_path_buf() });
    }
    Ok(Tokens {
        path: path.to_path_buf(),
        file,
        file_bytes: bytes,
        offset,
        count,
        encoding,
        index: None,
        sums,
    })
}

pub(crate) use npy::ArrayHeader;

/// Opens an array of numbers of any kind: the file, its length, and its header.
pub(crate) fn open_array(path: &Path) -> Result<(File, u64, ArrayHeader)> {
    let (file, bytes) = open_regular(path)?;
    let array = npy::parse_array(&Header { path, file: &file, bytes })?;
    Ok((file, bytes, array))
}

/// Opens a packed file: it and its header.
pub(crate) fn open_packed(path: &Path) -> Result<(File, packed::Packed)> {
    let (file, bytes) = open_regular(path)?;
    let packed = packed::parse(&Header { path, file: &file, bytes })?;
    Ok((file, packed))
}

/// A file whose header is being read.
#[derive(Clone, Copy)]
struct Header<'a> {
    path: &'a Path,
    file: &'a File,
    /// The file's length.
    bytes: u64,
}

impl Header<'_> {
    /// Bytes `offset..offset + N`, which must be there.
    fn array<const N: usize>(&self, offset: u64, field: &'static str) -> Result<[u8; N]> {
        let mut out = [0; N];
        self.fill(offset, &mut out, field)?;
        Ok(out)
    }

    fn fill(&self, offset: u64, out: &mut [u8], field: &'static str) -> Result<()> {
        let end = offset.checked_add(out.len() as u64).filter(|&end| end <= self.bytes);
        if end.is_none() {
            return Err(self.bad(
                offset,
                field,
                format!("{} bytes", out.len()),
                format!("a file that ends at byte {}", self.bytes),
            ));
        }
        read_exact(self.path, self.file, offset, out)
    }

    fn bad(&self, offset: u64, field: &'static str, expected: impl ToString, found: impl ToString) -> Error {
        let (expected, found) = (expected.to_string(), found.to_string());
        Error::BadHeader { path: self.path.to_path_buf(), offset, field, expected, found }
    }

    /// An error unless the file ends where its header says.
    fn ends_at(&self, end: Option<u64>, field: &'static str, offset: u64) -> Result<()> {
        if end == Some(self.bytes) {
            return Ok(());
        }
        let says = end.map_or("more than 2^64".to_owned(), |end| end.to_string());
        Err(self.bad(offset, field, format!("a file of {says} bytes"), format!("one of {}", self.bytes)))
    }

    fn raw(&self, encoding: Encoding) -> Result<(u64, u64, Encoding)> {
        if self.bytes.is_multiple_of(encoding.bytes()) {
            return Ok((0, self.bytes / encoding.bytes(), encoding));
        }
        if encoding == Encoding::U16 {
            return Err(Error::OddLength { path: self.path.to_path_buf(), bytes: self.bytes });
        }
        let expected = format!("a multiple of the {} bytes of a token", encoding.bytes());
        Err(self.bad(0, "length", expected, format!("{} bytes", self.bytes)))
    }

    fn guess(&self) -> Result<Format> {
        let mut first = [0; 16];
        let count = self.bytes.min(16) as usize;
        read_exact(self.path, self.file, 0, &mut first[..count])?;
        let named = |extension| self.path.extension().is_some_and(|found| found == extension);
        Ok(match () {
            () if first.starts_with(npy::MAGIC) || named("npy") => Format::Npy,
            () if first.starts_with(packed::MAGIC) => Format::Packed,
            () if named("safetensors") => Format::Safetensors(None),
            () if named("idx") || megatron::has_index(self.path) => Format::Megatron,
            () if count >= 4 && llm_c::is_magic([first[0], first[1], first[2], first[3]]) => Format::LlmC,
            () => Format::Raw(Encoding::U16),
        })
    }
}
