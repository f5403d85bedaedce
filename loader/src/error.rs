//! What can go wrong with a dataset.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// Result of the loader.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the loader. Fields hold the facts; the message names them all.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// A token file cannot be opened: it is missing, say, or may not be read.
    #[error("{}: cannot open the token file: {cause}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: Arc<io::Error>,
    },
    /// A path leads to something that is no regular file.
    #[error("{}: expected a file of tokens, found {found}", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
        /// What is there.
        found: &'static str,
    },
    /// A token file ends in the middle of a token.
    #[error("{}: expected two bytes a token, found an odd length of {bytes} bytes", path.display())]
    OddLength {
        /// The file.
        path: PathBuf,
        /// Its bytes.
        bytes: u64,
    },
    /// A token file without tokens: none was found, or none was written.
    #[error("{}: expected at least one token, found none", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// A token file is shorter than it was when it was opened.
    #[error(
        "{}: cut short since it was opened: expected {expected} bytes at byte offset {offset}, found {found}",
        path.display()
    )]
    CutShort {
        /// The file.
        path: PathBuf,
        /// Where the read began, in bytes.
        offset: u64,
        /// The bytes to read.
        expected: u64,
        /// The bytes that were there.
        found: u64,
    },
    /// The system failed to read a token file.
    #[error("{}: cannot read {expected} bytes at byte offset {offset}: {cause}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Where the read began, in bytes.
        offset: u64,
        /// The bytes to read.
        expected: u64,
        /// What the system said.
        cause: Arc<io::Error>,
    },
    /// A token id lies outside of the vocabulary.
    #[error(
        "{}: token {index} at byte offset {offset} is {value}, expected less than the vocabulary of {vocabulary}",
        path.display()
    )]
    BadToken {
        /// The file.
        path: PathBuf,
        /// The token's index in the file.
        index: u64,
        /// Its place in bytes.
        offset: u64,
        /// Its id.
        value: u16,
        /// The vocabulary's size.
        vocabulary: usize,
    },
    /// A range of tokens is reversed or reaches beyond its file.
    #[error("{}: tokens {start}..{end} lie outside of the file's {tokens}", path.display())]
    OutOfRange {
        /// The file.
        path: PathBuf,
        /// The first token.
        start: u64,
        /// One past the last.
        end: u64,
        /// The tokens of the file.
        tokens: u64,
    },
    /// A range has too few tokens for one window.
    #[error(
        "{}: the {part} (tokens {start}..{end} of {tokens}) has {found} tokens, a window needs {needed}: \
         a context of {context} and the token after it",
        path.display()
    )]
    TooShort {
        /// The file.
        path: PathBuf,
        /// What the range is: "training part", say.
        part: &'static str,
        /// The range's first token.
        start: u64,
        /// One past its last.
        end: u64,
        /// The tokens of the file.
        tokens: u64,
        /// The tokens of the range.
        found: u64,
        /// The tokens of one window.
        needed: u64,
        /// The context.
        context: usize,
    },
    /// A context of no tokens.
    #[error("{}: expected a context of at least one token, found 0", path.display())]
    BadContext {
        /// The file.
        path: PathBuf,
    },
    /// An index beyond the last window.
    #[error("{}: expected the index of one of {count} windows, found {index}", path.display())]
    NoSuchWindow {
        /// The file.
        path: PathBuf,
        /// The index.
        index: u64,
        /// The windows there are.
        count: u64,
    },
    /// A slice to read a window into is not as long as the context.
    #[error("`{slice}` should have the context's {expected} elements, has {found}")]
    BadSlice {
        /// The slice's name.
        slice: &'static str,
        /// The context.
        expected: usize,
        /// The slice's length.
        found: usize,
    },
    /// A validation fraction outside of `[0, 1)`.
    #[error("expected a validation fraction of at least 0 and below 1, found {fraction}")]
    BadFraction {
        /// The fraction.
        fraction: f64,
    },
    /// Arrays that are to lie side by side have different numbers of records.
    #[error(
        "{}: expected {expected} records, as {} has, found {records}", path.display(), other.display()
    )]
    Unequal {
        /// The array that differs.
        path: PathBuf,
        /// Its records.
        records: u64,
        /// The first array.
        other: PathBuf,
        /// Its records.
        expected: u64,
    },
    /// Batches that no epoch has.
    #[error(
        "{}: expected batches of at least one and, for {world} ranks together, at most {records} records, found {batch}",
        path.display()
    )]
    NoBatch {
        /// The first array.
        path: PathBuf,
        /// Records of a batch of one rank.
        batch: usize,
        /// The ranks.
        world: u64,
        /// The records there are.
        records: u64,
    },
    /// A batch of no samples, or of more bytes than can be addressed.
    #[error(
        "expected a batch of at least one sample whose bytes can be addressed, found {batch} of {context} tokens"
    )]
    BadBatch {
        /// The samples of a batch.
        batch: usize,
        /// The context.
        context: usize,
    },
    /// Samples are counted in 64 bits, and the count ran out.
    #[error("expected a position below 2^64 after a batch of {batch}, found {position} before it")]
    BadPosition {
        /// Samples before the batch.
        position: u64,
        /// Samples of the batch.
        batch: usize,
    },
    /// A field of a file's header that the file itself, or the format, contradicts.
    #[error("{}: {field} at byte offset {offset}: expected {expected}, found {found}", path.display())]
    BadHeader {
        /// The file.
        path: PathBuf,
        /// The field's place, in bytes.
        offset: u64,
        /// The field.
        field: &'static str,
        /// What it should be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// A page of a file is not what it was when its checksum was made.
    #[error(
        "{}: page {page} of 4096 bytes at byte offset {offset} is damaged: expected the checksum {expected:08x}, found \
         {found:08x}",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where the page begins, in bytes.
        offset: u64,
        /// Its number.
        page: u64,
        /// Its checksum when that was made.
        expected: u32,
        /// Its checksum now.
        found: u32,
    },
    /// Checksums of a file cannot be written.
    #[error("{}: cannot write checksums: {cause}", path.display())]
    WriteSums {
        /// The file that was to hold them.
        path: PathBuf,
        /// What the system said.
        cause: Arc<io::Error>,
    },
    /// A stored number that is no token id of the vocabulary, or none at all: negative, or above `i32::MAX`.
    #[error(
        "{}: token {index} at byte offset {offset} is {value}, expected at least 0 and below {limit}",
        path.display()
    )]
    NotAToken {
        /// The file.
        path: PathBuf,
        /// The token's index in the file.
        index: u64,
        /// Its place in bytes.
        offset: u64,
        /// What is stored.
        value: i128,
        /// The vocabulary's size, or 2^31.
        limit: u64,
    },
    /// A folder without a file of tokens.
    #[error("{}: expected files of tokens (.bin, .npy, .safetensors) in the folder, found none", path.display())]
    NoShards {
        /// The folder.
        path: PathBuf,
    },
    /// A file is not the one that it was.
    #[error("{}: changed since {since}: expected {what} {expected}, found {found}", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// Since when: "it was opened", say.
        since: &'static str,
        /// What changed: "a length in bytes of", say.
        what: &'static str,
        /// What it was.
        expected: String,
        /// What it is.
        found: String,
    },
    /// The memory that the loader may use does not hold what its order needs.
    #[error(
        "{needed} bytes are needed for {blocks} open blocks of {block_bytes} bytes each and {batches} batches \
         of {batch_bytes}, and {limit} may be used ({source_of_limit}); fewer or smaller blocks need less"
    )]
    MemoryTooSmall {
        /// The least that would do, in bytes.
        needed: u64,
        /// Blocks open at a time, and one being read.
        blocks: u64,
        /// Bytes of memory of a block.
        block_bytes: u64,
        /// Batches that are ahead or in use.
        batches: u64,
        /// Bytes of a batch.
        batch_bytes: u64,
        /// The limit, in bytes.
        limit: u64,
        /// Where it comes from.
        source_of_limit: String,
    },
    /// An order of no blocks, say.
    #[error("expected at least one and at most {most} {what}, found {found}")]
    BadOrder {
        /// What is counted.
        what: &'static str,
        /// How many.
        found: u64,
        /// The most there may be.
        most: u64,
    },
    /// A rank beyond the last.
    #[error("expected a rank below the number of ranks, {world}, found {rank}")]
    BadShare {
        /// The rank.
        rank: u64,
        /// The ranks there are.
        world: u64,
    },
    /// A dataset that has no documents of the kind asked for.
    #[error("{}: documents: expected {expected}, found {found}", path.display())]
    BadDocuments {
        /// The file, or the dataset.
        path: PathBuf,
        /// What there should be.
        expected: String,
        /// What there is.
        found: String,
    },
    /// Weights, sources or ranks that do not make a mixture.
    #[error("{what} of the mixture: expected {expected}, found {found}")]
    BadMixture {
        /// What is wrong.
        what: &'static str,
        /// What it should be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// There is no memory for a batch.
    #[error("no memory for a batch of {bytes} bytes")]
    NoMemory {
        /// The batch's bytes.
        bytes: usize,
    },
    /// The threads that read ahead cannot be started.
    #[error("cannot start reading ahead: {cause}")]
    Start {
        /// What the system said.
        cause: Arc<io::Error>,
    },
    /// Reading ahead ended without an error of its own.
    #[error("reading ahead of `{}` has stopped", path.display())]
    Stopped {
        /// The file.
        path: PathBuf,
    },
    /// There is already something at the path of a file to write.
    #[error("{}: exists already, and is not overwritten", path.display())]
    Exists {
        /// The path.
        path: PathBuf,
    },
    /// A token file cannot be written: the disk is full, say.
    #[error("{}: cannot {action} after {tokens} tokens: {cause}", path.display())]
    Write {
        /// The file that was to be.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The tokens accepted before.
        tokens: u64,
        /// What the system said.
        cause: Arc<io::Error>,
    },
}
