//! One fit at a time into one place: two would take each other's state away.

use std::{
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
};

/// A place that can't be had.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process has it.
    #[error("{}: another fit into the same place is at work; wait for it, or choose another --out", file.display())]
    Busy {
        /// The lock's file.
        file: PathBuf,
    },
    /// The lock's file can't be made.
    #[error("{}: can't be locked: {source}", file.display())]
    Io {
        /// The lock's file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A place, held until it is dropped, or the process ends in whatever way.
#[derive(Debug)]
pub(super) struct Lock {
    path: PathBuf,
    /// The system holds the lock as long as it is open.
    _file: File,
}

impl Lock {
    /// Takes the place, or says who is in the way.
    pub(super) fn take(path: PathBuf) -> Result<Lock, LockError> {
        // The folder that the pair will be put in may be yet to be made, by this fit as well as by any.
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let opened = fs::create_dir_all(parent).and_then(|()| File::options().create(true).append(true).open(&path));
        let file = match opened {
            Ok(file) => file,
            Err(source) => return Err(LockError::Io { file: path, source }),
        };
        match file.try_lock() {
            Ok(()) => Ok(Lock { path, _file: file }),
            Err(TryLockError::WouldBlock) => Err(LockError::Busy { file: path }),
            Err(TryLockError::Error(source)) => Err(LockError::Io { file: path, source }),
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Whoever is killed leaves the file, which holds nobody up.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_held_by_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("yet/to/be/made/pair.lock");
        let lock = Lock::take(path.clone()).unwrap();
        assert!(matches!(Lock::take(path.clone()), Err(LockError::Busy { .. })));
        drop(lock);
        assert!(!path.exists());
        // What a killed process leaves is free.
        fs::write(&path, "").unwrap();
        Lock::take(path).unwrap();
    }
}
