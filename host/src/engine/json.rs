//! Reading named fields out of a JSON object, with errors that name file and field.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::EngineError;

/// A JSON object and the file it came from.
pub(super) struct JsonFile {
    file: PathBuf,
    value: Value,
}

impl JsonFile {
    pub(super) fn parse(file: &Path, bytes: &[u8]) -> Result<JsonFile, EngineError> {
        let malformed = |found: String| EngineError::Malformed {
            file: file.to_owned(),
            field: "(whole file)".into(),
            found,
            expected: "a JSON object in UTF-8".into(),
        };
        let value: Value = serde_json::from_slice(bytes).map_err(|e| malformed(format!("an error: {e}")))?;
        if !value.is_object() {
            return Err(malformed(kind(&value)));
        }
        Ok(JsonFile { file: file.to_owned(), value })
    }

    /// The field at `path` (keys joined by dots), unless it is absent or null.
    pub(super) fn get(&self, path: &str) -> Option<&Value> {
        let field = path.split('.').try_fold(&self.value, |at, key| at.get(key))?;
        (!field.is_null()).then_some(field)
    }

    fn typed<'a, T>(
        &'a self,
        path: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, EngineError> {
        let Some(value) = self.get(path) else { return Ok(None) };
        match read(value) {
            Some(read) => Ok(Some(read)),
            None => Err(self.malformed(path, kind(value), expected)),
        }
    }

    /// A size that may be absent; positive and small enough to multiply.
    pub(super) fn size(&self, path: &str) -> Result<Option<usize>, EngineError> {
        let read = |v: &Value| v.as_u64().filter(|n| (1..=u64::from(u32::MAX)).contains(n)).map(|n| n as usize);
        self.typed(path, "a positive whole number", read)
    }

    /// A size that must be there.
    pub(super) fn need_size(&self, path: &str) -> Result<usize, EngineError> {
        self.size(path)?.ok_or_else(|| self.malformed(path, "nothing".into(), "a positive whole number"))
    }

    /// A positive, finite number that may be absent.
    pub(super) fn number(&self, path: &str) -> Result<Option<f64>, EngineError> {
        self.typed(path, "a positive number", |v| v.as_f64().filter(|x| x.is_finite() && *x > 0.0))
    }

    pub(super) fn boolean(&self, path: &str) -> Result<Option<bool>, EngineError> {
        self.typed(path, "true or false", Value::as_bool)
    }

    pub(super) fn text(&self, path: &str) -> Result<Option<&str>, EngineError> {
        self.typed(path, "a string", Value::as_str)
    }

    /// One token id, or a list of them.
    pub(super) fn token_ids(&self, path: &str) -> Result<Vec<u32>, EngineError> {
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let read = |v: &Value| match v {
            Value::Array(list) => list.iter().map(id).collect(),
            one => id(one).map(|id| vec![id]),
        };
        Ok(self.typed(path, "a token id or a list of them", read)?.unwrap_or_default())
    }

    pub(super) fn malformed(&self, field: &str, found: String, expected: &str) -> EngineError {
        EngineError::Malformed { file: self.file.clone(), field: field.into(), found, expected: expected.into() }
    }

    pub(super) fn unsupported(&self, field: &str, found: impl ToString, expected: &str) -> EngineError {
        let (found, expected) = (found.to_string(), expected.to_owned());
        EngineError::Unsupported { file: self.file.clone(), field: field.into(), found, expected }
    }
}

/// A value as a message shows it: short.
fn kind(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
