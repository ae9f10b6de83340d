//! A loaded model.

use std::{
    borrow::Cow,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use kvmig_gate::{Digest, DigestBuilder};
use rayon::ThreadPool;

use crate::cache::{CacheLayout, Elem};

use super::{
    EngineError, LoadOptions, ModelConfig, ModelSource, Precision, Tokenizer, config,
    gguf::{self, Gguf},
    hf::{FileBytes, Folder, read_file},
    json::JsonFile,
    opening::Opening,
    tokenizer,
    weights::Weights,
};

/// A decoder with its weights in memory and its tokenizer.
#[derive(Debug)]
pub struct Model {
    name: String,
    config: ModelConfig,
    layout: CacheLayout,
    digest: Digest,
    tokenizer: Tokenizer,
    pub(super) weights: Weights,
    /// Once it is computed; of a model whose texts begin with nothing, none.
    pub(super) opening: OnceLock<Option<Opening>>,
    pool: Option<ThreadPool>,
}

impl Model {
    /// Reads and checks a model's files.
    ///
    /// # Errors
    /// [`EngineError`], naming file and field: absent, truncated or damaged files, weights that don't match the
    /// configuration, NaN in them, and features that no parity test covers.
    pub fn load(source: &ModelSource, options: LoadOptions) -> Result<Model, EngineError> {
        let pool = match options.threads {
            None => None,
            Some(n) => Some(rayon::ThreadPoolBuilder::new().num_threads(n.max(1)).build()?),
        };
        let load = || match source {
            ModelSource::Path(path) if !path.exists() => Err(EngineError::Absent {
                file: path.clone(),
                what: "the model",
                mend: "expected a Hugging Face folder or a .gguf file".into(),
            }),
            ModelSource::Path(path) if path.is_dir() => {
                let config = Folder::read_config(path)?;
                let parsed = config::from_hf(&JsonFile::parse(&config.0, &config.1)?)?;
                from_folder(path, parsed, &Folder::read(path, config)?, options)
            }
            ModelSource::Path(path) => from_gguf(path, options),
            ModelSource::Embedded { name, config, weights, tokenizer, tokenizer_config } => {
                let config: FileBytes = (Path::new(name).join("config.json"), Cow::Borrowed(*config));
                let parsed = config::from_hf(&JsonFile::parse(&config.0, &config.1)?)?;
                let folder = Folder::embedded(name, config, weights, tokenizer, *tokenizer_config);
                from_folder(Path::new(name), parsed, &folder, options)
            }
        };
        let mut model = match &pool {
            Some(pool) => pool.install(load)?,
            None => load()?,
        };
        model.pool = pool;
        Ok(model)
    }

    /// What people call it: the file or folder name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Shape and constants.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Layout of its caches in single precision.
    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// Identity of the model: a digest over the bytes of its weights and its configuration.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// In which numbers it computes.
    pub fn precision(&self) -> Precision {
        self.weights.precision()
    }

    /// Its tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Whether `token` ends a text.
    pub fn is_eos(&self, token: u32) -> bool {
        self.config.eos.contains(&token)
    }

    /// Runs `work` on this model's threads.
    pub(super) fn on_threads<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        match &self.pool {
            Some(pool) => pool.install(work),
            None => work(),
        }
    }

    /// Refuses an empty prompt, one beyond the model's positions, and tokens beyond its vocabulary.
    pub(super) fn check_tokens(&self, tokens: &[u32]) -> Result<(), EngineError> {
        if tokens.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        let expected = self.config.vocab;
        if let Some(index) = tokens.iter().position(|&token| token as usize >= expected) {
            return Err(EngineError::TokenRange { found: tokens[index], index, expected });
        }
        self.check_positions(tokens.len())
    }

    pub(super) fn check_positions(&self, found: usize) -> Result<(), EngineError> {
        let expected = self.config.max_positions;
        if found > expected { Err(EngineError::TooLong { found, expected }) } else { Ok(()) }
    }
}

fn from_folder(path: &Path, config: ModelConfig, folder: &Folder, options: LoadOptions) -> Result<Model, EngineError> {
    let weights = || Weights::load(&folder.tensors()?, &config, options.precision);
    let ((weights, digest), tokenizer) =
        rayon::join(|| rayon::join(weights, || folder.digest()), || tokenizer::from_hf(folder, &config));
    let (tokenizer, weights) = (tokenizer?, weights?);
    Ok(assemble(path, config, digest, tokenizer, weights))
}

fn from_gguf(path: &Path, options: LoadOptions) -> Result<Model, EngineError> {
    let (_, bytes) = read_file(path, "the model", "")?;
    let gguf = Gguf::parse(path, &bytes)?;
    let factors = gguf::Tensors::new(&gguf, &bytes, None).rope_factors()?;
    let config = gguf::read_config(&gguf, factors.as_deref())?;
    let tensors = gguf::Tensors::new(&gguf, &bytes, Some(&config));
    let weights = || Weights::load(&tensors, &config, options.precision);
    let digest = || DigestBuilder::new("gguf-model").field("file", &bytes).finish();
    let ((weights, digest), tokenizer) =
        rayon::join(|| rayon::join(weights, digest), || tokenizer::from_gguf(&gguf, &config));
    let tokenizer = tokenizer?;
    let weights = weights?;
    Ok(assemble(path, config, digest, tokenizer, weights))
}

fn assemble(path: &Path, config: ModelConfig, digest: Digest, tokenizer: Tokenizer, weights: Weights) -> Model {
    let name = path.file_name().map_or_else(|| path.to_owned(), PathBuf::from).display().to_string();
    let layout = config.layout(Elem::F32);
    Model { name, config, layout, digest, tokenizer, weights, opening: OnceLock::new(), pool: None }
}
