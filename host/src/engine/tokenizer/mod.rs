//! Text to tokens and back, with the model's own convention for the BOS token.

mod gguf;
mod hf;
mod pieces;
mod sibling;
mod stream;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use kvmig_gate::{Digest, DigestBuilder};

use super::EngineError;

pub(super) use gguf::from_gguf;
pub(super) use hf::from_hf;
pub use sibling::OtherTokenizer;
pub use stream::TextStream;

/// A text whose tokens go into the digest: numbers, contractions, letters with and without accents, runs of spaces, line
/// ends and symbols, so that two tokenizers of one vocabulary that cut texts differently are told apart.
const PROBE: &str = "It's 3.14159, isn't it?  We'll see\u{2014}na\u{ef}ve caf\u{e9} \u{4f60}\u{597d}, \u{43f}\u{440}\u{438}\
                     \u{432}\u{435}\u{442}!\n\n\tfn main() { let x = 1_000; }\r\n    // ---- ####\u{1f642} ABCdef I'M 12345678  \n";

/// A model's tokenizer.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    file: PathBuf,
    inner: Arc<tokenizers::Tokenizer>,
    /// Put before every text, unless the tokenizer's own post-processing does it.
    bos: Option<u32>,
    /// What every text starts with: the tokens of the empty one.
    start: Vec<u32>,
    digest: Digest,
}

impl Tokenizer {
    /// `bos` is put before a text that does not start with it already.
    fn new(file: &Path, inner: tokenizers::Tokenizer, bos: Option<u32>) -> Result<Tokenizer, EngineError> {
        let inner = Arc::new(inner);
        let mut tokenizer = Tokenizer { file: file.to_owned(), inner, bos, start: vec![], digest: Digest::of(&[]) };
        tokenizer.start = tokenizer.encode("")?;
        tokenizer.digest = tokenizer.compute_digest()?;
        Ok(tokenizer)
    }

    /// What every text starts with: the tokens of the empty one.
    pub fn start(&self) -> &[u32] {
        &self.start
    }

    /// The tokens of `text`, special tokens in it included, after the BOS token where the model's texts start with one.
    ///
    /// # Errors
    /// [`EngineError::Tokenizer`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, EngineError> {
        let mut ids = self.ids(text, true)?;
        if let Some(bos) = self.bos.filter(|bos| ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// The tokens of a text that continues another: without BOS.
    ///
    /// # Errors
    /// [`EngineError::Tokenizer`].
    pub fn encode_continuation(&self, text: &str) -> Result<Vec<u32>, EngineError> {
        self.ids(text, false)
    }

    /// The text of `tokens`, special tokens left out; bytes that are no UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`EngineError::Tokenizer`].
    pub fn decode(&self, tokens: &[u32]) -> Result<String, EngineError> {
        self.inner.decode(tokens, true).map_err(|e| self.error(e))
    }

    /// Starts decoding a text token by token.
    pub fn stream(&self) -> TextStream {
        TextStream::new(self.clone())
    }

    /// What makes two models siblings: a digest over the vocabulary, the special ids and the tokens of a probe text, which
    /// depend on merges and on how a text is cut. The file format does not matter, nor do unused places that fill up a
    /// vocabulary; what a text starts with is compared beside it, by [`Tokenizer::check_sibling`].
    pub fn tokenizer_digest(&self) -> Digest {
        self.digest
    }

    fn ids(&self, text: &str, special: bool) -> Result<Vec<u32>, EngineError> {
        let encoding = self.inner.encode_fast(text, special).map_err(|e| self.error(e))?;
        Ok(encoding.get_ids().to_vec())
    }

    fn compute_digest(&self) -> Result<Digest, EngineError> {
        let mut vocabulary: Vec<(u32, String)> =
            self.inner.get_vocab(true).into_iter().map(|(token, id)| (id, token)).collect();
        vocabulary.sort_unstable();
        let mut bytes = Vec::with_capacity(vocabulary.len() * 16);
        for (id, token) in &vocabulary {
            bytes.extend(id.to_le_bytes());
            bytes.extend((token.len() as u64).to_le_bytes());
            bytes.extend(token.as_bytes());
        }
        let added = self.inner.get_added_tokens_decoder();
        let mut special: Vec<u32> = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        special.sort_unstable();
        let words = |ids: &[u32]| ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>();
        let probe = self.ids(PROBE, false)?;
        Ok(DigestBuilder::new("tokenizer")
            .field("vocabulary", &bytes)
            .field("special", &words(&special))
            .field("probe", &words(&probe))
            .finish())
    }

    fn error(&self, reason: tokenizers::Error) -> EngineError {
        EngineError::Tokenizer { file: self.file.clone(), reason: reason.to_string() }
    }
}
