//! Datasets of token ids larger than memory: opened, split, shuffled, resumed and read ahead.
//!
//! [`Dataset`] opens a file of tokens, or a folder of them, in any [`Format`]: raw numbers, `.npy`, llm.c's shards,
//! Megatron's pairs, safetensors. [`Dataset::split`] cuts it into [`Samples`], windows of a fixed context, for training and
//! validation; a [`Loader`] reads batches of them ahead of the training loop, in an [`Order`].
//!
//! - **Order.** A function of the seed, the epoch and the data's fingerprint, and for blocks of [`BlockOrder`]; never of
//!   memory, threads, ranks or time. No index is kept, and the place in the data is one number, so resuming is exact and
//!   costs at most the blocks open there. Any number of ranks shares the samples out, and it may change at any time.
//! - **Reading.** Every read is a positional one into memory that the loader owns, and is held to the bytes it should
//!   bring. Nothing is read through a map, so a file cut short is an error: never a signal, never zeros. A file that
//!   is written to or replaced is noticed within 64 KiB of reads of it.
//! - **Memory.** A [`Loader`] takes a fixed amount at its start, within a limit in bytes that control groups set if the
//!   caller does not, and refuses to start where the order needs more. Nothing grows with the data.
//! - **Speed.** Where data is larger than the limit, reads go past the page cache, a whole block at a time and each block
//!   once an epoch; each sample is copied once, from there into its batch. [`LoaderReport`] says what was waited for.
//!
//! A [`MixtureLoader`] draws from several such datasets in the proportions of a [`Mixture`]; a [`DocumentLoader`] delivers
//! windows that hold whole [`Documents`], padded or packed.
//!
//! [`TokenFile`], [`Windows`], [`Sampler`] and [`Prefetcher`] are the same for one raw file of `u16` in random order, read
//! window by window; [`Samples::of`] takes such windows to a [`Loader`], whose random order is theirs. [`TokenWriter`]
//! writes such a file.
//!
//! This crate knows nothing of devices and tensors: it fills slices that its caller owns.
//!
//! ```
//! use ebbtide_loader::{BlockOrder, Dataset, Loader, LoaderOptions, LoaderState, Order, TokenWriter};
//!
//! # fn main() -> ebbtide_loader::Result<()> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let path = folder.path().join("train.bin");
//! let mut writer = TokenWriter::create(&path)?;
//! writer.write(&(0..10_000).collect::<Vec<u16>>())?;
//! assert_eq!(writer.finish()?, 10_000);
//!
//! let dataset = Dataset::open(&path)?;
//! let (training, validation) = dataset.split(0.1, 8)?;
//! assert_eq!((training.count(), validation.unwrap().count()), (1124, 124));
//!
//! // Batches of four samples, from the start of the data, within 1 MiB.
//! let order = Order::Block(BlockOrder { block_bytes: 4096, window_blocks: 8, streams: 2 });
//! let options =
//!     LoaderOptions { order, seed: 1337, batch: 4, ram_bytes: Some(1 << 20), ..LoaderOptions::default() };
//! let mut loader = Loader::new(&training, &options, LoaderState::default())?;
//! let first = loader.next()?;
//! assert_eq!((first.tokens.len(), first.targets[0] as u32), (4 * 8, first.tokens[1]));
//! loader.recycle(first);
//!
//! // The state is all that a resumed run needs. Its digest tells that both were given the same.
//! let mut resumed = Loader::new(&training, &options, loader.state())?;
//! assert_eq!(resumed.next()?, loader.next()?);
//! assert_eq!(resumed.state(), loader.state());
//! # Ok(())
//! # }
//! ```
//!
//! With a [`Prefetcher`]:
//!
//! ```
//! use ebbtide_loader::{PrefetchOptions, Prefetcher, Sampler, TokenFile, TokenWriter, split};
//!
//! # fn main() -> ebbtide_loader::Result<()> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let path = folder.path().join("train.bin");
//! let mut writer = TokenWriter::create(&path)?;
//! writer.write(&(0..1000).collect::<Vec<u16>>())?;
//! assert_eq!(writer.finish()?, 1000);
//!
//! let file = TokenFile::open(&path)?;
//! file.check_vocabulary(50257)?;
//! let (training, validation) = split(&file, 0.1, 8)?;
//! assert_eq!((training.count(), validation.unwrap().count()), (112, 12));
//!
//! // Batches of four samples, from the start of the data.
//! let sampler = Sampler::new(training, 1337);
//! let mut batches = Prefetcher::new(sampler.clone(), 4, 0, PrefetchOptions::default())?;
//! let first = batches.next()?;
//! assert_eq!(first.tokens.len(), 4 * 8);
//! // Each target is the token after its input.
//! assert_eq!(first.targets[0] as u32, first.tokens[1]);
//! let position = first.position;
//! batches.recycle(first);
//!
//! // The position is all that a resumed run needs.
//! let mut resumed = Prefetcher::new(sampler, 4, position, PrefetchOptions::default())?;
//! assert_eq!(resumed.next()?, batches.next()?);
//! # Ok(())
//! # }
//! ```

mod arena;
mod blocks;
mod dataset;
mod disk;
mod documents;
mod encoding;
mod error;
mod file;
mod format;
mod loader;
pub mod memory;
mod mixture;
mod order;
mod packed;
mod permutation;
mod prefetch;
mod probe;
mod records;
mod sampler;
mod shard;
mod shuffle;
mod sums;
mod windows;
mod writer;

pub use dataset::{Dataset, Identity, Place, Samples, ShardIdentity};
pub use disk::{IoMode, drop_from_cache};
pub use documents::{Boundary, DocumentBatch, DocumentLoader, DocumentState, Documents, Packing};
pub use encoding::Encoding;
pub use error::{Error, Result};
pub use file::TokenFile;
pub use format::Format;
pub use loader::{Loader, LoaderOptions, LoaderReport, LoaderState, order_of};
pub use mixture::{Draw, Draws, Mixture, MixtureBatch, MixtureLoader, MixtureState, Source};
pub use order::{BlockOrder, Order, Sample, Share};
pub use packed::{Number, PackedFile, PackedWriter, Records};
pub use permutation::Permutation;
pub use prefetch::{PrefetchOptions, Prefetcher, TokenBatch};
pub use probe::{Sequential, read_through};
pub use records::{Field, LastBatch, RecordBatch, RecordLoader, RecordOptions, RecordSet};
pub use sampler::Sampler;
pub use shuffle::{ShuffleReport, shuffle_report};
pub use sums::{Checksums, Damaged, SumsReport, make_sums};
pub use windows::{Windows, split};
pub use writer::TokenWriter;
