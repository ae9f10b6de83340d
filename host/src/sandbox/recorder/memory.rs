//! What was written where: a step reads only what was written before, writes only the chunk's own tokens, and in the end
//! every element of the target was written.

use std::collections::HashMap;

use kvmig_shaders::{Access, Footprint};

use super::{
    HOST, Range, Terms, budget,
    intervals::{Intervals, Pieces, pieces},
};
use crate::sandbox::{CacheShape, Fault, HostError, ViewStrides, recording::BufferId};

/// The state of every buffer of a recording.
pub(super) struct Memory {
    /// Elements of any source view that are the chunk's.
    source: Intervals,
    /// Elements of any target view that are the chunk's.
    target: Intervals,
    /// What was written of target views and scratch.
    written: HashMap<BufferId, Intervals>,
    /// Pieces looked at so far, and how many may be.
    runs: u64,
    most_runs: u64,
}

/// All elements of a view.
pub(super) fn view(shape: &CacheShape, strides: ViewStrides, tokens: u32) -> Footprint {
    Footprint {
        binding: 0,
        first: 0,
        planes: shape.kv_heads,
        plane_stride: strides.head,
        rows: tokens,
        row_stride: strides.row,
        cols: shape.head_dim,
    }
}

/// That a view's strides keep its elements apart, and that their indices fit the shaders' arithmetic.
pub(in crate::sandbox) fn check_view(
    which: &'static str,
    shape: &CacheShape,
    strides: ViewStrides,
    tokens: u32,
) -> Result<(), HostError> {
    let view = view(shape, strides, tokens);
    let why = if !view.is_disjoint() {
        "two tokens or heads overlap"
    } else if view.span().end > u64::from(u32::MAX) {
        "the last element's index doesn't fit 32 bits"
    } else {
        return Ok(());
    };
    Err(HostError::Views { which, head: strides.head, row: strides.row, tokens, why })
}

impl Memory {
    pub(super) fn new(terms: &Terms) -> Memory {
        let frame = |shape: &CacheShape, strides: ViewStrides| {
            let mut frame = Intervals::default();
            pieces(view(shape, strides, terms.tokens), 0).runs().for_each(|run| frame.insert(run));
            frame
        };
        Memory {
            source: frame(terms.pair.source(), terms.source),
            target: frame(terms.pair.target(), terms.target),
            written: HashMap::new(),
            runs: 0,
            most_runs: terms.limits.runs,
        }
    }

    /// A kernel reads these elements of a range.
    pub(super) fn read(&mut self, step: u32, range: &Range, footprint: Footprint) -> Result<(), Fault> {
        let readable = match range.buffer.id {
            BufferId::Source { .. } => &self.source,
            BufferId::Scratch(_) | BufferId::Target { .. } => &*self.written.entry(range.buffer.id).or_default(),
            // The host fills these, all of them.
            BufferId::SourceRope
            | BufferId::TargetRope
            | BufferId::Hidden
            | BufferId::Weights(_)
            | BufferId::Params(_) => return Ok(()),
        };
        let pieces = pieces(footprint, range.offset / 4);
        self.runs = spend(self.runs, &pieces, self.most_runs)?;
        match pieces.runs().find_map(|run| readable.first_gap(run)) {
            None => Ok(()),
            Some(element) => Err(Fault::Unwritten { step, index: range.index, buffer: range.buffer.id, element }),
        }
    }

    /// A kernel writes these elements of a range, all of them.
    pub(super) fn write(&mut self, step: u32, range: &Range, footprint: Footprint) -> Result<(), Fault> {
        let pieces = pieces(footprint, range.offset / 4);
        self.runs = spend(self.runs, &pieces, self.most_runs)?;
        let id = range.buffer.id;
        if matches!(id, BufferId::Target { .. })
            && let Some(element) = pieces.runs().find_map(|run| self.target.first_gap(run))
        {
            return Err(Fault::Foreign { step, index: range.index, buffer: id, element });
        }
        let written = self.written.entry(id).or_default();
        pieces.runs().for_each(|run| written.insert(run));
        Ok(())
    }

    /// A shader of the module's own may touch any element of the range.
    pub(super) fn use_whole(&mut self, step: u32, range: &Range, access: Access) -> Result<(), Fault> {
        let elements = range.offset / 4..(range.offset + range.size) / 4;
        let whole = Footprint {
            binding: range.index,
            first: 0,
            planes: 1,
            plane_stride: 0,
            rows: 1,
            row_stride: 0,
            // A view beyond 2^32 elements can't be bound: 16 GiB.
            cols: u32::try_from(elements.end - elements.start).unwrap_or(u32::MAX),
        };
        if access != Access::Write {
            self.read(step, range, whole)?;
        }
        if access != Access::Read {
            self.write(step, range, whole)?;
        }
        Ok(())
    }

    /// That every element of every view of a target layer that is mapped was written.
    pub(super) fn check_covered(&self, terms: &Terms) -> Result<(), Fault> {
        let nothing = Intervals::default();
        for layer in terms.pair.mapped_layers() {
            for value in [false, true] {
                let buffer = BufferId::Target { layer, value };
                let written = self.written.get(&buffer).unwrap_or(&nothing);
                if let Some(element) = self.target.runs().find_map(|run| written.first_gap(run)) {
                    let [head, token, element] = place(terms.pair.target(), terms.target, terms.tokens, element);
                    return Err(Fault::Uncovered { buffer, head, token, element });
                }
            }
        }
        Ok(())
    }
}

fn spend(runs: u64, pieces: &Pieces, most: u64) -> Result<u64, Fault> {
    budget("pieces of strided ranges", runs, pieces.count(), most, HOST)
}

/// Head, token and element of the head that an element of a view is.
fn place(shape: &CacheShape, strides: ViewStrides, tokens: u32, element: u64) -> [u32; 3] {
    let (row, width) = (u64::from(strides.row).max(1), u64::from(shape.head_dim));
    let mut heads = (0..shape.kv_heads).filter_map(|head| {
        let rest = element.checked_sub(u64::from(head) * u64::from(strides.head))?;
        let token = (rest / row).min(u64::from(tokens) - 1);
        let at = rest - token * row;
        (at < width).then_some([head, token as u32, at as u32])
    });
    heads.next().expect("the element is one of the view's")
}

#[cfg(test)]
mod tests {
    use super::{place, view};
    use crate::{
        cache::Elem,
        sandbox::{CacheShape, ViewStrides},
    };

    #[test]
    fn every_element_of_a_view_has_its_place() {
        let shape = CacheShape { layers: 1, kv_heads: 3, head_dim: 4, rope_dims: 4, elem: Elem::F32 };
        // [heads, tokens, d] with and without gaps, and [tokens, heads, d].
        for (head, row) in [(20, 4), (50, 7), (4, 12), (5, 40)] {
            let strides = ViewStrides { head, row };
            assert!(view(&shape, strides, 5).is_disjoint());
            for (h, t, i) in (0..3).flat_map(|h| (0..5).flat_map(move |t| (0..4).map(move |i| (h, t, i)))) {
                let element = u64::from(h * head + t * row + i);
                assert_eq!(place(&shape, strides, 5, element), [h, t, i], "strides {head}, {row}");
            }
        }
    }
}
