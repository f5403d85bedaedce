//! `cvt`, as one or two steps: first to the widest type of the source's kind, then to the target. Each conversion rounds at most
//! once, since the first step is exact.

use super::{by_type, lift1, lift2};
use crate::instruction::MapFn;
use crate::scalar::{Pair, to_tf32};
use crate::types::{Opcode, Type};
use half::{bf16, f16};

/// The steps of a `cvt`; empty if there is no such conversion.
pub(crate) fn conversions(opcode: &Opcode<'_>) -> Vec<MapFn> {
    let &[to, from] = opcode.types.as_slice() else { return Vec::new() };
    let integral = opcode.one_of(&["rni", "rzi", "rmi", "rpi"]);
    let toward = opcode.one_of(&["rz", "rm", "rp"]);
    let to_tf32 = opcode.has("rna") && to == Type::Tf32;
    let clamp = opcode.has("sat") && to.is_integer() && from.is_integer();
    if toward.is_some() || opcode.has("relu") || clamp {
        return Vec::new();
    }
    let steps = match (from, to) {
        (Type::F32, Type::F16x2 | Type::Bf16x2) => vec![pack(to)],
        (Type::F32, Type::Tf32) if to_tf32 => vec![tf32()],
        _ if integral.is_none() && direct(from, to).is_some() => vec![direct(from, to)],
        (Type::F32, Type::F32) => vec![integral.and_then(round_single)],
        _ if from.is_integer() && to.is_integer() => vec![extend(from), truncate(to)],
        _ if from.is_integer() => vec![extend(from), from_integer(from.is_signed(), to)],
        _ => {
            let round = integral.filter(|_| !to.is_integer()).map(round);
            let last =
                if to.is_integer() { to_integer(integral.unwrap_or("rzi"), to) } else { from_double(to) };
            let mut steps = vec![to_double(from)];
            steps.extend(round);
            steps.push(last);
            steps
        }
    };
    steps.into_iter().collect::<Option<_>>().unwrap_or_default()
}

fn pack(to: Type) -> Option<MapFn> {
    // The first operand goes to the upper half.
    Some(match to {
        Type::F16x2 => |x| lift2(x, |high: f32, low: f32| Pair(f16::from_f32(low), f16::from_f32(high))),
        _ => |x| lift2(x, |high: f32, low: f32| Pair(bf16::from_f32(low), bf16::from_f32(high))),
    })
}

fn tf32() -> Option<MapFn> {
    Some(|x| lift1(x, to_tf32))
}

/// The usual conversions between floats, in one step.
fn direct(from: Type, to: Type) -> Option<MapFn> {
    Some(match (from, to) {
        (Type::F32, Type::F32) => |x| *x[0],
        (Type::F16, Type::F32) => |x| lift1(x, f16::to_f32),
        (Type::Bf16, Type::F32) => |x| lift1(x, bf16::to_f32),
        (Type::F32, Type::F16) => |x| lift1(x, f16::from_f32),
        (Type::F32, Type::Bf16) => |x| lift1(x, bf16::from_f32),
        _ => return None,
    })
}

fn round_single(rounding: &str) -> Option<MapFn> {
    Some(match rounding {
        "rni" => |x| lift1(x, f32::round_ties_even),
        "rzi" => |x| lift1(x, f32::trunc),
        "rmi" => |x| lift1(x, f32::floor),
        _ => |x| lift1(x, f32::ceil),
    })
}

/// An integer to 64 bits, by its sign.
fn extend(from: Type) -> Option<MapFn> {
    by_type!(from, T => |x| lift1(x, |a: T| a))
}

/// 64 bits to an integer, whose own sign fills the bits above.
fn truncate(to: Type) -> Option<MapFn> {
    by_type!(to, T => |x| lift1(x, |a: u64| a as T))
}

fn from_integer(signed: bool, to: Type) -> Option<MapFn> {
    Some(match (signed, to) {
        (true, Type::F32) => |x| lift1(x, |a: i64| a as f32),
        (false, Type::F32) => |x| lift1(x, |a: u64| a as f32),
        (true, Type::F64) => |x| lift1(x, |a: i64| a as f64),
        (false, Type::F64) => |x| lift1(x, |a: u64| a as f64),
        // Beyond 2^53 a f16 is infinite anyway.
        (true, Type::F16) => |x| lift1(x, |a: i64| narrow_f16(a as f64)),
        (false, Type::F16) => |x| lift1(x, |a: u64| narrow_f16(a as f64)),
        _ => return None,
    })
}

fn to_double(from: Type) -> Option<MapFn> {
    Some(match from {
        Type::F16 => |x| lift1(x, |a: f16| f64::from(a.to_f32())),
        Type::Bf16 => |x| lift1(x, |a: bf16| f64::from(a.to_f32())),
        Type::F32 => |x| lift1(x, |a: f32| f64::from(a)),
        Type::F64 => |x| *x[0],
        _ => return None,
    })
}

fn round(rounding: &str) -> Option<MapFn> {
    Some(match rounding {
        "rni" => |x| lift1(x, f64::round_ties_even),
        "rzi" => |x| lift1(x, f64::trunc),
        "rmi" => |x| lift1(x, f64::floor),
        _ => |x| lift1(x, f64::ceil),
    })
}

/// Out of range is the nearest value there is, NaN is 0.
fn to_integer(rounding: &str, to: Type) -> Option<MapFn> {
    match rounding {
        "rni" => by_type!(to, T => |x| lift1(x, |a: f64| a.round_ties_even() as T)),
        "rzi" => by_type!(to, T => |x| lift1(x, |a: f64| a as T)),
        "rmi" => by_type!(to, T => |x| lift1(x, |a: f64| a.floor() as T)),
        _ => by_type!(to, T => |x| lift1(x, |a: f64| a.ceil() as T)),
    }
}

/// To f16 or bf16 without rounding twice: what f32 cannot hold is kept in its last bit.
fn odd(a: f64) -> f32 {
    let near = a as f32;
    let toward_zero = if f64::from(near.abs()) > a.abs() { f32::from_bits(near.to_bits() - 1) } else { near };
    if f64::from(toward_zero) == a || a.is_nan() || toward_zero.is_infinite() {
        near
    } else {
        f32::from_bits(toward_zero.to_bits() | 1)
    }
}

fn narrow_f16(a: f64) -> f16 {
    f16::from_f32(odd(a))
}

fn from_double(to: Type) -> Option<MapFn> {
    Some(match to {
        Type::F16 => |x| lift1(x, narrow_f16),
        Type::Bf16 => |x| lift1(x, |a: f64| bf16::from_f32(odd(a))),
        Type::F32 => |x| lift1(x, |a: f64| a as f32),
        Type::F64 => |x| *x[0],
        _ => return None,
    })
}
