//! Shapes of the caches a guest is asked to map between.

use crate::cache::{CacheLayout, Elem};

/// Shape of one model's cache, in the contract's integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheShape {
    /// Layers.
    pub layers: u32,
    /// KV heads of a layer.
    pub kv_heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Rotated dimensions of a head.
    pub rope_dims: u32,
    /// Element type of the cache; a guest's views are f32 all the same.
    pub elem: Elem,
}

/// Shapes of source and target: each number within what any model has, so that products of them fit 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairShape {
    source: CacheShape,
    target: CacheShape,
    native_layers: u32,
    hidden: u32,
}

/// A layout that no mapper can be asked about.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{model}'s cache layout: found {field} {found}, expected {expected}")]
pub struct ShapeError {
    /// `source` or `target`.
    pub model: &'static str,
    /// The field of the layout.
    pub field: &'static str,
    /// Its value.
    pub found: usize,
    /// What it may be.
    pub expected: &'static str,
}

/// How a chunk's views lie: element (head, token, i) at `head * head + token * row + i`, in elements. The same for every
/// layer's keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ViewStrides {
    /// From one head to the next.
    pub head: u32,
    /// From one token to the next.
    pub row: u32,
}

impl PairShape {
    /// Checks both layouts.
    ///
    /// # Errors
    /// [`ShapeError`]: a zero, or more than any model has.
    pub fn new(source: &CacheLayout, target: &CacheLayout) -> Result<PairShape, ShapeError> {
        Ok(PairShape {
            source: shape("source", source)?,
            target: shape("target", target)?,
            native_layers: 0,
            hidden: 0,
        })
    }

    /// The same where the target computes its first `layers` layers itself, and its residual stream of width `hidden` that
    /// enters the last of them is a feature.
    ///
    /// # Errors
    /// [`ShapeError`]: none of its layers would be left to map, or a hidden width no model has.
    pub fn with_native_layers(self, layers: usize, hidden: usize) -> Result<PairShape, ShapeError> {
        let wrong = |field, found, expected| ShapeError { model: "target", field, found, expected };
        let native_layers = u32::try_from(layers).ok().filter(|&layers| layers < self.target.layers);
        let native_layers = native_layers.ok_or(wrong("native layers", layers, "fewer than its layers"))?;
        let hidden = if native_layers == 0 { 0 } else { hidden };
        let width = u32::try_from(hidden).ok().filter(|&width| width <= 1 << 20);
        let hidden = width.ok_or(wrong("hidden width", hidden, "at most 1048576"))?;
        Ok(PairShape { native_layers, hidden, ..self })
    }

    /// First layers of the target that are not mapped.
    pub fn native_layers(&self) -> u32 {
        self.native_layers
    }

    /// The layers that are.
    pub fn mapped_layers(&self) -> std::ops::Range<u32> {
        self.native_layers..self.target.layers
    }

    /// Width of the target's residual stream that the mapper is given; 0 where it is given none.
    pub fn hidden(&self) -> u32 {
        self.hidden
    }

    /// The source's.
    pub fn source(&self) -> &CacheShape {
        &self.source
    }

    /// The target's.
    pub fn target(&self) -> &CacheShape {
        &self.target
    }
}

impl CacheShape {
    /// Elements of one token in one view, `kv_heads * head_dim`.
    pub fn width(&self) -> u64 {
        u64::from(self.kv_heads) * u64::from(self.head_dim)
    }
}

impl ViewStrides {
    /// Strides of a plane `[kv_heads, rows, head_dim]` without gaps.
    pub fn dense(shape: &CacheShape, rows: u32) -> ViewStrides {
        ViewStrides { head: rows * shape.head_dim, row: shape.head_dim }
    }
}

fn shape(model: &'static str, layout: &CacheLayout) -> Result<CacheShape, ShapeError> {
    let field = |field, found: usize, most: u32, expected| match u32::try_from(found) {
        Ok(value) if (1..=most).contains(&value) => Ok(value),
        _ => Err(ShapeError { model, field, found, expected }),
    };
    let head_dim = field("head_dim", layout.head_dim, 4096, "1 to 4096")?;
    let rope_dims = field("rope.dims", layout.rope.dims, head_dim, "1 to head_dim")?;
    if !rope_dims.is_multiple_of(2) {
        let expected = "an even number";
        return Err(ShapeError { model, field: "rope.dims", found: layout.rope.dims, expected });
    }
    Ok(CacheShape {
        layers: field("layers", layout.layers, 4096, "1 to 4096")?,
        kv_heads: field("kv_heads", layout.kv_heads, 4096, "1 to 4096")?,
        head_dim,
        rope_dims,
        elem: layout.elem,
    })
}
