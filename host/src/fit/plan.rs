//! From texts to token sequences, and which of them calibrates, chooses and measures.

use std::collections::HashMap;

use kvmig_gate::{Digest, DigestBuilder};

use super::{
    FitError, FitOptions,
    corpus::{Corpus, CorpusError, Split, check_disjoint},
    digest,
};
use crate::{engine::Model, pair::CorpusRecord};

/// Tokens beyond the head that a calibration sequence needs to be worth two prefills.
const SHORTEST: usize = 16;

/// Tokens of a document behind its prefix that the arms are also measured on.
pub(crate) const TEXT: usize = 48;

/// How many times as long as a calibration sequence a document is that shows how a fit does far beyond it.
const LONG: usize = 4;

/// A document's prefix, to choose k on or to measure on.
#[derive(Clone, Debug)]
pub(crate) struct Prompt {
    /// Unique: domain and number, counted through the files of a domain.
    pub(crate) id: String,
    pub(crate) domain: String,
    pub(crate) tokens: Vec<u32>,
    /// How the document goes on: [`TEXT`] tokens, or none where it ends before.
    pub(crate) text: Vec<u32>,
}

/// Everything that the models will run over.
#[derive(Debug)]
pub(super) struct Plan {
    /// Calibration sequences in the order they are consumed.
    pub(super) sequences: Vec<Vec<u32>>,
    /// Their digests.
    pub(super) digests: Vec<Digest>,
    /// Domain of each sequence.
    pub(super) domains: Vec<String>,
    pub(super) selection: Vec<Prompt>,
    /// Selection documents once more, four times as long, where they are.
    pub(super) long: Vec<Prompt>,
    pub(super) evidence: Vec<Prompt>,
    pub(super) corpora: Vec<CorpusRecord>,
    /// Digest of what captured moments depend on beside the sequences.
    pub(super) basis: Digest,
}

impl Plan {
    /// Reads and splits the texts. Documents with fewer tokens than the context can calibrate, but not choose or measure.
    pub(super) fn new(options: &FitOptions, source: &Model, target: &Model) -> Result<Plan, FitError> {
        if options.corpora.is_empty() {
            return Err(CorpusError::None.into());
        }
        let read = |files: &[_]| files.iter().map(Corpus::read).collect::<Result<Vec<_>, _>>();
        let (fitted, held_out) = (read(&options.corpora)?, read(&options.held_out)?);
        let (fitted_count, all) = (fitted.len(), [fitted, held_out].concat());
        check_disjoint(&all)?;
        let starts = source.tokenizer().encode("")?;
        let mut plan = Draft::default();
        for (i, corpus) in all.iter().enumerate() {
            let held_out = i >= fitted_count;
            let evidence = if held_out || options.held_out.is_empty() { options.evidence } else { 0 };
            // Kept apart even where nothing is chosen: a capture then serves another fit that does choose.
            let selection = if held_out { 0 } else { options.selection };
            let alike = |other: &&Corpus| other.file.name == corpus.file.name;
            let before = if held_out { &all[fitted_count..i] } else { &all[..i] };
            let first = before.iter().filter(alike).map(|other| other.documents.len()).sum();
            let wanted = Wanted { calibrate: !held_out, selection, choose: options.chooses(), evidence, first };
            plan.add(options, source, corpus, wanted, &starts)?;
        }
        plan.finish(options, source, target)
    }
}

/// What a corpus is wanted for.
#[derive(Clone, Copy)]
struct Wanted {
    calibrate: bool,
    selection: usize,
    /// Whether the selection documents are needed.
    choose: bool,
    evidence: usize,
    /// Number of its first document among those of its domain.
    first: usize,
}

#[derive(Default)]
struct Draft {
    /// Per corpus, sequences in the order of preference.
    calibration: Vec<Vec<Vec<u32>>>,
    selection: Vec<Prompt>,
    long: Vec<Prompt>,
    evidence: Vec<Prompt>,
    corpora: Vec<CorpusRecord>,
}

impl Draft {
    fn add(
        &mut self,
        options: &FitOptions,
        source: &Model,
        corpus: &Corpus,
        wanted: Wanted,
        starts: &[u32],
    ) -> Result<(), FitError> {
        let encode = |text: &String| source.tokenizer().encode(text);
        let tokens: Vec<Vec<u32>> = corpus.documents.iter().map(encode).collect::<Result<_, _>>()?;
        let (long, short): (Vec<usize>, Vec<usize>) =
            (0..tokens.len()).partition(|&i| tokens[i].len() >= options.context);
        let split = if wanted.calibrate {
            // Of a few documents none are kept for a choice that is not made.
            let spare = if wanted.choose { usize::MAX } else { long.len() / 5 };
            let mut split = Split::draw(&long, wanted.selection.min(spare), wanted.evidence, options.seed);
            split.calibration.extend(short.iter().filter(|&&i| tokens[i].len() >= options.head + SHORTEST));
            split.calibration.sort_unstable();
            split
        } else {
            Split::draw_evidence(&long, wanted.evidence, options.seed)
        };
        let roles = [
            (wanted.calibrate, split.calibration.len(), "to calibrate"),
            (wanted.calibrate && wanted.choose, split.selection.len(), "to choose k"),
            (wanted.evidence > 0, split.evidence.len(), "to measure"),
        ];
        if roles.iter().any(|(wanted, count, _)| *wanted && *count == 0) {
            return Err(CorpusError::TooFew {
                file: corpus.file.path.clone(),
                found: long.len(),
                expected: roles.iter().filter(|(wanted, ..)| *wanted).count(),
                tokens: options.context,
                roles: "one each to calibrate, to choose k where it is not given, and to measure",
            }
            .into());
        }
        let prompt_of = |i: usize, length: usize| Prompt {
            id: format!("{}-{}", corpus.file.name, wanted.first + i),
            domain: corpus.file.name.clone(),
            tokens: tokens[i][..length].to_vec(),
            text: tokens[i].get(length..length + TEXT).unwrap_or_default().to_vec(),
        };
        let prompt = |&i: &usize| prompt_of(i, options.context);
        self.selection.extend(split.selection.iter().map(prompt));
        let length = LONG * options.context;
        let long = split.selection.iter().filter(|&&i| tokens[i].len() >= length);
        self.long.extend(long.map(|&i| prompt_of(i, length)));
        self.evidence.extend(split.evidence.iter().map(prompt));
        if wanted.calibrate {
            let documents: Vec<&[u32]> = split.calibration.iter().map(|&i| tokens[i].as_slice()).collect();
            self.calibration.push(sequences(&documents, options.context, options.head + SHORTEST, starts));
        }
        self.corpora.push(CorpusRecord {
            name: corpus.file.name.clone(),
            file: corpus.file_name(),
            sha256: corpus.digest,
            calibration: split.calibration,
            selection: split.selection,
            evidence: split.evidence,
        });
        Ok(())
    }

    fn finish(self, options: &FitOptions, source: &Model, target: &Model) -> Result<Plan, FitError> {
        let fitted = self.corpora.iter().filter(|corpus| !corpus.calibration.is_empty());
        let named = fitted.zip(&self.calibration);
        let domain_of: HashMap<Digest, String> = named
            .flat_map(|(corpus, sequences)| sequences.iter().map(|tokens| (digest(tokens), corpus.name.clone())))
            .collect();
        let sequences = up_to(interleave(self.calibration), options.tokens);
        let found = sequences.iter().map(Vec::len).sum();
        if found < options.tokens {
            return Err(CorpusError::TooFewTokens { found, expected: options.tokens }.into());
        }
        let mut basis = DigestBuilder::new("fit-basis")
            .field("source", source.digest().as_bytes())
            .field("target", target.digest().as_bytes());
        for setting in [options.head, options.stride, options.native_layers] {
            basis = basis.field("setting", &(setting as u64).to_le_bytes());
        }
        let digests: Vec<Digest> = sequences.iter().map(|tokens| digest(tokens)).collect();
        let domains = digests.iter().map(|digest| domain_of[digest].clone()).collect();
        let Draft { selection, long, evidence, corpora, .. } = self;
        Ok(Plan { sequences, digests, domains, selection, long, evidence, corpora, basis: basis.finish() })
    }
}

/// Cuts documents into sequences of at most `context` tokens: the first of every document, then the second, and so on, so that
/// a budget is spent on many documents rather than on few. Later ones begin with `starts`, as a text of the model does.
fn sequences(documents: &[&[u32]], context: usize, shortest: usize, starts: &[u32]) -> Vec<Vec<u32>> {
    let step = context - starts.len();
    let body = |document: &[u32]| document.strip_prefix(starts).unwrap_or(document).to_vec();
    let bodies: Vec<Vec<u32>> = documents.iter().map(|document| body(document)).collect();
    let rounds = bodies.iter().map(|body| body.len().div_ceil(step)).max().unwrap_or(0);
    let cut = |round: usize| {
        let windows = bodies.iter().filter_map(move |body| body.chunks(step).nth(round));
        windows.map(|window| [starts, window].concat()).filter(|tokens| tokens.len() >= shortest)
    };
    (0..rounds).flat_map(cut).collect()
}

/// One of each list in turn, until all are empty: the domains share a budget evenly.
fn interleave(lists: Vec<Vec<Vec<u32>>>) -> Vec<Vec<u32>> {
    let longest = lists.iter().map(Vec::len).max().unwrap_or(0);
    (0..longest).flat_map(|i| lists.iter().filter_map(move |list| list.get(i))).cloned().collect()
}

/// The sequences up to and with the one that reaches `tokens`.
fn up_to(sequences: Vec<Vec<u32>>, tokens: usize) -> Vec<Vec<u32>> {
    let mut total = 0;
    let within = |sequence: &Vec<u32>| {
        let before = total;
        total += sequence.len();
        before < tokens
    };
    sequences.into_iter().take_while(within).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_take_turns_and_later_windows_begin_as_texts_do() {
        let (long, short): (Vec<u32>, Vec<u32>) = ([vec![9], (0..7).collect()].concat(), vec![9, 50, 51]);
        let cut = sequences(&[&long, &short], 4, 3, &[9]);
        assert_eq!(
            cut,
            [vec![9, 0, 1, 2], vec![9, 50, 51], vec![9, 3, 4, 5]],
            "the last window of one token is too short"
        );
        assert_eq!(sequences(&[&[1, 2, 3]], 2, 1, &[]), [vec![1, 2], vec![3]]);
    }

    #[test]
    fn a_budget_is_shared_by_the_domains() {
        let lists = vec![vec![vec![1; 4], vec![2; 4], vec![3; 4]], vec![vec![10; 4]]];
        let sequences = up_to(interleave(lists), 9);
        assert_eq!(sequences, [vec![1; 4], vec![10; 4], vec![2; 4]]);
    }
}
