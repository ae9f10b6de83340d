//! Text files of documents, and which document does what.

use std::{
    fs, io,
    path::{Path, PathBuf},
    str::FromStr,
};

use kvmig_gate::Digest;

use crate::{
    measure::{random::Random, summary::ALL},
    pair::{NameError, check_name},
};

/// The line that separates documents.
const SEPARATOR: &str = "<|end|>";

/// A text file and the domain it stands for: `NAME=FILE`, or `FILE` for the domain of the file's stem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CorpusFile {
    /// Domain, such as `code`.
    pub name: String,
    /// The file.
    pub path: PathBuf,
}

impl FromStr for CorpusFile {
    type Err = DomainError;

    fn from_str(s: &str) -> Result<CorpusFile, DomainError> {
        let file = match s.split_once('=') {
            Some((name, path)) if !name.is_empty() && !name.contains(['/', '\\']) => {
                CorpusFile { name: name.to_owned(), path: PathBuf::from(path) }
            }
            _ => {
                let path = PathBuf::from(s);
                let name = path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
                CorpusFile { name, path }
            }
        };
        check_domain(&file.name)?;
        Ok(file)
    }
}

/// A file whose domain has no name that people, policies and the ledger could use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DomainError {
    /// It is no name at all.
    #[error("domain: {0}; give it one as NAME=FILE")]
    Name(#[from] NameError),
    /// It is the name of the summary over every domain.
    #[error("domain: found `{ALL}`, expected {}; give it another as NAME=FILE", Self::NOT_ALL)]
    Taken,
}

impl DomainError {
    /// What a domain may be called beside any name.
    pub(super) const NOT_ALL: &str = "another name: it stands for all domains together";
}

/// Whether a domain can be called this.
pub(super) fn check_domain(name: &str) -> Result<(), DomainError> {
    check_name(name)?;
    if name == ALL { Err(DomainError::Taken) } else { Ok(()) }
}

impl CorpusFile {
    /// Whether the file is there and a text: a look before models are loaded, which takes a while.
    ///
    /// # Errors
    /// [`CorpusError::Read`], [`CorpusError::NotText`].
    pub fn check(&self) -> Result<(), CorpusError> {
        Corpus::read(self).map(drop)
    }
}

/// Texts that can't be fitted on.
#[derive(Debug, thiserror::Error)]
pub enum CorpusError {
    /// The file can't be read.
    #[error("{}: can't be read: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is not text.
    #[error("{}: byte {at} is no UTF-8: expected a text of documents separated by `<|end|>` lines", file.display())]
    NotText {
        /// The file.
        file: PathBuf,
        /// Offset of the first such byte.
        at: usize,
    },
    /// There is nothing to fit on.
    #[error("no corpus was given: give at least one --corpus NAME=FILE")]
    None,
    /// Too few documents for what they are needed for.
    #[error(
        "{}: found {found} documents of at least {tokens} tokens, expected at least {expected} ({roles}); \
         give a larger corpus or a smaller --context",
        file.display()
    )]
    TooFew {
        /// The file.
        file: PathBuf,
        /// Documents that are long enough.
        found: usize,
        /// Documents that are needed.
        expected: usize,
        /// Tokens that a document needs.
        tokens: usize,
        /// What they are needed for.
        roles: &'static str,
    },
    /// Fewer tokens than shall be fitted on.
    #[error(
        "the corpora hold {found} calibration tokens beside the documents that are held out, expected at least {expected}: give a \
         larger corpus, or --tokens {found}"
    )]
    TooFewTokens {
        /// Tokens of all calibration sequences.
        found: usize,
        /// Tokens asked for.
        expected: usize,
    },
    /// The same document would be fitted on and measured on.
    #[error(
        "{}: document {index} is also document {other_index} of {}: documents to fit, choose and measure on have to differ",
        file.display(), other.display()
    )]
    Shared {
        /// The file.
        file: PathBuf,
        /// The document.
        index: usize,
        /// The other file.
        other: PathBuf,
        /// The document there.
        other_index: usize,
    },
}

/// A file's documents.
#[derive(Clone, Debug)]
pub(crate) struct Corpus {
    pub(crate) file: CorpusFile,
    pub(crate) digest: Digest,
    pub(crate) documents: Vec<String>,
}

impl Corpus {
    /// Reads a file; documents of white space only are left out.
    pub(crate) fn read(file: &CorpusFile) -> Result<Corpus, CorpusError> {
        let bytes = fs::read(&file.path).map_err(|source| CorpusError::Read { file: file.path.clone(), source })?;
        let digest = Digest::of(&bytes);
        let text = String::from_utf8(bytes)
            .map_err(|error| CorpusError::NotText { file: file.path.clone(), at: error.utf8_error().valid_up_to() })?;
        Ok(Corpus { file: file.clone(), digest, documents: documents(&text) })
    }

    /// The file's name without folders: what a manifest may say without telling whose machine it was.
    pub(super) fn file_name(&self) -> String {
        let path: &Path = &self.file.path;
        kvmig_gate::parse::printable(&path.file_name().unwrap_or(path.as_os_str()).to_string_lossy())
    }
}

fn documents(text: &str) -> Vec<String> {
    let mut documents = vec![String::new()];
    for line in text.split_inclusive('\n') {
        if line.trim_end() == SEPARATOR {
            documents.push(String::new());
        } else if let Some(document) = documents.last_mut() {
            document.push_str(line);
        }
    }
    let trimmed = documents.iter().map(|document| document.trim_matches(['\n', '\r']));
    trimmed.filter(|document| !document.trim().is_empty()).map(str::to_owned).collect()
}

/// Refuses corpora that hold one document twice.
pub(crate) fn check_disjoint(corpora: &[Corpus]) -> Result<(), CorpusError> {
    let mut seen = std::collections::HashMap::new();
    for corpus in corpora {
        for (index, document) in corpus.documents.iter().enumerate() {
            let digest = Digest::of(document.as_bytes());
            if let Some((other, other_index)) = seen.insert(digest, (&corpus.file.path, index)) {
                let (file, other) = (corpus.file.path.clone(), PathBuf::clone(other));
                return Err(CorpusError::Shared { file, index, other, other_index });
            }
        }
    }
    Ok(())
}

/// Documents of one corpus by what they are for; indices, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Split {
    pub(crate) calibration: Vec<usize>,
    pub(crate) selection: Vec<usize>,
    pub(crate) evidence: Vec<usize>,
}

impl Split {
    /// Draws from `eligible` documents: `evidence` and `selection` of them (at most two fifths and one fifth), the rest to
    /// calibrate on.
    pub(crate) fn draw(eligible: &[usize], selection: usize, evidence: usize, seed: u64) -> Split {
        let mut order = eligible.to_vec();
        Random::new(seed).shuffle(&mut order);
        let share = |wanted: usize, fifths: usize| wanted.min((eligible.len() * fifths / 5).max(1));
        let (evidence, selection) = (share(evidence, 2), share(selection, 1));
        let mut take = |n: usize| {
            let mut taken: Vec<usize> = order.drain(..n.min(order.len())).collect();
            taken.sort_unstable();
            taken
        };
        let (evidence, selection) = (take(evidence), take(selection));
        let calibration = take(usize::MAX);
        Split { calibration, selection, evidence }
    }

    /// Draws up to `evidence` of documents that are for nothing else.
    pub(crate) fn draw_evidence(eligible: &[usize], evidence: usize, seed: u64) -> Split {
        let mut order = eligible.to_vec();
        Random::new(seed).shuffle(&mut order);
        order.truncate(evidence);
        order.sort_unstable();
        Split { evidence: order, ..Split::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_is_named_or_the_files_stem() {
        let parse = |s: &str| {
            let CorpusFile { name, path } = s.parse().unwrap();
            (name, path.display().to_string())
        };
        assert_eq!(parse("code=a/b.txt"), ("code".into(), "a/b.txt".into()));
        assert_eq!(parse("a/code.calib.txt"), ("code.calib".into(), "a/code.calib.txt".into()));
        assert_eq!(parse("a/x=y/prose.txt"), ("prose".into(), "a/x=y/prose.txt".into()));
        assert_eq!(parse("letters=a/my letters.txt"), ("letters".into(), "a/my letters.txt".into()));
        let error = "a/my letters.txt".parse::<CorpusFile>().unwrap_err().to_string();
        assert!(error.contains("`my letters`") && error.contains("NAME=FILE"), "{error}");
        // The summary over every domain has this name.
        assert_eq!("a/all.txt".parse::<CorpusFile>(), Err(DomainError::Taken));
        assert_eq!(parse("All=a/all.txt"), ("All".into(), "a/all.txt".into()));
    }

    #[test]
    fn separators_are_lines_of_their_own() {
        let text = "one\n\n<|end|>\n  two <|end|> still\r\n<|end|>\r\n \n<|end|>\nthree";
        assert_eq!(documents(text), ["one", "  two <|end|> still", "three"]);
    }

    #[test]
    fn a_split_is_disjoint_seeded_and_complete() {
        let eligible: Vec<usize> = (0..40).map(|i| 2 * i).collect();
        let split = Split::draw(&eligible, 4, 12, 7);
        assert_eq!((split.calibration.len(), split.selection.len(), split.evidence.len()), (24, 4, 12));
        let mut all = [split.calibration.clone(), split.selection.clone(), split.evidence.clone()].concat();
        all.sort_unstable();
        assert_eq!(all, eligible);
        assert_eq!(split, Split::draw(&eligible, 4, 12, 7));
        assert_ne!(split, Split::draw(&eligible, 4, 12, 8));
    }

    /// A small corpus keeps most of its documents for the fit, and gives each role one at least.
    #[test]
    fn a_small_corpus_is_shared_out() {
        let split = Split::draw(&(0..10).collect::<Vec<_>>(), 8, 32, 1);
        assert_eq!((split.calibration.len(), split.selection.len(), split.evidence.len()), (4, 2, 4));
        let split = Split::draw(&(0..3).collect::<Vec<_>>(), 8, 32, 1);
        assert_eq!((split.calibration.len(), split.selection.len(), split.evidence.len()), (1, 1, 1));
        let split = Split::draw(&(0..10).collect::<Vec<_>>(), 0, 0, 1);
        assert_eq!((split.calibration.len(), split.selection.len(), split.evidence.len()), (10, 0, 0));
    }

    #[test]
    fn one_document_in_two_files_is_refused() {
        let corpus = |path: &str, documents: &[&str]| Corpus {
            file: CorpusFile { name: "x".into(), path: path.into() },
            digest: Digest::of(b""),
            documents: documents.iter().map(|d| (*d).to_owned()).collect(),
        };
        let corpora = [corpus("a", &["one", "two"]), corpus("b", &["three", "two"])];
        let error = check_disjoint(&corpora).unwrap_err().to_string();
        assert!(error.contains("b: document 1 is also document 1 of a"), "{error}");
    }
}
