//! What can go wrong with a fit.

use std::{io, path::PathBuf};

use kvmig_gate::GateError;

use super::{LockError, corpus::CorpusError, linalg::LinalgError, mlp::MlpError, rows::RowsError, state::StateError};
use crate::{
    engine::{EngineError, OtherTokenizer},
    measure::{LogError, audit::AuditError},
    migrate::{MapperError, TrialError},
    pair::PairError,
};

/// A fit that made no pair.
#[derive(Debug, thiserror::Error)]
pub enum FitError {
    /// A setting that no fit can have.
    #[error("{field}: found {found}, expected {expected}")]
    Setting {
        /// The setting.
        field: &'static str,
        /// What was given.
        found: String,
        /// What can be.
        expected: String,
    },
    /// Somebody else fits into this place, or it can't be locked.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The models are no siblings.
    #[error(transparent)]
    Tokenizers(#[from] OtherTokenizer),
    /// Too few rows for the number of features.
    #[error(
        "{rows} calibration rows for {features} features (k = {k}), expected at least {expected}: raise --tokens, give a \
         larger corpus, or ask for fewer features (a smaller --k, no --joint)"
    )]
    TooFewRows {
        /// Rows there are.
        rows: u64,
        /// Source layers per target layer.
        k: usize,
        /// Columns of the regression.
        features: usize,
        /// Rows there should be.
        expected: usize,
    },
    /// The caller stopped; what was done is kept.
    #[error("stopped during {stage}; {} holds what was done: run the same command again to go on", file.display())]
    Interrupted {
        /// The stage.
        stage: &'static str,
        /// Where it is kept.
        file: PathBuf,
    },
    /// The caller stopped in a stage that begins anew.
    #[error("stopped during {stage}; what was captured is kept: run the same command again to go on")]
    Stopped {
        /// The stage.
        stage: &'static str,
    },
    /// The texts can't be fitted on.
    #[error(transparent)]
    Corpus(#[from] CorpusError),
    /// What was captured can't be kept or used.
    #[error(transparent)]
    State(#[from] StateError),
    /// Rows can't be kept or read.
    #[error(transparent)]
    Rows(#[from] RowsError),
    /// No networks came out of the training.
    #[error(transparent)]
    Mlp(#[from] MlpError),
    /// What was measured can't be kept.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The moments have no solution.
    #[error(transparent)]
    Linalg(#[from] LinalgError),
    /// A model computes numbers that are none: fitted on, they would spoil everything that was captured.
    #[error(
        "{model}: {what} of calibration sequence {sequence} ({domain}) are not finite: the model is damaged, or overflows in single \
         precision: fetch its files again, or take another model; nothing of that sequence is kept"
    )]
    NotFinite {
        /// The model.
        model: String,
        /// Which numbers.
        what: String,
        /// Number of the sequence.
        sequence: usize,
        /// Its domain.
        domain: String,
    },
    /// A model failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The pair can't be put together or written.
    #[error(transparent)]
    Pair(Box<PairError>),
    /// There is no place for what is needed for a while.
    #[error("no temporary folder: {0}; set TMPDIR to one that can be written")]
    Scratch(#[source] io::Error),
    /// The module or the device can't take the pair.
    #[error(transparent)]
    Mapper(Box<MapperError>),
    /// What a trial came to could not be written down.
    #[error(transparent)]
    Gate(Box<GateError>),
    /// A held-out document could not be mapped on trial.
    #[error(transparent)]
    Trial(Box<TrialError>),
    /// A held-out document could not be measured.
    #[error(transparent)]
    Audit(#[from] AuditError),
    /// The pair is written, but the captured state can't be removed.
    #[error("the pair is written; {}: can't be removed: {source}", file.display())]
    Leftover {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
}

// Boxed, because they are large.
impl From<MapperError> for FitError {
    fn from(error: MapperError) -> FitError {
        FitError::Mapper(Box::new(error))
    }
}

impl From<GateError> for FitError {
    fn from(error: GateError) -> FitError {
        FitError::Gate(Box::new(error))
    }
}

impl From<PairError> for FitError {
    fn from(error: PairError) -> FitError {
        FitError::Pair(Box::new(error))
    }
}

impl From<TrialError> for FitError {
    fn from(error: TrialError) -> FitError {
        FitError::Trial(Box::new(error))
    }
}
