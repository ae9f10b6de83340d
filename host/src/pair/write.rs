//! Writing a pair folder: whole or not at all.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::Path,
};

use kvmig_gate::Evidence;

use super::{DIAGNOSTICS, EVIDENCE, MANIFEST, MODULE, Manifest, PairError, PairFiles, WEIGHTS};

/// What a reader meets first.
const PREAMBLE: &str = "\
# A kvmig pair. [identity] is what the mapper computes and what evidence.json is bound to: change any of it, and the
# evidence is about something else and the gate refuses. [fit] says how the weights came about, [evidence] what they are
# worth on documents that nothing was fitted or chosen on: [mean, low, high, documents], a 95 % bootstrap interval. A reader
# makes [[evidence.domains]] again from evidence.json and refuses other figures; [[evidence.own_text]] is what the fit
# reported, for comparison alone: its documents' outcomes are not kept.

";

/// The manifest's text.
pub(super) fn manifest(manifest: &Manifest) -> Result<String, PairError> {
    Ok(format!("{PREAMBLE}{}", toml::to_string(manifest)?))
}

/// The evidence's bytes.
pub(super) fn evidence(evidence: &Evidence) -> Vec<u8> {
    let mut bytes = serde_json::to_vec_pretty(evidence).expect("evidence holds strings, numbers and lists only");
    bytes.push(b'\n');
    bytes
}

/// Writes all files into a folder beside `folder`, then renames that.
pub(super) fn folder(folder: &Path, files: PairFiles<'_>) -> Result<(), PairError> {
    if folder.exists() {
        return Err(PairError::Exists(folder.to_owned()));
    }
    let failed = |source: io::Error| PairError::Write { file: folder.to_owned(), source };
    let parent = folder.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(failed)?;
    let mut draft = tempfile::Builder::new();
    as_readable_as_any(&mut draft);
    let draft = draft.prefix(".kvmig-pair-").tempdir_in(parent).map_err(failed)?;
    let parts = [
        (MANIFEST, Some(files.manifest)),
        (MODULE, Some(files.module)),
        (WEIGHTS, Some(files.weights)),
        (EVIDENCE, files.evidence),
        (DIAGNOSTICS, files.diagnostics),
    ];
    for (name, bytes) in parts {
        let Some(bytes) = bytes else { continue };
        let path = draft.path().join(name);
        let write = || -> io::Result<()> {
            let mut file = File::create(&path)?;
            file.write_all(bytes)?;
            file.sync_all()
        };
        // The draft's own path will be gone when somebody reads of it.
        write().map_err(|source| PairError::Write { file: folder.join(name), source })?;
    }
    fs::rename(draft.path(), folder).map_err(failed)?;
    // Renamed away: there is nothing left to remove under the old name.
    let _ = draft.keep();
    Ok(())
}

/// A temporary folder is its owner's alone; a pair is as readable as any other new folder: what the umask leaves of these.
#[cfg(unix)]
fn as_readable_as_any(draft: &mut tempfile::Builder<'_, '_>) {
    use std::os::unix::fs::PermissionsExt as _;
    draft.permissions(fs::Permissions::from_mode(0o777));
}

/// Elsewhere a temporary folder inherits its parent's permissions.
#[cfg(not(unix))]
fn as_readable_as_any(_: &mut tempfile::Builder<'_, '_>) {}
