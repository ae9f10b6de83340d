//! Proof that the gate allowed one migration.

use crate::Digest;

/// A result of a permitted migration; the only form in which a mapped cache travels.
#[must_use = "a migration that is not resumed counts as abandoned"]
#[derive(Debug)]
pub struct Migrated<T> {
    cache: T,
    artifact: Digest,
}

impl<T> Migrated<T> {
    /// Digest of the artifact (module, weights, pair) that mapped it.
    pub fn artifact(&self) -> Digest {
        self.artifact
    }

    /// Hands the cache to a decoder. Only `engine::resume` of the host calls this.
    pub fn release(self) -> T {
        self.cache
    }
}
