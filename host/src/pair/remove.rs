//! Removing a pair folder: what a pair consists of, and nothing else.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::{DIAGNOSTICS, FILES, MANIFEST, PairError, check};

/// Removes a pair folder. It loses its name first, so that nobody finds half of it.
///
/// # Errors
/// [`PairError::NotRemoved`] for a folder that holds no manifest of a pair, holds anything else, or is a link: nothing is then
/// touched. [`PairError::Kept`] if the file system refuses.
pub fn remove(folder: &Path) -> Result<(), PairError> {
    let failed = |source: io::Error| PairError::Kept { file: folder.to_owned(), source };
    if fs::symlink_metadata(folder).map_err(failed)?.is_symlink() {
        return Err(refused(folder, "is a link", "name the folder that it leads to"));
    }
    let folder = fs::canonicalize(folder).map_err(failed)?;
    let manifest = folder.join(MANIFEST);
    let bytes = fs::read(&manifest).map_err(|source| PairError::Read { file: manifest, source })?;
    check::parse(&folder.display().to_string(), &bytes)?;
    let mut files = Vec::new();
    for entry in fs::read_dir(&folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let ours = FILES.iter().chain([&DIAGNOSTICS]).find(|ours| name == **ours);
        match ours.filter(|_| entry.file_type().is_ok_and(|kind| !kind.is_dir())) {
            Some(name) => files.push(*name),
            None => {
                let what = format!("holds {}, which is no part of a pair", name.display());
                return Err(refused(&folder, &what, "move it away first"));
            }
        }
    }
    let parent = folder.parent().ok_or_else(|| refused(&folder, "has no parent", "remove its files by hand"))?;
    let limbo = tempfile::Builder::new().prefix(".kvmig-removed-").tempdir_in(parent).map_err(failed)?.keep();
    let moved = limbo.join("pair");
    if let Err(error) = fs::rename(&folder, &moved) {
        let _ = fs::remove_dir(&limbo);
        return Err(failed(error));
    }
    let left = |file: PathBuf| move |source| PairError::Kept { file, source };
    for name in files {
        let file = moved.join(name);
        fs::remove_file(&file).map_err(left(file))?;
    }
    fs::remove_dir(&moved).map_err(left(moved))?;
    fs::remove_dir(&limbo).map_err(left(limbo))
}

fn refused(folder: &Path, what: &str, mend: &'static str) -> PairError {
    PairError::NotRemoved { folder: folder.to_owned(), what: what.to_owned(), mend }
}
