//! An integer tensor of a safetensors file: the length of a JSON header, the header, then all tensors.
//!
//! The header is checked as the format demands: tensors follow one another without holes from the first byte of the data
//! to the last of the file.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, MapAccess, Visitor};

use super::Header;
use crate::encoding::Encoding;
use crate::{Error, Result};

/// The most that the format allows.
const MOST_HEADER_BYTES: u64 = 100_000_000;

#[derive(Deserialize)]
struct Tensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Tensors by name. A map would let a name come twice.
struct Tensors(Vec<(String, Tensor)>);

impl<'de> Deserialize<'de> for Tensors {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = Tensors;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Tensors, A::Error> {
                let mut tensors = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<de::IgnoredAny>()?;
                    } else {
                        tensors.push((name, map.next_value()?));
                    }
                }
                Ok(Tensors(tensors))
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

pub(super) fn parse(header: &Header, wanted: Option<&str>) -> Result<(u64, u64, Encoding)> {
    let length = u64::from_le_bytes(header.array(0, "the header's length")?);
    if length > MOST_HEADER_BYTES {
        return Err(header.bad(
            0,
            "the header's length",
            format!("at most {MOST_HEADER_BYTES} bytes"),
            length,
        ));
    }
    // Checked against the file before there is a buffer for it.
    if length > header.bytes - 8 {
        return Err(header.bad(0, "the header's length", format!("at most {}", header.bytes - 8), length));
    }
    let mut text = vec![0; length as usize];
    header.fill(8, &mut text, "the header")?;
    let Tensors(mut tensors) = serde_json::from_slice(&text)
        .map_err(|error| header.bad(8, "the header", "JSON that describes tensors", error))?;
    check(header, length, &mut tensors)?;
    let (name, tensor) = choose(header, &tensors, wanted)?;
    let encoding = encoding(&tensor.dtype).ok_or_else(|| {
        header.bad(8, "the dtype", "an integer type", format!("{} of {name}", tensor.dtype))
    })?;
    let (start, end) = tensor.data_offsets;
    Ok((8 + length + start, (end - start) / encoding.bytes(), encoding))
}

/// Holds the tensors against the file, and sorts them by place.
fn check(header: &Header, length: u64, tensors: &mut [(String, Tensor)]) -> Result<()> {
    let bad = |field, expected: String, found: String| header.bad(8, field, expected, found);
    let mut names: Vec<&str> = tensors.iter().map(|(name, _)| &**name).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(bad("the names", "each once".to_owned(), format!("{} twice", pair[0])));
    }
    tensors.sort_by_key(|(_, tensor)| tensor.data_offsets);
    let mut place = 0;
    for (name, tensor) in &*tensors {
        let (start, end) = tensor.data_offsets;
        if start != place || end < start {
            let found = format!("{start}..{end} of {name}");
            return Err(bad("data_offsets", format!("a range from {place} on"), found));
        }
        // The sizes of what is no whole number of bytes are not checked here: such a tensor holds no tokens.
        if let Some(width) = width(&tensor.dtype) {
            let bytes = tensor.shape.iter().try_fold(width, |bytes, &length| bytes.checked_mul(length));
            if bytes != Some(end - start) {
                let expected = format!("{} bytes for {:?} {}", end - start, tensor.shape, tensor.dtype);
                let found = bytes.map_or("more than 2^64".to_owned(), |bytes| bytes.to_string());
                return Err(bad("the shape", expected, format!("{found} ({name})")));
            }
        }
        place = end;
    }
    header.ends_at(place.checked_add(8 + length), "data_offsets", 8)
}

/// The tensor of this name, or the only one of integers.
fn choose<'a>(
    header: &Header,
    tensors: &'a [(String, Tensor)],
    wanted: Option<&str>,
) -> Result<&'a (String, Tensor), Error> {
    let fits = |entry: &&(String, Tensor)| match wanted {
        Some(wanted) => entry.0 == wanted,
        None => encoding(&entry.1.dtype).is_some(),
    };
    let fitting: Vec<_> = tensors.iter().filter(fits).collect();
    if let [only] = fitting[..] {
        return Ok(only);
    }
    let expected = match wanted {
        Some(wanted) => format!("a tensor {wanted}"),
        None => "one tensor of integers, or the name of one".to_owned(),
    };
    let names: Vec<_> = tensors.iter().take(8).map(|(name, _)| &**name).collect();
    let found = format!("{} tensors ({}…)", tensors.len(), names.join(", "));
    Err(header.bad(8, "the tensors", expected, found))
}

fn encoding(dtype: &str) -> Option<Encoding> {
    let signed = match dtype.as_bytes().first()? {
        b'U' => false,
        b'I' => true,
        _ => return None,
    };
    width(dtype).and_then(|width| Encoding::new(width, signed, false))
}

/// Bytes of an element.
fn width(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => 1,
        "U16" | "I16" | "F16" | "BF16" => 2,
        "U32" | "I32" | "F32" => 4,
        "U64" | "I64" | "F64" | "C64" => 8,
        _ => return None,
    })
}
