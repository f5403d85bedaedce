//! Windows that hold whole documents: padded, or packed several to a window.
//!
//! A window of [`Samples`](crate::Samples) runs across documents. Here a target is always of its input's document: a
//! document of `n` tokens gives `n - 1` pairs of an input and its target, and each pair comes once an epoch. A document of
//! more pairs than the context is cut into pieces; a shorter one is one piece.
//!
//! The tokens are cut into blocks, each moved to the next start of a document within a context's reach, so that no document
//! that fits a window is cut in two; where there is none the document is longer than that, and is cut at the block's edge.
//! An epoch reads the blocks in the order of a [`Permutation`], as many at a time as the window of the order has. The
//! pieces of these blocks, a chapter, are shuffled together and put into windows one after another. Nothing of a chapter
//! goes into the next, so a run goes on anywhere by reading one chapter again; no index of the documents is made.
//!
//! Packing is first fit over a bounded number of open windows: a piece goes into the first that has room; if none has, a
//! new one is opened, and the oldest is delivered where there would be too many. A full window is delivered at once.
//!
//! Costs: a chapter's blocks in memory, 24 bytes for each of its pieces, and the batches ahead. Every rank reads all blocks,
//! since which windows they make is known only once they are read.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::arena::{self, Slot};
use crate::disk::{Disk, IoMode};
use crate::file::read_exact;
use crate::format::document_starts;
use crate::loader::LoaderOptions;
use crate::memory;
use crate::order::{BlockOrder, Order, Share};
use crate::permutation::mix;
use crate::prefetch::TokenBatch;
use crate::shard::Shard;
use crate::sums::{Checksums, Damaged};
use crate::{Dataset, Error, Permutation, Result};

/// The target where there is none, which losses ignore.
const NO_TARGET: i32 = -100;
/// Keeps the order of a chapter's pieces apart from that of the blocks.
const PIECE_TAG: u64 = 0x6562_6274_6964_6506;
/// Tokens that are searched at a time.
const SEARCH_TOKENS: u64 = 64 << 10;

/// What separates documents. A file's first token begins one, and its last token ends one, in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Boundary {
    /// Every document ends with this token, which is its last: nanoGPT's files.
    Ends(u32),
    /// Every document begins with this token: llm.c's files.
    Begins(u32),
    /// The index of the format, which Megatron's has.
    Index,
}

/// How windows are made of documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Packing {
    /// One document a window, or a piece of one, and padding after it.
    Padded,
    /// As many as fit, with this many windows open at a time: 64, say.
    FirstFit(u32),
}

/// The documents of a range of a dataset's tokens.
#[derive(Clone, Debug)]
pub struct Documents {
    dataset: Dataset,
    boundary: Boundary,
    context: usize,
    runs: Arc<[Run]>,
}

/// Neighbouring tokens of one file, counted there.
#[derive(Clone, Debug)]
struct Run {
    shard: usize,
    tokens: Range<u64>,
}

impl Documents {
    /// The documents of a range of tokens, for windows of `context` inputs. Where the range begins or ends within a
    /// document, the rest of it is taken for one.
    ///
    /// # Errors
    ///
    /// [`Error::BadContext`] for a context of 0, [`Error::OutOfRange`] if the range is reversed or reaches beyond the
    /// dataset, and [`Error::BadDocuments`] for a file without the index that [`Boundary::Index`] asks for, or if the range
    /// has no two tokens of a file.
    pub fn new(dataset: &Dataset, tokens: Range<u64>, context: usize, boundary: Boundary) -> Result<Self> {
        let path = || dataset.path().to_path_buf();
        if context == 0 {
            return Err(Error::BadContext { path: path() });
        }
        if tokens.start > tokens.end || tokens.end > dataset.len() {
            let (start, end) = (tokens.start, tokens.end);
            return Err(Error::OutOfRange { path: path(), start, end, tokens: dataset.len() });
        }
        let mut first = 0;
        let mut runs = Vec::new();
        for (index, shard) in dataset.shards().iter().enumerate() {
            let (start, end) = (tokens.start.max(first), tokens.end.min(first + shard.tokens));
            if start < end {
                if boundary == Boundary::Index && shard.index.is_none() {
                    let (expected, found) =
                        ("an index of the format, as Megatron's".to_owned(), "none".to_owned());
                    return Err(Error::BadDocuments { path: shard.path.clone(), expected, found });
                }
                runs.push(Run { shard: index, tokens: start - first..end - first });
            }
            first += shard.tokens;
        }
        if !runs.iter().any(|run| run.tokens.end - run.tokens.start > 1) {
            let expected = "a file with two tokens at least".to_owned();
            let found = format!("tokens {}..{}", tokens.start, tokens.end);
            return Err(Error::BadDocuments { path: path(), expected, found });
        }
        Ok(Self { dataset: dataset.clone(), boundary, context, runs: runs.into() })
    }

    /// Cuts the tail off for validation, at the start of a document: the documents of training, and those of validation
    /// unless the fraction is 0. Validation gets at most `validation_fraction` of the tokens, but at least the last
    /// document: what begins at the first start of one in that last part of the tokens.
    ///
    /// # Errors
    ///
    /// [`Error::BadFraction`] unless the fraction is in `[0, 1)`, [`Error::BadDocuments`] if no document begins in the
    /// validation part, and the errors of [`new`](Self::new) and of reading.
    pub fn split(
        dataset: &Dataset,
        validation_fraction: f64,
        context: usize,
        boundary: Boundary,
    ) -> Result<(Self, Option<Self>)> {
        if !(0.0..1.0).contains(&validation_fraction) {
            return Err(Error::BadFraction { fraction: validation_fraction });
        }
        let all = Self::new(dataset, 0..dataset.len(), context, boundary)?;
        if validation_fraction == 0.0 {
            return Ok((all, None));
        }
        let from =
            dataset.len() - ((dataset.len() as f64 * validation_fraction) as u64).min(dataset.len() - 1);
        let mut first = 0;
        for run in all.runs.iter() {
            let shard = &dataset.shards()[run.shard];
            let mut at = from.saturating_sub(first).max(u64::from(first == 0));
            while at < shard.tokens {
                let end = (at + SEARCH_TOKENS).min(shard.tokens);
                if let Some(&cut) = all.starts(run, at..end)?.first() {
                    let cut = first + cut;
                    let training = Self::new(dataset, 0..cut, context, boundary)?;
                    let validation = Self::new(dataset, cut..dataset.len(), context, boundary)?;
                    return Ok((training, Some(validation)));
                }
                at = end;
            }
            first += shard.tokens;
        }
        let expected = format!("one that begins at token {from} or after it, for validation");
        Err(Error::BadDocuments { path: dataset.path().to_path_buf(), expected, found: "none".to_owned() })
    }

    /// The dataset.
    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    /// Inputs of a window.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Tokens of the range, those included that are in no pair.
    pub fn tokens(&self) -> u64 {
        self.runs.iter().map(|run| run.tokens.end - run.tokens.start).sum()
    }

    /// The documents that begin in a range of a run's tokens, which are read from the file: their first tokens.
    fn starts(&self, run: &Run, range: Range<u64>) -> Result<Vec<u64>> {
        let shard = &self.dataset.shards()[run.shard];
        let from = self.seen_from(run, range.start);
        let mut bytes = vec![0; ((range.end - from) * shard.encoding.bytes()) as usize];
        read_exact(&shard.path, &shard.file, shard.offset + from * shard.encoding.bytes(), &mut bytes)?;
        self.starts_in(run, range, &bytes, from)
    }

    /// The first token that has to be seen to know whether a document begins at `token`.
    fn seen_from(&self, run: &Run, token: u64) -> u64 {
        match self.boundary {
            Boundary::Ends(_) => token.saturating_sub(1).max(run.tokens.start),
            _ => token,
        }
    }

    /// The documents that begin in a range of a run's tokens: their first tokens. `bytes` are the file's tokens from
    /// `from` on.
    fn starts_in(&self, run: &Run, range: Range<u64>, bytes: &[u8], from: u64) -> Result<Vec<u64>> {
        let shard = &self.dataset.shards()[run.shard];
        let (separator, behind) = match self.boundary {
            Boundary::Ends(token) => (token, 1),
            Boundary::Begins(token) => (token, 0),
            Boundary::Index => {
                let Some((path, file)) = &shard.index else { return Ok(Vec::new()) };
                let mut starts = document_starts(path, file, range.clone(), shard.encoding.bytes())?;
                if range.contains(&run.tokens.start) && starts.first() != Some(&run.tokens.start) {
                    starts.insert(0, run.tokens.start);
                }
                return Ok(starts);
            }
        };
        let mut starts = Vec::new();
        if range.contains(&run.tokens.start) {
            starts.push(run.tokens.start);
        }
        let (mut tokens, mut unused) = (vec![0; SEARCH_TOKENS as usize], vec![0; SEARCH_TOKENS as usize]);
        let width = shard.encoding.bytes();
        let last = range.end.saturating_sub(behind);
        let mut at = from;
        while at < last {
            let count = (last - at).min(SEARCH_TOKENS) as usize;
            let piece = &bytes[((at - from) * width) as usize..][..count * width as usize];
            let offset = shard.offset + at * width;
            shard.widen(piece, offset, u64::MAX, &mut tokens[..count], &mut unused[..count - 1])?;
            let found = (at..).zip(&tokens[..count]).filter(|&(_, &token)| token == separator);
            let found = found.map(|(index, _)| index + behind);
            starts.extend(found.filter(|start| range.contains(start) && *start != run.tokens.start));
            at += count as u64;
        }
        Ok(starts)
    }
}

/// Where a run is in its documents: all that it needs to go on, beside its options.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DocumentState {
    /// The epoch.
    pub epoch: u64,
    /// The chapter of it: so many times the blocks of the order's window.
    pub chapter: u64,
    /// Windows of the chapter that were delivered.
    pub window: u64,
    /// Windows delivered in all, to all ranks.
    pub position: u64,
    /// The sum, modulo 2^64, of a hash of each window delivered to this rank: of its tokens as they are stored, of where
    /// its documents begin, and of its position. The sum over ranks is that of a run of one.
    pub digest: u64,
}

/// A batch of windows of documents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DocumentBatch {
    /// Inputs and targets, `[batch, context]`. After a window's last document inputs are 0 and targets -100, which a loss
    /// ignores.
    pub batch: TokenBatch,
    /// Where segments begin in the batch's `batch * context` inputs, and their end: from 0 on, rising. A segment is a
    /// document, a piece of one, or the padding of a window, if there is any.
    pub cu_seqlens: Vec<u32>,
    /// For each window its inputs that are no padding.
    pub valid: Vec<u32>,
}

/// Delivers windows of documents, from a position on, reading a chapter at a time on a thread of its own.
///
/// ```
/// use ebbtide_loader::{
///     Boundary, Dataset, DocumentLoader, DocumentState, Documents, LoaderOptions, Packing, TokenWriter,
/// };
///
/// # fn main() -> ebbtide_loader::Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("train.bin");
/// let mut writer = TokenWriter::create(&path)?;
/// // Documents of three, two and four tokens, with their last.
/// writer.write(&[11, 12, 0, 21, 0, 31, 32, 33, 0])?;
/// writer.finish()?;
///
/// let dataset = Dataset::open(&path)?;
/// let documents = Documents::new(&dataset, 0..dataset.len(), 3, Boundary::Ends(0))?;
/// let options = LoaderOptions { batch: 2, ram_bytes: Some(64 << 20), ..LoaderOptions::default() };
/// let packing = Packing::FirstFit(64);
/// let mut loader = DocumentLoader::new(&documents, packing, &options, DocumentState::default())?;
///
/// // Two pairs, one and three fill two windows of three.
/// let first = loader.next()?;
/// assert_eq!((&first.valid[..], first.cu_seqlens.len()), (&[3, 3][..], 4));
///
/// let mut resumed = DocumentLoader::new(&documents, packing, &options, loader.state())?;
/// assert_eq!(resumed.next()?, loader.next()?);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DocumentLoader {
    /// Taken when dropped, so that the thread ends.
    batches: Option<Receiver<Result<(DocumentBatch, DocumentState)>>>,
    thread: Option<JoinHandle<()>>,
    state: DocumentState,
    failed: Option<Error>,
    documents: Documents,
}

impl DocumentLoader {
    /// Begins to read, from where a run is. Of the options, `order` says how many blocks of how many bytes a chapter has
    /// (the default block order's for the random one); `threads` is not used.
    ///
    /// # Errors
    ///
    /// [`Error::BadOrder`], [`Error::BadShare`] and [`Error::BadBatch`] for options that cannot be,
    /// [`Error::MemoryTooSmall`] if the limit does not hold a chapter's blocks and two batches, [`Error::NoMemory`] if the
    /// system does not, and [`Error::Start`] if it cannot start the thread.
    pub fn new(
        documents: &Documents,
        packing: Packing,
        options: &LoaderOptions,
        state: DocumentState,
    ) -> Result<Self> {
        options.order.check()?;
        options.share.check()?;
        if let Packing::FirstFit(0) = packing {
            return Err(Error::BadOrder { what: "open windows", found: 0, most: u32::MAX.into() });
        }
        let (batch, context) = (options.batch, documents.context);
        let tokens = batch.checked_mul(context).filter(|&tokens| u32::try_from(tokens).is_ok() && tokens > 0);
        let tokens = tokens.ok_or(Error::BadBatch { batch, context })?;
        let order = match options.order {
            Order::Random => BlockOrder::default(),
            Order::Block(order) => order,
        };
        let blocks = Blocks::new(documents, order);
        let slots = u64::from(order.window_blocks).min(blocks.count());
        let slot_bytes = Disk::slot_bytes(blocks.most_bytes(documents));
        let batch_bytes = 12 * tokens as u64;
        let limit = match options.ram_bytes {
            Some(bytes) => memory::MemoryLimit { bytes, source: "as asked for".to_owned() },
            None => {
                let memory::MemoryLimit { bytes, source } = memory::available();
                memory::MemoryLimit { bytes: bytes / 2, source: format!("half of what is left: {source}") }
            }
        };
        let ahead = options.batches_ahead.max(1) as u64;
        let bytes_of = |ahead: u64| {
            u128::from(slots) * u128::from(slot_bytes) + u128::from(ahead + 1) * u128::from(batch_bytes)
        };
        if bytes_of(1) > limit.bytes.into() {
            return Err(Error::MemoryTooSmall {
                needed: u64::try_from(bytes_of(1)).unwrap_or(u64::MAX),
                blocks: slots,
                block_bytes: slot_bytes,
                batches: 2,
                batch_bytes,
                limit: limit.bytes,
                source_of_limit: limit.source,
            });
        }
        let ahead = (1..=ahead).rev().find(|&ahead| bytes_of(ahead) <= limit.bytes.into()).unwrap_or(1);
        let mode = options.io.unwrap_or(match documents.dataset.bytes() > limit.bytes {
            true => IoMode::Direct,
            false => IoMode::Cached,
        });
        let maker = Maker {
            documents: documents.clone(),
            packing,
            seed: options.seed,
            fingerprint: options.fingerprint.unwrap_or_else(|| documents.dataset.fingerprint()),
            share: options.share,
            batch,
            vocabulary: options.vocabulary.map_or(u64::MAX, |vocabulary| vocabulary as u64),
            chapter_blocks: slots,
            blocks,
            disk: Disk::new(documents.dataset.clone(), mode, &Checksums::default(), Damaged::Stop)?,
            slots: arena::slots(slots as usize, slot_bytes as usize)?,
        };
        // One more is in the thread's hands.
        let (sender, batches) = sync_channel((ahead - 1) as usize);
        let thread = std::thread::Builder::new().name("ebbtide-documents".to_owned());
        let thread = thread.spawn(move || maker.run(state, &sender));
        let thread = thread.map_err(|cause| Error::Start { cause: Arc::new(cause) })?;
        let documents = documents.clone();
        Ok(Self { batches: Some(batches), thread: Some(thread), state, failed: None, documents })
    }

    /// The next batch; blocks until it is there.
    ///
    /// # Errors
    ///
    /// [`Error::CutShort`], [`Error::Changed`] and [`Error::Read`] if a file cannot be read as it was,
    /// [`Error::NotAToken`] for a number that is none, or none of the vocabulary, [`Error::BadDocuments`] if no document
    /// has two tokens, [`Error::BadPosition`] if a count leaves 64 bits and [`Error::NoMemory`] if a batch cannot be
    /// allocated. After an error every call gives it again.
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator of results would invite `collect` on an endless one"
    )]
    pub fn next(&mut self) -> Result<DocumentBatch> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let received = self.batches.as_ref().and_then(|batches| batches.recv().ok());
        let stopped = || Error::Stopped { path: self.documents.dataset.path().to_path_buf() };
        match received.unwrap_or_else(|| Err(stopped())) {
            Ok((batch, state)) => {
                let digest = self.state.digest.wrapping_add(state.digest);
                self.state = DocumentState { digest, ..state };
                Ok(batch)
            }
            Err(error) => {
                self.failed = Some(error.clone());
                Err(error)
            }
        }
    }

    /// Where the run is, once all batches that were taken are used.
    pub fn state(&self) -> DocumentState {
        self.state
    }
}

impl Drop for DocumentLoader {
    fn drop(&mut self) {
        drop(self.batches.take());
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

/// The blocks of all runs.
#[derive(Debug)]
struct Blocks {
    /// For each run the blocks before it, and all of them at the end.
    firsts: Vec<u64>,
    /// For each run the tokens of a block.
    tokens: Vec<u64>,
}

/// A block: where it would be cut, and where the next one would.
#[derive(Clone, Copy, Debug)]
struct Block {
    run: usize,
    start: u64,
    end: u64,
}

impl Blocks {
    fn new(documents: &Documents, order: BlockOrder) -> Self {
        let shard = |run: &Run| &documents.dataset.shards()[run.shard];
        // More than a context, or a block could end before it begins.
        let least = documents.context as u64 + 1;
        let block_tokens = |run: &Run| (order.block_bytes / shard(run).encoding.bytes()).max(least);
        let tokens: Vec<_> = documents.runs.iter().map(block_tokens).collect();
        let mut firsts = vec![0];
        for (run, tokens) in documents.runs.iter().zip(&tokens) {
            firsts.push(firsts[firsts.len() - 1] + (run.tokens.end - run.tokens.start).div_ceil(*tokens));
        }
        Self { firsts, tokens }
    }

    fn count(&self) -> u64 {
        self.firsts[self.firsts.len() - 1]
    }

    /// Bytes that are read for a block, at most.
    fn most_bytes(&self, documents: &Documents) -> u64 {
        let bytes = documents.runs.iter().zip(&self.tokens).map(|(run, tokens)| {
            let read =
                tokens.saturating_add(documents.context as u64 + 2).min(run.tokens.end - run.tokens.start);
            read.saturating_mul(documents.dataset.shards()[run.shard].encoding.bytes())
        });
        bytes.max().unwrap_or(0)
    }

    fn block(&self, documents: &Documents, block: u64) -> Block {
        let run = self.firsts.partition_point(|&first| first <= block) - 1;
        let tokens = &documents.runs[run].tokens;
        let start = tokens.start + (block - self.firsts[run]) * self.tokens[run];
        Block { run, start, end: tokens.end.min(start.saturating_add(self.tokens[run])) }
    }
}

/// A document, or a part of one that fits a window.
#[derive(Clone, Copy, Debug)]
struct Piece {
    /// The slot that its block is in.
    slot: u32,
    pairs: u32,
    /// Its first token in the file.
    first: u64,
}

/// A block in its slot.
#[derive(Clone, Copy, Debug)]
struct Loaded {
    run: usize,
    /// Where in the slot its bytes begin, and which token of the file that is.
    skip: usize,
    from: u64,
}

/// A window in the making.
#[derive(Clone, Debug, Default)]
struct Window {
    pieces: Vec<Piece>,
    pairs: u64,
}

/// Puts pieces into windows.
struct Packer<I> {
    pieces: I,
    context: u64,
    most_open: usize,
    open: VecDeque<Window>,
}

impl<I: Iterator<Item = Piece>> Iterator for Packer<I> {
    type Item = Window;

    fn next(&mut self) -> Option<Window> {
        for piece in self.pieces.by_ref() {
            let pairs = u64::from(piece.pairs);
            let fits = self.open.iter().position(|window| window.pairs + pairs <= self.context);
            let at = fits.unwrap_or(self.open.len());
            if at == self.open.len() {
                self.open.push_back(Window::default());
            }
            self.open[at].pieces.push(piece);
            self.open[at].pairs += pairs;
            if self.open[at].pairs == self.context {
                return self.open.remove(at);
            }
            if self.open.len() > self.most_open {
                return self.open.pop_front();
            }
        }
        self.open.pop_front()
    }
}

/// Makes batches, on a thread.
#[derive(Debug)]
struct Maker {
    documents: Documents,
    packing: Packing,
    seed: u64,
    fingerprint: u64,
    share: Share,
    batch: usize,
    vocabulary: u64,
    chapter_blocks: u64,
    blocks: Blocks,
    disk: Disk,
    slots: Vec<Slot>,
}

/// A batch in the making.
struct Making {
    batch: DocumentBatch,
    digest: u64,
}

impl Maker {
    fn run(mut self, state: DocumentState, sender: &SyncSender<Result<(DocumentBatch, DocumentState)>>) {
        if let Err(error) = self.make(state, sender) {
            // Nobody may be there to hear of it.
            let _ = sender.send(Err(error));
        }
    }

    /// Makes batches until nobody takes them.
    fn make(
        &mut self,
        mut state: DocumentState,
        sender: &SyncSender<Result<(DocumentBatch, DocumentState)>>,
    ) -> Result<()> {
        let chapters = self.blocks.count().div_ceil(self.chapter_blocks);
        let windows = self.batch as u64;
        let group = windows.checked_mul(self.share.world);
        let mut left = group.ok_or(Error::BadPosition { position: state.position, batch: self.batch })?;
        let group = left;
        let mut making = self.begin()?;
        // Whether this epoch has a window, as far as it is known.
        let mut any = state.chapter > 0 || state.window > 0;
        loop {
            let (pieces, loaded) = self.load(state.epoch, state.chapter)?;
            let order = Permutation::new(
                pieces.len() as u64,
                self.seed ^ PIECE_TAG,
                state.epoch,
                mix(self.fingerprint ^ mix(state.chapter)),
            );
            let packer = Packer {
                pieces: (0..pieces.len() as u64).map(|at| pieces[order.get(at) as usize]),
                context: self.documents.context as u64,
                most_open: match self.packing {
                    Packing::Padded => 0,
                    Packing::FirstFit(open) => open as usize,
                },
                open: VecDeque::new(),
            };
            for window in packer.skip(state.window as usize) {
                any = true;
                if state.position % self.share.world == self.share.rank {
                    self.copy(&window, &loaded, state.position, &mut making)?;
                }
                let position = state.position.checked_add(1);
                state.position =
                    position.ok_or(Error::BadPosition { position: state.position, batch: self.batch })?;
                state.window += 1;
                left -= 1;
                if left == 0 {
                    let Making { mut batch, digest } = making;
                    batch.batch.position = state.position;
                    if sender.send(Ok((batch, DocumentState { digest, ..state }))).is_err() {
                        return Ok(());
                    }
                    making = self.begin()?;
                    left = group;
                }
            }
            (state.chapter, state.window) = (state.chapter + 1, 0);
            if state.chapter >= chapters {
                if !any {
                    let path = self.documents.dataset.path().to_path_buf();
                    let (expected, found) = ("one of two tokens at least", "none");
                    return Err(Error::BadDocuments { path, expected: expected.into(), found: found.into() });
                }
                let epoch = state.epoch.checked_add(1);
                state.epoch =
                    epoch.ok_or(Error::BadPosition { position: state.position, batch: self.batch })?;
                (state.chapter, any) = (0, false);
            }
        }
    }

    /// An empty batch, with room for all of it.
    fn begin(&self) -> Result<Making> {
        let (windows, context) = (self.batch, self.documents.context);
        let mut batch = DocumentBatch::default();
        let tokens = windows * context;
        let reserved = batch.batch.tokens.try_reserve_exact(tokens).is_ok()
            && batch.batch.targets.try_reserve_exact(tokens).is_ok();
        if !reserved {
            return Err(Error::NoMemory { bytes: tokens.saturating_mul(8) });
        }
        (batch.batch.batch, batch.batch.context) = (windows, context);
        batch.cu_seqlens.push(0);
        Ok(Making { batch, digest: 0 })
    }

    /// Reads a chapter's blocks into the slots, and finds their pieces.
    fn load(&mut self, epoch: u64, chapter: u64) -> Result<(Vec<Piece>, Vec<Loaded>)> {
        let order = Permutation::new(self.blocks.count(), self.seed, epoch, self.fingerprint);
        let first = chapter.saturating_mul(self.chapter_blocks).min(self.blocks.count());
        let places = first..self.blocks.count().min(first + self.chapter_blocks);
        let (mut pieces, mut all) = (Vec::new(), Vec::new());
        for (slot, place) in (0u32..).zip(places) {
            let block = self.blocks.block(&self.documents, order.get(place));
            let run = &self.documents.runs[block.run];
            let shard = &self.documents.dataset.shards()[run.shard];
            let from = self.documents.seen_from(run, block.start);
            let to = run.tokens.end.min(block.end.saturating_add(self.documents.context as u64 + 1));
            let width = shard.encoding.bytes();
            let range = shard.offset + from * width..shard.offset + to * width;
            let bytes = (range.end - range.start) as usize;
            let brought = self.disk.read(run.shard, range, &mut self.slots[slot as usize])?;
            let loaded = Loaded { run: block.run, skip: brought.skip, from };
            let bytes = &self.slots[slot as usize][loaded.skip..][..bytes];
            let starts = self.documents.starts_in(run, block.start..to, bytes, from)?;
            self.cut(block, &starts, slot, &mut pieces);
            all.push(loaded);
        }
        Ok((pieces, all))
    }

    /// Where a block that would begin at `at` does, and whether a document does: the first start within reach, if there is
    /// one. The end of the run is as good.
    fn edge(&self, run: &Run, at: u64, starts: &[u64]) -> (u64, bool) {
        let last = at.saturating_add(self.documents.context as u64);
        let start = starts[starts.partition_point(|&start| start < at)..].first().copied();
        let start = start.unwrap_or(u64::MAX).min(run.tokens.end);
        if start <= last { (start, true) } else { (at, false) }
    }

    /// The pieces of a block.
    fn cut(&self, block: Block, starts: &[u64], slot: u32, pieces: &mut Vec<Piece>) {
        let run = &self.documents.runs[block.run];
        let (start, _) = self.edge(run, block.start, starts);
        let (end, whole) = self.edge(run, block.end, starts);
        let within = starts.iter().copied().filter(|&first| first > start && first < end);
        let context = self.documents.context as u64;
        let mut first = start;
        for next in within.chain([end]) {
            // The last token of a document is no input. One that goes on in the next block has its target there.
            let goes_on = u64::from(next == end && !whole);
            let inputs = first..(next + goes_on).saturating_sub(1);
            let cuts = inputs.clone().step_by(context as usize);
            pieces.extend(cuts.map(|first| {
                let pairs = context.min(inputs.end - first) as u32;
                Piece { slot, pairs, first }
            }));
            first = next;
        }
    }

    /// Copies a window into a batch.
    fn copy(&self, window: &Window, loaded: &[Loaded], position: u64, making: &mut Making) -> Result<()> {
        let Making { batch, digest } = making;
        let context = self.documents.context;
        let (tokens, targets) = (&mut batch.batch.tokens, &mut batch.batch.targets);
        let begin = tokens.len();
        for piece in &window.pieces {
            let block = loaded[piece.slot as usize];
            let shard: &Shard = &self.documents.dataset.shards()[self.documents.runs[block.run].shard];
            let width = shard.encoding.bytes();
            let at = block.skip + ((piece.first - block.from) * width) as usize;
            let pairs = piece.pairs as usize;
            let bytes = &self.slots[piece.slot as usize][at..][..(pairs + 1) * width as usize];
            let place = tokens.len();
            tokens.resize(place + pairs, 0);
            targets.resize(place + pairs, 0);
            let offset = shard.offset + piece.first * width;
            shard.widen(bytes, offset, self.vocabulary, &mut tokens[place..], &mut targets[place..])?;
            let seed = mix(position) ^ (place - begin) as u64;
            *digest = digest.wrapping_add(xxh3_64_with_seed(bytes, seed));
            batch.cu_seqlens.push(tokens.len() as u32);
        }
        batch.valid.push((tokens.len() - begin) as u32);
        if tokens.len() < begin + context {
            tokens.resize(begin + context, 0);
            targets.resize(begin + context, NO_TARGET);
            batch.cu_seqlens.push(tokens.len() as u32);
        }
        Ok(())
    }
}
