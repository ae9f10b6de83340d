//! Elementwise steps between the matrix products, on slices.

use kvmig_gemm::widest;

use super::team::Team;

/// `to[r] = from[r] / sqrt(mean(from[r]²) + eps) * weight` for rows of `weight.len()` elements (Zhang & Sennrich 2019).
pub(super) fn rms_norm(team: Team, from: &[f32], weight: &[f32], eps: f32, to: &mut [f32]) {
    let width = weight.len();
    team.rows((to, width), (from, width), |to, from| {
        widest(
            #[inline(always)]
            || {
                for (to, from) in to.chunks_exact_mut(width).zip(from.chunks_exact(width)) {
                    let scale = inverse_rms(from, eps);
                    for ((to, x), w) in to.iter_mut().zip(from).zip(weight) {
                        *to = x * scale * w;
                    }
                }
            },
        );
    });
}

/// [`rms_norm`] of one short row, in place: a head of the queries or keys.
pub(super) fn rms_norm_head(row: &mut [f32], weight: &[f32], eps: f32) {
    let scale = inverse_rms(row, eps);
    for (x, w) in row.iter_mut().zip(weight) {
        *x = *x * scale * w;
    }
}

#[inline(always)]
fn inverse_rms(row: &[f32], eps: f32) -> f32 {
    // Eight partial sums: vectorises, and loses less than one running sum.
    let mut sums = [0.0f32; 8];
    let chunks = row.chunks_exact(8);
    let rest: f32 = chunks.remainder().iter().map(|x| x * x).sum();
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum += x * x;
        }
    }
    let mean = (sums.iter().sum::<f32>() + rest) / row.len() as f32;
    1.0 / (mean + eps).sqrt()
}

/// Rotates one head in place, half-split: `(x[i], x[i + d/2])` by the angle whose `(cos, sin)` is `table[i]`.
pub(super) fn rotate(head: &mut [f32], table: &[f32]) {
    let (low, high) = head.split_at_mut(table.len() / 2);
    for ((a, b), turn) in low.iter_mut().zip(high).zip(table.chunks_exact(2)) {
        let (cos, sin) = (turn[0], turn[1]);
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

/// `gate = silu(gate) * up`, `silu(x) = x / (1 + e^-x)` (Shazeer 2020).
pub(super) fn swiglu(team: Team, gate: &mut [f32], up: &[f32]) {
    team.rows((gate, 1), (up, 1), |gate, up| {
        widest(
            #[inline(always)]
            || {
                for (g, u) in gate.iter_mut().zip(up) {
                    *g = *g / (1.0 + exp(-*g)) * u;
                }
            },
        );
    });
}

/// `to += from`.
pub(super) fn add(team: Team, to: &mut [f32], from: &[f32]) {
    team.rows((to, 1), (from, 1), |to, from| {
        for (to, from) in to.iter_mut().zip(from) {
            *to += from;
        }
    });
}

/// Adds `bias` to every row.
pub(super) fn add_bias(rows: &mut [f32], bias: &[f32]) {
    for row in rows.chunks_mut(bias.len()) {
        for (x, b) in row.iter_mut().zip(bias) {
            *x += b;
        }
    }
}

/// `e^x` without a branch, so that loops over it vectorise: `2^n · p(r)` with `n` the nearest whole number to `x / ln 2` and
/// `p` the Taylor polynomial of degree 6 on `|r| ≤ ln 2 / 2`. Relative error below 4e-7 on [-87, 88]; clamped outside, so
/// that `e^-inf` is about 1e-38 and not 0, which a softmax cannot tell apart.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // Adding 1.5 · 2²³ rounds to a whole number in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-87.0, 88.0);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    // ln 2 in two parts, the first exact in few bits, so that `x - n ln 2` keeps its low digits.
    let r = (x - n * 0.693_359_4) - n * -2.121_944_4e-4;
    let p = 1.0 / 720.0;
    let p = p * r + 1.0 / 120.0;
    let p = p * r + 1.0 / 24.0;
    let p = p * r + 1.0 / 6.0;
    let p = p * r + 0.5;
    let p = p * r + 1.0;
    let p = p * r + 1.0;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    p * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_4e_7_of_the_f64_one() {
        let worst = (-87_000..88_000)
            .map(|i| i as f32 / 1000.0)
            .map(|x| (f64::from(exp(x)) / f64::from(x).exp() - 1.0).abs())
            .fold(0.0, f64::max);
        assert!(worst < 4e-7, "relative error {worst}");
        assert!(exp(f32::NEG_INFINITY) < 2e-38);
    }

    #[test]
    fn rms_norm_agrees_with_f64() {
        let row: Vec<f32> = (0..37).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
        let weight: Vec<f32> = (0..37).map(|i| 1.0 + i as f32 / 10.0).collect();
        let mut out = vec![0.0; 37];
        rms_norm(Team::Rayon, &row, &weight, 1e-5, &mut out);
        let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / 37.0;
        for ((x, w), y) in row.iter().zip(&weight).zip(&out) {
            let expected = f64::from(*x) / (mean + 1e-5).sqrt() * f64::from(*w);
            assert!((expected - f64::from(*y)).abs() < 1e-5, "{expected} {y}");
        }
    }

    #[test]
    fn rotation_turns_the_pair_of_a_dimension_and_its_half() {
        // A quarter turn of the first pair only.
        let mut head = [1.0, 2.0, 0.0, 4.0];
        rotate(&mut head, &[0.0, 1.0, 1.0, 0.0]);
        assert_eq!(head, [0.0, 2.0, 1.0, 4.0]);
    }
}
