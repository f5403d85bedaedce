//! How a saved tensor is stored: whole, or in fewer bytes.

use std::{fmt, str::FromStr};

use ebbtide_kernels::{
    DType, Op, Slice,
    op::{Rounding, int8_bytes},
};

use crate::{CodecKind, Role};

/// How a saved tensor is stored, on the device or elsewhere. [`Codec::F16`] and [`Codec::BF16`] lose bits and apply to f32 alone,
/// [`Codec::Int8`] loses bits and applies to f32, f16 and bf16, [`Codec::Bits`] to masks; other dtypes, statistics and parameters are stored raw whatever a policy
/// asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Codec {
    /// As it is.
    #[default]
    Raw,
    /// IEEE 754 binary16, to nearest even: 2 bytes an element, relative error at most 2⁻¹¹ from 2⁻¹⁴ to 65504, infinite above.
    F16,
    /// bfloat16, to nearest even: 2 bytes an element, relative error at most 2⁻⁸.
    BF16,
    /// Int8 with one f32 scale a group: `1 + 4 / group` bytes an element. The bound of the error is
    /// [`Op::Int8Encode`]'s.
    Int8 {
        /// Elements of a group: 64, 128 or 256.
        group: usize,
        /// `None` for the nearest code, a seed for stochastic rounding.
        stochastic: Option<u64>,
    },
    /// One bit an element, for a [`Role::Mask`] of u8: elements that are not 0 come back as 1.
    Bits,
}

impl Codec {
    /// Int8 with groups of 128, to nearest.
    pub const INT8: Codec = Codec::Int8 { group: 128, stochastic: None };

    /// Whether what comes back may differ from what was saved.
    pub fn is_lossy(self) -> bool {
        !matches!(self, Codec::Raw | Codec::Bits)
    }

    /// What bytes in this form are accounted by.
    pub fn kind(self) -> CodecKind {
        match self {
            Codec::Raw => CodecKind::Raw,
            Codec::F16 => CodecKind::F16,
            Codec::BF16 => CodecKind::BF16,
            Codec::Int8 { .. } => CodecKind::Int8,
            Codec::Bits => CodecKind::Bits,
        }
    }

    /// The codec itself where it is for such a tensor, else [`Codec::Raw`].
    pub fn for_tensor(self, dtype: DType, role: Role) -> Codec {
        let exact = matches!(role, Role::Statistic | Role::Mask);
        let applies = match self {
            Codec::Raw => true,
            Codec::F16 | Codec::BF16 => dtype == DType::F32 && !exact,
            Codec::Int8 { .. } => matches!(dtype, DType::F32 | DType::F16 | DType::BF16) && !exact,
            Codec::Bits => dtype == DType::U8 && role == Role::Mask,
        };
        if applies { self } else { Codec::Raw }
    }

    /// Length and dtype of `len` f32 elements in stored form.
    pub(crate) fn stored(self, len: usize, dtype: DType) -> (usize, DType) {
        match self {
            Codec::Raw => (len, dtype),
            Codec::F16 => (len, DType::F16),
            Codec::BF16 => (len, DType::BF16),
            Codec::Int8 { group, .. } => (int8_bytes(len, group), DType::U8),
            Codec::Bits => (len.div_ceil(8), DType::U8),
        }
    }

    /// The op that stores; `None` where nothing is to be done.
    pub(crate) fn encode(self, input: Slice, out: Slice, site: u32, step: u32) -> Option<Op> {
        Some(match self {
            Codec::Raw => return None,
            Codec::F16 | Codec::BF16 => Op::Cast { input, out },
            Codec::Int8 { group, stochastic } => {
                let rounding = match stochastic {
                    None => Rounding::Nearest,
                    Some(seed) => Rounding::Stochastic { seed, site, step },
                };
                Op::Int8Encode { input, out, group, rounding }
            }
            Codec::Bits => Op::BitsEncode { input, out },
        })
    }

    /// The op that gives back; `None` where nothing is to be done.
    pub(crate) fn decode(self, input: Slice, out: Slice) -> Option<Op> {
        Some(match self {
            Codec::Raw => return None,
            Codec::F16 | Codec::BF16 => Op::Cast { input, out },
            Codec::Int8 { group, .. } => Op::Int8Decode { input, out, group },
            Codec::Bits => Op::BitsDecode { input, out },
        })
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Codec::Raw => f.write_str("raw"),
            Codec::F16 => f.write_str("f16"),
            Codec::BF16 => f.write_str("bf16"),
            Codec::Int8 { group, stochastic } => {
                f.write_str("int8")?;
                if *group != 128 {
                    write!(f, "/{group}")?;
                }
                match stochastic {
                    None => Ok(()),
                    Some(seed) => write!(f, "~{seed}"),
                }
            }
            Codec::Bits => f.write_str("bits"),
        }
    }
}

impl FromStr for Codec {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || {
            format!(
                "unknown codec `{text}`: expected raw, f16, bf16, bits, int8, int8/64 or int8/256, and after int8 ~ or ~SEED for \
                 stochastic rounding"
            )
        };
        let (name, stochastic) = match text.split_once('~') {
            None => (text, None),
            Some((name, "")) => (name, Some(0)),
            Some((name, seed)) => (name, Some(seed.parse().map_err(|_| unknown())?)),
        };
        match (name, stochastic) {
            ("raw", None) => Ok(Codec::Raw),
            ("f16", None) => Ok(Codec::F16),
            ("bf16", None) => Ok(Codec::BF16),
            ("bits", None) => Ok(Codec::Bits),
            ("int8" | "int8/128", stochastic) => Ok(Codec::Int8 { group: 128, stochastic }),
            ("int8/64", stochastic) => Ok(Codec::Int8 { group: 64, stochastic }),
            ("int8/256", stochastic) => Ok(Codec::Int8 { group: 256, stochastic }),
            _ => Err(unknown()),
        }
    }
}
