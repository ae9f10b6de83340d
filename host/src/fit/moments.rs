//! First and second moments of source and target rows, streamed.
//!
//! One Gram matrix over everything that can be a feature (the keys of all source layers, rotation stripped, their values, and
//! the target's hidden state where it is captured) and one cross matrix per target layer, of its keys and of its values, hold
//! everything an unweighted fit needs: any subset of layers, any λ and every R² is a sub-block solve (METHOD §3). Rows are
//! shifted by the first chunk's mean before they are multiplied: f32 products of raw rows would lose the covariance of a
//! coordinate whose mean is large against its spread, as some key biases are.

use std::ops::Range;

use rayon::prelude::*;
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
    /// Width of the target's hidden state; 0 where it is not captured.
    pub hidden: usize,
}

impl MomentShape {
    /// Columns of a source row over all layers, of keys or of values.
    pub fn source_columns(&self) -> usize {
        self.source_layers * self.source_width
    }

    /// Columns of a target row over all layers, of keys or of values.
    pub fn target_columns(&self) -> usize {
        self.target_layers * self.target_width
    }

    /// Columns of everything that can be a feature.
    pub fn features(&self) -> usize {
        2 * self.source_columns() + self.hidden
    }

    /// Columns of everything that can be predicted.
    pub fn outputs(&self) -> usize {
        2 * self.target_columns()
    }

    /// Feature blocks: the keys of each source layer, then its values, then the hidden state.
    fn feature_blocks(&self) -> usize {
        2 * self.source_layers + usize::from(self.hidden > 0)
    }

    /// Columns of a feature block among all.
    fn feature_columns(&self, block: usize) -> Range<usize> {
        let start = block * self.source_width;
        start..start + if block == 2 * self.source_layers { self.hidden } else { self.source_width }
    }

    /// Columns of an output block (a layer's keys or values) among all.
    fn output_columns(&self, block: usize) -> Range<usize> {
        block * self.target_width..(block + 1) * self.target_width
    }

    /// Bytes that the moments take in memory.
    pub fn bytes(&self) -> u64 {
        let (n, m) = (self.features() as u64, self.outputs() as u64);
        8 * (n * n / 2 + n * m)
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

/// Moments of keys, values and hidden state over the same rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Moments {
    shape: MomentShape,
    rows: u64,
    pub(super) sums: Sums,
}

impl Moments {
    /// No rows yet.
    pub fn new(shape: MomentShape) -> Moments {
        Moments { shape, rows: 0, sums: Sums::new(shape) }
    }

    /// From parts that were stored.
    pub(super) fn from_parts(shape: MomentShape, rows: u64, sums: Sums) -> Moments {
        Moments { shape, rows, sums }
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
    /// As [`Moments::add_with`].
    pub fn add(&mut self, keys: Rows<'_>, values: Rows<'_>) {
        self.add_with(keys, values, &[]);
    }

    /// The same with the target's hidden state, `[rows, hidden]`.
    ///
    /// # Panics
    /// If the parts differ in their number of rows, or a slice isn't a whole number of rows.
    pub fn add_with(&mut self, keys: Rows<'_>, values: Rows<'_>, hidden: &[f32]) {
        let shape = self.shape;
        let rows = keys.source.len() / shape.source_columns();
        for part in [keys, values] {
            assert_eq!(part.source.len(), rows * shape.source_columns(), "whole source rows, as many of each");
            assert_eq!(part.target.len(), rows * shape.target_columns(), "whole target rows, as many of each");
        }
        assert_eq!(hidden.len(), rows * shape.hidden, "whole hidden rows, as many of each");
        if rows == 0 {
            return;
        }
        let (n, m) = (shape.source_columns(), shape.target_columns());
        let features = side_by_side(rows, &[(keys.source, n), (values.source, n), (hidden, shape.hidden)]);
        let outputs = side_by_side(rows, &[(keys.target, m), (values.target, m)]);
        self.sums.add(shape, rows, features, outputs, self.rows == 0);
        self.rows += rows as u64;
    }

    /// The keys' moments, as covariances per token: layer l of either model is its keys.
    pub fn keys(&self) -> Covariances<'_> {
        Covariances { moments: self, first_feature: 0, first_output: 0 }
    }

    /// The values' moments, likewise.
    pub fn values(&self) -> Covariances<'_> {
        let MomentShape { source_layers, target_layers, .. } = self.shape;
        Covariances { moments: self, first_feature: source_layers, first_output: target_layers }
    }

    /// All of them: the keys of the layers, then their values, then (of the features) the hidden state.
    pub fn joint(&self) -> Covariances<'_> {
        self.keys()
    }
}

/// Columns of several matrices beside each other, `[rows, Σ columns]`.
fn side_by_side(rows: usize, parts: &[(&[f32], usize)]) -> Vec<f32> {
    let mut all = Vec::with_capacity(parts.iter().map(|(part, _)| part.len()).sum());
    for row in 0..rows {
        parts.iter().for_each(|(part, columns)| all.extend_from_slice(&part[row * columns..(row + 1) * columns]));
    }
    all
}

/// Sums over the rows, shifted.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sums {
    /// `[features]`, subtracted from every row before anything is summed.
    pub(super) source_shift: Vec<f32>,
    /// `[outputs]`.
    pub(super) target_shift: Vec<f32>,
    /// Sum of the shifted rows, `[features]`.
    pub(super) source_sum: Vec<f64>,
    /// `[outputs]`.
    pub(super) target_sum: Vec<f64>,
    /// Sum of squares of the shifted target rows, `[outputs]`.
    pub(super) target_squares: Vec<f64>,
    /// Per feature block, its products with itself and all later ones: `[columns, features − columns before it]`.
    pub(super) gram: Vec<Matrix>,
    /// Per output block, `[features, target_width]`.
    pub(super) cross: Vec<Matrix>,
}

impl Sums {
    pub(super) fn new(shape: MomentShape) -> Sums {
        let (n, m) = (shape.features(), shape.outputs());
        let gram = |block| {
            let columns = shape.feature_columns(block);
            Matrix::zeros(columns.len(), n - columns.start)
        };
        Sums {
            source_shift: vec![0.0; n],
            target_shift: vec![0.0; m],
            source_sum: vec![0.0; n],
            target_sum: vec![0.0; m],
            target_squares: vec![0.0; m],
            gram: (0..shape.feature_blocks()).map(gram).collect(),
            cross: (0..2 * shape.target_layers).map(|_| Matrix::zeros(n, shape.target_width)).collect(),
        }
    }

    fn add(&mut self, shape: MomentShape, rows: usize, mut x: Vec<f32>, mut y: Vec<f32>, first: bool) {
        let (n, m) = (shape.features(), shape.outputs());
        if first {
            self.source_shift = column_means(&x, rows, n);
            self.target_shift = column_means(&y, rows, m);
        }
        shift(&mut x, &self.source_shift);
        shift(&mut y, &self.target_shift);
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
        for (block, gram) in self.gram.iter_mut().enumerate() {
            let columns = shape.feature_columns(block);
            let here = View::rows(&x[columns.start..], rows, columns.len(), n);
            let onwards = View::rows(&x[columns.start..], rows, n - columns.start, n);
            accumulate(gram, here, onwards, &mut scratch);
        }
        for (block, cross) in self.cross.iter_mut().enumerate() {
            let columns = shape.output_columns(block);
            let target = View::rows(&y[columns.start..], rows, columns.len(), m);
            accumulate(cross, View::rows(&x, rows, n, n), target, &mut scratch);
        }
    }
}

/// Elements that one thread adds at a time.
const PIECE: usize = 1 << 16;

/// `sum += leftᵀ · right`, the product in f32, the sum in f64.
fn accumulate(sum: &mut Matrix, left: View<'_, f32>, right: View<'_, f32>, scratch: &mut Vec<f32>) {
    scratch.resize(sum.rows() * sum.cols(), 0.0);
    multiply(scratch, sum.cols(), 0.0, 1.0, left.transposed(), right);
    // The sums are far larger than any cache: it is memory that this waits for.
    let pieces = sum.as_mut_slice().par_chunks_mut(PIECE).zip(scratch.par_chunks(PIECE));
    pieces.for_each(|(sums, products)| {
        sums.iter_mut().zip(products).for_each(|(sum, &x)| *sum += f64::from(x));
    });
}

fn column_means(rows: &[f32], count: usize, columns: usize) -> Vec<f32> {
    let mut sums = vec![0.0f64; columns];
    for row in rows.chunks_exact(columns) {
        sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x));
    }
    sums.iter().map(|sum| (sum / count as f64) as f32).collect()
}

fn shift(rows: &mut [f32], shift: &[f32]) {
    for row in rows.chunks_exact_mut(shift.len()) {
        row.iter_mut().zip(shift).for_each(|(x, s)| *x -= s);
    }
}

/// Means and per-token covariances (`/N`) of the keys, of the values, or of all: a layer is named by its number among these.
#[derive(Clone, Copy, Debug)]
pub struct Covariances<'a> {
    moments: &'a Moments,
    first_feature: usize,
    first_output: usize,
}

impl Covariances<'_> {
    /// Layers and widths.
    pub fn shape(&self) -> MomentShape {
        self.moments.shape
    }

    /// Rows behind them.
    pub fn rows(&self) -> f64 {
        self.moments.rows as f64
    }

    /// Columns of a feature block among all features.
    fn features(&self, layer: usize) -> Range<usize> {
        self.shape().feature_columns(self.first_feature + layer)
    }

    /// Columns of an output block among all outputs.
    fn outputs(&self, layer: usize) -> Range<usize> {
        self.shape().output_columns(self.first_output + layer)
    }

    /// Mean source row of the given layers, concatenated: `[Σ columns]`.
    pub fn source_mean(&self, layers: &[usize]) -> Vec<f64> {
        let sums = &self.moments.sums;
        let mean = |i: usize| f64::from(sums.source_shift[i]) + sums.source_sum[i] / self.rows();
        layers.iter().flat_map(|&layer| self.features(layer)).map(mean).collect()
    }

    /// Mean row of a target layer, `[target_width]`.
    pub fn target_mean(&self, layer: usize) -> Vec<f64> {
        let sums = &self.moments.sums;
        let mean = |i: usize| f64::from(sums.target_shift[i]) + sums.target_sum[i] / self.rows();
        self.outputs(layer).map(mean).collect()
    }

    /// Variance of each coordinate of a target layer, `[target_width]`.
    pub fn target_variance(&self, layer: usize) -> Vec<f64> {
        let sums = &self.moments.sums;
        let variance = |i: usize| {
            let mean = sums.target_sum[i] / self.rows();
            (sums.target_squares[i] / self.rows() - mean * mean).max(0.0)
        };
        self.outputs(layer).map(variance).collect()
    }

    /// Covariance of the given source layers, concatenated: `[Σ columns]²`, symmetric.
    pub fn source(&self, layers: &[usize]) -> Matrix {
        let starts = self.starts(layers);
        let columns = starts.last().copied().unwrap_or(0);
        let mut matrix = Matrix::zeros(columns, columns);
        for (i, &a) in layers.iter().enumerate() {
            for (j, &b) in layers.iter().enumerate().skip(i) {
                let (rows, columns) = (starts[i]..starts[i + 1], starts[j]..starts[j + 1]);
                for (r, row) in rows.clone().enumerate() {
                    self.source_row((a, r), b, &mut matrix.row_mut(row)[columns.clone()]);
                }
                if i < j {
                    for row in columns {
                        for column in rows.clone() {
                            matrix.row_mut(row)[column] = matrix.row(column)[row];
                        }
                    }
                }
            }
        }
        matrix
    }

    /// Covariance of a column of one source layer with all columns of another.
    fn source_row(&self, (a, r): (usize, usize), b: usize, into: &mut [f64]) {
        if a >= b {
            into.iter_mut().enumerate().for_each(|(c, x)| *x = self.source_element((a, r), (b, c)));
            return;
        }
        let (sums, rows, own, other) = (&self.moments.sums, self.rows(), self.features(a), self.features(b));
        let mean = sums.source_sum[own.start + r] / rows;
        let products = &sums.gram[self.first_feature + a].row(r)[other.start - own.start..];
        for ((x, product), sum) in into.iter_mut().zip(products).zip(&sums.source_sum[other]) {
            *x = product / rows - mean * (sum / rows);
        }
    }

    /// Where each of the layers begins when they are concatenated, and where the last one ends.
    fn starts(&self, layers: &[usize]) -> Vec<usize> {
        let mut end = 0;
        let ends = layers.iter().map(|&layer| {
            end += self.features(layer).len();
            end
        });
        std::iter::once(0).chain(ends.collect::<Vec<_>>()).collect()
    }

    /// Covariance of `columns` (a head's, say) of one source layer with themselves.
    pub fn source_columns(&self, layer: usize, columns: Range<usize>) -> Matrix {
        let n = columns.len();
        let mut matrix = Matrix::zeros(n, n);
        for r in 0..n {
            let into = matrix.row_mut(r).iter_mut().enumerate();
            into.for_each(|(c, x)| *x = self.source_element((layer, columns.start + r), (layer, columns.start + c)));
        }
        matrix
    }

    /// Covariance of the given source layers with a target layer: `[Σ columns, target_width]`.
    pub fn cross(&self, layers: &[usize], target_layer: usize) -> Matrix {
        let starts = self.starts(layers);
        let (sums, rows) = (&self.moments.sums, self.rows());
        let products = &sums.cross[self.first_output + target_layer];
        let target_sums = &sums.target_sum[self.outputs(target_layer)];
        let mut matrix = Matrix::zeros(starts.last().copied().unwrap_or(0), self.shape().target_width);
        for (i, &layer) in layers.iter().enumerate() {
            for r in 0..self.features(layer).len() {
                let row = self.features(layer).start + r;
                let mean = sums.source_sum[row] / rows;
                let into = matrix.row_mut(starts[i] + r).iter_mut().zip(products.row(row)).zip(target_sums);
                into.for_each(|((x, product), sum)| *x = product / rows - mean * (sum / rows));
            }
        }
        matrix
    }

    /// Covariance of some columns of a source layer with some of a target layer.
    pub fn cross_columns(
        &self,
        (layer, columns): (usize, Range<usize>),
        (target_layer, target_columns): (usize, Range<usize>),
    ) -> Matrix {
        let mut matrix = Matrix::zeros(columns.len(), target_columns.len());
        for r in 0..columns.len() {
            let into = matrix.row_mut(r).iter_mut().zip(target_columns.clone());
            into.for_each(|(x, c)| *x = self.cross_element((layer, columns.start + r), (target_layer, c)));
        }
        matrix
    }

    fn source_element(&self, (a, r): (usize, usize), (b, c): (usize, usize)) -> f64 {
        let sums = &self.moments.sums;
        let (row, column) = (self.features(a).start + r, self.features(b).start + c);
        let product = if a == b {
            // A layer's block with itself is averaged over both halves: the f32 kernel need not round them alike.
            let gram = &sums.gram[self.first_feature + a];
            (gram.row(r)[c] + gram.row(c)[r]) / 2.0
        } else if a < b {
            sums.gram[self.first_feature + a].row(r)[column - self.features(a).start]
        } else {
            sums.gram[self.first_feature + b].row(c)[row - self.features(b).start]
        };
        product / self.rows() - (sums.source_sum[row] / self.rows()) * (sums.source_sum[column] / self.rows())
    }

    fn cross_element(&self, (layer, r): (usize, usize), (target_layer, c): (usize, usize)) -> f64 {
        let sums = &self.moments.sums;
        let (row, column) = (self.features(layer).start + r, self.outputs(target_layer).start + c);
        let means = (sums.source_sum[row] / self.rows()) * (sums.target_sum[column] / self.rows());
        sums.cross[self.first_output + target_layer].row(row)[c] / self.rows() - means
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::random::Random;

    const SHAPE: MomentShape =
        MomentShape { source_layers: 3, source_width: 4, target_layers: 2, target_width: 6, hidden: 5 };

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
        let hidden: Vec<f32> = x.chunks_exact(12).flat_map(|x| [x[1] * x[5], x[2], x[3], -x[4], 7.0]).collect();
        let values: Vec<f32> = x.iter().map(|x| 0.01 * x * x).collect();
        for (i, (x, y)) in x.chunks(12 * 77).zip(y.chunks(12 * 77)).enumerate() {
            let rows = |all: &'_ [f32], width: usize| all.chunks(width * 77).nth(i).unwrap().to_vec();
            let (values, hidden) = (rows(&values, 12), rows(&hidden, 5));
            moments.add_with(Rows { source: &values, target: y }, Rows { source: x, target: y }, &hidden);
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
        // Keys with values, the hidden state with either, and the keys of a target layer from all of it.
        let (joint, blocks) = (moments.joint(), [6, 1, 4]);
        let (source, cross) = (joint.source(&blocks), joint.cross(&blocks, 1));
        let all: Vec<f32> = (0..500)
            .flat_map(|row| {
                [&hidden[5 * row..5 * row + 5], &values[12 * row + 4..12 * row + 8], &x[12 * row + 4..12 * row + 8]]
                    .concat()
            })
            .collect();
        for i in 0..13 {
            for j in 0..13 {
                let expected = covariance(&all, &all, (13, i), (13, j));
                let scale = source.row(i)[i].max(source.row(j)[j]).max(1.0);
                let found = source.row(i)[j];
                assert!((found - expected).abs() < 1e-5 * scale, "{i}, {j}: found {found}, expected {expected}");
            }
            (0..6).for_each(|j| {
                let (found, expected) = (cross.row(i)[j], covariance(&all, &y, (13, i), (12, 6 + j)));
                assert!(
                    (found - expected).abs() < 1e-5 * source.row(i)[i].max(1.0),
                    "found {found}, expected {expected}"
                );
            });
        }
    }

    #[test]
    #[should_panic(expected = "as many of each")]
    fn unequal_rows_are_a_fault() {
        let (x, y) = rows(4, 0.0, 1);
        let (full, short) = (Rows { source: &x, target: &y }, Rows { source: &x[12..], target: &y[12..] });
        Moments::new(MomentShape { hidden: 0, ..SHAPE }).add(full, short);
    }
}
