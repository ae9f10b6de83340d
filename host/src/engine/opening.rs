//! The cache of the tokens that every text begins with.
//!
//! In a causal model their keys and values depend on nothing else, however the text goes on. They are computed once, when
//! memory for a cache is first reserved, and copied into every cache whose native head begins with them: the attention sink at
//! a text's BOS then costs a handoff nothing.

use crate::cache::KvPlanes;

use super::{Model, PrefillOptions};

/// Keys and values of the first slots of any text.
#[derive(Debug)]
pub(super) struct Opening {
    pub(super) planes: KvPlanes,
}

impl Opening {
    /// None where texts begin with no token of their own. Nor where the model can't compute it: the prompt that would have needed
    /// it is then refused for the same reason.
    pub(super) fn run(model: &Model) -> Option<Opening> {
        let start = model.tokenizer().start();
        let prefilled = model.prefill(start, PrefillOptions { room: 0, ..PrefillOptions::default() }).ok()?;
        Some(Opening { planes: prefilled.cache.planes })
    }

    /// Copies the first `count` slots.
    fn copy(&self, planes: &mut KvPlanes, count: usize) {
        let (layers, kv_heads) = (planes.layout().layers, planes.layout().kv_heads);
        let mut rows = vec![0.0; count * planes.layout().head_dim];
        for layer in 0..layers {
            for head in 0..kv_heads {
                let (from, to) = (self.planes.offset(head, 0), planes.offset(head, 0));
                let (known, kv) = (self.planes.layer(layer), planes.layer_mut(layer));
                known.k.read(from, &mut rows);
                kv.k.write(to, &rows);
                known.v.read(from, &mut rows);
                kv.v.write(to, &rows);
            }
        }
    }
}

impl Model {
    /// Computes the opening, if that was not done before.
    pub(super) fn prepare_opening(&self) {
        self.opening.get_or_init(|| Opening::run(self));
    }

    /// How many of the first `head` tokens of a prompt a handoff need not compute: those that every text begins with, where the
    /// prompt does.
    pub fn known(&self, tokens: &[u32], head: usize) -> usize {
        let start = self.tokenizer().start();
        if tokens.starts_with(start) { start.len().min(head) } else { 0 }
    }

    /// Fills the slots of [`Model::known`] tokens and gives their number. None before memory for a cache was reserved, nor in
    /// planes of another element type than the opening was computed in.
    pub(super) fn open(&self, planes: &mut KvPlanes, tokens: &[u32], head: usize) -> usize {
        let known = self.known(tokens, head);
        match self.opening.get() {
            Some(Some(opening)) if known > 0 && opening.planes.layout().elem == planes.layout().elem => {
                opening.copy(planes, known);
                known
            }
            _ => 0,
        }
    }
}
