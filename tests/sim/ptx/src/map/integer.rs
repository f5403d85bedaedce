//! Integers, bits and predicates.

use super::{by_type, lift1, lift2, lift3, lift4};
use crate::instruction::MapFn;
use crate::types::{Opcode, Type};

/// Logic and moves, the same for every width.
pub(super) fn bits(name: &str) -> Option<MapFn> {
    Some(match name {
        "mov" | "cvta" => |x| *x[0],
        "and" => |x| lift2(x, |a: u64, b: u64| a & b),
        "or" => |x| lift2(x, |a: u64, b: u64| a | b),
        "xor" => |x| lift2(x, |a: u64, b: u64| a ^ b),
        "not" => |x| lift1(x, |a: u64| !a),
        "selp" => |x| lift3(x, |a: u64, b: u64, p: bool| if p { a } else { b }),
        _ => return None,
    })
}

pub(super) fn predicate(name: &str) -> Option<MapFn> {
    Some(match name {
        "not" => |x| lift1(x, |a: bool| !a),
        _ => return bits(name),
    })
}

pub(super) fn map(opcode: &Opcode<'_>, ty: Type) -> Option<MapFn> {
    let saturate = opcode.has("sat");
    match opcode.name {
        "mul" | "mad" if opcode.has("wide") => return wide(opcode.name, ty),
        "mul" | "mad" if opcode.has("hi") => return high(opcode.name, ty),
        "mul24" | "mad24" => return None,
        "add" | "sub" if saturate => return saturating(opcode.name, ty),
        _ if saturate => return None,
        _ => {}
    }
    match opcode.name {
        "add" => by_type!(ty, T => |x| lift2(x, T::wrapping_add)),
        "sub" => by_type!(ty, T => |x| lift2(x, T::wrapping_sub)),
        "mul" => by_type!(ty, T => |x| lift2(x, T::wrapping_mul)),
        "mad" => by_type!(ty, T => |x| lift3(x, |a: T, b: T, c: T| a.wrapping_mul(b).wrapping_add(c))),
        // Division by zero has no result in PTX; the hardware's is all ones.
        "div" => by_type!(ty, T => |x| lift2(x, |a: T, b: T| if b == 0 { !0 } else { a.wrapping_div(b) })),
        "rem" => by_type!(ty, T => |x| lift2(x, |a: T, b: T| if b == 0 { a } else { a.wrapping_rem(b) })),
        "min" => by_type!(ty, T => |x| lift2(x, |a: T, b: T| a.min(b))),
        "max" => by_type!(ty, T => |x| lift2(x, |a: T, b: T| a.max(b))),
        "abs" => {
            by_type!(ty, T => |x| lift1(x, |a: T| if a < T::default() { T::default().wrapping_sub(a) } else { a }))
        }
        "neg" => by_type!(ty, T => |x| lift1(x, |a: T| T::default().wrapping_sub(a))),
        "cnot" => by_type!(ty, T => |x| lift1(x, |a: T| T::from(a == 0))),
        "shl" => by_type!(ty, T => |x| lift2(x, |a: T, by: u32| if by < T::BITS { a << by } else { 0 })),
        // A signed value shifts in its sign, so a shift by too much leaves the sign.
        "shr" => {
            by_type!(ty, T => |x| lift2(x, |a: T, by: u32| if by < T::BITS { a >> by } else if a < T::default() { !0 } else { 0 }))
        }
        "popc" => by_type!(ty, T => |x| lift1(x, T::count_ones)),
        "clz" => by_type!(ty, T => |x| lift1(x, T::leading_zeros)),
        "brev" => by_type!(ty, T => |x| lift1(x, T::reverse_bits)),
        "slct" => by_type!(ty, T => |x| lift3(x, |a: T, b: T, c: i32| if c >= 0 { a } else { b })),
        "sad" => {
            by_type!(ty, T => |x| lift3(x, |a: T, b: T, c: T| c.wrapping_add(a.max(b).wrapping_sub(a.min(b)))))
        }
        "exch" => by_type!(ty, T => |x| lift2(x, |_: T, new: T| new)),
        "bfind" => find(ty, opcode.has("shiftamt")),
        "bfe" => extract(ty),
        "bfi" => insert(ty),
        _ => word(opcode, ty),
    }
}

/// Instructions on 32-bit words alone.
fn word(opcode: &Opcode<'_>, ty: Type) -> Option<MapFn> {
    let clamped = opcode.has("clamp");
    Some(match opcode.name {
        "shf" if opcode.has("l") && !clamped => {
            |x| lift3(x, |a: u32, b: u32, by: u32| (join(a, b) << (by & 31) >> 32) as u32)
        }
        "shf" if opcode.has("r") && !clamped => {
            |x| lift3(x, |a: u32, b: u32, by: u32| (join(a, b) >> (by & 31)) as u32)
        }
        "shf" if opcode.has("l") => {
            |x| lift3(x, |a: u32, b: u32, by: u32| (join(a, b) << by.min(32) >> 32) as u32)
        }
        "shf" if opcode.has("r") => |x| lift3(x, |a: u32, b: u32, by: u32| (join(a, b) >> by.min(32)) as u32),
        "prmt" => |x| lift3(x, permute),
        "inc" => |x| lift2(x, |old: u32, limit: u32| if old >= limit { 0 } else { old + 1 }),
        "dec" => |x| lift2(x, |old: u32, limit: u32| if old == 0 || old > limit { limit } else { old - 1 }),
        "dp4a" if ty.is_signed() => |x| {
            lift3(x, |a: u32, b: u32, c: i32| {
                let products = a
                    .to_le_bytes()
                    .into_iter()
                    .zip(b.to_le_bytes())
                    .map(|(a, b)| i32::from(a as i8) * i32::from(b as i8));
                c.wrapping_add(products.sum())
            })
        },
        "dp4a" => |x| {
            lift3(x, |a: u32, b: u32, c: u32| {
                let products = a
                    .to_le_bytes()
                    .into_iter()
                    .zip(b.to_le_bytes())
                    .map(|(a, b)| u32::from(a) * u32::from(b));
                c.wrapping_add(products.sum())
            })
        },
        _ => return None,
    })
}

fn join(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// Each nibble of `selector` picks one of eight bytes, or with its top bit that byte's sign, eight times over.
fn permute(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = join(a, b).to_le_bytes();
    u32::from_le_bytes(std::array::from_fn(|index| {
        let nibble = selector >> (4 * index);
        let byte = bytes[(nibble & 7) as usize];
        if nibble & 8 == 0 { byte } else { (byte as i8 >> 7) as u8 }
    }))
}

fn wide(name: &str, ty: Type) -> Option<MapFn> {
    Some(match (name, ty) {
        ("mul", Type::U16) => |x| lift2(x, |a: u16, b: u16| u32::from(a) * u32::from(b)),
        ("mul", Type::S16) => |x| lift2(x, |a: i16, b: i16| i32::from(a) * i32::from(b)),
        ("mul", Type::U32) => |x| lift2(x, |a: u32, b: u32| u64::from(a) * u64::from(b)),
        ("mul", Type::S32) => |x| lift2(x, |a: i32, b: i32| i64::from(a) * i64::from(b)),
        ("mad", Type::U16) => {
            |x| lift3(x, |a: u16, b: u16, c: u32| (u32::from(a) * u32::from(b)).wrapping_add(c))
        }
        ("mad", Type::S16) => {
            |x| lift3(x, |a: i16, b: i16, c: i32| (i32::from(a) * i32::from(b)).wrapping_add(c))
        }
        ("mad", Type::U32) => {
            |x| lift3(x, |a: u32, b: u32, c: u64| (u64::from(a) * u64::from(b)).wrapping_add(c))
        }
        ("mad", Type::S32) => {
            |x| lift3(x, |a: i32, b: i32, c: i64| (i64::from(a) * i64::from(b)).wrapping_add(c))
        }
        _ => return None,
    })
}

fn high(name: &str, ty: Type) -> Option<MapFn> {
    fn unsigned(a: u64, b: u64) -> u64 {
        ((u128::from(a) * u128::from(b)) >> 64) as u64
    }
    fn signed(a: i64, b: i64) -> i64 {
        ((i128::from(a) * i128::from(b)) >> 64) as i64
    }
    fn unsigned32(a: u32, b: u32) -> u32 {
        ((u64::from(a) * u64::from(b)) >> 32) as u32
    }
    fn signed32(a: i32, b: i32) -> i32 {
        ((i64::from(a) * i64::from(b)) >> 32) as i32
    }
    Some(match (name, ty) {
        ("mul", Type::U16) => |x| lift2(x, |a: u16, b: u16| ((u32::from(a) * u32::from(b)) >> 16) as u16),
        ("mul", Type::S16) => |x| lift2(x, |a: i16, b: i16| ((i32::from(a) * i32::from(b)) >> 16) as i16),
        ("mul", Type::U32) => |x| lift2(x, unsigned32),
        ("mul", Type::S32) => |x| lift2(x, signed32),
        ("mul", Type::U64) => |x| lift2(x, unsigned),
        ("mul", Type::S64) => |x| lift2(x, signed),
        ("mad", Type::U32) => |x| lift3(x, |a: u32, b: u32, c: u32| unsigned32(a, b).wrapping_add(c)),
        ("mad", Type::S32) => |x| lift3(x, |a: i32, b: i32, c: i32| signed32(a, b).wrapping_add(c)),
        ("mad", Type::U64) => |x| lift3(x, |a: u64, b: u64, c: u64| unsigned(a, b).wrapping_add(c)),
        ("mad", Type::S64) => |x| lift3(x, |a: i64, b: i64, c: i64| signed(a, b).wrapping_add(c)),
        _ => return None,
    })
}

fn saturating(name: &str, ty: Type) -> Option<MapFn> {
    Some(match (name, ty) {
        ("add", Type::S32) => |x| lift2(x, i32::saturating_add),
        ("sub", Type::S32) => |x| lift2(x, i32::saturating_sub),
        _ => return None,
    })
}

/// Position of the highest bit that differs from the sign, or how far to shift it to the top; all ones if there is none.
fn find(ty: Type, shift: bool) -> Option<MapFn> {
    fn top(magnitude: u64, width: u32, shift: bool) -> u32 {
        match magnitude {
            0 => !0,
            _ if shift => width - 1 - magnitude.ilog2(),
            _ => magnitude.ilog2(),
        }
    }
    Some(match (ty, shift) {
        (Type::U32, false) => |x| lift1(x, |a: u32| top(a.into(), 32, false)),
        (Type::U32, true) => |x| lift1(x, |a: u32| top(a.into(), 32, true)),
        (Type::S32, false) => |x| lift1(x, |a: i32| top(((a ^ a >> 31) as u32).into(), 32, false)),
        (Type::S32, true) => |x| lift1(x, |a: i32| top(((a ^ a >> 31) as u32).into(), 32, true)),
        (Type::U64, false) => |x| lift1(x, |a: u64| top(a, 64, false)),
        (Type::U64, true) => |x| lift1(x, |a: u64| top(a, 64, true)),
        (Type::S64, false) => |x| lift1(x, |a: i64| top((a ^ a >> 63) as u64, 64, false)),
        (Type::S64, true) => |x| lift1(x, |a: i64| top((a ^ a >> 63) as u64, 64, true)),
        _ => return None,
    })
}

/// `length` bits from `start`; past the top, and above a signed field, comes the sign.
fn extract(ty: Type) -> Option<MapFn> {
    fn field(value: i64, width: u32, signed: bool, start: u32, length: u32) -> i64 {
        let (start, length) = (start & 0xff, length & 0xff);
        let bit = |at: u32| value >> at.min(63) & 1;
        let sign = if signed && length > 0 { bit((start + length - 1).min(width - 1)) } else { 0 };
        (0..width).fold(0, |result, at| {
            let taken = if at < length && start + at < width { bit(start + at) } else { sign };
            result | taken << at
        })
    }
    Some(match ty {
        Type::U32 => {
            |x| lift3(x, |a: u32, start: u32, length: u32| field(a.into(), 32, false, start, length))
        }
        Type::S32 => |x| lift3(x, |a: i32, start: u32, length: u32| field(a.into(), 32, true, start, length)),
        Type::U64 => |x| lift3(x, |a: i64, start: u32, length: u32| field(a, 64, false, start, length)),
        Type::S64 => |x| lift3(x, |a: i64, start: u32, length: u32| field(a, 64, true, start, length)),
        _ => return None,
    })
}

/// `b` with `length` bits from `start` on taken from the low bits of `a`.
fn insert(ty: Type) -> Option<MapFn> {
    fn placed(a: u64, b: u64, start: u32, length: u32) -> u64 {
        let (start, length) = (start & 0xff, length & 0xff);
        let low = if length < 64 { (1 << length) - 1 } else { !0 };
        let mask = if start < 64 { low << start } else { 0 };
        b & !mask | if start < 64 { a << start & mask } else { 0 }
    }
    Some(match ty {
        Type::U32 | Type::U64 => |x| lift4(x, placed),
        _ => return None,
    })
}

pub(super) fn comparison(name: &str, ty: Type) -> Option<MapFn> {
    match name {
        "eq" => by_type!(ty, T => |x| lift2(x, |a: T, b: T| a == b)),
        "ne" => by_type!(ty, T => |x| lift2(x, |a: T, b: T| a != b)),
        "lt" | "lo" => by_type!(ty, T => |x| lift2(x, |a: T, b: T| a < b)),
        "le" | "ls" => by_type!(ty, T => |x| lift2(x, |a: T, b: T| a <= b)),
        "gt" | "hi" => by_type!(ty, T => |x| lift2(x, |a: T, b: T| a > b)),
        "ge" | "hs" => by_type!(ty, T => |x| lift2(x, |a: T, b: T| a >= b)),
        _ => None,
    }
}
