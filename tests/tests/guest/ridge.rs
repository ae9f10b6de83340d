//! The ridge module: what it plans, what it records, what it declines.

use std::sync::Arc;

use kvmig::sandbox::{
    DeviceLimits, PlanError, Refusal, Sandbox, SandboxError, SandboxLimits, ViewStrides, bundled,
    recording::{Binding, BufferId, Step},
};
use kvmig_gate::WeightElem;
use kvmig_shaders::{
    Kernel,
    params::{AffineBlock, AffineParams, GatherParams},
};

use crate::bench::{Case, RIDGE, layout};

/// A small pair whose numbers all differ, so that none can stand in for another.
fn odd() -> Case {
    let (mut source, mut target) = (layout(5, 3, 10), layout(3, 2, 14));
    (source.rope.dims, target.rope.dims) = (8, 12);
    let mut case = Case::ridge(&source, &target, |l| [vec![4, 1], vec![1], vec![3, 1, 4]][l].clone());
    case.source = ViewStrides { head: 1000, row: 11 };
    case.target = ViewStrides { head: 17, row: 40 };
    case
}

fn kernel(step: &Step) -> (Kernel, &[u8], &[Binding]) {
    match step {
        Step::Kernel { kernel, params, bindings } => (*kernel, params, bindings),
        Step::Dispatch { .. } => panic!("ridge has no shaders of its own"),
    }
}

#[test]
fn the_plan_names_every_weight() {
    let case = Case::qwen();
    let plan = case.plan(&RIDGE).unwrap();
    assert_eq!((plan.kind(), plan.chunk_tokens(), plan.weights().len()), ("ridge", 256, 4 * 28));
    let names: Vec<&str> = plan.weights()[4..8].iter().map(|spec| spec.name.as_str()).collect();
    assert_eq!(names, ["layers.1.k.weight", "layers.1.k.bias", "layers.1.v.weight", "layers.1.v.bias"]);
    assert_eq!(plan.weights()[4].shape, [8 * 128, 256], "blocks * n_kv_s * d_s, n_kv_t * d_t");
    assert_eq!(plan.scratch_bytes(), 2 * 24 * 256 * 128 * 4, "two panels of 24 layers");
}

/// Holds the SDK's parameter blocks to the host's as well: every field of both has a value of its own here.
#[test]
fn each_used_layer_is_gathered_once_and_each_target_layer_computed_from_its_blocks() {
    let case = odd();
    let recording = case.record(&RIDGE, 7).unwrap();
    assert_eq!((recording.tokens, recording.scratch.len()), (7, 2));
    assert_eq!(recording.steps.len(), 2 * 3 + 2 * 3, "three source layers are used, there are three target layers");

    // Planes of 7 tokens times 30 columns begin at multiples of 256 bytes.
    let plane: u32 = (7 * 30 * 4u32).next_multiple_of(256) / 4;
    for (at, layer) in [1, 3, 4].into_iter().enumerate() {
        for value in [false, true] {
            let (found, params, bindings) = kernel(&recording.steps[2 * at + usize::from(value)]);
            let params: GatherParams = bytemuck::pod_read_unaligned(params);
            let expected = GatherParams {
                tokens: 7,
                kv_heads: 3,
                head_dim: 10,
                rope_dims: if value { 0 } else { 8 },
                head_stride: 1000,
                row_stride: 11,
                panel_row_stride: 30,
                first_row: 0,
            };
            assert_eq!((found, params), (Kernel::Gather, expected));
            let view = BufferId::Source { layer, value };
            let buffers: Vec<BufferId> = bindings.iter().map(|binding| binding.buffer).collect();
            assert_eq!(buffers, [view, BufferId::SourceRope, BufferId::Scratch(value.into())]);
            assert_eq!(bindings[2].offset, at as u64 * u64::from(plane) * 4);
        }
    }
    for (l, blocks) in [vec![2, 0], vec![0], vec![1, 0, 2]].into_iter().enumerate() {
        for value in [false, true] {
            let (found, bytes, bindings) = kernel(&recording.steps[6 + 2 * l + usize::from(value)]);
            let (params, found_blocks) = bytes.split_at(size_of::<AffineParams>());
            let params: AffineParams = bytemuck::pod_read_unaligned(params);
            let expected = AffineParams {
                tokens: 7,
                blocks: blocks.len() as u32,
                kv_heads: 2,
                head_dim: 14,
                rope_dims: if value { 0 } else { 12 },
                head_stride: 17,
                row_stride: 40,
                first_row: 0,
            };
            assert_eq!((found, params), (Kernel::Affine, expected));
            let found_blocks: Vec<AffineBlock> = found_blocks.chunks(12).map(bytemuck::pod_read_unaligned).collect();
            let block = |at: &u32| AffineBlock { offset: at * plane, row_stride: 30, width: 30 };
            assert_eq!(found_blocks, blocks.iter().map(block).collect::<Vec<_>>());
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

#[test]
fn equal_requests_lead_to_equal_recordings() {
    let case = Case::qwen();
    let plan = case.plan(&RIDGE).unwrap();
    let first = RIDGE.record_anew(&case.request(&plan, 256)).unwrap();
    assert_eq!(first, RIDGE.record_anew(&case.request(&plan, 256)).unwrap());
    let elsewhere = Sandbox::new(SandboxLimits::default(), None).unwrap().load(bundled::RIDGE).unwrap();
    assert_eq!(plan, case.plan(&elsewhere).unwrap());
    assert_eq!(first, elsewhere.record_anew(&case.request(&plan, 256)).unwrap());
}

#[test]
fn a_recording_is_kept_for_what_it_depends_on() {
    let mut case = Case::qwen();
    let plan = case.plan(&RIDGE).unwrap();
    let kept = RIDGE.record(&case.request(&plan, 256)).unwrap();
    assert!(Arc::ptr_eq(&kept, &RIDGE.record(&case.request(&plan, 256)).unwrap()));

    let remainder = RIDGE.record(&case.request(&plan, 77)).unwrap();
    assert_eq!((kept.tokens, remainder.tokens), (256, 77));
    case.target.head += 4;
    let moved = RIDGE.record(&case.request(&plan, 256)).unwrap();
    assert_ne!(kept, moved, "other strides, another recording");
    for weight in case.weights.values_mut() {
        weight.elem = WeightElem::F32;
    }
    let wider = RIDGE.record(&case.request(&plan, 256)).unwrap();
    assert_ne!(wider, moved, "other weights, other bindings");
}

#[test]
fn settings_that_do_not_fit_are_declined_with_the_reason() {
    let mut case = Case::ridge(&layout(3, 1, 8), &layout(2, 1, 8), |_| vec![0]);
    for (settings, expected) in [
        ("", "settings: EOF while parsing a value"),
        ("{}", "settings: missing field `layers`"),
        (r#"{"layers": [[0], [1]], "lambda": 1}"#, "settings: unknown field `lambda`"),
        (r#"{"layers": [[0], [-1]]}"#, "settings: invalid value"),
        (r#"{"layers": [[0]]}"#, "settings.layers: found 1 entries, expected one per target layer that is mapped (2)"),
        (
            r#"{"layers": [[0], [1]], "hidden": true}"#,
            "settings.hidden: found true, expected a pair with native layers",
        ),
        (
            r#"{"layers": [[0], [1]], "rank": 2}"#,
            "settings.rank: found a projection, expected every target layer to read",
        ),
        (r#"{"layers": [[0], []]}"#, "settings.layers[1]: found no source layer"),
        (r#"{"layers": [[0], [3]]}"#, "settings.layers[1]: found source layer 3, expected less than 3"),
        (r#"{"layers": [[0], [1, 0, 1]]}"#, "settings.layers[1]: found source layer 1 twice"),
    ] {
        case.settings = settings.into();
        let error = case.plan(&RIDGE).unwrap_err();
        let SandboxError::Refused { refusal: Refusal::Invalid(why), .. } = &error else {
            panic!("{settings}: {error}")
        };
        assert!(why.starts_with(expected), "{settings}: {why}");
        assert!(!error.to_string().contains('\n'), "{error}");
    }
}

#[test]
fn a_device_with_short_bindings_gets_shorter_chunks_or_a_refusal() {
    let mut case = Case::qwen();
    case.device = DeviceLimits { max_binding_bytes: 1 << 20, ..DeviceLimits::FLOOR };
    let plan = case.plan(&RIDGE).unwrap();
    assert_eq!(plan.chunk_tokens(), 64, "24 layers of 64 tokens of 512 bytes: 768 KiB");
    case.device.max_binding_bytes = 8 << 10;
    let error = case.plan(&RIDGE).unwrap_err();
    assert!(matches!(&error, SandboxError::Refused { refusal: Refusal::Limit(_), .. }), "{error}");
}

#[test]
fn weights_that_are_missing_or_of_another_shape_are_named() {
    let mut case = Case::qwen();
    case.weights.get_mut("layers.3.v.weight").unwrap().shape[0] -= 1;
    let error = case.record(&RIDGE, 256).unwrap_err();
    let SandboxError::Plan { error: PlanError::Weight { name, .. }, .. } = &error else { panic!("{error}") };
    assert_eq!(name, "layers.3.v.weight");

    let mut case = Case::qwen();
    case.weights.get_mut("layers.3.v.bias").unwrap().elem = WeightElem::F16;
    let error = case.record(&RIDGE, 256).unwrap_err();
    assert!(matches!(&error, SandboxError::Plan { error: PlanError::Weight { .. }, .. }), "{error}");

    case.weights.remove("layers.3.v.bias");
    let error = case.record(&RIDGE, 256).unwrap_err();
    assert!(matches!(&error, SandboxError::Plan { error: PlanError::Missing { .. }, .. }), "{error}");
}

#[test]
fn a_plan_of_an_eighty_layer_model_stays_within_the_limits() {
    let case = Case::ridge(&layout(32, 8, 128), &layout(80, 8, 128), |l| (0..20).map(|j| (l + j) % 32).collect());
    assert_eq!(case.record(&RIDGE, 256).unwrap().steps.len(), 2 * (32 + 80));
}
