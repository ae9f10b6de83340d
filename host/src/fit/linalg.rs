//! Dense f64 linear algebra of the fit: a blocked Cholesky factorisation and solves with many right-hand sides.
//!
//! Everything of order n³ goes through `kvmig-gemm`; what remains beside the diagonal blocks is of order n² times the block size.

use rayon::prelude::*;

use super::product::{View, multiply};

/// Width of a diagonal block. Wide enough that the matrix products dominate, narrow enough for a block to stay in L2.
const BLOCK: usize = 96;

/// Jitter is tried from this share of the mean diagonal on …
const FIRST_JITTER: f64 = 1e-12;
/// … up to this one, tenfold at a time: beyond it the solution would no longer be of the problem that was posed.
const LAST_JITTER: f64 = 1e-6;

/// A dense row-major matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    rows: usize,
    cols: usize,
    data: Vec<f64>,
}

impl Matrix {
    /// All zeroes.
    pub fn zeros(rows: usize, cols: usize) -> Matrix {
        Matrix { rows, cols, data: vec![0.0; rows * cols] }
    }

    /// From row-major elements.
    ///
    /// # Panics
    /// If `data.len() != rows * cols`.
    pub fn from_vec(rows: usize, cols: usize, data: Vec<f64>) -> Matrix {
        assert_eq!(data.len(), rows * cols, "a matrix of {rows} by {cols} has as many elements");
        Matrix { rows, cols, data }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The elements, row-major.
    pub fn as_slice(&self) -> &[f64] {
        &self.data
    }

    /// The elements, row-major, to be written.
    pub fn as_mut_slice(&mut self) -> &mut [f64] {
        &mut self.data
    }

    /// One row.
    pub fn row(&self, row: usize) -> &[f64] {
        &self.data[row * self.cols..(row + 1) * self.cols]
    }

    /// One row, to be written.
    pub fn row_mut(&mut self, row: usize) -> &mut [f64] {
        &mut self.data[row * self.cols..(row + 1) * self.cols]
    }

    /// Sum of the diagonal of a square matrix.
    pub fn trace(&self) -> f64 {
        (0..self.rows.min(self.cols)).map(|i| self.data[i * self.cols + i]).sum()
    }

    /// Adds `value` to every element of the diagonal.
    pub fn add_diagonal(&mut self, value: f64) {
        for i in 0..self.rows.min(self.cols) {
            self.data[i * self.cols + i] += value;
        }
    }
}

/// Why a system could not be solved.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LinalgError {
    /// A number that is not finite entered the matrix.
    #[error(
        "the matrix to factorise has a NaN or an infinity on its diagonal at row {row}: expected finite moments; refit from an empty state"
    )]
    NotFinite {
        /// The first such row.
        row: usize,
    },
    /// No admissible jitter makes the matrix positive definite.
    #[error(
        "the covariance is not positive definite (pivot {pivot:e} at row {row} of {rows}, even with {jitter:e} added to the diagonal): \
         raise --lambda or calibrate on more tokens"
    )]
    NotPositiveDefinite {
        /// Row of the failing pivot.
        row: usize,
        /// Order of the matrix.
        rows: usize,
        /// The pivot.
        pivot: f64,
        /// The largest jitter that was tried.
        jitter: f64,
    },
}

/// The factor `L` of a symmetric positive definite matrix, `A + jitter·I = L Lᵀ`.
#[derive(Clone, Debug)]
pub struct Cholesky {
    lower: Matrix,
    jitter: f64,
}

impl Cholesky {
    /// Factorises a symmetric matrix, of which only the lower triangle is read.
    ///
    /// Jitter is added to the diagonal only after the factorisation itself has met a pivot that is not positive, and is then
    /// reported by [`Cholesky::jitter`].
    ///
    /// # Errors
    /// [`LinalgError`] if the matrix is not finite, or not positive definite with the largest admissible jitter.
    pub fn new(matrix: &Matrix) -> Result<Cholesky, LinalgError> {
        assert_eq!(matrix.rows, matrix.cols, "only square matrices have a Cholesky factor");
        let n = matrix.rows;
        if let Some(row) = (0..n).find(|&i| !matrix.data[i * n + i].is_finite()) {
            return Err(LinalgError::NotFinite { row });
        }
        let scale = (matrix.trace() / n.max(1) as f64).abs();
        let mut relative = 0.0;
        loop {
            let jitter = relative * scale;
            let mut lower = matrix.clone();
            lower.add_diagonal(jitter);
            match factorise(&mut lower) {
                Ok(()) => return Ok(Cholesky { lower, jitter }),
                Err((row, pivot)) if relative >= LAST_JITTER || !pivot.is_finite() || scale == 0.0 => {
                    return Err(LinalgError::NotPositiveDefinite { row, rows: n, pivot, jitter });
                }
                Err(_) => relative = if relative == 0.0 { FIRST_JITTER } else { relative * 10.0 },
            }
        }
    }

    /// What had to be added to the diagonal; 0 unless the factorisation failed without.
    pub fn jitter(&self) -> f64 {
        self.jitter
    }

    /// Solves `L Y = B` in place (`B`: `[n, m]`), so that `YᵀY = Bᵀ A⁻¹ B`.
    pub fn forward(&self, b: &mut Matrix) {
        let (n, m) = (self.lower.rows, b.cols);
        assert_eq!(b.rows, n, "a right-hand side has as many rows as the matrix");
        for start in (0..n).step_by(BLOCK) {
            let end = (start + BLOCK).min(n);
            let (above, below) = b.data.split_at_mut(start * m);
            let here = &mut below[..(end - start) * m];
            if start > 0 {
                let left = View::rows(&self.lower.data[start * n..], end - start, start, n);
                multiply(here, m, 1.0, -1.0, left, View::rows(above, start, m, m));
            }
            for i in start..end {
                let (done, rest) = here.split_at_mut((i - start) * m);
                let row = &mut rest[..m];
                for (j, solved) in (start..i).zip(done.chunks_exact(m)) {
                    axpy(row, -self.lower.data[i * n + j], solved);
                }
                let inverse = 1.0 / self.lower.data[i * n + i];
                row.iter_mut().for_each(|x| *x *= inverse);
            }
        }
    }

    /// Solves `Lᵀ X = Y` in place (`Y`: `[n, m]`).
    pub fn backward(&self, y: &mut Matrix) {
        let (n, m) = (self.lower.rows, y.cols);
        assert_eq!(y.rows, n, "a right-hand side has as many rows as the matrix");
        let starts: Vec<usize> = (0..n).step_by(BLOCK).collect();
        for &start in starts.iter().rev() {
            let end = (start + BLOCK).min(n);
            let (upper, below) = y.data.split_at_mut(end * m);
            let here = &mut upper[start * m..];
            if end < n {
                let lower = View::rows(&self.lower.data[end * n + start..], n - end, end - start, n);
                multiply(here, m, 1.0, -1.0, lower.transposed(), View::rows(below, n - end, m, m));
            }
            for i in (start..end).rev() {
                let (head, done) = here.split_at_mut((i - start + 1) * m);
                let row = &mut head[(i - start) * m..];
                for (j, solved) in (i + 1..end).zip(done.chunks_exact(m)) {
                    axpy(row, -self.lower.data[j * n + i], solved);
                }
                let inverse = 1.0 / self.lower.data[i * n + i];
                row.iter_mut().for_each(|x| *x *= inverse);
            }
        }
    }

    /// Solves `(A + jitter·I) X = B` in place (`B`: `[n, m]`).
    pub fn solve(&self, b: &mut Matrix) {
        self.forward(b);
        self.backward(b);
    }
}

/// Replaces the lower triangle of a square matrix by its Cholesky factor and zeroes the rest, or says which pivot failed.
fn factorise(a: &mut Matrix) -> Result<(), (usize, f64)> {
    let n = a.rows;
    for start in (0..n).step_by(BLOCK) {
        let end = (start + BLOCK).min(n);
        for i in start..end {
            for j in start..=i {
                let (row_i, row_j) = (&a.data[i * n + start..i * n + j], &a.data[j * n + start..j * n + j]);
                let rest = a.data[i * n + j] - dot(row_i, row_j);
                if i > j {
                    a.data[i * n + j] = rest / a.data[j * n + j];
                } else if rest > 0.0 && rest.is_finite() {
                    a.data[i * n + i] = rest.sqrt();
                } else {
                    return Err((i, rest));
                }
            }
            a.data[i * n + i + 1..(i + 1) * n].fill(0.0);
        }
        if end == n {
            break;
        }
        let (above, below) = a.data.split_at_mut(end * n);
        let diagonal = &above[start * n..];
        below.par_chunks_exact_mut(n).for_each(|row| {
            for j in 0..end - start {
                let solved = dot(&row[start..start + j], &diagonal[j * n + start..j * n + start + j]);
                row[start + j] = (row[start + j] - solved) / diagonal[j * n + start + j];
            }
        });
        // A copy, because the trailing matrix that the panel is subtracted from lies in the same rows.
        let width = end - start;
        let panel: Vec<f64> = below.chunks_exact(n).flat_map(|row| &row[start..end]).copied().collect();
        for from in (end..n).step_by(BLOCK) {
            let to = (from + BLOCK).min(n);
            let rows = View::rows(&panel[(from - end) * width..], n - from, width, width);
            let columns = View::rows(&panel[(from - end) * width..], to - from, width, width).transposed();
            multiply(&mut a.data[from * n + from..], n, 1.0, -1.0, rows, columns);
        }
    }
    Ok(())
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

fn axpy(into: &mut [f64], factor: f64, from: &[f64]) {
    into.iter_mut().zip(from).for_each(|(x, y)| *x += factor * y);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::random::Random;

    fn gaussian(rows: usize, cols: usize, seed: u64) -> Matrix {
        let mut random = Random::new(seed);
        Matrix::from_vec(rows, cols, (0..rows * cols).map(|_| random.normal()).collect())
    }

    fn naive(a: &Matrix, b: &Matrix) -> Matrix {
        let mut c = Matrix::zeros(a.rows, b.cols);
        for i in 0..a.rows {
            for k in 0..a.cols {
                let x = a.data[i * a.cols + k];
                c.row_mut(i).iter_mut().zip(b.row(k)).for_each(|(c, b)| *c += x * b);
            }
        }
        c
    }

    fn transpose(a: &Matrix) -> Matrix {
        Matrix::from_vec(
            a.cols,
            a.rows,
            (0..a.rows * a.cols).map(|i| a.data[i % a.rows * a.cols + i / a.rows]).collect(),
        )
    }

    fn worst(a: &Matrix, b: &Matrix) -> f64 {
        a.data.iter().zip(&b.data).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max)
    }

    /// Orders below, at, just above and well above the block width, none of them its multiple but one.
    #[test]
    fn solves_at_every_blocking() {
        for (n, m) in [(1, 1), (5, 3), (BLOCK, 7), (BLOCK + 1, 2), (3 * BLOCK + 17, 40)] {
            let g = gaussian(2 * n, n, n as u64);
            let mut a = naive(&transpose(&g), &g);
            a.add_diagonal(0.5);
            let x = gaussian(n, m, 9);
            let mut b = naive(&a, &x);
            let factor = Cholesky::new(&a).unwrap();
            assert_eq!(factor.jitter(), 0.0);
            let relative = worst(&naive(&factor.lower, &transpose(&factor.lower)), &a) / a.trace();
            assert!(relative < 1e-14 * n as f64, "L·Lᵀ differs from A by {relative:e} at n = {n}");
            factor.solve(&mut b);
            assert!(worst(&b, &x) < 1e-9, "x is off by {:e} at n = {n}", worst(&b, &x));
        }
    }

    #[test]
    fn forward_gives_the_explained_part() {
        let g = gaussian(60, 20, 1);
        let a = naive(&transpose(&g), &g);
        let b = gaussian(20, 4, 2);
        let factor = Cholesky::new(&a).unwrap();
        let (mut half, mut full) = (b.clone(), b.clone());
        factor.forward(&mut half);
        factor.solve(&mut full);
        let expected = naive(&transpose(&b), &full);
        assert!(worst(&naive(&transpose(&half), &half), &expected) < 1e-10);
    }

    #[test]
    fn jitter_only_for_a_singular_matrix_and_recorded() {
        let mut a = Matrix::zeros(3, 3);
        a.data.fill(1.0);
        let factor = Cholesky::new(&a).unwrap();
        assert!(factor.jitter() > 0.0 && factor.jitter() <= LAST_JITTER);
    }

    #[test]
    fn an_indefinite_matrix_is_an_error() {
        let mut a = Matrix::zeros(2, 2);
        a.data.copy_from_slice(&[1.0, 2.0, 2.0, 1.0]);
        assert!(matches!(Cholesky::new(&a), Err(LinalgError::NotPositiveDefinite { row: 1, .. })));
    }

    #[test]
    fn a_nan_is_an_error() {
        let mut a = Matrix::zeros(2, 2);
        a.data.copy_from_slice(&[1.0, 0.0, 0.0, f64::NAN]);
        assert_eq!(Cholesky::new(&a).unwrap_err(), LinalgError::NotFinite { row: 1 });
    }
}
