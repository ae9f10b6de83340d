//! Operation counts: what a handoff could win at most.
//!
//! Multiplications and additions counted singly, matrix products and attention only. A speed-up is reported beside this limit,
//! because at equal efficiency per operation it can't be passed.

use crate::{engine::ModelConfig, pair::Identity};

use super::record::Flops;

/// Operations of one handoff and of the prefill it replaces.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlopCount {
    /// The target's ordinary prefill of the prompt, with the logits of its last token.
    pub reprefill: f64,
    /// The map of the middle, and the target's native ends with the logits of the last token.
    pub handoff: f64,
}

/// What the target computes itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Natively {
    /// First tokens.
    pub head: usize,
    /// Of these, how many it has keys and values of from before ([`Model::known`](crate::engine::Model::known)).
    pub known: usize,
    /// Last tokens.
    pub tail: usize,
    /// First layers, for every token.
    pub layers: usize,
}

impl Natively {
    /// A pair's, with so many tokens known.
    pub fn of(pair: &Identity, known: usize) -> Natively {
        Natively { head: pair.head, known, tail: pair.tail, layers: pair.native_layers }
    }
}

impl FlopCount {
    /// Counts for a prompt of `tokens` tokens, mapped at `map_per_token` operations a token.
    pub fn new(target: &ModelConfig, map_per_token: f64, tokens: usize, natively: &Natively) -> FlopCount {
        let Natively { head, known, tail, layers } = *natively;
        let head = head.min(tokens);
        let tail_start = tokens.saturating_sub(tail).max(head);
        // Of the last layer, rows whose logits nobody asks for need keys and values alone; one row needs the rest.
        let layer = target.macs_per_token() / target.layers;
        let qkv = target.hidden * target.head_dim * (target.heads + 2 * target.kv_heads);
        let inner = target.layers - 1;
        let per_row = 2.0 * (inner * layer + qkv) as f64;
        let once = 2.0 * (layer - qkv + target.vocab * target.hidden) as f64
            + attention(target, 1, tokens.saturating_sub(1), tokens);
        let rows = |from: usize, to: usize| (to - from) as f64 * per_row + attention(target, inner, from, to);
        // Of the last native layer, keys and values alone.
        let kv = 4 * target.hidden * target.head_dim * target.kv_heads;
        let lower = match layers.checked_sub(1) {
            None => 0.0,
            Some(full) => tokens as f64 * (2 * full * layer + kv) as f64 + attention(target, full, 0, tokens),
        };
        FlopCount {
            reprefill: rows(0, tokens) + once,
            handoff: lower
                + rows(known.min(head), head)
                + rows(tail_start, tokens)
                + once
                + (tail_start - head) as f64 * map_per_token,
        }
    }

    /// `reprefill / handoff`.
    pub fn limit(&self) -> f64 {
        self.reprefill / self.handoff
    }
}

impl From<FlopCount> for Flops {
    fn from(count: FlopCount) -> Flops {
        Flops { reprefill: count.reprefill, handoff: count.handoff, limit: count.limit() }
    }
}

/// Scores and weighted sums of the rows `from .. to` in `layers` layers, each row attending to itself and everything before.
fn attention(model: &ModelConfig, layers: usize, from: usize, to: usize) -> f64 {
    let keys_seen = (to * (to + 1) - from * (from + 1)) as f64 / 2.0;
    4.0 * (layers * model.heads * model.head_dim) as f64 * keys_seen
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::engine::{LoadOptions, Model, ModelSource};

    #[test]
    fn what_is_known_already_costs_nothing() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/family/large");
        let model = Model::load(&ModelSource::from(folder), LoadOptions::default()).unwrap();
        let count = |head, known, mapped_at: f64| {
            FlopCount::new(model.config(), mapped_at, 100, &Natively { head, known, tail: 8, layers: 0 })
        };
        let (computed, known, none) = (count(1, 0, 0.0), count(1, 1, 0.0), count(0, 0, 0.0));
        assert!(known.handoff < computed.handoff);
        assert_eq!((known.handoff, known.reprefill), (none.handoff, computed.reprefill));
        assert_eq!(count(0, 1, 0.0), none, "what is mapped is not known");
    }
}
