//! The pairs below a folder.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use super::{Cards, MANIFEST, PairError, Stored};

/// Something that a search came by.
#[derive(Debug)]
pub struct Found {
    /// The pair folder, or the folder of pair folders.
    pub folder: PathBuf,
    /// The pair, or what is wrong with it.
    pub pair: Result<Cards, PairError>,
}

/// Every pair below `folder`, itself included, ordered by folder. Pair folders that lie side by side and are mappers of the same
/// two models are one pair. Links are not followed, and hidden folders left out.
///
/// # Errors
/// [`PairError::Read`] if `folder` can't be read. Folders below it that can't are found as damaged.
pub fn find(folder: &Path) -> Result<Vec<Found>, PairError> {
    if folder.join(MANIFEST).is_file() {
        return Ok(vec![Found { folder: folder.to_owned(), pair: Stored::open(folder).map(Cards::from) }]);
    }
    let mut found = Vec::new();
    let mut side_by_side = Vec::new();
    for inner in folders(folder)? {
        if inner.join(MANIFEST).is_file() {
            side_by_side.push(inner);
        } else {
            match find(&inner) {
                Ok(more) => found.extend(more),
                Err(error) => found.push(Found { folder: inner, pair: Err(error) }),
            }
        }
    }
    found.extend(grouped(folder, side_by_side));
    found.sort_by(|a, b| a.folder.cmp(&b.folder));
    Ok(found)
}

/// Pair folders of one folder: a pair of several mappers where all of them are whole and belong together.
fn grouped(folder: &Path, side_by_side: Vec<PathBuf>) -> Vec<Found> {
    let opened: Vec<_> = side_by_side.into_iter().map(|folder| (Stored::open(&folder), folder)).collect();
    let whole: Vec<Stored> = opened.iter().filter_map(|(stored, _)| stored.as_ref().ok().cloned()).collect();
    if whole.len() == opened.len()
        && whole.len() > 1
        && let Ok(pair) = Cards::new(&folder.display().to_string(), whole)
    {
        return vec![Found { folder: folder.to_owned(), pair: Ok(pair) }];
    }
    opened.into_iter().map(|(stored, folder)| Found { folder, pair: stored.map(Cards::from) }).collect()
}

/// The visible folders in a folder, ordered.
fn folders(folder: &Path) -> Result<Vec<PathBuf>, PairError> {
    let failed = |source| PairError::Read { file: folder.to_owned(), source };
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let hidden = entry.file_name().to_string_lossy().starts_with('.');
        if !hidden && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.insert(entry.file_name(), entry.path());
        }
    }
    Ok(found.into_values().collect())
}
