//! Digests of everything a decision rests on.
//!
//! Fields are tagged and length-prefixed, so that no two different sequences of fields hash the same bytes.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest as _, Sha256};

/// A SHA-256 digest; written as 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

impl Digest {
    /// Digest of one byte string, untagged: what `sha256sum` prints for a file of these bytes.
    pub fn of(bytes: &[u8]) -> Digest {
        Digest(Sha256::digest(bytes).into())
    }

    /// The first 12 hexadecimal digits, for people.
    pub fn short(&self) -> String {
        self.to_string()[..12].to_owned()
    }

    /// The raw bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({})", self.short())
    }
}

/// A text that is not 64 hexadecimal digits.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not a SHA-256 digest: expected 64 hexadecimal digits")]
pub struct ParseDigestError(String);

impl FromStr for Digest {
    type Err = ParseDigestError;

    fn from_str(s: &str) -> Result<Digest, ParseDigestError> {
        let err = || ParseDigestError(s.to_owned());
        if s.len() != 64 || !s.is_ascii() {
            return Err(err());
        }
        let mut bytes = [0; 32];
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&s[2 * i..2 * i + 2], 16).map_err(|_| err())?;
        }
        Ok(Digest(bytes))
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Digest, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Hashes a sequence of tagged, length-prefixed fields.
#[derive(Clone)]
pub struct DigestBuilder(Sha256);

impl DigestBuilder {
    /// Starts a digest of the given kind; two kinds never collide.
    pub fn new(kind: &str) -> DigestBuilder {
        DigestBuilder(Sha256::new()).field("kind", kind.as_bytes())
    }

    /// Adds a field.
    pub fn field(mut self, tag: &str, bytes: &[u8]) -> DigestBuilder {
        self.0.update((tag.len() as u64).to_le_bytes());
        self.0.update(tag.as_bytes());
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
        self
    }

    /// The digest of all fields added.
    pub fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}
