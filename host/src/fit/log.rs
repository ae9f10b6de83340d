//! Evidence as it comes in: one line a document, so that an interrupted fit need not measure again.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufRead as _, Write as _},
    path::{Path, PathBuf},
};

use kvmig_gate::{Digest, DocumentOutcome};
use serde::{Deserialize, Serialize};

/// A log that can't be kept.
#[derive(Debug, thiserror::Error)]
#[error("{}: can't keep evidence there: {source}", file.display())]
pub struct LogError {
    /// The file.
    file: PathBuf,
    /// Why.
    source: io::Error,
}

/// What the outcomes are of; the first line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Subject {
    /// The artifact that was tried.
    pub(super) artifact: Digest,
    /// Where it ran.
    pub(super) backend: String,
    /// Digest of the documents.
    pub(super) documents: Digest,
}

/// Outcomes so far, and the file they are kept in.
#[derive(Debug)]
pub(super) struct Log {
    path: PathBuf,
    file: File,
    pub(super) outcomes: Vec<DocumentOutcome>,
}

impl Log {
    /// Opens the log of `subject`. One of another subject is begun anew; a line that an interrupt cut short is dropped.
    pub(super) fn open(path: &Path, subject: &Subject) -> Result<Log, LogError> {
        let failed = |source| LogError { file: path.to_owned(), source };
        let outcomes = read(path, subject).map_err(failed)?;
        let mut text = line(subject);
        outcomes.iter().for_each(|outcome| text.push_str(&line(outcome)));
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut draft = tempfile::NamedTempFile::new_in(parent).map_err(failed)?;
        draft.write_all(text.as_bytes()).map_err(failed)?;
        draft.persist(path).map_err(|error| failed(error.error))?;
        let file = OpenOptions::new().append(true).open(path).map_err(failed)?;
        Ok(Log { path: path.to_owned(), file, outcomes })
    }

    /// Adds an outcome.
    pub(super) fn push(&mut self, outcome: DocumentOutcome) -> Result<(), LogError> {
        let written = self.file.write_all(line(&outcome).as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(|source| LogError { file: self.path.clone(), source })?;
        self.outcomes.push(outcome);
        Ok(())
    }
}

fn line<T: Serialize>(value: &T) -> String {
    let json = serde_json::to_string(value).expect("outcomes hold strings and numbers only");
    format!("{json}\n")
}

fn read(path: &Path, subject: &Subject) -> io::Result<Vec<DocumentOutcome>> {
    let file = match fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut lines = io::BufReader::new(file).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    if serde_json::from_str::<Subject>(&first).ok().as_ref() != Some(subject) {
        return Ok(Vec::new());
    }
    let mut outcomes = Vec::new();
    for line in lines {
        match serde_json::from_str(&line?) {
            Ok(outcome) => outcomes.push(outcome),
            Err(_) => break,
        }
    }
    Ok(outcomes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvmig_gate::Quality;

    fn outcome(id: &str) -> DocumentOutcome {
        let (cosine_mean, cosine_worst_layer) = (Some(0.1 + 0.2), None);
        let quality =
            Quality { agreement: 0.5, kl_nats: 1.0 / 3.0, nll_gap_nats: -0.1, cosine_mean, cosine_worst_layer, n: 32 };
        DocumentOutcome {
            id: id.to_owned(),
            domain: "code".into(),
            tokens: 384,
            mapped: quality,
            ends_only: quality,
            no_prefix: quality,
            source: quality,
            handoff_ms: 1.5,
            reprefill_ms: 2.5,
        }
    }

    #[test]
    fn what_was_measured_is_found_again_to_the_bit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let subject =
            Subject { artifact: Digest::of(b"a"), backend: "cpu".into(), documents: Digest::of(b"documents") };
        let mut log = Log::open(&path, &subject).unwrap();
        log.push(outcome("code-1")).unwrap();
        log.push(outcome("code-2")).unwrap();
        drop(log);
        // A crash in the middle of the third line.
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"id\":\"code-3\",\"dom").unwrap();
        let mut log = Log::open(&path, &subject).unwrap();
        assert_eq!(log.outcomes, [outcome("code-1"), outcome("code-2")]);
        log.push(outcome("code-3")).unwrap();
        drop(log);
        assert_eq!(Log::open(&path, &subject).unwrap().outcomes.len(), 3);
        let other = Subject { artifact: Digest::of(b"b"), ..subject };
        assert!(
            Log::open(&path, &other).unwrap().outcomes.is_empty(),
            "evidence of another artifact is not taken over"
        );
    }
}
