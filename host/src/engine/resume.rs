//! The ways into a [`Session`]: from a prefill, from a native cache, from a mapped one, and from the ends alone.

use std::ops::Range;

use kvmig_gate::{Migrated, Ticket, Trialled};

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

    /// Continues a migrated cache of the prompt `tokens` (or of its beginning), after computing every slot that was not mapped,
    /// in one batch: the *native ends*. Which slots those are, the cache says; at least the last is among them, since a cache
    /// holds no logits. Of the first ones, those that every text begins with are copied where they are known
    /// ([`Model::known`]).
    ///
    /// # Errors
    /// [`EngineError::CacheMismatch`] for a cache of another model, layout, prompt or ticket, or one that was mapped to its end.
    pub fn resume_mapped(&self, migrated: Migrated<MappedCache>, tokens: &[u32]) -> Result<Session<'_>, EngineError> {
        let ticket = migrated.ticket().clone();
        self.resume_released(under(&ticket, migrated.release())?, tokens)
    }

    /// The same for a trial: held-out evaluation and audits, whose results are measured and never served.
    ///
    /// # Errors
    /// As [`Model::resume_mapped`].
    pub fn resume_trial(
        &self,
        trialled: Trialled<MappedCache>,
        tokens: &[u32],
    ) -> Result<TrialSession<'_>, EngineError> {
        let ticket = trialled.ticket().clone();
        self.resume_released(under(&ticket, trialled.release())?, tokens).map(TrialSession)
    }

    fn resume_released(&self, mut mapped: MappedCache, tokens: &[u32]) -> Result<Session<'_>, EngineError> {
        self.check_tokens(tokens)?;
        self.check_layout(mapped.planes.layout())?;
        if mapped.provenance.model != self.digest() {
            let (found, expected) = (mapped.provenance.model.to_string(), self.digest().to_string());
            return Err(EngineError::CacheMismatch { field: "model it was mapped for", found, expected });
        }
        check_prompt(&mapped, tokens)?;
        let total = tokens.len();
        mapped.planes.reserve(mapped.tokens.len(), total);
        mapped.tokens = tokens.to_vec();
        mapped.positions = (0..total as u32).collect();
        let known = self.open(&mut mapped.planes, &mapped.tokens, mapped.slots.start);
        let slots: Vec<usize> = outside(mapped.slots.clone(), total).skip(known).collect();
        let (tokens, positions) = gather(&slots, tokens);
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
        let total = tokens.len();
        // Head and tail meet where they would overlap.
        let tail_start = total - tail.clamp(1, total);
        let head = head.min(tail_start);
        let slots: Vec<usize> = outside(head..tail_start, total).collect();
        let (tokens, positions) = gather(&slots, tokens);
        let options = PrefillOptions { elem, ..PrefillOptions::default() };
        let planes = KvPlanes::zeros(self.config().layout(elem), tokens.len() + options.room);
        let mut cache = KvCache::new(planes, tokens, positions, self.digest());
        let known = self.open(&mut cache.planes, &cache.tokens, head);
        let slots: Vec<usize> = (known..cache.tokens.len()).collect();
        let fill = Fill { tokens: &cache.tokens[known..], positions: &cache.positions[known..], slots: &slots };
        let logits = self.fill(&mut cache.planes, fill, options)?;
        Ok(Session::new(self, Store::Native(cache), logits))
    }

    fn check_native(&self, cache: &KvCache) -> Result<(), EngineError> {
        if cache.model() != self.digest() {
            return Err(EngineError::ForeignCache { found: cache.model(), expected: self.digest() });
        }
        self.check_layout(cache.planes.layout())
    }

    /// Memory for `tokens` tokens of this model's cache.
    pub(super) fn check_reserved(&self, planes: &KvPlanes, tokens: usize) -> Result<(), EngineError> {
        self.check_layout(planes.layout())?;
        if planes.capacity() >= tokens {
            return Ok(());
        }
        let (found, expected) = (format!("{} tokens", planes.capacity()), format!("at least {tokens}"));
        Err(EngineError::CacheMismatch { field: "reserved memory", found, expected })
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

/// A cache that the executor made under this very ticket: released from one migration, it can't be completed as another's.
fn under(ticket: &Ticket, mapped: MappedCache) -> Result<MappedCache, EngineError> {
    let (found, expected) = (mapped.provenance.hops.last().map_or("none", |hop| &hop.ticket), ticket.to_string());
    if found == expected {
        return Ok(mapped);
    }
    Err(EngineError::CacheMismatch { field: "ticket it was mapped under", found: found.to_owned(), expected })
}

/// The cache must be the prompt's, from its start, and leave its last token to the model.
fn check_prompt(mapped: &MappedCache, tokens: &[u32]) -> Result<(), EngineError> {
    let (filled, total) = (mapped.tokens.len(), tokens.len());
    if filled > total {
        let expected = format!("at most {total} (the prompt)");
        return Err(EngineError::CacheMismatch { field: "tokens", found: filled.to_string(), expected });
    }
    let Range { start, end } = mapped.slots;
    if start > end || end > filled || end == total {
        let expected = format!("some of the {filled} there are, the prompt's last left out");
        return Err(EngineError::CacheMismatch { field: "mapped slots", found: format!("{start}..{end}"), expected });
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

/// The slots of `total` that are not in `middle`.
fn outside(middle: Range<usize>, total: usize) -> impl Iterator<Item = usize> {
    (0..middle.start).chain(middle.end..total)
}

/// Token and position of each slot.
fn gather(slots: &[usize], tokens: &[u32]) -> (Vec<u32>, Vec<u32>) {
    slots.iter().map(|&slot| (tokens[slot], slot as u32)).unzip()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{
        cache::Provenance,
        engine::{LoadOptions, ModelSource, opening::Opening},
    };

    fn load(member: &str) -> Model {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/family").join(member);
        Model::load(&ModelSource::from(folder), LoadOptions::default()).unwrap()
    }

    fn prompt(model: &Model) -> Vec<u32> {
        model.tokenizer().encode(&"The ship came in at dawn, and nobody had seen it leave. ".repeat(8)).unwrap()
    }

    /// The model's own cache of the first `filled` tokens as the identity map would give it, everything but `slots` spoilt.
    fn identity(model: &Model, tokens: &[u32], filled: usize, slots: Range<usize>) -> MappedCache {
        let options = PrefillOptions { room: 0, ..Default::default() };
        let mut native = model.prefill(tokens, options).unwrap().cache;
        let (layout, total) = (native.planes.layout().clone(), tokens.len());
        for layer in 0..layout.layers {
            for kv_head in 0..layout.kv_heads {
                for slot in outside(slots.clone(), total) {
                    let offset = native.planes.offset(kv_head, slot);
                    let kv = native.planes.layer_mut(layer);
                    kv.k.write(offset, &vec![9.0; layout.head_dim]);
                    kv.v.write(offset, &vec![-9.0; layout.head_dim]);
                }
            }
        }
        let provenance = Provenance { model: native.model(), hops: Vec::new() };
        let (tokens, positions) = (native.tokens[..filled].to_vec(), native.positions[..filled].to_vec());
        MappedCache { planes: native.planes, tokens, positions, slots, provenance }
    }

    #[test]
    fn an_identity_map_with_native_ends_continues_as_the_model_itself() {
        let model = load("large");
        let tokens = prompt(&model);
        let total = tokens.len();
        let mut native = model.session(model.prefill(&tokens, PrefillOptions::default()).unwrap()).unwrap();
        let greedy = native.greedy(24).unwrap();
        for (head, tail) in [(0, 1), (4, 32), (4, 70)] {
            // Whether the cache is of the whole prompt, or the prompt went on after it.
            for filled in [total - tail, total] {
                let cache = identity(&model, &tokens, filled, head..total - tail);
                let mut session = model.resume_released(cache, &tokens).unwrap();
                assert_eq!(session.tokens(), tokens);
                assert!(session.mapped_by().is_some());
                assert_eq!(session.greedy(24).unwrap(), greedy, "head {head}, tail {tail}, filled {filled}");
            }
        }
    }

    /// Values that the model never computed are attended to where a prompt begins as every text does, and nowhere else: where they
    /// are its own, they are what it would have computed.
    #[test]
    fn what_every_text_begins_with_is_copied() {
        let (plain, wrong, right) = (load("large"), load("large"), load("large"));
        drop(right.reserve(1));
        let mut spoilt = Opening::run(&right).unwrap();
        for layer in spoilt.planes.layers_mut() {
            layer.k.write(0, &[9.0; 128]);
            layer.v.write(0, &[-9.0; 128]);
        }
        wrong.opening.set(Some(spoilt)).unwrap();
        let text = prompt(&plain);
        assert_eq!([4, 0].map(|head| right.known(&text, head)), [1, 0]);
        assert_eq!(right.known(&text[1..], 4), 0);
        let end = text.len() - 8;
        let mapped = |model: &Model, tokens: &[u32], head: usize| {
            let cache = identity(&plain, tokens, tokens.len(), head..end);
            model.resume_released(cache, tokens).unwrap().logits().to_vec()
        };
        let ends = |model: &Model, tokens: &[u32], head: usize| {
            model.ends_only(tokens, head, 8, Elem::F32).unwrap().logits().to_vec()
        };
        let furthest = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        type Arm<'a> = &'a dyn Fn(&Model, &[u32], usize) -> Vec<f32>;
        for arm in [&mapped as Arm<'_>, &ends] {
            for head in [1, 4] {
                let computed = arm(&plain, &text, head);
                assert!(furthest(&computed, &arm(&right, &text, head)) < 1e-4, "head {head}");
                assert!(furthest(&computed, &arm(&wrong, &text, head)) > 0.1, "head {head}: not copied");
            }
            // Where the map is of slot 0 too, or the text begins otherwise, it is none of its business.
            let other = &text[1..];
            let other = [other, &other[..1]].concat();
            for (tokens, head) in [(&text, 0), (&other, 4)] {
                assert_eq!(arm(&plain, tokens, head), arm(&wrong, tokens, head), "head {head}");
            }
        }
    }

    /// Fewer native slots than were left to the model would have it attend to slots that nobody filled.
    #[test]
    fn exactly_what_was_not_mapped_is_computed() {
        let model = load("large");
        let tokens = prompt(&model);
        let end = tokens.len() - 8;
        let logits = |believed: Range<usize>| {
            let cache = MappedCache { slots: believed, ..identity(&model, &tokens, tokens.len(), 5..end) };
            model.resume_released(cache, &tokens).unwrap().logits().to_vec()
        };
        let differ = |a: &[f32], b: &[f32]| a.iter().zip(b).any(|(a, b)| (a - b).abs() > 0.1);
        let (right, more, spoilt) = (logits(5..end), logits(6..end - 1), logits(4..end));
        assert!(!differ(&right, &more), "what the model computes itself may as well have been mapped by the identity");
        assert!(differ(&right, &spoilt), "slot 4 is nobody's");
    }

    #[test]
    fn a_mapped_cache_of_something_else_is_refused() {
        let model = load("medium");
        let tokens = prompt(&model);
        let total = tokens.len();
        let cache = || identity(&model, &tokens, total, 4..total - 8);
        let refused = |cache: MappedCache, model: &Model, tokens: &[u32], word: &str| {
            let error = model.resume_released(cache, tokens).unwrap_err();
            assert!(matches!(error, EngineError::CacheMismatch { .. }), "{error}");
            assert!(error.to_string().contains(word), "{error}");
        };
        refused(cache(), &model, &tokens[..total - 1], "tokens: found");
        for slots in [4..total, 4..total + 1, Range { start: 9, end: 8 }] {
            refused(MappedCache { slots, ..cache() }, &model, &tokens, "mapped slots");
        }
        let mut other = cache();
        other.tokens[5] ^= 1;
        refused(other, &model, &tokens, "position 5");
        let mut moved = cache();
        moved.positions.iter_mut().skip(3).for_each(|p| *p += 1);
        refused(moved, &model, &tokens, "slot 3");
        // Of the same layout, but mapped for a sibling.
        refused(cache(), &load("medium-code"), &tokens, "mapped for");
        refused(cache(), &load("large"), &tokens, "layers");
    }
}
