//! A conversation in progress.

use crate::cache::{CacheLayout, KvCache, KvPlanes, MappedCache, Provenance};

use super::{
    EngineError, Model, Observer, PrefillOptions,
    forward::{Batch, Prefix, Want},
    prefill::Fill,
    sampling::{greedy, log_prob},
};

/// Rows that are scored in one pass: bounds their activations and logits.
const SCORE_ROWS: usize = 256;

/// A model, a cache, and the logits behind the cache's last token.
#[derive(Debug)]
pub struct Session<'m> {
    model: &'m Model,
    store: Store,
    logits: Vec<f32>,
}

/// The cache of a session, which stays what it was.
#[derive(Debug)]
pub(super) enum Store {
    Native(KvCache),
    Mapped(MappedCache),
}

/// A session's cache, handed back.
#[derive(Debug)]
pub enum SessionCache {
    /// Every slot was computed by the model itself.
    Native(KvCache),
    /// Some slots were mapped from another model's.
    Mapped(MappedCache),
}

/// One continuation's distributions.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// `[n, vocab]`: row i holds the logits that predict token i of the continuation.
    pub logits: Vec<f32>,
    /// `ln p(token i | prefix, tokens before i)`, in nats.
    pub log_probs: Vec<f64>,
}

impl<'m> Session<'m> {
    pub(super) fn new(model: &'m Model, store: Store, logits: Vec<f32>) -> Session<'m> {
        Session { model, store, logits }
    }

    /// The model.
    pub fn model(&self) -> &'m Model {
        self.model
    }

    /// Logits behind the last token, `[vocab]`.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// The token in each slot.
    pub fn tokens(&self) -> &[u32] {
        match &self.store {
            Store::Native(cache) => &cache.tokens,
            Store::Mapped(cache) => &cache.tokens,
        }
    }

    /// The position of each slot.
    pub fn positions(&self) -> &[u32] {
        match &self.store {
            Store::Native(cache) => &cache.positions,
            Store::Mapped(cache) => &cache.positions,
        }
    }

    /// Layout of the cache.
    pub fn layout(&self) -> &CacheLayout {
        self.planes().layout()
    }

    /// Keys and values.
    pub fn planes(&self) -> &KvPlanes {
        match &self.store {
            Store::Native(cache) => &cache.planes,
            Store::Mapped(cache) => &cache.planes,
        }
    }

    /// The history of a mapped cache; `None` for a native one.
    pub fn mapped_by(&self) -> Option<&Provenance> {
        match &self.store {
            Store::Native(_) => None,
            Store::Mapped(cache) => Some(&cache.provenance),
        }
    }

    /// Goes back to the first `len` slots, behind which the logits were `logits`; forgets what came after.
    ///
    /// # Panics
    /// If the session holds fewer tokens, or `logits` is not one row over the vocabulary.
    pub fn rewind(&mut self, len: usize, logits: Vec<f32>) {
        assert!(len <= self.tokens().len(), "a session of {} tokens can't go back to {len}", self.tokens().len());
        assert_eq!(logits.len(), self.model.config().vocab, "logits behind the last token");
        let (tokens, positions) = match &mut self.store {
            Store::Native(cache) => (&mut cache.tokens, &mut cache.positions),
            Store::Mapped(cache) => (&mut cache.tokens, &mut cache.positions),
        };
        tokens.truncate(len);
        positions.truncate(len);
        self.logits = logits;
    }

    /// Computes the last `rows` tokens once more for `observer` to see. Their keys and values are
    /// written anew, equal up to rounding: a batch of another size sums in another order.
    ///
    /// # Errors
    /// [`EngineError::NotFiniteLogits`].
    pub fn observe(&mut self, rows: usize, observer: &mut (dyn Observer + Send)) -> Result<(), EngineError> {
        let len = self.tokens().len();
        let slots: Vec<usize> = (len - rows.min(len)..len).collect();
        let at = |all: &[u32]| slots.iter().map(|&slot| all[slot]).collect::<Vec<u32>>();
        let (tokens, positions) = (at(self.tokens()), at(self.positions()));
        let planes = match &mut self.store {
            Store::Native(cache) => &mut cache.planes,
            Store::Mapped(cache) => &mut cache.planes,
        };
        let fill = Fill { tokens: &tokens, positions: &positions, slots: &slots };
        let options = PrefillOptions { observer: Some(observer), ..PrefillOptions::default() };
        self.model.fill(planes, fill, options).map(drop)
    }

    /// Ends the session and hands the cache back, native or mapped as it was. The session may have changed it: what was decided
    /// on the cache that went in does not hold for it.
    pub fn into_cache(self) -> SessionCache {
        match self.store {
            Store::Native(cache) => SessionCache::Native(cache.renumbered()),
            Store::Mapped(cache) => SessionCache::Mapped(cache),
        }
    }

    /// Appends `token` and returns the logits behind it.
    ///
    /// # Errors
    /// [`EngineError::TokenRange`], [`EngineError::TooLong`].
    pub fn step(&mut self, token: u32) -> Result<&[f32], EngineError> {
        self.model.check_tokens(&[token])?;
        let position = self.positions().last().map_or(0, |p| p + 1);
        self.model.check_positions(position as usize + 1)?;
        let slot = self.tokens().len();
        let (planes, tokens, positions) = match &mut self.store {
            Store::Native(cache) => (&mut cache.planes, &mut cache.tokens, &mut cache.positions),
            Store::Mapped(cache) => (&mut cache.planes, &mut cache.tokens, &mut cache.positions),
        };
        if slot == planes.capacity() {
            planes.reserve(slot, slot + (slot / 2).max(64));
        }
        let batch = Batch { tokens: &[token], positions: &[position], slots: &[slot], firsts: &[0] };
        self.logits = self.model.pass(&batch, planes, None, Want::Last, None)?;
        tokens.push(token);
        positions.push(position);
        Ok(&self.logits)
    }

    /// Appends the most probable token, up to `n` times or until a token that ends a text (which is returned but not
    /// appended); the tokens it chose.
    ///
    /// # Errors
    /// As [`Session::step`].
    pub fn greedy(&mut self, n: usize) -> Result<Vec<u32>, EngineError> {
        let mut chosen = Vec::with_capacity(n);
        while chosen.len() < n {
            let token = greedy(&self.logits);
            chosen.push(token);
            if self.model.is_eos(token) {
                break;
            }
            self.step(token)?;
        }
        Ok(chosen)
    }

    /// Scores each continuation behind this prefix, teacher-forced. The session does not change.
    ///
    /// # Errors
    /// [`EngineError::TokenRange`], [`EngineError::TooLong`].
    pub fn score(&self, continuations: &[&[u32]]) -> Result<Vec<Scored>, EngineError> {
        let mut scored = Vec::with_capacity(continuations.len());
        self.for_each_score(continuations, |continuation, logits| {
            let vocab = self.model.config().vocab;
            let log_probs =
                logits.chunks_exact(vocab).zip(continuation).map(|(row, &token)| log_prob(row, token)).collect();
            scored.push(Scored { logits, log_probs });
        })?;
        Ok(scored)
    }

    /// Only the log-probabilities of [`Session::score`]: for many choices over a large vocabulary.
    ///
    /// # Errors
    /// As [`Session::score`].
    pub fn log_probs(&self, continuations: &[&[u32]]) -> Result<Vec<Vec<f64>>, EngineError> {
        let mut scored = Vec::with_capacity(continuations.len());
        self.for_each_score(continuations, |continuation, logits| {
            let rows = logits.chunks_exact(self.model.config().vocab);
            scored.push(rows.zip(continuation).map(|(row, &token)| log_prob(row, token)).collect());
        })?;
        Ok(scored)
    }

    /// Calls `each` with every continuation and its `[n, vocab]` logits, in order.
    fn for_each_score(
        &self,
        continuations: &[&[u32]],
        mut each: impl FnMut(&[u32], Vec<f32>),
    ) -> Result<(), EngineError> {
        let start = self.positions().last().map_or(0, |p| p + 1);
        for continuation in continuations.iter().filter(|c| !c.is_empty()) {
            self.model.check_tokens(continuation)?;
            // The last token of a continuation is predicted, and takes no position.
            self.model.check_positions(start as usize + continuation.len() - 1)?;
        }
        let mut left = continuations;
        while !left.is_empty() {
            // The last token of a continuation is predicted but predicts nothing: it isn't computed.
            let mut rows = 0;
            let mut count = 0;
            for continuation in left {
                let more = continuation.len().saturating_sub(1);
                if count > 0 && rows + more > SCORE_ROWS {
                    break;
                }
                rows += more;
                count += 1;
            }
            let (group, rest) = left.split_at(count);
            self.score_group(group, rows, start, &mut each)?;
            left = rest;
        }
        Ok(())
    }

    fn score_group(
        &self,
        group: &[&[u32]],
        rows: usize,
        start: u32,
        each: &mut impl FnMut(&[u32], Vec<f32>),
    ) -> Result<(), EngineError> {
        let vocab = self.model.config().vocab;
        let (mut tokens, mut positions, mut firsts) = (Vec::new(), Vec::new(), Vec::new());
        for continuation in group {
            let first = tokens.len();
            let n = continuation.len().saturating_sub(1);
            tokens.extend(&continuation[..n]);
            positions.extend((0..n as u32).map(|i| start + i));
            firsts.resize(first + n, first);
        }
        let logits = if rows == 0 {
            Vec::new()
        } else {
            let mut own = KvPlanes::zeros(self.layout().clone(), rows);
            let slots: Vec<usize> = (0..rows).collect();
            let batch = Batch { tokens: &tokens, positions: &positions, slots: &slots, firsts: &firsts };
            let prefix = Prefix { planes: self.planes(), len: self.tokens().len() };
            self.model.pass(&batch, &mut own, Some(prefix), Want::All, None)?
        };
        let mut rest = &logits[..];
        for continuation in group {
            let (own, after) = rest.split_at(continuation.len().saturating_sub(1) * vocab);
            rest = after;
            let first: &[f32] = if continuation.is_empty() { &[] } else { &self.logits };
            each(continuation, [first, own].concat());
        }
        Ok(())
    }
}
