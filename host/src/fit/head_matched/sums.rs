//! Weighted means and products of every head of some target layers, over the rows of one chunk after the other.

use rayon::prelude::*;

use super::{AffineMap, HeadMap, Lambda, LayerMaps, LinalgError, Of, Part, ROWS, RowFile, RowsError, Weighting, ridge};
use crate::fit::{
    linalg::Matrix,
    product::{View, multiply},
    rows::RowShape,
};

/// Rows of the Gram matrix that are multiplied at once: only what is left of the diagonal is needed.
const BLOCK: usize = 128;

/// What is summed in a pass over the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    /// Weights and weighted rows.
    Means,
    /// Weighted products of what is left of the rows without their means.
    Products,
}

/// How a head's keys or values are weighted.
#[derive(Clone, Copy, Debug)]
struct Weights {
    alpha: f64,
    /// Mean mass of a row, that r is 1 on average.
    mean: f64,
    effective_rows: f64,
}

impl Weights {
    /// α as large as it may be: `α* = min(1, √((n/τ − 1) / CV²(r)))`, τ = min(n, 2p), so that the
    /// effective number of rows, `n / (1 + α² CV²)`, is at least τ.
    fn new(rows: f64, sum: f64, squares: f64, features: usize) -> Weights {
        let mean = sum / rows;
        let spread = squares / rows / (mean * mean) - 1.0;
        // No mass at all, or the same for every row: nothing to weight by.
        if !(spread.is_finite() && spread > 0.0) {
            return Weights { alpha: 0.0, mean: 1.0, effective_rows: rows };
        }
        let floor = rows.min(2.0 * features as f64);
        let alpha = ((rows / floor - 1.0) / spread).sqrt().min(1.0);
        Weights { alpha, mean, effective_rows: rows / (1.0 + alpha * alpha * spread) }
    }

    fn of(&self, mass: f32) -> f64 {
        1.0 + self.alpha * (f64::from(mass) / self.mean - 1.0)
    }
}

/// The sums of one head's keys or values.
struct Head {
    /// Index of the target layer in the group.
    at: usize,
    part: Part,
    head: usize,
    weights: Weights,
    total: f64,
    /// Weighted sum of the rows, and in the second pass their mean: `[k · d_s]`.
    source: Vec<f64>,
    /// `[d_t]`.
    target: Vec<f64>,
    /// The upper triangle of XᵀDX.
    gram: Matrix,
    /// XᵀDY.
    cross: Matrix,
    /// Weighted sum of the squares of Y.
    squares: f64,
}

/// Sums of all heads of some target layers.
pub(super) struct Sums<'a> {
    shape: RowShape,
    group: &'a [(usize, &'a [usize])],
    heads: Vec<Head>,
    rows: f64,
    pass: Pass,
}

/// The sections of a chunk that a group reads; `[part][layer]`, those of other layers empty.
struct Sections {
    source: [Vec<Vec<f32>>; 2],
    target: [Vec<Vec<f32>>; 2],
    mass: [Vec<Vec<f32>>; 2],
}

impl<'a> Sums<'a> {
    /// No rows yet. The weights are known already: they need the rows' mass alone.
    pub(super) fn new(
        rows: &RowFile,
        group: &'a [(usize, &'a [usize])],
        weighting: Weighting,
    ) -> Result<Sums<'a>, RowsError> {
        let (shape, count) = (rows.shape(), rows.rows() as f64);
        let mut heads = Vec::new();
        for (at, (layer, sources)) in group.iter().enumerate() {
            let features = sources.len() * shape.source.head_dim;
            for part in Part::BOTH {
                let moments = match weighting {
                    Weighting::Attention => mass_moments(rows, part, *layer)?,
                    Weighting::Uniform => vec![(0.0, 0.0); shape.target.kv_heads],
                };
                heads.extend(moments.into_iter().enumerate().map(|(head, (sum, squares))| Head {
                    at,
                    part,
                    head,
                    weights: Weights::new(count, sum, squares, features),
                    total: 0.0,
                    source: vec![0.0; features],
                    target: vec![0.0; shape.target.head_dim],
                    gram: Matrix::zeros(features, features),
                    cross: Matrix::zeros(features, shape.target.head_dim),
                    squares: 0.0,
                }));
            }
        }
        Ok(Sums { shape, group, heads, rows: count, pass: Pass::Means })
    }

    /// Adds a chunk's rows in one of the two passes, the second after the whole of the first.
    pub(super) fn add(&mut self, rows: &RowFile, chunk: usize, pass: Pass) -> Result<(), RowsError> {
        if self.pass != pass {
            self.pass = pass;
            for head in &mut self.heads {
                let total = head.total;
                head.source.iter_mut().chain(&mut head.target).for_each(|sum| *sum /= total);
            }
        }
        let sections = Sections::read(rows, chunk, self.group)?;
        let (count, shape, group) = (rows.rows_of(chunk), self.shape, self.group);
        self.heads.par_iter_mut().for_each(|head| {
            let (layer, sources) = group[head.at];
            for start in (0..count).step_by(ROWS) {
                let panel =
                    Panel { shape, sections: &sections, layer, sources, rows: start..count.min(start + ROWS), count };
                match pass {
                    Pass::Means => head.add_means(&panel),
                    Pass::Products => head.add_products(&panel),
                }
            }
        });
        Ok(())
    }

    /// The maps, once all rows have gone through both passes.
    pub(super) fn solve(self, lambda: Lambda) -> Result<Vec<LayerMaps>, LinalgError> {
        let rows = self.rows;
        let solved = self.heads.into_par_iter().map(|head| {
            let (at, part) = (head.at, head.part);
            head.solve(lambda, rows).map(|map| (at, part, map))
        });
        let mut layers: Vec<LayerMaps> = self
            .group
            .iter()
            .map(|(layer, sources)| LayerMaps {
                layer: *layer,
                sources: sources.to_vec(),
                keys: Vec::new(),
                values: Vec::new(),
            })
            .collect();
        for (at, part, map) in solved.collect::<Result<Vec<_>, _>>()? {
            match part {
                Part::Keys => layers[at].keys.push(map),
                Part::Values => layers[at].values.push(map),
            }
        }
        Ok(layers)
    }
}

/// Per head of a target layer, sum and sum of squares of the rows' mass.
fn mass_moments(rows: &RowFile, part: Part, layer: usize) -> Result<Vec<(f64, f64)>, RowsError> {
    let mut moments = vec![(0.0, 0.0); rows.shape().target.kv_heads];
    for chunk in (0..rows.chunks()).filter(|&chunk| rows.rows_of(chunk) > 0) {
        let mass = rows.read(chunk, Of::Mass, part, layer)?;
        for ((sum, squares), mass) in moments.iter_mut().zip(mass.chunks_exact(rows.rows_of(chunk))) {
            mass.iter().map(|&m| f64::from(m)).for_each(|m| {
                *sum += m;
                *squares += m * m;
            });
        }
    }
    Ok(moments)
}

impl Sections {
    fn read(rows: &RowFile, chunk: usize, group: &[(usize, &[usize])]) -> Result<Sections, RowsError> {
        let shape = rows.shape();
        let read = |of: Of, layers: usize, wanted: &dyn Fn(usize) -> bool| {
            let one = |part: Part, layer: usize| {
                if wanted(layer) { rows.read(chunk, of, part, layer) } else { Ok(Vec::new()) }
            };
            let part = |part| (0..layers).map(|layer| one(part, layer)).collect::<Result<Vec<_>, _>>();
            Ok([part(Part::Keys)?, part(Part::Values)?])
        };
        let (source, target) = (shape.source.layers, shape.target.layers);
        let is_target = |layer: usize| group.iter().any(|(own, _)| *own == layer);
        Ok(Sections {
            source: read(Of::Source, source, &|layer| group.iter().any(|(_, sources)| sources.contains(&layer)))?,
            target: read(Of::Target, target, &is_target)?,
            mass: read(Of::Mass, target, &is_target)?,
        })
    }
}

/// Some rows of a chunk, as a target layer's heads see them.
struct Panel<'a> {
    shape: RowShape,
    sections: &'a Sections,
    layer: usize,
    sources: &'a [usize],
    rows: std::ops::Range<usize>,
    /// Rows of the whole chunk.
    count: usize,
}

impl Panel<'_> {
    /// The source heads' columns of a row, layer by layer.
    fn source(&self, part: Part, head: usize, row: usize) -> impl Iterator<Item = f32> {
        let (extent, target) = (self.shape.source, self.shape.target);
        let at = row * extent.width() + head * extent.kv_heads / target.kv_heads * extent.head_dim;
        let layers = &self.sections.source[part as usize];
        self.sources.iter().flat_map(move |&layer| &layers[layer][at..at + extent.head_dim]).copied()
    }

    fn target(&self, part: Part, head: usize, row: usize) -> &[f32] {
        let extent = self.shape.target;
        let at = row * extent.width() + head * extent.head_dim;
        &self.sections.target[part as usize][self.layer][at..at + extent.head_dim]
    }

    fn mass(&self, part: Part, head: usize, row: usize) -> f32 {
        self.sections.mass[part as usize][self.layer][head * self.count + row]
    }
}

impl Head {
    fn add_means(&mut self, panel: &Panel<'_>) {
        for row in panel.rows.clone() {
            let weight = self.weights.of(panel.mass(self.part, self.head, row));
            self.total += weight;
            let source = self.source.iter_mut().zip(panel.source(self.part, self.head, row));
            source.for_each(|(sum, x)| *sum += weight * f64::from(x));
            let target = self.target.iter_mut().zip(panel.target(self.part, self.head, row));
            target.for_each(|(sum, &y)| *sum += weight * f64::from(y));
        }
    }

    fn add_products(&mut self, panel: &Panel<'_>) {
        let (rows, p, d) = (panel.rows.len(), self.source.len(), self.target.len());
        let (mut x, mut y) = (Vec::with_capacity(rows * p), Vec::with_capacity(rows * d));
        for row in panel.rows.clone() {
            let root = self.weights.of(panel.mass(self.part, self.head, row)).sqrt();
            let source = panel.source(self.part, self.head, row).zip(&self.source);
            x.extend(source.map(|(x, mean)| (root * (f64::from(x) - mean)) as f32));
            let target = panel.target(self.part, self.head, row).iter().zip(&self.target);
            y.extend(target.map(|(&y, mean)| (root * (f64::from(y) - mean)) as f32));
        }
        self.squares += y.iter().map(|&y| f64::from(y) * f64::from(y)).sum::<f64>();
        let mut scratch = Vec::new();
        for start in (0..p).step_by(BLOCK) {
            let end = p.min(start + BLOCK);
            let left = View::rows(&x[start..], rows, end - start, p).transposed();
            let right = View::rows(&x[start..], rows, p - start, p);
            accumulate(&mut self.gram, start, left, right, (end - start, start..p), &mut scratch);
            accumulate(&mut self.cross, start, left, View::rows(&y, rows, d, d), (end - start, 0..d), &mut scratch);
        }
    }

    /// `W = (XᵀDX/n + λsI)⁻¹ XᵀDY/n`; the weights sum to n.
    fn solve(mut self, lambda: Lambda, rows: f64) -> Result<HeadMap, LinalgError> {
        let total = self.total;
        self.gram.as_mut_slice().iter_mut().chain(self.cross.as_mut_slice()).for_each(|sum| *sum /= total);
        let mut penalty = lambda.diagonal(&self.gram, rows);
        let mut weight = [self.cross.clone()];
        let jitter = ridge::solve(&self.gram, &mut weight, lambda, rows)?;
        let [weight] = weight;
        penalty.iter_mut().for_each(|penalty| *penalty += jitter);
        let mut bias = self.target.clone();
        // With (C + D) W = B: SSE/n = Σ var(y) − tr(WᵀB) − tr(WᵀDW).
        let mut explained = 0.0;
        for (i, (&mean, penalty)) in self.source.iter().zip(penalty).enumerate() {
            bias.iter_mut().zip(weight.row(i)).for_each(|(b, w)| *b -= mean * w);
            explained += weight.row(i).iter().zip(self.cross.row(i)).map(|(w, b)| w * b + penalty * w * w).sum::<f64>();
        }
        let variance = self.squares / total;
        let r2 = if variance > 0.0 { explained / variance } else { 0.0 };
        let map = AffineMap { weight, bias, source_mean: self.source, target_mean: self.target, r2, jitter };
        Ok(HeadMap { map, alpha: self.weights.alpha, effective_rows: self.weights.effective_rows, variance })
    }
}

/// Adds `left · right` to some columns of the rows from `start` on, the product in f32, the sum in f64.
fn accumulate(
    sum: &mut Matrix,
    start: usize,
    left: View<'_, f32>,
    right: View<'_, f32>,
    (rows, columns): (usize, std::ops::Range<usize>),
    scratch: &mut Vec<f32>,
) {
    scratch.resize(rows * columns.len(), 0.0);
    multiply(scratch, columns.len(), 0.0, 1.0, left, right);
    for (i, product) in scratch.chunks_exact(columns.len()).enumerate() {
        sum.row_mut(start + i)[columns.clone()].iter_mut().zip(product).for_each(|(sum, &x)| *sum += f64::from(x));
    }
}

#[cfg(test)]
mod tests {
    use super::Weights;

    #[test]
    fn alpha_keeps_the_effective_rows_above_the_floor() {
        // 1,000 rows, 20 of which have all the mass: CV² = 49; τ = 100 asks for α = √(9/49).
        let weights = Weights::new(1_000.0, 20.0, 20.0, 50);
        assert!((weights.alpha - 3.0 / 7.0).abs() < 1e-12, "{weights:?}");
        assert!((weights.effective_rows - 100.0).abs() < 1e-9, "{weights:?}");
        let (heavy, light) = (weights.of(1.0), weights.of(0.0));
        assert!((20.0 * heavy + 980.0 * light - 1_000.0).abs() < 1e-9, "the weights sum to the number of rows");
        let kish = 1_000.0f64.powi(2) / (20.0 * heavy * heavy + 980.0 * light * light);
        assert!((kish - weights.effective_rows).abs() < 1e-9);
        // Few features: as heavy as the mass itself.
        assert_eq!(Weights::new(1_000.0, 20.0, 20.0, 5).alpha, 1.0);
        // No room for weights, no mass, equal mass.
        assert_eq!(Weights::new(1_000.0, 20.0, 20.0, 500).alpha, 0.0);
        assert_eq!(Weights::new(1_000.0, 0.0, 0.0, 5).alpha, 0.0);
        assert_eq!(Weights::new(1_000.0, 1_000.0, 1_000.0, 5).alpha, 0.0);
    }
}
