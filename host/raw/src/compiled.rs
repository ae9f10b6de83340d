//! Machine code of components, kept between runs.
//!
//! Compiling a component takes from tens of milliseconds to half a minute, loading the result a millisecond. Loading is
//! unsafe: the file is code. This module therefore both writes and reads such files, and reads none but those.

use std::{
    fmt::Write as _,
    fs,
    hash::{Hash, Hasher},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};
use wasmtime::{Engine, component::Component};

/// A folder of compiled components that belongs to this user alone.
#[derive(Clone, Debug)]
pub struct CompiledStore {
    dir: PathBuf,
}

/// Where a component's machine code came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Compiled now.
    Compiled,
    /// Loaded from the folder.
    Stored,
}

/// Length of the digest that each file starts with.
const DIGEST: usize = 32;

impl CompiledStore {
    /// Opens a folder, which is made if it is missing.
    ///
    /// # Errors
    /// If it can't be made, or if anyone but this user could write to it: then code in it might be anyone's.
    pub fn open(dir: &Path) -> io::Result<CompiledStore> {
        make_private(dir)?;
        check_private(dir)?;
        Ok(CompiledStore { dir: dir.to_owned() })
    }

    /// The component of these bytes: loaded, if an engine like this one compiled it before, else compiled and kept.
    ///
    /// A file that is missing, damaged or from another wasmtime is compiled anew, and one that can't be written is not
    /// kept: neither is an error, since the component runs all the same.
    ///
    /// # Errors
    /// If the bytes don't compile.
    pub fn component(&self, engine: &Engine, wasm: &[u8]) -> wasmtime::Result<(Component, Origin)> {
        let key = key(engine, wasm);
        let path = self.path(&key);
        if let Some(component) = load(engine, &key, &path) {
            return Ok((component, Origin::Stored));
        }
        let component = Component::from_binary(engine, wasm)?;
        // Best effort: see above.
        let _kept = component.serialize().map(|code| self.keep(&key, &path, &code));
        Ok((component, Origin::Compiled))
    }

    /// The file for a component compiled by an engine like this one.
    pub fn file(&self, engine: &Engine, wasm: &[u8]) -> PathBuf {
        self.path(&key(engine, wasm))
    }

    fn path(&self, key: &[u8; DIGEST]) -> PathBuf {
        let mut name = String::with_capacity(2 * DIGEST + 6);
        for byte in key {
            write!(name, "{byte:02x}").expect("a String takes all that is written to it");
        }
        self.dir.join(name + ".cwasm")
    }

    /// Writes a file under another name and renames it, so that a reader sees all of it or none.
    fn keep(&self, key: &[u8; DIGEST], path: &Path, code: &[u8]) -> io::Result<()> {
        let mut file = tempfile::NamedTempFile::new_in(&self.dir)?;
        file.write_all(&seal(key, code))?;
        file.write_all(code)?;
        file.persist(path)?;
        Ok(())
    }
}

fn load(engine: &Engine, key: &[u8; DIGEST], path: &Path) -> Option<Component> {
    check_private(path).ok()?;
    let bytes = fs::read(path).ok()?;
    let (digest, code) = bytes.split_at_checked(DIGEST)?;
    if digest != seal(key, code) {
        return None;
    }
    // SAFETY: `deserialize` asks for bytes that `Component::serialize` made with a compatible engine. (1) The file lies in
    // a folder, and is itself, owned by this user and writable by nobody else (checked when the folder was opened, and
    // just now for the file): whoever can put something there can already run code as this user. (2) Only `keep` writes
    // there, and only what `serialize` returned. (3) The digest at its start covers key and code, so that damage (a torn
    // write, a bad block, a file renamed by hand) is found before the code is. (4) The key covers the component's bytes
    // and the engine's compatibility hash, which includes wasmtime's version, target and settings; wasmtime checks these
    // again itself. The bytes were read into memory of our own, so that they can't change after the check.
    unsafe { Component::deserialize(engine, code) }.ok()
}

/// What identifies compiled code: the component, and all of an engine that its code depends on.
fn key(engine: &Engine, wasm: &[u8]) -> [u8; DIGEST] {
    let mut hasher = Sha256Hasher(Sha256::new_with_prefix(b"kvmig compiled component, format 1"));
    engine.precompile_compatibility_hash().hash(&mut hasher);
    // Digested on its own: a fixed length, so that its bytes can't be taken for the engine's.
    hasher.0.update(Sha256::digest(wasm));
    hasher.0.finalize().into()
}

fn seal(key: &[u8; DIGEST], code: &[u8]) -> [u8; DIGEST] {
    Sha256::new_with_prefix(key).chain_update(code).finalize().into()
}

/// Feeds `Hash` implementations into SHA-256.
struct Sha256Hasher(Sha256);

impl Hasher for Sha256Hasher {
    fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn finish(&self) -> u64 {
        let digest = self.0.clone().finalize();
        u64::from_le_bytes(digest[..8].try_into().expect("a SHA-256 digest has 32 bytes"))
    }
}

#[cfg(unix)]
fn make_private(dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

#[cfg(not(unix))]
fn make_private(dir: &Path) -> io::Result<()> {
    // Under the user's profile, whose access list folders inherit.
    fs::create_dir_all(dir)
}

#[cfg(unix)]
fn check_private(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    let found = fs::symlink_metadata(path)?;
    // SAFETY: `geteuid` takes nothing, always succeeds and touches no memory of ours.
    let user = unsafe { libc::geteuid() };
    if found.file_type().is_symlink() || found.uid() != user || found.mode() & 0o022 != 0 {
        let why = format!(
            "{}: found owner {} and mode {:o}, expected owner {user} and no write permission for others (chmod go-w)",
            path.display(),
            found.uid(),
            found.mode() & 0o7777
        );
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    Ok(())
}

#[cfg(not(unix))]
fn check_private(path: &Path) -> io::Result<()> {
    fs::symlink_metadata(path).map(|_| ())
}

#[cfg(test)]
mod tests {
    use std::{fs, io::ErrorKind};

    use wasmtime::{Config, Engine};

    use super::{CompiledStore, Origin};

    /// The smallest component: its preamble alone.
    const EMPTY: &[u8] = b"\0asm\x0d\0\x01\0";

    #[test]
    fn a_component_is_compiled_once() {
        let dir = tempfile::tempdir().unwrap();
        let (store, engine) = (CompiledStore::open(&dir.path().join("compiled")).unwrap(), Engine::default());
        assert_eq!(store.component(&engine, EMPTY).unwrap().1, Origin::Compiled);
        assert_eq!(store.component(&engine, EMPTY).unwrap().1, Origin::Stored);
    }

    #[test]
    fn another_engines_code_is_not_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let store = CompiledStore::open(&dir.path().join("compiled")).unwrap();
        let fuelled = Engine::new(Config::new().consume_fuel(true)).unwrap();
        store.component(&Engine::default(), EMPTY).unwrap();
        assert_eq!(store.component(&fuelled, EMPTY).unwrap().1, Origin::Compiled);
    }

    #[test]
    fn damaged_code_is_compiled_anew() {
        let dir = tempfile::tempdir().unwrap();
        let (store, engine) = (CompiledStore::open(&dir.path().join("compiled")).unwrap(), Engine::default());
        store.component(&engine, EMPTY).unwrap();
        let path = store.file(&engine, EMPTY);
        let good = fs::read(&path).unwrap();
        for damage in [0, 31, 32, good.len() / 2, good.len() - 1] {
            let mut bad = good.clone();
            bad[damage] ^= 1;
            fs::write(&path, &bad).unwrap();
            assert_eq!(store.component(&engine, EMPTY).unwrap().1, Origin::Compiled, "byte {damage} changed");
            assert_eq!(fs::read(&path).unwrap(), good, "and the good file is back");
        }
        fs::write(&path, &good[..20]).unwrap();
        assert_eq!(store.component(&engine, EMPTY).unwrap().1, Origin::Compiled);
    }

    #[cfg(unix)]
    #[test]
    fn a_folder_or_file_that_others_can_write_is_not_used() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("compiled");
        let (store, engine) = (CompiledStore::open(&folder).unwrap(), Engine::default());
        store.component(&engine, EMPTY).unwrap();
        fs::set_permissions(store.file(&engine, EMPTY), fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(store.component(&engine, EMPTY).unwrap().1, Origin::Compiled);
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(CompiledStore::open(&folder).unwrap_err().kind(), ErrorKind::PermissionDenied);
    }

    #[test]
    fn what_is_no_component_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let store = CompiledStore::open(&dir.path().join("compiled")).unwrap();
        assert!(store.component(&Engine::default(), b"not wasm").is_err());
    }
}
