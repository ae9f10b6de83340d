//! Rows in content space: keys with their rotation stripped (METHOD §2), values as they are.

use crate::cache::{KvPlanes, Pairing, Rope};

/// Which slots of a cache become rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slots {
    /// The first.
    pub(super) start: usize,
    /// One past the last.
    pub(super) end: usize,
    /// Every how many; at least 1.
    pub(super) stride: usize,
}

impl Slots {
    /// All slots from `start` to `end`.
    pub(super) fn all(start: usize, end: usize) -> Slots {
        Slots { start, end, stride: 1 }
    }

    /// They, ascending.
    pub(super) fn iter(self) -> impl Iterator<Item = usize> {
        (self.start..self.end).step_by(self.stride)
    }
}

/// Keys (rotation stripped) and values of all layers, each `[rows, layers · n_kv · d]`.
#[derive(Debug)]
pub(super) struct Content {
    pub(super) keys: Vec<f32>,
    pub(super) values: Vec<f32>,
}

impl Content {
    /// Reads the rows of `slots`; slot i is at position `positions[i]`.
    pub(super) fn read(planes: &KvPlanes, positions: &[u32], slots: Slots) -> Content {
        let layout = planes.layout();
        let (d, width, columns) = (layout.head_dim, layout.width(), layout.layers * layout.width());
        let at: Vec<u32> = slots.iter().map(|slot| positions[slot]).collect();
        let rotation = Rotation::new(&layout.rope, &at);
        let mut content = Content { keys: vec![0.0; at.len() * columns], values: vec![0.0; at.len() * columns] };
        for layer in 0..layout.layers {
            let kv = planes.layer(layer);
            for head in 0..layout.kv_heads {
                for (row, slot) in slots.iter().enumerate() {
                    let from = planes.offset(head, slot);
                    let to = row * columns + layer * width + head * d;
                    kv.k.read(from, &mut content.keys[to..to + d]);
                    rotation.strip(row, &mut content.keys[to..to + d]);
                    kv.v.read(from, &mut content.values[to..to + d]);
                }
            }
        }
        content
    }

    /// The first layer, of `width` columns each, with a key that is not finite, or else with such a value.
    pub(super) fn not_finite(&self, layers: usize, width: usize) -> Option<String> {
        let layer = |rows: &[f32]| rows.iter().position(|x| !x.is_finite()).map(|at| at / width % layers);
        let named = |part: &str, layer: usize| format!("{part} of layer {layer}");
        let keys = layer(&self.keys).map(|layer| named("keys", layer));
        keys.or_else(|| layer(&self.values).map(|layer| named("values", layer)))
    }
}

/// The rotation of a list of positions.
#[derive(Debug)]
pub(super) struct Rotation {
    table: Vec<f32>,
    dims: usize,
    pairing: Pairing,
}

impl Rotation {
    /// Tables of the given positions.
    pub(super) fn new(rope: &Rope, positions: &[u32]) -> Rotation {
        Rotation { table: rope.table(positions), dims: rope.dims, pairing: rope.pairing }
    }

    /// Rotates one head's key of table row `row`.
    pub(super) fn apply(&self, row: usize, key: &mut [f32]) {
        self.turn(row, key, 1.0);
    }

    /// Undoes [`Rotation::apply`].
    pub(super) fn strip(&self, row: usize, key: &mut [f32]) {
        self.turn(row, key, -1.0);
    }

    fn turn(&self, row: usize, key: &mut [f32], direction: f32) {
        let half = self.dims / 2;
        for (i, pair) in self.table[row * self.dims..row * self.dims + 2 * half].chunks_exact(2).enumerate() {
            let (cos, sin) = (pair[0], direction * pair[1]);
            let (a, b) = match self.pairing {
                Pairing::HalfSplit => (i, i + half),
                Pairing::Adjacent => (2 * i, 2 * i + 1),
            };
            (key[a], key[b]) = (key[a] * cos - key[b] * sin, key[b] * cos + key[a] * sin);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{CacheLayout, Elem, RopeScaling};

    #[test]
    fn stripping_undoes_the_rotation_and_leaves_the_rest() {
        for pairing in [Pairing::HalfSplit, Pairing::Adjacent] {
            // Partial rotary: 4 of 6 dimensions.
            let rope = Rope { theta: 1e4, dims: 4, pairing, scaling: RopeScaling::None };
            let rotation = Rotation::new(&rope, &[5, 9_001]);
            let key = [1.0f32, -2.0, 3.0, 0.5, 7.0, 8.0];
            let mut turned = key;
            rotation.apply(1, &mut turned);
            assert_eq!(turned[4..], key[4..]);
            assert!((turned[0] - key[0]).abs() > 1e-3);
            rotation.strip(1, &mut turned);
            assert!(turned.iter().zip(&key).all(|(a, b)| (a - b).abs() < 1e-6), "{turned:?}");
        }
    }

    #[test]
    fn rows_are_layer_then_head_then_dimension() {
        let rope = Rope { theta: 1e4, dims: 2, pairing: Pairing::HalfSplit, scaling: RopeScaling::None };
        let layout = CacheLayout { layers: 2, kv_heads: 2, head_dim: 2, rope, elem: Elem::F32 };
        let mut planes = KvPlanes::zeros(layout.clone(), 4);
        for layer in 0..2 {
            for head in 0..2 {
                for slot in 0..4 {
                    let offset = planes.offset(head, slot);
                    let value = (100 * layer + 10 * head + slot) as f32;
                    planes.layer_mut(layer).v.write(offset, &[value, value + 0.5]);
                    let mut key = [value, value + 0.5];
                    Rotation::new(&layout.rope, &[slot as u32 + 7]).apply(0, &mut key);
                    planes.layer_mut(layer).k.write(offset, &key);
                }
            }
        }
        let slots = Slots { start: 1, end: 4, stride: 2 };
        let mut content = Content::read(&planes, &[7, 8, 9, 10], slots);
        let expected =
            [1.0, 1.5, 11.0, 11.5, 101.0, 101.5, 111.0, 111.5, 3.0, 3.5, 13.0, 13.5, 103.0, 103.5, 113.0, 113.5];
        assert_eq!(content.values, expected);
        assert!(content.keys.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-4), "{:?}", content.keys);
        assert_eq!(content.not_finite(2, 4), None);
        content.values[13] = f32::INFINITY;
        assert_eq!(content.not_finite(2, 4).as_deref(), Some("values of layer 1"));
        content.keys[8] = f32::NAN;
        assert_eq!(content.not_finite(2, 4).as_deref(), Some("keys of layer 0"));
    }
}
