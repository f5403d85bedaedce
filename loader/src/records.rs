//! Records: rows of `.npy` arrays of any numbers, several arrays side by side, such as images and their labels.
//!
//! A [`RecordSet`] opens arrays whose first axes are as long as each other. [`RecordSet::split`] sets records aside by a keyed
//! permutation, so that no record is in both parts, whatever their sizes. A [`RecordLoader`] reads batches ahead of the caller into
//! buffers that go round, in an order that is a function of the seed, the epoch and the data alone.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use crate::file::read_exact;
use crate::format::ArrayHeader;
use crate::shard::Shard;
use crate::{Error, Permutation, Result, Share};

/// An array of a [`RecordSet`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// The file.
    pub path: PathBuf,
    /// The type of its numbers as NumPy writes it, such as `<f4` or `|u1`.
    pub descr: String,
    /// The shape of a record: that of the array, less the first axis.
    pub shape: Vec<u64>,
    /// Bytes of a record.
    pub record_bytes: usize,
}

/// Arrays side by side: record `i` is row `i` of each. A clone is cheap and shares the files.
#[derive(Clone, Debug)]
pub struct RecordSet {
    inner: Arc<Inner>,
    part: Part,
}

#[derive(Debug)]
struct Inner {
    fields: Vec<Field>,
    /// Each with where its first record begins, in bytes.
    files: Vec<(Shard, u64)>,
    records: u64,
    fingerprint: u64,
}

/// Positions `first..first + count` of a permutation of all records; of all of them where it is not split.
#[derive(Clone, Copy, Debug)]
struct Part {
    split: Option<Permutation>,
    first: u64,
    count: u64,
}

impl RecordSet {
    /// Opens arrays.
    ///
    /// # Errors
    ///
    /// [`Error::Open`], [`Error::NotAFile`]; [`Error::BadHeader`] for a file that is no array, has no axis, is stored columns first or
    /// big-endian, or is of objects, text or structures; [`Error::Unequal`] for arrays of different lengths, which names both;
    /// [`Error::NoShards`] for no files; [`Error::Empty`] for arrays without records.
    pub fn open(paths: &[impl AsRef<Path>]) -> Result<Self> {
        let (mut fields, mut files) = (Vec::new(), Vec::new());
        let mut first: Option<(PathBuf, u64)> = None;
        let mut fingerprint = 0u64;
        for path in paths {
            let path = path.as_ref();
            let (shard, header) = Shard::open_array(path)?;
            let ArrayHeader { offset, descr, width, shape } = header;
            let records = shape[0];
            match &first {
                Some((other, expected)) if *expected != records => {
                    let (path, other, expected) = (path.to_path_buf(), other.clone(), *expected);
                    return Err(Error::Unequal { path, records, other, expected });
                }
                Some(_) => {}
                None => first = Some((path.to_path_buf(), records)),
            }
            let shape = shape[1..].to_vec();
            let record_bytes = shape.iter().product::<u64>().saturating_mul(width) as usize;
            // Equal files under other names, or in another order, are other data.
            fingerprint = crate::permutation::mix(fingerprint ^ shard.fingerprint);
            fields.push(Field { path: path.to_path_buf(), descr, shape, record_bytes });
            files.push((shard, offset));
        }
        match first {
            Some((_, records)) if records > 0 => {
                let inner = Arc::new(Inner { fields, files, records, fingerprint });
                Ok(Self { inner, part: Part { split: None, first: 0, count: records } })
            }
            Some((path, _)) => Err(Error::Empty { path }),
            None => Err(Error::NoShards { path: PathBuf::new() }),
        }
    }

    /// The arrays, in the order given.
    pub fn fields(&self) -> &[Field] {
        &self.inner.fields
    }

    /// Records of this part.
    pub fn len(&self) -> u64 {
        self.part.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sets a share of the records aside: the rest, and those. Which they are is a function of the seed and the data.
    ///
    /// # Errors
    ///
    /// [`Error::BadFraction`] for a share outside of `[0, 1)`, or one that leaves nothing.
    pub fn split(&self, fraction: f64, seed: u64) -> Result<(Self, Self)> {
        let aside = (self.part.count as f64 * fraction).round() as u64;
        if !(0.0..1.0).contains(&fraction) || aside >= self.part.count || self.part.split.is_some() {
            return Err(Error::BadFraction { fraction });
        }
        let split = Some(Permutation::new(self.inner.records, seed, u64::MAX, self.inner.fingerprint));
        let rest = self.part.count - aside;
        let part = |first, count| Self { inner: self.inner.clone(), part: Part { split, first, count } };
        Ok((part(0, rest), part(rest, aside)))
    }

    /// Which row of the arrays a record of this part is.
    pub fn row(&self, record: u64) -> u64 {
        let at = self.part.first + record % self.part.count.max(1);
        self.part.split.map_or(at, |split| split.get(at))
    }

    /// Reads a record of one array, as its bytes are stored, into a slice of [`Field::record_bytes`].
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchWindow`] for a record that there is not, [`Error::BadSlice`] for a slice of another length, and
    /// [`Error::CutShort`], [`Error::Changed`] and [`Error::Read`] if the file cannot be read as it was.
    pub fn read(&self, record: u64, field: usize, out: &mut [u8]) -> Result<()> {
        let (expected, found) = (self.inner.fields[field].record_bytes, out.len());
        if expected != found {
            return Err(Error::BadSlice { slice: "out", expected, found });
        }
        if record >= self.part.count {
            let path = self.inner.fields[field].path.clone();
            return Err(Error::NoSuchWindow { path, index: record, count: self.part.count });
        }
        let (shard, offset) = &self.inner.files[field];
        read_exact(&shard.path, &shard.file, offset + self.row(record) * expected as u64, out)
    }
}

/// What becomes of the last batch of an epoch where the records do not fill it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LastBatch {
    /// It is left out: an epoch is as many whole batches as there are.
    #[default]
    Drop,
    /// It is smaller.
    Keep,
    /// It is filled with zero bytes; [`RecordBatch::records`] says how many are records.
    Pad,
}

/// What a [`RecordLoader`] delivers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordOptions {
    /// Records of a batch of this rank.
    pub batch: usize,
    /// What becomes of the last batch of an epoch.
    pub last: LastBatch,
    /// Keys the order.
    pub seed: u64,
    /// Whether records come in a keyed order, or as they lie.
    pub shuffle: bool,
    /// Which records of a step are this rank's: every `world`-th.
    pub share: Share,
    /// Batches read ahead of the caller.
    pub ahead: usize,
}

impl Default for RecordOptions {
    fn default() -> Self {
        let (last, share) = (LastBatch::default(), Share::default());
        Self { batch: 1, last, seed: 0, shuffle: true, share, ahead: 2 }
    }
}

/// A batch of records.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordBatch {
    /// For each array the records' bytes, one after another.
    pub fields: Vec<Vec<u8>>,
    /// Records in it; the rest is padding.
    pub records: usize,
    /// The step after it: where a run goes on.
    pub step: u64,
    /// The epoch that it is of.
    pub epoch: u64,
}

/// Delivers batches of records from a step on. The step is all of its state.
#[derive(Debug)]
pub struct RecordLoader {
    batches: Receiver<Result<RecordBatch>>,
    used: SyncSender<RecordBatch>,
    thread: Option<JoinHandle<()>>,
    failed: Option<Error>,
    stop: Arc<Mutex<bool>>,
}

impl RecordLoader {
    /// Begins to read, from a step on.
    ///
    /// # Errors
    ///
    /// [`Error::BadShare`]; [`Error::NoBatch`] for a batch of no records, or one that no epoch fills where the last is dropped;
    /// [`Error::Start`].
    pub fn new(records: &RecordSet, options: RecordOptions, step: u64) -> Result<Self> {
        options.share.check()?;
        let plan = Plan::new(records, options)?;
        let ahead = options.ahead.max(1);
        let (full, batches) = sync_channel(ahead);
        // One more than can be on their way, so that giving one back never waits.
        let (used, empty) = sync_channel::<RecordBatch>(ahead + 2);
        let stop = Arc::new(Mutex::new(false));
        let stopping = stop.clone();
        let mut step = step;
        let read = move || {
            while !*stopping.lock().unwrap_or_else(PoisonError::into_inner) {
                let mut batch = empty.try_recv().unwrap_or_default();
                let result = plan.fill(step, &mut batch).map(|()| batch);
                let ends = result.is_err();
                if full.send(result).is_err() || ends {
                    return;
                }
                step += 1;
            }
        };
        let thread = std::thread::Builder::new().name("ebbtide-records".to_owned()).spawn(read);
        let thread = Some(thread.map_err(|cause| Error::Start { cause: Arc::new(cause) })?);
        Ok(Self { batches, used, thread, failed: None, stop })
    }

    /// The next batch; blocks until it is there.
    ///
    /// # Errors
    ///
    /// As for [`RecordSet::read`]. After an error every call gives it again.
    #[expect(clippy::should_implement_trait, reason = "as for the loader of tokens")]
    pub fn next(&mut self) -> Result<RecordBatch> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let path = PathBuf::new();
        let result = self.batches.recv().unwrap_or(Err(Error::Stopped { path }));
        self.failed = result.as_ref().err().cloned();
        result
    }

    /// Gives a batch back, so that its buffers are used again.
    pub fn recycle(&mut self, batch: RecordBatch) {
        let _ = self.used.try_send(batch);
    }
}

impl Drop for RecordLoader {
    fn drop(&mut self) {
        *self.stop.lock().unwrap_or_else(PoisonError::into_inner) = true;
        // The reader may wait for room.
        while self.batches.try_recv().is_ok() {}
        let (_, closed) = sync_channel(0);
        drop(std::mem::replace(&mut self.batches, closed));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Which records a step has.
struct Plan {
    records: RecordSet,
    options: RecordOptions,
    steps_in_epoch: u64,
}

impl Plan {
    fn new(records: &RecordSet, options: RecordOptions) -> Result<Self> {
        let of_all = (options.batch as u64).checked_mul(options.share.world);
        let steps_in_epoch = of_all.filter(|&batch| batch > 0).map_or(0, |batch| match options.last {
            LastBatch::Drop => records.len() / batch,
            LastBatch::Keep | LastBatch::Pad => records.len().div_ceil(batch),
        });
        if steps_in_epoch == 0 {
            return Err(Error::NoBatch {
                path: records.inner.fields[0].path.clone(),
                batch: options.batch,
                world: options.share.world,
                records: records.len(),
            });
        }
        Ok(Self { records: records.clone(), options, steps_in_epoch })
    }

    fn fill(&self, step: u64, batch: &mut RecordBatch) -> Result<()> {
        let RecordOptions { batch: size, last, seed, shuffle, share, .. } = self.options;
        let (epoch, of_epoch) = (step / self.steps_in_epoch, step % self.steps_in_epoch);
        let inner = &self.records.inner;
        let order = Permutation::new(self.records.len(), seed, epoch, inner.fingerprint);
        let first = of_epoch * size as u64 * share.world + share.rank;
        let positions = (first..).step_by(share.world as usize).take(size);
        let mut records: Vec<u64> = positions.take_while(|&position| position < self.records.len()).collect();
        if shuffle {
            records.iter_mut().for_each(|record| *record = order.get(*record));
        }
        batch.records = records.len();
        (batch.step, batch.epoch) = (step + 1, epoch);
        let held = if last == LastBatch::Pad { size } else { records.len() };
        batch.fields.resize_with(inner.fields.len(), Vec::new);
        for (index, (out, field)) in batch.fields.iter_mut().zip(&inner.fields).enumerate() {
            out.clear();
            out.resize(held * field.record_bytes, 0);
            if field.record_bytes > 0 {
                for (record, slot) in records.iter().zip(out.chunks_exact_mut(field.record_bytes)) {
                    self.records.read(*record, index, slot)?;
                }
            }
            inner.files[index].0.check_unchanged()?;
        }
        Ok(())
    }
}
