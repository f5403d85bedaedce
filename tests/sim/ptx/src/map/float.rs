//! Floating point. Approximate instructions are computed at f32's full accuracy, which is better than the hardware's.

use super::{lift1, lift2, lift3};
use crate::instruction::MapFn;
use crate::scalar::{Pair, fma_directed, fma_to_odd, fma_toward_zero, maximum, minimum};
use crate::types::{Opcode, Type};
use half::{bf16, f16};
use std::cmp::Ordering;

pub(super) fn map(opcode: &Opcode<'_>, ty: Type) -> Option<MapFn> {
    if ty == Type::F64 {
        return double(opcode);
    }
    if let Some(rounding) = opcode.one_of(&["rz", "rm", "rp"]) {
        return directed(opcode.name, rounding);
    }
    let nan = opcode.has("NaN");
    Some(match opcode.name {
        "mov" | "cvta" => |x| *x[0],
        "add" => |x| lift2(x, |a: f32, b: f32| a + b),
        "sub" => |x| lift2(x, |a: f32, b: f32| a - b),
        "mul" => |x| lift2(x, |a: f32, b: f32| a * b),
        "fma" | "mad" => |x| lift3(x, f32::mul_add),
        "div" => |x| lift2(x, |a: f32, b: f32| a / b),
        "max" if nan => {
            |x| lift2(x, |a: f32, b: f32| if a.is_nan() || b.is_nan() { f32::NAN } else { maximum(a, b) })
        }
        "min" if nan => {
            |x| lift2(x, |a: f32, b: f32| if a.is_nan() || b.is_nan() { f32::NAN } else { minimum(a, b) })
        }
        "max" => |x| lift2(x, maximum),
        "min" => |x| lift2(x, minimum),
        "abs" => |x| lift1(x, f32::abs),
        "neg" => |x| lift1(x, |a: f32| -a),
        "rcp" => |x| lift1(x, |a: f32| 1.0 / a),
        "sqrt" => |x| lift1(x, f32::sqrt),
        "rsqrt" => |x| lift1(x, |a: f32| (1.0 / f64::from(a).sqrt()) as f32),
        "ex2" => |x| lift1(x, f32::exp2),
        "lg2" => |x| lift1(x, f32::log2),
        "sin" => |x| lift1(x, f32::sin),
        "cos" => |x| lift1(x, f32::cos),
        "tanh" => |x| lift1(x, f32::tanh),
        "copysign" => |x| lift2(x, |sign: f32, magnitude: f32| magnitude.copysign(sign)),
        "slct" => |x| lift3(x, |a: u32, b: u32, c: f32| if c >= 0.0 { a } else { b }),
        "exch" => |x| lift2(x, |_: f32, new: f32| new),
        _ => return None,
    })
}

fn directed(name: &str, rounding: &str) -> Option<MapFn> {
    Some(match (name, rounding) {
        ("add", "rm") => |x| lift2(x, |a: f32, b: f32| fma_directed(a, 1.0, b, false)),
        ("add", "rp") => |x| lift2(x, |a: f32, b: f32| fma_directed(a, 1.0, b, true)),
        ("add", "rz") => |x| lift2(x, |a: f32, b: f32| fma_toward_zero(a, 1.0, b)),
        ("sub", "rm") => |x| lift2(x, |a: f32, b: f32| fma_directed(b, -1.0, a, false)),
        ("sub", "rp") => |x| lift2(x, |a: f32, b: f32| fma_directed(b, -1.0, a, true)),
        ("sub", "rz") => |x| lift2(x, |a: f32, b: f32| fma_toward_zero(b, -1.0, a)),
        ("mul", "rm") => |x| lift2(x, |a: f32, b: f32| fma_directed(a, b, -0.0, false)),
        ("mul", "rp") => |x| lift2(x, |a: f32, b: f32| fma_directed(a, b, -0.0, true)),
        ("mul", "rz") => |x| lift2(x, |a: f32, b: f32| fma_toward_zero(a, b, -0.0)),
        ("fma", "rm") => |x| lift3(x, |a, b, c| fma_directed(a, b, c, false)),
        ("fma", "rp") => |x| lift3(x, |a, b, c| fma_directed(a, b, c, true)),
        ("fma", "rz") => |x| lift3(x, fma_toward_zero),
        _ => return None,
    })
}

fn double(opcode: &Opcode<'_>) -> Option<MapFn> {
    Some(match opcode.name {
        "mov" => |x| *x[0],
        "add" => |x| lift2(x, |a: f64, b: f64| a + b),
        "sub" => |x| lift2(x, |a: f64, b: f64| a - b),
        "mul" => |x| lift2(x, |a: f64, b: f64| a * b),
        "fma" => |x| lift3(x, f64::mul_add),
        "div" => |x| lift2(x, |a: f64, b: f64| a / b),
        "max" => |x| lift2(x, f64::max),
        "min" => |x| lift2(x, f64::min),
        "abs" => |x| lift1(x, f64::abs),
        "neg" => |x| lift1(x, |a: f64| -a),
        "rcp" => |x| lift1(x, |a: f64| 1.0 / a),
        "sqrt" => |x| lift1(x, f64::sqrt),
        "rsqrt" => |x| lift1(x, |a: f64| 1.0 / a.sqrt()),
        _ => return None,
    })
}

/// 16-bit floats, one or two at a time. A sum or product of two is exact enough in f32 to be rounded twice (24 bits are at least
/// twice 11 and two more); a fused product and sum goes through rounding to odd.
macro_rules! narrow {
    ($function:ident, $t:ident) => {
        fn $function(opcode: &Opcode<'_>, pair: bool) -> Option<MapFn> {
            fn add(a: $t, b: $t) -> $t {
                $t::from_f32(a.to_f32() + b.to_f32())
            }
            fn sub(a: $t, b: $t) -> $t {
                $t::from_f32(a.to_f32() - b.to_f32())
            }
            fn mul(a: $t, b: $t) -> $t {
                $t::from_f32(a.to_f32() * b.to_f32())
            }
            fn fma(a: $t, b: $t, c: $t) -> $t {
                $t::from_f32(fma_to_odd(a.to_f32(), b.to_f32(), c.to_f32()))
            }
            fn relu(a: $t) -> $t {
                if a.is_nan() || a.is_sign_negative() { $t::ZERO } else { a }
            }
            fn max(a: $t, b: $t) -> $t {
                $t::from_f32(maximum(a.to_f32(), b.to_f32()))
            }
            fn min(a: $t, b: $t) -> $t {
                $t::from_f32(minimum(a.to_f32(), b.to_f32()))
            }
            fn abs(a: $t) -> $t {
                $t::from_bits(a.to_bits() & 0x7fff)
            }
            fn neg(a: $t) -> $t {
                $t::from_bits(a.to_bits() ^ 0x8000)
            }
            fn exp2(a: $t) -> $t {
                $t::from_f32(a.to_f32().exp2())
            }
            fn tanh(a: $t) -> $t {
                $t::from_f32(a.to_f32().tanh())
            }
            type P = Pair<$t>;
            let relu_too = opcode.has("relu");
            if opcode.has("NaN") || opcode.has("sat") || relu_too && opcode.name != "fma" {
                return None;
            }
            Some(match (opcode.name, pair) {
                ("add", false) => |x| lift2(x, add),
                ("add", true) => |x| lift2(x, |a: P, b: P| a.zip(b, add)),
                ("sub", false) => |x| lift2(x, sub),
                ("sub", true) => |x| lift2(x, |a: P, b: P| a.zip(b, sub)),
                ("mul", false) => |x| lift2(x, mul),
                ("mul", true) => |x| lift2(x, |a: P, b: P| a.zip(b, mul)),
                ("fma", false) if relu_too => |x| lift3(x, |a, b, c| relu(fma(a, b, c))),
                ("fma", true) if relu_too => {
                    |x| lift3(x, |a: P, b: P, c: P| Pair(relu(fma(a.0, b.0, c.0)), relu(fma(a.1, b.1, c.1))))
                }
                ("fma", false) => |x| lift3(x, fma),
                ("fma", true) => {
                    |x| lift3(x, |a: P, b: P, c: P| Pair(fma(a.0, b.0, c.0), fma(a.1, b.1, c.1)))
                }
                ("max", false) => |x| lift2(x, max),
                ("max", true) => |x| lift2(x, |a: P, b: P| a.zip(b, max)),
                ("min", false) => |x| lift2(x, min),
                ("min", true) => |x| lift2(x, |a: P, b: P| a.zip(b, min)),
                ("abs", false) => |x| lift1(x, abs),
                ("abs", true) => |x| lift1(x, |a: P| Pair(abs(a.0), abs(a.1))),
                ("neg", false) => |x| lift1(x, neg),
                ("neg", true) => |x| lift1(x, |a: P| Pair(neg(a.0), neg(a.1))),
                ("ex2", false) => |x| lift1(x, exp2),
                ("ex2", true) => |x| lift1(x, |a: P| Pair(exp2(a.0), exp2(a.1))),
                ("tanh", false) => |x| lift1(x, tanh),
                ("tanh", true) => |x| lift1(x, |a: P| Pair(tanh(a.0), tanh(a.1))),
                ("mov", _) => |x| *x[0],
                _ => return None,
            })
        }
    };
}
narrow!(half_precision, f16);
narrow!(brain, bf16);

pub(super) fn half(opcode: &Opcode<'_>, ty: Type) -> Option<MapFn> {
    match ty {
        Type::F16 => half_precision(opcode, false),
        Type::F16x2 => half_precision(opcode, true),
        Type::Bf16 => brain(opcode, false),
        Type::Bf16x2 => brain(opcode, true),
        _ => None,
    }
}

/// Plain names are false where a NaN takes part, those that end in `u` true.
pub(super) fn comparison(name: &str, ty: Type) -> Option<MapFn> {
    macro_rules! compare {
        ($t:ty) => {
            Some(match name {
                "eq" => |x| lift2(x, |a: $t, b: $t| a == b),
                "ne" => |x| lift2(x, |a: $t, b: $t| a.partial_cmp(&b).is_some_and(Ordering::is_ne)),
                "lt" => |x| lift2(x, |a: $t, b: $t| a < b),
                "le" => |x| lift2(x, |a: $t, b: $t| a <= b),
                "gt" => |x| lift2(x, |a: $t, b: $t| a > b),
                "ge" => |x| lift2(x, |a: $t, b: $t| a >= b),
                "equ" => |x| lift2(x, |a: $t, b: $t| a.partial_cmp(&b).is_none_or(Ordering::is_eq)),
                "neu" => |x| lift2(x, |a: $t, b: $t| a != b),
                "ltu" => |x| lift2(x, |a: $t, b: $t| a.partial_cmp(&b).is_none_or(Ordering::is_lt)),
                "leu" => |x| lift2(x, |a: $t, b: $t| a.partial_cmp(&b).is_none_or(Ordering::is_le)),
                "gtu" => |x| lift2(x, |a: $t, b: $t| a.partial_cmp(&b).is_none_or(Ordering::is_gt)),
                "geu" => |x| lift2(x, |a: $t, b: $t| a.partial_cmp(&b).is_none_or(Ordering::is_ge)),
                "num" => |x| lift2(x, |a: $t, b: $t| !a.is_nan() && !b.is_nan()),
                "nan" => |x| lift2(x, |a: $t, b: $t| a.is_nan() || b.is_nan()),
                _ => return None,
            })
        };
    }
    match ty {
        Type::F32 => compare!(f32),
        Type::F64 => compare!(f64),
        Type::F16 => compare!(f16),
        Type::Bf16 => compare!(bf16),
        _ => None,
    }
}
