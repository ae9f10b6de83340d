//! Attention-output cosine (METHOD §5): the target's own queries over a mapped cache and over its native one.
//!
//! The queries are those of the native pass, seen through the engine's [`Observer`]; both caches are read by the same code
//! here, so that the comparison is of caches and of nothing else.

use std::ops::Range;

use rayon::prelude::*;

use crate::{cache::KvPlanes, engine::Observer};

/// Queries of the last positions of a prefill, layer by layer.
#[derive(Debug)]
pub struct Queries {
    first: u32,
    heads: usize,
    head_dim: usize,
    /// Per layer `[rows, heads, d]`, rotated.
    layers: Vec<Vec<f32>>,
    positions: Vec<u32>,
}

impl Queries {
    /// Keeps the queries at positions from `first` on, of a model with `layers` layers and `heads` query heads of `head_dim`.
    pub fn from_position(first: u32, layers: usize, heads: usize, head_dim: usize) -> Queries {
        Queries { first, heads, head_dim, layers: vec![Vec::new(); layers], positions: Vec::new() }
    }

    /// Rows that were kept.
    pub fn rows(&self) -> usize {
        self.positions.len()
    }

    /// Query heads of a layer.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Their positions.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// The queries of one head of a layer, rotated, `[rows, d]`.
    pub fn of_head(&self, layer: usize, head: usize) -> Vec<f32> {
        let rows = self.layers[layer].chunks_exact(self.heads * self.head_dim);
        rows.flat_map(|row| &row[head * self.head_dim..(head + 1) * self.head_dim]).copied().collect()
    }

    /// The attention that each of `slots` gets from the queries of one head, mean over rows.
    ///
    /// # Panics
    /// As of [`compare`]; if `slots` go beyond the first query's position.
    pub fn attention(&self, layer: usize, head: usize, planes: &KvPlanes, slots: Range<usize>) -> Vec<f32> {
        let d = self.head_dim;
        let kv_head = head * planes.layout().kv_heads / self.heads;
        let keys = planes.layer(layer).k.to_f32();
        let (scale, mut received) = (1.0 / (d as f32).sqrt(), vec![0.0; slots.len()]);
        let mut weights = Vec::new();
        for (query, &position) in self.of_head(layer, head).chunks_exact(d).zip(&self.positions) {
            let first = planes.offset(kv_head, 0);
            let seen = keys[first..first + (position as usize + 1) * d].chunks_exact(d);
            softmax(&mut weights, seen.map(|key| scale * key.iter().zip(query).map(|(k, q)| k * q).sum::<f32>()));
            received.iter_mut().zip(&weights[slots.clone()]).for_each(|(sum, weight)| *sum += weight);
        }
        received.iter_mut().for_each(|sum| *sum /= self.rows().max(1) as f32);
        received
    }
}

impl Observer for Queries {
    fn layer(&mut self, layer: usize, positions: &[u32], queries: &[f32], _outputs: &[f32]) {
        let kept = positions.partition_point(|&p| p < self.first);
        if layer == 0 {
            self.positions.extend(&positions[kept..]);
        }
        self.layers[layer].extend(&queries[kept * self.heads * self.head_dim..]);
    }
}

/// Cosines of one document.
#[derive(Clone, Debug, PartialEq)]
pub struct Cosines {
    /// Mean over rows and heads of each layer.
    pub layers: Vec<f64>,
}

impl Cosines {
    /// Mean over layers and heads.
    pub fn mean(&self) -> f64 {
        self.layers.iter().sum::<f64>() / self.layers.len() as f64
    }

    /// The worst layer's mean.
    pub fn worst_layer(&self) -> f64 {
        self.layers.iter().copied().fold(f64::INFINITY, f64::min)
    }
}

/// Compares what each query makes of `native` and of `mapped`, two caches of one layout whose slot i is at position i; a
/// query at position p attends to the slots up to p.
///
/// # Panics
/// If a cache has fewer slots than a query's position asks for, or the queries are of another number of layers.
pub fn compare(queries: &Queries, native: &KvPlanes, mapped: &KvPlanes) -> Cosines {
    let layers = (0..queries.layers.len()).into_par_iter().map(|layer| {
        let a = outputs(queries, layer, native);
        let b = outputs(queries, layer, mapped);
        let pairs = a.chunks_exact(queries.head_dim).zip(b.chunks_exact(queries.head_dim));
        pairs.map(|(a, b)| cosine(a, b)).sum::<f64>() / (queries.rows() * queries.heads) as f64
    });
    Cosines { layers: layers.collect() }
}

/// Attention outputs `[rows, heads, d]` of one layer: softmax(q·k / √d) over the slots a query sees, times v.
fn outputs(queries: &Queries, layer: usize, planes: &KvPlanes) -> Vec<f32> {
    let (d, heads) = (queries.head_dim, queries.heads);
    let group = heads / planes.layout().kv_heads;
    let (keys, values) = (planes.layer(layer).k.to_f32(), planes.layer(layer).v.to_f32());
    let scale = 1.0 / (d as f32).sqrt();
    let mut outputs = vec![0.0; queries.layers[layer].len()];
    let rows = queries.layers[layer].chunks_exact(d).zip(outputs.chunks_exact_mut(d));
    let mut weights = Vec::new();
    for (i, (query, output)) in rows.enumerate() {
        let (position, kv_head) = (queries.positions[i / heads] as usize, i % heads / group);
        let slots = planes.offset(kv_head, 0)..planes.offset(kv_head, 0) + (position + 1) * d;
        let seen = keys[slots.clone()].chunks_exact(d);
        softmax(&mut weights, seen.map(|key| scale * key.iter().zip(query).map(|(k, q)| k * q).sum::<f32>()));
        for (&weight, value) in weights.iter().zip(values[slots].chunks_exact(d)) {
            output.iter_mut().zip(value).for_each(|(o, v)| *o += weight * v);
        }
    }
    outputs
}

/// Replaces `weights` by the softmax of `scores`.
fn softmax(weights: &mut Vec<f32>, scores: impl Iterator<Item = f32>) {
    weights.clear();
    weights.extend(scores);
    let max = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    weights.iter_mut().for_each(|w| *w = (*w - max).exp());
    let total: f32 = weights.iter().sum();
    weights.iter_mut().for_each(|w| *w /= total);
}

/// Cosine of two vectors; of two zero vectors 1, of a zero and another 0.
fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    let (aa, bb) = (dot(a, a), dot(b, b));
    match (aa == 0.0, bb == 0.0) {
        (true, true) => 1.0,
        (false, false) => dot(a, b) / (aa.sqrt() * bb.sqrt()),
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{CacheLayout, Elem, Pairing, Rope, RopeScaling};

    fn planes(values: [[f32; 2]; 3]) -> KvPlanes {
        let rope = Rope { theta: 1e4, dims: 2, pairing: Pairing::HalfSplit, scaling: RopeScaling::None };
        let layout = CacheLayout { layers: 1, kv_heads: 1, head_dim: 2, rope, elem: Elem::F32 };
        let mut planes = KvPlanes::zeros(layout, 5);
        for (slot, value) in values.iter().enumerate() {
            let offset = planes.offset(0, slot);
            planes.layer_mut(0).v.write(offset, value);
            planes.layer_mut(0).k.write(offset, &[slot as f32, 0.0]);
        }
        planes
    }

    /// Two query heads over one KV head: the first weighs both visible slots alike, the second looks at the last only.
    #[test]
    fn attends_to_the_slots_up_to_its_own() {
        let mut queries = Queries::from_position(1, 1, 2, 2);
        queries.layer(0, &[0, 1], &[9.0, 9.0, 9.0, 9.0, 0.0, 5.0, 1000.0, 0.0], &[]);
        assert_eq!(queries.rows(), 1);
        let found = outputs(&queries, 0, &planes([[1.0, 0.0], [0.0, 3.0], [50.0, 50.0]]));
        assert_eq!(found, [0.5, 1.5, 0.0, 3.0]);
        let planes = planes([[1.0, 0.0], [0.0, 3.0], [50.0, 50.0]]);
        assert_eq!(queries.attention(0, 0, &planes, 0..2), [0.5, 0.5]);
        assert_eq!(queries.attention(0, 1, &planes, 0..2), [0.0, 1.0]);
        assert_eq!(queries.of_head(0, 1), [1000.0, 0.0]);
    }

    #[test]
    fn cosines_by_hand() {
        let mut queries = Queries::from_position(0, 1, 1, 2);
        queries.layer(0, &[0], &[1.0, 1.0], &[]);
        let native = planes([[1.0, 0.0], [0.0; 2], [0.0; 2]]);
        let cosines = compare(&queries, &native, &planes([[1.0, 1.0], [0.0; 2], [0.0; 2]]));
        assert!((cosines.mean() - 0.5f64.sqrt()).abs() < 1e-7);
        assert_eq!(compare(&queries, &native, &native).worst_layer(), 1.0);
        assert_eq!(compare(&queries, &native, &planes([[0.0; 2]; 3])).mean(), 0.0);
    }
}
