//! Measurements as they come in: one line a document, so that an interrupted command need not measure again.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufRead as _, Write as _},
    path::{Path, PathBuf},
};

use serde::{Serialize, de::DeserializeOwned};

/// A log that can't be kept.
#[derive(Debug, thiserror::Error)]
#[error("{}: can't keep measurements there: {source}", file.display())]
pub struct LogError {
    /// The file.
    file: PathBuf,
    /// Why.
    source: io::Error,
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
        let read = read::<S, E>(path).map(drop);
        read.map_err(|source| LogError { file: path.to_owned(), source })
    }

    /// Opens the log of `subject`. A line that an interrupt cut short is dropped, and what stands behind it.
    pub(crate) fn open<S>(path: &Path, subject: &S, of_another: OfAnother) -> Result<Log<E>, LogError>
    where
        S: Serialize + DeserializeOwned + PartialEq,
    {
        let failed = |source| LogError { file: path.to_owned(), source };
        let entries = match read::<S, E>(path).map_err(failed)? {
            Some((found, entries)) if found == *subject => entries,
            Some(_) if of_another == OfAnother::Kept => {
                let text = "it is of other models, texts or settings than these; remove it, or choose another file";
                return Err(failed(io::Error::other(text)));
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
        written.map_err(|source| LogError { file: self.path.clone(), source })?;
        self.entries.push(entry);
        Ok(())
    }
}

fn line<T: Serialize>(value: &T) -> String {
    let json = serde_json::to_string(value).expect("measurements hold strings and numbers only");
    format!("{json}\n")
}

/// The subject of the log at `path` and its entries; none where there is no file, or an empty one.
fn read<S: DeserializeOwned, E: DeserializeOwned>(path: &Path) -> io::Result<Option<(S, Vec<E>)>> {
    let file = match fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut lines = io::BufReader::new(file).lines();
    let Some(first) = lines.next().transpose()? else { return Ok(None) };
    // What is replaced or removed in the end must be ours.
    let Ok(subject) = serde_json::from_str::<S>(&first) else {
        let text = "it begins like no measurements of this version; remove it, or choose another place";
        return Err(io::Error::other(text));
    };
    let mut entries = Vec::new();
    for line in lines {
        match serde_json::from_str(&line?) {
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
