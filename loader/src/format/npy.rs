//! NumPy's `.npy`: a magic string, a version, the length of a header, and the header: a Python dictionary of three keys.

use super::Header;
use crate::encoding::Encoding;
use crate::{Error, Result};

pub(super) const MAGIC: &[u8; 6] = b"\x93NUMPY";
/// What tokens are made of.
const INTEGER: &str = "an integer type, such as '<u2'";
/// A header for plain numbers has about a hundred bytes.
const MOST_HEADER_BYTES: u64 = 1 << 16;

/// What the header of an array of any numbers says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ArrayHeader {
    /// Where the first number begins, in bytes.
    pub(crate) offset: u64,
    /// The type as NumPy writes it.
    pub(crate) descr: String,
    /// Bytes of a number.
    pub(crate) width: u64,
    /// At least one axis, rows first.
    pub(crate) shape: Vec<u64>,
}

/// An array of integers, as tokens: where they begin, how many there are, and how they are stored.
pub(super) fn parse(header: &Header) -> Result<(u64, u64, Encoding)> {
    let (offset, array) = dictionary(header)?;
    let encoding = array.encoding(header)?;
    array.check(header)?;
    let count = array.count(header)?;
    array.ends(header, offset, count, encoding.bytes())?;
    Ok((offset, count, encoding))
}

/// An array of numbers of any kind, little-endian.
pub(super) fn parse_array(header: &Header) -> Result<ArrayHeader> {
    let (offset, array) = dictionary(header)?;
    let expected = "a number in little-endian order, such as '<f4'";
    let bytes = array.descr.as_bytes();
    let width = match bytes {
        [b'<' | b'|' | b'=', b'b' | b'i' | b'u' | b'f', width @ b'1'..=b'8'] => u64::from(width - b'0'),
        _ => return Err(header.bad(array.descr_offset, "descr", expected, array.found())),
    };
    array.check(header)?;
    if array.shape.is_empty() {
        return Err(header.bad(array.shape_offset, "the shape", "at least one axis", "()"));
    }
    let count = array.count(header)?;
    array.ends(header, offset, count, width)?;
    Ok(ArrayHeader { offset, descr: array.descr, width, shape: array.shape })
}

/// Where the numbers begin, and what the header says of them.
fn dictionary(header: &Header) -> Result<(u64, Array)> {
    let magic: [u8; 6] = header.array(0, "the magic string")?;
    if magic != *MAGIC {
        return Err(header.bad(0, "the magic string", "\\x93NUMPY", magic.escape_ascii()));
    }
    let version: [u8; 2] = header.array(6, "the version")?;
    let (length, start) = match version {
        [1, 0] => (u64::from(u16::from_le_bytes(header.array(8, "the header's length")?)), 10),
        [2 | 3, 0] => (u64::from(u32::from_le_bytes(header.array(8, "the header's length")?)), 12),
        [major, minor] => {
            return Err(header.bad(6, "the version", "1.0, 2.0 or 3.0", format!("{major}.{minor}")));
        }
    };
    if length > MOST_HEADER_BYTES {
        return Err(header.bad(
            8,
            "the header's length",
            format!("at most {MOST_HEADER_BYTES} bytes"),
            length,
        ));
    }
    let mut text = vec![0; length as usize];
    header.fill(start, &mut text, "the header")?;
    let array = Fields { header, start, text: &text, at: 0 }.dictionary()?;
    Ok((start + length, array))
}

struct Array {
    descr: String,
    descr_offset: u64,
    fortran: bool,
    shape: Vec<u64>,
    shape_offset: u64,
}

impl Array {
    fn found(&self) -> String {
        match self.descr.contains('O') {
            true => format!("'{}', Python objects", self.descr),
            false => format!("'{}'", self.descr),
        }
    }

    fn encoding(&self, header: &Header) -> Result<Encoding> {
        let encoding = match self.descr.as_bytes() {
            [order @ (b'<' | b'>' | b'|' | b'='), kind @ (b'i' | b'u'), width @ b'1'..=b'8'] => {
                let big_endian = *order == b'>' || (*order == b'=' && cfg!(target_endian = "big"));
                Encoding::new(u64::from(width - b'0'), *kind == b'i', big_endian)
                    .filter(|encoding| *order != b'|' || encoding.bytes() == 1)
            }
            _ => None,
        };
        encoding.ok_or_else(|| header.bad(self.descr_offset, "descr", INTEGER, self.found()))
    }

    fn check(&self, header: &Header) -> Result<()> {
        // Columns first is the same as rows first where only one axis is longer than one.
        if self.fortran && self.shape.iter().filter(|&&length| length > 1).count() > 1 {
            let found = format!("True for the shape {:?}", self.shape);
            return Err(header.bad(self.shape_offset, "fortran_order", "False, rows first", found));
        }
        Ok(())
    }

    fn count(&self, header: &Header) -> Result<u64> {
        let count = self.shape.iter().try_fold(1u64, |count, &length| count.checked_mul(length));
        count.ok_or_else(|| {
            let found = format!("{:?}", self.shape);
            header.bad(self.shape_offset, "the shape", "fewer than 2^64 elements", found)
        })
    }

    fn ends(&self, header: &Header, offset: u64, count: u64, width: u64) -> Result<()> {
        let end = count.checked_mul(width).and_then(|bytes| bytes.checked_add(offset));
        header.ends_at(end, "the shape", self.shape_offset)
    }
}

/// A reader of the dictionary: the few forms of Python's literals that NumPy writes.
struct Fields<'a> {
    header: &'a Header<'a>,
    /// Where the text begins in the file.
    start: u64,
    text: &'a [u8],
    at: usize,
}

impl Fields<'_> {
    fn dictionary(&mut self) -> Result<Array> {
        let (mut descr, mut fortran, mut shape) = (None, None, None);
        self.expect(b'{')?;
        while !self.take(b'}') {
            let (offset, key) = (self.offset(), self.string()?);
            self.expect(b':')?;
            self.skip_space();
            let value_offset = self.offset();
            let fresh = match &*key {
                "descr" => descr.replace(self.descr()?).is_none(),
                "fortran_order" => fortran.replace(self.boolean()?).is_none(),
                "shape" => shape.replace((value_offset, self.shape()?)).is_none(),
                _ => false,
            };
            if !fresh {
                let expected = "descr, fortran_order and shape, once each";
                return Err(self.header.bad(offset, "a key of the header", expected, key));
            }
            if !self.take(b',') {
                self.expect(b'}')?;
                break;
            }
        }
        self.skip_space();
        if self.at < self.text.len() {
            return Err(self.unexpected("the end of the header"));
        }
        let missing = |key: &str| self.header.bad(self.start, "the header", format!("the key {key}"), "none");
        let (descr_offset, descr) = descr.ok_or_else(|| missing("descr"))?;
        let fortran = fortran.ok_or_else(|| missing("fortran_order"))?;
        let (shape_offset, shape) = shape.ok_or_else(|| missing("shape"))?;
        Ok(Array { descr, descr_offset, fortran, shape, shape_offset })
    }

    fn descr(&mut self) -> Result<(u64, String)> {
        let offset = self.offset();
        if self.peek() == Some(b'[') {
            return Err(self.header.bad(offset, "descr", INTEGER, "a structured type"));
        }
        Ok((offset, self.string()?))
    }

    fn boolean(&mut self) -> Result<bool> {
        self.skip_space();
        for (word, value) in [("True", true), ("False", false)] {
            if self.text[self.at..].starts_with(word.as_bytes()) {
                self.at += word.len();
                return Ok(value);
            }
        }
        Err(self.unexpected("True or False"))
    }

    fn shape(&mut self) -> Result<Vec<u64>> {
        let mut shape = Vec::new();
        self.expect(b'(')?;
        while !self.take(b')') {
            shape.push(self.number()?);
            if !self.take(b',') {
                self.expect(b')')?;
                break;
            }
        }
        Ok(shape)
    }

    fn number(&mut self) -> Result<u64> {
        self.skip_space();
        let digits = self.text[self.at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        let text = std::str::from_utf8(&self.text[self.at..self.at + digits]).unwrap_or_default();
        let number = text.parse().map_err(|_| self.unexpected("a length below 2^64"))?;
        self.at += digits;
        // Python 2 wrote long integers so.
        if self.text.get(self.at) == Some(&b'L') {
            self.at += 1;
        }
        Ok(number)
    }

    fn string(&mut self) -> Result<String> {
        let quote = match self.peek() {
            Some(quote @ (b'\'' | b'"')) => quote,
            _ => return Err(self.unexpected("a string")),
        };
        let text = &self.text[self.at + 1..];
        let end =
            text.iter().position(|&byte| byte == quote).ok_or_else(|| self.unexpected("a string's end"))?;
        self.at += end + 2;
        Ok(String::from_utf8_lossy(&text[..end]).into_owned())
    }

    fn peek(&mut self) -> Option<u8> {
        self.skip_space();
        self.text.get(self.at).copied()
    }

    fn take(&mut self, byte: u8) -> bool {
        let there = self.peek() == Some(byte);
        self.at += usize::from(there);
        there
    }

    fn expect(&mut self, byte: u8) -> Result<()> {
        if self.take(byte) { Ok(()) } else { Err(self.unexpected(&format!("'{}'", char::from(byte)))) }
    }

    fn skip_space(&mut self) {
        let space = self.text[self.at..].iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        self.at += space;
    }

    fn offset(&self) -> u64 {
        self.start + self.at as u64
    }

    fn unexpected(&self, expected: &str) -> Error {
        let rest = &self.text[self.at.min(self.text.len())..];
        let found = match rest {
            [] => "its end".to_owned(),
            _ => format!("'{}'", rest[..rest.len().min(20)].escape_ascii()),
        };
        self.header.bad(self.offset(), "the header", expected, found)
    }
}
