//! Datasets of token ids larger than memory: opened, split, shuffled, resumed and read ahead.
//!
//! A dataset is one file of little-endian `u16` token ids with no header, the format of nanoGPT's `.bin` files.
//! [`TokenWriter`] writes one, [`TokenFile`] opens it, [`split`] cuts it into [`Windows`] for training and validation, a
//! [`Sampler`] says which window sample number `s` is, and a [`Prefetcher`] reads batches ahead of the training loop.
//!
//! - **Order.** Sample `s` is element `s % n` of epoch `s / n`, and each epoch is a [`Permutation`] of the `n` windows
//!   that follows from the seed, the epoch and the file's fingerprint alone. No index is kept in memory, and the place
//!   in the data is one number, so resuming is exact and costs nothing.
//! - **Reading.** Tokens come by positional reads into slices of the caller. The file is mapped too, but only to tell
//!   the kernel which pages are wanted soon; the map is never read, so a file cut short is an error and not a signal.
//! - **Costs.** Open reads at most 256 KiB. A window is one read of `2 * (context + 1)` bytes. A [`Prefetcher`] holds
//!   what its [`PrefetchOptions`] allow; nothing else grows with the file.
//!
//! This crate knows nothing of devices and tensors: it fills slices that its caller owns.
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
mod encoding;
mod error;
mod file;
mod format;
mod loader;
pub mod memory;
mod order;
mod permutation;
mod prefetch;
mod probe;
mod sampler;
mod shard;
mod windows;
mod writer;

pub use dataset::{Dataset, Identity, Place, Samples, ShardIdentity};
pub use disk::{IoMode, drop_from_cache};
pub use encoding::Encoding;
pub use error::{Error, Result};
pub use file::TokenFile;
pub use format::Format;
pub use loader::{Loader, LoaderOptions, LoaderReport, LoaderState, order_of};
pub use order::{BlockOrder, Order, Sample, Share};
pub use permutation::Permutation;
pub use prefetch::{PrefetchOptions, Prefetcher, TokenBatch};
pub use probe::{Sequential, read_through};
pub use sampler::Sampler;
pub use windows::{Windows, split};
pub use writer::TokenWriter;
