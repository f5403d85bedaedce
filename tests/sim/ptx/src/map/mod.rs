//! The table of pure instructions: for a name, its modifiers and type, the function that computes a whole warp.
//!
//! Each entry is a closure over one lane's values, lifted to 32 lanes by [`lift`], so that the compiler makes a loop of its own,
//! in vector instructions, for each.

mod convert;
mod float;
mod integer;

pub(crate) use convert::conversions;

use crate::instruction::MapFn;
use crate::scalar::{Lanes, Scalar, WARP};
use crate::types::{Opcode, Type};

/// The function of an instruction that computes one register from others, unless it has none.
pub(crate) fn map(opcode: &Opcode<'_>) -> Option<MapFn> {
    let ty = opcode.ty();
    match ty {
        Type::Predicate => integer::predicate(opcode.name),
        _ if matches!(opcode.name, "and" | "or" | "xor" | "not" | "selp" | "mov" | "cvta") => {
            integer::bits(opcode.name)
        }
        _ if ty.is_integer() => integer::map(opcode, ty),
        Type::F32 | Type::F64 => float::map(opcode, ty),
        _ => float::half(opcode, ty),
    }
}

/// The function of a comparison, by `setp`'s name for it.
pub(crate) fn comparison(name: &str, ty: Type) -> Option<MapFn> {
    if ty.is_integer() { integer::comparison(name, ty) } else { float::comparison(name, ty) }
}

/// `f` in each lane; `$name` takes as many operands as it says.
macro_rules! lifts {
    ($($name:ident($($operand:ident $index:literal),*))*) => {$(
        #[inline(always)]
        fn $name<$($operand: Scalar,)* R: Scalar>(from: &[&Lanes; 4], f: impl Fn($($operand),*) -> R) -> Lanes {
            let mut to = [0; WARP];
            for lane in 0..WARP {
                to[lane] = f($($operand::of(from[$index][lane])),*).bits();
            }
            to
        }
    )*};
}
lifts! {
    lift1(A 0)
    lift2(A 0, B 1)
    lift3(A 0, B 1, C 2)
    lift4(A 0, B 1, C 2, D 3)
}

/// The same expression for each integer type: `by_type!(ty, T => expression with T)`.
macro_rules! by_type {
    ($ty:expr, $t:ident => $closure:expr) => {{
        use crate::types::Type;
        match $ty {
            Type::U8 => {
                type $t = u8;
                Some($closure as crate::instruction::MapFn)
            }
            Type::S8 => {
                type $t = i8;
                Some($closure as crate::instruction::MapFn)
            }
            Type::U16 => {
                type $t = u16;
                Some($closure as crate::instruction::MapFn)
            }
            Type::S16 => {
                type $t = i16;
                Some($closure as crate::instruction::MapFn)
            }
            Type::U32 => {
                type $t = u32;
                Some($closure as crate::instruction::MapFn)
            }
            Type::S32 => {
                type $t = i32;
                Some($closure as crate::instruction::MapFn)
            }
            Type::U64 => {
                type $t = u64;
                Some($closure as crate::instruction::MapFn)
            }
            Type::S64 => {
                type $t = i64;
                Some($closure as crate::instruction::MapFn)
            }
            _ => None,
        }
    }};
}
use by_type;
