//! Megatron's pair of files: `.bin` has the tokens of all sequences, `.idx` their lengths and places and those of the
//! documents.
//!
//! The arrays of the index lie at any byte, so they are read as bytes. They are held against one another and against the
//! `.bin` a piece at a time, however many sequences there are: a sequence must begin where the one before it ends.

use std::fs::File;
use std::ops::Range;
use std::path::Path;

use super::{Header, Tokens};
use crate::encoding::Encoding;
use crate::file::{open_regular, read_exact};
use crate::{Error, Result};

const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
const HEADER_BYTES: u64 = 34;
/// Entries of an array read at a time.
const PIECE: u64 = 1 << 14;

/// Whether there is an index beside a `.bin`.
pub(super) fn has_index(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "bin") && path.with_extension("idx").is_file()
}

/// The tokens of the pair that has a file of this name.
pub(super) fn find(path: &Path) -> Result<Tokens> {
    let (index_path, path) = (path.with_extension("idx"), path.with_extension("bin"));
    let (index, index_bytes) = open_regular(&index_path)?;
    let (file, file_bytes) = open_regular(&path)?;
    let header = Header { path: &index_path, file: &index, bytes: index_bytes };
    let (count, encoding) = parse(&header, &path, file_bytes)?;
    if count == 0 {
        return Err(Error::Empty { path });
    }
    let index = Some((index_path, index, index_bytes));
    Ok(Tokens { path, file, file_bytes, offset: 0, count, encoding, index, sums: None })
}

/// The first tokens of the documents that begin in a range of tokens, in order. Those without tokens are left out. What is
/// not in the range is not read, but for a binary search.
///
/// # Errors
///
/// [`Error::CutShort`] and [`Error::Read`] if the index cannot be read, [`Error::BadHeader`] if it is not what it was.
pub(crate) fn document_starts(
    path: &Path,
    file: &File,
    tokens: Range<u64>,
    token_bytes: u64,
) -> Result<Vec<u64>> {
    let number = |offset| {
        let mut bytes = [0; 8];
        read_exact(path, file, offset, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    };
    let (sequences, ends) = (number(18)?, number(26)?);
    let changed = |offset, found: u64| Error::BadHeader {
        path: path.to_path_buf(),
        offset,
        field: "the end of a document",
        expected: format!("at most {sequences}, as when it was opened"),
        found: found.to_string(),
    };
    let arrays = sequences.checked_mul(12).and_then(|bytes| bytes.checked_add(HEADER_BYTES));
    let documents = arrays.ok_or_else(|| changed(18, sequences))?;
    let start = |document: u64| {
        let offset = documents + 8 * document;
        match number(offset)? {
            // The end of the last document, and the start of those after it that have no sequences.
            sequence if sequence == sequences => Ok(u64::MAX),
            sequence if sequence > sequences => Err(changed(offset, sequence)),
            sequence => Ok(number(HEADER_BYTES + 4 * sequences + 8 * sequence)? / token_bytes),
        }
    };
    let (mut low, mut high) = (0, ends);
    while low < high {
        let middle = low + (high - low) / 2;
        if start(middle)? < tokens.start { low = middle + 1 } else { high = middle }
    }
    let mut starts = Vec::new();
    for document in low..ends {
        let first = start(document)?;
        if first >= tokens.end {
            break;
        }
        starts.push(first);
    }
    // A document without tokens begins where the next one does.
    starts.dedup();
    Ok(starts)
}

fn parse(header: &Header, data: &Path, data_bytes: u64) -> Result<(u64, Encoding)> {
    let magic: [u8; 9] = header.array(0, "the magic string")?;
    if magic != *MAGIC {
        return Err(header.bad(0, "the magic string", "MMIDIDX", magic.escape_ascii()));
    }
    let version = u64::from_le_bytes(header.array(9, "the version")?);
    if version != 1 {
        return Err(header.bad(9, "the version", 1, version));
    }
    let [kind] = header.array(17, "the type of tokens")?;
    let encoding = match kind {
        1 => Encoding::new(1, false, false),
        2 => Encoding::new(1, true, false),
        3 => Encoding::new(2, true, false),
        4 => Encoding::new(4, true, false),
        5 => Encoding::new(8, true, false),
        8 => Some(Encoding::U16),
        _ => None,
    };
    let encoding = encoding.ok_or_else(|| {
        let found = match kind {
            6 => "6 (f64)".to_owned(),
            7 => "7 (f32)".to_owned(),
            other => other.to_string(),
        };
        header.bad(17, "the type of tokens", "an integer type: 1 to 5 or 8", found)
    })?;
    let sequences = u64::from_le_bytes(header.array(18, "the count of sequences")?);
    let documents = u64::from_le_bytes(header.array(26, "the count of document indices")?);
    let pointers = sequences.checked_mul(4).and_then(|bytes| bytes.checked_add(HEADER_BYTES));
    let ends = sequences.checked_mul(8).zip(pointers).and_then(|(bytes, from)| bytes.checked_add(from));
    let end = documents.checked_mul(8).zip(ends).and_then(|(bytes, from)| bytes.checked_add(from));
    // Indices of several kinds of data have a byte more a sequence.
    let with_modes = end.and_then(|end| end.checked_add(sequences));
    let (Some(pointers), Some(ends), Some(_)) = (pointers, ends, end) else {
        return Err(header.bad(
            18,
            "the counts",
            "fewer than 2^64 bytes",
            format!("{sequences}, {documents}"),
        ));
    };
    if with_modes != Some(header.bytes) {
        header.ends_at(end, "the counts of sequences and documents", 18)?;
    }
    let count = check_sequences(header, data, data_bytes, sequences, pointers, encoding)?;
    check_documents(header, documents, ends, sequences)?;
    Ok((count, encoding))
}

/// Holds lengths and places against each other and the data: the count of tokens.
fn check_sequences(
    header: &Header,
    data: &Path,
    data_bytes: u64,
    sequences: u64,
    pointers: u64,
    encoding: Encoding,
) -> Result<u64> {
    let mut place = 0u64;
    let (mut length_bytes, mut pointer_bytes) = (Vec::new(), Vec::new());
    let mut first = 0;
    while first < sequences {
        let count = PIECE.min(sequences - first);
        length_bytes.resize(4 * count as usize, 0);
        pointer_bytes.resize(8 * count as usize, 0);
        header.fill(HEADER_BYTES + 4 * first, &mut length_bytes, "the lengths of sequences")?;
        header.fill(pointers + 8 * first, &mut pointer_bytes, "the places of sequences")?;
        let (lengths, places) = (length_bytes.as_chunks::<4>().0, pointer_bytes.as_chunks::<8>().0);
        for (index, (length, found)) in (first..).zip(lengths.iter().zip(places)) {
            let (length, found) = (i32::from_le_bytes(*length), i64::from_le_bytes(*found));
            if u64::try_from(found) != Ok(place) {
                return Err(header.bad(pointers + 8 * index, "the place of a sequence", place, found));
            }
            let next =
                u64::try_from(length).ok().and_then(|tokens| place.checked_add(tokens * encoding.bytes()));
            place = next.filter(|&next| next <= data_bytes).ok_or_else(|| {
                let most = (data_bytes - place) / encoding.bytes();
                let expected = format!("0 to {most} tokens, as {} has", data.display());
                header.bad(HEADER_BYTES + 4 * index, "the length of a sequence", expected, length)
            })?;
        }
        first += count;
    }
    if place != data_bytes {
        let expected = format!("the {data_bytes} bytes of {}", data.display());
        return Err(header.bad(HEADER_BYTES, "the lengths of sequences", expected, format!("{place} bytes")));
    }
    Ok(data_bytes / encoding.bytes())
}

/// Documents follow one another from the first sequence to the last.
fn check_documents(header: &Header, documents: u64, offset: u64, sequences: u64) -> Result<()> {
    let mut last = 0;
    let mut bytes = Vec::new();
    let mut first = 0;
    while first < documents {
        let count = PIECE.min(documents - first);
        bytes.resize(8 * count as usize, 0);
        header.fill(offset + 8 * first, &mut bytes, "the documents")?;
        for (index, found) in (first..).zip(bytes.as_chunks::<8>().0) {
            let found = i64::from_le_bytes(*found);
            let range = if index == 0 { 0..=0 } else { last..=sequences };
            last = u64::try_from(found).ok().filter(|found| range.contains(found)).ok_or_else(|| {
                let expected = format!("{} to {}", range.start(), range.end());
                header.bad(offset + 8 * index, "the end of a document", expected, found)
            })?;
        }
        first += count;
    }
    if last != sequences {
        let at = offset + 8 * documents.saturating_sub(1);
        return Err(header.bad(at, "the end of the last document", sequences, last));
    }
    Ok(())
}
