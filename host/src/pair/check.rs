//! From a manifest and some bytes to a pair that needs no further checks.

use std::fmt::Display;

use kvmig_gate::{
    Digest, Evidence, Loaded, WeightElem,
    parse::{from_json, from_toml, printable},
};
use serde::Deserialize;

use super::{
    EVIDENCE, FORMAT, Identity, MANIFEST, Manifest, ModelRecord, NameError, PairError, WEIGHTS, check_name, file,
    kinds::Kind, summary,
};
use crate::cache::{CacheLayout, Elem};

/// The manifest's text as a manifest of a version we know.
pub(super) fn parse(label: &str, bytes: &[u8]) -> Result<Manifest, PairError> {
    let name = file(label, MANIFEST);
    let text = String::from_utf8(bytes.to_vec()).map_err(|error| PairError::Disagreement {
        file: name.clone(),
        field: format!("byte {}", error.utf8_error().valid_up_to()),
        found: "bytes that are no UTF-8".to_owned(),
        expected: "a TOML text".to_owned(),
        mend: "restore the file or fit the pair again",
    })?;
    // The version is read first, so that a newer folder is called newer rather than full of unknown fields.
    #[derive(Deserialize)]
    struct Version {
        identity: Format,
    }
    #[derive(Deserialize)]
    struct Format {
        format: u32,
    }
    let wrong = |source| PairError::Manifest { file: name.clone(), source };
    let Version { identity: Format { format } } = from_toml(&text).map_err(wrong)?;
    same(&name, "identity.format", format, FORMAT, "use a kvmig of that version or fit the pair again")?;
    let manifest = from_toml(&text).map_err(wrong)?;
    names(label, &manifest)?;
    Ok(manifest)
}

/// What a manifest calls things is fit to be shown to a person.
fn names(label: &str, manifest: &Manifest) -> Result<(), PairError> {
    const MEND: &str = "mend the name or fit the pair again";
    let Manifest { name, identity, fit, evidence, diagnostics: _ } = manifest;
    let corpora = || fit.corpora.iter().enumerate();
    let domains = evidence.iter().flat_map(|record| {
        let own_text = record.own_text.iter().map(|text| &text.domain);
        record.domains.iter().map(|domain| &domain.domain).chain(own_text)
    });
    let names = [("name".to_owned(), name), ("identity.mapper.kind".to_owned(), &identity.mapper.kind)]
        .into_iter()
        .chain(corpora().map(|(i, corpus)| (format!("fit.corpora[{i}].name"), &corpus.name)))
        .chain(domains.map(|domain| ("evidence.domain".to_owned(), domain)));
    for (field, name) in names {
        check_name(name).map_err(|NameError { found }| {
            disagree(label, MANIFEST, &field, format!("`{found}`"), NameError::EXPECTED, MEND)
        })?;
    }
    // Names of files may hold anything that can be printed.
    let texts = [
        ("identity.source.name".to_owned(), &identity.source.name),
        ("identity.target.name".to_owned(), &identity.target.name),
        ("fit.kvmig".to_owned(), &fit.kvmig),
    ];
    let files = corpora().map(|(i, corpus)| (format!("fit.corpora[{i}].file"), &corpus.file));
    texts.into_iter().chain(files).try_for_each(|(field, shown)| text(label, MANIFEST, &field, shown))
}

fn text(label: &str, name: &str, field: &str, text: &str) -> Result<(), PairError> {
    let printed = printable(text);
    if printed == text {
        return Ok(());
    }
    let expected = "printable characters alone";
    Err(disagree(label, name, field, format!("`{printed}`"), expected, "mend it or fit the pair again"))
}

const CHANGED: &str = "the file changed after the pair was made: copy the folder again or fit the pair again";

/// A file is the one that the manifest names.
pub(super) fn digest(label: &str, name: &str, found: Digest, expected: Digest) -> Result<(), PairError> {
    same(&file(label, name), "sha256", found, expected, CHANGED)
}

/// Models and layouts fit each other.
pub(super) fn identity(label: &str, manifest: &Manifest) -> Result<(), PairError> {
    const MEND: &str = "fit the pair again";
    let identity = &manifest.identity;
    let Identity { source, target, tail, .. } = identity;
    let manifest_file = file(label, MANIFEST);
    if *tail == 0 {
        let field = "identity.tail";
        return Err(disagree(label, MANIFEST, field, "0", "at least 1: the last prompt token is native", MEND));
    }
    same(
        &manifest_file,
        "identity.target.tokenizer",
        target.tokenizer,
        source.tokenizer,
        "pair two models of one tokenizer",
    )?;
    if identity.native_layers >= target.layout.layers {
        let (field, found) = ("identity.native_layers", identity.native_layers);
        let expected = format!("fewer than the target's {} layers", target.layout.layers);
        return Err(disagree(label, MANIFEST, field, found, expected, MEND));
    }
    for (which, layout) in [("source", &source.layout), ("target", &target.layout)] {
        if let Some((field, found, expected)) = layout_fault(layout) {
            let field = format!("identity.{which}.layout.{field}");
            return Err(disagree(label, MANIFEST, &field, found, expected, MEND));
        }
    }
    Ok(())
}

/// Settings and weights fit the models, and each other.
pub(super) fn weights(label: &str, manifest: &Manifest, loaded: &Loaded) -> Result<(), PairError> {
    const MEND: &str = "fit the pair again";
    let identity = &manifest.identity;
    let elem = match identity.weights.elem {
        Elem::F32 => WeightElem::F32,
        Elem::F16 => WeightElem::F16,
    };
    let weights = file(label, WEIGHTS);
    for (name, tensor) in loaded.weights().iter().filter(|(name, _)| name.ends_with(".weight")) {
        let field = format!("{name}.dtype");
        same(&weights, &field, format!("{:?}", tensor.elem()), format!("{elem:?}"), MEND)?;
    }
    // Other modules say themselves, in `plan`, which weights they need; the sandbox holds them to the shapes.
    match Kind::named(&identity.mapper.kind) {
        Some(kind) => kind.check(label, manifest, loaded),
        None => Ok(()),
    }
}

/// Layers, KV heads and dimensions of a head at most: more than any model has, and few enough that no product of them with a
/// number of layers to read overflows.
const MOST: usize = 1 << 16;

/// The first thing about a layout that no model has.
fn layout_fault(layout: &CacheLayout) -> Option<(&'static str, String, String)> {
    let counts = [("layers", layout.layers), ("kv_heads", layout.kv_heads), ("head_dim", layout.head_dim)];
    if let Some((field, count)) = counts.into_iter().find(|(_, count)| !(1..=MOST).contains(count)) {
        return Some((field, count.to_string(), format!("1 to {MOST}")));
    }
    let dims = layout.rope.dims;
    if dims == 0 || !dims.is_multiple_of(2) || dims > layout.head_dim {
        return Some(("rope.dims", dims.to_string(), format!("an even number from 2 to {}", layout.head_dim)));
    }
    let theta = layout.rope.theta;
    (!(theta.is_finite() && theta > 0.0)).then(|| ("rope.theta", theta.to_string(), "a positive number".to_owned()))
}

const MEASURED: &str = "fit the pair again: evidence counts for the bytes it was measured on only";

/// What is loaded is what the evidence is about.
pub(super) fn artifact(label: &str, manifest: &Manifest, loaded: &Loaded) -> Result<(), PairError> {
    let Some(record) = &manifest.evidence else { return Ok(()) };
    same(&file(label, MANIFEST), "evidence.artifact", record.artifact, loaded.artifact(), MEASURED)
}

/// The evidence is the one that the manifest summarises.
pub(super) fn evidence(label: &str, manifest: &Manifest, bytes: Option<&[u8]>) -> Result<Option<Evidence>, PairError> {
    let (record, bytes) = match (&manifest.evidence, bytes) {
        (Some(record), Some(bytes)) => (record, bytes),
        (None, None) => return Ok(None),
        (Some(_), None) => {
            return Err(disagree(label, EVIDENCE, "file", "nothing", "the evidence of the manifest", CHANGED));
        }
        (None, Some(_)) => {
            let expected = "the record of evidence.json";
            return Err(disagree(label, MANIFEST, "evidence", "nothing", expected, CHANGED));
        }
    };
    digest(label, EVIDENCE, Digest::of(bytes), record.sha256)?;
    let name = file(label, EVIDENCE);
    let evidence: Evidence = from_json(bytes).map_err(|source| PairError::Evidence { file: name.clone(), source })?;
    same(&name, "artifact", evidence.artifact, record.artifact, MEASURED)?;
    text(label, EVIDENCE, "backend", &evidence.backend)?;
    text(label, EVIDENCE, "precision", &evidence.precision)?;
    for (i, document) in evidence.documents.iter().enumerate() {
        text(label, EVIDENCE, &format!("documents[{i}].id"), &document.id)?;
    }
    // Domains are names because those of the summary are, and they are the same.
    if let Some((field, found, expected)) = summary::lie(record, &evidence) {
        let mend = "evidence.json gives another figure: copy the folder again or fit the pair again";
        return Err(disagree(label, MANIFEST, &field, found, expected, mend));
    }
    Ok(Some(evidence))
}

/// What is to be done about other models than a pair's.
const MODELS: &str = "use the models that the pair was fitted for, or fit a pair for these";

/// The models that are there read texts, lay out caches and rotate keys as those that the pair was fitted for.
pub(super) fn kinds(
    label: &str,
    identity: &Identity,
    source: &ModelRecord,
    target: &ModelRecord,
) -> Result<(), PairError> {
    let manifest = file(label, MANIFEST);
    for (which, expected, found) in [("source", &identity.source, source), ("target", &identity.target, target)] {
        let field = |name: &str| format!("identity.{which}.{name} ({})", found.name);
        same(&manifest, &field("tokenizer"), found.tokenizer, expected.tokenizer, MODELS)?;
        let CacheLayout { layers, kv_heads, head_dim, rope, elem: _ } = &found.layout;
        let shape = |layers, heads, dim| format!("{layers} layers of {heads} KV heads of {dim}");
        let (wanted, layout) = (&expected.layout, field("layout"));
        let expected_shape = shape(wanted.layers, wanted.kv_heads, wanted.head_dim);
        same(&manifest, &layout, shape(*layers, *kv_heads, *head_dim), expected_shape, MODELS)?;
        same(&manifest, &field("layout.rope"), format!("{rope:?}"), format!("{:?}", wanted.rope), MODELS)?;
        same(&manifest, &field("hidden"), found.hidden, expected.hidden, MODELS)?;
    }
    Ok(())
}

/// They are those very models.
pub(super) fn models(
    label: &str,
    identity: &Identity,
    source: &ModelRecord,
    target: &ModelRecord,
) -> Result<(), PairError> {
    let manifest = file(label, MANIFEST);
    [("source", &identity.source, source), ("target", &identity.target, target)].into_iter().try_for_each(
        |(which, expected, found)| {
            let field = format!("identity.{which}.digest ({})", found.name);
            same(&manifest, &field, found.digest, expected.digest, MODELS)
        },
    )
}

pub(super) fn same<T: PartialEq + Display>(
    file: &str,
    field: &str,
    found: T,
    expected: T,
    mend: &'static str,
) -> Result<(), PairError> {
    if found == expected {
        return Ok(());
    }
    Err(PairError::Disagreement {
        file: file.to_owned(),
        field: field.to_owned(),
        found: found.to_string(),
        expected: expected.to_string(),
        mend,
    })
}

pub(super) fn disagree(
    label: &str,
    name: &str,
    field: &str,
    found: impl Display,
    expected: impl Display,
    mend: &'static str,
) -> PairError {
    PairError::Disagreement {
        file: file(label, name),
        field: field.to_owned(),
        found: found.to_string(),
        expected: expected.to_string(),
        mend,
    }
}
