//! The header of a packed file; `docs/packed-format.md` has all of the file, byte by byte.

use xxhash_rust::xxh3::xxh3_64;

use super::Header;
use crate::Result;
use crate::encoding::Encoding;
use crate::sums::{OwnSums, PAGE_BYTES, SUM_BYTES, hash_range, hex};

/// What a packed file begins with.
pub(crate) const MAGIC: &[u8] = b"EBBTPACK";
/// Bytes before the first record: a page.
pub(crate) const HEADER_BYTES: u64 = PAGE_BYTES;
const VERSION: u32 = 1;
/// Bytes of the header that mean something, its hash included.
const FIELDS_BYTES: usize = 72;
/// Bytes of an entry of the index.
pub(crate) const ENTRY_BYTES: u64 = size_of::<u64>() as u64;

/// What a packed file's header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packed {
    pub(crate) encoding: Encoding,
    pub(crate) records: u64,
    /// Tokens of a record, if all have as many; else 0, and there is an index.
    pub(crate) record_tokens: u64,
    pub(crate) tokens: u64,
    /// XXH3 of the sums.
    pub(crate) sums_hash: u64,
}

impl Packed {
    /// Where the index begins: the page after the records.
    pub(crate) fn index_offset(&self) -> u64 {
        (HEADER_BYTES + self.tokens * self.encoding.bytes()).next_multiple_of(PAGE_BYTES)
    }

    /// Where the sums begin: the page after the index.
    pub(crate) fn sums_offset(&self) -> u64 {
        let entries = if self.record_tokens == 0 { self.records } else { 0 };
        (self.index_offset() + entries * ENTRY_BYTES).next_multiple_of(PAGE_BYTES)
    }

    /// The sums of all pages between the header's and their own.
    pub(crate) fn sums(&self) -> OwnSums {
        OwnSums { offset: self.sums_offset(), pages: (1, self.sums_offset() / PAGE_BYTES) }
    }

    /// The file's length.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.sums_offset() + SUM_BYTES * (self.sums_offset() / PAGE_BYTES - 1)
    }

    /// The first page.
    pub(crate) fn header(&self) -> Vec<u8> {
        let mut header = Vec::with_capacity(HEADER_BYTES as usize);
        header.extend(MAGIC);
        header.extend(VERSION.to_le_bytes());
        header.extend([self.encoding.bytes() as u8, self.encoding.is_signed().into(), 0, 0]);
        for number in [
            self.records,
            self.record_tokens,
            self.tokens,
            self.index_offset(),
            self.sums_offset(),
            self.sums_hash,
        ] {
            header.extend(number.to_le_bytes());
        }
        header.extend(xxh3_64(&header).to_le_bytes());
        header.resize(HEADER_BYTES as usize, 0);
        header
    }
}

/// Holds every field against the file.
pub(super) fn parse(header: &Header<'_>) -> Result<Packed> {
    let bytes: [u8; FIELDS_BYTES] = header.array(0, "header")?;
    let word = |at: usize| u64::from_le_bytes(*bytes[at..].first_chunk().unwrap_or(&[0; 8]));
    if &bytes[..8] != MAGIC {
        return Err(header.bad(0, "magic", "EBBTPACK", format!("{:02x?}", &bytes[..8])));
    }
    let (at, expected) = (FIELDS_BYTES - 8, xxh3_64(&bytes[..FIELDS_BYTES - 8]));
    if word(at) != expected {
        return Err(header.bad(at as u64, "checksum of the header", hex(expected), hex(word(at))));
    }
    let version = word(8) as u32;
    if version != VERSION {
        return Err(header.bad(8, "version", VERSION, version));
    }
    let (width, signed) = (bytes[12], bytes[13]);
    let encoding =
        Encoding::new(width.into(), signed == 1, false).filter(|_| signed <= 1).ok_or_else(|| {
            header.bad(12, "encoding", "1, 2, 4 or 8 bytes, signed or not", format!("{width}, {signed}"))
        })?;
    let packed = Packed {
        encoding,
        records: word(16),
        record_tokens: word(24),
        tokens: word(32),
        sums_hash: word(56),
    };
    // So that no product below leaves 64 bits.
    let (most_tokens, most_records) = (header.bytes / encoding.bytes(), header.bytes / ENTRY_BYTES);
    if packed.tokens > most_tokens {
        return Err(header.bad(32, "tokens", format!("at most {most_tokens}"), packed.tokens));
    }
    let of_records = match packed.record_tokens {
        0 if packed.records > most_records => {
            return Err(header.bad(16, "records", format!("at most {most_records}"), packed.records));
        }
        0 => None,
        tokens => Some(packed.records.checked_mul(tokens)),
    };
    if let Some(of_records) = of_records
        && of_records != Some(packed.tokens)
    {
        let found = format!("{} of {} records", packed.tokens, packed.records);
        return Err(header.bad(32, "tokens", format!("{} a record", packed.record_tokens), found));
    }
    for (at, field, expected) in [
        (40, "place of the index", packed.index_offset()),
        (48, "place of the checksums", packed.sums_offset()),
    ] {
        if word(at) != expected {
            return Err(header.bad(at as u64, field, expected, word(at)));
        }
    }
    header.ends_at(Some(packed.file_bytes()), "length", 48)?;
    let found = hash_range(header.path, header.file, packed.sums_offset()..header.bytes)?;
    if found != packed.sums_hash {
        return Err(header.bad(56, "checksum of the checksums", hex(packed.sums_hash), hex(found)));
    }
    Ok(packed)
}
