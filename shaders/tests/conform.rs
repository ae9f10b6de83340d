//! The CPU mirrors against the f64 reference, over shapes, within the stated bound; and nothing but the output touched.

use kvmig_shaders::{
    Bound, Checked, Kernel, cpu,
    params::{AffineBlock, AffineParams, GatherParams, POISON, ScanParams},
    reference,
    tolerance::{Comparison, Tolerance},
};
use proptest::prelude::*;

/// Deterministic numbers in -1 .. 1.
fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) as f64 / (1u64 << 30) as f64 - 1.0) as f32
        })
        .collect()
}

fn table(tokens: u32, rope_dims: u32) -> Vec<f32> {
    let half = rope_dims / 2;
    let angle = |t: u32, i: u32| f64::from(t + 3) * 10_000f64.powf(-f64::from(i) / f64::from(half));
    let pairs = (0..tokens).flat_map(|t| (0..half).map(move |i| angle(t, i)));
    let mut table: Vec<f32> = pairs.flat_map(|a| [a.cos() as f32, a.sin() as f32]).collect();
    table.resize(table.len().max(2), 0.0);
    table
}

/// How heads and tokens of a view lie: strides in elements, and the elements of the view.
#[derive(Clone, Copy, Debug)]
struct View {
    head_stride: u32,
    row_stride: u32,
    len: usize,
}

/// `[n_kv, T, d]` or (`woven`) `[T, n_kv, d]`, with gaps.
fn view(tokens: u32, heads: u32, dim: u32, woven: bool, gaps: (u32, u32)) -> View {
    let (head_stride, row_stride) = if woven {
        (dim + gaps.0, heads * (dim + gaps.0) + gaps.1)
    } else {
        (tokens * (dim + gaps.0) + gaps.1, dim + gaps.0)
    };
    let len = (heads - 1) * head_stride + (tokens - 1) * row_stride + dim;
    View { head_stride, row_stride, len: len as usize }
}

fn bound(slice: &[f32]) -> Bound {
    Bound::f32(4 * slice.len() as u64)
}

/// Compares what was written, and that the rest is still poison.
fn compare(found: &[f32], expected: &[reference::Element]) -> Result<(), TestCaseError> {
    let comparison = Comparison::new(expected.iter().map(|e| (found[e.index], e.expected)));
    prop_assert!(comparison.passes(), "{comparison:?}");
    let untouched = found.iter().filter(|x| x.to_bits() == POISON).count();
    prop_assert_eq!(untouched, found.len() - expected.len());
    Ok(())
}

fn shape() -> impl Strategy<Value = (u32, u32, u32, u32)> {
    let tokens = prop_oneof![1u32..80, Just(257)];
    (tokens, 1u32..4, 1u32..23).prop_flat_map(|(t, h, d)| (Just(t), Just(h), Just(d), (0..=d / 2).prop_map(|x| 2 * x)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn gather_cpu_f32(
        (tokens, kv_heads, head_dim, rope_dims) in shape(),
        woven in any::<bool>(),
        gaps in (0u32..4, 0u32..9),
        panel_gap in 0u32..5,
        seed in any::<u64>(),
    ) {
        let v = view(tokens, kv_heads, head_dim, woven, gaps);
        let p = GatherParams {
            tokens, kv_heads, head_dim, rope_dims,
            head_stride: v.head_stride, row_stride: v.row_stride,
            panel_row_stride: kv_heads * head_dim + panel_gap, first_row: 0,
        };
        let (source, rope) = (numbers(seed, v.len), table(tokens, rope_dims));
        let mut panel = vec![f32::from_bits(POISON); (tokens * p.panel_row_stride) as usize];
        let bindings = [bound(&source), bound(&rope), bound(&panel)];
        let Checked::Gather(call) = Kernel::Gather.check(bytemuck::bytes_of(&p), &bindings)? else { unreachable!() };
        cpu::gather(&call, &source, &rope, &mut panel)?;
        compare(&panel, &reference::gather(&p, &source, &rope, Tolerance::CPU))?;
    }

    #[test]
    fn affine_cpu_f32(
        (tokens, kv_heads, head_dim, rope_dims) in shape(),
        woven in any::<bool>(),
        gaps in (0u32..4, 0u32..9),
        // Each block of a width, a stride and a place of its own.
        blocks in prop::collection::vec((1u32..40, 0u32..9, 0u32..60), 1..7),
        seed in any::<u64>(),
    ) {
        let v = view(tokens, kv_heads, head_dim, woven, gaps);
        let block = |(width, gap, offset): (u32, u32, u32)| AffineBlock { offset, row_stride: width + gap, width };
        let blocks: Vec<AffineBlock> = blocks.into_iter().map(block).collect();
        let p = AffineParams {
            tokens, blocks: blocks.len() as u32,
            kv_heads, head_dim, rope_dims, head_stride: v.head_stride, row_stride: v.row_stride, first_row: 0,
        };
        let width = (kv_heads * head_dim) as usize;
        let end = |block: &AffineBlock| block.offset + (tokens - 1) * block.row_stride + block.width;
        let panel = numbers(seed, blocks.iter().map(end).max().unwrap() as usize);
        let depth: u32 = blocks.iter().map(|block| block.width).sum();
        let weights = numbers(seed ^ 1, depth as usize * width);
        let (bias, rope) = (numbers(seed ^ 2, width), table(tokens, rope_dims));
        let mut target = vec![f32::from_bits(POISON); v.len];
        let bytes = [bytemuck::bytes_of(&p), bytemuck::cast_slice(&blocks)].concat();
        let bindings = [bound(&panel), bound(&weights), bound(&bias), bound(&rope), bound(&target)];
        let Checked::Affine(call) = Kernel::Affine.check(&bytes, &bindings)? else { unreachable!() };
        cpu::affine(&call, &panel, &weights, &bias, &rope, &mut target)?;
        compare(&target, &reference::affine(&p, &blocks, &panel, &weights, &bias, &rope, Tolerance::CPU))?;
    }

    #[test]
    fn scan_cpu(
        (rows, planes, cols) in (1u32..40, 1u32..4, 1u32..70),
        gaps in (0u32..4, 0u32..9),
        offset in 0u32..5,
        marks in prop::collection::vec((any::<prop::sample::Index>(), 0usize..3), 0..20),
    ) {
        let v = view(rows, planes, cols, false, gaps);
        let mut words = vec![f32::from_bits(POISON); offset as usize + v.len + 3];
        let mut inside = Vec::new();
        for plane in 0..planes {
            for row in 0..rows {
                inside.extend((0..cols).map(|c| (offset + plane * v.head_stride + row * v.row_stride + c) as usize));
            }
        }
        // The largest finite number and a subnormal are no reason to object.
        inside.iter().enumerate().for_each(|(i, &at)| words[at] = if i % 2 == 0 { f32::MIN } else { f32::from_bits(1) });
        let patterns = [POISON, 0xffc0_0000, f32::NEG_INFINITY.to_bits()];
        for (at, pattern) in &marks {
            words[*at.get(&inside)] = f32::from_bits(patterns[*pattern]);
        }
        let count = |pattern: u32| inside.iter().filter(|&&at| words[at].to_bits() == pattern).count() as u64;
        let expected = cpu::Counts { poison: count(patterns[0]), nan: count(patterns[1]), infinite: count(patterns[2]) };

        let p = ScanParams {
            rows, cols, planes, row_stride: v.row_stride, plane_stride: v.head_stride, offset, poison: POISON, first_row: 0,
        };
        let bindings = [bound(&words), Bound::f32(12)].map(|b| Bound { element: kvmig_shaders::Element::U32, ..b });
        let Checked::Scan(call) = Kernel::Scan.check(bytemuck::bytes_of(&p), &bindings)? else { unreachable!() };
        prop_assert_eq!(cpu::scan(&call, &words)?, expected);
    }
}

/// Long enough for many tasks, wide enough for the product's blocked path, adjacent blocks that are taken as one.
#[test]
fn affine_cpu_f32_of_a_real_layer() {
    let p = AffineParams {
        tokens: 1031,
        blocks: 4,
        kv_heads: 2,
        head_dim: 64,
        rope_dims: 64,
        head_stride: 1031 * 64,
        row_stride: 64,
        first_row: 0,
    };
    let blocks = [0, 128, 512, 256].map(|offset| AffineBlock { offset, row_stride: 640, width: 128 });
    let (panel, weights) = (numbers(1, 1031 * 640), numbers(2, 512 * 128));
    let (bias, rope) = (numbers(3, 128), table(1031, 64));
    let mut target = vec![f32::from_bits(POISON); 2 * 1031 * 64];
    let bytes = [bytemuck::bytes_of(&p), bytemuck::cast_slice(&blocks)].concat();
    let bindings = [bound(&panel), bound(&weights), bound(&bias), bound(&rope), bound(&target)];
    let Checked::Affine(call) = Kernel::Affine.check(&bytes, &bindings).unwrap() else { unreachable!() };
    cpu::affine(&call, &panel, &weights, &bias, &rope, &mut target).unwrap();
    compare(&target, &reference::affine(&p, &blocks, &panel, &weights, &bias, &rope, Tolerance::CPU)).unwrap();

    let short = cpu::affine(&call, &panel[..100], &weights, &bias, &rope, &mut target).unwrap_err();
    assert!(short.to_string().starts_with("affine@1: panel has 100 elements"), "{short}");
    assert!(cpu::affine(&call, &panel, &weights, &bias, &rope, &mut target[..70]).is_err());
}

/// A bound that admits anything proves nothing: a swapped sign, a missing bias, or one weight in bf16 must exceed it.
#[test]
fn the_bound_excludes_real_mistakes() {
    let p = AffineParams {
        tokens: 40,
        blocks: 2,
        kv_heads: 1,
        head_dim: 8,
        rope_dims: 8,
        head_stride: 0,
        row_stride: 8,
        first_row: 0,
    };
    let blocks = [0, 16].map(|offset| AffineBlock { offset, row_stride: 32, width: 16 });
    let (panel, weights) = (numbers(1, 40 * 32), numbers(2, 32 * 8));
    let (bias, rope) = (numbers(3, 8), table(40, 8));
    let tolerance = Tolerance::wgsl(kvmig_shaders::WeightFormat::PackedF16);
    let right = reference::affine(&p, &blocks, &panel, &weights, &bias, &rope, tolerance);
    let passes = |weights: &[f32], bias: &[f32], rope: &[f32]| {
        let wrong = reference::affine(&p, &blocks, &panel, weights, bias, rope, tolerance);
        Comparison::new(wrong.iter().zip(&right).map(|(w, r)| (w.expected.value as f32, r.expected))).passes()
    };
    assert!(passes(&weights, &bias, &rope));
    assert!(!passes(&weights, &[0.0; 8], &rope));
    let turned: Vec<f32> = rope.chunks(2).flat_map(|t| [t[0], -t[1]]).collect();
    assert!(!passes(&weights, &bias, &turned));
    let mut rounded = weights.clone();
    rounded[5] = f32::from_bits(rounded[5].to_bits() & 0xffff_0000);
    assert!(!passes(&rounded, &bias, &rope));
    assert!(!Comparison::new([(f32::NAN, right[0].expected)]).passes());
    assert!(!Comparison::new([]).passes());
}
