//! How a saved tensor is stored: whole, or in fewer bytes.

use std::{fmt, str::FromStr};

use ebbtide_kernels::{
    DType, Op, Slice,
    op::{Rounding, int8_bytes},
};

/// How a saved tensor is stored, on the device or in host memory. All but [`Codec::Raw`] lose bits, and apply to f32 alone;
/// other dtypes, statistics and parameters are stored raw whatever a policy asks for.
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
}

impl Codec {
    /// Int8 with groups of 128, to nearest.
    pub const INT8: Codec = Codec::Int8 { group: 128, stochastic: None };

    /// Whether what comes back may differ from what was saved.
    pub fn is_lossy(self) -> bool {
        self != Codec::Raw
    }

    /// Length and dtype of `len` f32 elements in stored form.
    pub(crate) fn stored(self, len: usize, dtype: DType) -> (usize, DType) {
        match self {
            Codec::Raw => (len, dtype),
            Codec::F16 => (len, DType::F16),
            Codec::BF16 => (len, DType::BF16),
            Codec::Int8 { group, .. } => (int8_bytes(len, group), DType::U8),
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
        })
    }

    /// The op that gives back; `None` where nothing is to be done.
    pub(crate) fn decode(self, input: Slice, out: Slice) -> Option<Op> {
        Some(match self {
            Codec::Raw => return None,
            Codec::F16 | Codec::BF16 => Op::Cast { input, out },
            Codec::Int8 { group, .. } => Op::Int8Decode { input, out, group },
        })
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Codec::Raw => f.write_str("raw"),
            Codec::F16 => f.write_str("f16"),
            Codec::BF16 => f.write_str("bf16"),
            Codec::Int8 { group: 128, .. } => f.write_str("int8"),
            Codec::Int8 { group, .. } => write!(f, "int8/{group}"),
        }
    }
}

impl FromStr for Codec {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let int8 = |group| Ok(Codec::Int8 { group, stochastic: None });
        match text {
            "raw" => Ok(Codec::Raw),
            "f16" => Ok(Codec::F16),
            "bf16" => Ok(Codec::BF16),
            "int8" | "int8/128" => int8(128),
            "int8/64" => int8(64),
            "int8/256" => int8(256),
            _ => Err(format!("unknown codec `{text}`: expected raw, f16, bf16, int8, int8/64 or int8/256")),
        }
    }
}
