//! What every kind of fit ends as.

use super::{design::RidgeMaps, head_matched::HeadMatched, mlp::Mlp, ridge::LayerMap, rows::Part};
use crate::{
    cache::Elem,
    pair::{Tensor, TrainingRecord, WeightingRecord},
};

/// A fitted mapper, as a pair takes it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Fitted {
    /// The JSON its module is handed.
    pub(super) settings: String,
    pub(super) tensors: Vec<Tensor>,
    /// Source layers that a target layer reads.
    pub(super) k: usize,
    /// Mean R² over target layers, of keys and of values: in-sample of solved maps, on sequences held out of trained ones.
    pub(super) r2: [f64; 2],
    /// Largest jitter that a factorisation needed.
    pub(super) jitter: f64,
    /// How much rows counted, where not all alike.
    pub(super) weighting: Option<WeightingRecord>,
    /// How networks were trained.
    pub(super) training: Option<TrainingRecord>,
}

impl Fitted {
    pub(super) fn ridge(maps: &RidgeMaps, elem: Elem) -> Fitted {
        let layers = &maps.layers;
        let mean = |value: fn(&LayerMap) -> f64| layers.iter().map(value).sum::<f64>() / layers.len() as f64;
        Fitted {
            settings: maps.design.settings().to_json(),
            tensors: maps.tensors(elem),
            k: layers.first().map_or(0, |map| map.sources.len()),
            r2: [mean(|map| map.keys.r2), mean(|map| map.values.r2)],
            jitter: layers.iter().map(|map| map.keys.jitter.max(map.values.jitter)).fold(0.0, f64::max),
            weighting: None,
            training: None,
        }
    }

    /// Multiplications and additions that a mapped token costs: two for each element of a matrix.
    pub(super) fn flops(&self) -> f64 {
        let matrices = self.tensors.iter().filter(|tensor| tensor.shape.len() > 1);
        matrices.map(|tensor| 2.0 * tensor.numbers.len() as f64).sum()
    }

    /// The same with every target head's maps in the place of the head before: the control that has everything but the heads.
    pub(super) fn shifted(&self, kv_heads: usize) -> Fitted {
        let mut fitted = self.clone();
        for tensor in fitted.tensors.iter_mut().filter(|tensor| tensor.name.starts_with("layers.")) {
            // Of `[heads, rows, d]` whole heads, of `[rows, heads · d]` and `[heads · d]` columns.
            let row = match tensor.shape.as_slice() {
                [_, _, _] => tensor.numbers.len(),
                shape => shape.last().copied().unwrap_or(1),
            };
            tensor.numbers.chunks_exact_mut(row).for_each(|row| row.rotate_left(row.len() / kv_heads));
        }
        fitted
    }

    pub(super) fn head_matched(maps: &HeadMatched, elem: Elem) -> Fitted {
        Fitted {
            settings: maps.settings(),
            tensors: maps.tensors(elem),
            k: maps.layers.first().map_or(0, |layer| layer.sources.len()),
            r2: Part::BOTH.map(|part| maps.r2(part)),
            jitter: maps.jitter(),
            weighting: maps.weighting(),
            training: None,
        }
    }

    pub(super) fn mlp(networks: &Mlp, elem: Elem) -> Fitted {
        Fitted {
            settings: networks.settings(),
            tensors: networks.tensors(elem),
            k: networks.layers.first().map_or(0, |layer| layer.sources.len()),
            r2: Part::BOTH.map(|part| networks.r2(part)),
            jitter: 0.0,
            weighting: None,
            training: Some(networks.training()),
        }
    }
}
