//! Evidence as it comes in: one line a document, so that an interrupted fit need not measure again.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use kvmig_gate::{Digest, DocumentOutcome};
use serde::{Deserialize, Serialize};

use crate::measure::summary::TextArms;

/// A log that can't be kept.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The file can't be read.
    #[error("{}: can't be read: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file can't be written: a full disk, most often.
    #[error(
        "{}: can't be written: {source}; the documents measured before are kept: make room and run the same command again, or \
         choose an --out on another disk",
        file.display()
    )]
    Write {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is no such log: what is replaced or removed in the end must be ours.
    #[error("{}: begins like no evidence of this version: remove it, or choose another --out", file.display())]
    Foreign {
        /// The file.
        file: PathBuf,
    },
}

/// What the outcomes are of; the first line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Subject {
    /// The artifact that was tried.
    pub(super) artifact: Digest,
    /// Where it ran.
    pub(super) backend: String,
    /// In which numbers the models computed.
    pub(super) precision: String,
}

/// An outcome and the digest of what it is about; one line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Entry {
    /// Digest of the document's tokens.
    pub(super) tokens: Digest,
    /// What came of it.
    pub(super) outcome: DocumentOutcome,
    /// And on its own next tokens, where it has enough.
    pub(super) text: Option<TextArms>,
}

/// Outcomes so far, and the file they are kept in.
#[derive(Debug)]
pub(super) struct Log {
    path: PathBuf,
    file: File,
    entries: Vec<Entry>,
}

impl Log {
    /// Whether what is at `path` may become a log; nothing is changed.
    pub(super) fn check(path: &Path) -> Result<(), LogError> {
        read(path, None).map(drop)
    }

    /// Opens the log of `subject`. One of another subject is begun anew; a line that an interrupt cut short is dropped.
    pub(super) fn open(path: &Path, subject: &Subject) -> Result<Log, LogError> {
        let failed = |source| LogError::Write { file: path.to_owned(), source };
        let entries = read(path, Some(subject))?;
        let mut text = line(subject);
        entries.iter().for_each(|entry| text.push_str(&line(entry)));
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut draft = tempfile::NamedTempFile::new_in(parent).map_err(failed)?;
        draft.write_all(text.as_bytes()).map_err(failed)?;
        draft.persist(path).map_err(|error| failed(error.error))?;
        let file = OpenOptions::new().append(true).open(path).map_err(failed)?;
        Ok(Log { path: path.to_owned(), file, entries })
    }

    /// What came of the document `id` with these tokens, if it was measured.
    pub(super) fn find(&self, id: &str, tokens: Digest) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.tokens == tokens && entry.outcome.id == id)
    }

    /// Adds an outcome.
    pub(super) fn push(&mut self, entry: Entry) -> Result<(), LogError> {
        let written = self.file.write_all(line(&entry).as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(|source| LogError::Write { file: self.path.clone(), source })?;
        self.entries.push(entry);
        Ok(())
    }
}

fn line<T: Serialize>(value: &T) -> String {
    let json = serde_json::to_string(value).expect("outcomes hold strings and numbers only");
    format!("{json}\n")
}

fn read(path: &Path, subject: Option<&Subject>) -> Result<Vec<Entry>, LogError> {
    let failed = |source| LogError::Read { file: path.to_owned(), source };
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut lines = bytes.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
    let Some(first) = lines.next() else { return Ok(Vec::new()) };
    let Ok(found) = serde_json::from_slice::<Subject>(first) else {
        return Err(LogError::Foreign { file: path.to_owned() });
    };
    if subject.is_some_and(|subject| found != *subject) {
        return Ok(Vec::new());
    }
    let mut entries = Vec::new();
    for line in lines {
        match serde_json::from_slice(line) {
            Ok(entry) => entries.push(entry),
            Err(_) => break,
        }
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvmig_gate::Quality;

    fn entry(id: &str) -> Entry {
        let (cosine_mean, cosine_worst_layer) = (Some(0.1 + 0.2), None);
        let quality =
            Quality { agreement: 0.5, kl_nats: 1.0 / 3.0, nll_gap_nats: -0.1, cosine_mean, cosine_worst_layer, n: 32 };
        let outcome = DocumentOutcome {
            id: id.to_owned(),
            domain: "code".into(),
            tokens: 384,
            mapped: quality,
            ends_only: quality,
            no_prefix: quality,
            source: quality,
            handoff_ms: 1.5,
            reprefill_ms: 2.5,
        };
        let text = TextArms { mapped: quality, ends_only: quality, no_prefix: quality, source: quality };
        Entry { tokens: Digest::of(id.as_bytes()), outcome, text: (id != "code-2").then_some(text) }
    }

    #[test]
    fn what_was_measured_is_found_again_to_the_bit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let subject = Subject { artifact: Digest::of(b"a"), backend: "cpu".into(), precision: "dequantised".into() };
        let mut log = Log::open(&path, &subject).unwrap();
        log.push(entry("code-1")).unwrap();
        log.push(entry("code-2")).unwrap();
        drop(log);
        // A crash in the middle of the third line.
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"tokens\":\"00").unwrap();
        let mut log = Log::open(&path, &subject).unwrap();
        assert_eq!(log.entries, [entry("code-1"), entry("code-2")]);
        log.push(entry("code-3")).unwrap();
        drop(log);
        let log = Log::open(&path, &subject).unwrap();
        assert_eq!(log.find("code-3", Digest::of(b"code-3")), Some(&entry("code-3")));
        assert_eq!(log.find("code-3", Digest::of(b"another text")), None);
        drop(log);
        let other = Subject { artifact: Digest::of(b"b"), ..subject };
        Log::check(&path).unwrap();
        assert!(Log::open(&path, &other).unwrap().entries.is_empty(), "evidence of another artifact is not taken over");
    }

    /// A device that is always full.
    #[cfg(target_os = "linux")]
    #[test]
    fn what_finds_no_room_is_not_counted_as_kept() {
        let full = Path::new("/dev/full");
        let file = OpenOptions::new().append(true).open(full).unwrap();
        let mut log = Log { path: full.to_owned(), file, entries: vec![entry("code-1")] };
        let error = log.push(entry("code-2")).unwrap_err();
        assert!(matches!(error, LogError::Write { .. }), "{error}");
        assert!(error.to_string().contains("/dev/full: can't be written") && error.to_string().contains("make room"));
        assert_eq!(log.entries, [entry("code-1")]);
    }

    #[test]
    fn a_file_of_somebody_elses_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let subject = Subject { artifact: Digest::of(b"a"), backend: "cpu".into(), precision: "dequantised".into() };
        for (name, content) in [("notes", &b"my notes\n"[..]), ("json", b"{\"my\":1}\n"), ("binary", b"\xff\xfe\n")] {
            let path = folder.path().join(name);
            std::fs::write(&path, content).unwrap();
            assert!(Log::check(&path).is_err() && Log::open(&path, &subject).is_err(), "{name}");
            assert_eq!(std::fs::read(&path).unwrap(), content);
        }
        Log::check(&folder.path().join("absent")).unwrap();
    }
}
