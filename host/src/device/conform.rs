//! The conformance cases: small mappings whose answers are computed in f64, run on any device.
//!
//! A case goes the whole way of a job: weights loaded, source staged or used in place, recordings replayed in chunks with
//! a remainder, outputs poisoned, scanned and installed. Its recordings are those of a ridge mapper, made by the host.

use std::{fmt, sync::Arc};

use half::f16;
use kvmig_gate::{Loaded, Loader, WeightElem};
use kvmig_shaders::{
    Kernel, WeightFormat,
    params::{AffineParams, GatherParams},
    tolerance::{Comparison, Expected, Tolerance},
};
use serde::Serialize;

use super::{Device, DeviceError, Job, Pacing, Report, ResidentWeights, ViewStrides, reference};
use crate::{
    cache::{CacheLayout, Elem, KvPlanes, Pairing, Rope, RopeScaling},
    sandbox::recording::{Binding, BufferId, Recording, Step},
};

/// One side of a case: `[layers, heads, T, d]`, the first `rope_dims` of d rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Side {
    /// Layers.
    pub layers: usize,
    /// KV heads.
    pub heads: usize,
    /// Width of a head.
    pub d: usize,
    /// Rotated dimensions.
    pub rope_dims: usize,
}

impl Side {
    /// A side.
    pub const fn new(layers: usize, heads: usize, d: usize, rope_dims: usize) -> Side {
        Side { layers, heads, d, rope_dims }
    }

    fn width(self) -> usize {
        self.heads * self.d
    }

    fn layout(self, theta: f64, elem: Elem) -> CacheLayout {
        let rope = Rope { theta, dims: self.rope_dims, pairing: Pairing::HalfSplit, scaling: RopeScaling::None };
        CacheLayout { layers: self.layers, kv_heads: self.heads, head_dim: self.d, rope, elem }
    }
}

/// What the weights are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weights {
    /// Random, of the size a fit gives.
    Random,
    /// The identity without bias: what was gathered comes out.
    Identity,
}

/// A case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// Its name.
    pub name: &'static str,
    source: Side,
    target: Side,
    k: usize,
    weights: Weights,
    /// First slot that is mapped.
    first: usize,
    tokens: usize,
    chunk: usize,
    cache: Elem,
}

impl Case {
    /// A ridge mapping with `k` of the source's layers for each target layer, of f32 caches, `chunk` tokens at a time.
    pub const fn ridge(name: &'static str, source: Side, target: Side, k: usize, tokens: usize, chunk: usize) -> Case {
        let (weights, cache) = (Weights::Random, Elem::F32);
        Case { name, source, target, k, weights, first: 0, tokens, chunk, cache }
    }
}

const SMALL: Side = Side::new(4, 2, 64, 64);
const PLAIN: Case = Case::ridge("affine_k3", SMALL, Side::new(2, 2, 32, 32), 3, 33, 33);

/// Every case: the shapes at which kernels go wrong (nothing a multiple of a tile, single tokens, partial rotation, heads
/// of different width), chunks with a remainder, slots that do not begin at 0, f16 caches.
pub const CASES: &[Case] = &[
    Case { name: "gather_whole", target: Side::new(4, 2, 64, 0), k: 1, weights: Weights::Identity, ..PLAIN },
    Case {
        name: "gather_partial",
        source: Side::new(3, 2, 80, 40),
        target: Side::new(3, 2, 80, 0),
        k: 1,
        weights: Weights::Identity,
        tokens: 7,
        chunk: 7,
        ..PLAIN
    },
    Case { name: "affine_k1", k: 1, ..PLAIN },
    PLAIN,
    Case { name: "affine_k8", source: Side::new(9, 2, 64, 64), target: Side::new(1, 2, 128, 128), k: 8, ..PLAIN },
    Case { name: "tokens_1", tokens: 1, chunk: 1, ..PLAIN },
    Case { name: "tokens_7", tokens: 7, chunk: 7, ..PLAIN },
    Case { name: "tokens_257", tokens: 257, chunk: 257, source: Side::new(3, 1, 32, 32), k: 2, ..PLAIN },
    Case { name: "width_32", source: Side::new(3, 3, 32, 32), target: Side::new(2, 1, 32, 32), ..PLAIN },
    Case { name: "width_128", source: Side::new(2, 1, 128, 128), target: Side::new(1, 2, 128, 128), k: 2, ..PLAIN },
    Case { name: "width_80_rope_40", source: Side::new(4, 2, 80, 40), target: Side::new(2, 2, 80, 40), ..PLAIN },
    Case { name: "width_odd", source: Side::new(3, 3, 10, 6), target: Side::new(2, 3, 21, 14), ..PLAIN },
    Case { name: "chunks_and_remainder", tokens: 150, chunk: 40, source: Side::new(3, 1, 32, 32), k: 2, ..PLAIN },
    Case { name: "slots_from_5", first: 5, chunk: 20, ..PLAIN },
    Case { name: "cache_f16", cache: Elem::F16, chunk: 20, ..PLAIN },
];

/// The case that an adapter has to pass before it is used.
pub(super) const SELF_TEST: Case = Case {
    name: "self-test",
    source: Side::new(4, 3, 40, 20),
    target: Side::new(2, 2, 80, 40),
    k: 3,
    weights: Weights::Random,
    first: 3,
    tokens: 45,
    chunk: 33,
    cache: Elem::F32,
};

/// How a case came out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Every element of the target against its bound.
    pub comparison: Comparison,
}

impl Outcome {
    /// Whether every error is explained by rounding.
    pub fn passes(&self) -> bool {
        self.comparison.passes()
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let c = &self.comparison;
        write!(
            f,
            "{} elements, error at most {:.3e}, {:.3e} on average; worst at element {}: {:.2} times its bound of {:.3e}",
            c.count, c.max_error, c.mean_error, c.worst_index, c.worst_ratio, c.worst_bound
        )
    }
}

/// One line of `kvmig conform --json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CaseReport {
    /// The case, with the type of the weights: `affine_k3_f16`.
    pub case: String,
    /// Whose recordings ran: the host's own, in a ridge mapper's form.
    pub mapper: &'static str,
    /// The device as `--device` names it.
    pub backend: String,
    /// Outcome.
    pub status: Status,
    /// Largest error; absent where the case ended in an error.
    pub error: Option<f64>,
    /// The bound of the element that is worst against its bound.
    pub bound: Option<f64>,
    /// The error, or the reason of a known failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Outcome of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Every error is explained by rounding.
    Pass,
    /// Some is not, or the device failed.
    Fail,
    /// Fails for a reason that is known; see [`KNOWN`].
    Known,
}

/// A failure that is known: it must fail, and says so when it no longer does.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// Case, or a prefix of several.
    pub case: &'static str,
    /// Backend, as [`super::DeviceInfo`] names it.
    pub backend: &'static str,
    /// A part of the driver's name and version.
    pub driver: &'static str,
    /// Why.
    pub reason: &'static str,
}

/// Known failures of drivers.
pub const KNOWN: &[Known] = &[];

/// The known failure that a case on a device falls under.
pub fn known(case: &Case, device: &Device) -> Option<&'static Known> {
    let info = device.info();
    KNOWN.iter().find(|known| {
        case.name.starts_with(known.case) && known.backend == info.backend && info.driver.contains(known.driver)
    })
}

/// Runs every case with both weight types on every device given, named as `--device` names it.
pub fn conform<'d>(devices: impl IntoIterator<Item = (String, &'d Device)>) -> Vec<CaseReport> {
    let mut reports = Vec::new();
    for (backend, device) in devices {
        for case in CASES {
            for (elem, suffix) in [(WeightElem::F32, "f32"), (WeightElem::F16, "f16")] {
                let outcome = run(case, elem, device, Pacing::default());
                let passes = outcome.as_ref().is_ok_and(Outcome::passes);
                let known = known(case, device);
                let (status, message) = match (passes, known) {
                    (true, None) => (Status::Pass, None),
                    (false, Some(known)) => (Status::Known, Some(known.reason.to_owned())),
                    (true, Some(known)) => {
                        (Status::Fail, Some(format!("passes, but is listed as a known failure: {}", known.reason)))
                    }
                    (false, None) => (Status::Fail, outcome.as_ref().err().map(ToString::to_string)),
                };
                let comparison = outcome.ok().map(|outcome| outcome.comparison);
                reports.push(CaseReport {
                    case: format!("{}_{suffix}", case.name),
                    mapper: "host",
                    backend: backend.clone(),
                    status,
                    error: comparison.map(|c| c.max_error),
                    bound: comparison.map(|c| c.worst_bound),
                    message,
                });
            }
        }
    }
    reports
}

/// Runs one case.
///
/// # Errors
/// What [`Device::execute`] fails with.
pub fn run(case: &Case, weights: WeightElem, device: &Device, pacing: Pacing) -> Result<Outcome, DeviceError> {
    let fixture = Fixture::new(case, weights);
    let target = fixture.map(device, pacing)?;
    Ok(Outcome { comparison: Comparison::new(fixture.found(&target).zip(fixture.expected(device))) })
}

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
        Fixture::build(case, weights, Loader::new(Vec::new(), b"conform"))
    }

    /// The same with a shader of the module's own in the artifact.
    pub fn with_shader(case: &Case, weights: WeightElem, name: &str, wgsl: &str) -> Fixture {
        let mut loader = Loader::new(Vec::new(), b"conform");
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
        let block = (4 * tokens * from.width()) as u64;
        let apart = block.next_multiple_of(align.max(4));
        let panel = apart * from.layers as u64;
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
                    panel_row_stride: from.width() as u32,
                    first_row: 0,
                };
                steps.push(Step::Kernel {
                    kernel: Kernel::Gather,
                    params: bytemuck::bytes_of(&params).to_vec(),
                    bindings: vec![
                        whole(0, BufferId::Source { layer: layer as u32, value }, source.bytes),
                        whole(1, BufferId::SourceRope, table(from.rope_dims)),
                        Binding { index: 2, buffer: scratch, offset: apart * layer as u64, size: block },
                    ],
                });
            }
        }
        for (plane, (layers, matrix, _)) in self.maps.iter().enumerate() {
            let value = plane % 2 == 1;
            let params = AffineParams {
                tokens: tokens as u32,
                blocks: layers.len() as u32,
                block_width: from.width() as u32,
                panel_row_stride: from.width() as u32,
                kv_heads: to.heads as u32,
                head_dim: to.d as u32,
                rope_dims: if value { 0 } else { to.rope_dims as u32 },
                head_stride: target.head,
                row_stride: target.row,
                first_row: 0,
            };
            let mut bytes = bytemuck::bytes_of(&params).to_vec();
            for &layer in layers {
                bytes.extend(((apart / 4) as u32 * layer as u32).to_le_bytes());
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
    fn found<'t>(&'t self, target: &'t KvPlanes) -> impl Iterator<Item = f32> + 't {
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
    fn expected(&self, device: &Device) -> Vec<Expected> {
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
