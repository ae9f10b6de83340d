//! The tokenizer that a GGUF file carries.

use tokenizers::{
    AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior,
    decoders::byte_level::ByteLevel as ByteLevelDecoder,
    models::bpe::{BPE, Merges, Vocab},
    pre_tokenizers::{
        byte_level::ByteLevel,
        digits::Digits,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
};

use crate::engine::{EngineError, ModelConfig, gguf::Gguf};

use super::{Tokenizer, pieces};

/// How a text is cut before the merges, by the name in `tokenizer.ggml.pre`.
#[derive(Clone, Copy)]
enum Cut {
    /// The regular expression of GPT-2.
    Gpt2,
    /// The same, after each digit has been cut out.
    SmolLm,
    /// Qwen 2 and 3: single digits, and line ends stay with symbols.
    Qwen2,
    /// Llama 3: as Qwen's, up to three digits together; a word that is a token needs no merges.
    Llama3,
}

// Values of `tokenizer.ggml.token_type`.
pub(super) const NORMAL: i64 = 1;
pub(super) const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
pub(super) const USER_DEFINED: i64 = 4;
const UNUSED: i64 = 5;

/// What each token is.
#[derive(Clone, Copy)]
pub(super) struct Kinds<'a>(&'a [i64]);

impl Kinds<'_> {
    pub(super) fn of(self, id: usize) -> i64 {
        self.0.get(id).copied().unwrap_or(NORMAL)
    }

    /// The tokens in use, with their ids.
    fn used(self, tokens: &[String]) -> impl Iterator<Item = (usize, &String)> {
        tokens.iter().enumerate().filter(move |(id, _)| self.of(*id) != UNUSED)
    }

    pub(super) fn vocab(self, tokens: &[String]) -> Vocab {
        self.used(tokens).map(|(id, token)| (token.clone(), id as u32)).collect()
    }

    fn added(self, tokens: &[String], wanted: i64, special: bool) -> Vec<AddedToken> {
        let wanted = self.used(tokens).filter(|(id, _)| self.of(*id) == wanted);
        wanted.map(|(_, token)| AddedToken::from(token.clone(), special).normalized(false)).collect()
    }
}

/// Builds the tokenizer from the metadata. A GGUF file names no normalisation: as in llama.cpp there is none, although
/// Qwen's own `tokenizer.json` composes a letter and its accent (NFC) first.
pub(in crate::engine) fn from_gguf(gguf: &Gguf, config: &ModelConfig) -> Result<Tokenizer, EngineError> {
    let tokens = gguf.texts("tokenizer.ggml.tokens")?;
    if tokens.len() > config.vocab {
        let expected = format!("at most {}, the rows of token_embd.weight", config.vocab);
        return Err(gguf.malformed("tokenizer.ggml.tokens", &tokens.len(), &expected));
    }
    let kinds = Kinds(gguf.wholes("tokenizer.ggml.token_type")?.unwrap_or(&[]));
    // What llama.cpp does where the file doesn't say.
    let (mut inner, adds_bos) = match gguf.text("tokenizer.ggml.model")? {
        Some("gpt2") => {
            let cut = cut(gguf)?;
            (byte_level(gguf, tokens, kinds, cut)?, matches!(cut, Cut::Llama3))
        }
        Some("llama") => (pieces::tokenizer(gguf, tokens, kinds)?, true),
        other => {
            let found = other.map_or("nothing".into(), |name| format!("a `{name}` tokenizer"));
            let expected = "gpt2 (byte-level BPE) or llama (SentencePiece)";
            return Err(gguf.unsupported("tokenizer.ggml.model", found, expected));
        }
    };
    inner.add_special_tokens(&kinds.added(tokens, CONTROL, true));
    inner.add_tokens(&kinds.added(tokens, USER_DEFINED, false));
    let adds_bos = gguf.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(adds_bos);
    Tokenizer::new(&gguf.file, inner, config.bos.filter(|_| adds_bos))
}

fn cut(gguf: &Gguf) -> Result<Cut, EngineError> {
    match gguf.text("tokenizer.ggml.pre")? {
        None | Some("default" | "gpt-2" | "gpt2") => Ok(Cut::Gpt2),
        Some("smollm") => Ok(Cut::SmolLm),
        Some("qwen2" | "deepseek-r1-qwen") => Ok(Cut::Qwen2),
        Some("llama-bpe" | "llama3" | "llama-v3") => Ok(Cut::Llama3),
        Some(other) => {
            let found = format!("pre-tokenizer `{other}`");
            Err(gguf.unsupported("tokenizer.ggml.pre", found, "default, gpt-2, smollm, qwen2 or llama-bpe"))
        }
    }
}

/// Byte-level BPE without its added tokens.
fn byte_level(
    gguf: &Gguf,
    tokens: &[String],
    kinds: Kinds<'_>,
    cut: Cut,
) -> Result<tokenizers::Tokenizer, EngineError> {
    let error = |reason: String| EngineError::Tokenizer { file: gguf.file.clone(), reason };
    let mut merges = Merges::new();
    for (i, merge) in gguf.texts("tokenizer.ggml.merges")?.iter().enumerate() {
        // A token never is a space of its own: byte-level BPE writes it as Ġ.
        let Some((left, right)) = merge.split_once(' ') else {
            return Err(gguf.malformed(
                &format!("tokenizer.ggml.merges[{i}]"),
                merge,
                "two tokens with a space between",
            ));
        };
        merges.push((left.into(), right.into()));
    }
    let bpe = BPE::builder().vocab_and_merges(kinds.vocab(tokens), merges).ignore_merges(matches!(cut, Cut::Llama3));
    let mut inner = tokenizers::Tokenizer::new(bpe.build().map_err(|e| error(e.to_string()))?);
    inner.with_pre_tokenizer(Some(pre_tokenizer(cut).map_err(|e| error(e.to_string()))?));
    inner.with_decoder(Some(ByteLevelDecoder::default()));
    Ok(inner)
}

fn pre_tokenizer(cut: Cut) -> tokenizers::Result<PreTokenizerWrapper> {
    let bytes = ByteLevel::new(false, true, matches!(cut, Cut::Gpt2 | Cut::SmolLm));
    let digits = match cut {
        Cut::Gpt2 => return Ok(bytes.into()),
        Cut::SmolLm => {
            let parts = vec![Digits::new(true).into(), bytes.into()];
            return Ok(Sequence::new(parts).into());
        }
        Cut::Qwen2 => r"\p{N}",
        Cut::Llama3 => r"\p{N}{1,3}",
    };
    let pattern = format!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    );
    let split = Split::new(SplitPattern::Regex(pattern), SplitDelimiterBehavior::Isolated, false)?;
    Ok(Sequence::new(vec![split.into(), bytes.into()]).into())
}
