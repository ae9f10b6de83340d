//! Measurements as they come in: one line a document, so that an interrupted command need not measure again.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use serde::{Serialize, de::DeserializeOwned};

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
         choose a place on another disk",
        file.display()
    )]
    Write {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is no such log: what is replaced or removed in the end must be ours.
    #[error("{}: begins like no measurements of this version; remove it, or choose another place", file.display())]
    Foreign {
        /// The file.
        file: PathBuf,
    },
    /// The log is of something else.
    #[error("{}: is of other models, texts or settings than these; remove it, or choose another file", file.display())]
    OfAnother {
        /// The file.
        file: PathBuf,
    },
}

/// What becomes of a log that is of another subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OfAnother {
    /// It is begun anew: what it was for is not asked for any more.
    Replaced,
    /// It stays, and is an error: somebody wanted it.
    Kept,
}

/// Entries so far, and the file they are kept in. Its first line is what they are about, the subject.
#[derive(Debug)]
pub(crate) struct Log<E> {
    path: PathBuf,
    file: File,
    entries: Vec<E>,
}

impl<E: Serialize + DeserializeOwned> Log<E> {
    /// Whether what is at `path` may become a log; nothing is changed.
    pub(crate) fn check<S: DeserializeOwned>(path: &Path) -> Result<(), LogError> {
        read::<S, E>(path).map(drop)
    }

    /// Opens the log of `subject`. A line that an interrupt cut short is dropped, and what stands behind it.
    pub(crate) fn open<S>(path: &Path, subject: &S, of_another: OfAnother) -> Result<Log<E>, LogError>
    where
        S: Serialize + DeserializeOwned + PartialEq,
    {
        let failed = |source| LogError::Write { file: path.to_owned(), source };
        let entries = match read::<S, E>(path)? {
            Some((found, entries)) if found == *subject => entries,
            Some(_) if of_another == OfAnother::Kept => {
                return Err(LogError::OfAnother { file: path.to_owned() });
            }
            _ => Vec::new(),
        };
        let mut text = line(subject);
        entries.iter().for_each(|entry| text.push_str(&line(entry)));
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut draft = tempfile::NamedTempFile::new_in(parent).map_err(failed)?;
        draft.write_all(text.as_bytes()).map_err(failed)?;
        draft.persist(path).map_err(|error| failed(error.error))?;
        let file = OpenOptions::new().append(true).open(path).map_err(failed)?;
        Ok(Log { path: path.to_owned(), file, entries })
    }

    /// What is in it, in the order of the measurements.
    pub(crate) fn entries(&self) -> &[E] {
        &self.entries
    }

    /// Adds one.
    pub(crate) fn push(&mut self, entry: E) -> Result<(), LogError> {
        let written = self.file.write_all(line(&entry).as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(|source| LogError::Write { file: self.path.clone(), source })?;
        self.entries.push(entry);
        Ok(())
    }
}

fn line<T: Serialize>(value: &T) -> String {
    let json = serde_json::to_string(value).expect("measurements hold strings and numbers only");
    format!("{json}\n")
}

/// The subject of the log at `path` and its entries; none where there is no file, or an empty one.
fn read<S: DeserializeOwned, E: DeserializeOwned>(path: &Path) -> Result<Option<(S, Vec<E>)>, LogError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(LogError::Read { file: path.to_owned(), source }),
    };
    let mut lines = bytes.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
    let Some(first) = lines.next() else { return Ok(None) };
    let Ok(subject) = serde_json::from_slice::<S>(first) else {
        return Err(LogError::Foreign { file: path.to_owned() });
    };
    let mut entries = Vec::new();
    for line in lines {
        match serde_json::from_slice(line) {
            Ok(entry) => entries.push(entry),
            Err(_) => break,
        }
    }
    Ok(Some((subject, entries)))
}

#[cfg(test)]
mod tests {
    use super::*;

    type Entry = (String, Option<f64>);

    fn open(path: &Path, subject: &str, of_another: OfAnother) -> Result<Log<Entry>, LogError> {
        Log::open(path, &vec![subject.to_owned()], of_another)
    }

    #[test]
    fn what_was_measured_is_found_again_to_the_bit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let (first, second) = (("one".to_owned(), Some(0.1 + 0.2)), ("two".to_owned(), None));
        let mut log = open(&path, "a", OfAnother::Replaced).unwrap();
        log.push(first.clone()).unwrap();
        log.push(second.clone()).unwrap();
        drop(log);
        // A crash in the middle of the third line.
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"[\"thr").unwrap();
        let mut log = open(&path, "a", OfAnother::Kept).unwrap();
        assert_eq!(log.entries(), [first.clone(), second.clone()]);
        log.push(("three".to_owned(), None)).unwrap();
        drop(log);
        assert_eq!(open(&path, "a", OfAnother::Replaced).unwrap().entries().len(), 3);
    }

    #[test]
    fn measurements_of_another_subject_are_not_taken_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        open(&path, "a", OfAnother::Replaced).unwrap().push(("one".to_owned(), None)).unwrap();
        Log::<Entry>::check::<Vec<String>>(&path).unwrap();
        let before = fs::read(&path).unwrap();
        let error = open(&path, "b", OfAnother::Kept).unwrap_err().to_string();
        assert!(error.contains("choose another file"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), before);
        assert!(open(&path, "b", OfAnother::Replaced).unwrap().entries().is_empty());
    }

    /// A device that is always full.
    #[cfg(target_os = "linux")]
    #[test]
    fn what_finds_no_room_is_not_counted_as_kept() {
        let full = Path::new("/dev/full");
        let file = OpenOptions::new().append(true).open(full).unwrap();
        let mut log = Log { path: full.to_owned(), file, entries: vec![1] };
        let error = log.push(2).unwrap_err();
        assert!(matches!(error, LogError::Write { .. }), "{error}");
        assert!(error.to_string().contains("/dev/full: can't be written") && error.to_string().contains("make room"));
        assert_eq!(log.entries, [1]);
    }

    #[test]
    fn a_file_of_somebody_elses_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in [("notes", &b"my notes\n"[..]), ("json", b"{\"my\":1}\n"), ("binary", b"\xff\xfe\n")] {
            let path = folder.path().join(name);
            fs::write(&path, content).unwrap();
            assert!(Log::<Entry>::check::<Vec<String>>(&path).is_err(), "{name}");
            assert!(open(&path, "a", OfAnother::Replaced).is_err(), "{name}");
            assert_eq!(fs::read(&path).unwrap(), content);
        }
        Log::<Entry>::check::<Vec<String>>(&folder.path().join("absent")).unwrap();
    }
}
