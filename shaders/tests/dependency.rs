//! The Rust side against the WGSL: parameter blocks, names, mirrors, the floor that every adapter has.

use std::{collections::BTreeSet, fs, mem::offset_of, path::Path};

use kvmig_shaders::{
    Access, Element, Kernel, WeightFormat, cpu,
    params::{AffineBlock, AffineParams, GatherParams, ScanParams},
    table::{Layout, SHADERS},
};

const FORMATS: [WeightFormat; 3] = [WeightFormat::F32, WeightFormat::F16, WeightFormat::PackedF16];

fn layout(shader: &str, name: &str) -> &'static Layout {
    let shader = SHADERS.iter().find(|s| s.name == shader).unwrap();
    shader.structs.iter().find(|s| s.name == name).unwrap()
}

/// Name and offset of each field, as the `#[repr(C)]` struct has them.
macro_rules! fields {
    ($type:ident: $($field:ident),+) => {
        (size_of::<$type>(), vec![$((stringify!($field), offset_of!($type, $field) as u32)),+])
    };
}

#[test]
fn parameter_blocks_lie_as_the_shaders_read_them() {
    let gather = fields!(GatherParams: tokens, kv_heads, head_dim, rope_dims, head_stride, row_stride, panel_row_stride,
                         first_row);
    let affine =
        fields!(AffineParams: tokens, blocks, kv_heads, head_dim, rope_dims, head_stride, row_stride, first_row);
    let block = fields!(AffineBlock: offset, row_stride, width);
    let scan = fields!(ScanParams: rows, cols, planes, row_stride, plane_stride, offset, poison, first_row);
    for (shader, (size, members)) in [
        ("gather", gather),
        ("affine_f32", affine.clone()),
        ("affine_f16", affine.clone()),
        ("affine_packed", affine.clone()),
        ("scan", scan),
    ] {
        let params = layout(shader, "Params");
        assert_eq!(params.span as usize, size, "{shader}");
        assert_eq!(params.members, members, "{shader}");
    }
    // The blocks follow the fixed part, and each other, without a gap.
    assert_eq!(layout("affine_f32", "Block").members, [("params", 0), ("features", affine.0 as u32)]);
    let features = layout("affine_f32", "Features");
    assert_eq!((features.span as usize, features.members.to_vec()), block);
}

/// Stems of the files in a folder of the crate that end so.
fn files(folder: &str, end: &str) -> BTreeSet<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter_map(|name| name.strip_suffix(end).map(str::to_owned)).collect()
}

#[test]
fn every_kernel_has_a_mirror_and_every_mirror_a_kernel() {
    let entries: BTreeSet<String> = SHADERS.iter().map(|s| s.entry.to_owned()).collect();
    let kernels = Kernel::ALL.map(|k| k.name().split('@').next().unwrap().to_owned());
    let mut mirrors = files("src/cpu", ".rs");
    mirrors.remove("mod");
    assert_eq!(entries, BTreeSet::from(kernels));
    assert_eq!(entries, mirrors);
    assert_eq!(entries, cpu::MIRRORS.map(str::to_owned).into());
    // And no WGSL lies about that the table doesn't hold.
    let modules: BTreeSet<String> = SHADERS.iter().map(|s| s.name.to_owned()).chain(["affine".to_owned()]).collect();
    assert_eq!(files(".", ".wgsl"), modules);
}

#[test]
fn bindings_are_the_same_for_all_weight_formats() {
    for kernel in Kernel::ALL {
        for format in FORMATS {
            let shader = kernel.shader(format);
            let (params, slots) = shader.bindings.split_last().unwrap();
            assert_eq!((params.element, params.access), (Element::Block, Access::Read), "{}", shader.name);
            assert_eq!(slots.len(), kernel.slots().len());
            for (index, (slot, first)) in slots.iter().zip(kernel.slots()).enumerate() {
                assert_eq!(slot.index as usize, index);
                assert_eq!((slot.name, slot.access), (first.name, first.access), "{}", shader.name);
            }
            assert_eq!(shader.workgroup_size, kernel.shader(WeightFormat::F32).workgroup_size);
        }
    }
    let access = |kernel: Kernel| kernel.slots().iter().map(|s| s.access).collect::<Vec<_>>();
    use Access::{Read, ReadWrite, Write};
    assert_eq!(access(Kernel::Gather), [Read, Read, Write]);
    assert_eq!(access(Kernel::Affine), [Read, Read, Read, Read, Write]);
    assert_eq!(access(Kernel::Scan), [Read, ReadWrite]);
}

#[test]
fn every_backend_was_translated_for() {
    for shader in SHADERS {
        assert_eq!(shader.f16, shader.name == "affine_f16");
        let expected: &[&str] = if shader.f16 { &["spirv", "msl", "hlsl"] } else { &["spirv", "msl", "hlsl", "glsl"] };
        assert_eq!(shader.backends, expected, "{}", shader.name);
    }
}
