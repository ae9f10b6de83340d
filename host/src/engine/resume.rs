//! The ways into a [`Session`]: from a prefill, from a native cache, from a mapped one, and from the ends alone.

use kvmig_gate::{Migrated, Trialled};

use crate::cache::{CacheLayout, Elem, KvCache, KvPlanes, MappedCache};

use super::{EngineError, Model, PrefillOptions, Prefilled, Session, prefill::Fill, session::Store};

/// A session behind a cache that was mapped on trial: it can be looked at and scored, but no token is decoded from it, because
/// everything that advances a [`Session`] needs it exclusively.
#[derive(Debug)]
pub struct TrialSession<'m>(Session<'m>);

impl<'m> std::ops::Deref for TrialSession<'m> {
    type Target = Session<'m>;

    fn deref(&self) -> &Session<'m> {
        &self.0
    }
}

impl Model {
    /// Continues a prefill: nothing is computed.
    ///
    /// # Errors
    /// [`EngineError::ForeignCache`] for another model's prefill.
    pub fn session(&self, prefilled: Prefilled) -> Result<Session<'_>, EngineError> {
        self.check_native(&prefilled.cache)?;
        Ok(Session::new(self, Store::Native(prefilled.cache), prefilled.logits))
    }

    /// Continues a native cache. A cache holds no logits: its last token is computed again.
    ///
    /// # Errors
    /// [`EngineError::ForeignCache`] for another model's cache, [`EngineError::CacheMismatch`] for a cache of another
    /// layout, [`EngineError::EmptyPrompt`] for an empty one.
    pub fn resume(&self, mut cache: KvCache) -> Result<Session<'_>, EngineError> {
        self.check_native(&cache)?;
        self.check_tokens(&cache.tokens)?;
        let last = cache.tokens.len() - 1;
        let fill = Fill { tokens: &cache.tokens[last..], positions: &cache.positions[last..], slots: &[last] };
        let logits = self.fill(&mut cache.planes, fill, PrefillOptions::default())?;
        Ok(Session::new(self, Store::Native(cache), logits))
    }

    /// Continues a migrated cache of the prompt `tokens`, after computing its first `head` and last `tail` tokens natively,
    /// in one batch: the *native ends*. At least the last token is computed, since a cache holds no logits.
    ///
    /// # Errors
    /// [`EngineError::CacheMismatch`] for a cache of another model, layout or prompt, or one that leaves a gap between its
    /// last slot and the tail.
    pub fn resume_mapped(
        &self,
        migrated: Migrated<MappedCache>,
        tokens: &[u32],
        head: usize,
        tail: usize,
    ) -> Result<Session<'_>, EngineError> {
        self.resume_released(migrated.release(), tokens, head, tail)
    }

    /// The same for a trial: held-out evaluation and audits, whose results are measured and never served.
    ///
    /// # Errors
    /// As [`Model::resume_mapped`].
    pub fn resume_trial(
        &self,
        trialled: Trialled<MappedCache>,
        tokens: &[u32],
        head: usize,
        tail: usize,
    ) -> Result<TrialSession<'_>, EngineError> {
        self.resume_released(trialled.release(), tokens, head, tail).map(TrialSession)
    }

    fn resume_released(
        &self,
        mut mapped: MappedCache,
        tokens: &[u32],
        head: usize,
        tail: usize,
    ) -> Result<Session<'_>, EngineError> {
        self.check_tokens(tokens)?;
        self.check_layout(mapped.planes.layout())?;
        if mapped.provenance.model != self.digest() {
            let (found, expected) = (mapped.provenance.model.to_string(), self.digest().to_string());
            return Err(EngineError::CacheMismatch { field: "model it was mapped for", found, expected });
        }
        let total = tokens.len();
        let ends = Ends::new(total, head, tail);
        check_prompt(&mapped, tokens, ends.tail_start)?;
        mapped.planes.reserve(mapped.tokens.len(), total);
        mapped.tokens = tokens.to_vec();
        mapped.positions = (0..total as u32).collect();
        let slots = ends.slots();
        let (tokens, positions) = ends.gather(tokens);
        let fill = Fill { tokens: &tokens, positions: &positions, slots: &slots };
        let logits = self.fill(&mut mapped.planes, fill, PrefillOptions::default())?;
        Ok(Session::new(self, Store::Mapped(mapped), logits))
    }

    /// The control arm: the same native ends at their true positions, the middle dropped (as StreamingLLM keeps sinks and a
    /// window). The cache has a gap in its positions.
    ///
    /// # Errors
    /// As [`Model::prefill`].
    pub fn ends_only(&self, tokens: &[u32], head: usize, tail: usize, elem: Elem) -> Result<Session<'_>, EngineError> {
        self.check_tokens(tokens)?;
        let (tokens, positions) = Ends::new(tokens.len(), head, tail).gather(tokens);
        let options = PrefillOptions { elem, ..PrefillOptions::default() };
        let planes = KvPlanes::zeros(self.config().layout(elem), tokens.len() + options.room);
        let mut cache = KvCache { planes, tokens, positions, model: self.digest() };
        let slots: Vec<usize> = (0..cache.tokens.len()).collect();
        let fill = Fill { tokens: &cache.tokens, positions: &cache.positions, slots: &slots };
        let logits = self.fill(&mut cache.planes, fill, options)?;
        Ok(Session::new(self, Store::Native(cache), logits))
    }

    fn check_native(&self, cache: &KvCache) -> Result<(), EngineError> {
        if cache.model != self.digest() {
            return Err(EngineError::ForeignCache { found: cache.model, expected: self.digest() });
        }
        self.check_layout(cache.planes.layout())
    }

    fn check_layout(&self, found: &CacheLayout) -> Result<(), EngineError> {
        let expected = self.config().layout(found.elem);
        let mismatch = |field, found: String, expected: String| {
            if found == expected { Ok(()) } else { Err(EngineError::CacheMismatch { field, found, expected }) }
        };
        mismatch("layers", found.layers.to_string(), expected.layers.to_string())?;
        mismatch("KV heads", found.kv_heads.to_string(), expected.kv_heads.to_string())?;
        mismatch("head width", found.head_dim.to_string(), expected.head_dim.to_string())?;
        mismatch("RoPE", format!("{:?}", found.rope), format!("{:?}", expected.rope))
    }
}

/// The mapped slots must be the prompt's, from its start and up to the native tail.
fn check_prompt(mapped: &MappedCache, tokens: &[u32], tail_start: usize) -> Result<(), EngineError> {
    let slots = mapped.tokens.len();
    if slots < tail_start || slots > tokens.len() {
        let expected = format!("{tail_start} to {} (up to the native tail, within the prompt)", tokens.len());
        return Err(EngineError::CacheMismatch { field: "mapped tokens", found: slots.to_string(), expected });
    }
    if let Some(i) = mapped.positions.iter().zip(0..).position(|(found, expected)| *found != expected) {
        let (found, expected) = (format!("{} in slot {i}", mapped.positions[i]), i.to_string());
        return Err(EngineError::CacheMismatch { field: "position", found, expected });
    }
    if let Some(i) = mapped.tokens.iter().zip(tokens).position(|(found, expected)| found != expected) {
        let (found, expected) = (format!("{} at position {i}", mapped.tokens[i]), tokens[i].to_string());
        return Err(EngineError::CacheMismatch { field: "token", found, expected });
    }
    Ok(())
}

/// Which slots of a prompt are native.
struct Ends {
    head: usize,
    tail_start: usize,
    total: usize,
}

impl Ends {
    /// Head and tail of a prompt of `total` tokens; they meet where they would overlap.
    fn new(total: usize, head: usize, tail: usize) -> Ends {
        let tail_start = total - tail.clamp(1, total);
        Ends { head: head.min(tail_start), tail_start, total }
    }

    fn slots(&self) -> Vec<usize> {
        (0..self.head).chain(self.tail_start..self.total).collect()
    }

    fn gather(&self, tokens: &[u32]) -> (Vec<u32>, Vec<u32>) {
        self.slots().into_iter().map(|slot| (tokens[slot], slot as u32)).unzip()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{
        cache::Provenance,
        engine::{LoadOptions, ModelSource},
    };

    fn load(member: &str) -> Model {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/family").join(member);
        Model::load(&ModelSource::from(folder), LoadOptions::default()).unwrap()
    }

    fn prompt(model: &Model) -> Vec<u32> {
        model.tokenizer().encode(&"The ship came in at dawn, and nobody had seen it leave. ".repeat(8)).unwrap()
    }

    /// The model's own cache of the first `mapped` tokens as the identity map would give it, its native ends spoilt.
    fn identity(model: &Model, tokens: &[u32], mapped: usize, head: usize, tail: usize) -> MappedCache {
        let KvCache { mut planes, tokens: all, positions, model: digest } =
            model.prefill(tokens, PrefillOptions { room: 0, ..Default::default() }).unwrap().cache;
        let (layout, total) = (planes.layout().clone(), tokens.len());
        for layer in 0..layout.layers {
            for kv_head in 0..layout.kv_heads {
                for slot in (0..head).chain(total - tail..total) {
                    let offset = planes.offset(kv_head, slot);
                    let kv = planes.layer_mut(layer);
                    kv.k.write(offset, &vec![9.0; layout.head_dim]);
                    kv.v.write(offset, &vec![-9.0; layout.head_dim]);
                }
            }
        }
        let provenance = Provenance { model: digest, hops: Vec::new() };
        MappedCache { planes, tokens: all[..mapped].to_vec(), positions: positions[..mapped].to_vec(), provenance }
    }

    #[test]
    fn an_identity_map_with_native_ends_continues_as_the_model_itself() {
        let model = load("large");
        let tokens = prompt(&model);
        let mut native = model.session(model.prefill(&tokens, PrefillOptions::default()).unwrap()).unwrap();
        let greedy = native.greedy(24).unwrap();
        for (head, tail) in [(0, 1), (4, 32), (4, 70)] {
            // Whether the map left out the tail or not.
            for mapped in [tokens.len() - tail, tokens.len()] {
                let cache = identity(&model, &tokens, mapped, head, tail);
                let mut session = model.resume_released(cache, &tokens, head, tail).unwrap();
                assert_eq!(session.tokens(), tokens);
                assert!(session.mapped_by().is_some());
                assert_eq!(session.greedy(24).unwrap(), greedy, "head {head}, tail {tail}, mapped {mapped}");
            }
        }
    }

    #[test]
    fn native_ends_repair_what_the_map_got_wrong_and_nothing_else() {
        let model = load("large");
        let tokens = prompt(&model);
        let logits = |head, tail, spoilt_head, spoilt_tail| {
            let cache = identity(&model, &tokens, tokens.len(), spoilt_head, spoilt_tail);
            model.resume_released(cache, &tokens, head, tail).unwrap().logits().to_vec()
        };
        let right = logits(4, 8, 4, 8);
        let spoilt = logits(4, 8, 5, 8);
        assert!(right.iter().zip(&spoilt).any(|(a, b)| (a - b).abs() > 0.1), "slot 4 is not native");
    }

    #[test]
    fn a_mapped_cache_of_something_else_is_refused() {
        let model = load("medium");
        let tokens = prompt(&model);
        let cache = || identity(&model, &tokens, tokens.len() - 8, 4, 8);
        let refused = |cache: MappedCache, model: &Model, tail: usize, word: &str| {
            let error = model.resume_released(cache, &tokens, 4, tail).unwrap_err();
            assert!(matches!(error, EngineError::CacheMismatch { .. }), "{error}");
            assert!(error.to_string().contains(word), "{error}");
        };
        refused(cache(), &model, 7, "mapped tokens");
        let mut other = cache();
        other.tokens[5] ^= 1;
        refused(other, &model, 8, "position 5");
        let mut moved = cache();
        moved.positions.iter_mut().skip(3).for_each(|p| *p += 1);
        refused(moved, &model, 8, "slot 3");
        // Of the same layout, but mapped for a sibling.
        refused(cache(), &load("medium-code"), 8, "mapped for");
        refused(cache(), &load("large"), 8, "layers");
    }
}
