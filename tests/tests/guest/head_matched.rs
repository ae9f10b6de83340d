//! The head-matched module: what it plans, what it records, what it declines.

use kvmig::sandbox::{
    DeviceLimits, PairShape, PlanError, Refusal, SandboxError, ViewStrides,
    recording::{Binding, BufferId, Step},
};
use kvmig_shaders::{Kernel, params::HeadsParams};

use crate::bench::{Case, HEAD_MATCHED, layout};

/// Three source heads, two target heads, and numbers that all differ, so that none can stand in for another.
fn odd() -> Case {
    let (mut source, mut target) = (layout(5, 3, 10), layout(3, 2, 14));
    (source.rope.dims, target.rope.dims) = (8, 12);
    let mut case = Case::head_matched(&source, &target, |l| [vec![4, 1], vec![1], vec![3, 1, 4]][l].clone());
    case.source = ViewStrides { head: 1000, row: 11 };
    case.target = ViewStrides { head: 17, row: 40 };
    case
}

/// Parameters and block offsets of a `heads@1` step, and its bindings.
pub(crate) fn heads(step: &Step) -> (HeadsParams, Vec<u32>, &[Binding]) {
    let Step::Kernel { kernel: Kernel::Heads, params, bindings } = step else { panic!("expected heads@1: {step:?}") };
    let (params, offsets) = params.split_at(size_of::<HeadsParams>());
    (bytemuck::pod_read_unaligned(params), offsets.chunks(4).map(bytemuck::pod_read_unaligned).collect(), bindings)
}

#[test]
fn the_plan_has_as_many_times_fewer_weights_as_the_source_has_heads() {
    let selected = |l: usize| (0..8).map(|j| (l + 3 * j) % 24).collect();
    let (source, target) = (layout(24, 2, 64), layout(28, 2, 128));
    let case = Case::head_matched(&source, &target, selected);
    let plan = case.plan(&HEAD_MATCHED).unwrap();
    assert_eq!((plan.kind(), plan.chunk_tokens(), plan.weights().len()), ("head-matched", 256, 4 * 28));
    let names: Vec<&str> = plan.weights()[4..8].iter().map(|spec| spec.name.as_str()).collect();
    assert_eq!(names, ["layers.1.k.weight", "layers.1.k.bias", "layers.1.v.weight", "layers.1.v.bias"]);
    assert_eq!(plan.weights()[4].shape, [2, 8 * 64, 128], "n_t, blocks * d_s, d_t");
    assert_eq!(plan.scratch_bytes(), 2 * 24 * 256 * 128 * 4, "two panels of 24 layers");

    let matrices = |case: &Case| -> usize {
        let all = case.weights.iter().filter(|(name, _)| name.ends_with(".weight"));
        all.map(|(_, weight)| weight.shape.iter().product::<usize>()).sum()
    };
    assert_eq!(2 * matrices(&case), matrices(&Case::ridge(&source, &target, selected)));
    assert_eq!(case.record(&HEAD_MATCHED, 256).unwrap().steps.len(), 2 * (24 + 28));
}

/// Holds the SDK's parameter block to the host's as well: every field of both has a value of its own here.
#[test]
fn each_target_layer_is_computed_head_by_head_from_its_blocks() {
    let recording = odd().record(&HEAD_MATCHED, 7).unwrap();
    assert_eq!((recording.tokens, recording.scratch.len()), (7, 2));
    assert_eq!(recording.steps.len(), 2 * 3 + 2 * 3, "three source layers are used, there are three target layers");
    assert!(recording.steps[..6].iter().all(|step| matches!(step, Step::Kernel { kernel: Kernel::Gather, .. })));

    // Planes of 7 tokens times 30 columns begin at multiples of 256 bytes.
    let plane: u32 = (7 * 30 * 4u32).next_multiple_of(256) / 4;
    for (l, blocks) in [vec![2, 0], vec![0], vec![1, 0, 2]].into_iter().enumerate() {
        for value in [false, true] {
            let (params, offsets, bindings) = heads(&recording.steps[6 + 2 * l + usize::from(value)]);
            let expected = HeadsParams {
                tokens: 7,
                blocks: blocks.len() as u32,
                block_width: 10,
                panel_row_stride: 30,
                panel_heads: 3,
                head_step: 10,
                heads: 2,
                head_dim: 14,
                rope_dims: if value { 0 } else { 12 },
                relu: 0,
                out_offset: 0,
                head_stride: 17,
                row_stride: 40,
                first_row: 0,
            };
            assert_eq!(params, expected);
            assert_eq!(offsets, blocks.iter().map(|block| block * plane).collect::<Vec<_>>());
            let name = |at: usize| match bindings[at].buffer {
                BufferId::Weights(i) => recording.weights[i as usize].as_str(),
                other => panic!("expected weights, found {other:?}"),
            };
            let part = if value { "v" } else { "k" };
            assert_eq!(name(1), format!("layers.{l}.{part}.weight"));
            assert_eq!(name(2), format!("layers.{l}.{part}.bias"));
            assert_eq!(bindings[0].buffer, BufferId::Scratch(value.into()));
            assert_eq!(bindings[3].buffer, BufferId::TargetRope);
            assert_eq!(bindings[4].buffer, BufferId::Target { layer: l as u32, value });
        }
    }
}

/// Fewer heads than the source has, more, and as many: whichever heads are read, they were gathered.
#[test]
fn any_two_numbers_of_heads_are_recorded() {
    for (source, target) in [(8, 2), (8, 3), (2, 8), (3, 5), (1, 4), (4, 1), (4, 4)] {
        let case = Case::head_matched(&layout(3, source, 8), &layout(2, target, 6), |l| vec![l, 2]);
        let recording = case.record(&HEAD_MATCHED, 50).unwrap();
        let (params, ..) = heads(recording.steps.last().unwrap());
        assert_eq!((params.panel_heads, params.heads), (source as u32, target as u32));
    }
}

/// Layers that the target computes itself have no settings and no weights; the others keep their numbers.
#[test]
fn native_layers_are_left_out() {
    let (source, target) = (layout(5, 3, 10), layout(3, 2, 14));
    let mut case = Case::head_matched(&source, &target, |_| vec![0, 2]);
    case.pair = PairShape::new(&source, &target).unwrap().with_native_layers(1, 40).unwrap();
    case.settings = r#"{"layers": [[4, 1], [3]]}"#.into();
    case.weights.get_mut("layers.2.k.weight").unwrap().shape[1] = 10;
    case.weights.get_mut("layers.2.v.weight").unwrap().shape[1] = 10;
    let recording = case.record(&HEAD_MATCHED, 7).unwrap();
    assert_eq!(recording.steps.len(), 2 * 3 + 2 * 2);
    assert!(recording.weights.iter().all(|name| !name.starts_with("layers.0.")), "{:?}", recording.weights);
    let (_, _, bindings) = heads(recording.steps.last().unwrap());
    assert_eq!(bindings[4].buffer, BufferId::Target { layer: 2, value: true });
}

#[test]
fn equal_requests_lead_to_equal_recordings() {
    assert_eq!(odd().record(&HEAD_MATCHED, 7).unwrap(), odd().record(&HEAD_MATCHED, 7).unwrap());
}

#[test]
fn settings_that_do_not_fit_are_declined_with_the_reason() {
    let mut case = Case::head_matched(&layout(3, 1, 8), &layout(2, 1, 8), |_| vec![0]);
    for (settings, expected) in [
        ("", "settings: EOF while parsing a value"),
        (r#"{"layers": [[0], [1]], "width": 4}"#, "settings: unknown field `width`"),
        (r#"{"layers": [[0]]}"#, "settings.layers: found 1 entries, expected one per target layer that is mapped (2)"),
        (r#"{"layers": [[0], []]}"#, "settings.layers[1]: found no source layer"),
        (r#"{"layers": [[0], [3]]}"#, "settings.layers[1]: found source layer 3, expected less than 3"),
        (r#"{"layers": [[0], [1, 0, 1]]}"#, "settings.layers[1]: found source layer 1 twice"),
    ] {
        case.settings = settings.into();
        let error = case.plan(&HEAD_MATCHED).unwrap_err();
        let SandboxError::Refused { refusal: Refusal::Invalid(why), .. } = &error else {
            panic!("{settings}: {error}")
        };
        assert!(why.starts_with(expected), "{settings}: {why}");
    }
}

#[test]
fn a_device_with_short_bindings_gets_shorter_chunks_or_a_refusal() {
    let mut case = Case::head_matched(&layout(24, 2, 64), &layout(28, 2, 128), |_| (0..24).collect());
    case.device = DeviceLimits { max_binding_bytes: 1 << 20, ..DeviceLimits::FLOOR };
    assert_eq!(case.plan(&HEAD_MATCHED).unwrap().chunk_tokens(), 64, "24 layers of 64 tokens of 512 bytes: 768 KiB");
    case.device.max_binding_bytes = 8 << 10;
    let error = case.plan(&HEAD_MATCHED).unwrap_err();
    assert!(matches!(&error, SandboxError::Refused { refusal: Refusal::Limit(_), .. }), "{error}");
}

#[test]
fn weights_of_another_shape_are_named() {
    let mut case = odd();
    case.weights.get_mut("layers.2.v.weight").unwrap().shape[1] -= 10;
    let error = case.record(&HEAD_MATCHED, 7).unwrap_err();
    let SandboxError::Plan { error: PlanError::Weight { name, .. }, .. } = &error else { panic!("{error}") };
    assert_eq!(name, "layers.2.v.weight");
}

#[test]
fn a_plan_of_an_eighty_layer_model_stays_within_the_limits() {
    for target in [8, 3] {
        let selected = |l: usize| (0..20).map(|j| (l + j) % 32).collect();
        let case = Case::head_matched(&layout(32, 8, 128), &layout(80, target, 128), selected);
        assert_eq!(case.record(&HEAD_MATCHED, 256).unwrap().steps.len(), 2 * (32 + 80));
    }
}
