//! Causal attention over the planes of a cache as they lie.
//!
//! Online softmax (Milakov & Gimelshein 2018; Dao et al. 2022): the keys are read in blocks, so that scratch stays at
//! `[rows of a task, block]` however long the context is.

use kvmig_gemm::{GemmError, MatMut, MatRef, Threads, matmul, widest};

use crate::cache::{LayerKv, Plane};

use super::{ModelConfig, norm::exp, team::Team};

/// Keys of one block; scores of a task's rows against them stay in the second-level cache.
const BLOCK: usize = 256;
/// Batch rows of one task, at most.
const TASK_ROWS: usize = 32;

/// One layer's keys and values and how far apart its heads lie, in elements.
#[derive(Clone, Copy)]
pub(super) struct Heads<'a> {
    pub(super) kv: &'a LayerKv,
    pub(super) head_stride: usize,
}

/// Which slots each row sees: `first ..= slot` of its own cache, and all of the shared prefix.
#[derive(Clone, Copy)]
pub(super) struct Visible<'a> {
    pub(super) firsts: &'a [usize],
    pub(super) slots: &'a [usize],
}

/// `softmax(q · kᵀ / sqrt(d)) · v` for every row and query head.
///
/// `queries` and the result are `[rows, heads, d]`; `prefix` is `(its heads, its filled slots)`.
pub(super) fn attend(
    config: &ModelConfig,
    team: Team,
    queries: &[f32],
    visible: Visible<'_>,
    own: Heads<'_>,
    prefix: Option<(Heads<'_>, usize)>,
) -> Vec<f32> {
    let (rows, d) = (visible.slots.len(), config.head_dim);
    let group = config.heads / config.kv_heads;
    let width = config.heads * d;
    let tasks: Vec<(std::ops::Range<usize>, usize)> = row_blocks(visible, config.kv_heads, team.threads())
        .into_iter()
        .flat_map(|block| (0..config.kv_heads).map(move |head| (block.clone(), head)))
        .collect();
    let run = |(block, head): &(std::ops::Range<usize>, usize)| {
        let mut task = Task::new(block.len(), group, d);
        let from = block.clone().map(|row| &queries[row * width + head * group * d..][..group * d]);
        task.load_queries(from);
        if let Some((heads, filled)) = prefix {
            for start in (0..filled).step_by(BLOCK) {
                task.block(heads, *head, start..filled.min(start + BLOCK), None);
            }
        }
        let own_visible = Visible { firsts: &visible.firsts[block.clone()], slots: &visible.slots[block.clone()] };
        let first = own_visible.firsts.iter().copied().min().unwrap_or(0);
        let end = own_visible.slots.iter().copied().max().map_or(0, |slot| slot + 1);
        for start in (first..end).step_by(BLOCK) {
            task.block(own, *head, start..end.min(start + BLOCK), Some(own_visible));
        }
        task.finish()
    };
    let mut outputs = vec![Vec::new(); tasks.len()];
    team.each(tasks.iter().zip(&mut outputs).collect(), |(task, output)| *output = run(task));
    let mut out = vec![0.0; rows * width];
    for ((block, head), output) in tasks.iter().zip(&outputs) {
        for (row, output) in block.clone().zip(output.chunks_exact(group * d)) {
            out[row * width + head * group * d..][..group * d].copy_from_slice(output);
        }
    }
    out
}

/// Runs of rows whose slots follow one another and that see the same first slot, short enough to keep all threads busy:
/// rows far apart would only mask out each other's keys.
fn row_blocks(visible: Visible<'_>, kv_heads: usize, threads: usize) -> Vec<std::ops::Range<usize>> {
    let rows = visible.slots.len();
    let wanted_tasks = 2 * threads;
    let most = (rows * kv_heads).div_ceil(wanted_tasks).clamp(4, TASK_ROWS);
    let mut blocks = Vec::new();
    let mut start = 0;
    for row in 1..=rows {
        let split = row == rows
            || row - start == most
            || visible.slots[row] != visible.slots[row - 1] + 1
            || visible.firsts[row] != visible.firsts[start];
        if split {
            blocks.push(start..row);
            start = row;
        }
    }
    blocks
}

/// One KV head's share of a run of rows: `rows * group` queries, in the order row, query head.
struct Task {
    group: usize,
    d: usize,
    /// `[rows * group, d]`, scaled by `1 / sqrt(d)`.
    queries: Vec<f32>,
    /// `[rows * group, BLOCK]`.
    scores: Vec<f32>,
    /// Largest score so far, of each query.
    peak: Vec<f32>,
    /// Sum of `exp(score - peak)` so far.
    mass: Vec<f32>,
    /// `[rows * group, d]`: the same sum, of values.
    sums: Vec<f32>,
    /// Widened keys or values of a half-precision block.
    widened: Vec<f32>,
}

impl Task {
    fn new(rows: usize, group: usize, d: usize) -> Task {
        let queries = rows * group;
        Task {
            group,
            d,
            queries: Vec::with_capacity(queries * d),
            scores: vec![0.0; queries * BLOCK],
            peak: vec![f32::NEG_INFINITY; queries],
            mass: vec![0.0; queries],
            sums: vec![0.0; queries * d],
            widened: Vec::new(),
        }
    }

    fn load_queries<'a>(&mut self, rows: impl Iterator<Item = &'a [f32]>) {
        let scale = 1.0 / (self.d as f32).sqrt();
        self.queries.extend(rows.flatten().map(|x| x * scale));
    }

    /// Takes in the keys and values of slots `range`; `visible` is `None` where every row sees all of them.
    fn block(&mut self, heads: Heads<'_>, head: usize, range: std::ops::Range<usize>, visible: Option<Visible<'_>>) {
        let (d, queries, keys) = (self.d, self.peak.len(), range.len());
        let offset = head * heads.head_stride + range.start * d;
        let block = rows_f32(&heads.kv.k, offset, keys * d, &mut self.widened);
        let scored = (|| {
            let scores = MatMut::new(&mut self.scores, queries, keys, BLOCK, 1)?;
            let q = MatRef::row_major(&self.queries, queries, d)?;
            matmul(scores, 0.0, 1.0, q, MatRef::row_major(block, keys, d)?.transposed(), Threads::One)
        })();
        expect_shapes(scored);
        for (query, scores) in self.scores.chunks_exact_mut(BLOCK).enumerate() {
            let seen = match visible {
                None => 0..keys,
                Some(visible) => {
                    let row = query / self.group;
                    let from = visible.firsts[row].clamp(range.start, range.end) - range.start;
                    let to = (visible.slots[row] + 1).clamp(range.start, range.end) - range.start;
                    from.min(to)..to
                }
            };
            let scores = &mut scores[..keys];
            if seen.is_empty() {
                scores.fill(0.0);
                continue;
            }
            scores[..seen.start].fill(0.0);
            scores[seen.end..].fill(0.0);
            let (kept, mass) = soften(&mut scores[seen], &mut self.peak[query]);
            self.mass[query] = self.mass[query] * kept + mass;
            if kept != 1.0 {
                self.sums[query * d..][..d].iter_mut().for_each(|x| *x *= kept);
            }
        }
        let block = rows_f32(&heads.kv.v, offset, keys * d, &mut self.widened);
        let summed = (|| {
            let sums = MatMut::row_major(&mut self.sums, queries, d)?;
            let scores = MatRef::new(&self.scores, queries, keys, BLOCK, 1)?;
            matmul(sums, 1.0, 1.0, scores, MatRef::row_major(block, keys, d)?, Threads::One)
        })();
        expect_shapes(summed);
    }

    /// The attention outputs, `[rows * group, d]`.
    fn finish(mut self) -> Vec<f32> {
        for (sums, mass) in self.sums.chunks_exact_mut(self.d).zip(&self.mass) {
            let inverse = 1.0 / mass;
            sums.iter_mut().for_each(|x| *x *= inverse);
        }
        self.sums
    }
}

fn expect_shapes(result: Result<(), GemmError>) {
    result.expect("the views were made from these very sizes");
}

/// `len` elements of a plane as f32: as they lie, or widened into `scratch`.
fn rows_f32<'a>(plane: &'a Plane, offset: usize, len: usize, scratch: &'a mut Vec<f32>) -> &'a [f32] {
    match plane {
        Plane::F32(values) => &values[offset..offset + len],
        Plane::F16(_) => {
            scratch.resize(len, 0.0);
            plane.read(offset, scratch);
            scratch
        }
    }
}

/// Raises `peak` to the largest of `scores` and replaces each by `exp(score - peak)`: by what sums over the former peak are
/// to be multiplied, and the sum of the new values.
fn soften(scores: &mut [f32], peak: &mut f32) -> (f32, f32) {
    widest(
        #[inline(always)]
        || {
            let former = *peak;
            *peak = largest(scores).max(former);
            (exp(former - *peak), exp_sum(scores, *peak))
        },
    )
}

/// Numbers side by side: the registers of the widest instructions, twice.
const LANES: usize = 32;

#[inline(always)]
fn largest(values: &[f32]) -> f32 {
    let mut peaks = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (peak, x) in peaks.iter_mut().zip(chunk) {
            // A comparison, not `f32::max`: its rule for NaN keeps the loop from vectorising.
            *peak = if *x > *peak { *x } else { *peak };
        }
    }
    peaks.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max)
}

/// Replaces each value by `exp(value - peak)` and returns their sum.
#[inline(always)]
fn exp_sum(values: &mut [f32], peak: f32) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (chunks, rest) = values.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *x = exp(*x - peak);
            *sum += *x;
        }
    }
    let mut sum = 0.0;
    for x in rest {
        *x = exp(*x - peak);
        sum += *x;
    }
    sums.iter().sum::<f32>() + sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cache::{Elem, KvPlanes, Pairing, Rope, RopeScaling},
        engine::Architecture,
    };

    fn config(heads: usize, kv_heads: usize, head_dim: usize) -> ModelConfig {
        let rope = Rope { theta: 1e4, dims: head_dim, pairing: Pairing::HalfSplit, scaling: RopeScaling::None };
        ModelConfig {
            architecture: Architecture::Llama,
            layers: 1,
            hidden: heads * head_dim,
            intermediate: 1,
            heads,
            kv_heads,
            head_dim,
            vocab: 1,
            rms_eps: 1e-5,
            rope,
            tied: true,
            max_positions: 1 << 16,
            bos: None,
            eos: vec![],
        }
    }

    fn wave(n: usize, seed: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.618 + seed).sin() * 2.0).collect()
    }

    fn filled(config: &ModelConfig, elem: Elem, slots: usize, seed: f32) -> KvPlanes {
        let mut planes = KvPlanes::zeros(config.layout(elem), slots + 3);
        for head in 0..config.kv_heads {
            let offset = planes.offset(head, 0);
            let n = slots * config.head_dim;
            planes.layer_mut(0).k.write(offset, &wave(n, seed + head as f32));
            planes.layer_mut(0).v.write(offset, &wave(n, 3.0 * seed + head as f32));
        }
        planes
    }

    /// The definition, in f64, over an explicit list of (planes, slot) for each row.
    fn reference(config: &ModelConfig, queries: &[f32], seen: &[Vec<(&KvPlanes, usize)>]) -> Vec<f64> {
        let (d, group) = (config.head_dim, config.heads / config.kv_heads);
        let mut out = Vec::new();
        for (row, seen) in seen.iter().enumerate() {
            for head in 0..config.heads {
                let q = &queries[(row * config.heads + head) * d..][..d];
                let read = |plane: &Plane, planes: &KvPlanes, slot| {
                    let mut x = vec![0.0; d];
                    plane.read(planes.offset(head / group, slot), &mut x);
                    x.into_iter().map(f64::from).collect::<Vec<_>>()
                };
                let scores: Vec<f64> = seen
                    .iter()
                    .map(|&(planes, slot)| {
                        let k = read(&planes.layer(0).k, planes, slot);
                        k.iter().zip(q).map(|(k, q)| k * f64::from(*q)).sum::<f64>() / (d as f64).sqrt()
                    })
                    .collect();
                let peak = scores.iter().copied().fold(f64::MIN, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - peak).exp()).collect();
                let mass: f64 = weights.iter().sum();
                let mut sum = vec![0.0; d];
                for (&(planes, slot), w) in seen.iter().zip(&weights) {
                    let v = read(&planes.layer(0).v, planes, slot);
                    sum.iter_mut().zip(v).for_each(|(s, v)| *s += w / mass * v);
                }
                out.extend(sum);
            }
        }
        out
    }

    fn worst(got: &[f32], expected: &[f64]) -> f64 {
        assert_eq!(got.len(), expected.len());
        got.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max)
    }

    #[test]
    fn scattered_rows_over_many_blocks_match_the_definition() {
        for elem in [Elem::F32, Elem::F16] {
            let config = config(6, 2, 8);
            let own = filled(&config, elem, 700, 0.3);
            let slots: Vec<usize> = (0..4).chain(660..700).collect();
            let firsts = vec![0; slots.len()];
            let queries = wave(slots.len() * 6 * 8, 0.9);
            let heads = Heads { kv: own.layer(0), head_stride: own.head_stride() };
            let got = attend(&config, Team::Rayon, &queries, Visible { firsts: &firsts, slots: &slots }, heads, None);
            let seen: Vec<_> = slots.iter().map(|&s| (0..=s).map(|i| (&own, i)).collect()).collect();
            let error = worst(&got, &reference(&config, &queries, &seen));
            assert!(error < 1e-5, "{elem:?}: {error}");
        }
    }

    #[test]
    fn continuations_see_the_prefix_and_their_own_start_only() {
        let config = config(4, 4, 6);
        let (prefix, own) = (filled(&config, Elem::F32, 300, 0.1), filled(&config, Elem::F32, 20, 0.7));
        // Two continuations, in slots 0..12 and 12..20.
        let slots: Vec<usize> = (0..20).collect();
        let firsts: Vec<usize> = slots.iter().map(|&s| if s < 12 { 0 } else { 12 }).collect();
        let queries = wave(20 * 4 * 6, 0.2);
        let heads = |planes: &'static KvPlanes| Heads { kv: planes.layer(0), head_stride: planes.head_stride() };
        let (prefix, own): (&'static KvPlanes, &'static KvPlanes) =
            (Box::leak(Box::new(prefix)), Box::leak(Box::new(own)));
        let got = attend(
            &config,
            Team::Tensor,
            &queries,
            Visible { firsts: &firsts, slots: &slots },
            heads(own),
            Some((heads(prefix), 300)),
        );
        let seen: Vec<_> = slots
            .iter()
            .zip(&firsts)
            .map(|(&s, &f)| (0..300).map(|i| (prefix, i)).chain((f..=s).map(|i| (own, i))).collect())
            .collect();
        let error = worst(&got, &reference(&config, &queries, &seen));
        assert!(error < 1e-5, "{error}");
    }
}
