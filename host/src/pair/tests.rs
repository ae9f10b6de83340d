//! A small pair, whole and then wrong in every way a folder can be.

use std::fs;

use kvmig_gate::{DocumentOutcome, Loader, PairIdentity, Quality};
use safetensors::{Dtype, tensor::TensorView};

use super::*;
use crate::{
    cache::{CacheLayout, Elem, Pairing, Rope, RopeScaling},
    fit::{
        moments::{MomentShape, Moments, Rows},
        ridge::{self, Lambda, LayerMap},
    },
    measure::random::Random,
    sandbox::bundled::{HEAD_MATCHED, MLP, RIDGE},
};

fn record(name: &str, layers: usize, kv_heads: usize, head_dim: usize) -> ModelRecord {
    let rope = Rope { theta: 1e4, dims: head_dim, pairing: Pairing::HalfSplit, scaling: RopeScaling::None };
    ModelRecord {
        name: name.to_owned(),
        digest: Digest::of(name.as_bytes()),
        tokenizer: Digest::of(b"tokenizer"),
        hidden: 2 * head_dim,
        layout: CacheLayout { layers, kv_heads, head_dim, rope, elem: Elem::F32 },
    }
}

const LAYERS: [[usize; 2]; 2] = [[0, 2], [1, 2]];

fn tensors(maps: &[LayerMap], elem: Elem) -> Vec<Tensor> {
    maps.iter().enumerate().flat_map(|(layer, map)| map.tensors(layer, elem)).collect()
}

fn draft(elem: Elem) -> Draft {
    let (source, target) = (record("small", 3, 1, 4), record("large", 2, 1, 6));
    let shape = MomentShape { source_layers: 3, source_width: 4, target_layers: 2, target_width: 6, hidden: 0 };
    let mut random = Random::new(5);
    let mut normal = |n: usize| -> Vec<f32> { (0..n).map(|_| random.normal() as f32).collect() };
    let (x, y) = (normal(50 * 12), normal(50 * 12));
    let mut moments = Moments::new(shape);
    let rows = Rows { source: &x, target: &y };
    moments.add(rows, rows);
    let maps = ridge::fit(&moments, &LAYERS.map(Vec::from), Lambda::default()).unwrap();
    let (weights, module) = (encode_weights(&tensors(&maps, elem)).unwrap(), RIDGE.to_vec());
    let settings = RidgeSettings::plain(LAYERS.map(Vec::from).to_vec()).to_json();
    let identity = Identity {
        format: FORMAT,
        head: 4,
        tail: 8,
        native_layers: 0,
        mapper: MapperRecord { kind: "ridge".into(), module: Digest::of(&module), settings },
        weights: WeightsRecord { sha256: Digest::of(&weights), elem },
        source,
        target,
    };
    let fit = FitRecord {
        kvmig: "0.1.0".into(),
        k: 2,
        rank: None,
        seed: 1,
        context: 64,
        stride: 1,
        sequences: 1,
        rows: 50,
        r2_keys: 0.5,
        r2_values: 0.5,
        jitter: 0.0,
        lambda: Lambda::default(),
        weighting: None,
        training: None,
        widths: Vec::new(),
        ends: vec![],
        ablations: vec![],
        sweep: vec![SweepPoint {
            k: 2,
            lambda: 0.01,
            rank: None,
            mflops: 1.5,
            cosine_mean: 0.9,
            cosine_worst_layer: 0.8,
            documents: 3,
        }],
        corpora: vec![],
    };
    let manifest = Manifest { name: "small-to-large".into(), identity, fit, evidence: None, diagnostics: None };
    Draft::new(manifest, module, weights).unwrap()
}

/// The manifest of [`draft`] for another kind of mapper, whose weights are zeroes of these shapes.
fn other_kind(kind: &str, settings: &str, shapes: &[(String, Vec<usize>)]) -> Result<Draft, PairError> {
    let tensor = |(name, shape): &(String, Vec<usize>)| {
        let elem = if name.ends_with(".bias") { Elem::F32 } else { Elem::F16 };
        let numbers = vec![0.0; shape.iter().product()];
        Tensor { name: name.clone(), elem, shape: shape.clone(), numbers }
    };
    let weights = encode_weights(&shapes.iter().map(tensor).collect::<Vec<_>>()).unwrap();
    let module = if kind == "mlp" { MLP } else { HEAD_MATCHED }.to_vec();
    let mut manifest = draft(Elem::F16).pair().manifest().clone();
    manifest.identity.mapper =
        MapperRecord { kind: kind.into(), module: Digest::of(&module), settings: settings.into() };
    manifest.identity.weights.sha256 = Digest::of(&weights);
    Draft::new(manifest, module, weights)
}

fn evidence(artifact: Digest) -> Evidence {
    let quality = Quality {
        agreement: 0.8,
        kl_nats: 0.1,
        nll_gap_nats: 0.05,
        cosine_mean: Some(0.9),
        cosine_worst_layer: Some(0.7),
        n: 32,
    };
    let document = |i: usize| DocumentOutcome {
        id: format!("prose-{i}"),
        domain: "prose".into(),
        tokens: 60,
        mapped: quality,
        ends_only: quality,
        no_prefix: quality,
        source: quality,
        handoff_ms: 3.0,
        reprefill_ms: 9.0,
    };
    let documents = (0..3).map(document).collect();
    Evidence { artifact, seed: 1, backend: "cpu".into(), precision: "dequantised".into(), documents }
}

/// A written folder, to be spoilt.
fn written() -> (tempfile::TempDir, PathBuf) {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("pair");
    let draft = draft(Elem::F16);
    let evidence = evidence(draft.pair().loaded().artifact());
    draft.write(&folder, Some(evidence), &[]).unwrap();
    (parent, folder)
}

fn refused(folder: &Path, wanted: &[&str]) {
    let error = Pair::open(folder).unwrap_err().to_string();
    for part in wanted {
        assert!(error.contains(part), "`{error}` does not name `{part}`");
    }
}

fn replace(file: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(file).unwrap();
    assert!(text.contains(from), "{text} holds no `{from}`");
    fs::write(file, text.replacen(from, to, 1)).unwrap();
}

#[test]
fn what_was_written_is_read() {
    for elem in [Elem::F32, Elem::F16] {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("pair");
        let draft = draft(elem);
        let evidence = evidence(draft.pair().loaded().artifact());
        let made = draft.write(&folder, Some(evidence.clone()), &[]).unwrap();
        let read = Pair::open(&folder).unwrap();
        assert_eq!(read.manifest(), made.manifest());
        assert_eq!(read.evidence(), Some(&evidence));
        assert_eq!(read.loaded().artifact(), made.loaded().artifact());
        assert_eq!(read.manifest().evidence.as_ref().unwrap().domains[0].n, 3);
        let names: Vec<_> = fs::read_dir(parent.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["pair"], "nothing is left beside the folder");
    }
}

/// For people: a changed file is noticed where it is shown or verified, and is no obstacle to what runs.
#[test]
fn diagnostics_are_kept_beside_the_pair() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("pair");
    let diagnostics = Diagnostics {
        r2: Some(HeatMap { keys: vec![vec![0.5, 0.25]], values: vec![vec![0.1, 0.2]] }),
        rows_per_feature: Some(12.5),
        ..Diagnostics::default()
    };
    let draft = draft(Elem::F16);
    let artifact = draft.pair().loaded().artifact();
    draft.with_diagnostics(diagnostics.clone()).write(&folder, None, &[]).unwrap();
    let stored = Stored::open(&folder).unwrap();
    assert_eq!(stored.diagnostics().unwrap(), Some(diagnostics));
    assert_eq!(stored.verify().unwrap().loaded().artifact(), artifact, "they are no part of what runs");
    replace(&folder.join(DIAGNOSTICS), "12.5", "99.5");
    for error in [stored.diagnostics().unwrap_err(), stored.verify().unwrap_err()] {
        assert!(error.to_string().contains("diagnostics.json: sha256: found"), "{error}");
    }
    stored.load().unwrap();
    remove(&folder).unwrap();
    assert!(!folder.exists());
}

#[test]
fn an_existing_folder_is_not_overwritten() {
    let (_parent, folder) = written();
    let error = draft(Elem::F16).write(&folder, None, &[]).unwrap_err();
    assert!(matches!(error, PairError::Exists(_)), "{error}");
    assert!(Pair::open(&folder).unwrap().evidence().is_some());
}

#[test]
fn absent_truncated_or_changed_files() {
    let (_parent, folder) = written();
    let weights = fs::read(folder.join(WEIGHTS)).unwrap();
    fs::remove_file(folder.join(WEIGHTS)).unwrap();
    refused(&folder, &[WEIGHTS, "can't be read"]);
    fs::write(folder.join(WEIGHTS), &weights[..weights.len() - 1]).unwrap();
    refused(&folder, &[WEIGHTS, "sha256", "found", "expected", "fit the pair again"]);
    fs::write(folder.join(WEIGHTS), weights).unwrap();
    fs::write(folder.join(MODULE), b"another component").unwrap();
    refused(&folder, &[MODULE, "sha256"]);
}

#[test]
fn unknown_fields_and_newer_formats() {
    let (_parent, folder) = written();
    let manifest = folder.join(MANIFEST);
    replace(&manifest, "head = 4", "head = 4\nheadroom = 5");
    refused(&folder, &[MANIFEST, "headroom"]);
    replace(&manifest, "headroom = 5", "");
    replace(&manifest, "format = 3", "format = 4\nsomething_new = true");
    refused(&folder, &[MANIFEST, "identity.format", "found 4", "expected 3"]);
}

/// Evidence of before its precision was kept is of no use, and says what is.
#[test]
fn evidence_without_its_precision() {
    let (_parent, folder) = written();
    let (manifest, evidence) = (folder.join(MANIFEST), folder.join(EVIDENCE));
    let before = Digest::of(&fs::read(&evidence).unwrap()).to_string();
    replace(&evidence, "  \"precision\": \"dequantised\",\n", "");
    replace(&manifest, &before, &Digest::of(&fs::read(&evidence).unwrap()).to_string());
    refused(&folder, &[EVIDENCE, "missing field `precision`", "fit the pair again"]);
    replace(&manifest, "format = 3", "format = 2");
    refused(&folder, &[MANIFEST, "identity.format", "found 2", "expected 3", "fit the pair again"]);
}

#[test]
fn a_layout_with_an_unknown_field() {
    let (_parent, folder) = written();
    replace(&folder.join(MANIFEST), "head_dim = 4", "head_dim = 4\nwindow = 128");
    refused(&folder, &[MANIFEST, "window"]);
}

/// Evidence is bound to what the mapper computes: with another head or another layer it is about something else.
#[test]
fn evidence_of_something_else() {
    let (_parent, folder) = written();
    let manifest = folder.join(MANIFEST);
    replace(&manifest, "tail = 8", "tail = 9");
    refused(&folder, &["evidence.artifact", "fit the pair again"]);
    replace(&manifest, "tail = 9", "tail = 8");
    replace(&manifest, "[[0,2]", "[[1,2]");
    refused(&folder, &["evidence.artifact"]);
}

#[test]
fn changed_evidence() {
    let (_parent, folder) = written();
    replace(&folder.join(EVIDENCE), "0.8", "0.9");
    refused(&folder, &[EVIDENCE, "sha256"]);
    fs::remove_file(folder.join(EVIDENCE)).unwrap();
    refused(&folder, &[EVIDENCE, "can't be read"]);
}

#[test]
fn settings_that_name_no_layer_of_the_source() {
    let (_parent, folder) = written();
    replace(&folder.join(MANIFEST), "[[0,2]", "[[0,3]");
    refused(&folder, &["identity.mapper.settings.layers[0]", "[0, 3]", "0 to 2"]);
}

/// Two source layers of one head of 4 columns, a target of two layers of one head of 6.
#[test]
fn a_head_matched_pair() {
    let shapes = |rows: usize| -> Vec<(String, Vec<usize>)> {
        let names = (0..2).flat_map(|l| ["k", "v"].map(|side| format!("layers.{l}.{side}")));
        names
            .flat_map(|name| [(format!("{name}.weight"), vec![1, rows, 6]), (format!("{name}.bias"), vec![6])])
            .collect()
    };
    let settings = r#"{"layers":[[0,2],[1,2]]}"#;
    other_kind("head-matched", settings, &shapes(8)).unwrap();
    for (settings, rows, wanted) in [
        (settings, 4, ["layers.0.k.weight: found [1, 4, 6]", "expected [1, 8, 6]"]),
        (r#"{"layers":[[0,2],[1,2]],"width":8}"#, 8, ["identity.mapper.settings", "unknown field `width`"]),
        (r#"{"layers":[[0,2],[1,3]]}"#, 8, ["identity.mapper.settings.layers[1]: found [1, 3]", "0 to 2"]),
        (r#"{"layers":[[0,2]]}"#, 8, ["identity.mapper.settings.layers: found 1", "expected 2"]),
    ] {
        let error = other_kind("head-matched", settings, &shapes(rows)).unwrap_err().to_string();
        assert!(wanted.iter().all(|part| error.contains(part)), "{error}");
    }
}

#[test]
fn an_mlp_pair() {
    let shapes = |width: usize| -> Vec<(String, Vec<usize>)> {
        let names = (0..2).flat_map(|l| ["k", "v"].map(|side| format!("layers.{l}.{side}.0")));
        let parts = [("in", 8, width), ("mid", width, width), ("out", width, 6)];
        let part = |name: &str, (part, rows, columns): (&str, usize, usize)| {
            let name = format!("{name}.{part}");
            [(format!("{name}.weight"), vec![1, rows, columns]), (format!("{name}.bias"), vec![columns])]
        };
        names.flat_map(|name| parts.into_iter().flat_map(move |one| part(&name, one))).collect()
    };
    let settings = |width: u64| format!(r#"{{"layers":[[0,2],[1,2]],"width":{width}}}"#);
    other_kind("mlp", &settings(5), &shapes(5)).unwrap();
    for (settings, wanted) in [
        (settings(7), ["layers.0.k.0.in.weight: found [1, 8, 5]", "expected [1, 8, 7]"]),
        (settings(0), ["identity.mapper.settings.width: found 0", "1 to 5792"]),
        (settings(u64::MAX), ["identity.mapper.settings.width: found 18446744073709551615", "1 to 5792"]),
        (r#"{"layers":[[0,2],[1,2]]}"#.to_owned(), ["identity.mapper.settings: found missing field `width`", "…"]),
    ] {
        let error = other_kind("mlp", &settings, &shapes(5)).unwrap_err().to_string();
        assert!(wanted.iter().all(|part| error.contains(part)), "{error}");
    }
    let mut more = shapes(5);
    more.push(("layers.9.k.0.in.weight".to_owned(), vec![1]));
    let error = other_kind("mlp", &settings(5), &more).unwrap_err().to_string();
    assert!(error.contains("tensors: found 25, expected 24"), "{error}");
}

#[test]
fn weights_of_another_shape() {
    let (_parent, folder) = written();
    replace(&folder.join(MANIFEST), "[[0,2]", "[[0,1,2]");
    refused(&folder, &[WEIGHTS, "layers.0.k.weight", "[8, 6]", "[12, 6]"]);
}

#[test]
fn other_models() {
    let draft = draft(Elem::F16);
    let identity = draft.pair().identity();
    let kinds = |source: &ModelRecord| check::kinds("pair", identity, source, &identity.target);
    let models = |source: &ModelRecord| check::models("pair", identity, source, &identity.target);
    kinds(&identity.source).and(models(&identity.source)).unwrap();
    let mut tokenizer = identity.source.clone();
    tokenizer.tokenizer = Digest::of(b"another");
    let mut rope = identity.source.clone();
    rope.layout.rope.theta = 5e5;
    let mut digest = identity.source.clone();
    digest.digest = Digest::of(b"another");
    // Other weights of the same kind are another matter than another kind.
    kinds(&digest).unwrap();
    for (error, field) in [(kinds(&tokenizer), "tokenizer"), (kinds(&rope), "layout.rope"), (models(&digest), "digest")]
    {
        let error = error.unwrap_err().to_string();
        assert!(error.contains(&format!("identity.source.{field}")), "{error}");
    }
}

#[test]
fn numbers_that_overflow_half_precision_are_refused() {
    let shape = MomentShape { source_layers: 1, source_width: 1, target_layers: 1, target_width: 1, hidden: 0 };
    let mut moments = Moments::new(shape);
    let x: Vec<f32> = (0..9).map(|i| 1e-3 * i as f32).collect();
    let y: Vec<f32> = x.iter().map(|x| 1e6 * x).collect();
    let rows = Rows { source: &x, target: &y };
    moments.add(rows, rows);
    let maps = ridge::fit(&moments, &[vec![0]], Lambda { value: 0.0, ..Lambda::default() }).unwrap();
    let encode = |elem| encode_weights(&tensors(&maps, elem));
    assert!(matches!(encode(Elem::F16), Err(PairError::NotFinite { index: 0, .. })));
    assert!(encode(Elem::F32).is_ok());
}

#[test]
fn weights_that_are_no_numbers_are_refused() {
    for (dtype, bytes) in [
        (Dtype::F32, [1.0f32, f32::NAN].map(f32::to_le_bytes).concat()),
        (Dtype::F32, [1.0, f32::NEG_INFINITY].map(f32::to_le_bytes).concat()),
        (Dtype::F16, [0x3c00u16, 0x7e01].map(u16::to_le_bytes).concat()),
    ] {
        let view = TensorView::new(dtype, vec![2], &bytes).unwrap();
        let file = safetensors::serialize([("layers.3.k.bias", view)], None).unwrap();
        let nobody = Digest::of(b"");
        let identity = PairIdentity { source: nobody, target: nobody, head: 0, tail: 1, details: b"" };
        let mut loader = Loader::new(Vec::new(), &identity);
        let error = weights::load("p/weights.safetensors", &file, &mut loader).unwrap_err().to_string();
        assert!(error.contains("p/weights.safetensors") && error.contains("layers.3.k.bias"), "{error}");
    }
}

/// The file `evidence.json` holds the outcomes; the manifest may not tell another story about them.
#[test]
fn a_summary_that_lies() {
    for (from, to, wanted) in [
        ("agreement = [0.8", "agreement = [0.99", ["evidence.domains[0].mapped.agreement[0]", "0.99", "0.8"]),
        ("handoff_ms = [3.0, 3.0", "handoff_ms = [3.0, 2.5", ["evidence.domains[0].handoff_ms[1]", "2.5", "3.0"]),
        ("domain = \"prose\"", "domain = \"code\"", ["evidence.domains[0].domain", "\"code\"", "\"prose\""]),
        ("n = 3", "n = 30", ["evidence.domains[0].n", "30", "3"]),
        ("cosine_worst_layer = [", "# [", ["evidence.domains[0].cosine_worst_layer", "nothing", "[0."]),
        ("handoff_ms = [3.0, ", "handoff_ms = [0.3, ", ["evidence.domains[0].handoff_ms[0]", "0.3", "3.0"]),
    ] {
        let (_parent, folder) = written();
        replace(&folder.join(MANIFEST), from, to);
        refused(&folder, &[MANIFEST, wanted[0], &format!("found {}", wanted[1]), &format!("expected {}", wanted[2])]);
    }
}

#[test]
fn a_summary_of_texts_that_no_document_has() {
    let parent = tempfile::tempdir().unwrap();
    let draft = draft(Elem::F16);
    let evidence = evidence(draft.pair().loaded().artifact());
    let mapped = evidence.documents[0].mapped;
    let arms = TextArms { mapped, ends_only: mapped, no_prefix: mapped, source: mapped };
    let folder = parent.path().join("pair");
    let texts: Vec<(String, TextArms)> = (0..2).map(|_| ("prose".to_owned(), arms)).collect();
    draft.write(&folder, Some(evidence), &texts).unwrap();
    replace(&folder.join(MANIFEST), "n = 2\n", "n = 4\n");
    refused(&folder, &["evidence.own_text[0].n", "found 4", "at most 3"]);
}

/// Whoever lists a stranger's pair sees names, and no escape sequences.
#[test]
fn names_that_a_terminal_would_obey() {
    for (from, to, field) in [
        ("name = \"small-to-large\"", "name = \"\\u001b[2J\"", "name: found `\\u{1b}[2J`"),
        ("name = \"small-to-large\"", "name = \"two words\"", "name: found `two words`"),
        ("kind = \"ridge\"", "kind = \"a\\nb\"", "identity.mapper.kind: found `a\\nb`"),
        ("name = \"small\"", "name = \"s\\u202Eall\"", "identity.source.name: found `s\\u{202e}all`"),
        ("domain = \"prose\"", "domain = \"\\u0007\"", "evidence.domain: found `\\u{7}`"),
    ] {
        let (_parent, folder) = written();
        replace(&folder.join(MANIFEST), from, to);
        refused(&folder, &[field, "expected"]);
        assert!(!Pair::open(&folder).unwrap_err().to_string().contains(char::is_control), "{field}");
    }
}

#[test]
fn a_k_that_is_not_the_settings() {
    let (_parent, folder) = written();
    replace(&folder.join(MANIFEST), "k = 2\n", "k = 3\n");
    refused(&folder, &["fit.k", "found 3", "expected 2"]);
}

#[test]
fn texts_that_are_no_manifest_say_where_in_one_line() {
    let (_parent, folder) = written();
    replace(&folder.join(MANIFEST), "head = 4", "head = \"four\"");
    refused(&folder, &["pair.toml: line ", "field `identity.head`: invalid type: string \"four\", expected usize"]);
    fs::write(folder.join(MANIFEST), "name =\nnothing").unwrap();
    let error = Pair::open(&folder).unwrap_err().to_string();
    assert!(error.contains("pair.toml: line 2, column 8: ") && !error.contains('\n'), "{error}");
}

#[test]
fn bytes_that_are_no_module() {
    let (_parent, folder) = written();
    let old = Digest::of(RIDGE).to_string();
    fs::write(folder.join(MODULE), b"no component").unwrap();
    replace(&folder.join(MANIFEST), &old, &Digest::of(b"no component").to_string());
    refused(&folder, &[MODULE, "not a valid component"]);
}

/// No product of what a manifest says overflows.
#[test]
fn a_layout_beyond_any_model_is_refused() {
    for (field, written_as) in [("head_dim", "head_dim = 4"), ("kv_heads", "kv_heads = 1"), ("layers", "layers = 3")] {
        for most in ["65537", "9223372036854775807"] {
            let (_parent, folder) = written();
            replace(&folder.join(MANIFEST), written_as, &format!("{field} = {most}"));
            refused(&folder, &[MANIFEST, &format!("identity.source.layout.{field}"), most, "1 to 65536"]);
        }
    }
}
