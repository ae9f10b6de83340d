//! Shapes and views that no guest is asked about.

use kvmig::sandbox::{HostError, PairShape, SandboxError, ViewStrides};

use crate::bench::{Case, RIDGE, layout};

#[test]
fn implausible_layouts_are_refused_by_field() {
    let good = layout(2, 2, 16);
    for (field, bad) in [
        ("layers", layout(0, 2, 16)),
        ("kv_heads", layout(2, 0, 16)),
        ("head_dim", layout(2, 2, 5000)),
        ("rope.dims", layout(2, 2, 15)),
    ] {
        let error = PairShape::new(&good, &bad).unwrap_err();
        assert_eq!((error.model, error.field), ("target", field));
    }
    let mut partial = layout(2, 2, 16);
    partial.rope.dims = 18;
    assert_eq!(PairShape::new(&partial, &good).unwrap_err().field, "rope.dims", "more than the head is wide");
}

#[test]
fn views_that_overlap_or_overflow_are_refused() {
    let mut case = Case::qwen();
    let plan = case.plan(&RIDGE).unwrap();
    for bad in [ViewStrides { head: 64, row: 64 }, ViewStrides { head: u32::MAX, row: 64 }] {
        case.source = bad;
        let error = RIDGE.record(&case.request(&plan, 256)).unwrap_err();
        assert!(matches!(error, SandboxError::Host(HostError::Views { which: "source", .. })), "{error}");
    }
}

#[test]
fn a_chunk_has_from_one_to_the_plans_tokens() {
    let case = Case::qwen();
    let plan = case.plan(&RIDGE).unwrap();
    for tokens in [0, plan.chunk_tokens() + 1] {
        let error = RIDGE.record(&case.request(&plan, tokens)).unwrap_err();
        assert!(matches!(error, SandboxError::Host(HostError::Chunk { .. })), "{error}");
    }
}
