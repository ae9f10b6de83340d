//! First and second moments of source and target rows, streamed.
//!
//! One Gram matrix over *all* source layers for keys (rotation stripped) and one for values, and one cross matrix per target
//! layer, hold everything an unweighted fit needs: any subset of layers, any λ and every R² is a sub-block solve (METHOD §3).
//! Rows are shifted by the first chunk's mean before they are multiplied: f32 products of raw rows would lose the
//! covariance of a coordinate whose mean is large against its spread, as some key biases are.

use serde::{Deserialize, Serialize};

use super::{
    linalg::Matrix,
    product::{View, multiply},
};

/// Which layers and widths the moments are over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MomentShape {
    /// Layers of the source.
    pub source_layers: usize,
    /// `n_kv · d` of the source: columns of one layer.
    pub source_width: usize,
    /// Layers of the target.
    pub target_layers: usize,
    /// `n_kv · d` of the target.
    pub target_width: usize,
}

impl MomentShape {
    /// Columns of a source row over all layers.
    pub fn source_columns(&self) -> usize {
        self.source_layers * self.source_width
    }

    /// Columns of a target row over all layers.
    pub fn target_columns(&self) -> usize {
        self.target_layers * self.target_width
    }
}

/// Rows of one chunk, row-major.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// `[rows, source_layers · source_width]`.
    pub source: &'a [f32],
    /// `[rows, target_layers · target_width]`.
    pub target: &'a [f32],
}

/// Moments of keys and values over the same rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Moments {
    shape: MomentShape,
    rows: u64,
    pub(super) keys: Side,
    pub(super) values: Side,
}

impl Moments {
    /// No rows yet.
    pub fn new(shape: MomentShape) -> Moments {
        Moments { shape, rows: 0, keys: Side::new(shape), values: Side::new(shape) }
    }

    /// From parts that were stored.
    pub(super) fn from_parts(shape: MomentShape, rows: u64, keys: Side, values: Side) -> Moments {
        Moments { shape, rows, keys, values }
    }

    /// Layers and widths.
    pub fn shape(&self) -> MomentShape {
        self.shape
    }

    /// Rows added so far.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Adds the rows of one chunk: products in f32 within it, accumulation in f64 across chunks.
    ///
    /// # Panics
    /// If keys and values differ in their number of rows, or a slice isn't a whole number of rows.
    pub fn add(&mut self, keys: Rows<'_>, values: Rows<'_>) {
        let rows = keys.source.len() / self.shape.source_columns();
        for part in [keys, values] {
            assert_eq!(part.source.len(), rows * self.shape.source_columns(), "whole source rows, as many of each");
            assert_eq!(part.target.len(), rows * self.shape.target_columns(), "whole target rows, as many of each");
        }
        if rows == 0 {
            return;
        }
        let first = self.rows == 0;
        self.keys.add(self.shape, rows, keys, first);
        self.values.add(self.shape, rows, values, first);
        self.rows += rows as u64;
    }

    /// The keys' moments, as covariances per token.
    pub fn keys(&self) -> Covariances<'_> {
        Covariances { shape: self.shape, rows: self.rows as f64, side: &self.keys }
    }

    /// The values' moments, as covariances per token.
    pub fn values(&self) -> Covariances<'_> {
        Covariances { shape: self.shape, rows: self.rows as f64, side: &self.values }
    }
}

/// Sums over the rows of keys or of values, shifted.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Side {
    /// `[source_columns]`, subtracted from every source row before anything is summed.
    pub(super) source_shift: Vec<f32>,
    /// `[target_columns]`.
    pub(super) target_shift: Vec<f32>,
    /// Sum of the shifted rows, `[source_columns]`.
    pub(super) source_sum: Vec<f64>,
    /// `[target_columns]`.
    pub(super) target_sum: Vec<f64>,
    /// Sum of squares of the shifted target rows, `[target_columns]`.
    pub(super) target_squares: Vec<f64>,
    /// Per source layer l, its products with itself and all later ones: `[source_width, (source_layers − l) · source_width]`.
    pub(super) gram: Vec<Matrix>,
    /// Per target layer, `[source_columns, target_width]`.
    pub(super) cross: Vec<Matrix>,
}

impl Side {
    fn new(shape: MomentShape) -> Side {
        let (n, w) = (shape.source_columns(), shape.source_width);
        Side {
            source_shift: vec![0.0; n],
            target_shift: vec![0.0; shape.target_columns()],
            source_sum: vec![0.0; n],
            target_sum: vec![0.0; shape.target_columns()],
            target_squares: vec![0.0; shape.target_columns()],
            gram: (0..shape.source_layers).map(|l| Matrix::zeros(w, n - l * w)).collect(),
            cross: (0..shape.target_layers).map(|_| Matrix::zeros(n, shape.target_width)).collect(),
        }
    }

    fn add(&mut self, shape: MomentShape, rows: usize, chunk: Rows<'_>, first: bool) {
        let (n, m, w) = (shape.source_columns(), shape.target_columns(), shape.source_width);
        if first {
            self.source_shift = column_means(chunk.source, rows, n);
            self.target_shift = column_means(chunk.target, rows, m);
        }
        let x = shifted(chunk.source, &self.source_shift);
        let y = shifted(chunk.target, &self.target_shift);
        for row in x.chunks_exact(n) {
            self.source_sum.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x));
        }
        for row in y.chunks_exact(m) {
            let sums = self.target_sum.iter_mut().zip(&mut self.target_squares);
            sums.zip(row).for_each(|((sum, squares), &y)| {
                *sum += f64::from(y);
                *squares += f64::from(y) * f64::from(y);
            });
        }
        let mut scratch = Vec::new();
        for (layer, gram) in self.gram.iter_mut().enumerate() {
            let here = View::rows(&x[layer * w..], rows, w, n);
            let onwards = View::rows(&x[layer * w..], rows, n - layer * w, n);
            accumulate(gram, here, onwards, &mut scratch);
        }
        for (layer, cross) in self.cross.iter_mut().enumerate() {
            let target = View::rows(&y[layer * shape.target_width..], rows, shape.target_width, m);
            accumulate(cross, View::rows(&x, rows, n, n), target, &mut scratch);
        }
    }
}

/// `sum += leftᵀ · right`, the product in f32, the sum in f64.
fn accumulate(sum: &mut Matrix, left: View<'_, f32>, right: View<'_, f32>, scratch: &mut Vec<f32>) {
    scratch.resize(sum.rows() * sum.cols(), 0.0);
    multiply(scratch, sum.cols(), 0.0, 1.0, left.transposed(), right);
    sum.as_mut_slice().iter_mut().zip(&*scratch).for_each(|(sum, &x)| *sum += f64::from(x));
}

fn column_means(rows: &[f32], count: usize, columns: usize) -> Vec<f32> {
    let mut sums = vec![0.0f64; columns];
    for row in rows.chunks_exact(columns) {
        sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x));
    }
    sums.iter().map(|sum| (sum / count as f64) as f32).collect()
}

fn shifted(rows: &[f32], shift: &[f32]) -> Vec<f32> {
    rows.chunks_exact(shift.len()).flat_map(|row| row.iter().zip(shift).map(|(x, s)| x - s)).collect()
}

/// Means and per-token covariances (`/N`) of one side of the moments.
#[derive(Clone, Copy, Debug)]
pub struct Covariances<'a> {
    shape: MomentShape,
    rows: f64,
    side: &'a Side,
}

impl Covariances<'_> {
    /// Layers and widths.
    pub fn shape(&self) -> MomentShape {
        self.shape
    }

    /// Rows behind them.
    pub fn rows(&self) -> f64 {
        self.rows
    }

    /// Mean source row of the given layers, concatenated: `[layers · source_width]`.
    pub fn source_mean(&self, layers: &[usize]) -> Vec<f64> {
        let columns = layers.iter().flat_map(|l| l * self.shape.source_width..(l + 1) * self.shape.source_width);
        columns.map(|i| f64::from(self.side.source_shift[i]) + self.side.source_sum[i] / self.rows).collect()
    }

    /// Mean row of a target layer, `[target_width]`.
    pub fn target_mean(&self, layer: usize) -> Vec<f64> {
        let columns = layer * self.shape.target_width..(layer + 1) * self.shape.target_width;
        columns.map(|i| f64::from(self.side.target_shift[i]) + self.side.target_sum[i] / self.rows).collect()
    }

    /// Variance of each coordinate of a target layer, `[target_width]`.
    pub fn target_variance(&self, layer: usize) -> Vec<f64> {
        let columns = layer * self.shape.target_width..(layer + 1) * self.shape.target_width;
        let variance = |i: usize| {
            let mean = self.side.target_sum[i] / self.rows;
            (self.side.target_squares[i] / self.rows - mean * mean).max(0.0)
        };
        columns.map(variance).collect()
    }

    /// Covariance of the given source layers, concatenated: `[layers · source_width]²`, symmetric.
    pub fn source(&self, layers: &[usize]) -> Matrix {
        let w = self.shape.source_width;
        let mut matrix = Matrix::zeros(layers.len() * w, layers.len() * w);
        for (i, &a) in layers.iter().enumerate() {
            for (j, &b) in layers.iter().enumerate() {
                for r in 0..w {
                    let into = &mut matrix.row_mut(i * w + r)[j * w..(j + 1) * w];
                    into.iter_mut().enumerate().for_each(|(c, x)| *x = self.source_element((a, r), (b, c)));
                }
            }
        }
        matrix
    }

    /// Covariance of `columns` (a head's, say) of one source layer with themselves.
    pub fn source_columns(&self, layer: usize, columns: std::ops::Range<usize>) -> Matrix {
        let n = columns.len();
        let mut matrix = Matrix::zeros(n, n);
        for r in 0..n {
            let into = matrix.row_mut(r).iter_mut().enumerate();
            into.for_each(|(c, x)| *x = self.source_element((layer, columns.start + r), (layer, columns.start + c)));
        }
        matrix
    }

    /// Covariance of the given source layers with a target layer: `[layers · source_width, target_width]`.
    pub fn cross(&self, layers: &[usize], target_layer: usize) -> Matrix {
        let (w, t) = (self.shape.source_width, self.shape.target_width);
        let mut matrix = Matrix::zeros(layers.len() * w, t);
        for (i, &layer) in layers.iter().enumerate() {
            for r in 0..w {
                let into = matrix.row_mut(i * w + r).iter_mut().enumerate();
                into.for_each(|(c, x)| *x = self.cross_element((layer, r), (target_layer, c)));
            }
        }
        matrix
    }

    /// Covariance of some columns of a source layer with some of a target layer.
    pub fn cross_columns(
        &self,
        (layer, columns): (usize, std::ops::Range<usize>),
        (target_layer, target_columns): (usize, std::ops::Range<usize>),
    ) -> Matrix {
        let mut matrix = Matrix::zeros(columns.len(), target_columns.len());
        for r in 0..columns.len() {
            let into = matrix.row_mut(r).iter_mut().zip(target_columns.clone());
            into.for_each(|(x, c)| *x = self.cross_element((layer, columns.start + r), (target_layer, c)));
        }
        matrix
    }

    fn source_element(&self, (a, r): (usize, usize), (b, c): (usize, usize)) -> f64 {
        let w = self.shape.source_width;
        let sum = &self.side.source_sum;
        let (first, row, column) = if a <= b { (a, r, (b - a) * w + c) } else { (b, c, (a - b) * w + r) };
        let gram = &self.side.gram[first];
        // A layer's block with itself is averaged over both halves: the f32 kernel need not round them alike.
        let product = if a == b { (gram.row(r)[c] + gram.row(c)[r]) / 2.0 } else { gram.row(row)[column] };
        product / self.rows - (sum[a * w + r] / self.rows) * (sum[b * w + c] / self.rows)
    }

    fn cross_element(&self, (layer, r): (usize, usize), (target_layer, c): (usize, usize)) -> f64 {
        let row = layer * self.shape.source_width + r;
        let column = target_layer * self.shape.target_width + c;
        let means = (self.side.source_sum[row] / self.rows) * (self.side.target_sum[column] / self.rows);
        self.side.cross[target_layer].row(row)[c] / self.rows - means
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::random::Random;

    const SHAPE: MomentShape = MomentShape { source_layers: 3, source_width: 4, target_layers: 2, target_width: 6 };

    fn rows(count: usize, offset: f32, seed: u64) -> (Vec<f32>, Vec<f32>) {
        let mut random = Random::new(seed);
        let x: Vec<f32> = (0..count * 12).map(|i| offset + random.normal() as f32 + (i % 12) as f32).collect();
        let y = (0..count * 12).map(|i| x[i] * 0.5 + random.normal() as f32).collect();
        (x, y)
    }

    fn covariance(a: &[f32], b: &[f32], (n, i): (usize, usize), (m, j): (usize, usize)) -> f64 {
        let column = |v: &[f32], width: usize, i: usize| -> Vec<f64> {
            v.chunks_exact(width).map(|row| f64::from(row[i])).collect()
        };
        let (a, b) = (column(a, n, i), column(b, m, j));
        let count = a.len() as f64;
        let (mean_a, mean_b) = (a.iter().sum::<f64>() / count, b.iter().sum::<f64>() / count);
        a.iter().zip(&b).map(|(x, y)| (x - mean_a) * (y - mean_b)).sum::<f64>() / count
    }

    /// Every number against a two-pass f64 computation, with means a thousand times the spread and layers out of order.
    #[test]
    fn streamed_equals_two_pass() {
        let (x, y) = rows(500, 1_000.0, 1);
        let mut moments = Moments::new(SHAPE);
        for (x, y) in x.chunks(12 * 77).zip(y.chunks(12 * 77)) {
            let part = Rows { source: x, target: y };
            moments.add(part, part);
        }
        assert_eq!(moments.rows(), 500);
        let side = moments.values();
        let layers = [2, 0];
        let columns = [8, 9, 10, 11, 0, 1, 2, 3];
        let (source, cross) = (side.source(&layers), side.cross(&layers, 1));
        let close = |found: f64, expected: f64| {
            assert!((found - expected).abs() < 1e-5, "found {found}, expected {expected}");
        };
        for (i, &a) in columns.iter().enumerate() {
            for (j, &b) in columns.iter().enumerate() {
                close(source.row(i)[j], covariance(&x, &x, (12, a), (12, b)));
                assert_eq!(source.row(i)[j], source.row(j)[i]);
            }
            (0..6).for_each(|j| close(cross.row(i)[j], covariance(&x, &y, (12, a), (12, 6 + j))));
        }
        (0..6).for_each(|j| close(side.target_variance(1)[j], covariance(&y, &y, (12, 6 + j), (12, 6 + j))));
        let mean = x.chunks_exact(12).map(|row| f64::from(row[9])).sum::<f64>() / 500.0;
        assert!((side.source_mean(&layers)[1] - mean).abs() < 1e-6);
        assert_eq!(side.source_columns(2, 1..3).row(0)[1], source.row(1)[2]);
        assert_eq!(side.cross_columns((0, 1..2), (1, 2..4)).row(0), &cross.row(5)[2..4]);
    }

    #[test]
    #[should_panic(expected = "as many of each")]
    fn unequal_rows_are_a_fault() {
        let (x, y) = rows(4, 0.0, 1);
        let (full, short) = (Rows { source: &x, target: &y }, Rows { source: &x[12..], target: &y[12..] });
        Moments::new(SHAPE).add(full, short);
    }
}
