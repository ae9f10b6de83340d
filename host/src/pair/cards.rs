//! Several mappers of one pair of models: a folder of pair folders.

use std::{
    fs,
    path::{Path, PathBuf},
};

use kvmig_gate::parse::printable;

use super::{MANIFEST, ModelRecord, PairError, Stored};

/// The mappers of one pair of models, at least one, each of another kind; ordered by kind.
#[derive(Clone, Debug)]
pub struct Cards {
    name: String,
    stored: Vec<Stored>,
}

impl Cards {
    /// Reads the card of a pair folder, or of each pair folder in a folder.
    ///
    /// # Errors
    /// [`PairError`] of the first folder that is wrong; [`PairError::OfOtherModels`] and [`PairError::TwoOfOneKind`] where they
    /// don't belong together; [`PairError::Read`] for a folder that holds no pair at all.
    pub fn open(folder: &Path) -> Result<Cards, PairError> {
        let folders = if folder.join(MANIFEST).exists() { vec![] } else { pair_folders(folder)? };
        if folders.is_empty() {
            return Ok(Cards::from(Stored::open(folder)?));
        }
        let stored = folders.iter().map(|folder| Stored::open(folder)).collect::<Result<_, _>>()?;
        Cards::new(&folder.display().to_string(), stored)
    }

    /// Puts cards together; `label` is what messages call the folder they come from.
    ///
    /// # Errors
    /// As of [`Cards::open`].
    pub(crate) fn new(label: &str, mut stored: Vec<Stored>) -> Result<Cards, PairError> {
        stored.sort_by(|a, b| a.card().mapper().cmp(b.card().mapper()));
        let [first, rest @ ..] = stored.as_slice() else {
            return Err(PairError::NoMapper { folder: label.to_owned() });
        };
        for other in rest {
            if let Some((which, found, expected)) = first.other_model(other) {
                let (folder, than) = (other.card().label().to_owned(), first.card().label().to_owned());
                return Err(PairError::OfOtherModels { folder, which, found, than, expected });
            }
        }
        if let Some([a, b]) = stored.array_windows().find(|[a, b]| a.card().mapper() == b.card().mapper()) {
            let kind = a.card().mapper().to_owned();
            let folders = [a, b].map(|stored| stored.card().label().to_owned());
            return Err(PairError::TwoOfOneKind { kind, folders });
        }
        let name = first.card().name();
        let name = match rest.iter().all(|other| other.card().name() == name) {
            true => name.to_owned(),
            // Mappers that are called after their kinds have their pair's name on the folder they share.
            false => Path::new(label).file_name().map_or(label.to_owned(), |name| printable(&name.to_string_lossy())),
        };
        Ok(Cards { name, stored })
    }

    /// What people and the ledger call the pair.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The mappers.
    pub fn stored(&self) -> &[Stored] {
        &self.stored
    }

    /// One of them, for what is the same of all: the models.
    pub fn first(&self) -> &Stored {
        &self.stored[0]
    }

    /// Keeps the mapper of one kind alone.
    ///
    /// # Errors
    /// [`PairError::NoSuchMapper`].
    pub fn of_kind(mut self, kind: &str) -> Result<Cards, PairError> {
        let found = self.stored.iter().map(|stored| stored.card().mapper()).collect::<Vec<_>>().join(", ");
        self.stored.retain(|stored| stored.card().mapper() == kind);
        if self.stored.is_empty() {
            return Err(PairError::NoSuchMapper { pair: self.name, kind: printable(kind), found });
        }
        Ok(self)
    }
}

impl From<Stored> for Cards {
    fn from(stored: Stored) -> Cards {
        Cards { name: stored.card().name().to_owned(), stored: vec![stored] }
    }
}

impl Stored {
    /// The first of the two models that is another one in `other`: which, that one, this one.
    fn other_model(&self, other: &Stored) -> Option<(&'static str, String, String)> {
        let (own, other) = (self.card().identity(), other.card().identity());
        let shown = |model: &ModelRecord| format!("{} ({})", model.name, model.digest.short());
        [("source", &other.source, &own.source), ("target", &other.target, &own.target)].into_iter().find_map(
            |(which, found, expected)| {
                // What people call a model is not what it is.
                let same = (found.digest, found.tokenizer, &found.layout)
                    == (expected.digest, expected.tokenizer, &expected.layout);
                (!same).then(|| (which, shown(found), shown(expected)))
            },
        )
    }
}

/// The folders in a folder that hold a manifest, by name.
fn pair_folders(folder: &Path) -> Result<Vec<PathBuf>, PairError> {
    // A folder that is not there is reported as a pair folder without its manifest.
    let Ok(entries) = fs::read_dir(folder) else { return Ok(vec![]) };
    let failed = |source| PairError::Read { file: folder.to_owned(), source };
    let paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>().map_err(failed)?;
    let mut found: Vec<PathBuf> = paths.into_iter().filter(|path| path.join(MANIFEST).is_file()).collect();
    found.sort();
    Ok(found)
}
