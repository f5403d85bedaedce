//! Datasets of one file or many, in any format, and their windows.
//!
//! A dataset's tokens are those of its files, one file after another by name. Windows never cross from one file into the
//! next: what is left at a file's end is not used.
//!
//! Costs: each file is opened and its header checked; at most 256 KiB of each are read for its fingerprint, and all of a
//! Megatron index. In memory a dataset is a few hundred bytes a file.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::file::{FNV_BASIS, fnv1a, read_exact};
use crate::format::Format;
use crate::order::{Layout, Order};
use crate::shard::Shard;
use crate::{Error, Result, Windows};

/// Endings of files that a folder's dataset is made of.
const ENDINGS: [&str; 3] = ["bin", "npy", "safetensors"];

/// An open dataset. A clone is cheap and shares the files.
#[derive(Clone, Debug)]
pub struct Dataset {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    shards: Vec<Shard>,
    /// Tokens of the dataset before each shard, and all of them.
    firsts: Vec<u64>,
    fingerprint: u64,
}

/// What tells a dataset from another, file by file: kept in checkpoints, held against the data of a run that goes on.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Identity {
    /// The files, in the dataset's order.
    pub shards: Vec<ShardIdentity>,
}

/// One file of an [`Identity`].
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ShardIdentity {
    /// The file's name, without its folder: data may be moved.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// Its fingerprint, 16 hexadecimal digits.
    pub fingerprint: String,
}

impl Dataset {
    /// Opens a file of tokens, or a folder of them, in the format that each file's name and first bytes say.
    ///
    /// # Errors
    ///
    /// See [`open_as`](Self::open_as).
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_as(path, None)
    }

    /// Opens a file of tokens, or a folder of them, in a given format. Of a folder all files ending in `.bin`, `.npy` and
    /// `.safetensors` are taken in the order of their names, hidden ones and others not.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] if a file is missing or may not be read, [`Error::NotAFile`] for a device, [`Error::NoShards`] for a
    /// folder without such files, [`Error::Empty`] for a file without tokens, [`Error::OddLength`] and [`Error::BadHeader`]
    /// if it contradicts its format, and [`Error::CutShort`] and [`Error::Read`] from taking the fingerprint.
    pub fn open_as(path: impl AsRef<Path>, format: Option<Format>) -> Result<Self> {
        let path = path.as_ref();
        let files = if path.is_dir() { files_of(path)? } else { vec![path.to_path_buf()] };
        let shards = files.iter().map(|file| Shard::open(file, format.as_ref())).collect::<Result<_>>()?;
        Ok(Self::new(path, shards))
    }

    fn new(path: &Path, shards: Vec<Shard>) -> Self {
        let mut firsts = vec![0];
        firsts.extend(shards.iter().scan(0, |tokens, shard| {
            *tokens += shard.tokens;
            Some(*tokens)
        }));
        let fingerprint = match &shards[..] {
            [only] => only.fingerprint,
            _ => shards.iter().fold(FNV_BASIS, |hash, shard| fnv1a(hash, &shard.fingerprint.to_le_bytes())),
        };
        Self { inner: Arc::new(Inner { path: path.to_path_buf(), shards, firsts, fingerprint }) }
    }

    /// The path that it was opened by.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// Its tokens, of all files.
    pub fn len(&self) -> u64 {
        self.inner.firsts[self.inner.shards.len()]
    }

    /// Whether it has no tokens. An open dataset always has some.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.inner.shards.iter().map(|shard| shard.file_bytes).sum()
    }

    /// What the order hangs on. Of a single raw file it is [`TokenFile::fingerprint`](crate::TokenFile::fingerprint), of
    /// many a hash of theirs.
    pub fn fingerprint(&self) -> u64 {
        self.inner.fingerprint
    }

    /// What a checkpoint keeps, to know the data again.
    pub fn identity(&self) -> Identity {
        let shards = self.inner.shards.iter().map(|shard| ShardIdentity {
            name: shard.path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            bytes: shard.file_bytes,
            fingerprint: format!("{:016x}", shard.fingerprint),
        });
        Identity { shards: shards.collect() }
    }

    /// Holds the dataset against what it was when a checkpoint was saved.
    ///
    /// # Errors
    ///
    /// [`Error::Changed`], which names the first file that differs.
    pub fn check_identity(&self, saved: &Identity) -> Result<()> {
        let found = self.identity();
        let changed = |path: &Path, what, expected: &dyn ToString, found: &dyn ToString| Error::Changed {
            path: path.to_path_buf(),
            since: "the checkpoint was saved",
            what,
            expected: expected.to_string(),
            found: found.to_string(),
        };
        for (shard, (saved, found)) in self.inner.shards.iter().zip(saved.shards.iter().zip(&found.shards)) {
            if saved.name != found.name {
                return Err(changed(&shard.path, "a file of the name", &saved.name, &found.name));
            }
            if saved.bytes != found.bytes {
                return Err(changed(&shard.path, "a length in bytes of", &saved.bytes, &found.bytes));
            }
            if saved.fingerprint != found.fingerprint {
                return Err(changed(&shard.path, "the fingerprint", &saved.fingerprint, &found.fingerprint));
            }
        }
        if saved.shards.len() != found.shards.len() {
            return Err(changed(self.path(), "files to be", &saved.shards.len(), &found.shards.len()));
        }
        Ok(())
    }

    /// Scans the first `most` tokens for one outside of the vocabulary, with a buffer of 512 KiB. What comes after them a
    /// [`Loader`](crate::Loader) checks as it reads, if it is told the vocabulary.
    ///
    /// # Errors
    ///
    /// [`Error::NotAToken`] with the first that is none of the vocabulary; [`Error::CutShort`] and [`Error::Read`].
    pub fn check_vocabulary(&self, vocabulary: usize, most: u64) -> Result<()> {
        const STEP: u64 = 64 << 10;
        let (mut inputs, mut targets) = (vec![0; STEP as usize], vec![0; STEP as usize]);
        let mut left = most;
        for shard in self.shards() {
            let end = shard.tokens.min(left);
            left -= end;
            // Pieces share a token with the next, as windows do; a file's only token is in no window.
            for first in (0..end).step_by(STEP as usize) {
                let last = (first + STEP + 1).min(shard.tokens);
                let count = (last - first - 1) as usize;
                if count == 0 {
                    break;
                }
                let offset = shard.offset + first * shard.encoding.bytes();
                let mut bytes = vec![0; ((last - first) * shard.encoding.bytes()) as usize];
                read_exact(&shard.path, &shard.file, offset, &mut bytes)?;
                shard.widen(
                    &bytes,
                    offset,
                    vocabulary as u64,
                    &mut inputs[..count],
                    &mut targets[..count],
                )?;
            }
        }
        Ok(())
    }

    /// The windows of `context` inputs over a range of the tokens.
    ///
    /// # Errors
    ///
    /// [`Error::BadContext`] for a context of 0, [`Error::OutOfRange`] if the range is reversed or reaches beyond the
    /// dataset, and [`Error::TooShort`] if no file has `context + 1` tokens in it.
    pub fn samples(&self, tokens: Range<u64>, context: usize) -> Result<Samples> {
        self.part(tokens, context, "range")
    }

    /// Cuts the tail off for validation: the windows of training, and those of validation unless the fraction is 0. The two
    /// share no token. Validation gets `validation_fraction` of the tokens, rounded down, but at least one window's.
    ///
    /// # Errors
    ///
    /// [`Error::BadFraction`] unless the fraction is in `[0, 1)`, and the errors of [`samples`](Self::samples), where
    /// [`Error::TooShort`] names the part that has too few tokens.
    pub fn split(&self, validation_fraction: f64, context: usize) -> Result<(Samples, Option<Samples>)> {
        if !(0.0..1.0).contains(&validation_fraction) {
            return Err(Error::BadFraction { fraction: validation_fraction });
        }
        let window = (context as u64).saturating_add(1);
        let tokens = match validation_fraction > 0.0 {
            true => ((self.len() as f64 * validation_fraction) as u64).max(window).min(self.len()),
            false => 0,
        };
        let cut = self.len() - tokens;
        let validation = match tokens {
            0 => None,
            _ => Some(self.part(cut..self.len(), context, "validation part")?),
        };
        Ok((self.part(0..cut, context, "training part")?, validation))
    }

    fn part(&self, tokens: Range<u64>, context: usize, part: &'static str) -> Result<Samples> {
        let path = || self.path().to_path_buf();
        if context == 0 {
            return Err(Error::BadContext { path: path() });
        }
        if tokens.start > tokens.end || tokens.end > self.len() {
            let (start, end) = (tokens.start, tokens.end);
            return Err(Error::OutOfRange { path: path(), start, end, tokens: self.len() });
        }
        let runs = self.inner.firsts.windows(2).enumerate().map(|(shard, firsts)| {
            let start = tokens.start.max(firsts[0]);
            Run {
                shard,
                first_token: start - firsts[0],
                tokens: tokens.end.min(firsts[1]).saturating_sub(start),
            }
        });
        let (longest, runs) = runs.fold((0, Vec::new()), |(longest, mut runs), run| {
            let longest = longest.max(run.tokens);
            if run.windows(context) > 0 {
                runs.push(run);
            }
            (longest, runs)
        });
        if runs.is_empty() {
            return Err(Error::TooShort {
                path: path(),
                part,
                start: tokens.start,
                end: tokens.end,
                tokens: self.len(),
                found: longest,
                needed: (context as u64).saturating_add(1),
                context,
            });
        }
        Ok(Samples { dataset: self.clone(), runs: runs.into(), context })
    }

    pub(crate) fn shards(&self) -> &[Shard] {
        &self.inner.shards
    }
}

/// Files of a folder that have tokens, by name.
fn files_of(folder: &Path) -> Result<Vec<PathBuf>> {
    let failed = |cause| Error::Open { path: folder.to_path_buf(), cause: Arc::new(cause) };
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if !hidden && path.extension().is_some_and(|ending| ENDINGS.iter().any(|known| ending == *known)) {
            files.push(path);
        }
    }
    files.sort_unstable();
    if files.is_empty() { Err(Error::NoShards { path: folder.to_path_buf() }) } else { Ok(files) }
}

/// Neighbouring tokens of one file.
#[derive(Clone, Copy, Debug)]
struct Run {
    shard: usize,
    /// Counted in the file.
    first_token: u64,
    tokens: u64,
}

impl Run {
    fn windows(&self, context: usize) -> u64 {
        self.tokens.saturating_sub(1) / context as u64
    }
}

/// The windows of a dataset, numbered through all of its files. A clone is cheap.
#[derive(Clone, Debug)]
pub struct Samples {
    dataset: Dataset,
    /// Each has a window.
    runs: Arc<[Run]>,
    context: usize,
}

/// Where a window lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place<'a> {
    /// The file.
    pub path: &'a Path,
    /// The window's tokens in it, one more than the context.
    pub tokens: Range<u64>,
}

impl Samples {
    /// The windows of a single raw file, as they are numbered there.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] if the system has no more handles of files.
    pub fn of(windows: &Windows) -> Result<Self> {
        let dataset = Dataset::new(windows.file().path(), vec![Shard::of(windows.file())?]);
        dataset.samples(windows.tokens(), windows.context())
    }

    /// Tokens of the range that the windows are of, those that are not used aside.
    pub fn tokens(&self) -> u64 {
        self.runs.iter().map(|run| run.tokens).sum()
    }

    /// How many windows there are, at least one.
    pub fn count(&self) -> u64 {
        self.runs.iter().map(|run| run.windows(self.context)).sum()
    }

    /// Inputs of one window.
    pub fn context(&self) -> usize {
        self.context
    }

    /// The dataset.
    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    /// Where a window is, if there is one of this number.
    pub fn place(&self, window: u64) -> Option<Place<'_>> {
        let mut left = window;
        for run in self.runs.iter() {
            let windows = run.windows(self.context);
            if left < windows {
                let start = run.first_token + left * self.context as u64;
                let path = &*self.dataset.shards()[run.shard].path;
                return Some(Place { path, tokens: start..start + self.context as u64 + 1 });
            }
            left -= windows;
        }
        None
    }

    /// Reads one window: its first `context` tokens into `inputs`, its last `context` into `targets`. For few windows; a
    /// [`Loader`](crate::Loader) is for many. After an error what the slices hold is unspecified.
    ///
    /// # Errors
    ///
    /// [`Error::BadSlice`] unless both slices have `context` elements, [`Error::NoSuchWindow`] for an index of
    /// [`count`](Self::count) or more, [`Error::CutShort`] and [`Error::Read`] if the file cannot be read as it was, and
    /// [`Error::NotAToken`] for a number that is none.
    pub fn read(&self, window: u64, inputs: &mut [u32], targets: &mut [i32]) -> Result<()> {
        for (slice, found) in [("inputs", inputs.len()), ("targets", targets.len())] {
            if found != self.context {
                return Err(Error::BadSlice { slice, expected: self.context, found });
            }
        }
        let layout = self.layout(Order::Random);
        if window >= layout.windows() {
            let path = self.dataset.path().to_path_buf();
            return Err(Error::NoSuchWindow { path, index: window, count: layout.windows() });
        }
        let span = layout.span(window);
        let (shard, range) = self.bytes_of(span.part, span.first_in_part, 1);
        let shard = &self.dataset.shards()[shard];
        let mut bytes = vec![0; (range.end - range.start) as usize];
        read_exact(&shard.path, &shard.file, range.start, &mut bytes)?;
        shard.widen(&bytes, range.start, u64::MAX, inputs, targets)
    }

    /// The blocks that an order reads.
    pub(crate) fn layout(&self, order: Order) -> Layout {
        let per_block = match order {
            Order::Random => 1,
            Order::Block(order) => order.block_bytes / (self.context as u64 * self.widest()),
        };
        Layout::new(self.runs.iter().map(|run| run.windows(self.context)), per_block)
    }

    /// Bytes of the widest token.
    fn widest(&self) -> u64 {
        self.runs.iter().map(|run| self.shard(run).encoding.bytes()).max().unwrap_or(1)
    }

    /// Bytes of `windows` neighbours at most.
    pub(crate) fn most_bytes(&self, windows: u64) -> u64 {
        // In 128 bits, since a context may be anything.
        let tokens = u128::from(windows) * self.context as u128 + 1;
        u64::try_from(tokens * u128::from(self.widest())).unwrap_or(u64::MAX)
    }

    /// The file of a run of the layout, and the bytes of some of its windows.
    pub(crate) fn bytes_of(&self, part: usize, first: u64, windows: u64) -> (usize, Range<u64>) {
        let (run, context) = (&self.runs[part], self.context as u64);
        let shard = self.shard(run);
        let start = shard.offset + (run.first_token + first * context) * shard.encoding.bytes();
        (run.shard, start..start + (windows * context + 1) * shard.encoding.bytes())
    }

    fn shard(&self, run: &Run) -> &Shard {
        &self.dataset.shards()[run.shard]
    }
}
