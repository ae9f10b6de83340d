//! A few rows times a large matrix: the shape of a decoder's native ends and of decoding.
//!
//! A general product first copies the large operand into panels, which costs more than the product itself when there are only
//! a few rows to multiply it with. Here each weight row is read once where it lies, as dot products of small tiles in registers.

use rayon::prelude::*;

use crate::{GemmError, MatMut, MatRef, Threads, matmul};

/// Up to this many rows, tiles in registers beat the packed product on the machines measured; see
/// [`rows_times_transposed`].
pub const FEW_ROWS: usize = 64;

/// Columns of the sum at a time, so that the activations' part stays in a second-level cache.
const DEPTH: usize = 2048;
/// Outputs that one task computes.
const TASK: usize = 32;
/// Outputs and rows of a tile: 24 accumulators, 4 weights and an activation fit 32 vector registers.
const TILE_OUTPUTS: usize = 4;
const TILE_ROWS: usize = 6;

/// `out [rows, outputs] = x [rows, inputs] · weightᵀ`, with `weight [outputs, inputs]`, all row-major and dense.
///
/// For up to [`FEW_ROWS`] rows on a processor with AVX-512 or AVX2 and FMA; otherwise it is [`matmul`]. The order of the sum is
/// the kernel's own.
///
/// # Errors
/// [`GemmError`] when a slice is not `rows · inputs`, `outputs · inputs` or `rows · outputs` long.
pub fn rows_times_transposed(
    out: &mut [f32],
    x: &[f32],
    weight: &[f32],
    [rows, inputs, outputs]: [usize; 3],
    threads: Threads,
) -> Result<(), GemmError> {
    let x_view = MatRef::row_major(x, rows, inputs)?;
    let weight_view = MatRef::row_major(weight, outputs, inputs)?;
    let out_view = MatMut::row_major(&mut *out, rows, outputs)?;
    let Some(tile) = Tile::best().filter(|_| (1..=FEW_ROWS).contains(&rows) && inputs > 0 && outputs > 0) else {
        return matmul(out_view, 0.0, 1.0, x_view, weight_view.transposed(), threads);
    };
    let (x, weight) = (&x[..rows * inputs], &weight[..outputs * inputs]);
    // Tasks own whole outputs, which in `out` lie apart: they write a transposed product, which is small.
    let mut transposed = vec![0.0f32; outputs * rows];
    let task = |(i, out): (usize, &mut [f32])| tile.outputs(out, x, &weight[i * TASK * inputs..], [rows, inputs]);
    match threads {
        Threads::One => transposed.chunks_mut(TASK * rows).enumerate().for_each(task),
        Threads::All => transposed.par_chunks_mut(TASK * rows).enumerate().for_each(task),
    }
    for (row, out) in out.chunks_exact_mut(outputs).enumerate().take(rows) {
        for (output, out) in out.iter_mut().enumerate() {
            *out = transposed[output * rows + row];
        }
    }
    Ok(())
}

/// A set of vector instructions that was found on this processor.
#[derive(Clone, Copy, Debug)]
enum Tile {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

impl Tile {
    fn best() -> Option<Tile> {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                return Some(Tile::Avx512);
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Some(Tile::Avx2);
            }
        }
        None
    }

    /// `out [outputs, rows] += weight [outputs, inputs] · xᵀ`, as many outputs as `out` has room for.
    fn outputs(self, out: &mut [f32], x: &[f32], weight: &[f32], [rows, inputs]: [usize; 2]) {
        for from in (0..inputs).step_by(DEPTH) {
            let depth = DEPTH.min(inputs - from);
            let part = |matrix: &'_ [f32], row: usize| -> std::ops::Range<usize> {
                debug_assert!(row * inputs + from + depth <= matrix.len());
                row * inputs + from..row * inputs + from + depth
            };
            let mut done = 0;
            for out in out.chunks_mut(TILE_OUTPUTS * rows) {
                let outputs = out.len() / rows;
                for first in (0..rows).step_by(TILE_ROWS) {
                    let x: [&[f32]; TILE_ROWS] = std::array::from_fn(|r| &x[part(x, (first + r).min(rows - 1))]);
                    let count = TILE_ROWS.min(rows - first);
                    if outputs == TILE_OUTPUTS {
                        let weights = std::array::from_fn(|o| &weight[part(weight, done + o)]);
                        self.tile::<TILE_OUTPUTS>(out, weights, x, [rows, first, count]);
                    } else {
                        for o in 0..outputs {
                            let weights = [&weight[part(weight, done + o)]];
                            self.tile::<1>(&mut out[o * rows..][..rows], weights, x, [rows, first, count]);
                        }
                    }
                }
                done += outputs;
            }
        }
    }

    /// Adds one tile's products to `out [O, rows]`, rows `first .. first + count`.
    fn tile<const O: usize>(
        self,
        out: &mut [f32],
        weights: [&[f32]; O],
        x: [&[f32]; TILE_ROWS],
        [rows, first, count]: [usize; 3],
    ) {
        let mut add = |o: usize, r: usize, sum: f32| out[o * rows + first + r] += sum;
        macro_rules! tile {
            ($rows:literal) => {{
                let x: [&[f32]; $rows] = std::array::from_fn(|r| x[r]);
                let sums = self.dots::<O, $rows>(weights, x);
                (0..O).for_each(|o| (0..$rows).for_each(|r| add(o, r, sums[o][r])));
            }};
        }
        match count {
            1 => tile!(1),
            2 => tile!(2),
            3 => tile!(3),
            4 => tile!(4),
            5 => tile!(5),
            _ => tile!(6),
        }
    }

    /// Dot products of each weight row with each activation row; all are equally long.
    fn dots<const O: usize, const R: usize>(self, weights: [&[f32]; O], x: [&[f32]; R]) -> [[f32; R]; O] {
        let depth = weights[0].len();
        assert!(weights.iter().chain(&x).all(|row| row.len() == depth), "rows of one product are equally long");
        match self {
            // SAFETY: this variant is made by `best` alone, which found avx512f on this processor; every slice is `depth` long.
            #[cfg(target_arch = "x86_64")]
            Tile::Avx512 => unsafe { avx512::dots(weights, x, depth) },
            // SAFETY: likewise, avx2 and fma.
            #[cfg(target_arch = "x86_64")]
            Tile::Avx2 => unsafe { avx2::dots(weights, x, depth) },
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::{
        __m512, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_maskz_loadu_ps, _mm512_reduce_add_ps, _mm512_setzero_ps,
    };

    const LANES: usize = 16;

    /// # Safety
    /// Every slice is at least `depth` long.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn dots<const O: usize, const R: usize>(
        weights: [&[f32]; O],
        x: [&[f32]; R],
        depth: usize,
    ) -> [[f32; R]; O] {
        let mut sums = [[_mm512_setzero_ps(); R]; O];
        let whole = depth - depth % LANES;
        let mut at = 0;
        while at < whole {
            // SAFETY: at + LANES <= depth, which every slice reaches.
            let load = |row: &[f32]| unsafe { _mm512_loadu_ps(row.as_ptr().add(at)) };
            step(&mut sums, weights.map(load), x.map(load));
            at += LANES;
        }
        if whole < depth {
            let mask = (1u16 << (depth - whole)) - 1;
            // SAFETY: the mask leaves only the lanes below depth, and masked lanes are not accessed.
            let load = |row: &[f32]| unsafe { _mm512_maskz_loadu_ps(mask, row.as_ptr().add(whole)) };
            step(&mut sums, weights.map(load), x.map(load));
        }
        sums.map(|row| row.map(|sum| _mm512_reduce_add_ps(sum)))
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    fn step<const O: usize, const R: usize>(sums: &mut [[__m512; R]; O], weights: [__m512; O], x: [__m512; R]) {
        for o in 0..O {
            for r in 0..R {
                sums[o][r] = _mm512_fmadd_ps(weights[o], x[r], sums[o][r]);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::{_mm256_fmadd_ps, _mm256_loadu_ps, _mm256_setzero_ps, _mm256_storeu_ps};

    const LANES: usize = 8;

    /// # Safety
    /// Every slice is at least `depth` long.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn dots<const O: usize, const R: usize>(
        weights: [&[f32]; O],
        x: [&[f32]; R],
        depth: usize,
    ) -> [[f32; R]; O] {
        let mut sums = [[_mm256_setzero_ps(); R]; O];
        let whole = depth - depth % LANES;
        let mut at = 0;
        while at < whole {
            // SAFETY: at + LANES <= depth, which every slice reaches.
            let load = |row: &[f32]| unsafe { _mm256_loadu_ps(row.as_ptr().add(at)) };
            let (weights, x) = (weights.map(load), x.map(load));
            for o in 0..O {
                for r in 0..R {
                    sums[o][r] = _mm256_fmadd_ps(weights[o], x[r], sums[o][r]);
                }
            }
            at += LANES;
        }
        let mut dots = [[0.0; R]; O];
        for o in 0..O {
            for r in 0..R {
                let mut lanes = [0.0f32; LANES];
                // SAFETY: `lanes` has room for the eight floats of a register.
                unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), sums[o][r]) };
                let rest: f32 = (whole..depth).map(|i| weights[o][i] * x[r][i]).sum();
                dots[o][r] = lanes.iter().sum::<f32>() + rest;
            }
        }
        dots
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn numbers(len: usize, seed: u64) -> Vec<f32> {
        let mut state = seed | 1;
        (0..len)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                ((state >> 40) as f32 / (1u32 << 23) as f32) - 1.0
            })
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Every shape, tails of every kind: rows beyond a tile, outputs beyond a tile and a task, sums beyond a block.
        #[test]
        fn equals_f64(rows in 1usize..70, inputs in 1usize..100, outputs in 1usize..90, long in any::<bool>(), seed in any::<u64>()) {
            let inputs = if long { inputs + DEPTH } else { inputs };
            let (rows, outputs) = if long { (rows.min(8), outputs.min(40)) } else { (rows, outputs) };
            let (x, weight) = (numbers(rows * inputs, seed), numbers(outputs * inputs, !seed));
            for threads in [Threads::One, Threads::All] {
                let mut out = vec![f32::NAN; rows * outputs];
                rows_times_transposed(&mut out, &x, &weight, [rows, inputs, outputs], threads).unwrap();
                for r in 0..rows {
                    for o in 0..outputs {
                        let (x, w) = (&x[r * inputs..][..inputs], &weight[o * inputs..][..inputs]);
                        let terms = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w));
                        let (exact, size) = terms.fold((0.0, 0.0), |(sum, size): (f64, f64), t| (sum + t, size + t.abs()));
                        // γ_n of Higham 2002, with the unit roundoff of f32.
                        let bound = inputs as f64 * 6.0e-8 * size + 1e-30;
                        prop_assert!((f64::from(out[r * outputs + o]) - exact).abs() <= bound);
                    }
                }
            }
        }
    }

    #[test]
    fn wrong_lengths_are_errors() {
        let mut out = [0.0; 6];
        assert!(rows_times_transposed(&mut out, &[0.0; 7], &[0.0; 12], [2, 4, 3], Threads::One).is_err());
        assert!(rows_times_transposed(&mut out, &[0.0; 8], &[0.0; 11], [2, 4, 3], Threads::One).is_err());
        assert!(rows_times_transposed(&mut out[..5], &[0.0; 8], &[0.0; 12], [2, 4, 3], Threads::One).is_err());
    }
}
