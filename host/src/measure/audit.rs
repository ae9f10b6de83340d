//! The realised quality of one migration: what its cache made of the target's own greedy continuation, against the target's
//! own prefill. Held-out evidence and live audits go through the same code, so that they are exchangeable (METHOD §5).

use std::time::Instant;

use kvmig_gate::Quality;

use super::{
    cosine::{self, Queries},
    quality::{self, Logits, QualityError, most_likely},
};
use crate::engine::{EngineError, Model, PrefillOptions, Session};

/// Tokens of the continuation that is compared.
pub const CONTINUATION: usize = 32;

/// Last prompt positions whose queries look at both caches.
const QUERY_ROWS: usize = 32;

/// A measurement that could not be made.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The logits can't be compared.
    #[error(transparent)]
    Quality(#[from] QualityError),
    /// The session is not behind the prompt that is audited.
    #[error(
        "the audited session holds {found} tokens that are not the prompt's {expected}: rewind it to the prompt first"
    )]
    OtherPrompt {
        /// Tokens of the session.
        found: usize,
        /// Tokens of the prompt.
        expected: usize,
    },
}

/// What an audit found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Audited {
    /// The quality, cosines included.
    pub quality: Quality,
    /// The target's ordinary prefill to its first token, in milliseconds.
    pub reprefill_ms: f64,
}

/// Measures a migrated session that stands behind the prompt `tokens`; it is left as it is.
///
/// # Errors
/// [`AuditError`].
pub fn audit(target: &Model, session: &Session<'_>, tokens: &[u32]) -> Result<Audited, AuditError> {
    // Near the end of the model's positions the comparison is as long as there is room for.
    let room = (target.config().max_positions + 1).saturating_sub(tokens.len());
    let native = Native::run(target, tokens, CONTINUATION.min(room), &[])?;
    Ok(Audited { quality: native.quality_of_mapped(session, tokens)?, reprefill_ms: native.prefill_ms() })
}

/// The target on its own: its prefill, its greedy continuation, and the logits and queries behind them.
#[derive(Debug)]
pub struct Native<'m> {
    session: Session<'m>,
    greedy: Continuation,
    text: Continuation,
    queries: Queries,
    prefill_ms: f64,
}

/// Tokens behind the prompt and the target's own distributions of them.
#[derive(Debug, Default)]
struct Continuation {
    tokens: Vec<u32>,
    /// `[n, vocab]`: row i predicts token i.
    logits: Vec<f32>,
}

impl<'m> Native<'m> {
    /// Prefills `tokens` and continues greedily for `n` tokens, or to the end of the text. `text` is how the document itself
    /// goes on, for [`Native::quality_on_text`]; it may be empty.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn run(target: &'m Model, tokens: &[u32], n: usize, text: &[u32]) -> Result<Native<'m>, EngineError> {
        let config = target.config();
        let first = tokens.len().saturating_sub(QUERY_ROWS) as u32;
        let mut queries = Queries::from_position(first, config.layers, config.heads, config.head_dim);
        let planes = Some(target.reserve(tokens.len() + n));
        let clock = Instant::now();
        let options = PrefillOptions { planes, ..PrefillOptions::default() };
        let mut session = target.session(target.prefill(tokens, options)?)?;
        let prefill_ms = clock.elapsed().as_secs_f64() * 1e3;
        // Not while the clock runs: an observed pass computes more than the ordinary prefill does.
        session.observe(QUERY_ROWS, &mut queries)?;
        let text = Continuation { tokens: text.to_vec(), logits: logits(&session, text)? };
        let mut greedy = Continuation::default();
        while greedy.tokens.len() < n {
            let token = most_likely(session.logits()) as u32;
            greedy.tokens.push(token);
            greedy.logits.extend_from_slice(session.logits());
            if target.is_eos(token) {
                break;
            }
            if greedy.tokens.len() < n {
                session.step(token)?;
            }
        }
        Ok(Native { session, greedy, text, queries, prefill_ms })
    }

    /// The target's greedy continuation; its last token may be one that ends a text.
    pub fn continuation(&self) -> &[u32] {
        &self.greedy.tokens
    }

    /// The prefill to the first token, in milliseconds.
    pub fn prefill_ms(&self) -> f64 {
        self.prefill_ms
    }

    /// Quality of another session behind the same prompt (or part of it), by its logits alone.
    ///
    /// # Errors
    /// [`AuditError`].
    pub fn quality_of(&self, arm: &'static str, session: &Session<'_>) -> Result<Quality, AuditError> {
        self.compare(arm, session, &self.greedy)
    }

    /// The same on the document's own next tokens, which is how figures of others are often made. Not what the gate judges
    /// by: a live request has no such tokens.
    ///
    /// # Errors
    /// [`QualityError::Empty`] where no text was given, otherwise as [`Native::quality_of`].
    pub fn quality_on_text(&self, arm: &'static str, session: &Session<'_>) -> Result<Quality, AuditError> {
        self.compare(arm, session, &self.text)
    }

    fn compare(
        &self,
        arm: &'static str,
        session: &Session<'_>,
        continuation: &Continuation,
    ) -> Result<Quality, AuditError> {
        let values = logits(session, &continuation.tokens)?;
        let target = Logits { values: &continuation.logits, vocab: self.session.model().config().vocab };
        let logits = Logits { values: &values, vocab: session.model().config().vocab };
        Ok(quality::compare(target, (arm, logits), &continuation.tokens)?)
    }

    /// Quality of a migrated session, attention-output cosines included.
    ///
    /// # Errors
    /// [`AuditError::OtherPrompt`] if the session's slots are not the prompt's, otherwise as [`Native::quality_of`].
    pub fn quality_of_mapped(&self, session: &Session<'_>, tokens: &[u32]) -> Result<Quality, AuditError> {
        if session.tokens() != tokens {
            return Err(AuditError::OtherPrompt { found: session.tokens().len(), expected: tokens.len() });
        }
        let cosines = cosine::compare(&self.queries, self.session.planes(), session.planes());
        let quality = self.quality_of("mapped", session)?;
        let (mean, worst) = (cosines.mean(), cosines.worst_layer());
        Ok(Quality { cosine_mean: Some(mean), cosine_worst_layer: Some(worst), ..quality })
    }
}

/// `[n, vocab]`: what a session makes of `tokens` behind its own.
fn logits(session: &Session<'_>, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
    Ok(session.score(&[tokens])?.pop().map_or_else(Vec::new, |scored| scored.logits))
}
