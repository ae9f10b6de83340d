//! The shapes at which kernels and replays go wrong.

use crate::cache::{CacheLayout, Elem, Pairing, Rope, RopeScaling};

/// One side of a case: `[layers, heads, T, d]`, the first `rope_dims` of d rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Side {
    /// Layers.
    pub layers: usize,
    /// KV heads.
    pub heads: usize,
    /// Width of a head.
    pub d: usize,
    /// Rotated dimensions.
    pub rope_dims: usize,
}

impl Side {
    /// A side.
    pub const fn new(layers: usize, heads: usize, d: usize, rope_dims: usize) -> Side {
        Side { layers, heads, d, rope_dims }
    }

    pub(super) fn width(self) -> usize {
        self.heads * self.d
    }

    pub(super) fn layout(self, theta: f64, elem: Elem) -> CacheLayout {
        let rope = Rope { theta, dims: self.rope_dims, pairing: Pairing::HalfSplit, scaling: RopeScaling::None };
        CacheLayout { layers: self.layers, kv_heads: self.heads, head_dim: self.d, rope, elem }
    }
}

/// What the weights are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Weights {
    /// Random, of the size a fit gives.
    Random,
    /// The identity without bias: what was gathered comes out.
    Identity,
}

/// Whose recordings a case has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// Of a ridge mapper: all heads of a target plane by one `affine@1`.
    Ridge,
    /// Of a head-matched mapper: every head from one head of the source, by one `heads@1`.
    HeadMatched,
    /// Of an MLP mapper: every head by a network of its own that reads the whole panel, by three `heads@1`.
    Mlp {
        /// Neurons of a hidden layer.
        width: usize,
    },
}

/// A case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// Its name.
    pub name: &'static str,
    pub(super) source: Side,
    pub(super) target: Side,
    pub(super) k: usize,
    pub(super) weights: Weights,
    pub(super) form: Form,
    /// First slot that is mapped.
    pub(super) first: usize,
    pub(super) tokens: usize,
    pub(super) chunk: usize,
    pub(super) cache: Elem,
    pub(super) panel: Panel,
}

/// How a module lays out the panel that it gathers source layers into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Panel {
    /// One layer after the other, each `[T, heads * d]`.
    ByLayer,
    /// One token after the other, each `[layers, heads * d]`: gathers of different layers write between each other's rows.
    ByToken,
}

impl Case {
    /// A ridge mapping with `k` of the source's layers for each target layer, of f32 caches, `chunk` tokens at a time.
    pub const fn ridge(name: &'static str, source: Side, target: Side, k: usize, tokens: usize, chunk: usize) -> Case {
        let (weights, cache) = (Weights::Random, Elem::F32);
        let form = Form::Ridge;
        Case { name, source, target, k, weights, form, first: 0, tokens, chunk, cache, panel: Panel::ByLayer }
    }

    /// The same by a head-matched mapper.
    pub const fn head_matched(self) -> Case {
        Case { form: Form::HeadMatched, ..self }
    }

    /// The same by an MLP mapper with `width` neurons in a hidden layer.
    pub const fn mlp(self, width: usize) -> Case {
        Case { form: Form::Mlp { width }, ..self }
    }
}

const SMALL: Side = Side::new(4, 2, 64, 64);
const PLAIN: Case = Case::ridge("affine_k3", SMALL, Side::new(2, 2, 32, 32), 3, 33, 33);

const MATCHED: Case = Case { name: "heads_k3", form: Form::HeadMatched, target: Side::new(2, 4, 32, 32), ..PLAIN };

/// Every case: the shapes at which kernels go wrong (nothing a multiple of a tile, single tokens, partial rotation, heads
/// of different width, unequal numbers of heads), chunks with a remainder, slots that do not begin at 0, f16 caches.
pub const CASES: &[Case] = &[
    Case { name: "gather_whole", target: Side::new(4, 2, 64, 0), k: 1, weights: Weights::Identity, ..PLAIN },
    Case {
        name: "gather_partial",
        source: Side::new(3, 2, 80, 40),
        target: Side::new(3, 2, 80, 0),
        k: 1,
        weights: Weights::Identity,
        tokens: 7,
        chunk: 7,
        ..PLAIN
    },
    Case { name: "affine_k1", k: 1, ..PLAIN },
    PLAIN,
    Case { name: "affine_k8", source: Side::new(9, 2, 64, 64), target: Side::new(1, 2, 128, 128), k: 8, ..PLAIN },
    Case { name: "tokens_1", tokens: 1, chunk: 1, ..PLAIN },
    Case { name: "tokens_7", tokens: 7, chunk: 7, ..PLAIN },
    Case { name: "tokens_257", tokens: 257, chunk: 257, source: Side::new(3, 1, 32, 32), k: 2, ..PLAIN },
    Case { name: "width_32", source: Side::new(3, 3, 32, 32), target: Side::new(2, 1, 32, 32), ..PLAIN },
    Case { name: "width_128", source: Side::new(2, 1, 128, 128), target: Side::new(1, 2, 128, 128), k: 2, ..PLAIN },
    Case { name: "width_80_rope_40", source: Side::new(4, 2, 80, 40), target: Side::new(2, 2, 80, 40), ..PLAIN },
    Case { name: "width_odd", source: Side::new(3, 3, 10, 6), target: Side::new(2, 3, 21, 14), ..PLAIN },
    Case { name: "chunks_and_remainder", tokens: 150, chunk: 40, source: Side::new(3, 1, 32, 32), k: 2, ..PLAIN },
    Case::ridge("tokens_2500", Side::new(3, 1, 16, 16), Side::new(1, 2, 16, 16), 2, 2500, 1000),
    Case { name: "panel_by_token", panel: Panel::ByToken, ..PLAIN },
    Case { name: "slots_from_5", first: 5, chunk: 20, ..PLAIN },
    Case { name: "cache_f16", cache: Elem::F16, chunk: 20, ..PLAIN },
    MATCHED,
    Case { name: "heads_of_a_real_layer", target: Side::new(1, 2, 128, 128), tokens: 257, chunk: 257, ..MATCHED },
    Case { name: "heads_fewer", source: Side::new(3, 8, 16, 16), target: Side::new(2, 3, 32, 32), ..MATCHED },
    Case { name: "heads_more", source: Side::new(3, 2, 32, 32), target: Side::new(2, 5, 16, 16), ..MATCHED },
    Case { name: "heads_odd", source: Side::new(3, 3, 10, 6), target: Side::new(2, 4, 21, 14), chunk: 20, ..MATCHED },
    Case { name: "heads_of_one_pair", source: Side::new(3, 2, 6, 4), target: Side::new(2, 9, 2, 2), ..MATCHED },
    Case { name: "heads_tokens_1", tokens: 1, chunk: 1, ..MATCHED },
    Case { name: "heads_panel_by_token", panel: Panel::ByToken, first: 5, chunk: 20, ..MATCHED },
    Case { name: "mlp", form: Form::Mlp { width: 48 }, ..MATCHED },
    Case { name: "mlp_chunks", form: Form::Mlp { width: 20 }, tokens: 150, chunk: 40, ..MATCHED },
    Case {
        name: "mlp_odd",
        form: Form::Mlp { width: 9 },
        source: Side::new(3, 3, 5, 4),
        target: Side::new(2, 1, 7, 6),
        tokens: 7,
        chunk: 7,
        ..MATCHED
    },
    Case { name: "mlp_one_token", form: Form::Mlp { width: 130 }, tokens: 1, chunk: 1, ..MATCHED },
    Case { name: "mlp_cache_f16", form: Form::Mlp { width: 32 }, cache: Elem::F16, chunk: 20, ..MATCHED },
];

/// The cases that an adapter has to pass before it is used: together they run every kernel.
pub(in super::super) const SELF_TESTS: [Case; 2] = [
    Case { first: 3, ..Case::ridge("a full-head map", Side::new(4, 3, 40, 20), Side::new(2, 2, 80, 40), 3, 45, 33) },
    Case {
        first: 3,
        form: Form::Mlp { width: 36 },
        ..Case::ridge("networks by head", Side::new(2, 3, 40, 20), Side::new(1, 2, 80, 40), 2, 45, 33)
    },
];
