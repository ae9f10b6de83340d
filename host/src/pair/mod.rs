//! Pairs: what moves a conversation from one model to one of its siblings.
//!
//! A pair is a folder of four files: the readable manifest `pair.toml`, the module `mapper.wasm`, which carries its own shaders
//! in its description, `weights.safetensors`, and `evidence.json`, the outcomes of the held-out documents. Weights may be
//! gigabytes, so a folder is read in two steps: a [`Card`], manifest and evidence, is what a gate decides by, and [`Stored::load`]
//! makes a [`Pair`] of it, which need not be checked again. Both are held against the two models they are used with
//! ([`Card::check`]). A folder of such folders holds several mappers of one pair of models: [`Cards`].

mod card;
mod cards;
mod check;
mod diagnostics;
mod error;
mod find;
mod kinds;
mod manifest;
mod name;
mod remove;
mod stored;
mod summary;
mod weights;
mod write;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use kvmig_gate::{Digest, Evidence, Loaded};

use crate::{
    measure::summary::{TextArms, summarise, summarise_texts},
    sandbox::Module,
};

pub use card::Card;
pub use cards::Cards;
pub use diagnostics::{Diagnostics, ForwardCurve, HeatMap, PerSide};
pub use error::PairError;
pub use find::{Found, find};
pub use kinds::{MlpSettings, RidgeSettings};
pub use manifest::{
    AblationPoint, CorpusRecord, EndsPoint, EvidenceRecord, FORMAT, FitRecord, Identity, Manifest, MapperRecord,
    ModelRecord, SweepPoint, TrainingRecord, WeightingRecord, WeightsRecord, WidthPoint,
};
pub use name::{NameError, check_name};
pub use remove::remove;
pub use stored::Stored;
pub use weights::{Tensor, encode as encode_weights, rounded};

/// The manifest's file name.
pub const MANIFEST: &str = "pair.toml";
/// The weights' file name.
pub const WEIGHTS: &str = "weights.safetensors";
/// The module's file name.
pub const MODULE: &str = "mapper.wasm";
/// The file name of the held-out documents' outcomes.
pub const EVIDENCE: &str = "evidence.json";

/// The file name of what a fit saw of its own work; not every pair has it.
pub const DIAGNOSTICS: &str = "diagnostics.json";

/// Every file that each folder has.
const FILES: [&str; 4] = [MANIFEST, MODULE, WEIGHTS, EVIDENCE];

/// A checked pair, loaded: digests agree, shapes agree, numbers are finite, evidence is about what is loaded.
#[derive(Debug)]
pub struct Pair {
    card: Card,
    module: Module,
    loaded: Arc<Loaded>,
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
    /// `diagnostics.json`, where the manifest names it.
    pub diagnostics: Option<&'a [u8]>,
}

impl Pair {
    /// Reads a pair folder, all of it; [`Stored::open`] leaves module and weights for later.
    ///
    /// # Errors
    /// [`PairError`], naming file, field, what was found and what was expected.
    pub fn open(folder: &Path) -> Result<Pair, PairError> {
        Stored::open(folder)?.load()
    }

    /// Checks a pair whose files are in memory; `label` is what messages call it.
    ///
    /// # Errors
    /// [`PairError`], naming file, field, what was found and what was expected.
    pub fn from_bytes(label: &str, files: PairFiles<'_>) -> Result<Pair, PairError> {
        Pair::load(Card::parse(label, files.manifest, files.evidence)?, files.module, files.weights)
    }

    /// Loads what a card describes. Whatever the files held when the card was read, these are the bytes that are held to it.
    fn load(card: Card, component: &[u8], weights: &[u8]) -> Result<Pair, PairError> {
        let module = card.read_module(component)?;
        let loaded = card.read_weights(component, &module, weights)?;
        Ok(Pair { card, module, loaded: Arc::new(loaded) })
    }

    /// What it says of itself.
    pub fn card(&self) -> &Card {
        &self.card
    }

    /// What people and the ledger call it.
    pub fn name(&self) -> &str {
        self.card.name()
    }

    /// The whole manifest.
    pub fn manifest(&self) -> &Manifest {
        self.card.manifest()
    }

    /// What the mapper computes.
    pub fn identity(&self) -> &Identity {
        self.card.identity()
    }

    /// First positions that the target computes itself, in tokens.
    pub fn head(&self) -> usize {
        self.identity().head
    }

    /// Last prompt tokens that the target computes itself.
    pub fn tail(&self) -> usize {
        self.identity().tail
    }

    /// First layers that the target computes itself, for every token.
    pub fn native_layers(&self) -> usize {
        self.identity().native_layers
    }

    /// Kind of mapper, such as `ridge`.
    pub fn mapper(&self) -> &str {
        self.card.mapper()
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
        self.card.evidence()
    }
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
    diagnostics: Option<Diagnostics>,
}

impl Draft {
    /// Puts a pair together and checks it as a reader would.
    ///
    /// # Errors
    /// [`PairError`] where the parts don't fit together.
    pub fn new(manifest: Manifest, module: Vec<u8>, weights: Vec<u8>) -> Result<Draft, PairError> {
        let manifest = Manifest { evidence: None, diagnostics: None, ..manifest };
        let label = manifest.name.clone();
        let text = toml::to_string(&manifest)?;
        let files = PairFiles {
            manifest: text.as_bytes(),
            module: &module,
            weights: &weights,
            evidence: None,
            diagnostics: None,
        };
        Ok(Draft { pair: Pair::from_bytes(&label, files)?, module, weights, diagnostics: None })
    }

    /// The pair as it can be tried.
    pub fn pair(&self) -> &Pair {
        &self.pair
    }

    /// The same, with what the fit saw of its own work to be written beside it.
    pub fn with_diagnostics(self, diagnostics: Diagnostics) -> Draft {
        Draft { diagnostics: Some(diagnostics), ..self }
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
        let diagnostics = self.diagnostics.as_ref().map(Diagnostics::bytes);
        let digest = diagnostics.as_deref().map(Digest::of);
        let manifest = Manifest { evidence: record, diagnostics: digest, ..self.pair.card.into_manifest() };
        let text = write::manifest(&manifest)?;
        let files = PairFiles {
            manifest: text.as_bytes(),
            module: &self.module,
            weights: &self.weights,
            evidence: evidence_bytes.as_deref(),
            diagnostics: diagnostics.as_deref(),
        };
        let pair = Pair::from_bytes(&folder.display().to_string(), files)?;
        write::folder(folder, files)?;
        Ok(pair)
    }
}

#[cfg(test)]
mod tests;
