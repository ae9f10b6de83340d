//! Measurements as they come in: one line a document, so that an interrupted command need not measure again.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Read as _, Seek as _, SeekFrom, Write as _},
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
    /// It is no file that lines could be kept in.
    #[error("{}: is no regular file; choose another place", file.display())]
    NoFile {
        /// What is there.
        file: PathBuf,
    },
    /// Somebody else is writing it.
    #[error("{}: another process keeps its measurements there; wait for it, or choose another place", file.display())]
    Busy {
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

/// Entries so far, and the file they are kept in, which nobody else writes meanwhile. Its first line is what they are about, the
/// subject.
#[derive(Debug)]
pub(crate) struct Log<E> {
    path: PathBuf,
    file: File,
    entries: Vec<E>,
}

impl<E: Serialize + DeserializeOwned> Log<E> {
    /// Whether what is at `path` may become a log; nothing is changed.
    pub(crate) fn check<S: DeserializeOwned>(path: &Path) -> Result<(), LogError> {
        match fs::metadata(path) {
            Ok(found) if !found.is_file() => return Err(LogError::NoFile { file: path.to_owned() }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            _ => {}
        }
        let bytes = fs::read(path).map_err(|source| LogError::Read { file: path.to_owned(), source })?;
        parse::<S, E>(&bytes).map(drop).map_err(|Foreign| LogError::Foreign { file: path.to_owned() })
    }

    /// Opens the log of `subject`. A line that an interrupt cut short is dropped, and what stands behind it.
    pub(crate) fn open<S>(path: &Path, subject: &S, of_another: OfAnother) -> Result<Log<E>, LogError>
    where
        S: Serialize + DeserializeOwned + PartialEq,
    {
        let failed = |source| LogError::Write { file: path.to_owned(), source };
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(LogError::NoFile { file: path.to_owned() });
        }
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(LogError::Busy { file: path.to_owned() }),
            Err(TryLockError::Error(source)) => return Err(failed(source)),
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(|source| LogError::Read { file: path.to_owned(), source })?;
        let found = parse::<S, E>(&bytes).map_err(|Foreign| LogError::Foreign { file: path.to_owned() })?;
        let (entries, length) = match found {
            Some(Parsed { subject: found, entries, length }) if found == *subject => (entries, length),
            Some(_) if of_another == OfAnother::Kept => {
                return Err(LogError::OfAnother { file: path.to_owned() });
            }
            _ => (Vec::new(), 0),
        };
        let mut log = Log { path: path.to_owned(), file, entries };
        log.cut(length).map_err(failed)?;
        if length == 0 {
            log.append(&line(subject))?;
        }
        Ok(log)
    }

    /// What is in it, in the order of the measurements.
    pub(crate) fn entries(&self) -> &[E] {
        &self.entries
    }

    /// Adds one.
    pub(crate) fn push(&mut self, entry: E) -> Result<(), LogError> {
        self.append(&line(&entry))?;
        self.entries.push(entry);
        Ok(())
    }

    /// A line that does not fit is taken back: a part of it at the beginning would be taken for somebody else's file.
    fn append(&mut self, line: &str) -> Result<(), LogError> {
        let written = self.file.stream_position().and_then(|start| {
            let written = self.file.write_all(line.as_bytes()).and_then(|()| self.file.sync_data());
            written.inspect_err(|_| drop(self.cut(start)))
        });
        written.map_err(|source| LogError::Write { file: self.path.clone(), source })
    }

    /// Drops what lies behind `length` bytes, and goes on there.
    fn cut(&mut self, length: u64) -> io::Result<()> {
        self.file.set_len(length)?;
        self.file.seek(SeekFrom::Start(length)).map(drop)
    }
}

fn line<T: Serialize>(value: &T) -> String {
    let json = serde_json::to_string(value).expect("measurements hold strings and numbers only");
    format!("{json}\n")
}

/// What a log holds.
struct Parsed<S, E> {
    subject: S,
    entries: Vec<E>,
    /// Bytes of its whole lines.
    length: u64,
}

/// What begins like no log.
struct Foreign;

/// The whole lines of a log; none of an empty one.
fn parse<S: DeserializeOwned, E: DeserializeOwned>(bytes: &[u8]) -> Result<Option<Parsed<S, E>>, Foreign> {
    if bytes.is_empty() {
        return Ok(None);
    }
    let mut lines = bytes.split_inclusive(|&byte| byte == b'\n').filter(|line| line.ends_with(b"\n"));
    let first = lines.next().ok_or(Foreign)?;
    let subject = serde_json::from_slice(first).map_err(|_| Foreign)?;
    let mut parsed = Parsed { subject, entries: Vec::new(), length: first.len() as u64 };
    for line in lines {
        let Ok(entry) = serde_json::from_slice(line) else { break };
        parsed.entries.push(entry);
        parsed.length += line.len() as u64;
    }
    Ok(Some(parsed))
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
    fn a_log_is_written_by_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut log = open(&path, "a", OfAnother::Kept).unwrap();
        assert!(matches!(open(&path, "a", OfAnother::Kept), Err(LogError::Busy { .. })));
        log.push(("one".to_owned(), None)).unwrap();
        drop(log);
        assert_eq!(open(&path, "a", OfAnother::Kept).unwrap().entries().len(), 1);
        assert!(open(folder.path(), "a", OfAnother::Kept).is_err());
        assert!(matches!(Log::<Entry>::check::<Vec<String>>(folder.path()), Err(LogError::NoFile { .. })));
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
