//! What the tests of this suite share: one sandbox, its two modules, pairs of shapes.

use std::{collections::BTreeMap, sync::LazyLock};

use kvmig::{
    cache::{CacheLayout, Elem, Pairing, Rope, RopeScaling},
    sandbox::{
        DeviceLimits, Module, PairShape, RecordRequest, Recording, Sandbox, SandboxError, SandboxLimits, ViewStrides,
        WeightShape, WorkPlan, bundled,
    },
};
use kvmig_gate::WeightElem;

/// The guest that misbehaves as its settings say.
pub(crate) const HOSTILE: &[u8] = include_bytes!("../../../mappers/built/hostile.wasm");

/// One engine for the suite: nothing that a guest does may reach the next.
pub(crate) static SANDBOX: LazyLock<Sandbox> =
    LazyLock::new(|| Sandbox::new(SandboxLimits::default(), None).expect("the engine starts"));

pub(crate) static RIDGE: LazyLock<Module> = LazyLock::new(|| SANDBOX.load(bundled::RIDGE).expect("ridge loads"));

pub(crate) static HEAD_MATCHED: LazyLock<Module> =
    LazyLock::new(|| SANDBOX.load(bundled::HEAD_MATCHED).expect("head-matched loads"));

pub(crate) static MLP: LazyLock<Module> = LazyLock::new(|| SANDBOX.load(bundled::MLP).expect("mlp loads"));

/// A layout with a rotation of all dimensions.
pub(crate) fn layout(layers: usize, kv_heads: usize, head_dim: usize) -> CacheLayout {
    let rope = Rope { theta: 1e4, dims: head_dim, pairing: Pairing::HalfSplit, scaling: RopeScaling::None };
    CacheLayout { layers, kv_heads, head_dim, rope, elem: Elem::F32 }
}

/// Adds a matrix of halves and a bias.
fn insert(weights: &mut BTreeMap<String, WeightShape>, name: String, shape: Vec<usize>, columns: usize) {
    weights.insert(format!("{name}.weight"), WeightShape { elem: WeightElem::F16, shape });
    weights.insert(format!("{name}.bias"), WeightShape { elem: WeightElem::F32, shape: vec![columns] });
}

/// A pair, the settings and weights of its mapper, and views of `capacity` tokens.
pub(crate) struct Case {
    pub(crate) pair: PairShape,
    pub(crate) settings: String,
    pub(crate) weights: BTreeMap<String, WeightShape>,
    pub(crate) source: ViewStrides,
    pub(crate) target: ViewStrides,
    pub(crate) device: DeviceLimits,
}

impl Case {
    /// A case for the ridge module: each target layer reads `selected(layer)`.
    pub(crate) fn ridge(source: &CacheLayout, target: &CacheLayout, selected: impl Fn(usize) -> Vec<usize>) -> Case {
        Case::linear(source, target, selected, |blocks| vec![blocks * source.width(), target.width()])
    }

    /// A case for the head-matched module.
    pub(crate) fn head_matched(
        source: &CacheLayout,
        target: &CacheLayout,
        selected: impl Fn(usize) -> Vec<usize>,
    ) -> Case {
        let shape = |blocks| vec![target.kv_heads, blocks * source.head_dim, target.head_dim];
        Case::linear(source, target, selected, shape)
    }

    /// A case for a module with one matrix for each target layer's keys and one for its values.
    fn linear(
        source: &CacheLayout,
        target: &CacheLayout,
        selected: impl Fn(usize) -> Vec<usize>,
        shape: impl Fn(usize) -> Vec<usize>,
    ) -> Case {
        let layers: Vec<Vec<usize>> = (0..target.layers).map(selected).collect();
        let mut weights = BTreeMap::new();
        for (l, selected) in layers.iter().enumerate() {
            for part in ["k", "v"] {
                insert(&mut weights, format!("layers.{l}.{part}"), shape(selected.len()), target.width());
            }
        }
        Case::new(source, target, serde_json::json!({ "layers": layers }).to_string(), weights)
    }

    /// A case for the MLP module, whose tensors hold up to `group` heads.
    pub(crate) fn mlp(
        source: &CacheLayout,
        target: &CacheLayout,
        selected: impl Fn(usize) -> Vec<usize>,
        width: usize,
        group: usize,
    ) -> Case {
        let layers: Vec<Vec<usize>> = (0..target.layers).map(selected).collect();
        let mut weights = BTreeMap::new();
        for (l, selected) in layers.iter().enumerate() {
            for part in ["k", "v"] {
                for (g, first) in (0..target.kv_heads).step_by(group).enumerate() {
                    let heads = group.min(target.kv_heads - first);
                    let [inputs, outputs] = [selected.len() * source.width(), target.head_dim];
                    for (name, rows, columns) in [("in", inputs, width), ("mid", width, width), ("out", width, outputs)]
                    {
                        let name = format!("layers.{l}.{part}.{g}.{name}");
                        insert(&mut weights, name, vec![heads, rows, columns], heads * columns);
                    }
                }
            }
        }
        let settings = serde_json::json!({ "layers": layers, "width": width }).to_string();
        Case::new(source, target, settings, weights)
    }

    /// Qwen2.5-Coder 0.5B to 1.5B with k = 8.
    pub(crate) fn qwen() -> Case {
        Case::ridge(&layout(24, 2, 64), &layout(28, 2, 128), |l| (0..8).map(|j| (l + 3 * j) % 24).collect())
    }

    pub(crate) fn new(
        source: &CacheLayout,
        target: &CacheLayout,
        settings: String,
        weights: BTreeMap<String, WeightShape>,
    ) -> Case {
        let pair = PairShape::new(source, target).expect("plausible layouts");
        let capacity = 2048;
        let source = ViewStrides::dense(pair.source(), capacity);
        let target = ViewStrides::dense(pair.target(), capacity);
        Case { pair, settings, weights, source, target, device: DeviceLimits::FLOOR }
    }

    pub(crate) fn plan(&self, module: &Module) -> Result<WorkPlan, SandboxError> {
        module.plan(&self.pair, &self.settings, &self.device)
    }

    pub(crate) fn request<'a>(&'a self, plan: &'a WorkPlan, tokens: u32) -> RecordRequest<'a> {
        RecordRequest {
            pair: &self.pair,
            settings: &self.settings,
            plan,
            weights: &self.weights,
            tokens,
            source: self.source,
            target: self.target,
            device: &self.device,
        }
    }

    /// Plans, and records a chunk of `tokens` tokens anew.
    pub(crate) fn record(&self, module: &Module, tokens: u32) -> Result<Recording, SandboxError> {
        let plan = self.plan(module)?;
        module.record_anew(&self.request(&plan, tokens))
    }
}
