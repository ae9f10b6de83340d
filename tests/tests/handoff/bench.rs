//! What the suite shares: pairs whose map is known, a gate with a ledger of its own, and requests to it.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use kvmig::{
    bundled::Member,
    cache::{Elem, KvCache},
    device::{Device, DeviceChoice},
    engine::{LoadOptions, Model, PrefillOptions},
    fit::ridge::{Lambda, LambdaConvention},
    migrate::{facts, precision},
    pair::{Draft, FORMAT, FitRecord, Identity, Manifest, MapperRecord, ModelRecord, Pair, WeightsRecord},
    sandbox::bundled::RIDGE,
};
use kvmig_gate::{Candidate, Digest, DocumentOutcome, Evidence, Gate, Policy, Quality, Request};
use safetensors::{Dtype, tensor::TensorView};
use tempfile::TempDir;

/// A pair of a model with itself. Whole, its map is the identity.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recipe {
    pub(crate) head: usize,
    pub(crate) tail: usize,
    /// What values are multiplied by.
    pub(crate) values: f32,
    /// Whether the weights are narrower than the caches.
    pub(crate) narrow: bool,
    /// What kind of mapper it says it is.
    pub(crate) kind: &'static str,
}

impl Recipe {
    pub(crate) fn identity(head: usize, tail: usize) -> Recipe {
        Recipe { head, tail, values: 1.0, narrow: false, kind: "ridge" }
    }

    pub(crate) fn draft(self, model: &Model) -> Draft {
        let layout = model.layout();
        let rows = layout.width();
        let columns = if self.narrow { rows - 1 } else { rows };
        let bytes = |numbers: &[f32]| numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let eye = |scale: f32| {
            let element = |i: usize| if i / columns == i % columns { scale } else { 0.0 };
            bytes(&(0..rows * columns).map(element).collect::<Vec<f32>>())
        };
        let (keys, values, zero) = (eye(1.0), eye(self.values), bytes(&vec![0.0; columns]));
        let mut tensors = Vec::new();
        for layer in 0..layout.layers {
            for (side, weight) in [("k", &keys), ("v", &values)] {
                let weight = TensorView::new(Dtype::F32, vec![rows, columns], weight).unwrap();
                let bias = TensorView::new(Dtype::F32, vec![columns], &zero).unwrap();
                tensors.push((format!("layers.{layer}.{side}.weight"), weight));
                tensors.push((format!("layers.{layer}.{side}.bias"), bias));
            }
        }
        let weights = safetensors::serialize(tensors, None::<HashMap<String, String>>).unwrap();
        let layers: Vec<Vec<usize>> = (0..layout.layers).map(|layer| vec![layer]).collect();
        let record = ModelRecord::of(model);
        let identity = Identity {
            format: FORMAT,
            head: self.head,
            tail: self.tail,
            native_layers: 0,
            mapper: MapperRecord {
                // A reader of pair folders holds the weights of a `ridge` to the shapes; another kind's, only the sandbox.
                kind: if self.narrow { "other" } else { self.kind }.into(),
                module: Digest::of(RIDGE),
                settings: serde_json::json!({ "layers": layers }).to_string(),
            },
            weights: WeightsRecord { sha256: Digest::of(&weights), elem: Elem::F32 },
            source: record.clone(),
            target: record,
        };
        let fit = FitRecord {
            kvmig: env!("CARGO_PKG_VERSION").into(),
            k: 1,
            rank: None,
            seed: 0,
            context: 0,
            stride: 1,
            sequences: 0,
            rows: 0,
            r2_keys: 1.0,
            r2_values: 1.0,
            jitter: 0.0,
            lambda: Lambda { value: 0.0, convention: LambdaConvention::Sum },
            weighting: None,
            training: None,
            sweep: vec![],
            widths: vec![],
            ends: vec![],
            ablations: vec![],
            corpora: vec![],
        };
        Draft::new(
            Manifest { name: "identity".into(), identity, fit, evidence: None, diagnostics: None },
            RIDGE.to_vec(),
            weights,
        )
        .unwrap()
    }

    /// The pair with evidence, made up, that every policy would take.
    pub(crate) fn admitted(self, model: &Model) -> Pair {
        self.judged(model, 0.7)
    }

    /// The same, had the source been as far from the target as `source`, in nats of KL: closer than the map, and the gate stays
    /// with it.
    pub(crate) fn judged(self, model: &Model, source: f64) -> Pair {
        let folder = tempfile::tempdir().unwrap();
        self.written(model, source, 10.0, &folder.path().join("pair"))
    }

    /// The same in a folder that stays, with handoffs of `handoff_ms`.
    pub(crate) fn written(self, model: &Model, source: f64, handoff_ms: f64, folder: &Path) -> Pair {
        let draft = self.draft(model);
        let quality = |kl: f64| Quality {
            agreement: 1.0 - kl / 2.0,
            kl_nats: kl,
            nll_gap_nats: kl,
            cosine_mean: None,
            cosine_worst_layer: None,
            n: 32,
        };
        let document = |i: usize| DocumentOutcome {
            id: format!("document {i}"),
            domain: "prose".into(),
            tokens: 200,
            mapped: quality(1e-3),
            ends_only: quality(0.5),
            no_prefix: quality(1.3),
            source: quality(source),
            handoff_ms,
            reprefill_ms: 80.0,
        };
        let evidence = Evidence {
            artifact: draft.pair().loaded().artifact(),
            seed: 1,
            backend: "cpu".into(),
            precision: precision(model, model).into(),
            documents: (0..30).map(document).collect(),
        };
        draft.write(folder, Some(evidence), &[]).unwrap()
    }
}

/// A gate, and the device that maps.
pub(crate) struct Scene {
    pub(crate) gate: Gate,
    pub(crate) ledger: PathBuf,
    pub(crate) device: Device,
    _folder: TempDir,
}

impl Scene {
    pub(crate) fn new() -> Scene {
        let folder = tempfile::tempdir().unwrap();
        let ledger = folder.path().join("ledger.sqlite");
        let gate = Gate::open(Policy::default(), &ledger).unwrap();
        Scene { gate, ledger, device: Device::open(&DeviceChoice::Cpu).unwrap(), _folder: folder }
    }
}

pub(crate) fn load(member: Member) -> Model {
    Model::load(&member.source(), LoadOptions::default()).unwrap()
}

/// The beginning of the bundled prompt.
pub(crate) fn prompt(model: &Model, tokens: usize) -> Vec<u32> {
    let mut ids = model.tokenizer().encode(kvmig::bundled::PROMPT).unwrap();
    ids.truncate(tokens);
    ids
}

pub(crate) fn prefill(model: &Model, tokens: &[u32]) -> KvCache {
    model.prefill(tokens, PrefillOptions::default()).unwrap().cache
}

/// What is asked of the gate for `pair`, of `model` with itself, on `cache`.
pub(crate) fn request<'a>(pair: &'a Pair, cache: &KvCache, model: &Model) -> Request<'a> {
    Request {
        pair: pair.name(),
        cache: facts(cache),
        target: model.digest(),
        domain: None,
        backend: "cpu",
        precision: precision(model, model),
        mismatch: None,
        candidates: vec![Candidate {
            mapper: pair.mapper(),
            claim: pair.loaded().claim(),
            evidence: None,
            latency: None,
        }],
    }
}
