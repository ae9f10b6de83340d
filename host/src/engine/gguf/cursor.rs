//! Reading forward through the bytes of a file that may end anywhere.

use std::path::Path;

use crate::engine::EngineError;

pub(super) struct Cursor<'a> {
    file: &'a Path,
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(file: &'a Path, bytes: &'a [u8]) -> Cursor<'a> {
        Cursor { file, bytes, position: 0 }
    }

    pub(super) fn position(&self) -> usize {
        self.position
    }

    fn take(&mut self, count: u64, field: &str) -> Result<&'a [u8], EngineError> {
        let left = &self.bytes[self.position..];
        if count > left.len() as u64 {
            return Err(EngineError::Truncated {
                file: self.file.to_owned(),
                field: field.into(),
                found: self.bytes.len() as u64,
                expected: (self.position as u64).saturating_add(count),
            });
        }
        self.position += count as usize;
        Ok(&left[..count as usize])
    }

    pub(super) fn array<const N: usize>(&mut self, field: &str) -> Result<[u8; N], EngineError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, field)?);
        Ok(array)
    }

    pub(super) fn u32(&mut self, field: &str) -> Result<u32, EngineError> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, field: &str) -> Result<u64, EngineError> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// The length of an array: no element is shorter than a byte, so it can't be more than what is left.
    pub(super) fn count(&mut self, field: &str) -> Result<usize, EngineError> {
        let count = self.u64(field)?;
        let position = self.position;
        self.take(count, field)?;
        self.position = position;
        Ok(count as usize)
    }

    pub(super) fn text(&mut self, field: &str) -> Result<String, EngineError> {
        let length = self.u64(field)?;
        let bytes = self.take(length, field)?;
        String::from_utf8(bytes.to_vec()).map_err(|e| EngineError::Malformed {
            file: self.file.to_owned(),
            field: field.into(),
            found: format!("bytes that are no UTF-8 from {} on", e.utf8_error().valid_up_to()),
            expected: "a string in UTF-8".into(),
        })
    }

    pub(super) fn unsupported(&self, field: &str, found: impl ToString, expected: &str) -> EngineError {
        EngineError::Unsupported {
            file: self.file.to_owned(),
            field: field.into(),
            found: found.to_string(),
            expected: expected.into(),
        }
    }
}
