//! The head-matched and the MLP module's forward passes against NumPy (`golden/mappers/make.py`): settings and weights in,
//! through the module, its recording and the device, the target's keys and values out.

use std::{fs, path::Path, sync::Arc};

use kvmig::{
    cache::{CacheLayout, Elem, KvPlanes, Pairing, Rope, RopeScaling},
    device::{self, Device, Pacing},
    sandbox::{
        self, DeviceLimits, PairShape, RecordRequest, Recording, Sandbox, SandboxLimits, bundled, weight_shapes,
    },
};
use kvmig_gate::{Digest, Loaded, Loader, PairIdentity, WeightElem};
use libtest_mimic::Failed;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

/// Largest error of an element, as a share of the largest element of its plane.
const TOLERANCE: f64 = 1e-5;

/// Tokens of a chunk: the answers' 45 come to one and a remainder.
const CHUNK: usize = 32;

/// Slots before and behind those that are mapped.
const AROUND: usize = 2;

/// The stored answers.
struct Answers {
    bytes: Vec<u8>,
    source: CacheLayout,
    target: CacheLayout,
    layers: Vec<Vec<usize>>,
    first: u32,
    width: usize,
}

/// A model's cache as the script describes it.
#[derive(Deserialize)]
struct Shape {
    layers: usize,
    heads: usize,
    dim: usize,
    rope: usize,
    theta: f64,
}

impl Shape {
    fn layout(self) -> CacheLayout {
        let rope = Rope { theta: self.theta, dims: self.rope, pairing: Pairing::HalfSplit, scaling: RopeScaling::None };
        CacheLayout { layers: self.layers, kv_heads: self.heads, head_dim: self.dim, rope, elem: Elem::F32 }
    }
}

impl Answers {
    fn read() -> Result<Answers, Failed> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/mappers/answers.safetensors");
        let bytes = fs::read(path)?;
        let (_, header) = SafeTensors::read_metadata(&bytes)?;
        let about = header.metadata().as_ref().ok_or("no metadata")?;
        Ok(Answers {
            source: serde_json::from_str::<Shape>(&about["source"])?.layout(),
            target: serde_json::from_str::<Shape>(&about["target"])?.layout(),
            layers: serde_json::from_str(&about["layers"])?,
            first: about["first"].parse()?,
            width: about["width"].parse()?,
            bytes,
        })
    }

    fn f32s(&self, name: &str) -> Result<Vec<f32>, Failed> {
        let file = SafeTensors::deserialize(&self.bytes)?;
        let view = file.tensor(name)?;
        assert_eq!(view.dtype(), Dtype::F32, "{name}");
        Ok(view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect())
    }

    fn f64s(&self, name: &str) -> Result<Vec<f64>, Failed> {
        let file = SafeTensors::deserialize(&self.bytes)?;
        let view = file.tensor(name)?;
        assert_eq!(view.dtype(), Dtype::F64, "{name}");
        Ok(view.data().chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().expect("eight bytes"))).collect())
    }

    /// The weights of a kind of mapper, as an artifact of no pair.
    fn weights(&self, kind: &str, module: &[u8]) -> Result<Arc<Loaded>, Failed> {
        let nobody = Digest::of(b"known answers");
        let pair = PairIdentity { source: nobody, target: nobody, head: 0, tail: 0, details: &[] };
        let mut loader = Loader::new(module.to_vec(), &pair);
        for (name, view) in SafeTensors::deserialize(&self.bytes)?.tensors() {
            if let Some(name) = name.strip_prefix(kind).and_then(|rest| rest.strip_prefix(".layers")) {
                loader.weight(&format!("layers{name}"), WeightElem::F32, view.shape(), view.data());
            }
        }
        Ok(Arc::new(loader.finish()))
    }

    /// Tokens that are mapped.
    fn tokens(&self) -> Result<usize, Failed> {
        let layout = &self.source;
        Ok(self.f32s("source.k")?.len() / (layout.layers * layout.kv_heads * layout.head_dim))
    }

    /// The source's cache, its first slots empty.
    fn cache(&self) -> Result<KvPlanes, Failed> {
        let (layout, tokens) = (&self.source, self.tokens()?);
        let mut planes = KvPlanes::zeros(layout.clone(), tokens + 2 * AROUND);
        let rows = tokens * layout.head_dim;
        for (side, value) in [("source.k", false), ("source.v", true)] {
            for (i, head) in self.f32s(side)?.chunks_exact(rows).enumerate() {
                let at = planes.offset(i % layout.kv_heads, AROUND);
                let layer = planes.layer_mut(i / layout.kv_heads);
                let plane = if value { &mut layer.v } else { &mut layer.k };
                plane.write(at, head);
            }
        }
        Ok(planes)
    }
}

pub(super) fn head_matched(device: &Device) -> Result<(), Failed> {
    let answers = Answers::read()?;
    let settings = serde_json::json!({ "layers": answers.layers });
    maps(device, &answers, "head-matched", bundled::HEAD_MATCHED, &settings.to_string())
}

pub(super) fn mlp(device: &Device) -> Result<(), Failed> {
    let answers = Answers::read()?;
    let settings = serde_json::json!({ "layers": answers.layers, "width": answers.width });
    maps(device, &answers, "mlp", bundled::MLP, &settings.to_string())
}

fn maps(device: &Device, answers: &Answers, kind: &str, module: &[u8], settings: &str) -> Result<(), Failed> {
    let (source, tokens) = (answers.cache()?, answers.tokens()?);
    let mut target = KvPlanes::zeros(answers.target.clone(), tokens + 2 * AROUND);
    let loaded = answers.weights(kind, module)?;
    let resident = device.load_weights(&loaded)?;

    let module = Sandbox::new(SandboxLimits::default(), None)?.load(module)?;
    let pair = PairShape::new(&answers.source, &answers.target)?;
    let device::Limits { max_binding_bytes, offset_align, max_bindings, half, own_shaders } = device.limits();
    let limits = DeviceLimits { max_binding_bytes, offset_align, max_bindings, half, own_shaders };
    let plan = module.plan(&pair, settings, &limits)?;
    let weights = weight_shapes(&loaded);
    let record = |tokens: usize| -> Result<Recording, Failed> {
        let strides = |planes: &KvPlanes| -> Result<sandbox::ViewStrides, Failed> {
            let view = device.view_strides(planes, tokens as u32)?;
            Ok(sandbox::ViewStrides { head: view.head, row: view.row })
        };
        Ok(module.record_anew(&RecordRequest {
            pair: &pair,
            settings,
            plan: &plan,
            weights: &weights,
            tokens: tokens as u32,
            source: strides(&source)?,
            target: strides(&target)?,
            device: &limits,
        })?)
    };
    let (full, rest) = (record(CHUNK)?, record(tokens % CHUNK)?);
    let positions: Vec<u32> = (answers.first..).take(tokens).collect();
    device.execute(device::Job {
        full: &full,
        rest: Some(&rest),
        weights: &resident,
        source: &source,
        target: &mut target,
        lower: None,
        slots: AROUND..AROUND + tokens,
        positions: &positions,
        pacing: Pacing::default(),
    })?;

    let rows = tokens * answers.target.head_dim;
    for layer in 0..answers.target.layers {
        for (side, plane) in [("k", &target.layer(layer).k), ("v", &target.layer(layer).v)] {
            let name = format!("{kind}.target.{layer}.{side}");
            let expected = answers.f64s(&name)?;
            let mut found = vec![0.0; expected.len()];
            for (head, found) in found.chunks_exact_mut(rows).enumerate() {
                plane.read(target.offset(head, AROUND), found);
            }
            let largest = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            let error = |(&found, expected): (&f32, &f64)| {
                let error = (f64::from(found) - expected).abs();
                if error.is_nan() { f64::INFINITY } else { error }
            };
            let worst = found.iter().zip(&expected).map(error).fold(0.0, f64::max);
            if worst > TOLERANCE * largest {
                return Err(format!("{name}: off by {worst:e} of {largest:e}").into());
            }
        }
    }
    Ok(())
}
