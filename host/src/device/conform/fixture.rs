//! A case's data, its recordings, and what should come of them.

use std::sync::Arc;

use half::f16;
use kvmig_gate::{Digest, Loaded, Loader, PairIdentity, WeightElem};
use kvmig_shaders::{
    Kernel, WeightFormat,
    params::{AffineBlock, AffineParams, GatherParams},
    tolerance::{Expected, Tolerance},
};

use super::{
    super::{Device, DeviceError, Job, Pacing, Report, ResidentWeights, ViewStrides, reference},
    cases::{Case, Panel, Weights},
};
use crate::{
    cache::{Elem, KvPlanes},
    sandbox::recording::{Binding, BufferId, Recording, Step},
};

/// A case's data: everything about it is derived from its name's shapes, so that two runs see the same numbers.
#[derive(Debug)]
pub struct Fixture {
    case: Case,
    loaded: Arc<Loaded>,
    source: KvPlanes,
    positions: Vec<u32>,
    /// By target plane, `[2 * layer + value]`: selected source layers, weights as they are read, bias.
    maps: Vec<(Vec<usize>, Vec<f32>, Vec<f32>)>,
    weights: WeightElem,
}

/// A loader for an artifact that is of no pair: a case is mapped without a permit, and into no model's cache.
fn loader() -> Loader {
    let nobody = Digest::of(b"conform");
    Loader::new(Vec::new(), &PairIdentity { source: nobody, target: nobody, head: 0, tail: 0, details: &[] })
}

/// A source of repeatable numbers in [-1, 1): SplitMix64 (Steele et al. 2014).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    fn take(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| scale * self.next()).collect()
    }
}

impl Fixture {
    /// Makes the data of a case with weights of one type.
    pub fn new(case: &Case, weights: WeightElem) -> Fixture {
        Fixture::build(case, weights, loader())
    }

    /// The same with a shader of the module's own in the artifact.
    pub fn with_shader(case: &Case, weights: WeightElem, name: &str, wgsl: &str) -> Fixture {
        let mut loader = loader();
        loader.shader(name, wgsl);
        Fixture::build(case, weights, loader)
    }

    fn build(case: &Case, weights: WeightElem, mut loader: Loader) -> Fixture {
        let mut numbers = Numbers(case.tokens as u64 + 1000 * case.k as u64);
        let layout = case.source.layout(10_000.0, case.cache);
        let capacity = case.first + case.tokens + 2;
        let mut source = KvPlanes::zeros(layout, capacity);
        for layer in source.layers_mut() {
            for plane in [&mut layer.k, &mut layer.v] {
                plane.write(0, &numbers.take(case.source.width() * capacity, 2.0));
            }
        }
        let depth = case.k * case.source.width();
        let width = case.target.width();
        let mut maps = Vec::new();
        for plane in 0..2 * case.target.layers {
            let layers: Vec<usize> = (0..case.k).map(|b| (plane / 2 + b) % case.source.layers).collect();
            let (matrix, bias) = match case.weights {
                Weights::Random => (numbers.take(depth * width, 1.0 / (depth as f32).sqrt()), numbers.take(width, 0.5)),
                Weights::Identity => {
                    let one = |i: usize| if i / width == i % width { 1.0 } else { 0.0 };
                    ((0..depth * width).map(one).collect(), vec![0.0; width])
                }
            };
            let matrix = match weights {
                WeightElem::F32 => {
                    loader.weight(&matrix_name(plane), weights, &[depth, width], bytemuck::cast_slice(&matrix));
                    matrix
                }
                WeightElem::F16 => {
                    let halves: Vec<f16> = matrix.iter().map(|&x| f16::from_f32(x)).collect();
                    loader.weight(&matrix_name(plane), weights, &[depth, width], bytemuck::cast_slice(&halves));
                    halves.iter().map(|x| x.to_f32()).collect()
                }
            };
            loader.weight(&bias_name(plane), WeightElem::F32, &[width], bytemuck::cast_slice(&bias));
            maps.push((layers, matrix, bias));
        }
        // Positions with a gap, as after a dropped middle.
        let positions = (0..case.tokens).map(|i| (case.first + i + if i > case.tokens / 2 { 1000 } else { 0 }) as u32);
        let positions = positions.collect();
        Fixture { case: case.clone(), loaded: Arc::new(loader.finish()), source, positions, maps, weights }
    }

    /// The artifact with the case's weights.
    pub fn loaded(&self) -> &Arc<Loaded> {
        &self.loaded
    }

    /// Puts a value into the first mapped slot of every source plane.
    pub fn plant(&mut self, value: f32) {
        let at = self.source.offset(0, self.case.first);
        for layer in self.source.layers_mut() {
            layer.k.write(at, &[value]);
            layer.v.write(at, &[value]);
        }
    }

    /// Zeroed target planes.
    pub fn target(&self) -> KvPlanes {
        let layout = self.case.target.layout(1_000_000.0, self.case.cache);
        KvPlanes::zeros(layout, self.case.first + self.case.tokens + 3)
    }

    /// Maps the source on a device.
    ///
    /// # Errors
    /// What [`Device::execute`] fails with.
    pub fn map(&self, device: &Device, pacing: Pacing) -> Result<KvPlanes, DeviceError> {
        self.map_with(device, pacing, |recording| recording)
    }

    /// Maps the source with recordings that `change` has had its way with; the tests plant faults so.
    ///
    /// # Errors
    /// What [`Device::execute`] fails with.
    pub fn map_with(
        &self,
        device: &Device,
        pacing: Pacing,
        change: impl Fn(Recording) -> Recording,
    ) -> Result<KvPlanes, DeviceError> {
        self.map_on(device, &device.load_weights(&self.loaded)?, pacing, change)
    }

    /// The same with weights that are resident already.
    ///
    /// # Errors
    /// What [`Device::execute`] fails with.
    pub fn map_on(
        &self,
        device: &Device,
        weights: &ResidentWeights,
        pacing: Pacing,
        change: impl Fn(Recording) -> Recording,
    ) -> Result<KvPlanes, DeviceError> {
        let mut target = self.target();
        self.execute(device, weights, &mut target, pacing, change)?;
        Ok(target)
    }

    /// The same into planes that are there already, with what it cost.
    ///
    /// # Errors
    /// What [`Device::execute`] fails with.
    pub fn execute(
        &self,
        device: &Device,
        weights: &ResidentWeights,
        target: &mut KvPlanes,
        pacing: Pacing,
        change: impl Fn(Recording) -> Recording,
    ) -> Result<Report, DeviceError> {
        let record = |tokens: usize| -> Result<Recording, DeviceError> {
            let source = device.view_strides(&self.source, tokens as u32)?;
            let strides = device.view_strides(target, tokens as u32)?;
            Ok(change(self.record(tokens, source, strides, u64::from(device.limits().offset_align))))
        };
        let full = record(self.case.chunk)?;
        let left = self.case.tokens % self.case.chunk;
        let rest = if left > 0 { Some(record(left)?) } else { None };
        device.execute(Job {
            full: &full,
            rest: rest.as_ref(),
            weights,
            source: &self.source,
            target,
            lower: None,
            slots: self.case.first..self.case.first + self.case.tokens,
            positions: &self.positions,
            pacing,
        })
    }

    /// The recording of a ridge mapper: every source layer gathered once into a panel of keys and one of values, then a
    /// product for each target plane.
    fn record(&self, tokens: usize, source: ViewStrides, target: ViewStrides, align: u64) -> Recording {
        let Case { source: from, target: to, .. } = self.case;
        let table = |dims: usize| (4 * tokens * dims).max(8) as u64;
        let row = 4 * from.width() as u64;
        // Bytes from one layer's block to the next, of one row, and of the whole.
        let (apart, panel_row, panel) = match self.case.panel {
            Panel::ByLayer => {
                let apart = (row * tokens as u64).next_multiple_of(align.max(4));
                (apart, row, apart * from.layers as u64)
            }
            Panel::ByToken => {
                let apart = row.next_multiple_of(align.max(4));
                (apart, apart * from.layers as u64, apart * (from.layers * tokens) as u64)
            }
        };
        let whole = |index: u32, buffer: BufferId, size: u64| Binding { index, buffer, offset: 0, size };
        let mut steps = Vec::new();
        for value in [false, true] {
            let scratch = BufferId::Scratch(u32::from(value));
            for layer in 0..from.layers {
                let params = GatherParams {
                    tokens: tokens as u32,
                    kv_heads: from.heads as u32,
                    head_dim: from.d as u32,
                    rope_dims: if value { 0 } else { from.rope_dims as u32 },
                    head_stride: source.head,
                    row_stride: source.row,
                    panel_row_stride: (panel_row / 4) as u32,
                    first_row: 0,
                };
                let offset = apart * layer as u64;
                let size = panel_row * (tokens as u64 - 1) + row;
                steps.push(Step::Kernel {
                    kernel: Kernel::Gather,
                    params: bytemuck::bytes_of(&params).to_vec(),
                    bindings: vec![
                        whole(0, BufferId::Source { layer: layer as u32, value }, source.bytes),
                        whole(1, BufferId::SourceRope, table(from.rope_dims)),
                        Binding { index: 2, buffer: scratch, offset, size },
                    ],
                });
            }
        }
        for (plane, (layers, matrix, _)) in self.maps.iter().enumerate() {
            let value = plane % 2 == 1;
            let params = AffineParams {
                tokens: tokens as u32,
                blocks: layers.len() as u32,
                kv_heads: to.heads as u32,
                head_dim: to.d as u32,
                rope_dims: if value { 0 } else { to.rope_dims as u32 },
                head_stride: target.head,
                row_stride: target.row,
                first_row: 0,
            };
            let mut bytes = bytemuck::bytes_of(&params).to_vec();
            for &layer in layers {
                let offset = (apart / 4) as u32 * layer as u32;
                let block = AffineBlock { offset, row_stride: (panel_row / 4) as u32, width: from.width() as u32 };
                bytes.extend_from_slice(bytemuck::bytes_of(&block));
            }
            let elem = if self.weights == WeightElem::F16 { 2 } else { 4 };
            let (layer, index) = ((plane / 2) as u32, 2 * plane as u32);
            steps.push(Step::Kernel {
                kernel: Kernel::Affine,
                params: bytes,
                bindings: vec![
                    whole(0, BufferId::Scratch(u32::from(value)), panel),
                    whole(1, BufferId::Weights(index), (elem * matrix.len()) as u64),
                    whole(2, BufferId::Weights(index + 1), 4 * to.width() as u64),
                    whole(3, BufferId::TargetRope, table(to.rope_dims)),
                    whole(4, BufferId::Target { layer, value }, target.bytes),
                ],
            });
        }
        Recording {
            tokens: tokens as u32,
            weights: (0..self.maps.len()).flat_map(|plane| [matrix_name(plane), bias_name(plane)]).collect(),
            scratch: vec![panel; 2],
            params: Vec::new(),
            pipelines: Vec::new(),
            steps,
        }
    }

    /// The mapped slots of every target plane, `[plane, head, token, d]`.
    pub(super) fn found<'t>(&'t self, target: &'t KvPlanes) -> impl Iterator<Item = f32> + 't {
        let rows = self.case.tokens * self.case.target.d;
        (0..2 * self.case.target.layers).flat_map(move |plane| {
            let layer = target.layer(plane / 2);
            let plane = if plane % 2 == 1 { &layer.v } else { &layer.k };
            (0..self.case.target.heads).flat_map(move |head| {
                let mut values = vec![0.0; rows];
                plane.read(target.offset(head, self.case.first), &mut values);
                values
            })
        })
    }

    /// What they should be, in the same order.
    pub(super) fn expected(&self, device: &Device) -> Vec<Expected> {
        let tolerance = match (device, self.weights) {
            (Device::Cpu(_), _) => Tolerance::CPU,
            (Device::Gpu(_), WeightElem::F32) => Tolerance::wgsl(WeightFormat::F32),
            (Device::Gpu(_), WeightElem::F16) => Tolerance::wgsl(WeightFormat::PackedF16),
        };
        let case = &self.case;
        let tokens = case.tokens;
        let rows = tokens * case.source.d;
        let source_rope = self.source.layout().rope.table(&self.positions);
        let target_rope = self.target().layout().rope.table(&self.positions);
        let mut expected = Vec::new();
        for (plane, (layers, weights, bias)) in self.maps.iter().enumerate() {
            let value = plane % 2 == 1;
            let sources: Vec<Vec<f32>> = layers
                .iter()
                .map(|&layer| {
                    let layer = self.source.layer(layer);
                    let plane = if value { &layer.v } else { &layer.k };
                    let mut dense = vec![0.0; case.source.heads * rows];
                    for (head, into) in dense.chunks_exact_mut(rows).enumerate() {
                        plane.read(self.source.offset(head, case.first), into);
                    }
                    dense
                })
                .collect();
            let plane = reference::Plane {
                tokens,
                sources: sources.iter().map(Vec::as_slice).collect(),
                source_heads: [case.source.heads, case.source.d],
                target_heads: [case.target.heads, case.target.d],
                weights,
                bias,
                source_rope: if value { &[] } else { &source_rope },
                target_rope: if value { &[] } else { &target_rope },
            };
            expected.extend(plane.expected(tolerance));
        }
        if case.cache == Elem::F16 {
            // Rounding to the cache's own type: half a unit in the last place (2⁻¹¹ relative, 2⁻²⁵ among subnormals).
            for element in &mut expected {
                let rounding = (element.value.abs() + element.bound) / f64::from(1 << 11);
                element.bound += rounding.max(1.0 / f64::from(1 << 25));
            }
        }
        expected
    }
}

fn matrix_name(plane: usize) -> String {
    format!("plane.{plane}.weight")
}

fn bias_name(plane: usize) -> String {
    format!("plane.{plane}.bias")
}
