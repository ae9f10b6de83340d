//! What mappers are worth, side by side on the same held-out documents: every mapper with every choice of native ends, beside the
//! arms that each has to beat (METHOD §5).
//!
//! A document is run through both models once, and every arm is measured on it before the next: what is common to all arms is
//! paid once, and whatever else the machine does meets all of them. What was measured of a document is kept at once where
//! [`EvalOptions::out`] says so, and an interrupted evaluation goes on behind it.

mod arms;
mod documents;
mod results;
mod summary;

use std::{fmt, ops::ControlFlow, path::PathBuf, str::FromStr};

use kvmig_gate::{Gate, GateError};
use serde::{Deserialize, Serialize};

pub use results::{Arm, Mapping, Measured, Results, Subject};
pub use summary::{ArmName, Domain, On, Row, Verdict, summarise};

use crate::{
    device::Device,
    engine::{EngineError, Model, OtherTokenizer},
    fit::{CorpusFile, corpus::CorpusError},
    measure::{Log, LogError, OfAnother, audit::AuditError},
    migrate::{MapperError, TrialError},
    pair::{PairError, Stored},
};
use arms::Bench;

/// What to evaluate on.
#[derive(Clone, Debug)]
pub struct EvalOptions {
    /// Texts; documents that a pair was fitted or chosen on are left out.
    pub held_out: Vec<CorpusFile>,
    /// Documents of each text at most.
    pub documents: usize,
    /// Tokens of a document's prefix.
    pub context: usize,
    /// Seed of the draw of documents.
    pub seed: u64,
    /// Native ends that every mapper is tried with; each pair's own where there are none.
    pub ends: Vec<Ends>,
    /// Bytes that mappers' weights may take on the device; as many as there are where none is given.
    pub device_budget: Option<u64>,
    /// Where results are kept as they come in.
    pub out: Option<PathBuf>,
}

/// What the target computes itself: the first `head` positions and the last `tail`. Written `HEAD+TAIL`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ends {
    /// First positions.
    pub head: usize,
    /// Last prompt tokens, at least 1.
    pub tail: usize,
}

impl fmt::Display for Ends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.head, self.tail)
    }
}

impl FromStr for Ends {
    type Err = String;

    fn from_str(text: &str) -> Result<Ends, String> {
        let parsed = text.split_once('+').and_then(|(head, tail)| {
            Some(Ends { head: head.trim().parse().ok()?, tail: tail.trim().parse().ok().filter(|&tail| tail > 0)? })
        });
        parsed.ok_or_else(|| "expected HEAD+TAIL in tokens, the tail at least 1, such as 4+32".to_owned())
    }
}

/// An evaluation that could not be made.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// A setting that nothing can be measured with.
    #[error("{field}: found {found}, expected {expected}")]
    Setting {
        /// The setting.
        field: &'static str,
        /// What it is.
        found: String,
        /// What it may be.
        expected: String,
    },
    /// The texts can't be read, or are too few.
    #[error(transparent)]
    Corpus(#[from] CorpusError),
    /// A pair can't be read.
    #[error(transparent)]
    Pair(Box<PairError>),
    /// A mapper can't be made ready.
    #[error(transparent)]
    Mapper(Box<MapperError>),
    /// The models are no siblings.
    #[error(transparent)]
    Tokenizer(Box<OtherTokenizer>),
    /// A model failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A mapper failed.
    #[error("{mapper}, on document {document}: {source}")]
    Trial {
        /// The pair, the kind, and the ends.
        mapper: String,
        /// The document.
        document: String,
        /// Why.
        source: Box<TrialError>,
    },
    /// What came of it can't be measured.
    #[error(transparent)]
    Audit(#[from] AuditError),
    /// The gate can't write it down.
    #[error(transparent)]
    Gate(Box<GateError>),
    /// Results can't be kept.
    #[error(transparent)]
    Log(#[from] LogError),
    /// It was told to stop.
    #[error(
        "stopped after {done} of {total} documents{}",
        .file.as_ref().map_or(String::new(), |file| format!(
            "; they are kept in {}, and the same command goes on from there", file.display()
        ))
    )]
    Interrupted {
        /// Documents measured.
        done: usize,
        /// Documents there are.
        total: usize,
        /// Where they are kept.
        file: Option<PathBuf>,
    },
}

// Boxed, because they are large.
macro_rules! boxed {
    ($($variant:ident: $source:ty),*) => {$(
        impl From<$source> for EvalError {
            fn from(error: $source) -> EvalError {
                EvalError::$variant(Box::new(error))
            }
        }
    )*};
}
boxed!(Pair: PairError, Mapper: MapperError, Tokenizer: OtherTokenizer, Gate: GateError);

/// Measures every arm on every document. `watch` is told (done, total) documents, and may answer `Break`.
///
/// # Errors
/// [`EvalError`].
pub fn evaluate(
    options: &EvalOptions,
    mappers: &[Stored],
    (source, target): (&Model, &Model),
    gate: &Gate,
    device: &Device,
    watch: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Results, EvalError> {
    if let Some(path) = &options.out {
        Log::<Measured>::check::<Subject>(path)?;
    }
    target.tokenizer().check_sibling(source.tokenizer())?;
    mappers.iter().try_for_each(|stored| stored.card().check(source, target))?;
    check(options, mappers)?;
    let documents = documents::draw(options, mappers, source)?;
    let bench = Bench::new(options, mappers, (source, target), gate, device)?;
    let mut kept: Option<Log<Measured>> =
        options.out.as_ref().map(|path| Log::open(path, bench.subject(), OfAnother::Kept)).transpose()?;
    let mut results = Results { subject: bench.subject().clone(), documents: Vec::with_capacity(documents.len()) };
    for (done, document) in documents.iter().enumerate() {
        if let Some(measured) = kept.as_ref().and_then(|log| log.entries().iter().find(|m| m.is_of(document))) {
            results.documents.push(measured.clone());
            continue;
        }
        if watch(done, documents.len()).is_break() {
            return Err(EvalError::Interrupted { done, total: documents.len(), file: options.out.clone() });
        }
        let measured = bench.measure(document)?;
        if let Some(log) = &mut kept {
            log.push(measured.clone())?;
        }
        results.documents.push(measured);
    }
    let _ = watch(documents.len(), documents.len());
    Ok(results)
}

/// What can be told before anything runs.
fn check(options: &EvalOptions, mappers: &[Stored]) -> Result<(), EvalError> {
    let refused = |field, found: String, expected: String| Err(EvalError::Setting { field, found, expected });
    if options.held_out.is_empty() {
        return refused("held-out", "no text".to_owned(), "at least one --held-out NAME=FILE".to_owned());
    }
    if options.documents == 0 {
        return refused("documents", "0".to_owned(), "at least 1".to_owned());
    }
    if mappers.is_empty() {
        return refused("pair", "none".to_owned(), "at least one --pair FOLDER".to_owned());
    }
    let own = mappers.iter().map(|stored| {
        let identity = stored.card().identity();
        Ends { head: identity.head, tail: identity.tail }
    });
    for ends in own.filter(|_| options.ends.is_empty()).chain(options.ends.iter().copied()) {
        // Fewer mapped tokens than native ones, and it is these that are measured.
        let least = 2 * (ends.head + ends.tail);
        if options.context < least {
            let found = format!("{} tokens with native ends {ends}", options.context);
            return refused("context", found, format!("at least {least}, so that half of them are mapped"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_a_head_and_a_tail() {
        assert_eq!("4+32".parse(), Ok(Ends { head: 4, tail: 32 }));
        assert_eq!("0+1".parse::<Ends>().unwrap().to_string(), "0+1");
        for wrong in ["", "4", "4+", "+", "4+0", "-1+3", "4+32+1", "99999999999999999999+1"] {
            assert!(wrong.parse::<Ends>().is_err(), "{wrong}");
        }
    }
}
