//! The tokenizer of a Hugging Face folder.

use crate::engine::{EngineError, ModelConfig, hf::Folder, json::JsonFile};

use super::Tokenizer;

/// `tokenizer.json`, with the BOS convention of `tokenizer_config.json` where there is one.
pub(in crate::engine) fn from_hf(folder: &Folder, config: &ModelConfig) -> Result<Tokenizer, EngineError> {
    let (file, bytes) = &folder.tokenizer;
    let error = |reason: String| EngineError::Tokenizer { file: file.clone(), reason };
    // Parsed once more as plain JSON on failure only: its message names the place, the tokenizer's does not.
    let inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| match JsonFile::parse(file, bytes) {
        Err(plain) => plain,
        Ok(_) => error(e.to_string()),
    })?;
    let highest = inner.get_vocab(true).into_values().max().unwrap_or(0) as usize;
    if highest >= config.vocab {
        return Err(error(format!(
            "found token ids up to {highest}, expected them below the model's vocab_size {}; tokenizer and weights are of \
             different models",
            config.vocab
        )));
    }
    let adds_bos = match &folder.tokenizer_config {
        Some((file, bytes)) => JsonFile::parse(file, bytes)?.boolean("add_bos_token")?.unwrap_or(false),
        None => false,
    };
    let bos = if adds_bos {
        let id = config.bos.ok_or_else(|| EngineError::Malformed {
            file: folder.config.0.clone(),
            field: "bos_token_id".into(),
            found: "nothing".into(),
            expected: "a token id, since tokenizer_config.json says add_bos_token".into(),
        })?;
        Some(id)
    } else {
        None
    };
    Tokenizer::new(file, inner, bos)
}
