//! Products and views against plain loops in f64, over shapes and strides.

use kvmig_gemm::{GemmError, MatMut, MatRef, Threads, matmul};
use proptest::prelude::*;
use rayon::prelude::*;

/// Deterministic numbers in -1 .. 1.
fn numbers(seed: u64, count: usize) -> Vec<f64> {
    let mut state = seed;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as f64 / (1u64 << 30) as f64 - 1.0
        })
        .collect()
}

/// A layout of a matrix: its strides and the elements its slice needs.
#[derive(Clone, Copy, Debug)]
struct Layout {
    rows: usize,
    cols: usize,
    strides: (usize, usize),
}

impl Layout {
    /// Row major or (`flip`) column major, with gaps between elements and between rows.
    fn new(rows: usize, cols: usize, flip: bool, (step, gap): (usize, usize)) -> Self {
        let strides = if flip { ((step), rows.max(1) * step + gap) } else { (cols.max(1) * step + gap, step) };
        Self { rows, cols, strides }
    }

    fn len(&self) -> usize {
        if self.rows == 0 || self.cols == 0 {
            return 0;
        }
        (self.rows - 1) * self.strides.0 + (self.cols - 1) * self.strides.1 + 1
    }

    fn at(&self, i: usize, j: usize) -> usize {
        i * self.strides.0 + j * self.strides.1
    }
}

fn gaps() -> impl Strategy<Value = (usize, usize)> {
    (1usize..3, 0usize..4)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn product_matches_f64(
        (m, n, k) in (0usize..40, 0usize..40, 0usize..70),
        flips in any::<[bool; 3]>(),
        gaps in [gaps(), gaps(), gaps()],
        beta in prop_oneof![Just(0.0), Just(1.0), Just(-0.5)],
        alpha in prop_oneof![Just(1.0), Just(2.5)],
        all in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let (d, l, r) = (Layout::new(m, n, flips[0], gaps[0]), Layout::new(m, k, flips[1], gaps[1]), Layout::new(k, n, flips[2], gaps[2]));
        let threads = if all { Threads::All } else { Threads::One };
        let (lhs, rhs) = (numbers(seed, l.len()), numbers(seed ^ 1, r.len()));
        let before = if beta == 0.0 { vec![f64::NAN; d.len()] } else { numbers(seed ^ 2, d.len()) };

        let mut expected = before.clone();
        let mut bound = vec![0.0; d.len()];
        for i in 0..m {
            for j in 0..n {
                let old = if beta == 0.0 { 0.0 } else { beta * before[d.at(i, j)] };
                let terms = (0..k).map(|x| alpha * lhs[l.at(i, x)] * rhs[r.at(x, j)]);
                expected[d.at(i, j)] = old + terms.clone().sum::<f64>();
                bound[d.at(i, j)] = (k as f64 + 3.0) * (old.abs() + terms.map(f64::abs).sum::<f64>());
            }
        }

        let mut found = before.clone();
        matmul(
            MatMut::new(&mut found, m, n, d.strides.0, d.strides.1)?,
            beta,
            alpha,
            MatRef::new(&lhs, m, k, l.strides.0, l.strides.1)?,
            MatRef::new(&rhs, k, n, r.strides.0, r.strides.1)?,
            threads,
        )?;
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            // Gaps keep their bits, NaN included.
            let same = found.to_bits() == expected.to_bits();
            prop_assert!(same || (found - expected).abs() <= bound[index] * f64::EPSILON, "{index}: {found} {expected}");
        }

        let narrow = |v: &[f64]| v.iter().map(|&x| x as f32).collect::<Vec<f32>>();
        let (mut found, lhs, rhs) = (narrow(&before), narrow(&lhs), narrow(&rhs));
        matmul(
            MatMut::new(&mut found, m, n, d.strides.0, d.strides.1)?,
            beta as f32,
            alpha as f32,
            MatRef::new(&lhs, m, k, l.strides.0, l.strides.1)?,
            MatRef::new(&rhs, k, n, r.strides.0, r.strides.1)?,
            threads,
        )?;
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let same = found.is_nan() && expected.is_nan();
            // Three more roundings than in f64: the operands are narrowed first.
            let bound = (bound[index] + 3.0 * bound[index] / (k as f64 + 3.0)) * f64::from(f32::EPSILON);
            let close = (f64::from(*found) - expected).abs() <= bound + f64::from(f32::EPSILON);
            prop_assert!(same || close, "{index}: {found} {expected}");
        }
    }

    /// What a view admits, brute force agrees with; what it refuses is out of bounds or not ordered.
    #[test]
    fn planes_are_disjoint_and_in_bounds(
        (planes, rows, cols) in (0usize..5, 0usize..5, 0usize..5),
        (plane_stride, row_stride, col_stride) in (0usize..30, 0usize..12, 0usize..6),
        len in 0usize..120,
    ) {
        let mut data = vec![0u32; len];
        let Ok(views) = MatMut::planes(&mut data, planes, plane_stride, rows, cols, row_stride, col_stride) else {
            return Ok(());
        };
        prop_assert_eq!(views.len(), planes);
        // Every element is touched once, from as many threads as there are rows.
        views.into_par_iter().flat_map(|view| view.row_blocks(1)).for_each(|row| {
            for mut element in row.transposed().row_blocks(1) {
                element.row_mut(0).expect("a single element is adjacent to itself")[0] += 1;
            }
        });
        prop_assert_eq!(data.iter().filter(|&&n| n == 1).count(), planes * rows * cols);
        prop_assert!(data.iter().all(|&n| n <= 1));
    }
}

#[test]
fn views_beyond_the_slice_are_refused() {
    let data = [0f32; 11];
    assert!(MatRef::row_major(&data, 3, 4).is_err());
    assert!(MatRef::new(&data, 3, 4, 3, 1).is_ok(), "rows may overlap where nothing is written");
    assert!(MatRef::new(&data, 2, 1, 10, usize::MAX).is_ok(), "a stride that is never taken doesn't matter");
    assert!(MatRef::new(&data, 3, 2, usize::MAX / 2, 1).is_err());
    assert!(MatRef::new(&data, usize::MAX, 1, 0, 1).is_err());
    assert!(MatRef::new(&data, 0, usize::MAX, 7, 7).is_ok());
    let error = MatRef::row_major(&data, 3, 4).unwrap_err();
    assert_eq!(
        error.to_string(),
        "matrix view [3 x 4] with strides (4, 1) from element 0 reaches beyond its slice of 11 elements"
    );
}

#[test]
fn overlapping_destinations_are_refused() {
    let mut data = [0f32; 12];
    assert!(matches!(MatMut::new(&mut data, 3, 4, 3, 1), Err(GemmError::Overlap { .. })));
    assert!(matches!(MatMut::new(&mut data, 3, 4, 1, 2), Err(GemmError::Overlap { .. })));
    assert!(MatMut::new(&mut data, 3, 4, 1, 3).is_ok());
    assert!(matches!(MatMut::planes(&mut data, 2, 3, 2, 2, 2, 1), Err(GemmError::PlanesOverlap { .. })));
    // Two heads of a [T, n_kv, d] layer: planes woven into each other's rows.
    assert!(MatMut::planes(&mut data, 2, 3, 2, 3, 6, 1).is_ok());
}

#[test]
fn shapes_have_to_match() {
    let (a, b, mut c) = ([0f64; 6], [0f64; 6], [0f64; 6]);
    let (lhs, rhs) = (MatRef::row_major(&a, 2, 3).unwrap(), MatRef::row_major(&b, 3, 2).unwrap());
    let error = matmul(MatMut::row_major(&mut c, 2, 3).unwrap(), 0.0, 1.0, lhs, rhs, Threads::One).unwrap_err();
    assert_eq!(error.to_string(), "product of [2 x 3] and [3 x 2] doesn't fit a destination of [2 x 3]");
}

#[test]
fn row_ranges_are_cut_to_the_rows_there_are() {
    let data: Vec<f32> = (0..6).map(|x| x as f32).collect();
    let view = MatRef::row_major(&data, 3, 2).unwrap();
    assert_eq!(view.row_range(1, 9).rows(), 2);
    assert_eq!(view.row_range(5, 9).rows(), 0);
    assert_eq!(view.row_range(2, 1).rows(), 0);
    let one = [1f32; 2];
    let mut sums = [0f32; 2];
    let ones = MatRef::row_major(&one, 2, 1).unwrap();
    matmul(MatMut::row_major(&mut sums, 2, 1).unwrap(), 0.0, 1.0, view.row_range(1, 3), ones, Threads::One).unwrap();
    assert_eq!(sums, [5.0, 9.0]);
}
