//! What can be wrong with a pair folder.

use std::{io, path::PathBuf};

use kvmig_gate::parse::ParseError;

use crate::sandbox::SandboxError;

/// A pair that can't be read, written or used.
#[derive(Debug, thiserror::Error)]
pub enum PairError {
    /// A file of the folder can't be read.
    #[error("{}: can't be read: {source}; a pair folder holds {}", file.display(), super::FILES.join(", "))]
    Read {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The folder can't be written.
    #[error(
        "{}: can't be written: {source}; nothing was left half-written: make room and run the same command again, or choose another \
         folder",
        file.display()
    )]
    Write {
        /// File or folder.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Something is in the way of a new pair.
    #[error("{}: exists already; choose another --out, or remove it first", .0.display())]
    Exists(PathBuf),
    /// The manifest is not a manifest.
    #[error("{file}: {source}; restore the file or fit the pair again")]
    Manifest {
        /// The file.
        file: String,
        /// What and where.
        source: ParseError,
    },
    /// The manifest can't be put into TOML.
    #[error("the manifest can't be written as TOML: {0}")]
    Encode(#[from] toml::ser::Error),
    /// The evidence is not what the gate takes.
    #[error("{file}: {source}; fit the pair again")]
    Evidence {
        /// The file.
        file: String,
        /// What and where.
        source: ParseError,
    },
    /// The diagnostics are not what they should be.
    #[error("{file}: {source}; restore the file, or remove it and the manifest's line `diagnostics`")]
    Diagnostics {
        /// The file.
        file: String,
        /// What and where.
        source: ParseError,
    },
    /// The module can't run here, or does not describe itself.
    #[error("{file}: {source}")]
    Module {
        /// The file.
        file: String,
        /// Why.
        source: Box<SandboxError>,
    },
    /// The weights are no safetensors file.
    #[error("{file}: {source}; the file is damaged or truncated: copy it again, or fit the pair again")]
    Weights {
        /// The file.
        file: String,
        /// Why.
        source: safetensors::SafeTensorError,
    },
    /// A weight is NaN or infinite.
    #[error(
        "{file}: {tensor}: element {index} is not finite; fit the pair again, with --weights f32 if f16 overflowed"
    )]
    NotFinite {
        /// The file.
        file: String,
        /// Name of the tensor.
        tensor: String,
        /// First such element.
        index: usize,
    },
    /// The file system keeps a file or folder that is to be removed.
    #[error("{}: can't be removed: {source}; see who may write there, then remove what is left", file.display())]
    Kept {
        /// File or folder.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A folder that is not removed.
    #[error("{}: {what}; {mend}; nothing was removed", folder.display())]
    NotRemoved {
        /// The folder.
        folder: PathBuf,
        /// Why not.
        what: String,
        /// What to do.
        mend: &'static str,
    },
    /// Mappers of one folder that are for different models.
    #[error(
        "{folder}: the {which} is {found}, that of {than} is {expected}: one folder holds mappers of the same two models; name \
         one of the pair folders, or sort them by models"
    )]
    OfOtherModels {
        /// The pair folder that differs.
        folder: String,
        /// `source` or `target`.
        which: &'static str,
        /// Its model.
        found: String,
        /// The pair folder that it differs from.
        than: String,
        /// That one's model.
        expected: String,
    },
    /// Two mappers of one folder that nobody could tell apart.
    #[error(
        "{} and {}: both are {kind} mappers: one folder holds one mapper of a kind; name one of the two, or move one away",
        folders[0], folders[1]
    )]
    TwoOfOneKind {
        /// The kind.
        kind: String,
        /// Their folders.
        folders: [String; 2],
    },
    /// A folder without mappers.
    #[error("{folder}: found no pair folder; `kvmig pair list` shows those below a folder")]
    NoMapper {
        /// The folder.
        folder: String,
    },
    /// A kind of mapper that was asked for and is not there.
    #[error("{pair}: no {kind} mapper, expected {found}; fit one, or choose another --mapper")]
    NoSuchMapper {
        /// The pair.
        pair: String,
        /// What was asked for.
        kind: String,
        /// What there is.
        found: String,
    },
    /// Two things that have to agree don't.
    #[error("{file}: {field}: found {found}, expected {expected}; {mend}")]
    Disagreement {
        /// The file.
        file: String,
        /// The field, dotted.
        field: String,
        /// What is there.
        found: String,
        /// What should be.
        expected: String,
        /// What to do.
        mend: &'static str,
    },
}
