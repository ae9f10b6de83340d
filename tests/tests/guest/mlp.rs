//! The MLP module: what it plans, what it records, what it declines.

use kvmig::sandbox::{
    DeviceLimits, PlanError, Refusal, SandboxError, ViewStrides,
    recording::{Binding, BufferId, Recording, Step},
};
use kvmig_shaders::{Kernel, params::HeadsParams};

use crate::{
    bench::{Case, MLP, layout},
    head_matched::heads,
};

/// Numbers that all differ, so that none can stand in for another.
fn odd() -> Case {
    let (mut source, mut target) = (layout(5, 3, 10), layout(2, 2, 14));
    (source.rope.dims, target.rope.dims) = (8, 12);
    let mut case = Case::mlp(&source, &target, |l| [vec![4, 1], vec![1]][l].clone(), 9, 2);
    case.source = ViewStrides { head: 1000, row: 11 };
    case.target = ViewStrides { head: 17, row: 40 };
    case
}

fn name<'r>(recording: &'r Recording, binding: &Binding) -> &'r str {
    match binding.buffer {
        BufferId::Weights(i) => &recording.weights[i as usize],
        other => panic!("expected weights, found {other:?}"),
    }
}

#[test]
fn the_plan_names_every_weight_and_reuses_its_activations() {
    let case = Case::mlp(&layout(24, 2, 64), &layout(28, 2, 128), |_| (0..24).collect(), 256, 2);
    let plan = case.plan(&MLP).unwrap();
    assert_eq!((plan.kind(), plan.chunk_tokens(), plan.weights().len()), ("mlp", 256, 2 * 6 * 28));
    let planned: Vec<(&str, &[u32])> =
        plan.weights()[12..18].iter().map(|spec| (spec.name.as_str(), spec.shape.as_slice())).collect();
    let expected: [(&str, &[u32]); 6] = [
        ("layers.1.k.0.in.weight", &[2, 24 * 128, 256]),
        ("layers.1.k.0.in.bias", &[512]),
        ("layers.1.k.0.mid.weight", &[2, 256, 256]),
        ("layers.1.k.0.mid.bias", &[512]),
        ("layers.1.k.0.out.weight", &[2, 256, 128]),
        ("layers.1.k.0.out.bias", &[256]),
    ];
    assert_eq!(planned, expected);
    let (panels, activations) = (2 * 24 * 256 * 128 * 4, 2 * 2 * 256 * 256 * 4);
    assert_eq!(plan.scratch_bytes(), panels + activations);
    let recording = case.record(&MLP, 256).unwrap();
    assert_eq!((recording.steps.len(), recording.scratch.len()), (2 * (24 + 3 * 28), 4));
}

/// Holds the SDK's parameter block to the host's as well.
#[test]
fn three_products_lead_from_the_panel_through_two_buffers_to_the_target() {
    let recording = odd().record(&MLP, 7).unwrap();
    assert_eq!(recording.steps.len(), 2 * 2 + 2 * 2 * 3, "two source layers are used, there are two target layers");
    let plane: u32 = (7 * 30 * 4u32).next_multiple_of(256) / 4;
    let (panels, activations) =
        ([BufferId::Scratch(0), BufferId::Scratch(1)], [BufferId::Scratch(2), BufferId::Scratch(3)]);
    for (l, blocks) in [vec![1, 0], vec![0]].into_iter().enumerate() {
        for value in [false, true] {
            let target = BufferId::Target { layer: l as u32, value };
            let input = HeadsParams {
                tokens: 7,
                blocks: blocks.len() as u32,
                block_width: 30,
                panel_row_stride: 30,
                panel_heads: 1,
                head_step: 0,
                heads: 2,
                head_dim: 9,
                rope_dims: 0,
                relu: 1,
                out_offset: 0,
                head_stride: 7 * 9,
                row_stride: 9,
                first_row: 0,
            };
            let middle = HeadsParams {
                blocks: 1,
                block_width: 9,
                panel_row_stride: 9,
                panel_heads: 2,
                head_step: 7 * 9,
                ..input
            };
            let rope_dims = if value { 0 } else { 12 };
            let output = HeadsParams { head_dim: 14, rope_dims, relu: 0, head_stride: 17, row_stride: 40, ..middle };
            let planes = blocks.iter().map(|block| block * plane).collect();
            let expected = [
                ("in", input, planes, panels[usize::from(value)], activations[0]),
                ("mid", middle, vec![0], activations[0], activations[1]),
                ("out", output, vec![0], activations[1], target),
            ];
            for (i, (part, params, offsets, from, into)) in expected.into_iter().enumerate() {
                let step = &recording.steps[4 + 3 * (2 * l + usize::from(value)) + i];
                let (found, found_offsets, bindings) = heads(step);
                assert_eq!((found, found_offsets), (params, offsets), "layer {l}, {part}");
                assert_eq!((bindings[0].buffer, bindings[4].buffer), (from, into));
                let side = if value { "v" } else { "k" };
                assert_eq!(name(&recording, &bindings[1]), format!("layers.{l}.{side}.0.{part}.weight"));
                assert_eq!(name(&recording, &bindings[2]), format!("layers.{l}.{side}.0.{part}.bias"));
            }
        }
    }
}

/// One head's input weights take 48 MiB as f32: two heads to a tensor, and a single one in the last.
#[test]
fn heads_are_grouped_by_the_longest_tensor() {
    let case = Case::mlp(&layout(24, 8, 64), &layout(1, 5, 16), |_| (0..24).collect(), 1024, 2);
    let recording = case.record(&MLP, 256).unwrap();
    let outputs: Vec<HeadsParams> =
        recording.steps[2 * 24..].iter().skip(2).step_by(3).map(|step| heads(step).0).collect();
    let found: Vec<(u32, u32, u32)> = outputs.iter().map(|p| (p.heads, p.panel_heads, p.out_offset)).collect();
    let stride = case.target.head;
    let groups = [(2, 2, 0), (2, 2, 2 * stride), (1, 1, 4 * stride)];
    assert_eq!(
        found,
        groups.into_iter().flat_map(|group| [group, group]).collect::<Vec<_>>(),
        "keys and values of each"
    );
    assert!(recording.weights.contains(&"layers.0.v.2.out.bias".to_owned()));
    assert_eq!(recording.scratch[2..], [2 * 256 * 1024 * 4; 2], "as many activations as the largest group has");
}

#[test]
fn a_head_beyond_a_tensor_is_declined() {
    let case = Case::mlp(&layout(32, 8, 128), &layout(2, 8, 128), |_| (0..32).collect(), 2048, 1);
    let error = case.plan(&MLP).unwrap_err();
    let SandboxError::Refused { refusal: Refusal::Invalid(why), .. } = &error else { panic!("{error}") };
    assert!(
        why.starts_with("settings.width: found 2048 with 32768 inputs, expected one head's weights to fit"),
        "{why}"
    );
}

/// 64 MiB of activations, both buffers together, or what a binding takes, whichever is less.
#[test]
fn the_chunk_is_cut_until_the_activations_fit() {
    let mut case = Case::mlp(&layout(2, 1, 16), &layout(1, 64, 16), |_| vec![0, 1], 1024, 32);
    let plan = case.plan(&MLP).unwrap();
    assert_eq!(plan.chunk_tokens(), 256, "32 heads of 256 tokens of 1024 activations: 32 MiB twice");
    let wide = Case::mlp(&layout(2, 1, 16), &layout(1, 64, 16), |_| vec![0, 1], 512, 64);
    assert_eq!(wide.plan(&MLP).unwrap().chunk_tokens(), 256);
    let (source, target) = (layout(2, 1, 16), layout(1, 512, 16));
    let many = Case::mlp(&source, &target, |_| vec![0], 256, 512);
    let plan = many.plan(&MLP).unwrap();
    assert_eq!(plan.chunk_tokens(), 64, "512 heads of 64 tokens of 256 activations: 32 MiB twice");
    assert!(plan.scratch_bytes() <= (64 << 20) + 2 * 64 * 16 * 4);
    many.record(&MLP, 64).unwrap();

    case.device = DeviceLimits { max_binding_bytes: 8 << 20, ..DeviceLimits::FLOOR };
    assert_eq!(case.plan(&MLP).unwrap().chunk_tokens(), 64);
    case.device.max_binding_bytes = 64 << 10;
    let error = case.plan(&MLP).unwrap_err();
    assert!(matches!(&error, SandboxError::Refused { refusal: Refusal::Limit(_), .. }), "{error}");
}

#[test]
fn settings_that_do_not_fit_are_declined_with_the_reason() {
    let mut case = Case::mlp(&layout(3, 1, 8), &layout(2, 1, 8), |_| vec![0], 4, 1);
    for (settings, expected) in [
        (r#"{"layers": [[0], [1]]}"#, "settings: missing field `width`"),
        (r#"{"layers": [[0], [1]], "width": 4, "depth": 3}"#, "settings: unknown field `depth`"),
        (r#"{"layers": [[0], [1]], "width": 0}"#, "settings.width: found 0, expected at least 1"),
        (r#"{"layers": [[0], [1]], "width": 5000000000}"#, "settings: invalid value"),
        (r#"{"layers": [[0], [1]], "width": 4000000000}"#, "settings.width: found 4000000000 with 8 inputs"),
        (r#"{"layers": [[0], [3]], "width": 4}"#, "settings.layers[1]: found source layer 3, expected less than 3"),
    ] {
        case.settings = settings.into();
        let error = case.plan(&MLP).unwrap_err();
        let SandboxError::Refused { refusal: Refusal::Invalid(why), .. } = &error else {
            panic!("{settings}: {error}")
        };
        assert!(why.starts_with(expected), "{settings}: {why}");
    }
}

#[test]
fn weights_that_are_missing_are_named() {
    let mut case = odd();
    case.weights.remove("layers.1.v.0.mid.bias");
    let error = case.record(&MLP, 7).unwrap_err();
    let SandboxError::Plan { error: PlanError::Missing { name, .. }, .. } = &error else { panic!("{error}") };
    assert_eq!(name, "layers.1.v.0.mid.bias");
}

#[test]
fn a_plan_of_an_eighty_layer_model_stays_within_the_limits() {
    let selected = |l: usize| (0..8).map(|j| (l + j) % 32).collect();
    let case = Case::mlp(&layout(32, 8, 128), &layout(80, 8, 128), selected, 512, 8);
    let recording = case.record(&MLP, 256).unwrap();
    assert_eq!(recording.steps.len(), 2 * (32 + 3 * 80));
    assert!(recording.steps[64..].iter().all(|step| matches!(step, Step::Kernel { kernel: Kernel::Heads, .. })));
}
