//! The lists of known answers, one function a folder of `tests/golden`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::answer::Tensors;
use super::{Answer, GoldenError, folder};

/// Where the model of a case lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A member of the bundled family, by name.
    Family(String),
    /// A Hugging Face folder or a GGUF file in `tests/golden`.
    Path(PathBuf),
}

/// One model and prompt with its known answer.
#[derive(Clone, Debug)]
pub struct Case {
    /// Name of the case, as test names and messages give it.
    pub name: String,
    /// The model.
    pub model: Location,
    /// What the case holds the engine to.
    pub why: String,
    /// The answer.
    pub answer: Answer,
    /// Strings and their token ids by the model's own tokenizer; empty where the case is not about that.
    pub strings: Vec<TokenIds>,
}

/// A string and its token ids: special tokens are recognised in it, none is added.
#[derive(Clone, Debug, Deserialize)]
pub struct TokenIds {
    /// The string.
    pub text: String,
    /// Its ids.
    pub ids: Vec<u32>,
}

/// A configuration that must be refused before any weight is read.
#[derive(Clone, Debug, Deserialize)]
pub struct Refused {
    /// Name of the case.
    pub name: String,
    /// Folder with nothing but a `config.json`.
    pub model: PathBuf,
    /// The refusal names at least one of these, whatever its case.
    pub must_name: Vec<String>,
}

/// A GGUF model that is not in the tree, and what others made of it.
#[derive(Clone, Debug, Deserialize)]
pub struct RealModel {
    /// File name.
    pub model: String,
    /// SHA-256 of the file the answers belong to, in hexadecimal.
    pub sha256: String,
    /// Its `tokenizer.ggml.pre`.
    pub pre_tokenizer: String,
    /// Prompts with their answers.
    pub cases: Vec<RealCase>,
    /// Tricky strings with their token ids.
    pub strings: Vec<TokenIds>,
    /// Those of the strings on which llama.cpp's ids are others.
    pub llama_cpp_ids_differ: Vec<String>,
}

/// One prompt of a [`RealModel`].
#[derive(Clone, Debug, Deserialize)]
pub struct RealCase {
    /// Name of the case and of its answer file.
    pub name: String,
    /// The prompt as text.
    pub prompt: String,
    /// transformers' greedy continuation as text.
    pub continuation: String,
    /// llama.cpp's greedy continuation: for information, because it computes with quantised activations.
    pub llama_cpp_greedy: Vec<u32>,
}

impl RealCase {
    /// The answer of transformers on the dequantised weights.
    ///
    /// # Errors
    /// As [`Answer::read`].
    pub fn answer(&self) -> Result<Answer, GoldenError> {
        Answer::read(&folder().join("models/answers").join(format!("{}.safetensors", self.name)))
    }
}

/// Frequencies and tables of one rotation.
#[derive(Clone, Debug, Deserialize)]
pub struct RopeCase {
    /// Name of the case.
    pub name: String,
    /// Base of the frequencies.
    pub theta: f64,
    /// Rotated dimensions.
    pub dims: usize,
    /// Scaling of the frequencies.
    pub scaling: RopeScaling,
    /// Radians per token, `[dims / 2]`.
    pub frequencies: Vec<f64>,
    /// Positions of the tables, `[p]`.
    pub positions: Vec<u32>,
    /// Cosines, `[p, dims / 2]`, to nine digits.
    pub cos: Vec<f64>,
    /// Sines, `[p, dims / 2]`, to nine digits.
    pub sin: Vec<f64>,
}

/// Scaling of a rotation in the words of a `config.json`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase", tag = "rope_type")]
pub enum RopeScaling {
    /// None.
    Default,
    /// Frequencies divided by the factor.
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// Llama 3.1's.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Upper end of the ramp, in wavelengths per original length.
        low_freq_factor: f64,
        /// Lower end of the ramp.
        high_freq_factor: f64,
        /// Original length, in tokens.
        original_max_position_embeddings: u32,
    },
}

/// The bundled family and the tiny random models in Hugging Face folders.
///
/// # Errors
/// If a file is missing or malformed; it is named.
pub fn engine() -> Result<Vec<Case>, GoldenError> {
    listed("engine")
}

/// The tiny random models in GGUF files.
///
/// # Errors
/// If a file is missing or malformed; it is named.
pub fn gguf() -> Result<Vec<Case>, GoldenError> {
    listed("gguf")
}

/// `gguf/sentencepiece.gguf`, and SentencePiece's ids of a few texts, as of ones that continue nothing, with the text that it
/// makes of them.
///
/// # Errors
/// If a file is missing or malformed; it is named.
pub fn sentencepiece() -> Result<(PathBuf, Vec<TokenIds>), GoldenError> {
    let strings = json(&folder().join("gguf/sentencepiece.json"))?;
    Ok((folder().join("gguf/sentencepiece.gguf"), strings))
}

/// `gguf/elements.gguf`, and the values of each of its tensors by name, row-major f32.
///
/// # Errors
/// If a file is missing or malformed; it is named.
pub fn elements() -> Result<(PathBuf, BTreeMap<String, Vec<f32>>), GoldenError> {
    let file = folder().join("gguf/elements.safetensors");
    let bytes = read(&file)?;
    let of =
        SafeTensors::deserialize(&bytes).map_err(|source| GoldenError::Safetensors { file: file.clone(), source })?;
    let tensors = Tensors { file: &file, of };
    let names: Vec<String> = tensors.of.names().into_iter().map(Into::into).collect();
    let values = names.into_iter().map(|name| {
        let shape = tensors.shape(&name)?;
        let values = tensors.floats(&name, &shape)?;
        Ok((name, values))
    });
    Ok((folder().join("gguf/elements.gguf"), values.collect::<Result<_, _>>()?))
}

/// Configurations to refuse.
///
/// # Errors
/// If a file is missing or malformed; it is named.
pub fn refused() -> Result<Vec<Refused>, GoldenError> {
    let root = folder().join("engine");
    let mut listed: Vec<Refused> = json(&root.join("refused.json"))?;
    for case in &mut listed {
        case.model = root.join(&case.model);
    }
    Ok(listed)
}

/// Real GGUF models, which a test finds in a folder that it is told of.
///
/// # Errors
/// If a file is missing or malformed; it is named.
pub fn real_models() -> Result<Vec<RealModel>, GoldenError> {
    let names = ["smollm2-135m", "qwen25-coder-0.5b"];
    names.iter().map(|name| json(&folder().join(format!("models/{name}.json")))).collect()
}

/// Rotations.
///
/// # Errors
/// If a file is missing or malformed; it is named.
pub fn rope() -> Result<Vec<RopeCase>, GoldenError> {
    json(&folder().join("rope/rope.json"))
}

/// The cases of one folder's `cases.json`, each with its answer file.
fn listed(under: &str) -> Result<Vec<Case>, GoldenError> {
    #[derive(Deserialize)]
    struct Entry {
        name: String,
        model: String,
        why: String,
        #[serde(default)]
        strings: Vec<TokenIds>,
    }
    let root = folder().join(under);
    let entries: Vec<Entry> = json(&root.join("cases.json"))?;
    let read = |entry: Entry| {
        let answer = root.join("answers").join(format!("{}.safetensors", entry.name));
        let model = match entry.model.strip_prefix("family:") {
            Some(member) => Location::Family(member.to_owned()),
            None => Location::Path(root.join(&entry.model)),
        };
        Ok(Case { name: entry.name, model, why: entry.why, answer: Answer::read(&answer)?, strings: entry.strings })
    };
    entries.into_iter().map(read).collect()
}

fn json<T: DeserializeOwned>(file: &Path) -> Result<T, GoldenError> {
    serde_json::from_slice(&read(file)?).map_err(|source| GoldenError::Json { file: file.to_owned(), source })
}

fn read(file: &Path) -> Result<Vec<u8>, GoldenError> {
    std::fs::read(file).map_err(|source| GoldenError::Read { file: file.to_owned(), source })
}
