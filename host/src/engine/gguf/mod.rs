//! GGUF files, version 2 and 3, little endian: header, metadata and where the tensors lie.
//!
//! Layout after the format's specification (ggml, `docs/gguf.md`). Everything is read from one copy of the file in memory,
//! with every length checked against what is left of it.

mod config;
mod cursor;
mod tensors;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use super::EngineError;
use cursor::Cursor;

pub(super) use config::read_config;
pub(super) use tensors::Tensors;

/// A metadata value. Numbers of all widths are widened; only arrays that a decoder needs are kept apart.
#[derive(Debug, PartialEq)]
pub(super) enum Value {
    Whole(i128),
    Real(f64),
    Flag(bool),
    Text(String),
    Texts(Vec<String>),
    Wholes(Vec<i64>),
    Reals(Vec<f32>),
    /// An array of another kind, of this many elements.
    Other(usize),
}

/// A tensor as the header announces it.
#[derive(Debug)]
pub(super) struct TensorInfo {
    /// Outermost extent first: the reverse of the file's order.
    pub(super) shape: Vec<usize>,
    /// ggml's number of the element type.
    pub(super) kind: u32,
    /// Bytes from the start of the data section.
    pub(super) offset: u64,
}

/// A parsed header.
#[derive(Debug)]
pub(super) struct Gguf {
    pub(super) file: PathBuf,
    metadata: BTreeMap<String, Value>,
    pub(super) tensors: BTreeMap<String, TensorInfo>,
    /// Byte of the file at which the data section starts.
    pub(super) data: u64,
}

impl Gguf {
    pub(super) fn parse(file: &Path, bytes: &[u8]) -> Result<Gguf, EngineError> {
        let mut cursor = Cursor::new(file, bytes);
        let magic = cursor.array::<4>("magic")?;
        if &magic != b"GGUF" {
            return Err(EngineError::Malformed {
                file: file.to_owned(),
                field: "magic".into(),
                found: format!("{magic:02x?}"),
                expected: "\"GGUF\": a GGUF file, or a Hugging Face folder".into(),
            });
        }
        let version = cursor.u32("version")?;
        if !(2..=3).contains(&version) {
            return Err(cursor.unsupported("version", version, "2 or 3, little endian"));
        }
        let tensor_count = cursor.u64("tensor count")?;
        let metadata_count = cursor.u64("metadata count")?;
        let mut metadata = BTreeMap::new();
        for i in 0..metadata_count {
            let key = cursor.text(&format!("key {i}"))?;
            let value = read_value(&mut cursor, &key)?;
            metadata.insert(key, value);
        }
        let mut tensors = BTreeMap::new();
        for i in 0..tensor_count {
            let name = cursor.text(&format!("name of tensor {i}"))?;
            let info = read_tensor_info(&mut cursor, &name)?;
            tensors.insert(name, info);
        }
        let mut gguf = Gguf { file: file.to_owned(), metadata, tensors, data: 0 };
        let alignment = gguf.whole("general.alignment")?.unwrap_or(32);
        if !(1..=1 << 20).contains(&alignment) {
            return Err(gguf.malformed("general.alignment", &alignment, "1 to 1048576 bytes"));
        }
        gguf.data = (cursor.position() as u64).next_multiple_of(alignment as u64);
        Ok(gguf)
    }

    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    pub(super) fn whole(&self, key: &str) -> Result<Option<i128>, EngineError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Whole(n)) => Ok(Some(*n)),
            Some(other) => Err(self.malformed(key, other, "a whole number")),
        }
    }

    /// A size that may be absent; positive and small enough to multiply.
    pub(super) fn size(&self, key: &str) -> Result<Option<usize>, EngineError> {
        match self.whole(key)? {
            None => Ok(None),
            Some(n) if (1..=i128::from(u32::MAX)).contains(&n) => Ok(Some(n as usize)),
            Some(n) => Err(self.malformed(key, &n, "a positive whole number")),
        }
    }

    pub(super) fn need_size(&self, key: &str) -> Result<usize, EngineError> {
        self.size(key)?.ok_or_else(|| self.absent(key, "a positive whole number"))
    }

    /// A positive, finite number that may be absent.
    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, EngineError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Real(x)) if x.is_finite() && *x > 0.0 => Ok(Some(*x)),
            Some(Value::Whole(n)) if *n > 0 => Ok(Some(*n as f64)),
            Some(other) => Err(self.malformed(key, other, "a positive number")),
        }
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, EngineError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Flag(flag)) => Ok(Some(*flag)),
            Some(other) => Err(self.malformed(key, other, "true or false")),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&str>, EngineError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(other) => Err(self.malformed(key, other, "a string")),
        }
    }

    pub(super) fn texts(&self, key: &str) -> Result<&[String], EngineError> {
        match self.get(key) {
            None => Err(self.absent(key, "a list of strings")),
            Some(Value::Texts(texts)) => Ok(texts),
            Some(other) => Err(self.malformed(key, other, "a list of strings")),
        }
    }

    pub(super) fn wholes(&self, key: &str) -> Result<Option<&[i64]>, EngineError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Wholes(numbers)) => Ok(Some(numbers)),
            Some(other) => Err(self.malformed(key, other, "a list of whole numbers")),
        }
    }

    pub(super) fn reals(&self, key: &str) -> Result<&[f32], EngineError> {
        match self.get(key) {
            None => Err(self.absent(key, "a list of numbers")),
            Some(Value::Reals(numbers)) => Ok(numbers),
            Some(other) => Err(self.malformed(key, other, "a list of numbers in single precision")),
        }
    }

    pub(super) fn malformed(&self, key: &str, found: &dyn std::fmt::Debug, expected: &str) -> EngineError {
        let mut found = format!("{found:?}");
        if let Some((cut, _)) = found.char_indices().nth(80) {
            found.truncate(cut);
        }
        EngineError::Malformed { file: self.file.clone(), field: key.into(), found, expected: expected.into() }
    }

    pub(super) fn unsupported(&self, key: &str, found: impl ToString, expected: &str) -> EngineError {
        let (found, expected) = (found.to_string(), expected.to_owned());
        EngineError::Unsupported { file: self.file.clone(), field: key.into(), found, expected }
    }

    fn absent(&self, key: &str, expected: &str) -> EngineError {
        let (found, expected) = ("nothing".to_owned(), expected.to_owned());
        EngineError::Malformed { file: self.file.clone(), field: key.into(), found, expected }
    }
}

fn read_value(cursor: &mut Cursor<'_>, key: &str) -> Result<Value, EngineError> {
    let kind = cursor.u32(key)?;
    if kind != ARRAY {
        return read_scalar(cursor, key, kind);
    }
    let kind = cursor.u32(key)?;
    let count = cursor.count(key)?;
    match kind {
        TEXT => (0..count).map(|i| cursor.text(&format!("{key}[{i}]"))).collect::<Result<_, _>>().map(Value::Texts),
        0..=5 | 10 | 11 => {
            let mut numbers = Vec::new();
            for _ in 0..count {
                let Value::Whole(n) = read_scalar(cursor, key, kind)? else { unreachable!("whole kinds") };
                numbers.push(i64::try_from(n).unwrap_or(i64::MAX));
            }
            Ok(Value::Wholes(numbers))
        }
        6 => {
            let mut numbers = Vec::new();
            for _ in 0..count {
                numbers.push(f32::from_le_bytes(cursor.array(key)?));
            }
            Ok(Value::Reals(numbers))
        }
        _ => {
            for _ in 0..count {
                read_scalar(cursor, key, kind)?;
            }
            Ok(Value::Other(count))
        }
    }
}

const TEXT: u32 = 8;
const ARRAY: u32 = 9;

fn read_scalar(cursor: &mut Cursor<'_>, key: &str, kind: u32) -> Result<Value, EngineError> {
    Ok(match kind {
        0 => Value::Whole(u8::from_le_bytes(cursor.array(key)?).into()),
        1 => Value::Whole(i8::from_le_bytes(cursor.array(key)?).into()),
        2 => Value::Whole(u16::from_le_bytes(cursor.array(key)?).into()),
        3 => Value::Whole(i16::from_le_bytes(cursor.array(key)?).into()),
        4 => Value::Whole(u32::from_le_bytes(cursor.array(key)?).into()),
        5 => Value::Whole(i32::from_le_bytes(cursor.array(key)?).into()),
        6 => Value::Real(f32::from_le_bytes(cursor.array(key)?).into()),
        7 => Value::Flag(cursor.array::<1>(key)?[0] != 0),
        TEXT => Value::Text(cursor.text(key)?),
        10 => Value::Whole(u64::from_le_bytes(cursor.array(key)?).into()),
        11 => Value::Whole(i64::from_le_bytes(cursor.array(key)?).into()),
        12 => Value::Real(f64::from_le_bytes(cursor.array(key)?)),
        other => {
            return Err(cursor.unsupported(
                key,
                format!("value type {other}"),
                "a type of GGUF 3 (nested arrays aside)",
            ));
        }
    })
}

fn read_tensor_info(cursor: &mut Cursor<'_>, name: &str) -> Result<TensorInfo, EngineError> {
    let field = format!("tensor `{name}`");
    let dimensions = cursor.u32(&field)?;
    if dimensions > 4 {
        return Err(cursor.unsupported(&field, format!("{dimensions} dimensions"), "at most 4"));
    }
    let mut shape = Vec::new();
    for _ in 0..dimensions {
        let extent = cursor.u64(&field)?;
        if extent > u64::from(u32::MAX) {
            return Err(cursor.unsupported(&field, format!("an extent of {extent}"), "at most 4294967295"));
        }
        shape.push(extent as usize);
    }
    shape.reverse();
    Ok(TensorInfo { shape, kind: cursor.u32(&field)?, offset: cursor.u64(&field)? })
}
