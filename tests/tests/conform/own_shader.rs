//! A module with a shader of its own, from a pair folder to the target's answer.

use std::collections::HashMap;

use kvmig::{
    bundled::{self, Member},
    cache::Elem,
    device::Device,
    engine::{LoadOptions, Model, Sampling},
    fit::ridge::Lambda,
    migrate::{self, Ask, Offer, Setup, Store},
    pair::{Draft, FORMAT, FitRecord, Identity, Manifest, MapperRecord, ModelRecord, Pair, WeightsRecord},
};
use kvmig_gate::{Digest, DocumentOutcome, Evidence, Gate, Policy, Quality};
use libtest_mimic::Failed;
use safetensors::{Dtype, tensor::TensorView};

/// A guest with a mode that fills every target view with ones, by a shader that its description carries.
const MODULE: &[u8] = include_bytes!("../../../mappers/built/hostile.wasm");
/// That mode: its kind and its settings.
const MODE: &str = "own-shader";
const HEAD: usize = 4;
const TAIL: usize = 8;
const TOKENS: usize = 90;

/// On a GPU the pair migrates; on the CPU, which runs no WGSL, the ordinary prefill answers and says why.
pub(super) fn a_pair_folder_carries_a_shader(device: &Device) -> Result<(), Failed> {
    let load = |member: Member| Model::load(&member.source(), LoadOptions::default());
    let (source, target) = (load(Member::Medium)?, load(Member::Large)?);
    let folder = tempfile::tempdir()?;
    let written = folder.path().join("pair");
    let draft = draft(&source, &target)?;
    let evidence = evidence(draft.pair().loaded().artifact(), device, migrate::precision(&source, &target));
    draft.write(&written, Some(evidence), &[])?;

    let pair = Pair::open(&written)?;
    assert_eq!(pair.loaded().shaders().len(), 1, "its shader is part of the artifact");
    let gate = Gate::open(Policy::default(), &folder.path().join("ledger.sqlite"))?;
    let (store, offers) = (Store::new(device, None), [Offer::of(&pair, device)?]);
    let setup = Setup {
        gate: &gate,
        source: &source,
        target: &target,
        pair: pair.name(),
        offers: &offers,
        store: &store,
        load_ms: 0.0,
    };
    let mut tokens = source.tokenizer().encode(bundled::PROMPT)?;
    tokens.truncate(TOKENS);
    let ask = Ask { tokens: &tokens, domain: None, generate: 3, sampling: Sampling::Greedy, audit: false };
    let record = migrate::run(&setup, ask, &mut |_| true)?.record;
    let expected = match device {
        Device::Gpu(_) => ("migrate", "bound_meets_floor", TOKENS - HEAD - TAIL),
        Device::Cpu(_) => ("reprefill", "module_failed", 0),
    };
    let found = (record.decision, record.reason.as_str(), record.tokens.mapped);
    assert_eq!(found, expected, "{}", record.reason_text);
    Ok(())
}

fn draft(source: &Model, target: &Model) -> Result<Draft, Failed> {
    let width = source.layout().width();
    let (matrix, bias) = (vec![0; 4 * width * width], vec![0; 4 * width]);
    let tensors = [
        ("w", TensorView::new(Dtype::F32, vec![width, width], &matrix)?),
        ("b", TensorView::new(Dtype::F32, vec![width], &bias)?),
    ];
    let weights = safetensors::serialize(tensors, None::<HashMap<String, String>>)?;
    let identity = Identity {
        format: FORMAT,
        head: HEAD,
        tail: TAIL,
        native_layers: 0,
        mapper: MapperRecord { kind: MODE.into(), module: Digest::of(MODULE), settings: MODE.into() },
        weights: WeightsRecord { sha256: Digest::of(&weights), elem: Elem::F32 },
        source: ModelRecord::of(source),
        target: ModelRecord::of(target),
    };
    let fit = FitRecord {
        kvmig: env!("CARGO_PKG_VERSION").into(),
        k: 1,
        rank: None,
        seed: 0,
        context: TOKENS,
        stride: 1,
        sequences: 0,
        rows: 0,
        r2_keys: 0.0,
        r2_values: 0.0,
        jitter: 0.0,
        lambda: Lambda::default(),
        weighting: None,
        training: None,
        sweep: vec![],
        widths: vec![],
        ends: vec![],
        ablations: vec![],
        corpora: vec![],
    };
    let manifest = Manifest { name: "ones".into(), identity, fit, evidence: None, diagnostics: None };
    Ok(Draft::new(manifest, MODULE.to_vec(), weights)?)
}

/// Evidence that was never measured, so that the gate lets the module run.
fn evidence(artifact: Digest, device: &Device, precision: &str) -> Evidence {
    let quality = |kl_nats| Quality {
        agreement: 0.9,
        kl_nats,
        nll_gap_nats: kl_nats,
        cosine_mean: None,
        cosine_worst_layer: None,
        n: 32,
    };
    let document = |i| DocumentOutcome {
        id: format!("prose-{i}"),
        domain: "prose".into(),
        tokens: TOKENS,
        mapped: quality(0.01),
        ends_only: quality(0.5),
        no_prefix: quality(0.9),
        source: quality(0.4),
        handoff_ms: 1.0,
        reprefill_ms: 9.0,
    };
    Evidence {
        artifact,
        seed: 0,
        backend: device.info().backend,
        precision: precision.to_owned(),
        documents: (0..30).map(document).collect(),
    }
}
