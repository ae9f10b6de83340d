//! What `Kernel::check` admits stays in its bindings; what it refuses, it names.

use kvmig_shaders::{
    Bound, Checked, Element, Footprint, Kernel, ParamError,
    params::{AffineBlock, AffineParams, GatherParams, HeadsParams, POISON, ScanParams},
};
use proptest::prelude::*;

const GATHER: GatherParams = GatherParams {
    tokens: 5,
    kv_heads: 2,
    head_dim: 6,
    rope_dims: 4,
    head_stride: 30,
    row_stride: 6,
    panel_row_stride: 12,
    first_row: 0,
};

const AFFINE: AffineParams = AffineParams {
    tokens: 5,
    blocks: 2,
    kv_heads: 2,
    head_dim: 6,
    rope_dims: 4,
    head_stride: 30,
    row_stride: 6,
    first_row: 0,
};

/// Three heads from two: the panel's heads 0, 0 and 1.
const HEADS: HeadsParams = HeadsParams {
    tokens: 5,
    blocks: 2,
    block_width: 6,
    panel_row_stride: 12,
    panel_heads: 2,
    head_step: 6,
    heads: 3,
    head_dim: 4,
    rope_dims: 2,
    relu: 0,
    out_offset: 3,
    head_stride: 20,
    row_stride: 4,
    first_row: 0,
};

fn gather(p: GatherParams, elements: [u64; 3]) -> Result<Checked, ParamError> {
    Kernel::Gather.check(bytemuck::bytes_of(&p), &elements.map(|n| Bound::f32(4 * n)))
}

const BLOCKS: [AffineBlock; 2] =
    [AffineBlock { offset: 0, row_stride: 36, width: 12 }, AffineBlock { offset: 24, row_stride: 36, width: 12 }];

fn affine(p: AffineParams, blocks: &[AffineBlock], elements: [u64; 5]) -> Result<Checked, ParamError> {
    let bytes = [bytemuck::bytes_of(&p), bytemuck::cast_slice(blocks)].concat();
    Kernel::Affine.check(&bytes, &elements.map(|n| Bound::f32(4 * n)))
}

/// The fewest elements that the bindings of `AFFINE` with blocks at 0 and 24 need.
const AFFINE_ELEMENTS: [u64; 5] = [4 * 36 + 24 + 12, 24 * 12, 12, 20, 60];

fn heads(p: HeadsParams, offsets: &[u32], elements: [u64; 5]) -> Result<Checked, ParamError> {
    let bytes = [bytemuck::bytes_of(&p), bytemuck::cast_slice(offsets)].concat();
    Kernel::Heads.check(&bytes, &elements.map(|n| Bound::f32(4 * n)))
}

/// The fewest elements that the bindings of `HEADS` with blocks at 0 and 60 need.
const HEADS_ELEMENTS: [u64; 5] = [60 + 6 + 4 * 12 + 6, 3 * 12 * 4, 12, 10, 3 + 60];

#[test]
fn exact_sizes_are_enough_and_one_element_less_is_not() {
    let elements = [60, 20, 60];
    gather(GATHER, elements).unwrap();
    for binding in 0..3 {
        let mut less = elements;
        less[binding] -= 1;
        let error = gather(GATHER, less).unwrap_err();
        assert!(matches!(error, ParamError::OutOfBounds { index, .. } if index as usize == binding), "{error}");
    }
    affine(AFFINE, &BLOCKS, AFFINE_ELEMENTS).unwrap();
    for binding in 0..5 {
        let mut less = AFFINE_ELEMENTS;
        less[binding] -= 1;
        let error = affine(AFFINE, &BLOCKS, less).unwrap_err();
        assert!(matches!(error, ParamError::OutOfBounds { index, .. } if index as usize == binding), "{error}");
    }
    heads(HEADS, &[0, 60], HEADS_ELEMENTS).unwrap();
    for binding in 0..5 {
        let mut less = HEADS_ELEMENTS;
        less[binding] -= 1;
        let error = heads(HEADS, &[0, 60], less).unwrap_err();
        assert!(matches!(error, ParamError::OutOfBounds { index, .. } if index as usize == binding), "{error}");
    }
}

#[test]
fn refusals_name_the_field() {
    let refused = |change: fn(&mut AffineParams)| {
        let mut p = AFFINE;
        change(&mut p);
        affine(p, &BLOCKS, AFFINE_ELEMENTS).unwrap_err().to_string()
    };
    assert_eq!(refused(|p| p.tokens = 0), "affine@1: tokens is 0; expected 1 to 2^30");
    assert_eq!(refused(|p| p.rope_dims = 3), "affine@1: rope_dims is 3; expected an even number up to head_dim = 6");
    assert_eq!(refused(|p| p.rope_dims = 8), "affine@1: rope_dims is 8; expected an even number up to head_dim = 6");
    assert_eq!(refused(|p| p.first_row = 1), "affine@1: first_row is 1; expected 0: the host's own");
    assert_eq!(
        refused(|p| p.blocks = 3),
        "affine@1: parameter block of 56 bytes; expected 68 (32, and 12 for each block)"
    );
    let narrow = BLOCKS.map(|block| AffineBlock { row_stride: 11, ..block });
    assert_eq!(
        affine(AFFINE, &narrow, AFFINE_ELEMENTS).unwrap_err().to_string(),
        "affine@1: row_stride of a block is 11; expected at least its width = 12"
    );
    let empty = BLOCKS.map(|block| AffineBlock { width: 0, ..block });
    assert_eq!(
        affine(AFFINE, &empty, AFFINE_ELEMENTS).unwrap_err().to_string(),
        "affine@1: width of a block is 0; expected at least 1"
    );
    assert_eq!(refused(|p| p.row_stride = 5), "affine@1: the strides of binding 4 (mapped) make rows or heads overlap");
    assert_eq!(
        refused(|p| p.head_stride = u32::MAX),
        "affine@1: binding 4 (mapped) has 240 bytes; these parameters reach 17179869300"
    );
}

#[test]
fn refusals_of_heads_name_the_field() {
    let refused = |change: fn(&mut HeadsParams)| {
        let mut p = HEADS;
        change(&mut p);
        heads(p, &[0, 60], HEADS_ELEMENTS).unwrap_err().to_string()
    };
    for (change, field) in [
        ((|p| p.tokens = 0) as fn(&mut HeadsParams), "tokens"),
        (|p| p.block_width = 0, "block_width"),
        (|p| p.panel_heads = 0, "panel_heads"),
        (|p| p.heads = 0, "heads"),
        (|p| p.head_dim = 0, "head_dim"),
    ] {
        let error = refused(change);
        assert!(error.starts_with(&format!("heads@1: {field} is 0; expected ")), "{error}");
    }
    assert_eq!(refused(|p| p.relu = 2), "heads@1: relu is 2; expected 0 or 1");
    assert_eq!(
        refused(|p| p.relu = 1),
        "heads@1: rope_dims is 2; expected 0: what a ReLU is applied to is not rotated"
    );
    assert_eq!(refused(|p| p.first_row = 1), "heads@1: first_row is 1; expected 0: the host's own");
    assert_eq!(
        refused(|p| p.panel_row_stride = 5),
        "heads@1: panel_row_stride is 5; expected at least block_width = 6"
    );
    assert_eq!(
        refused(|p| p.blocks = 3),
        "heads@1: parameter block of 64 bytes; expected 68 (56, and 4 for each block's offset)"
    );
    assert_eq!(
        refused(|p| p.head_stride = 15),
        "heads@1: the strides of binding 4 (mapped) make rows or heads overlap"
    );
    assert_eq!(refused(|p| p.out_offset = 4), "heads@1: binding 4 (mapped) has 252 bytes; these parameters reach 256");
    assert_eq!(refused(|p| p.panel_heads = 3), "heads@1: binding 0 (panel) has 480 bytes; these parameters reach 504");
    let many = HeadsParams { panel_heads: u32::MAX, head_step: 0, ..HEADS };
    let error = heads(many, &[0, 60], HEADS_ELEMENTS).unwrap_err();
    assert!(matches!(error, ParamError::Field { field: "heads * panel_heads", .. }), "{error}");
}

/// Each panel head is read once, whatever the two numbers of heads; heads side by side are one run of each row.
#[test]
fn heads_read_what_the_head_map_says() {
    let runs = |p: HeadsParams| -> Vec<(u32, u32, u32, u32)> {
        let call = heads(p, &[100, 0], [1000, 1000, 100, 10, 1000]).unwrap();
        let panel = call.reads().filter(|read| read.binding == 0);
        panel.map(|read| (read.first, read.planes, read.plane_stride, read.cols)).collect()
    };
    assert_eq!(runs(HEADS), [(100, 1, 0, 12), (0, 1, 0, 12)]);
    let apart = HeadsParams { head_step: 40, ..HEADS };
    assert_eq!(runs(apart), [(100, 2, 40, 6), (0, 2, 40, 6)]);
    let shared = HeadsParams { panel_heads: 1, ..HEADS };
    assert_eq!(runs(shared), [(100, 1, 0, 6), (0, 1, 0, 6)]);
    // Three of eight: 0, 2 and 5.
    let fewer = HeadsParams { panel_heads: 8, ..HEADS };
    assert_eq!(runs(fewer)[..3], [(100, 1, 0, 6), (112, 1, 0, 6), (130, 1, 0, 6)]);
}

#[test]
fn products_of_fields_do_not_wrap() {
    // 2^16 * 2^16 wraps to 0 in u32.
    let huge = AffineParams { kv_heads: 1 << 16, head_dim: 1 << 16, rope_dims: 0, ..AFFINE };
    assert!(matches!(affine(huge, &BLOCKS, AFFINE_ELEMENTS), Err(ParamError::OutOfBounds { index: 1, .. })));
    let huge = GatherParams { kv_heads: 1 << 16, head_dim: 1 << 16, ..GATHER };
    assert!(matches!(gather(huge, [60, 20, 60]), Err(ParamError::Field { field: "kv_heads * head_dim", .. })));
    // Within a binding, but beyond the shaders' u32 indices.
    let far = GatherParams { head_stride: u32::MAX, ..GATHER };
    assert!(matches!(gather(far, [1 << 40, 20, 60]), Err(ParamError::OutOfBounds { index: 0, .. })));
    let far = BLOCKS.map(|block| AffineBlock { offset: u32::MAX, ..block });
    assert!(matches!(affine(AFFINE, &far, [1 << 40, 288, 12, 20, 60]), Err(ParamError::OutOfBounds { index: 0, .. })));
    let blocks = AffineParams { blocks: u32::MAX, ..AFFINE };
    assert!(matches!(affine(blocks, &BLOCKS, AFFINE_ELEMENTS), Err(ParamError::Length { .. })));
}

#[test]
fn elements_are_told_apart() {
    let params = [bytemuck::bytes_of(&AFFINE), bytemuck::cast_slice(&BLOCKS)].concat();
    let mut bindings = AFFINE_ELEMENTS.map(|n| Bound::f32(4 * n));
    bindings[1] = Bound { bytes: 2 * AFFINE_ELEMENTS[1], element: Element::F16 };
    Kernel::Affine.check(&params, &bindings).unwrap();
    bindings[0].element = Element::F16;
    let error = Kernel::Affine.check(&params, &bindings).unwrap_err().to_string();
    assert_eq!(error, "affine@1: binding 0 (panel) holds F16; expected f32");
    assert!(matches!(
        Kernel::Affine.check(&params, &bindings[..4]),
        Err(ParamError::Bindings { expected: 5, found: 4, .. })
    ));
    assert!(matches!(Kernel::Affine.check(&params[..31], &bindings), Err(ParamError::Length { found: 31, .. })));
}

#[test]
fn names_carry_their_version() {
    assert_eq!(Kernel::from_name("affine@1"), Ok(Kernel::Affine));
    assert_eq!(Kernel::from_name("gather@1"), Ok(Kernel::Gather));
    assert_eq!(Kernel::from_name("heads@1"), Ok(Kernel::Heads));
    for unknown in ["affine", "affine@2", "scan@1", ""] {
        let error = Kernel::from_name(unknown).unwrap_err().to_string();
        assert_eq!(error, format!("no kernel `{unknown}`; this host offers gather@1, affine@1, heads@1"));
    }
}

#[test]
fn slices_cover_each_row_once() {
    let p = AffineParams { tokens: 1000, row_stride: 12, head_stride: 6, ..AFFINE };
    let call = affine(p, &BLOCKS, [999 * 36 + 36, 288, 12, 4000, 12_000]).unwrap();
    let whole = call.slices(u64::MAX);
    assert_eq!(whole.len(), 1);
    assert_eq!((whole[0].rows.clone(), whole[0].workgroups), (0..1000, [1, 32, 1]));
    assert_eq!(call.invocations(), 32 * 64);
    assert_eq!(call.flops(), 1000 * (2 * 24 * 12 + 3 * 2 * 4));

    let slices = call.slices(call.flops() / 7);
    assert!((7..=9).contains(&slices.len()), "{}", slices.len());
    let mut next = 0;
    for slice in &slices {
        assert_eq!(slice.rows.start, next);
        assert_eq!(slice.workgroups[1], slice.rows.len().div_ceil(32) as u32);
        next = slice.rows.end;
        let params = call.gpu_params(slice.rows.start);
        assert_eq!(params.len(), 32 + 24);
        let read: AffineParams = bytemuck::pod_read_unaligned(&params[..32]);
        assert_eq!(read, AffineParams { first_row: slice.rows.start, ..p });
        assert_eq!(params[32..], *bytemuck::cast_slice(&BLOCKS));
    }
    assert_eq!(next, 1000);
    assert_eq!(call.slices(0).len(), 32, "a tile of rows is the least");
}

/// Every element of a footprint, one by one.
fn elements(f: &Footprint) -> Vec<u64> {
    let mut all = Vec::new();
    for plane in 0..u64::from(f.planes) {
        for row in 0..u64::from(f.rows) {
            let first = u64::from(f.first) + plane * u64::from(f.plane_stride) + row * u64::from(f.row_stride);
            all.extend(first..first + u64::from(f.cols));
        }
    }
    all
}

fn in_bounds(call: &Checked, sizes: &[u64]) -> Result<(), TestCaseError> {
    let writes = call.writes();
    let mut written = elements(&writes);
    prop_assert_eq!(written.len() as u64, writes.elements());
    prop_assert!(written.iter().all(|at| writes.span().contains(at) && *at < sizes[writes.binding as usize]));
    written.sort_unstable();
    prop_assert!(written.windows(2).all(|pair| pair[0] < pair[1]), "written twice");
    for read in call.reads() {
        prop_assert!(elements(&read).iter().all(|&at| at < sizes[read.binding as usize]));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn admitted_gathers_stay_in_bounds(fields in [1u32..6, 1u32..4, 1u32..8, 0u32..8, 0u32..40, 0u32..20, 0u32..30],
                                       sizes in [1u64..90, 1u64..40, 1u64..90]) {
        let [tokens, kv_heads, head_dim, rope_dims, head_stride, row_stride, panel_row_stride] = fields;
        let p = GatherParams { tokens, kv_heads, head_dim, rope_dims, head_stride, row_stride, panel_row_stride, first_row: 0 };
        if let Ok(call) = gather(p, sizes) {
            in_bounds(&call, &sizes)?;
        }
    }

    #[test]
    fn admitted_affines_stay_in_bounds(fields in [1u32..6, 1u32..4, 1u32..8, 0u32..8, 0u32..40, 0u32..20],
                                       blocks in prop::collection::vec([0u32..40, 1u32..20, 1u32..8], 1..4),
                                       sizes in [1u64..120, 1u64..300, 1u64..30, 1u64..40, 1u64..90]) {
        let [tokens, kv_heads, head_dim, rope_dims, head_stride, row_stride] = fields;
        let block = |[offset, row_stride, width]: [u32; 3]| AffineBlock { offset, row_stride, width };
        let blocks: Vec<AffineBlock> = blocks.into_iter().map(block).collect();
        let p = AffineParams {
            tokens, blocks: blocks.len() as u32, kv_heads, head_dim, rope_dims, head_stride, row_stride, first_row: 0,
        };
        if let Ok(call) = affine(p, &blocks, sizes) {
            in_bounds(&call, &sizes)?;
        }
    }

    #[test]
    fn admitted_heads_stay_in_bounds(panel in [1u32..8, 1u32..20, 1u32..5, 0u32..12],
                                     shape in [1u32..6, 1u32..5, 1u32..8, 0u32..8, 0u32..2],
                                     strides in [0u32..9, 0u32..40, 0u32..20],
                                     offsets in prop::collection::vec(0u32..40, 1..4),
                                     sizes in [1u64..160, 1u64..400, 1u64..40, 1u64..40, 1u64..120]) {
        let [block_width, panel_row_stride, panel_heads, head_step] = panel;
        let [tokens, count, head_dim, rope_dims, relu] = shape;
        let [out_offset, head_stride, row_stride] = strides;
        let p = HeadsParams {
            tokens, blocks: offsets.len() as u32, block_width, panel_row_stride, panel_heads, head_step, heads: count, head_dim,
            rope_dims, relu, out_offset, head_stride, row_stride, first_row: 0,
        };
        if let Ok(call) = heads(p, &offsets, sizes) {
            in_bounds(&call, &sizes)?;
        }
    }

    #[test]
    fn admitted_scans_stay_in_bounds(fields in [1u32..6, 1u32..8, 1u32..4, 0u32..20, 0u32..40, 0u32..20], size in 1u64..120) {
        let [rows, cols, planes, row_stride, plane_stride, offset] = fields;
        let p = ScanParams { rows, cols, planes, row_stride, plane_stride, offset, poison: POISON, first_row: 0 };
        let bindings = [4 * size, 12].map(|bytes| Bound { bytes, element: Element::U32 });
        if let Ok(call) = Kernel::Scan.check(bytemuck::bytes_of(&p), &bindings) {
            in_bounds(&call, &[size, 3])?;
        }
    }

    /// Any bytes at all: an answer, not a panic.
    #[test]
    fn any_parameter_bytes_get_an_answer(bytes in prop::collection::vec(any::<u8>(), 0..80),
                                         sizes in prop::collection::vec(any::<u64>(), 0..6)) {
        let bindings: Vec<Bound> = sizes.iter().map(|&n| Bound::f32(n)).collect();
        for kernel in Kernel::ALL {
            if let Ok(call) = kernel.check(&bytes, &bindings) {
                call.slices(1 << 30);
                call.invocations();
            }
        }
    }

    /// Field values that look real but don't fit together, with bindings that are large: an answer, not a panic.
    #[test]
    fn large_parameters_get_an_answer(fields in prop::array::uniform9(prop_oneof![0u32..5, any::<u32>()]),
                                      more in prop::array::uniform4(prop_oneof![0u32..5, any::<u32>()]),
                                      bytes in any::<u64>()) {
        let mut block = fields[..7].to_vec();
        block[1] %= 3;
        block.push(0);
        block.extend((0..block[1]).flat_map(|_| [fields[8], fields[7], fields[0]]));
        if let Ok(call) = Kernel::Affine.check(bytemuck::cast_slice(&block), &[Bound::f32(bytes); 5]) {
            call.flops();
            call.reads().count();
        }
        let mut wide = fields.to_vec();
        wide[1] %= 3;
        wide.extend(more);
        wide.push(0);
        wide.extend(std::iter::repeat_n(fields[8], wide[1] as usize));
        if let Ok(call) = Kernel::Heads.check(bytemuck::cast_slice(&wide), &[Bound::f32(bytes); 5]) {
            call.flops();
            call.reads().take(1000).count();
        }
        block.truncate(7);
        block.push(0);
        if let Ok(call) = Kernel::Gather.check(bytemuck::cast_slice(&block), &[Bound::f32(bytes); 3]) {
            call.flops();
            call.reads().count();
        }
    }
}
