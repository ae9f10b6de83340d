//! Dense f64 linear algebra of the fit: a recursive Cholesky factorisation and solves with many right-hand sides.
//!
//! Everything of order n³ goes through `kvmig-gemm`; what remains is of order n² times `LEAF`, and vectorised.

use kvmig_gemm::widest;

use super::product::{View, multiply};

/// Rows of a triangle that is no longer split into two and a product.
const LEAF: usize = 16;

/// Rows of a symmetric matrix that are updated at a time: what lies beside the diagonal in them is computed and not used.
const STRIP: usize = 256;

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

/// The upper factor `U` of a symmetric positive definite matrix, `A + jitter·I = UᵀU`.
///
/// Upper, because a product then takes rows of a matrix and changes the rows below them: the two can be borrowed side by side.
#[derive(Clone, Debug)]
pub struct Cholesky {
    upper: Matrix,
    jitter: f64,
}

impl Cholesky {
    /// Factorises a symmetric matrix, of which only the upper triangle is read.
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
            let mut upper = matrix.clone();
            upper.add_diagonal(jitter);
            match factorise(&mut upper) {
                Ok(()) => return Ok(Cholesky { upper, jitter }),
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

    /// Solves `Uᵀ Y = B` in place (`B`: `[n, m]`), so that `YᵀY = Bᵀ A⁻¹ B`.
    pub fn forward(&self, b: &mut Matrix) {
        let (n, m) = (self.upper.rows, b.cols);
        assert_eq!(b.rows, n, "a right-hand side has as many rows as the matrix");
        forward(Triangle { data: &self.upper.data, stride: n, size: n }, &mut b.data, m, m);
    }

    /// Solves `U X = Y` in place (`Y`: `[n, m]`).
    pub fn backward(&self, y: &mut Matrix) {
        let (n, m) = (self.upper.rows, y.cols);
        assert_eq!(y.rows, n, "a right-hand side has as many rows as the matrix");
        backward(Triangle { data: &self.upper.data, stride: n, size: n }, &mut y.data, m);
    }

    /// Solves `(A + jitter·I) X = B` in place (`B`: `[n, m]`).
    pub fn solve(&self, b: &mut Matrix) {
        self.forward(b);
        self.backward(b);
    }
}

/// An upper triangle: `size` rows, `stride` elements apart.
#[derive(Clone, Copy)]
struct Triangle<'a> {
    data: &'a [f64],
    stride: usize,
    size: usize,
}

impl<'a> Triangle<'a> {
    /// Its upper half, what lies right of that, and its lower half.
    fn split(self) -> (Triangle<'a>, View<'a, f64>, Triangle<'a>) {
        let Triangle { data, stride, size } = self;
        let half = size / 2;
        let beside = View::rows(&data[half..], half, size - half, stride);
        let below = Triangle { data: &data[half * (stride + 1)..], size: size - half, ..self };
        (Triangle { size: half, ..self }, beside, below)
    }

    fn element(self, row: usize, col: usize) -> f64 {
        self.data[row * self.stride + col]
    }
}

/// Solves `Uᵀ Y = B` in place; B has rows of `m` elements, `stride` apart.
fn forward(u: Triangle<'_>, b: &mut [f64], m: usize, stride: usize) {
    if u.size > LEAF {
        let (first, beside, second) = u.split();
        let (above, below) = b.split_at_mut(first.size * stride);
        forward(first, above, m, stride);
        multiply(below, stride, 1.0, -1.0, beside.transposed(), View::rows(above, first.size, m, stride));
        forward(second, below, m, stride);
        return;
    }
    for i in 0..u.size {
        let (done, rest) = b.split_at_mut(i * stride);
        let row = &mut rest[..m];
        for (j, solved) in done.chunks(stride).enumerate() {
            axpy(row, -u.element(j, i), &solved[..m]);
        }
        scale(row, 1.0 / u.element(i, i));
    }
}

/// Solves `U X = Y` in place; Y has rows of `m` elements.
fn backward(u: Triangle<'_>, y: &mut [f64], m: usize) {
    if u.size > LEAF {
        let (first, beside, second) = u.split();
        let (above, below) = y.split_at_mut(first.size * m);
        backward(second, below, m);
        multiply(above, m, 1.0, -1.0, beside, View::rows(below, second.size, m, m));
        backward(first, above, m);
        return;
    }
    for i in (0..u.size).rev() {
        let (head, done) = y.split_at_mut((i + 1) * m);
        let row = &mut head[i * m..];
        for (j, solved) in (i + 1..u.size).zip(done.chunks_exact(m)) {
            axpy(row, -u.element(i, j), solved);
        }
        scale(row, 1.0 / u.element(i, i));
    }
}

/// Replaces the upper triangle of a square matrix by its Cholesky factor and zeroes the rest, or says which pivot failed.
fn factorise(a: &mut Matrix) -> Result<(), (usize, f64)> {
    let n = a.rows;
    factorise_part(&mut a.data, n, 0, n)?;
    (1..n).for_each(|i| a.data[i * n..i * n + i].fill(0.0));
    Ok(())
}

/// The same for rows and columns `start` to `end` of one with rows of `n`; what is left of the diagonal stays as it is, or not.
fn factorise_part(a: &mut [f64], n: usize, start: usize, end: usize) -> Result<(), (usize, f64)> {
    if end - start <= LEAF {
        for i in start..end {
            let (above, below) = a.split_at_mut((i + 1) * n);
            let row = &mut above[i * n..];
            let pivot = row[i];
            // Not `<= 0.0`: a NaN is no pivot either.
            if !(pivot > 0.0 && pivot.is_finite()) {
                return Err((i, pivot));
            }
            scale(&mut row[i..end], 1.0 / pivot.sqrt());
            for j in i + 1..end {
                axpy(&mut below[(j - i - 1) * n..][j..end], -row[j], &row[j..end]);
            }
        }
        return Ok(());
    }
    let half = (end - start) / 2;
    let middle = start + half;
    factorise_part(a, n, start, middle)?;
    // A copy, because the panel right of it, which it solves, lies in the same rows.
    let triangle: Vec<f64> = (start..middle).flat_map(|row| &a[row * n + start..row * n + middle]).copied().collect();
    let (above, below) = a.split_at_mut(middle * n);
    let panel = &mut above[start * n + middle..];
    forward(Triangle { data: &triangle, stride: half, size: half }, panel, end - middle, n);
    drop(triangle);
    for from in (middle..end).step_by(STRIP) {
        let to = (from + STRIP).min(end);
        let right = View::rows(&panel[from - middle..], half, end - from, n);
        let left = View::rows(&panel[from - middle..], half, to - from, n).transposed();
        multiply(&mut below[(from - middle) * n + from..], n, 1.0, -1.0, left, right);
    }
    factorise_part(a, n, middle, end)
}

fn axpy(into: &mut [f64], factor: f64, from: &[f64]) {
    widest(
        #[inline(always)]
        || into.iter_mut().zip(from).for_each(|(x, y)| *x += factor * y),
    );
}

fn scale(row: &mut [f64], factor: f64) {
    widest(
        #[inline(always)]
        || row.iter_mut().for_each(|x| *x *= factor),
    );
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

    /// Orders below, at, just above and well above a leaf's, and one of several strips.
    #[test]
    fn solves_at_every_depth() {
        for (n, m) in [(1, 1), (5, 3), (LEAF, 7), (LEAF + 1, 2), (7 * LEAF + 5, 40), (2 * STRIP + 17, 3)] {
            let g = gaussian(2 * n, n, n as u64);
            let mut a = naive(&transpose(&g), &g);
            a.add_diagonal(0.5);
            let x = gaussian(n, m, 9);
            let mut b = naive(&a, &x);
            let factor = Cholesky::new(&a).unwrap();
            assert_eq!(factor.jitter(), 0.0);
            let relative = worst(&naive(&transpose(&factor.upper), &factor.upper), &a) / a.trace();
            assert!(relative < 1e-14 * n as f64, "UᵀU differs from A by {relative:e} at n = {n}");
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
