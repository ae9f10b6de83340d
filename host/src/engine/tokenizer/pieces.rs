//! A SentencePiece tokenizer as a GGUF file carries it (Llama 2, Mistral): pieces with scores instead of merges.

use tokenizers::{
    decoders::{byte_fallback::ByteFallback, fuse::Fuse, sequence::Sequence as Decoders, strip::Strip},
    models::bpe::{BPE, Merges},
    normalizers::{prepend::Prepend, replace::Replace, utils::Sequence as Normalizers},
};

use crate::engine::{EngineError, gguf::Gguf};

use super::gguf::{Kinds, NORMAL, UNKNOWN, USER_DEFINED};

/// What a piece has for a space.
const SPACE: &str = "\u{2581}";

/// Builds the tokenizer without its added tokens.
///
/// SentencePiece joins the two neighbours whose joint piece has the highest score, again and again (Kudo & Richardson 2018,
/// §3.2); that is byte-pair encoding with a merge for every way to cut a piece in two, in the order of the scores. What no piece
/// covers becomes bytes.
pub(super) fn tokenizer(
    gguf: &Gguf,
    tokens: &[String],
    kinds: Kinds<'_>,
) -> Result<tokenizers::Tokenizer, EngineError> {
    let error = |reason: String| EngineError::Tokenizer { file: gguf.file.clone(), reason };
    let scores = gguf.reals("tokenizer.ggml.scores")?;
    if scores.len() != tokens.len() {
        let expected = format!("{}, one for each token", tokens.len());
        return Err(gguf.malformed("tokenizer.ggml.scores", &scores.len(), &expected));
    }
    if let Some(i) = scores.iter().position(|score| score.is_nan()) {
        return Err(gguf.malformed(&format!("tokenizer.ggml.scores[{i}]"), &scores[i], "a number"));
    }
    let vocab = kinds.vocab(tokens);
    let joins = |id: &usize| matches!(kinds.of(*id), NORMAL | USER_DEFINED);
    let known = |piece: &str| vocab.get(piece).is_some_and(|&id| joins(&(id as usize)));
    let mut merges: Vec<(f32, (String, String))> = Vec::new();
    for id in (0..tokens.len()).filter(joins) {
        let piece = &tokens[id];
        for (cut, _) in piece.char_indices().skip(1) {
            let (left, right) = piece.split_at(cut);
            if known(left) && known(right) {
                merges.push((scores[id], (left.to_owned(), right.to_owned())));
            }
        }
    }
    // Stable: of two ways to one piece, the shorter left part first.
    merges.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    let merges: Merges = merges.into_iter().map(|(_, merge)| merge).collect();
    let mut bpe = BPE::builder().vocab_and_merges(vocab, merges).byte_fallback(true).fuse_unk(true);
    if let Some(unknown) = (0..tokens.len()).find(|&id| kinds.of(id) == UNKNOWN) {
        bpe = bpe.unk_token(tokens[unknown].clone());
    }
    let mut inner = tokenizers::Tokenizer::new(bpe.build().map_err(|e| error(e.to_string()))?);
    let replace = |from: &str, to: &str| Replace::new(from, to).map_err(|e| error(e.to_string()));
    let prefix = gguf.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let mut normalizers = vec![replace(" ", SPACE)?.into()];
    let mut decoders = vec![replace(SPACE, " ")?.into(), ByteFallback::default().into(), Fuse::default().into()];
    if prefix {
        normalizers.insert(0, Prepend::new(SPACE.to_owned()).into());
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    inner.with_normalizer(Some(Normalizers::new(normalizers)));
    inner.with_decoder(Some(Decoders::new(decoders)));
    Ok(inner)
}
