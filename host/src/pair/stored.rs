//! A pair where it is kept: its card in memory, module and weights to be read when they are wanted.

use std::{
    borrow::Cow,
    fs,
    path::{Path, PathBuf},
};

use kvmig_gate::Digest;

use super::{
    Card, DIAGNOSTICS, Diagnostics, Draft, EVIDENCE, MANIFEST, MODULE, Pair, PairError, PairFiles, WEIGHTS, check,
};
use crate::sandbox::Module;

/// A pair whose card was read.
#[derive(Clone, Debug)]
pub struct Stored {
    card: Card,
    place: Place,
}

#[derive(Clone, Debug)]
enum Place {
    Folder(PathBuf),
    Program { module: &'static [u8], weights: &'static [u8], diagnostics: Option<&'static [u8]> },
}

impl Stored {
    /// Reads manifest and evidence of a pair folder, and nothing else.
    ///
    /// # Errors
    /// [`PairError`], naming file, field, what was found and what was expected.
    pub fn open(folder: &Path) -> Result<Stored, PairError> {
        let label = folder.display().to_string();
        let manifest = read(folder, MANIFEST)?;
        let wants_evidence = check::parse(&label, &manifest)?.evidence.is_some();
        let evidence = if wants_evidence { Some(read(folder, EVIDENCE)?) } else { None };
        let card = Card::parse(&label, &manifest, evidence.as_deref())?;
        Ok(Stored { card, place: Place::Folder(folder.to_owned()) })
    }

    /// A pair that is compiled into the program.
    ///
    /// # Errors
    /// [`PairError`], naming file, field, what was found and what was expected.
    pub fn from_static(label: &str, files: PairFiles<'static>) -> Result<Stored, PairError> {
        let PairFiles { manifest, module, weights, evidence, diagnostics } = files;
        let place = Place::Program { module, weights, diagnostics };
        Ok(Stored { card: Card::parse(label, manifest, evidence)?, place })
    }

    /// What it says of itself.
    pub fn card(&self) -> &Card {
        &self.card
    }

    /// The folder, unless it is part of the program.
    pub fn folder(&self) -> Option<&Path> {
        match &self.place {
            Place::Folder(folder) => Some(folder),
            Place::Program { .. } => None,
        }
    }

    /// Length of the weights file in bytes.
    ///
    /// # Errors
    /// [`PairError::Read`].
    pub fn weight_bytes(&self) -> Result<u64, PairError> {
        match &self.place {
            Place::Folder(folder) => {
                let file = folder.join(WEIGHTS);
                let length = fs::metadata(&file).map(|metadata| metadata.len());
                length.map_err(|source| PairError::Read { file, source })
            }
            Place::Program { weights, .. } => Ok(weights.len() as u64),
        }
    }

    /// What the fit saw of its own work, where it was kept.
    ///
    /// # Errors
    /// [`PairError`] if the manifest names it and it is not there, or another.
    pub fn diagnostics(&self) -> Result<Option<Diagnostics>, PairError> {
        let Some(expected) = self.card.manifest().diagnostics else { return Ok(None) };
        let (label, bytes) = (self.card.label(), self.file(DIAGNOSTICS)?);
        check::digest(label, DIAGNOSTICS, Digest::of(&bytes), expected)?;
        Diagnostics::parse(label, &bytes).map(Some)
    }

    /// Reads the module alone, and gives the digest of component and shaders as tickets name it.
    ///
    /// # Errors
    /// [`PairError`].
    pub fn module(&self) -> Result<(Module, Digest), PairError> {
        let component = self.file(MODULE)?;
        let module = self.card.read_module(&component)?;
        let digest = self.card.module_digest(&component, &module);
        Ok((module, digest))
    }

    /// Reads and checks all of it. A file that changed after the card was read is refused.
    ///
    /// # Errors
    /// [`PairError`].
    pub fn load(&self) -> Result<Pair, PairError> {
        Pair::load(self.card.clone(), &self.file(MODULE)?, &self.file(WEIGHTS)?)
    }

    /// The same mapper with other native ends, to be tried: evidence is about the ends that it was measured with.
    ///
    /// # Errors
    /// [`PairError`].
    pub fn with_ends(&self, head: usize, tail: usize) -> Result<Draft, PairError> {
        let mut manifest = self.card.manifest().clone();
        (manifest.identity.head, manifest.identity.tail) = (head, tail);
        Draft::new(manifest, self.file(MODULE)?.into_owned(), self.file(WEIGHTS)?.into_owned())
    }

    /// Checks everything about it that needs no device, each file's digest included.
    ///
    /// # Errors
    /// [`PairError`].
    pub fn verify(&self) -> Result<Pair, PairError> {
        self.diagnostics()?;
        let weights = self.file(WEIGHTS)?;
        check::digest(self.card.label(), WEIGHTS, Digest::of(&weights), self.card.identity().weights.sha256)?;
        Pair::load(self.card.clone(), &self.file(MODULE)?, &weights)
    }

    fn file(&self, name: &str) -> Result<Cow<'static, [u8]>, PairError> {
        match &self.place {
            Place::Folder(folder) => read(folder, name).map(Cow::Owned),
            Place::Program { module, .. } if name == MODULE => Ok(Cow::Borrowed(module)),
            Place::Program { diagnostics, .. } if name == DIAGNOSTICS => Ok(Cow::Borrowed(diagnostics.unwrap_or(&[]))),
            Place::Program { weights, .. } => Ok(Cow::Borrowed(weights)),
        }
    }
}

fn read(folder: &Path, name: &str) -> Result<Vec<u8>, PairError> {
    let file = folder.join(name);
    fs::read(&file).map_err(|source| PairError::Read { file, source })
}
