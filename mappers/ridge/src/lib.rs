//! The full-head ridge mapper: per target layer, `Ŷ = X W + b` for keys (without their rotation) and for values, where X is
//! all KV heads of the layer's selected source layers, side by side: of the keys for keys and of the values for values, or
//! (`joint`) of both for each; and (`hidden`) the target's own hidden state behind its native layers.
//!
//! Each selected source layer is gathered once per chunk into a plane `[C, n_kv_s * d_s]` of a panel; the products read their
//! blocks from there. With a `rank` the whole panel is projected once, `Z = X P + p`, and each target layer's product reads
//! the few columns of Z: what all layers share is computed once.

mod layers;

use kvmig_mapper::{
    AffineBlock, AffineParams, Buffer, CacheShape, Dtype, GatherParams, Job, Kv, Mapper, Metadata, ModelPair, Refusal,
    View, WeightSpec, WorkPlan, gpu, kernel, parse_settings, weight,
};
use layers::{Features, Settings};

/// Tokens per chunk where the device's bindings are long enough: large enough that the weights are read seldom, small
/// enough that the panels stay in a cache.
const CHUNK_TOKENS: u32 = 256;

struct Ridge;

kvmig_mapper::export!(Ridge);

impl Mapper for Ridge {
    fn describe() -> Metadata {
        Metadata {
            name: env!("CARGO_PKG_NAME").into(),
            version: env!("CARGO_PKG_VERSION").into(),
            kinds: vec!["ridge".into()],
            shaders: vec![],
        }
    }

    fn plan(pair: &ModelPair, settings: &str) -> Result<WorkPlan, Refusal> {
        let features = resolve(pair, settings)?;
        let chunk_tokens = chunk_tokens(pair, &features)?;
        let panels = Panels::new(pair, &features, chunk_tokens);
        let mut weights = Vec::new();
        if features.rank > 0 {
            for part in panels.parts() {
                weights.extend(affine_weights(&projection(part), panels.columns(), features.rank));
            }
        }
        for (l, selected) in features.selected.iter().enumerate() {
            let rows = if features.rank > 0 { features.rank } else { panels.columns_of(selected.len()) };
            for part in ["k", "v"] {
                weights.extend(affine_weights(&layer(pair, l, part), rows, width(&pair.target)));
            }
        }
        let gathers = 2 * features.used.len() + panels.count() * usize::from(features.hidden > 0);
        let projections = panels.count() * usize::from(features.rank > 0);
        Ok(WorkPlan {
            kind: "ridge".into(),
            weights,
            chunk_tokens,
            scratch_bytes: panels.count() as u64 * (panels.bytes() + panels.projected_bytes()),
            max_dispatches: (gathers + projections + 2 * features.selected.len()) as u32,
        })
    }

    fn run(pair: &ModelPair, settings: &str, job: Job) -> Result<(), Refusal> {
        let features = resolve(pair, settings)?;
        let panels = Panels::new(pair, &features, job.tokens);
        let buffers = panels.gather(&job)?;
        let projected = if features.rank > 0 { panels.project(&job, &buffers)? } else { Vec::new() };
        for (l, selected) in features.selected.iter().enumerate() {
            let Kv { k, v } = &job.target[l];
            for (part, value, view, rope_dims) in [("k", false, k, pair.target.rope_dims), ("v", true, v, 0)] {
                let panel = usize::from(value && !features.joint);
                let (panel, blocks) = match projected.get(panel) {
                    Some(projected) => (projected, vec![panels.projected_block()]),
                    None => (&buffers[panel], panels.blocks(selected)),
                };
                let params = AffineParams {
                    tokens: job.tokens,
                    kv_heads: pair.target.kv_heads,
                    head_dim: pair.target.head_dim,
                    rope_dims,
                    head_stride: view.head_stride,
                    row_stride: view.row_stride,
                    blocks,
                };
                affine(&job, &layer(pair, l, part), panel, &params, &view.buffer)?;
            }
        }
        Ok(())
    }
}

fn resolve(pair: &ModelPair, settings: &str) -> Result<Features, Refusal> {
    for (which, shape) in [("source", &pair.source), ("target", &pair.target)] {
        check_shape(which, shape)?;
    }
    if pair.native_layers >= pair.target.layers {
        let (found, layers) = (pair.native_layers, pair.target.layers);
        let why = format!("target: found {found} native layers, expected less than its {layers} layers");
        return Err(Refusal::Unsupported(why));
    }
    parse_settings::<Settings>(settings)?.resolve(pair)
}

fn check_shape(which: &str, shape: &CacheShape) -> Result<(), Refusal> {
    let CacheShape { layers, kv_heads, head_dim, rope_dims, .. } = *shape;
    if layers == 0 || kv_heads == 0 || head_dim == 0 {
        let why =
            format!("{which}: found {layers} layers of {kv_heads} KV heads of width {head_dim}, expected no zero");
        return Err(Refusal::Unsupported(why));
    }
    if rope_dims == 0 || rope_dims > head_dim || rope_dims % 2 != 0 {
        let why =
            format!("{which}: found rope-dims {rope_dims}, expected an even number from 2 to head-dim ({head_dim})");
        return Err(Refusal::Unsupported(why));
    }
    Ok(())
}

/// The longest chunk, halved from [`CHUNK_TOKENS`], whose panels fit into one binding each.
fn chunk_tokens(pair: &ModelPair, features: &Features) -> Result<u32, Refusal> {
    let most = gpu::limits().max_binding_bytes;
    let bytes = |tokens| {
        let panels = Panels::new(pair, features, tokens);
        panels.bytes().max(panels.projected_bytes())
    };
    let mut tokens = CHUNK_TOKENS;
    while bytes(tokens) > most {
        tokens /= 2;
        if tokens == 0 {
            let why = format!(
                "one token's panel takes {} bytes, a binding of this device at most {most}: select fewer layers",
                bytes(1)
            );
            return Err(Refusal::Limit(why));
        }
    }
    Ok(tokens)
}

fn width(shape: &CacheShape) -> u32 {
    shape.kv_heads * shape.head_dim
}

/// What a target layer's weights are called; layers are counted as the target counts them.
fn layer(pair: &ModelPair, mapped: usize, part: &str) -> String {
    format!("layers.{}.{part}", pair.native_layers as usize + mapped)
}

fn projection(part: &str) -> String {
    format!("projection.{part}")
}

/// Weights and biases of a product: `[rows, columns]` and `[columns]`.
fn affine_weights(name: &str, rows: u32, columns: u32) -> [WeightSpec; 2] {
    let bias = weight(format!("{name}.bias"), &[columns]);
    [weight(format!("{name}.weight"), &[rows, columns]), WeightSpec { elem: Some(Dtype::Float32), ..bias }]
}

/// How a chunk's features lie: one panel of keys and one of values, or one of both. A panel holds a plane for each used source
/// layer, keys before values, and the hidden state behind them; each plane begins where a binding may.
struct Panels<'a> {
    pair: &'a ModelPair,
    features: &'a Features,
    tokens: u32,
    plane: u64,
    align: u64,
}

impl<'a> Panels<'a> {
    fn new(pair: &'a ModelPair, features: &'a Features, tokens: u32) -> Panels<'a> {
        let align = u64::from(gpu::limits().offset_align);
        let plane = (u64::from(tokens) * u64::from(width(&pair.source)) * 4).next_multiple_of(align);
        Panels { pair, features, tokens, plane, align }
    }

    fn count(&self) -> usize {
        self.parts().len()
    }

    /// What the panels hold.
    fn parts(&self) -> &'static [&'static str] {
        if self.features.joint { &["kv"] } else { &["k", "v"] }
    }

    /// Planes of keys, or of values, of one panel times 1 or 2.
    fn sides(&self) -> u32 {
        if self.features.joint { 2 } else { 1 }
    }

    /// Features that a target layer with so many source layers reads.
    fn columns_of(&self, selected: usize) -> u32 {
        self.sides() * selected as u32 * width(&self.pair.source) + self.features.hidden
    }

    /// Features of a whole panel.
    fn columns(&self) -> u32 {
        self.columns_of(self.features.used.len())
    }

    /// First byte of the hidden state.
    fn hidden_offset(&self) -> u64 {
        u64::from(self.sides()) * self.features.used.len() as u64 * self.plane
    }

    /// Bytes of one panel.
    fn bytes(&self) -> u64 {
        let hidden = u64::from(self.tokens) * u64::from(self.features.hidden) * 4;
        self.hidden_offset() + hidden.next_multiple_of(self.align)
    }

    /// Bytes of one panel's projection, `[tokens, rank]`.
    fn projected_bytes(&self) -> u64 {
        u64::from(self.tokens) * u64::from(self.features.rank) * 4
    }

    /// The blocks of a panel that a target layer reads, in the order of its weights' rows.
    fn blocks(&self, selected: &[u32]) -> Vec<AffineBlock> {
        let row = width(&self.pair.source);
        // A panel fits a binding, so that its elements can be counted in 32 bits.
        let plane = |index: u32| AffineBlock { offset: index * (self.plane / 4) as u32, row_stride: row, width: row };
        let used = self.features.used.len() as u32;
        let side = |side: u32| selected.iter().map(move |&layer| plane(side * used + self.features.plane(layer)));
        let mut blocks: Vec<AffineBlock> = (0..self.sides()).flat_map(side).collect();
        let hidden = self.features.hidden;
        if hidden > 0 {
            let offset = (self.hidden_offset() / 4) as u32;
            blocks.push(AffineBlock { offset, row_stride: hidden, width: hidden });
        }
        blocks
    }

    /// All of a projected panel.
    fn projected_block(&self) -> AffineBlock {
        let rank = self.features.rank;
        AffineBlock { offset: 0, row_stride: rank, width: rank }
    }

    /// Copies source layers, keys without their rotation, and the hidden state into the panels.
    fn gather(&self, job: &Job) -> Result<Vec<Buffer>, Refusal> {
        let mut panels = Vec::with_capacity(self.count());
        for _ in self.parts() {
            panels.push(gpu::scratch(self.bytes())?);
        }
        let used = self.features.used.len();
        for (plane, &layer) in self.features.used.iter().enumerate() {
            let Kv { k, v } = &job.source[layer as usize];
            let (panel, place) = if self.features.joint { (&panels[0], used + plane) } else { (&panels[1], plane) };
            self.gather_layer(job, k, self.pair.source.rope_dims, &panels[0], plane)?;
            self.gather_layer(job, v, 0, panel, place)?;
        }
        if let Some(hidden) = job.hidden.as_ref().filter(|_| self.features.hidden > 0) {
            let row = self.features.hidden;
            let params = GatherParams {
                tokens: self.tokens,
                kv_heads: 1,
                head_dim: row,
                rope_dims: 0,
                head_stride: 0,
                row_stride: row,
                panel_row_stride: row,
            };
            for panel in &panels {
                self.gather_into(job, hidden, params, panel, self.hidden_offset())?;
            }
        }
        Ok(panels)
    }

    fn gather_layer(
        &self,
        job: &Job,
        view: &View,
        rope_dims: u32,
        panel: &Buffer,
        plane: usize,
    ) -> Result<(), Refusal> {
        let CacheShape { kv_heads, head_dim, .. } = self.pair.source;
        let params = GatherParams {
            tokens: self.tokens,
            kv_heads,
            head_dim,
            rope_dims,
            head_stride: view.head_stride,
            row_stride: view.row_stride,
            panel_row_stride: width(&self.pair.source),
        };
        self.gather_into(job, &view.buffer, params, panel, plane as u64 * self.plane)
    }

    fn gather_into(
        &self,
        job: &Job,
        source: &Buffer,
        params: GatherParams,
        panel: &Buffer,
        offset: u64,
    ) -> Result<(), Refusal> {
        let bindings = [
            kvmig_mapper::whole(0, source),
            kvmig_mapper::whole(1, &job.source_rope),
            kvmig_mapper::range(2, panel, offset, u64::from(self.tokens) * u64::from(params.panel_row_stride) * 4),
        ];
        Ok(gpu::kernel("gather@1", &params.to_bytes(), &bindings)?)
    }

    /// Projects every panel.
    fn project(&self, job: &Job, panels: &[Buffer]) -> Result<Vec<Buffer>, Refusal> {
        let rank = self.features.rank;
        let mut projected = Vec::with_capacity(panels.len());
        for (part, panel) in self.parts().iter().zip(panels) {
            let params = AffineParams {
                tokens: self.tokens,
                kv_heads: 1,
                head_dim: rank,
                rope_dims: 0,
                head_stride: 0,
                row_stride: rank,
                blocks: self.blocks(&self.features.used),
            };
            let into = gpu::scratch(self.projected_bytes())?;
            affine(job, &projection(part), panel, &params, &into)?;
            projected.push(into);
        }
        Ok(projected)
    }
}

/// A product with the weights of that name.
fn affine(job: &Job, weights: &str, panel: &Buffer, params: &AffineParams, into: &Buffer) -> Result<(), Refusal> {
    let weight = gpu::weights(&format!("{weights}.weight"))?;
    let bias = gpu::weights(&format!("{weights}.bias"))?;
    Ok(kernel("affine@1", &params.to_bytes(), [panel, &weight, &bias, &job.target_rope, into])?)
}
