//! Elementary functions as straight lines of arithmetic, so that the compiler vectorises the loops around them.
//!
//! None branches or looks anything up; each is `inline(always)` and takes on the instruction set of its caller. NaN
//! gives NaN. Bounds are tested against f64.

use std::f32::consts::{FRAC_1_SQRT_2, LOG2_E};

/// `e^x` within 2 units in the last place; below the smallest normal, within one subnormal step; ∞ above 88.73.
///
/// `x = n ln 2 + r` with `|r| ≤ ln 2 / 2`; `e^r` by a polynomial of degree 7 (Taylor, remainder under 2^-27), `2^n` by
/// the exponent's bits, in two factors so that it may pass the range of normals at either end.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // 1.5 · 2^23: adding it rounds to an integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts, the first short enough that its products with n are exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // Beyond these the result is ∞ and 0 anyway. A comparison with NaN is false, so NaN stays.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.5 { -104.5 } else { x };
    let shifted = x * LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN_2_HIGH - n * LN_2_LOW;
    let mut p = 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    // The last two terms apart: 1 + (r + r² p) rounds once at the size of the result.
    let power = 1.0 + (r + r * r * p);
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    power * two_to(half) * two_to(n.wrapping_sub(half))
}

/// `2^n` for an exponent of a normal number.
#[inline(always)]
fn two_to(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `2 √(2/π)`.
const TANH_SCALE: f32 = 1.595_769;
const TANH_CUBE: f32 = 0.044_715;

/// `0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))`, by `0.5 (1 + tanh u) = sigmoid(2 u)`: no cancellation.
#[inline(always)]
pub(crate) fn gelu_tanh(x: f32) -> f32 {
    x * sigmoid(TANH_SCALE * x * (1.0 + TANH_CUBE * x * x))
}

/// Derivative of [`gelu_tanh`].
#[inline(always)]
pub(crate) fn gelu_tanh_slope(x: f32) -> f32 {
    let s = sigmoid(TANH_SCALE * x * (1.0 + TANH_CUBE * x * x));
    // From |x| = 100 on `s (1 - s)` is 0, which must not meet an infinity.
    let square = x * x;
    let square = if square > 1e4 { 1e4 } else { square };
    let bounded = if x > 100.0 { 100.0 } else { x };
    let bounded = if bounded < -100.0 { -100.0 } else { bounded };
    s + bounded * s * (1.0 - s) * TANH_SCALE * (1.0 + 3.0 * TANH_CUBE * square)
}

/// `Φ(x) = 0.5 (1 + erf(x / √2))`, within 3·10⁻⁷.
///
/// `erfc(z) = t exp(-z² + P(t))`, `t = 1 / (1 + z / 2)` for `z ≥ 0`: the Chebyshev fit of Press et al., Numerical Recipes
/// §6.2, of relative error 1.2·10⁻⁷.
#[inline(always)]
pub(crate) fn normal_cdf(x: f32) -> f32 {
    const P: [f32; 10] = [
        0.170_872_77,
        -0.822_152_23,
        1.488_515_9,
        -1.135_204,
        0.278_868_06,
        -0.186_288_06,
        0.096_784_18,
        0.374_091_96,
        1.000_023_7,
        -1.265_512_2,
    ];
    let z = x.abs() * FRAC_1_SQRT_2;
    let t = 1.0 / (1.0 + 0.5 * z);
    let mut p = P[0];
    p = p * t + P[1];
    p = p * t + P[2];
    p = p * t + P[3];
    p = p * t + P[4];
    p = p * t + P[5];
    p = p * t + P[6];
    p = p * t + P[7];
    p = p * t + P[8];
    p = p * t + P[9];
    let tail = 0.5 * t * exp(p - z * z);
    // NaN is not below 0, and 1 - NaN is NaN.
    if x < 0.0 { tail } else { 1.0 - tail }
}

/// `0.5 x (1 + erf(x / √2))`.
#[inline(always)]
pub(crate) fn gelu_erf(x: f32) -> f32 {
    x * normal_cdf(x)
}

/// Derivative of [`gelu_erf`].
#[inline(always)]
pub(crate) fn gelu_erf_slope(x: f32) -> f32 {
    // 1 / √(2π) = 1/√2 · 1/√π.
    const DENSITY: f32 = 0.398_942_3;
    normal_cdf(x) + x * DENSITY * exp(-0.5 * x * x)
}

/// Lanes that a reduction keeps apart: two registers of eight. Fixed, so that sums are the same on every machine.
pub(crate) const LANES: usize = 16;

/// Sum of a row, in an order that its length alone decides.
#[inline(always)]
pub(crate) fn sum(row: &[f32]) -> f32 {
    reduce(row, 0.0, |sum, x| sum + x)
}

/// The largest element, NaN aside; -∞ of none.
#[inline(always)]
pub(crate) fn maximum(row: &[f32]) -> f32 {
    reduce(row, f32::NEG_INFINITY, |a, b| if b > a { b } else { a })
}

#[inline(always)]
fn reduce(row: &[f32], start: f32, combine: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [start; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = combine(*lane, x);
        }
    }
    lanes.iter().chain(rest).copied().fold(start, combine)
}

/// `Σ f(aᵢ, bᵢ)`, in an order that the length alone decides.
#[inline(always)]
pub(crate) fn sum_of(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a.remainder().iter().zip(b.remainder()).fold(0.0, |sum, (&a, &b)| sum + f(a, b));
    for (a, b) in a.zip(b) {
        for ((lane, &a), &b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += f(a, b);
        }
    }
    lanes.iter().fold(0.0, |sum, lane| sum + lane) + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Floats over a range, denser near 0 than an even grid.
    fn points(limit: f32) -> impl Iterator<Item = f32> {
        (-200_000..=200_000).map(move |i| {
            let t = i as f32 / 200_000.0;
            limit * t * t.abs()
        })
    }

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for x in points(87.0) {
            let exact = f64::from(x).exp();
            let unit = f64::from(f32::EPSILON) * exact;
            assert!((f64::from(exp(x)) - exact).abs() <= 2.0 * unit, "exp({x}) = {}", exp(x));
        }
        for x in (0..20_000).map(|i| -87.0 - i as f32 * 1e-3) {
            let error = (f64::from(exp(x)) - f64::from(x).exp()).abs();
            assert!(error <= 2.0 * f64::from(f32::EPSILON) * f64::from(x).exp() + 1.5e-45, "exp({x})");
        }
    }

    #[test]
    fn exp_of_the_extremes() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(f32::MAX), f32::INFINITY);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::MIN), 0.0);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(88.72).is_finite());
    }

    fn gelu_tanh_f64(x: f64) -> f64 {
        0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
    }

    fn gelu_erf_f64(x: f64) -> f64 {
        0.5 * x * (1.0 + libm::erf(x / std::f64::consts::SQRT_2))
    }

    fn slope(f: impl Fn(f64) -> f64, x: f64) -> f64 {
        (f(x + 1e-5) - f(x - 1e-5)) / 2e-5
    }

    #[test]
    fn gelus_and_their_slopes() {
        // A few units of f32 at the size of the result and of the terms it is made of, which grow as x and x³.
        for x in points(12.0) {
            let exact = f64::from(x);
            let close = |found: f32, expected: f64, terms: f64, what: &str| {
                let error = (f64::from(found) - expected).abs();
                assert!(error <= 4e-7 * (1.0 + terms), "{what}({x}) = {found}, not {expected}");
            };
            close(gelu_tanh(x), gelu_tanh_f64(exact), exact.abs(), "gelu_tanh");
            close(gelu_erf(x), gelu_erf_f64(exact), exact.abs(), "gelu_erf");
            close(gelu_tanh_slope(x), slope(gelu_tanh_f64, exact), exact.abs().powi(3), "gelu_tanh_slope");
            close(gelu_erf_slope(x), slope(gelu_erf_f64, exact), exact.abs(), "gelu_erf_slope");
        }
        for f in [gelu_tanh, gelu_erf, gelu_tanh_slope, gelu_erf_slope] {
            assert!(f(f32::NAN).is_nan());
        }
        for x in [1e5, 1e20, f32::MAX] {
            assert_eq!((gelu_tanh_slope(x), gelu_tanh_slope(-x)), (1.0, 0.0));
            assert_eq!((gelu_erf_slope(x), gelu_erf_slope(-x)), (1.0, 0.0));
        }
        assert_eq!((gelu_tanh(f32::INFINITY), gelu_erf(f32::INFINITY)), (f32::INFINITY, f32::INFINITY));
    }

    #[test]
    fn reductions_of_every_length() {
        for len in 0..70usize {
            let row: Vec<f32> = (0..len).map(|i| (i * 37 % 11) as f32 - 5.0).collect();
            assert_eq!(sum(&row), row.iter().sum::<f32>());
            assert_eq!(maximum(&row), row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            assert_eq!(sum_of(&row, &row, |a, b| a * b), row.iter().map(|x| x * x).sum::<f32>());
        }
    }
}
