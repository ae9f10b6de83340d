//! How far a kernel's f32 result may lie from the exact one, and why.
//!
//! WGSL compilers may fuse a multiplication with an addition and reassociate sums, so that equal bytes can't be asked for
//! across adapters; what can be asked for is the classical error bound of a sum of products, which holds in any order and
//! with or without fusing. With unit roundoff u and γ(n) = n·u / (1 − n·u) (Higham, *Accuracy and Stability of Numerical
//! Algorithms*, 2nd ed., §3.1):
//!
//! - sum of a bias and K products: |error| ≤ γ(K + 1)·(|b| + Σ|x·w|): a product is rounded once and takes part in at most
//!   K sums;
//! - rotation of a pair whose parts carry errors e: |error| ≤ (1 + γ(2))·(e_a|cos| + e_b|sin|) + γ(2)·(|a·cos| + |b·sin|):
//!   one product and one sum each. Tables are taken as exact: both sides read the same f32 table.

use crate::WeightFormat;

/// The constants of an implementation of f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// The largest relative error of one rounding.
    unit_roundoff: f64,
    /// Results and operands below this may be taken as zero.
    flush: f64,
    /// Weights below this may be taken as zero when they are widened.
    weight_flush: f64,
}

impl Tolerance {
    /// IEEE 754 binary32 with rounding to nearest and subnormals: u = 2⁻²⁴, and no flushing but that a product may
    /// underflow, with half the smallest subnormal lost (we grant the whole of it).
    pub const CPU: Self =
        Self { unit_roundoff: 1.0 / (1u64 << 24) as f64, flush: SMALLEST_SUBNORMAL, weight_flush: 0.0 };

    /// WGSL (§ 15.7 of the specification): +, − and · are correctly rounded, but in a direction left to the implementation,
    /// so that u = 2⁻²³; subnormal operands and results may be flushed to zero: 2⁻¹²⁶ for f32, and 2⁻¹⁴ for weights in
    /// f16, unpacked or widened.
    pub const fn wgsl(weights: WeightFormat) -> Self {
        Self {
            unit_roundoff: 1.0 / (1u64 << 23) as f64,
            flush: f32::MIN_POSITIVE as f64,
            weight_flush: match weights {
                WeightFormat::F32 => 0.0,
                WeightFormat::F16 | WeightFormat::PackedF16 => 1.0 / (1u64 << 14) as f64,
            },
        }
    }

    /// γ(n) = n·u / (1 − n·u).
    ///
    /// # Panics
    /// When n·u ≥ 1: no sum of that many terms has a bound (n < 2²³ for every tolerance here).
    pub fn gamma(&self, n: usize) -> f64 {
        let nu = n as f64 * self.unit_roundoff;
        assert!(nu < 1.0, "no error bound for {n} roundings of {}", self.unit_roundoff);
        nu / (1.0 - nu)
    }

    /// `bias` plus the products of `terms`, exact (to f64) and bounded.
    pub fn sum_of_products(&self, bias: f64, terms: impl Iterator<Item = (f64, f64)>) -> Expected {
        let (mut value, mut magnitude, mut flushed, mut count) = (bias, bias.abs(), 0.0, 0);
        for (x, w) in terms {
            value += x * w;
            magnitude += (x * w).abs();
            // Either operand, the product or the sum may be flushed.
            flushed += self.flush * (x.abs() + w.abs() + 2.0);
            if w.abs() < self.weight_flush {
                flushed += (x * w).abs();
            }
            count += 1;
        }
        Expected { value, bound: self.gamma(count + 1) * magnitude + flushed }
    }

    /// `(a, b)` turned by the angle of `cos` and `sin` (which may carry an attention factor): `(a·cos − b·sin, b·cos + a·sin)`.
    pub fn rotated(&self, a: Expected, b: Expected, cos: f64, sin: f64) -> (Expected, Expected) {
        let part = |x: Expected, y: Expected, sign: f64| {
            let carried = x.bound * cos.abs() + y.bound * sin.abs();
            let magnitude = (x.value * cos).abs() + (y.value * sin).abs();
            let flushed = self.flush * (x.value.abs() + y.value.abs() + cos.abs() + sin.abs() + 3.0);
            Expected {
                value: x.value * cos + sign * y.value * sin,
                bound: (1.0 + self.gamma(2)) * carried + self.gamma(2) * magnitude + flushed,
            }
        };
        (part(a, b, -1.0), part(b, a, 1.0))
    }

    /// A value that is only copied: exact, but a subnormal may be flushed on its way through a register.
    pub fn copied(&self, value: f64) -> Expected {
        Expected { value, bound: self.flush }
    }
}

/// 2⁻¹⁴⁹.
const SMALLEST_SUBNORMAL: f64 = 1.401298464324817e-45;

/// The exact result, to f64, and how far an f32 result may lie from it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expected {
    /// The result.
    pub value: f64,
    /// The largest error that is explained.
    pub bound: f64,
}

impl Expected {
    /// max(x, 0). It doesn't enlarge an error: two numbers lie no further apart after it than before.
    pub fn rectified(self) -> Self {
        Self { value: self.value.max(0.0), ..self }
    }
}

/// Found against expected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    /// Values compared.
    pub count: usize,
    /// The largest error. NaN or infinite results make it infinite.
    pub max_error: f64,
    /// The mean error.
    pub mean_error: f64,
    /// The largest ratio of an error to its bound; at most 1 where the result is right.
    pub worst_ratio: f64,
    /// Where that is.
    pub worst_index: usize,
    /// The bound there.
    pub worst_bound: f64,
}

impl Comparison {
    /// Compares pairs of found and expected.
    pub fn new(pairs: impl IntoIterator<Item = (f32, Expected)>) -> Self {
        let mut seen =
            Self { count: 0, max_error: 0.0, mean_error: 0.0, worst_ratio: 0.0, worst_index: 0, worst_bound: 0.0 };
        let mut sum = 0.0;
        for (index, (found, expected)) in pairs.into_iter().enumerate() {
            let error = (f64::from(found) - expected.value).abs();
            let error = if error.is_nan() { f64::INFINITY } else { error };
            let ratio = if error == 0.0 { 0.0 } else { error / expected.bound };
            seen.count += 1;
            sum += error;
            seen.max_error = seen.max_error.max(error);
            if ratio > seen.worst_ratio {
                (seen.worst_ratio, seen.worst_index, seen.worst_bound) = (ratio, index, expected.bound);
            }
        }
        seen.mean_error = sum / seen.count.max(1) as f64;
        seen
    }

    /// Whether there was something to compare and every error is explained.
    pub fn passes(&self) -> bool {
        self.count > 0 && self.worst_ratio <= 1.0
    }
}
