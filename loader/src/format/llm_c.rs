//! Shards of llm.c's: 256 little-endian `i32` (magic, version, count of tokens, zeros), then the tokens.

use super::Header;
use crate::Result;
use crate::encoding::Encoding;

const HEADER_BYTES: u64 = 1024;
/// Magic and version of what is read, with its encoding.
const KINDS: [(i32, i32, Encoding); 2] = [(20240520, 1, Encoding::U16), (20240801, 7, Encoding::U32)];
/// The magic of an evaluation file, which holds no stream of tokens.
const EVALUATION: i32 = 20240522;

/// Whether a file that begins with these bytes is one of llm.c's.
pub(super) fn is_magic(first: [u8; 4]) -> bool {
    let magic = i32::from_le_bytes(first);
    magic == EVALUATION || KINDS.iter().any(|kind| kind.0 == magic)
}

pub(super) fn parse(header: &Header) -> Result<(u64, u64, Encoding)> {
    let field = |index: u64, name| header.array(4 * index, name).map(i32::from_le_bytes);
    let magic = field(0, "the magic number")?;
    let Some(&(_, version, encoding)) = KINDS.iter().find(|kind| kind.0 == magic) else {
        let expected = format!("{} or {}", KINDS[0].0, KINDS[1].0);
        let found =
            if magic == EVALUATION { format!("{magic}, an evaluation file") } else { magic.to_string() };
        return Err(header.bad(0, "the magic number", expected, found));
    };
    let found = field(1, "the version")?;
    if found != version {
        return Err(header.bad(4, "the version", version, found));
    }
    let count = field(2, "the count of tokens")?;
    let Ok(count) = u64::try_from(count) else {
        return Err(header.bad(8, "the count of tokens", "no negative number", count));
    };
    header.ends_at(Some(HEADER_BYTES + count * encoding.bytes()), "the count of tokens", 8)?;
    Ok((HEADER_BYTES, count, encoding))
}
