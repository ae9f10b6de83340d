//! Watching a target's prefill for what a fit needs beside its cache.

use super::content::Slots;
use crate::engine::Observer;

/// Several that watch one prefill.
#[derive(Default)]
pub(super) struct All<'a>(pub(super) Vec<&'a mut (dyn Observer + Send)>);

impl Observer for All<'_> {
    fn layer(&mut self, layer: usize, positions: &[u32], queries: &[f32], outputs: &[f32]) {
        self.0.iter_mut().for_each(|one| one.layer(layer, positions, queries, outputs));
    }

    fn input(&mut self, layer: usize, positions: &[u32], residual: &[f32]) {
        self.0.iter_mut().for_each(|one| one.input(layer, positions, residual));
    }
}

/// The residual stream that enters the last native layer: what a mapper is given as the target's hidden state.
#[derive(Debug)]
pub(super) struct Hidden {
    layer: Option<usize>,
    width: usize,
    /// `[positions, width]`.
    rows: Vec<f32>,
}

impl Hidden {
    /// Of a target of this width with so many native layers; of none, nothing is kept.
    pub(super) fn behind(native_layers: usize, width: usize) -> Hidden {
        Hidden { layer: native_layers.checked_sub(1), width, rows: Vec::new() }
    }

    /// The rows of `slots`, `[slots, width]`; slot i was the i-th position of the prefill.
    pub(super) fn rows(&self, slots: Slots) -> Vec<f32> {
        if self.rows.is_empty() {
            return Vec::new();
        }
        slots.iter().flat_map(|slot| &self.rows[slot * self.width..(slot + 1) * self.width]).copied().collect()
    }
}

impl Observer for Hidden {
    fn layer(&mut self, _: usize, _: &[u32], _: &[f32], _: &[f32]) {}

    fn input(&mut self, layer: usize, _: &[u32], residual: &[f32]) {
        if self.layer == Some(layer) {
            self.rows.extend_from_slice(residual);
        }
    }
}
