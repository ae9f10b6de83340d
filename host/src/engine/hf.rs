//! Hugging Face folders: `config.json`, safetensors, `tokenizer.json`.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashSet},
    fs, io,
    path::{Path, PathBuf},
};

use half::{bf16, f16};
use kvmig_gate::{Digest, DigestBuilder};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use super::{
    EngineError, ModelConfig, Precision,
    json::JsonFile,
    linear::{Matrix, Numbers},
    weights::{LayerPart, Part, TensorFiles, check_finite, check_shape},
};

/// Bytes and the file they came from, for messages.
pub(super) type FileBytes = (PathBuf, Cow<'static, [u8]>);

/// The bytes of a folder, wherever they lie.
pub(super) struct Folder {
    /// The folder itself, for messages about what is in none of its files.
    name: PathBuf,
    pub(super) config: FileBytes,
    weights: Vec<FileBytes>,
    pub(super) tokenizer: FileBytes,
    pub(super) tokenizer_config: Option<FileBytes>,
}

impl Folder {
    /// Reads a folder's configuration, so that a model can be refused by it before its weights are read.
    pub(super) fn read_config(folder: &Path) -> Result<FileBytes, EngineError> {
        read_file(&folder.join("config.json"), "the configuration", "a Hugging Face folder has it")
    }

    /// Reads the rest of a folder. `tokenizer.json` and `tokenizer_config.json` may lie in the folder above, where several
    /// siblings share them.
    pub(super) fn read(folder: &Path, config: FileBytes) -> Result<Folder, EngineError> {
        let shared = |name: &str| {
            let own = folder.join(name);
            let above = folder.parent().map(|parent| parent.join(name));
            if own.exists() { own } else { above.filter(|path| path.exists()).unwrap_or(own) }
        };
        let mend = "a Hugging Face folder has it; a SentencePiece `tokenizer.model` alone is not enough";
        let tokenizer = read_file(&shared("tokenizer.json"), "the tokenizer", mend)?;
        let settings = shared("tokenizer_config.json");
        let tokenizer_config = match settings.exists() {
            true => Some(read_file(&settings, "the tokenizer's settings", "")?),
            false => None,
        };
        let weights = weight_files(folder)?.into_iter().map(|file| read_file(&file, "a shard", "fetch every shard"));
        let weights = weights.collect::<Result<_, _>>()?;
        Ok(Folder { name: folder.to_owned(), config, weights, tokenizer, tokenizer_config })
    }

    /// The same files, compiled into the program.
    pub(super) fn embedded(
        name: &str,
        config: FileBytes,
        weights: &[&'static [u8]],
        tokenizer: &'static [u8],
        tokenizer_config: Option<&'static [u8]>,
    ) -> Folder {
        let name = PathBuf::from(name);
        let weights = weights.iter().enumerate();
        Folder {
            config,
            weights: weights.map(|(i, w)| (name.join(format!("weights {i}")), (*w).into())).collect(),
            tokenizer: (name.join("tokenizer.json"), tokenizer.into()),
            tokenizer_config: tokenizer_config.map(|bytes| (name.join("tokenizer_config.json"), bytes.into())),
            name,
        }
    }

    /// Identity of the model: configuration and weights, byte for byte.
    pub(super) fn digest(&self) -> Digest {
        let digest = DigestBuilder::new("hugging-face-model").field("config", &self.config.1);
        let digest = self.weights.iter().fold(digest, |digest, (_, bytes)| digest.field("weights", bytes));
        digest.finish()
    }

    /// Parses the headers of all weight files.
    pub(super) fn tensors(&self) -> Result<Tensors<'_>, EngineError> {
        let mut tensors = BTreeMap::new();
        for (file, bytes) in &self.weights {
            check_header(file, bytes)?;
            let parsed = SafeTensors::deserialize(bytes).map_err(|e| EngineError::Malformed {
                file: file.clone(),
                field: "header".into(),
                found: format!("an error: {e}"),
                expected: "safetensors, complete; fetch the file again".into(),
            })?;
            tensors.extend(parsed.tensors().into_iter().map(|(name, view)| (name, (file.as_path(), view))));
        }
        Ok(Tensors { folder: &self.name, tensors })
    }
}

/// The files that hold the weights: one, or the shards that the index names.
fn weight_files(folder: &Path) -> Result<Vec<PathBuf>, EngineError> {
    let single = folder.join("model.safetensors");
    if single.exists() {
        return Ok(vec![single]);
    }
    let index = folder.join("model.safetensors.index.json");
    if !index.exists() {
        let mend =
            "expected model.safetensors, or model.safetensors.index.json and its shards; pickled `.bin` weights are \
                    not read"
                .into();
        return Err(EngineError::Absent { file: single, what: "the weights", mend });
    }
    let (_, bytes) = read_file(&index, "the index", "")?;
    let json = JsonFile::parse(&index, &bytes)?;
    let map = json.get("weight_map").and_then(|map| map.as_object());
    let map = map.ok_or_else(|| json.malformed("weight_map", "nothing".into(), "an object: tensor name → file"))?;
    let mut files = Vec::new();
    for (tensor, file) in map {
        // A name with a folder in it could lead anywhere.
        let name = file.as_str().filter(|name| Path::new(name).file_name().is_some_and(|f| f == *name));
        let field = format!("weight_map.{tensor}");
        let name = name.ok_or_else(|| json.malformed(&field, file.to_string(), "the name of a file in this folder"))?;
        files.push(folder.join(name));
    }
    files.sort();
    files.dedup();
    Ok(files)
}

pub(super) fn read_file(file: &Path, what: &'static str, mend: &str) -> Result<FileBytes, EngineError> {
    match fs::read(file) {
        Ok(bytes) => Ok((file.to_owned(), bytes.into())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            Err(EngineError::Absent { file: file.to_owned(), what, mend: mend.into() })
        }
        Err(source) => Err(EngineError::Read { file: file.to_owned(), source }),
    }
}

/// Tells a truncated file from a damaged one, which the parser does not.
fn check_header(file: &Path, bytes: &[u8]) -> Result<(), EngineError> {
    let truncated = |field: &str, expected: u64| EngineError::Truncated {
        file: file.to_owned(),
        field: field.into(),
        found: bytes.len() as u64,
        expected,
    };
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else { return Err(truncated("header length", 8)) };
    let length = u64::from_le_bytes(*length);
    if length > rest.len() as u64 {
        // A damaged length is not a missing terabyte.
        return if length < 100_000_000 {
            Err(truncated("header", length + 8))
        } else {
            Err(EngineError::Malformed {
                file: file.to_owned(),
                field: "header length".into(),
                found: length.to_string(),
                expected: "at most 100000000 bytes, as in any safetensors file".into(),
            })
        };
    }
    // The parser says of any size that does not add up that the metadata is incomplete; too short is worth telling.
    let announced = serde_json::from_slice::<serde_json::Value>(&rest[..length as usize]).ok().and_then(|header| {
        let ends = header.as_object()?.values().filter_map(|tensor| tensor.get("data_offsets")?.get(1)?.as_u64());
        ends.max()
    });
    let expected = announced.map(|end| end.saturating_add(length + 8)).unwrap_or(0);
    if (bytes.len() as u64) < expected {
        return Err(truncated("tensor data", expected));
    }
    Ok(())
}

/// The tensors of a folder by name.
pub(super) struct Tensors<'a> {
    folder: &'a Path,
    tensors: BTreeMap<String, (&'a Path, TensorView<'a>)>,
}

impl Tensors<'_> {
    fn read(&self, part: Part, expected: &[usize]) -> Result<Vec<f32>, EngineError> {
        let name = self.name(part);
        let Some((file, view)) = self.tensors.get(&name) else {
            let (file, expected) = (self.folder.to_owned(), expected.to_vec());
            return Err(EngineError::MissingTensor { file, tensor: name, expected });
        };
        check_shape(file, &name, view.shape(), expected)?;
        let bytes = view.data();
        let values: Vec<f32> = match view.dtype() {
            Dtype::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Dtype::F16 => bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            Dtype::BF16 => bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
            other => {
                return Err(EngineError::Unsupported {
                    file: file.to_path_buf(),
                    field: format!("tensor `{name}`"),
                    found: format!("element type {other:?}"),
                    expected: "F32, F16 or BF16".into(),
                });
            }
        };
        check_finite(file, &name, &values)?;
        Ok(values)
    }
}

impl TensorFiles for Tensors<'_> {
    fn name(&self, part: Part) -> String {
        let (layer, part) = match part {
            Part::Embedding => return "model.embed_tokens.weight".into(),
            Part::Norm => return "model.norm.weight".into(),
            Part::Head => return "lm_head.weight".into(),
            Part::Layer(layer, part) => (layer, part),
        };
        let name = match part {
            LayerPart::AttentionNorm => "input_layernorm.weight",
            LayerPart::Q => "self_attn.q_proj.weight",
            LayerPart::K => "self_attn.k_proj.weight",
            LayerPart::V => "self_attn.v_proj.weight",
            LayerPart::QBias => "self_attn.q_proj.bias",
            LayerPart::KBias => "self_attn.k_proj.bias",
            LayerPart::VBias => "self_attn.v_proj.bias",
            LayerPart::QNorm => "self_attn.q_norm.weight",
            LayerPart::KNorm => "self_attn.k_norm.weight",
            LayerPart::O => "self_attn.o_proj.weight",
            LayerPart::FfnNorm => "post_attention_layernorm.weight",
            LayerPart::Gate => "mlp.gate_proj.weight",
            LayerPart::Up => "mlp.up_proj.weight",
            LayerPart::Down => "mlp.down_proj.weight",
        };
        format!("model.layers.{layer}.{name}")
    }

    fn vector(&self, part: Part, len: usize) -> Result<Vec<f32>, EngineError> {
        self.read(part, &[len])
    }

    fn matrix(&self, part: Part, outputs: usize, inputs: usize, _: Precision) -> Result<Matrix, EngineError> {
        let numbers = Numbers::Dense(self.read(part, &[outputs, inputs])?);
        Ok(Matrix { outputs, inputs, numbers })
    }

    fn count(&self) -> usize {
        self.tensors.len()
    }

    fn refuse_others(&self, expected: &HashSet<String>, config: &ModelConfig) -> Result<(), EngineError> {
        // Tables that old exports carry, and the copy of a tied embedding, change nothing.
        let harmless = |name: &str| name.ends_with("rotary_emb.inv_freq") || (config.tied && name == "lm_head.weight");
        match self.tensors.iter().find(|(name, _)| !expected.contains(*name) && !harmless(name)) {
            None => Ok(()),
            Some((name, (file, _))) => Err(EngineError::Unsupported {
                file: file.to_path_buf(),
                field: format!("tensor `{name}`"),
                found: format!(
                    "a part that {:?} models with {} layers do not have",
                    config.architecture, config.layers
                ),
                expected: "only the tensors of this architecture".into(),
            }),
        }
    }
}
