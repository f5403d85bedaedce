//! Values of a warp's 32 lanes, and the roundings that Rust has no operator for.
//!
//! A register holds 64 bits a lane, whatever its declared width. The bits above the width are unspecified: whoever reads a
//! register says with which type, and [`Scalar::of`] cuts the rest off.

use half::{bf16, f16};

/// Lanes of a warp.
pub(crate) const WARP: usize = 32;

/// One register: a value for each lane.
pub(crate) type Lanes = [u64; WARP];

/// A type that an instruction can compute in.
pub(crate) trait Scalar: Copy {
    fn of(bits: u64) -> Self;
    fn bits(self) -> u64;
}

macro_rules! integers {
    ($($t:ty)*) => {$(
        impl Scalar for $t {
            #[inline(always)]
            fn of(bits: u64) -> Self {
                bits as Self
            }
            #[inline(always)]
            fn bits(self) -> u64 {
                self as u64
            }
        }
    )*};
}
integers!(u8 i8 u16 i16 u32 i32 u64 i64);

macro_rules! floats {
    ($($t:ty as $bits:ty)*) => {$(
        impl Scalar for $t {
            #[inline(always)]
            fn of(bits: u64) -> Self {
                Self::from_bits(bits as $bits)
            }
            #[inline(always)]
            fn bits(self) -> u64 {
                u64::from(self.to_bits())
            }
        }
    )*};
}
floats!(f16 as u16 bf16 as u16 f32 as u32 f64 as u64);

impl Scalar for bool {
    #[inline(always)]
    fn of(bits: u64) -> Self {
        bits & 1 != 0
    }
    #[inline(always)]
    fn bits(self) -> u64 {
        u64::from(self)
    }
}

/// Two 16-bit values in one 32-bit register, the first in the low half.
#[derive(Clone, Copy)]
pub(crate) struct Pair<T>(pub(crate) T, pub(crate) T);

impl<T: Scalar> Scalar for Pair<T> {
    #[inline(always)]
    fn of(bits: u64) -> Self {
        Self(T::of(bits & 0xffff), T::of(bits >> 16 & 0xffff))
    }
    #[inline(always)]
    fn bits(self) -> u64 {
        self.0.bits() & 0xffff | (self.1.bits() & 0xffff) << 16
    }
}

impl<T> Pair<T> {
    #[inline(always)]
    pub(crate) fn zip<R>(self, other: Self, f: impl Fn(T, T) -> R) -> Pair<R> {
        Pair(f(self.0, other.0), f(self.1, other.1))
    }
}

/// `a + b` in f64 and what its rounding lost (Knuth's two-sum): their sum is exact.
fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let part = sum - a;
    (sum, (a - (sum - part)) + (b - part))
}

/// The f32 on the side of `exact = value + error` that `up` says; exact values stay.
fn directed(value: f64, error: f64, up: bool) -> f32 {
    let near = value as f32;
    if !near.is_finite() || !value.is_finite() {
        return near;
    }
    // The sign of exact - near; both differences are exact or of the right sign.
    let rest = (value - f64::from(near)) + error;
    match (rest > 0.0, rest < 0.0) {
        (true, _) if up => near.next_up(),
        (_, true) if !up => near.next_down(),
        _ => near,
    }
}

/// `a * b + c` rounded up, or down; the product of two f32 is exact in f64.
pub(crate) fn fma_directed(a: f32, b: f32, c: f32, up: bool) -> f32 {
    let (sum, error) = two_sum(f64::from(a) * f64::from(b), f64::from(c));
    directed(sum, error, up)
}

/// `a * b + c` rounded toward zero.
pub(crate) fn fma_toward_zero(a: f32, b: f32, c: f32) -> f32 {
    let near = a.mul_add(b, c);
    fma_directed(a, b, c, near.is_sign_negative())
}

/// `a * b + c` as an f32 that rounds on to a 16-bit format as the exact value would: an inexact result gets an odd last bit
/// (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
pub(crate) fn fma_to_odd(a: f32, b: f32, c: f32) -> f32 {
    let zero = fma_toward_zero(a, b, c);
    let (sum, error) = two_sum(f64::from(a) * f64::from(b), f64::from(c));
    let inexact = sum != f64::from(zero) || error != 0.0;
    if zero.is_finite() && inexact && !sum.is_nan() { f32::from_bits(zero.to_bits() | 1) } else { zero }
}

/// The larger; a number rather than a NaN, and +0 rather than -0.
#[inline(always)]
pub(crate) fn maximum(a: f32, b: f32) -> f32 {
    if a == b { f32::from_bits(a.to_bits() & b.to_bits()) } else { a.max(b) }
}

/// The smaller; a number rather than a NaN, and -0 rather than +0.
#[inline(always)]
pub(crate) fn minimum(a: f32, b: f32) -> f32 {
    if a == b { f32::from_bits(a.to_bits() | b.to_bits()) } else { a.min(b) }
}

/// f32 to the ten mantissa bits of tf32, ties away from zero.
pub(crate) fn to_tf32(a: f32) -> f32 {
    if a.is_finite() { f32::from_bits(a.to_bits().wrapping_add(0x1000) & !0x1fff) } else { a }
}

/// A subnormal becomes a zero of its sign, as `.ftz` asks.
#[inline(always)]
pub(crate) fn flush(bits: u64) -> u64 {
    if f32::of(bits).is_subnormal() { bits & 0x8000_0000 } else { bits }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directed_rounding_brackets_the_exact_value() {
        // 1 + 2^-30 lies between 1 and its successor.
        let tiny = 2f32.powi(-15);
        assert_eq!(fma_directed(tiny, tiny, 1.0, false), 1.0);
        assert_eq!(fma_directed(tiny, tiny, 1.0, true), 1f32.next_up());
        assert_eq!(fma_toward_zero(tiny, tiny, -1.0), -1f32.next_down());
        assert_eq!(fma_directed(3.0, 5.0, 1.0, false), 16.0);
    }

    #[test]
    fn rounding_to_odd_keeps_a_tie_from_being_rounded_twice() {
        // 1 + 2^-11 is a tie of f16; the 2^-40 above it decides, and plain f32 loses it.
        let (a, b) = (2f32.powi(-20), 2f32.powi(-20));
        let c = 1.0 + 2f32.powi(-11);
        assert_eq!(f16::from_f32(a.mul_add(b, c)), f16::ONE);
        assert_eq!(f16::from_f32(fma_to_odd(a, b, c)).to_bits(), f16::ONE.to_bits() + 1);
    }
}
