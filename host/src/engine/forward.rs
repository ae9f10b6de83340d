//! One pass of a batch of tokens through the layers.
//!
//! Everything is this one pass: a chunk of a prefill, one decoded token, the native ends of a mapped cache (the first and
//! the last tokens in one batch), and the continuations that are scored over a shared prefix.

use crate::cache::KvPlanes;

use super::{
    EngineError, ModelConfig,
    attention::{Heads, Visible, attend},
    norm,
    team::Team,
    weights::{LayerWeights, Weights},
};

/// Sees what attention does, layer by layer. Slices are `[rows, heads, d]`.
pub trait Observer {
    /// `queries` are rotated; `outputs` are what attention makes of them, before the output projection. Called once per
    /// layer and batch, layers ascending; `positions` are the rows'.
    fn layer(&mut self, layer: usize, positions: &[u32], queries: &[f32], outputs: &[f32]);

    /// The residual stream that enters a layer, `[rows, hidden]`. Called before [`Observer::layer`].
    fn input(&mut self, _layer: usize, _positions: &[u32], _residual: &[f32]) {}
}

/// Tokens of one pass. Row r's keys and values go to slot `slots[r]`; it sees the slots `firsts[r] ..= slots[r]` and, where
/// there is one, all of the shared prefix.
pub(super) struct Batch<'a> {
    pub(super) tokens: &'a [u32],
    pub(super) positions: &'a [u32],
    pub(super) slots: &'a [usize],
    pub(super) firsts: &'a [usize],
}

/// Slots `0 .. len` of another cache of the same layout, seen by every row and not written.
#[derive(Clone, Copy)]
pub(super) struct Prefix<'a> {
    pub(super) planes: &'a KvPlanes,
    pub(super) len: usize,
}

/// Which rows' logits are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Want {
    /// None: the pass only fills the cache.
    Nothing,
    /// The last row's, `[vocab]`.
    Last,
    /// Every row's, `[rows, vocab]`.
    All,
    /// No logits: the pass ends once the keys and values of this layer are stored, and gives the residual stream that entered
    /// it, `[rows, hidden]`.
    Entering(usize),
}

/// Buffers that live through all layers.
#[derive(Default)]
struct Scratch {
    normed: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    projected: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
}

/// Runs `batch`, writes its keys and values into `planes`, and returns what is wanted.
pub(super) fn forward(
    config: &ModelConfig,
    weights: &Weights,
    batch: &Batch<'_>,
    planes: &mut KvPlanes,
    prefix: Option<Prefix<'_>>,
    want: Want,
    mut observer: Option<&mut dyn Observer>,
) -> Result<Vec<f32>, EngineError> {
    let (rows, team) = (batch.tokens.len(), weights.team);
    let table = config.rope.table(batch.positions);
    let mut x = weights.embedding.rows(batch.tokens)?;
    let mut scratch = Scratch::default();
    for (l, layer) in weights.layers.iter().enumerate() {
        if let Some(observer) = &mut observer {
            observer.input(l, batch.positions, &x);
        }
        let ends_here = want == Want::Entering(l);
        project(config, team, layer, &x, &table, !ends_here, &mut scratch)?;
        store(config, planes, l, batch.slots, &scratch);
        if ends_here {
            return Ok(x);
        }
        // After the last layer's keys and values are stored, only rows whose logits are wanted have to go on.
        let last = l + 1 == config.layers && observer.is_none();
        let kept = match want {
            Want::Nothing if last => break,
            Want::Last if last => rows - 1,
            _ => 0,
        };
        let head_stride = planes.head_stride();
        let own = Heads { kv: planes.layer(l), head_stride };
        let shared = prefix.map(|p| (Heads { kv: p.planes.layer(l), head_stride: p.planes.head_stride() }, p.len));
        let visible = Visible { firsts: &batch.firsts[kept..], slots: &batch.slots[kept..] };
        let queries = &scratch.q[kept * config.heads * config.head_dim..];
        let outputs = attend(config, team, queries, visible, own, shared);
        if let Some(observer) = &mut observer {
            observer.layer(l, batch.positions, queries, &outputs);
        }
        x.drain(..kept * config.hidden);
        finish_layer(config, team, layer, &mut x, &outputs, &mut scratch)?;
    }
    let hidden = match want {
        // No layer was the one to end at: the caller's number is not one of a layer.
        Want::Nothing | Want::Entering(_) => return Ok(Vec::new()),
        Want::Last => &x[x.len() - config.hidden..],
        Want::All => &x[..],
    };
    let mut normed = vec![0.0; hidden.len()];
    norm::rms_norm(team, hidden, &weights.norm, config.rms_eps, &mut normed);
    let mut logits = Vec::new();
    weights.head().apply(&normed, &mut logits)?;
    match logits.iter().find(|x| !x.is_finite()) {
        None => Ok(logits),
        Some(&found) => Err(EngineError::NotFiniteLogits { found }),
    }
}

/// Keys and values of every row, and `queries` where they are asked for, normalised and rotated.
fn project(
    config: &ModelConfig,
    team: Team,
    layer: &LayerWeights,
    x: &[f32],
    table: &[f32],
    queries: bool,
    scratch: &mut Scratch,
) -> Result<(), EngineError> {
    scratch.normed.resize(x.len(), 0.0);
    norm::rms_norm(team, x, &layer.attention_norm, config.rms_eps, &mut scratch.normed);
    scratch.q.clear();
    if queries {
        layer.q.apply(&scratch.normed, &mut scratch.q)?;
    }
    layer.k.apply(&scratch.normed, &mut scratch.k)?;
    layer.v.apply(&scratch.normed, &mut scratch.v)?;
    let (q_norm, k_norm) = match &layer.qk_norm {
        Some((q, k)) => (Some(q.as_slice()), Some(k.as_slice())),
        None => (None, None),
    };
    for (rows, heads, weight) in [(&mut scratch.q, config.heads, q_norm), (&mut scratch.k, config.kv_heads, k_norm)] {
        let d = config.head_dim;
        team.rows((rows, heads * d), (table, config.rope.dims), |rows, table| {
            for (row, turns) in rows.chunks_exact_mut(heads * d).zip(table.chunks_exact(config.rope.dims)) {
                for head in row.chunks_exact_mut(d) {
                    if let Some(weight) = weight {
                        norm::rms_norm_head(head, weight, config.rms_eps);
                    }
                    norm::rotate(head, turns);
                }
            }
        });
    }
    Ok(())
}

/// Writes the rows' keys and values into their slots.
fn store(config: &ModelConfig, planes: &mut KvPlanes, layer: usize, slots: &[usize], scratch: &Scratch) {
    let (d, width) = (config.head_dim, config.kv_heads * config.head_dim);
    for (row, &slot) in slots.iter().enumerate() {
        for head in 0..config.kv_heads {
            let offset = planes.offset(head, slot);
            let from = row * width + head * d;
            let kv = planes.layer_mut(layer);
            kv.k.write(offset, &scratch.k[from..from + d]);
            kv.v.write(offset, &scratch.v[from..from + d]);
        }
    }
}

/// The output projection and the feed-forward network, each added to the residual stream `x`.
fn finish_layer(
    config: &ModelConfig,
    team: Team,
    layer: &LayerWeights,
    x: &mut [f32],
    attention: &[f32],
    scratch: &mut Scratch,
) -> Result<(), EngineError> {
    layer.o.apply(attention, &mut scratch.projected)?;
    norm::add(team, x, &scratch.projected);
    scratch.normed.resize(x.len(), 0.0);
    norm::rms_norm(team, x, &layer.ffn_norm, config.rms_eps, &mut scratch.normed);
    layer.gate.apply(&scratch.normed, &mut scratch.gate)?;
    layer.up.apply(&scratch.normed, &mut scratch.up)?;
    norm::swiglu(team, &mut scratch.gate, &scratch.up);
    layer.down.apply(&scratch.gate, &mut scratch.projected)?;
    norm::add(team, x, &scratch.projected);
    Ok(())
}
