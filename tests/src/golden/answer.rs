//! One answer file: what a reference implementation computed for one prompt.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};

use super::GoldenError;

/// What the reference computed for one prompt of `T` tokens and a vocabulary of `V`.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The prompt, `[T]`.
    pub tokens: Vec<u32>,
    /// Greedy continuation, end tokens included.
    pub greedy: Vec<u32>,
    /// Best logit minus second best at each step of `greedy`: below it a deviation can't change the token.
    pub greedy_margin: Vec<f32>,
    /// Logits after the last token.
    pub last: LastRow,
    /// A sample of all logits.
    pub logits: Patch,
    /// A sample of the cache after the prompt.
    pub kv: KvSample,
    /// Further facts, such as `prompt` and `continuation` as text.
    pub about: HashMap<String, String>,
}

/// Logits after the last token: all `V`, or, of a large vocabulary, every few and the largest.
#[derive(Clone, Debug)]
pub struct LastRow {
    /// Token ids of `logits`, ascending.
    pub ids: Vec<u32>,
    /// Their logits.
    pub logits: Vec<f32>,
    /// The largest logits with their ids, descending; empty where all are stored.
    pub top: Vec<(u32, f32)>,
}

/// Logits at some positions and token ids.
#[derive(Clone, Debug)]
pub struct Patch {
    /// Positions, `[r]`.
    pub rows: Vec<u32>,
    /// Token ids, `[c]`.
    pub cols: Vec<u32>,
    /// Logits, `[r, c]`.
    pub values: Vec<f32>,
}

/// Keys (rotated, half-split pairing) and values of some layers at some positions.
#[derive(Clone, Debug)]
pub struct KvSample {
    /// Layers, `[l]`.
    pub layers: Vec<u32>,
    /// Positions, `[p]`.
    pub positions: Vec<u32>,
    /// KV heads of a layer.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Keys, `[l, n_kv, p, d]`.
    pub k: Vec<f32>,
    /// Values, `[l, n_kv, p, d]`.
    pub v: Vec<f32>,
}

/// One row of a [`KvSample`].
#[derive(Clone, Copy, Debug)]
pub struct KvRow<'a> {
    /// Layer of the model.
    pub layer: usize,
    /// KV head.
    pub head: usize,
    /// Position, in tokens.
    pub position: usize,
    /// Key, `[d]`.
    pub k: &'a [f32],
    /// Value, `[d]`.
    pub v: &'a [f32],
}

impl Answer {
    /// Reads an answer file.
    ///
    /// # Errors
    /// If the file is missing, or a tensor of it is missing or of another type or shape.
    pub fn read(file: &Path) -> Result<Answer, GoldenError> {
        let bytes = std::fs::read(file).map_err(|source| GoldenError::Read { file: file.to_owned(), source })?;
        let refuse = |source| GoldenError::Safetensors { file: file.to_owned(), source };
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(refuse)?;
        let tensors = Tensors { file, of: SafeTensors::deserialize(&bytes).map_err(refuse)? };
        let about = match header.metadata().as_ref().and_then(|metadata| metadata.get("about")) {
            Some(about) => {
                serde_json::from_str(about).map_err(|source| GoldenError::Json { file: file.to_owned(), source })?
            }
            None => HashMap::new(),
        };

        let tokens = tensors.ids("tokens")?;
        let greedy = tensors.ids("greedy")?;
        let greedy_margin = tensors.floats("greedy_margin", &[greedy.len()])?;
        let logits = {
            let (rows, cols) = (tensors.ids("logits_rows")?, tensors.ids("logits_cols")?);
            let values = tensors.floats("logits", &[rows.len(), cols.len()])?;
            Patch { rows, cols, values }
        };
        Ok(Answer { tokens, greedy, greedy_margin, last: tensors.last()?, logits, kv: tensors.kv()?, about })
    }
}

impl Patch {
    /// Every (position, token id, logit).
    pub fn iter(&self) -> impl Iterator<Item = (usize, usize, f32)> + '_ {
        let at = self.rows.iter().flat_map(|&row| self.cols.iter().map(move |&col| (row as usize, col as usize)));
        at.zip(&self.values).map(|((row, col), &value)| (row, col, value))
    }
}

impl KvSample {
    /// Every (layer, head, position) with its key and value.
    pub fn rows(&self) -> impl Iterator<Item = KvRow<'_>> {
        let (heads, d) = (self.kv_heads, self.head_dim);
        let places = self.layers.iter().flat_map(move |&layer| {
            (0..heads).flat_map(move |head| self.positions.iter().map(move |&position| (layer, head, position)))
        });
        let rows = self.k.chunks_exact(d).zip(self.v.chunks_exact(d));
        places.zip(rows).map(|((layer, head, position), (k, v))| KvRow {
            layer: layer as usize,
            head,
            position: position as usize,
            k,
            v,
        })
    }
}

/// The tensors of one file, read with errors that name it.
pub(super) struct Tensors<'a> {
    pub(super) file: &'a Path,
    pub(super) of: SafeTensors<'a>,
}

impl Tensors<'_> {
    /// A list of u32.
    fn ids(&self, name: &str) -> Result<Vec<u32>, GoldenError> {
        let (bytes, _) = self.typed(name, Dtype::U32, None)?;
        Ok(bytes.as_chunks().0.iter().map(|&four| u32::from_le_bytes(four)).collect())
    }

    /// An f32 tensor of the given shape, row-major.
    pub(super) fn floats(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, GoldenError> {
        let (bytes, _) = self.typed(name, Dtype::F32, Some(shape))?;
        Ok(bytes.as_chunks().0.iter().map(|&four| f32::from_le_bytes(four)).collect())
    }

    /// A tensor's shape.
    pub(super) fn shape(&self, name: &str) -> Result<Vec<usize>, GoldenError> {
        Ok(self.typed(name, Dtype::F32, None)?.1)
    }

    fn last(&self) -> Result<LastRow, GoldenError> {
        if self.of.tensor("last_cols").is_err() {
            let shape = self.shape("logits_last")?;
            let logits = self.floats("logits_last", &shape)?;
            let ids = (0..logits.len() as u32).collect();
            return Ok(LastRow { ids, logits, top: Vec::new() });
        }
        let (ids, top_ids) = (self.ids("last_cols")?, self.ids("top_ids")?);
        let logits = self.floats("logits_last", &[ids.len()])?;
        let top = self.floats("top", &[top_ids.len()])?;
        Ok(LastRow { ids, logits, top: top_ids.into_iter().zip(top).collect() })
    }

    fn kv(&self) -> Result<KvSample, GoldenError> {
        let (layers, positions) = (self.ids("kv_layers")?, self.ids("kv_positions")?);
        let shape = self.shape("k")?;
        let &[_, kv_heads, _, head_dim] = shape.as_slice() else {
            return Err(self.wrong("k", format!("{shape:?}"), "[layers, n_kv, positions, d]".to_owned()));
        };
        let shape = [layers.len(), kv_heads, positions.len(), head_dim];
        let (k, v) = (self.floats("k", &shape)?, self.floats("v", &shape)?);
        Ok(KvSample { layers, positions, kv_heads, head_dim, k, v })
    }

    fn typed(&self, name: &str, dtype: Dtype, shape: Option<&[usize]>) -> Result<(&[u8], Vec<usize>), GoldenError> {
        let expected = match shape {
            Some(shape) => format!("{dtype:?} {shape:?}"),
            None => format!("{dtype:?}"),
        };
        let Ok(tensor) = self.of.tensor(name) else {
            return Err(self.wrong(name, "nothing".to_owned(), expected));
        };
        if tensor.dtype() != dtype || shape.is_some_and(|shape| shape != tensor.shape()) {
            return Err(self.wrong(name, format!("{:?} {:?}", tensor.dtype(), tensor.shape()), expected));
        }
        Ok((tensor.data(), tensor.shape().to_vec()))
    }

    fn wrong(&self, tensor: &str, found: String, expected: String) -> GoldenError {
        GoldenError::Tensor { file: PathBuf::from(self.file), tensor: tensor.to_owned(), found, expected }
    }
}
