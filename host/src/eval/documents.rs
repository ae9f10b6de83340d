//! Which documents: drawn from the texts, without those that a pair knows.

use super::{EvalError, EvalOptions};
use crate::{
    engine::Model,
    fit::{
        Prompt, TEXT,
        corpus::{Corpus, CorpusError, Split, check_disjoint},
    },
    pair::Stored,
};

/// Draws documents of at least the context's tokens from each text. The texts take turns, so that what an interrupted evaluation
/// has measured is of all of them.
pub(super) fn draw(options: &EvalOptions, mappers: &[Stored], source: &Model) -> Result<Vec<Prompt>, EvalError> {
    let corpora = options.held_out.iter().map(Corpus::read).collect::<Result<Vec<_>, _>>()?;
    check_disjoint(&corpora)?;
    let mut drawn: Vec<Vec<Prompt>> = Vec::new();
    for (nth, corpus) in corpora.iter().enumerate() {
        // Several files may be of one domain: their documents are counted through.
        let before = corpora[..nth].iter().filter(|other| other.file.name == corpus.file.name);
        let first: usize = before.map(|other| other.documents.len()).sum();
        let encode = |text: &String| source.tokenizer().encode(text);
        let tokens: Vec<Vec<u32>> = corpus.documents.iter().map(encode).collect::<Result<_, _>>()?;
        let eligible: Vec<usize> = (0..tokens.len())
            .filter(|&i| tokens[i].len() >= options.context && !is_known(mappers, corpus, i))
            .collect();
        if eligible.is_empty() {
            return Err(CorpusError::TooFew {
                file: corpus.file.path.clone(),
                found: 0,
                expected: 1,
                tokens: options.context,
                roles: "to measure on; what a pair was fitted or chosen on is no evidence",
            }
            .into());
        }
        let prompt = |i: usize| Prompt {
            id: format!("{}-{}", corpus.file.name, first + i),
            domain: corpus.file.name.clone(),
            tokens: tokens[i][..options.context].to_vec(),
            text: tokens[i].get(options.context..options.context + TEXT).unwrap_or_default().to_vec(),
        };
        let split = Split::draw_evidence(&eligible, options.documents, options.seed);
        drawn.push(split.evidence.into_iter().map(prompt).collect());
    }
    let turns = drawn.iter().map(Vec::len).max().unwrap_or(0);
    Ok((0..turns).flat_map(|turn| drawn.iter().filter_map(move |text| text.get(turn))).cloned().collect())
}

/// Whether a pair was fitted on a document, or something of it chosen by it.
fn is_known(mappers: &[Stored], corpus: &Corpus, document: usize) -> bool {
    let records = mappers.iter().flat_map(|stored| &stored.card().manifest().fit.corpora);
    records
        .filter(|record| record.sha256 == corpus.digest)
        .any(|record| record.calibration.contains(&document) || record.selection.contains(&document))
}
