//! Element types of buffers.

use std::fmt;

/// The type of a buffer's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16; storage only, arithmetic is in f32.
    F16,
    /// bfloat16; storage only, arithmetic is in f32.
    BF16,
    /// Unsigned 32-bit integers: token ids.
    U32,
    /// Signed 32-bit integers: targets, where -100 is ignored.
    I32,
    /// Bytes: codes and masks.
    U8,
}

impl DType {
    /// Bytes an element takes.
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::F32 | DType::U32 | DType::I32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::U8 => 1,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::U32 => "u32",
            DType::I32 => "i32",
            DType::U8 => "u8",
        })
    }
}

/// A Rust type that a slice of device or host memory can hold.
pub trait Element: bytemuck::Pod + Send + Sync {
    /// The matching [`DType`].
    const DTYPE: DType;
}

macro_rules! element {
    ($($type:ty => $dtype:ident),*) => {
        $(impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        })*
    };
}
element!(f32 => F32, half::f16 => F16, half::bf16 => BF16, u32 => U32, i32 => I32, u8 => U8);
