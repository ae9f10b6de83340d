//! What a ridge predicts a target layer from, and the maps of a whole target.

use super::{
    linalg::LinalgError,
    local::{self, Heads},
    moments::{MomentShape, Moments},
    rank,
    ridge::{AffineMap, Lambda, LayerMap, fit_each},
};
use crate::{
    cache::Elem,
    pair::{RidgeSettings, Tensor},
};

/// Features of every target layer that is mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Design {
    /// First layers of the target that are not mapped.
    pub native_layers: usize,
    /// Per mapped target layer, the source layers it reads.
    pub layers: Vec<Vec<usize>>,
    /// Keys and values are both features of each, rather than keys of keys and values of values.
    pub joint: bool,
    /// The target's hidden state behind its native layers is a feature as well.
    pub hidden: bool,
    /// All features are projected to so many columns first, which every layer reads; all layers read the same then.
    pub rank: Option<usize>,
    /// Each head reads one head of each source layer alone.
    pub heads: Option<Heads>,
}

/// A ridge for every target layer that is mapped.
#[derive(Clone, Debug, PartialEq)]
pub struct RidgeMaps {
    /// What it was fitted as.
    pub design: Design,
    /// Of a design with a rank, what projects the panel (of keys and the one of values; of both where they are joint).
    pub projections: Vec<AffineMap>,
    /// One for each mapped layer; of a design with a rank, from the projection.
    pub layers: Vec<LayerMap>,
}

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Keys.
    Keys,
    /// Values.
    Values,
}

impl Design {
    /// The feature blocks that the keys or values of a target layer with these source layers are predicted from, in the order of
    /// the weights' rows, as [`Moments::joint`] counts them.
    pub(super) fn blocks(&self, side: Side, sources: &[usize], shape: &MomentShape) -> Vec<usize> {
        let keys = sources.iter().copied();
        let values = sources.iter().map(|layer| shape.source_layers + layer);
        let mut blocks: Vec<usize> = match (self.joint, side) {
            (true, _) => keys.chain(values).collect(),
            (false, Side::Keys) => keys.collect(),
            (false, Side::Values) => values.collect(),
        };
        if self.hidden {
            blocks.push(2 * shape.source_layers);
        }
        blocks
    }

    /// Features of the widest target layer.
    pub fn features(&self, shape: &MomentShape) -> usize {
        let k = self.layers.iter().map(Vec::len).max().unwrap_or(0);
        let sides = if self.joint { 2 } else { 1 };
        let width = self.heads.map_or(shape.source_width, |heads| shape.source_width / heads.source);
        sides * k * width + if self.hidden { shape.hidden } else { 0 }
    }

    /// Rows without which a design is not fitted: what it would have learnt is its calibration text.
    ///
    /// Least squares from N rows of p features errs on other text by p / (N − p) of the noise's variance beyond the noise
    /// itself, so that 2 p rows keep what is overfitted no larger than what nobody could predict. A map of rank r keeps, of the
    /// p directions in which an output overfits, r (p + q − r) / q: as many as it has free numbers for each of its q outputs. All
    /// p features still have to be told apart, by p rows at least, so that the same bound is p + r (p + q − r) / q rows. What the
    /// penalty takes off is not counted: a small one takes off nothing, and it is chosen later.
    pub fn least_rows(&self, shape: &MomentShape) -> usize {
        let features = self.features(shape);
        let Some(rank) = self.rank else { return 2 * features };
        let sides = if self.joint { 2 } else { 1 };
        let outputs = sides * self.layers.len() * shape.target_width;
        let rank = rank.min(features).min(outputs);
        features + (rank * (features + outputs - rank)).div_ceil(outputs.max(1))
    }

    /// The settings of the module.
    pub fn settings(&self) -> RidgeSettings {
        let rank = self.rank.unwrap_or(0);
        RidgeSettings { layers: self.layers.clone(), joint: self.joint, hidden: self.hidden, rank }
    }

    /// Index of each mapped layer's output block of keys or of values.
    pub(super) fn output(&self, side: Side, mapped: usize, shape: &MomentShape) -> usize {
        self.native_layers + mapped + if side == Side::Values { shape.target_layers } else { 0 }
    }
}

impl RidgeMaps {
    /// Fits a design.
    ///
    /// # Errors
    /// [`LinalgError`] if a regularised covariance has no Cholesky factor.
    pub fn fit(moments: &Moments, design: &Design, lambda: Lambda) -> Result<RidgeMaps, LinalgError> {
        if let Some(heads) = design.heads {
            return local::fit(moments, design, heads, lambda);
        }
        if let Some(columns) = design.rank {
            return rank::fit(moments, design, columns, lambda);
        }
        let shape = moments.shape();
        let wanted = |side: Side| {
            let one = move |(mapped, sources): (usize, &Vec<usize>)| {
                (design.blocks(side, sources, &shape), design.output(side, mapped, &shape))
            };
            design.layers.iter().enumerate().map(one)
        };
        let wanted: Vec<_> = wanted(Side::Keys).chain(wanted(Side::Values)).collect();
        let mut keys = fit_each(moments.joint(), &wanted, lambda)?;
        let values = keys.split_off(design.layers.len());
        Ok(RidgeMaps::new(design, Vec::new(), keys, values))
    }

    /// Puts the maps of keys and of values together, one of each for every mapped layer.
    pub(super) fn new(
        design: &Design,
        projections: Vec<AffineMap>,
        keys: Vec<AffineMap>,
        values: Vec<AffineMap>,
    ) -> RidgeMaps {
        let layers = design.layers.iter().zip(keys.into_iter().zip(values));
        let layers = layers.map(|(sources, (keys, values))| LayerMap { sources: sources.clone(), keys, values });
        RidgeMaps { design: design.clone(), projections, layers: layers.collect() }
    }

    /// Which of the projections a side reads.
    pub(super) fn projection(&self, side: Side) -> Option<&AffineMap> {
        self.projections.get(usize::from(!self.design.joint && side == Side::Values))
    }

    /// The weights, as the module names them.
    pub fn tensors(&self, elem: Elem) -> Vec<Tensor> {
        let parts: &[&str] = if self.design.joint { &["kv"] } else { &["k", "v"] };
        let projections = parts.iter().zip(&self.projections);
        let mut tensors: Vec<Tensor> =
            projections.flat_map(|(part, map)| map.tensors(&format!("projection.{part}"), elem)).collect();
        for (mapped, map) in self.layers.iter().enumerate() {
            tensors.extend(map.tensors(self.design.native_layers + mapped, elem));
        }
        tensors
    }

    /// Multiplications and additions of a token.
    pub fn flops(&self) -> f64 {
        let maps = self.layers.iter().flat_map(|map| [&map.keys, &map.values]).chain(&self.projections);
        let all: f64 = maps.map(|map| 2.0 * map.weight.as_slice().len() as f64).sum();
        // Of a head's map, what it does not read is written out as zeroes.
        self.design.heads.map_or(all, |heads| all / heads.source as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_projection_needs_fewer_rows_than_a_map_of_full_rank() {
        let shape = MomentShape { source_layers: 6, source_width: 10, target_layers: 5, target_width: 8, hidden: 30 };
        let (native_layers, joint, hidden) = (1, true, true);
        let of = |rank| Design { native_layers, layers: vec![(0..6).collect(); 4], joint, hidden, rank, heads: None };
        // 150 features, 64 outputs.
        assert_eq!(of(None).least_rows(&shape), 300);
        assert_eq!(of(Some(4)).least_rows(&shape), 150 + 14, "4 (150 + 64 − 4) / 64 = 13.1");
        // No projection has more columns than there are outputs.
        assert_eq!(of(Some(64)).least_rows(&shape), 300);
        assert_eq!(of(Some(1_000)).least_rows(&shape), 300);
    }
}
