//! Safetensors files, written from a device and read to it one tensor at a time: host memory holds no more than the
//! largest.

use std::{
    borrow::Cow,
    cell::RefCell,
    collections::HashMap,
    fs::File,
    io::{Read, Seek, SeekFrom},
    ops::Range,
    path::{Path, PathBuf},
};

use half::{bf16, f16};
use safetensors::{Dtype, SafeTensorError, View, tensor::Metadata};

use crate::{Engine, Error, Flat, Result};

/// A tensor to write: its name, its shape, and where it is.
pub(crate) type Entry = (String, Vec<usize>, (Flat, Range<usize>));

/// Writes tensors to a file, which is there whole or not at all.
pub(crate) fn write(engine: &Engine, path: &Path, entries: Vec<Entry>) -> Result<()> {
    // The crate asks for each tensor's bytes when their turn comes, and has no way to be told that there are none.
    let failure = RefCell::new(None);
    let views = entries.into_iter().map(|(name, shape, (flat, range))| {
        let view = FlatTensor { engine, shape, flat, range, failure: &failure };
        (name, view)
    });
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    let result = safetensors::serialize_to_file(views, Some(metadata), path);
    if let Some(error) = failure.into_inner() {
        let _ = std::fs::remove_file(path);
        return Err(error);
    }
    result.map_err(|error| match error {
        SafeTensorError::IoError(reason) => Error::Io { path: path.to_path_buf(), action: "write", reason },
        error => Error::File { path: path.to_path_buf(), message: error.to_string() },
    })?;
    // The crate writes through a temporary file, which is for its owner alone; this one is an ordinary file.
    #[cfg(unix)]
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o644))
        .map_err(|reason| Error::Io { path: path.to_path_buf(), action: "set the permissions", reason })?;
    let sync = File::open(path).and_then(|file| file.sync_all());
    sync.map_err(|reason| Error::Io { path: path.to_path_buf(), action: "write", reason })
}

struct FlatTensor<'a> {
    engine: &'a Engine,
    shape: Vec<usize>,
    flat: Flat,
    range: Range<usize>,
    failure: &'a RefCell<Option<Error>>,
}

impl View for FlatTensor<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        match self.flat.read(self.engine, self.range.clone()) {
            Ok(values) => Cow::Owned(bytemuck::cast_slice(&values).to_vec()),
            Err(error) => {
                self.failure.borrow_mut().get_or_insert(error);
                Cow::Owned(vec![0; self.data_len()])
            }
        }
    }
    fn data_len(&self) -> usize {
        4 * self.range.len()
    }
}

/// A safetensors file, open to read.
pub(crate) struct TensorFile {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    data_start: u64,
}

impl TensorFile {
    /// Reads the header, and holds it against the file's length.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let io = |action| move |reason| Error::Io { path: path.to_path_buf(), action, reason };
        let wrong = |message: String| Error::File { path: path.to_path_buf(), message };
        let mut file = File::open(path).map_err(io("open"))?;
        let bytes = file.metadata().map_err(io("read the length"))?.len();
        let cut = |part: &str, needed: u64| {
            wrong(format!("cut short: {part} needs {needed} bytes, the file has {bytes}"))
        };
        if bytes < 8 {
            return Err(cut("the header's length", 8));
        }
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(io("read"))?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > 100_000_000 {
            return Err(wrong(format!("not a safetensors file: a header of {header_bytes} bytes")));
        }
        let data_start = 8 + header_bytes;
        if bytes < data_start {
            return Err(cut("the header", data_start));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact(&mut header).map_err(io("read"))?;
        let metadata: Metadata = serde_json::from_slice(&header)
            .map_err(|error| wrong(format!("not a safetensors file: its header: {error}")))?;
        // Lengths of a header that was not written by us may be anything.
        let end = data_start.saturating_add(metadata.data_len() as u64);
        if bytes < end {
            return Err(cut("the data", end));
        }
        if bytes > end {
            return Err(wrong(format!("{} bytes after the data's end at {end}", bytes - end)));
        }
        Ok(TensorFile { path: path.to_path_buf(), file, metadata, data_start })
    }

    /// Names of the tensors, in the order of their data.
    pub(crate) fn names(&self) -> Vec<String> {
        self.metadata.offset_keys()
    }

    /// Holds a tensor against a shape.
    pub(crate) fn check(&self, name: &str, shape: &[usize]) -> Result<()> {
        let info = self.metadata.info(name).ok_or_else(|| self.wrong(format!("no tensor `{name}`")))?;
        if info.shape != shape {
            return Err(self
                .wrong(format!("tensor `{name}` has the shape {:?}, the model's is {shape:?}", info.shape)));
        }
        match info.dtype {
            Dtype::F32 | Dtype::F16 | Dtype::BF16 => Ok(()),
            other => Err(self.wrong(format!("tensor `{name}` is {other:?}: expected F32, F16 or BF16"))),
        }
    }

    /// Reads a tensor as f32, exactly.
    pub(crate) fn read(&mut self, name: &str) -> Result<Vec<f32>> {
        let info = self.metadata.info(name).ok_or_else(|| self.wrong(format!("no tensor `{name}`")))?;
        let (start, end) = info.data_offsets;
        let dtype = info.dtype;
        let mut bytes = vec![0; end - start];
        let read = self.file.seek(SeekFrom::Start(self.data_start + start as u64));
        read.and_then(|_| self.file.read_exact(&mut bytes)).map_err(|reason| Error::Io {
            path: self.path.clone(),
            action: "read",
            reason,
        })?;
        let pairs = || bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
        Ok(match dtype {
            Dtype::F16 => pairs().map(|bits| f16::from_bits(bits).to_f32()).collect(),
            Dtype::BF16 => pairs().map(|bits| bf16::from_bits(bits).to_f32()).collect(),
            _ => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        })
    }

    pub(crate) fn wrong(&self, message: String) -> Error {
        Error::File { path: self.path.clone(), message }
    }
}
