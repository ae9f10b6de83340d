//! How much the target's attention makes of each row: the weights of CacheBridge's calibration (arXiv:2609.00891, METHOD §4).
//!
//! At boundaries c the prefix of c tokens is what a migration would hand over, and position c's query is the first to look at
//! it. A row matters as its squared attention does: an error δv of row i moves a head's output by a_i δv, an error δk by
//! a_i (v_i − o)(q·δk)/√d to first order.

use rayon::prelude::*;

use super::{content::Slots, rows::Part};
use crate::{
    cache::KvPlanes,
    engine::{ModelConfig, Observer},
};

/// Boundaries of a sequence.
const BOUNDARIES: usize = 32;
/// The first boundary …
const FIRST: usize = 12;
/// … and the last one, where the sequence is that long.
const LAST: usize = 1_023;

/// Attention mass of a sequence's rows, each `[layers, n_kv, rows]`: at every boundary the rows' masses in a head sum to 1, and
/// those of all boundaries are added.
#[derive(Clone, Debug, PartialEq)]
pub struct Mass {
    /// `Σ_u a²_ui · ‖v_i − o_u‖² · ‖q_u‖² / d` over the query heads u that share the KV head.
    pub keys: Vec<f32>,
    /// `Σ_u a²_ui`.
    pub values: Vec<f32>,
}

impl Mass {
    /// The keys' or the values'.
    pub fn part(&self, part: Part) -> &[f32] {
        match part {
            Part::Keys => &self.keys,
            Part::Values => &self.values,
        }
    }
}

/// Queries and attention outputs at the boundaries of one sequence, as its prefill goes by.
#[derive(Debug)]
pub(super) struct Boundaries {
    at: Vec<u32>,
    heads: usize,
    head_dim: usize,
    /// Per layer `[boundaries, heads, d]`, rotated.
    queries: Vec<Vec<f32>>,
    /// Likewise.
    outputs: Vec<Vec<f32>>,
}

impl Boundaries {
    /// Those of a sequence of `tokens` tokens.
    pub(super) fn new(tokens: usize, config: &ModelConfig) -> Boundaries {
        let empty = || vec![Vec::new(); config.layers];
        let (heads, head_dim) = (config.heads, config.head_dim);
        Boundaries { at: boundaries(tokens), heads, head_dim, queries: empty(), outputs: empty() }
    }

    /// The mass of the rows at `slots` of the sequence's own cache, whose slot i is at position i. Other slots are attended to
    /// and have no part in it.
    pub(super) fn mass(&self, planes: &KvPlanes, slots: Slots) -> Mass {
        let layers: Vec<(Vec<f32>, Vec<f32>)> =
            (0..self.queries.len()).into_par_iter().map(|layer| self.layer_mass(layer, planes, slots)).collect();
        let (keys, values): (Vec<_>, Vec<_>) = layers.into_iter().unzip();
        Mass { keys: keys.concat(), values: values.concat() }
    }

    fn layer_mass(&self, layer: usize, planes: &KvPlanes, slots: Slots) -> (Vec<f32>, Vec<f32>) {
        let (d, kv_heads) = (self.head_dim, planes.layout().kv_heads);
        let group = self.heads / kv_heads;
        let (keys, values) = (planes.layer(layer).k.to_f32(), planes.layer(layer).v.to_f32());
        let rows = slots.iter().count();
        let (mut key_mass, mut value_mass) = (vec![0.0; kv_heads * rows], vec![0.0; kv_heads * rows]);
        let (mut of_keys, mut of_values) = (vec![0.0; rows], vec![0.0; rows]);
        for (b, &position) in self.at.iter().enumerate() {
            let seen = position as usize + 1;
            for kv_head in 0..kv_heads {
                let plane = planes.offset(kv_head, 0)..planes.offset(kv_head, 0) + seen * d;
                let (keys, values) = (&keys[plane.clone()], &values[plane]);
                of_keys.fill(0.0);
                of_values.fill(0.0);
                for head in kv_head * group..(kv_head + 1) * group {
                    let at = (b * self.heads + head) * d..(b * self.heads + head + 1) * d;
                    let (query, output) = (&self.queries[layer][at.clone()], &self.outputs[layer][at]);
                    let attention = softmax(query, keys);
                    let scale = dot(query, query) / d as f32;
                    // The boundary's own token is no part of the prefix.
                    for (row, slot) in slots.iter().enumerate().take_while(|&(_, slot)| slot + 1 < seen) {
                        let squared = attention[slot] * attention[slot];
                        let value = &values[slot * d..(slot + 1) * d];
                        let away: f32 = value.iter().zip(output).map(|(v, o)| (v - o) * (v - o)).sum();
                        of_values[row] += squared;
                        of_keys[row] += squared * away * scale;
                    }
                }
                let own = kv_head * rows..(kv_head + 1) * rows;
                add_unit(&mut key_mass[own.clone()], &of_keys);
                add_unit(&mut value_mass[own], &of_values);
            }
        }
        (key_mass, value_mass)
    }
}

impl Observer for Boundaries {
    fn layer(&mut self, layer: usize, positions: &[u32], queries: &[f32], outputs: &[f32]) {
        let width = self.heads * self.head_dim;
        for row in self.at.iter().filter_map(|at| positions.binary_search(at).ok()) {
            self.queries[layer].extend(&queries[row * width..(row + 1) * width]);
            self.outputs[layer].extend(&outputs[row * width..(row + 1) * width]);
        }
    }
}

/// Ascending, evenly spaced by their logarithm, without those that fall together.
fn boundaries(tokens: usize) -> Vec<u32> {
    let last = LAST.min(tokens.saturating_sub(1));
    let first = FIRST.min(last);
    let ratio = last as f64 / first.max(1) as f64;
    let at = |i: usize| (first as f64 * ratio.powf(i as f64 / (BOUNDARIES - 1) as f64)).round() as u32;
    let mut found: Vec<u32> = (0..BOUNDARIES).map(at).collect();
    found.dedup();
    found
}

/// Attention of a query over the keys that it sees.
fn softmax(query: &[f32], keys: &[f32]) -> Vec<f32> {
    let scale = 1.0 / (query.len() as f32).sqrt();
    let mut weights: Vec<f32> = keys.chunks_exact(query.len()).map(|key| scale * dot(key, query)).collect();
    let max = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    weights.iter_mut().for_each(|w| *w = (*w - max).exp());
    let total: f32 = weights.iter().sum();
    weights.iter_mut().for_each(|w| *w /= total);
    weights
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// Adds `mass`, scaled to sum to 1; nothing where no row has any.
fn add_unit(sum: &mut [f32], mass: &[f32]) {
    let total: f32 = mass.iter().sum();
    if total > 0.0 {
        sum.iter_mut().zip(mass).for_each(|(sum, m)| *sum += m / total);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cache::{CacheLayout, Elem, Pairing, Rope, RopeScaling},
        measure::random::Random,
    };

    #[test]
    fn boundaries_are_those_of_the_paper_and_clipped() {
        let long = boundaries(4_096);
        assert_eq!((long.len(), long[0], long[31]), (32, 12, 1_023));
        assert!(long.windows(2).all(|pair| pair[0] < pair[1]), "{long:?}");
        let ratios: Vec<f64> = long[20..].windows(2).map(|p| f64::from(p[1]) / f64::from(p[0])).collect();
        assert!(ratios.iter().all(|r| (r - 1.154).abs() < 0.01), "{ratios:?}");
        let short = boundaries(384);
        assert_eq!((short[0], *short.last().unwrap()), (12, 383));
        assert_eq!(boundaries(20), [12, 13, 14, 15, 16, 17, 18, 19]);
        assert_eq!((boundaries(5), boundaries(1)), (vec![4], vec![0]));
    }

    /// Against the formulas in f64 and in their own order: two KV heads shared by two query heads each, seen in two batches.
    #[test]
    fn mass_is_that_of_the_formulas() {
        let (d, heads, tokens) = (4, 4, 30);
        let rope = Rope { theta: 1e4, dims: d, pairing: Pairing::HalfSplit, scaling: RopeScaling::None };
        let layout = CacheLayout { layers: 2, kv_heads: 2, head_dim: d, rope, elem: Elem::F32 };
        let mut planes = KvPlanes::zeros(layout, tokens + 3);
        let mut random = Random::new(5);
        let mut normal = |n: usize| -> Vec<f32> { (0..n).map(|_| random.normal() as f32).collect() };
        for (layer, head, slot) in (0..2 * 2 * tokens).map(|i| (i / tokens / 2, i / tokens % 2, i % tokens)) {
            let at = planes.offset(head, slot);
            planes.layer_mut(layer).k.write(at, &normal(d));
            planes.layer_mut(layer).v.write(at, &normal(d));
        }
        let empty = || vec![Vec::new(); 2];
        let mut seen = Boundaries { at: boundaries(tokens), heads, head_dim: d, queries: empty(), outputs: empty() };
        let queries: Vec<Vec<f32>> = (0..2).map(|_| normal(tokens * heads * d)).collect();
        let outputs: Vec<Vec<f32>> = (0..2).map(|_| normal(tokens * heads * d)).collect();
        let positions: Vec<u32> = (0..tokens as u32).collect();
        for rows in [0..17, 17..tokens] {
            let part = rows.start * heads * d..rows.end * heads * d;
            (0..2).for_each(|l| {
                seen.layer(l, &positions[rows.clone()], &queries[l][part.clone()], &outputs[l][part.clone()])
            });
        }
        let slots = Slots { start: 4, end: tokens, stride: 3 };
        let mass = seen.mass(&planes, slots);
        let rows: Vec<usize> = (4..tokens).step_by(3).collect();
        for (layer, kv_head) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let number = |plane: &crate::cache::Plane, slot: usize| -> Vec<f64> {
                let mut read = vec![0.0; d];
                plane.read(planes.offset(kv_head, slot), &mut read);
                read.into_iter().map(f64::from).collect()
            };
            let kv = planes.layer(layer);
            let (mut expected_k, mut expected_v) = (vec![0.0; rows.len()], vec![0.0; rows.len()]);
            for c in boundaries(tokens).into_iter().map(|c| c as usize) {
                let (mut r_k, mut r_v) = (vec![0.0; rows.len()], vec![0.0; rows.len()]);
                for u in [2 * kv_head, 2 * kv_head + 1] {
                    let at = (c * heads + u) * d;
                    let q: Vec<f64> = queries[layer][at..at + d].iter().map(|&x| f64::from(x)).collect();
                    let o: Vec<f64> = outputs[layer][at..at + d].iter().map(|&x| f64::from(x)).collect();
                    let logit = |slot| number(&kv.k, slot).iter().zip(&q).map(|(k, q)| k * q).sum::<f64>() / 2.0;
                    let total: f64 = (0..=c).map(|slot| logit(slot).exp()).sum();
                    for (row, &i) in rows.iter().enumerate().filter(|(_, i)| **i < c) {
                        let a = logit(i).exp() / total;
                        let away: f64 = number(&kv.v, i).iter().zip(&o).map(|(v, o)| (v - o).powi(2)).sum();
                        r_v[row] += a * a;
                        r_k[row] += a * a * away * q.iter().map(|x| x * x).sum::<f64>() / d as f64;
                    }
                }
                for (expected, r) in [(&mut expected_k, &r_k), (&mut expected_v, &r_v)] {
                    let total: f64 = r.iter().sum();
                    expected.iter_mut().zip(r).for_each(|(e, r)| *e += r / total);
                }
            }
            let own = (layer * 2 + kv_head) * rows.len()..(layer * 2 + kv_head + 1) * rows.len();
            for (found, expected) in [(&mass.keys[own.clone()], expected_k), (&mass.values[own], expected_v)] {
                for (found, expected) in found.iter().zip(expected) {
                    assert!((f64::from(*found) - expected).abs() < 1e-5, "{found} against {expected}");
                }
            }
        }
    }
}
