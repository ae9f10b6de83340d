//! Pairs: what moves a conversation from one model to one of its siblings.
//!
//! A pair is a folder of four files: the readable manifest `pair.toml`, the module `mapper.wasm`, which carries its own shaders
//! in its description, `weights.safetensors`, and `evidence.json`, the outcomes of the held-out documents. [`Pair::open`] and [`Pair::from_bytes`] parse and check all of
//! it; a [`Pair`] need not be checked again, except against the two models it is used with ([`Pair::check`]).

mod check;
mod error;
mod kinds;
mod manifest;
mod name;
mod summary;
mod weights;
mod write;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use kvmig_gate::{Digest, Evidence, Loaded, Loader, PairIdentity};

use crate::{
    engine::Model,
    measure::summary::{TextArms, summarise, summarise_texts},
    sandbox::{HostError, Module, Sandbox, SandboxError, SandboxLimits},
};

pub use error::PairError;
pub use kinds::{MlpSettings, RidgeSettings};
pub use manifest::{
    AblationPoint, CorpusRecord, EndsPoint, EvidenceRecord, FORMAT, FitRecord, Identity, Manifest, MapperRecord,
    ModelRecord, SweepPoint, TrainingRecord, WeightingRecord, WeightsRecord,
};
pub use name::{NameError, check_name};
pub use weights::{Tensor, encode as encode_weights, rounded};

/// The manifest's file name.
pub const MANIFEST: &str = "pair.toml";
/// The weights' file name.
pub const WEIGHTS: &str = "weights.safetensors";
/// The module's file name.
pub const MODULE: &str = "mapper.wasm";
/// The file name of the held-out documents' outcomes.
pub const EVIDENCE: &str = "evidence.json";

/// Every file of a folder.
const FILES: [&str; 4] = [MANIFEST, MODULE, WEIGHTS, EVIDENCE];

/// A checked pair: digests agree, shapes agree, numbers are finite, evidence is about what is loaded.
#[derive(Debug)]
pub struct Pair {
    manifest: Manifest,
    module: Module,
    loaded: Arc<Loaded>,
    evidence: Option<Evidence>,
    label: String,
}

/// The bytes of a pair's files.
#[derive(Clone, Copy, Debug)]
pub struct PairFiles<'a> {
    /// `pair.toml`.
    pub manifest: &'a [u8],
    /// `mapper.wasm`.
    pub module: &'a [u8],
    /// `weights.safetensors`.
    pub weights: &'a [u8],
    /// `evidence.json`, where the manifest has evidence.
    pub evidence: Option<&'a [u8]>,
}

impl Pair {
    /// Reads a pair folder.
    ///
    /// # Errors
    /// [`PairError`], naming file, field, what was found and what was expected.
    pub fn open(folder: &Path) -> Result<Pair, PairError> {
        let read = |name: &str| {
            let file = folder.join(name);
            std::fs::read(&file).map_err(|source| PairError::Read { file, source })
        };
        let (manifest, module, weights) = (read(MANIFEST)?, read(MODULE)?, read(WEIGHTS)?);
        let label = folder.display().to_string();
        let wants_evidence = check::parse(&label, &manifest)?.evidence.is_some();
        let evidence = if wants_evidence { Some(read(EVIDENCE)?) } else { None };
        let files =
            PairFiles { manifest: &manifest, module: &module, weights: &weights, evidence: evidence.as_deref() };
        Pair::from_bytes(&label, files)
    }

    /// Checks a pair whose files are in memory, compiled into the program say; `label` is what messages call it.
    ///
    /// # Errors
    /// [`PairError`], naming file, field, what was found and what was expected.
    pub fn from_bytes(label: &str, files: PairFiles<'_>) -> Result<Pair, PairError> {
        let manifest = check::parse(label, files.manifest)?;
        check::digests(label, &manifest, &files)?;
        let (module, loaded) = load(label, &manifest.identity, files.module, files.weights)?;
        check::identity(label, &manifest, &loaded)?;
        let evidence = check::evidence(label, &manifest, &loaded, files.evidence)?;
        Ok(Pair { manifest, module, loaded: Arc::new(loaded), evidence, label: label.to_owned() })
    }

    /// What people and the ledger call it.
    pub fn name(&self) -> &str {
        &self.manifest.name
    }

    /// The whole manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// What the mapper computes.
    pub fn identity(&self) -> &Identity {
        &self.manifest.identity
    }

    /// Digest of the model whose caches it maps.
    pub fn source_digest(&self) -> Digest {
        self.manifest.identity.source.digest
    }

    /// Digest of the model it maps them for.
    pub fn target_digest(&self) -> Digest {
        self.manifest.identity.target.digest
    }

    /// First positions that the target computes itself, in tokens.
    pub fn head(&self) -> usize {
        self.manifest.identity.head
    }

    /// Last prompt tokens that the target computes itself.
    pub fn tail(&self) -> usize {
        self.manifest.identity.tail
    }

    /// First layers that the target computes itself, for every token.
    pub fn native_layers(&self) -> usize {
        self.manifest.identity.native_layers
    }

    /// Kind of mapper, such as `ridge`.
    pub fn mapper(&self) -> &str {
        &self.manifest.identity.mapper.kind
    }

    /// The JSON that its module is set with.
    pub fn settings(&self) -> &str {
        &self.manifest.identity.mapper.settings
    }

    /// The module, compiled from the bytes of [`Pair::loaded`], whose shaders are those of its description.
    pub fn module(&self) -> &Module {
        &self.module
    }

    /// The bytes that will run.
    pub fn loaded(&self) -> &Arc<Loaded> {
        &self.loaded
    }

    /// What it did on held-out documents.
    pub fn evidence(&self) -> Option<&Evidence> {
        self.evidence.as_ref()
    }

    /// Whether the two models that are there are of the kind that the pair was fitted for, whatever their weights: where they
    /// are not, nobody can mean to use them with it.
    ///
    /// # Errors
    /// [`PairError::Disagreement`] for another tokenizer, shape or rotation.
    pub fn check_kind(&self, source: &Model, target: &Model) -> Result<(), PairError> {
        check::kinds(&self.label, &self.manifest.identity, &ModelRecord::of(source), &ModelRecord::of(target))
    }

    /// Holds the pair against the two models that are there.
    ///
    /// # Errors
    /// [`PairError::Disagreement`] for another model, tokenizer, shape or rotation than the pair was fitted for.
    pub fn check(&self, source: &Model, target: &Model) -> Result<(), PairError> {
        self.check_kind(source, target)?;
        check::models(&self.label, &self.manifest.identity, &ModelRecord::of(source), &ModelRecord::of(target))
    }

    /// [`Pair::check`] as the sentence a gate writes down.
    pub fn mismatch(&self, source: &Model, target: &Model) -> Option<String> {
        self.check(source, target).err().map(|error| error.to_string())
    }
}

/// Copies module and weights into memory of their own and hashes the copies. The module's shaders are in its description: it
/// is asked for them, so that they are part of the artifact too.
fn load(label: &str, identity: &Identity, bytes: &[u8], weights: &[u8]) -> Result<(Module, Loaded), PairError> {
    let wrong = |error: SandboxError| PairError::Module { file: file(label, MODULE), source: Box::new(error) };
    let sandbox = match Sandbox::new(SandboxLimits::default(), Sandbox::user_folder().as_deref()) {
        // The folder only saves the time to compile.
        Err(HostError::Store(_)) => Sandbox::new(SandboxLimits::default(), None),
        other => other,
    };
    let module = sandbox.map_err(|error| wrong(error.into()))?.load(bytes).map_err(wrong)?;
    let pair = PairIdentity {
        source: identity.source.digest,
        target: identity.target.digest,
        head: identity.head,
        tail: identity.tail,
        details: &identity.bytes(),
    };
    let mut loader = Loader::new(bytes.to_vec(), &pair);
    for (name, wgsl) in module.metadata().shaders.iter() {
        loader.shader(name, wgsl);
    }
    weights::load(&file(label, WEIGHTS), weights, &mut loader)?;
    Ok((module, loader.finish()))
}

/// What messages call a file of the pair.
fn file(label: &str, name: &str) -> String {
    PathBuf::from(label).join(name).display().to_string()
}

/// A pair that was fitted but not yet measured: it can be tried, not used.
#[derive(Debug)]
pub struct Draft {
    pair: Pair,
    module: Vec<u8>,
    weights: Vec<u8>,
}

impl Draft {
    /// Puts a pair together and checks it as a reader would.
    ///
    /// # Errors
    /// [`PairError`] where the parts don't fit together.
    pub fn new(manifest: Manifest, module: Vec<u8>, weights: Vec<u8>) -> Result<Draft, PairError> {
        let manifest = Manifest { evidence: None, ..manifest };
        let label = manifest.name.clone();
        let text = toml::to_string(&manifest)?;
        let files = PairFiles { manifest: text.as_bytes(), module: &module, weights: &weights, evidence: None };
        Ok(Draft { pair: Pair::from_bytes(&label, files)?, module, weights })
    }

    /// The pair as it can be tried.
    pub fn pair(&self) -> &Pair {
        &self.pair
    }

    /// Writes the folder, with evidence where there is some: all of it under another name first, then renamed. `texts` are the
    /// arms on the documents' own next tokens, (domain, arms) each.
    ///
    /// # Errors
    /// [`PairError::Exists`] if something is there already, [`PairError`] if the evidence is about something else or the
    /// folder can't be written.
    pub fn write(
        self,
        folder: &Path,
        evidence: Option<Evidence>,
        texts: &[(String, TextArms)],
    ) -> Result<Pair, PairError> {
        let evidence_bytes = evidence.as_ref().map(write::evidence);
        let record = evidence.as_ref().zip(evidence_bytes.as_ref()).map(|(evidence, bytes)| EvidenceRecord {
            sha256: Digest::of(bytes),
            artifact: evidence.artifact,
            domains: summarise(&evidence.documents),
            own_text: summarise_texts(texts),
        });
        let manifest = Manifest { evidence: record, ..self.pair.manifest };
        let text = write::manifest(&manifest)?;
        let files = PairFiles {
            manifest: text.as_bytes(),
            module: &self.module,
            weights: &self.weights,
            evidence: evidence_bytes.as_deref(),
        };
        let pair = Pair::from_bytes(&folder.display().to_string(), files)?;
        write::folder(folder, files)?;
        Ok(pair)
    }
}

#[cfg(test)]
mod tests;
