//! Files as memory.

use std::{fs::File, io, ops::Deref, path::Path};

use memmap2::Mmap;

/// A file mapped read-only: model weights are gigabytes, and only what is read is paged in.
///
/// The bytes are for reading once, into memory of one's own; what a decision rests on is hashed there (see the gate's
/// `Loader`), not here.
#[derive(Debug)]
pub struct MappedFile {
    map: Mmap,
    /// Holds the advisory lock for as long as the bytes are lent out.
    _file: File,
}

impl MappedFile {
    /// Maps the whole of a regular file and takes a shared advisory lock on it, where the file system has such locks.
    ///
    /// # Errors
    /// If the file can't be opened, is no regular file, is locked by a writer, or can't be mapped.
    pub fn open(path: &Path) -> io::Result<MappedFile> {
        let file = File::open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        match file.try_lock_shared() {
            Err(std::fs::TryLockError::WouldBlock) => {
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, "another process is writing this file"));
            }
            // Network file systems without locks: the argument below then rests on the users' restraint alone.
            Ok(()) | Err(std::fs::TryLockError::Error(_)) => {}
        }
        // SAFETY: the map is read-only and private to this struct, and `File` keeps its descriptor valid. What the kernel
        // can't promise is that nobody else changes the file meanwhile. kvmig itself never writes a file in place: it
        // writes a new one and renames it over the old, which leaves this mapping as it was. A writer that does write in
        // place is excluded by the lock if it takes one; one that doesn't can change bytes under our feet (which are read
        // as plain `u8` and bounds-checked, so that they are wrong numbers, not wrong addresses) or truncate the file
        // (the process is then stopped by a bus error). Readers copy what they check before they rely on it.
        let map = unsafe { Mmap::map(&file)? };
        Ok(MappedFile { map, _file: file })
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io::ErrorKind};

    use super::MappedFile;

    #[test]
    fn bytes_are_the_files_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        fs::write(&path, b"some bytes").unwrap();
        assert_eq!(&*MappedFile::open(&path).unwrap(), b"some bytes");
        fs::write(&path, b"").unwrap();
        assert_eq!(&*MappedFile::open(&path).unwrap(), b"");
    }

    #[test]
    fn what_is_no_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(MappedFile::open(dir.path()).unwrap_err().kind(), ErrorKind::InvalidInput);
        assert_eq!(MappedFile::open(&dir.path().join("absent")).unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn a_file_that_is_being_written_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        let writer = fs::File::create(&path).unwrap();
        writer.lock().unwrap();
        assert_eq!(MappedFile::open(&path).unwrap_err().kind(), ErrorKind::ResourceBusy);
    }

    #[test]
    fn a_file_replaced_by_renaming_keeps_its_old_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let (path, new) = (dir.path().join("weights"), dir.path().join("weights.new"));
        fs::write(&path, b"old").unwrap();
        let map = MappedFile::open(&path).unwrap();
        fs::write(&new, b"new, and longer").unwrap();
        fs::rename(&new, &path).unwrap();
        assert_eq!(&*map, b"old");
    }
}
