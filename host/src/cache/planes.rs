//! The storage of a cache: two planes a layer, each `[n_kv, capacity, d]`.

use std::hint::black_box;

use half::f16;
use rayon::prelude::*;

use super::{CacheLayout, Elem};

/// Keys or values of one layer, `[n_kv, capacity, d]`, contiguous.
#[derive(Clone, Debug, PartialEq)]
pub enum Plane {
    /// Single precision.
    F32(Vec<f32>),
    /// Half precision.
    F16(Vec<f16>),
}

impl Plane {
    fn zeros(elem: Elem, len: usize) -> Plane {
        match elem {
            Elem::F32 => Plane::F32(vec![0.0; len]),
            Elem::F16 => Plane::F16(vec![f16::ZERO; len]),
        }
    }

    fn touch(&mut self) {
        // Behind the box the compiler can't see that they are zeroes already.
        match self {
            Plane::F32(v) => black_box(v).fill(0.0),
            Plane::F16(v) => black_box(v).fill(f16::ZERO),
        }
    }

    /// The elements as f32; halves are widened.
    pub fn to_f32(&self) -> std::borrow::Cow<'_, [f32]> {
        match self {
            Plane::F32(v) => v.into(),
            Plane::F16(v) => v.iter().map(|x| x.to_f32()).collect::<Vec<_>>().into(),
        }
    }

    /// The elements, if they are single precision.
    pub fn as_f32(&self) -> Option<&[f32]> {
        match self {
            Plane::F32(v) => Some(v),
            Plane::F16(_) => None,
        }
    }

    /// Writes `values` (f32, narrowed where the plane is half precision) at element `offset`.
    ///
    /// # Panics
    /// If `offset + values.len()` is beyond the plane.
    pub fn write(&mut self, offset: usize, values: &[f32]) {
        match self {
            Plane::F32(v) => v[offset..offset + values.len()].copy_from_slice(values),
            Plane::F16(v) => {
                for (to, &from) in v[offset..offset + values.len()].iter_mut().zip(values) {
                    *to = f16::from_f32(from);
                }
            }
        }
    }

    /// Reads `into.len()` elements from element `offset` on, widened to f32.
    ///
    /// # Panics
    /// If `offset + into.len()` is beyond the plane.
    pub fn read(&self, offset: usize, into: &mut [f32]) {
        match self {
            Plane::F32(v) => into.copy_from_slice(&v[offset..offset + into.len()]),
            Plane::F16(v) => {
                for (to, from) in into.iter_mut().zip(&v[offset..]) {
                    *to = from.to_f32();
                }
            }
        }
    }
}

/// One layer's keys (rotated) and values.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerKv {
    /// Keys, after the rotation.
    pub k: Plane,
    /// Values.
    pub v: Plane,
}

/// All layers' planes, with room for `capacity` tokens.
#[derive(Clone)]
pub struct KvPlanes {
    layout: CacheLayout,
    capacity: usize,
    layers: Vec<LayerKv>,
}

/// The description without the millions of numbers.
impl std::fmt::Debug for KvPlanes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KvPlanes")
            .field("layout", &self.layout)
            .field("capacity", &self.capacity)
            .finish_non_exhaustive()
    }
}

impl KvPlanes {
    /// Zeroed planes for `capacity` tokens.
    pub fn zeros(layout: CacheLayout, capacity: usize) -> KvPlanes {
        let len = layout.width() * capacity;
        let layer = || LayerKv { k: Plane::zeros(layout.elem, len), v: Plane::zeros(layout.elem, len) };
        let layers = (0..layout.layers).map(|_| layer()).collect();
        KvPlanes { layout, capacity, layers }
    }

    /// The same, in memory that the system has handed over: a zeroed page is otherwise found, page by page, when it is first
    /// written to.
    pub fn resident(layout: CacheLayout, capacity: usize) -> KvPlanes {
        let mut planes = KvPlanes::zeros(layout, capacity);
        planes.layers.par_iter_mut().flat_map_iter(|layer| [&mut layer.k, &mut layer.v]).for_each(Plane::touch);
        planes
    }

    /// Shape and meaning.
    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// Tokens there is room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// One layer.
    pub fn layer(&self, layer: usize) -> &LayerKv {
        &self.layers[layer]
    }

    /// One layer, to be written.
    pub fn layer_mut(&mut self, layer: usize) -> &mut LayerKv {
        &mut self.layers[layer]
    }

    /// Every layer, to be written; disjoint borrows of them.
    pub fn layers_mut(&mut self) -> &mut [LayerKv] {
        &mut self.layers
    }

    /// Element offset of (head, slot) in a plane.
    pub fn offset(&self, head: usize, slot: usize) -> usize {
        (head * self.capacity + slot) * self.layout.head_dim
    }

    /// Elements from one head's first row to the next head's.
    pub fn head_stride(&self) -> usize {
        self.capacity * self.layout.head_dim
    }

    /// Grows the room to at least `capacity` tokens, keeping the first `filled` slots.
    pub fn reserve(&mut self, filled: usize, capacity: usize) {
        if capacity <= self.capacity {
            return;
        }
        let (from, d) = (self.capacity, self.layout.head_dim);
        for layer in &mut self.layers {
            for plane in [&mut layer.k, &mut layer.v] {
                let mut wider = Plane::zeros(self.layout.elem, self.layout.width() * capacity);
                for head in 0..self.layout.kv_heads {
                    let (a, b, n) = (head * from * d, head * capacity * d, filled * d);
                    match (&*plane, &mut wider) {
                        (Plane::F32(x), Plane::F32(y)) => y[b..b + n].copy_from_slice(&x[a..a + n]),
                        (Plane::F16(x), Plane::F16(y)) => y[b..b + n].copy_from_slice(&x[a..a + n]),
                        _ => unreachable!("both planes have the layout's element type"),
                    }
                }
                *plane = wider;
            }
        }
        self.capacity = capacity;
    }
}
