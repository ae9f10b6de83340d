//! What to fit on, how, and where to.

use std::path::PathBuf;

use kvmig_gate::parse::printable;

use super::{
    corpus::{CorpusFile, DomainError, check_domain},
    head_matched::Weighting,
    mlp,
    ridge::Lambda,
};
use crate::{
    cache::Elem,
    pair::{NameError, check_name},
};

/// Settings of a fit.
#[derive(Clone, Debug)]
pub struct FitOptions {
    /// What people and the ledger call the pair.
    pub name: String,
    /// The pair folder to make; nothing may be there.
    pub out: PathBuf,
    /// Texts to calibrate on, to choose k on and, unless `held_out` says otherwise, to measure on.
    pub corpora: Vec<CorpusFile>,
    /// Texts to measure on; without any, documents of `corpora` are held out.
    pub held_out: Vec<CorpusFile>,
    /// Tokens of a calibration sequence, and of the prefix of a selection or evidence document.
    pub context: usize,
    /// Calibration tokens to stop at. Texts that have fewer are refused: what a fit is worth depends on it.
    pub tokens: usize,
    /// Every how many positions a calibration row is taken; at least 1.
    pub stride: usize,
    /// First positions that the target computes itself: excluded from the fit and from every figure of the map.
    pub head: usize,
    /// Last prompt tokens that the target computes itself; at least 1.
    pub tail: usize,
    /// First layers that the target computes itself, for every token; its hidden state behind them is a feature.
    pub native_layers: usize,
    /// Source layers per target layer; chosen on selection documents where it is `None`.
    pub k: Option<usize>,
    /// The largest k that may be chosen.
    pub max_k: Option<usize>,
    /// Whether keys and values are both features of each (ridge alone).
    pub joint: bool,
    /// Columns that all source layers' features are projected to first (ridge alone): every target layer reads these.
    pub rank: Option<usize>,
    /// Strength of the ridge.
    pub lambda: Lambda,
    /// Whether λ is chosen along with k, and the rank or the width where there is one, from a few around the given ones; and
    /// then the native ends.
    pub sweep: bool,
    /// Element type of the weights.
    pub elem: Elem,
    /// Selection documents per corpus: to choose on, and to look into the pair on ([`Diagnostics`](crate::pair::Diagnostics)).
    /// Where nothing is chosen, none are kept of fewer than five documents that are long enough.
    pub selection: usize,
    /// Evidence documents per corpus.
    pub evidence: usize,
    /// Seed of the split of documents.
    pub seed: u64,
    /// What is fitted.
    pub mapper: MapperKind,
    /// The mapper module's component.
    pub module: Vec<u8>,
    /// Whether to find out, on the selection documents, what each part of the fit is worth.
    pub ablate: bool,
    /// What is captured is kept beside this rather than beside `out`: where several mappers are fitted from one capture.
    pub base: Option<PathBuf>,
    /// Whether rows are spilled to disk even where this mapper does not need them, for another one that will.
    pub spill: bool,
    /// Whether to keep what was captured after the pair is written, for another fit of the same rows.
    pub keep_state: bool,
}

impl FitOptions {
    /// The defaults: 16,384 calibration tokens in sequences of 384, 4 native positions at the head and 32 at the tail, k chosen.
    pub fn new(name: &str, out: PathBuf, corpora: Vec<CorpusFile>, module: Vec<u8>) -> FitOptions {
        FitOptions {
            name: name.to_owned(),
            out,
            corpora,
            held_out: Vec::new(),
            context: 384,
            tokens: 16_384,
            stride: 1,
            head: 4,
            tail: 32,
            native_layers: 0,
            k: None,
            max_k: None,
            joint: false,
            rank: None,
            lambda: Lambda::default(),
            sweep: false,
            elem: Elem::F16,
            selection: 4,
            evidence: 30,
            seed: 1,
            mapper: MapperKind::Ridge,
            module,
            ablate: false,
            base: None,
            spill: false,
            keep_state: false,
        }
    }

    /// The file that captured moments are kept in until the pair is written.
    pub fn state_file(&self) -> PathBuf {
        self.beside("state")
    }

    /// The file that rows are spilled to until the pair is written, where a fit needs them again.
    pub fn rows_file(&self) -> PathBuf {
        self.beside("rows")
    }

    /// The folder that finished networks of a width are kept in until the pair is written.
    pub fn networks_folder(&self, width: usize) -> PathBuf {
        self.beside(&format!("mlp-{width}"))
    }

    /// The file that evidence is kept in until the pair is written.
    pub fn evidence_log(&self) -> PathBuf {
        match &self.base {
            Some(_) => self.beside(&format!("{}.evidence.jsonl", self.mapper.name())),
            None => self.beside("evidence.jsonl"),
        }
    }

    /// Whether the capture spills rows.
    pub(super) fn wants_rows(&self) -> bool {
        self.spill || self.ablate || self.mapper.needs_rows()
    }

    /// The file that keeps other fits out of this place.
    pub(super) fn lock_file(&self) -> PathBuf {
        self.beside("lock")
    }

    fn beside(&self, suffix: &str) -> PathBuf {
        let place = self.base.as_ref().unwrap_or(&self.out);
        let mut name = place.file_name().unwrap_or(place.as_os_str()).to_owned();
        name.push(".");
        name.push(suffix);
        place.with_file_name(name)
    }

    /// Whether there is something to be chosen on selection documents.
    pub(super) fn chooses(&self) -> bool {
        self.sweep || self.ablate || (self.k.is_none() && self.rank.is_none())
    }

    /// Settings that other mappers don't have.
    fn ridge_alone(&self) -> Option<(&'static str, String, String)> {
        if self.mapper == MapperKind::Ridge {
            let both = self.rank.is_some() && (self.k.is_some() || self.max_k.is_some());
            let expected = || "no k beside a rank: a projection reads all source layers".to_owned();
            return both.then(|| ("rank", "k as well".to_owned(), expected()));
        }
        let given = [("joint", self.joint), ("rank", self.rank.is_some())];
        let (field, _) = given.into_iter().find(|(_, given)| *given)?;
        Some((field, format!("mapper {}", self.mapper.name()), "mapper ridge".to_owned()))
    }

    /// The first setting that no fit can have: (field, found, expected).
    pub(super) fn fault(&self) -> Option<(&'static str, String, String)> {
        let at_least = |field, found: usize, least: usize| {
            (found < least).then(|| (field, found.to_string(), format!("at least {least}")))
        };
        // Fewer mapped tokens than this, and evidence would be about the native ends.
        const MIDDLE: usize = 16;
        let named = |field, name: &str| {
            let error = check_name(name).err()?;
            Some((field, format!("`{}`", error.found), NameError::EXPECTED.to_owned()))
        };
        let domain = |corpus: &CorpusFile| {
            let expected = match check_domain(&corpus.name).err()? {
                DomainError::Name(_) => NameError::EXPECTED,
                DomainError::Taken => DomainError::NOT_ALL,
            };
            Some(("domain", format!("`{}`", printable(&corpus.name)), expected.to_owned()))
        };
        named("name", &self.name)
            .or_else(|| self.corpora.iter().chain(&self.held_out).find_map(domain))
            .or_else(|| at_least("stride", self.stride, 1))
            .or_else(|| at_least("tail", self.tail, 1))
            .or_else(|| at_least("context", self.context, self.head.saturating_add(self.tail).saturating_add(MIDDLE)))
            .or_else(|| at_least("k", self.k.unwrap_or(1), 1))
            .or_else(|| at_least("rank", self.rank.unwrap_or(1), 1))
            .or_else(|| self.ridge_alone())
            .or_else(|| at_least("max-k", self.max_k.unwrap_or(1), 1))
            .or_else(|| at_least("evidence", self.evidence, 1))
            .or_else(|| at_least("selection", if self.chooses() { self.selection } else { 1 }, 1))
            .or_else(|| at_least("tokens", self.tokens, self.context))
            .or_else(|| {
                let MapperKind::Mlp(settings) = &self.mapper else { return None };
                let mlp::Settings { width, epochs, batch, seed: _ } = *settings;
                let fields = [("width", width), ("epochs", epochs), ("batch", batch)];
                fields.into_iter().find_map(|(field, found)| at_least(field, found, 1))
            })
            .or_else(|| {
                let lambda = self.lambda.value;
                let sound = lambda.is_finite() && lambda >= 0.0;
                (!sound).then(|| ("lambda", lambda.to_string(), "a finite number, at least 0".to_owned()))
            })
    }
}

/// Which mapper is fitted.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum MapperKind {
    /// One map for all heads of a layer, from all heads of the selected layers.
    #[default]
    Ridge,
    /// A map per head, from one head of each selected layer.
    HeadMatched(Weighting),
    /// A network per head, from all heads of the selected layers.
    Mlp(mlp::Settings),
}

impl MapperKind {
    /// As manifests and the command line name it.
    pub fn name(&self) -> &'static str {
        match self {
            MapperKind::Ridge => "ridge",
            MapperKind::HeadMatched(_) => "head-matched",
            MapperKind::Mlp(_) => "mlp",
        }
    }

    /// Whether the fit reads the rows again: moments are enough for a ridge.
    pub fn needs_rows(&self) -> bool {
        *self != MapperKind::Ridge
    }
}

/// How far a fit has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// What is going on.
    pub stage: Stage,
    /// Steps done.
    pub done: usize,
    /// Steps of this stage.
    pub total: usize,
}

/// Stages of a fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Both models run over the calibration sequences; a step is a token.
    Capture,
    /// Both models run over the selection documents; a step is a document.
    Selection,
    /// One k after the other is fitted and tried on them; a step is a k.
    Sweep,
    /// The native ends are chosen; a step is a document or a choice.
    Ends,
    /// Parts of the fit are left out or put wrong; a step is an arm.
    Ablate,
    /// The weights are solved for; one step, or a chunk of rows.
    Solve,
    /// Networks are trained; a step is an epoch of a target layer.
    Train,
    /// The pair is looked into on selection documents; a step is a document.
    Diagnose,
    /// The pair is tried on held-out documents; a step is a document.
    Evidence,
}

impl Stage {
    /// What people call it.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Capture => "capture",
            Stage::Selection => "selection",
            Stage::Sweep => "choosing k",
            Stage::Ends => "choosing the native ends",
            Stage::Ablate => "ablation",
            Stage::Solve => "solve",
            Stage::Train => "training",
            Stage::Diagnose => "diagnostics",
            Stage::Evidence => "evidence",
        }
    }
}
