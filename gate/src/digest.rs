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
        if s.len() != 64 || !s.bytes().all(|b| b.is_ascii_hexdigit()) {
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
    pub fn field(self, tag: &str, bytes: &[u8]) -> DigestBuilder {
        let mut field = self.long_field(tag, bytes.len());
        field.update(bytes);
        field.finish()
    }

    /// Adds a field of `len` bytes that come piece by piece.
    pub(crate) fn long_field(mut self, tag: &str, len: usize) -> LongField {
        self.0.update((tag.len() as u64).to_le_bytes());
        self.0.update(tag.as_bytes());
        self.0.update((len as u64).to_le_bytes());
        LongField { digest: self, missing: len }
    }

    /// The digest of all fields added.
    pub fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

/// A field whose bytes are still coming.
pub(crate) struct LongField {
    digest: DigestBuilder,
    missing: usize,
}

impl LongField {
    /// Takes the next bytes.
    ///
    /// # Panics
    ///
    /// When there are more than were announced.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.missing = self.missing.checked_sub(bytes.len()).expect("a field has the length it announced");
        self.digest.0.update(bytes);
    }

    /// Closes the field.
    ///
    /// # Panics
    ///
    /// When there were fewer bytes than announced.
    pub(crate) fn finish(self) -> DigestBuilder {
        assert_eq!(self.missing, 0, "a field has the length it announced");
        self.digest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_is_what_sha256sum_prints() {
        // FIPS 180-2, appendix B.1.
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(Digest::of(b"abc").to_string(), abc);
        assert_eq!(abc.parse::<Digest>().unwrap(), Digest::of(b"abc"));
        for wrong in ["", &abc[1..], &abc.replace('b', "g"), &format!("+{}", &abc[1..])] {
            assert!(wrong.parse::<Digest>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn bytes_cannot_move_between_fields() {
        let digest = |fields: &[(&str, &[u8])]| {
            fields.iter().fold(DigestBuilder::new("test"), |builder, (tag, bytes)| builder.field(tag, bytes)).finish()
        };
        let all = [
            digest(&[]),
            digest(&[("a", b"bc")]),
            digest(&[("ab", b"c")]),
            digest(&[("a", b"b"), ("c", b"")]),
            digest(&[("a", b""), ("b", b"c")]),
            DigestBuilder::new("other").field("a", b"bc").finish(),
        ];
        for (i, one) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|other| other != one), "digest {i} comes twice");
        }
    }
}
