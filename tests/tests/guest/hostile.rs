//! The guest that misbehaves: each mode ends in its own error, and a good recording works right after it.

use std::{collections::BTreeMap, sync::LazyLock, time::Duration};

use kvmig::sandbox::{
    Call, DeviceLimits, Fault, Module, PlanError, Refusal, Sandbox, SandboxError, SandboxLimits, TrapKind, ViewStrides,
    WeightShape,
    recording::{BufferId, Step},
};
use kvmig_gate::WeightElem;
use kvmig_shaders::ParamError;

use crate::bench::{Case, HOSTILE, SANDBOX, layout};

static MODULE: LazyLock<Module> = LazyLock::new(|| SANDBOX.load(HOSTILE).expect("the hostile module loads"));

/// Three layers of two heads of width 8, copied.
fn case(mode: &str) -> Case {
    let weight = |shape: &[usize]| WeightShape { elem: WeightElem::F32, shape: shape.to_vec() };
    let weights = BTreeMap::from([("w".into(), weight(&[16, 16])), ("b".into(), weight(&[16]))]);
    Case::new(&layout(3, 2, 8), &layout(3, 2, 8), mode.into(), weights)
}

/// Runs a mode, and then a good recording.
fn outcome(mode: &str) -> SandboxError {
    let error = case(mode).record(&MODULE, 16).expect_err(mode);
    let line = error.to_string();
    assert!(line.starts_with("module kvmig-hostile (") && !line.contains('\n'), "{line}");
    let good = case("good").record(&MODULE, 16).expect("a good recording, after a bad one");
    assert_eq!(good.steps.len(), 12);
    error
}

fn trap(mode: &str) -> TrapKind {
    match outcome(mode) {
        SandboxError::Trap { call: Call::Run, trap, .. } => trap,
        other => panic!("{mode}: expected a trap, found {other}"),
    }
}

fn fault(mode: &str) -> Fault {
    match outcome(mode) {
        SandboxError::Fault { call: Call::Run, fault, .. } => *fault,
        other => panic!("{mode}: expected a fault, found {other}"),
    }
}

fn plan_error(mode: &str) -> PlanError {
    match outcome(mode) {
        SandboxError::Plan { error, .. } => error,
        other => panic!("{mode}: expected a plan that can't be used, found {other}"),
    }
}

/// Makes a test of each mode, and their list.
macro_rules! modes {
    ($($mode:literal $name:ident $body:block)*) => {
        const TESTED: &[&str] = &[$($mode),*];

        $(#[test]
        fn $name() $body)*
    };
}

#[test]
fn every_mode_has_a_test() {
    assert_eq!(MODULE.metadata().kinds, TESTED);
}

modes! {
    "good" good {
        let recording = case("good").record(&MODULE, 16).unwrap();
        assert_eq!((recording.tokens, recording.weights.len(), recording.scratch.len()), (16, 2, 6));
    }
    "refuses" refuses {
        let SandboxError::Refused { refusal, call: Call::Run, .. } = outcome("refuses") else { panic!("no refusal") };
        assert_eq!(refusal, Refusal::Unsupported("this pair, on a Monday".into()));
    }
    "endless-loop" endless_loop {
        assert!(matches!(trap("endless-loop"), TrapKind::Fuel { .. }));
    }
    "endless-recursion" endless_recursion {
        assert!(matches!(trap("endless-recursion"), TrapKind::Stack { .. }));
    }
    "memory-hog" memory_hog {
        let TrapKind::Memory { wanted, limit } = trap("memory-hog") else { panic!("not the memory") };
        assert!(wanted > limit);
    }
    "panic" panics {
        assert_eq!(trap("panic"), TrapKind::Panic);
    }
    "log-flood" log_flood {
        let error = outcome("log-flood");
        let SandboxError::Trap { trap: TrapKind::Calls { what: "log lines", .. }, log, .. } = &error else { panic!("{error}") };
        assert_eq!(log.len(), SANDBOX.limits().log_lines as usize);
        assert!(log.iter().all(|line| line.chars().count() < 500) && error.to_string().len() < 1000);
    }
    "kernel-flood" kernel_flood {
        let Fault::Budget { what: "steps", most: 100, found: 101, .. } = fault("kernel-flood") else { panic!("not the steps") };
    }
    "call-flood" call_flood {
        assert!(matches!(trap("call-flood"), TrapKind::Calls { what: "calls of the host", .. }));
    }
    "params-flood" params_flood {
        assert!(matches!(fault("params-flood"), Fault::Budget { what: "bytes of parameters", .. }));
    }
    "handle-flood" handle_flood {
        assert!(matches!(trap("handle-flood"), TrapKind::Calls { what: "buffers and pipelines held", .. }));
    }
    "scratch-beyond-plan" scratch_beyond_plan {
        assert!(matches!(fault("scratch-beyond-plan"), Fault::Budget { what: "bytes of scratch", .. }));
    }
    "out-of-range" out_of_range {
        assert!(matches!(fault("out-of-range"), Fault::Range { index: 2, size: 1028, buffer_size: 1024, .. }));
    }
    "offset-overflow" offset_overflow {
        assert!(matches!(fault("offset-overflow"), Fault::Range { index: 2, .. }));
    }
    "misaligned" misaligned {
        assert!(matches!(fault("misaligned"), Fault::Alignment { index: 2, what: "offset", found: 4, align: 256, .. }));
    }
    "aliased" aliased {
        let expected = Fault::Aliased { step: 1, first: 0, second: 2, buffer: BufferId::Scratch(0) };
        assert_eq!(fault("aliased"), expected);
    }
    "writes-source" writes_source {
        let Fault::Access { index: 2, buffer, does: "writes", .. } = fault("writes-source") else { panic!("not the access") };
        assert_eq!(buffer, BufferId::Source { layer: 1, value: false });
    }
    "uncovered" uncovered {
        let buffer = BufferId::Target { layer: 2, value: true };
        assert_eq!(fault("uncovered"), Fault::Uncovered { buffer, head: 0, token: 0, element: 0 });
    }
    "reads-unwritten" reads_unwritten {
        assert!(matches!(fault("reads-unwritten"), Fault::Unwritten { step: 0, index: 0, element: 0, .. }));
    }
    "stride-escape" stride_escape {
        assert!(matches!(fault("stride-escape"), Fault::Kernel { error: ParamError::OutOfBounds { .. }, .. }));
    }
    "wrong-params" wrong_params {
        assert!(matches!(fault("wrong-params"), Fault::Kernel { error: ParamError::Length { .. }, .. }));
    }
    "unknown-kernel" unknown_kernel {
        assert!(matches!(fault("unknown-kernel"), Fault::UnknownKernel(_)));
    }
    "unknown-weights" unknown_weights {
        assert_eq!(fault("unknown-weights"), Fault::UnknownWeights { name: "somebody.else's".into() });
    }
    "too-few-bindings" too_few_bindings {
        let expected = Fault::Indices { step: 0, found: vec![0], expected: vec![0, 1, 2] };
        assert_eq!(fault("too-few-bindings"), expected);
    }
    "goes-on-after-fault" goes_on_after_fault {
        assert!(matches!(fault("goes-on-after-fault"), Fault::UnknownWeights { .. }));
    }
    "own-shader" own_shader_without_an_adapter {
        assert_eq!(fault("own-shader"), Fault::OwnShaders);
    }
    "own-shader-unknown" own_shader_unknown {
        let mut case = case("own-shader-unknown");
        case.device = DeviceLimits { own_shaders: true, ..DeviceLimits::FLOOR };
        let error = case.record(&MODULE, 16).unwrap_err();
        let SandboxError::Fault { fault, .. } = error else { panic!("{error}") };
        let expected = Fault::UnknownShader { what: "shader", name: "nothing".into(), known: vec!["fill".into()] };
        assert_eq!(*fault, expected);
    }
    "plan-works" plan_works {
        let error = outcome("plan-works");
        let SandboxError::Fault { call: Call::Plan, fault, .. } = &error else { panic!("{error}") };
        assert_eq!(**fault, Fault::NotRunning { request: "scratch" });
    }
    "plan-without-chunk" plan_without_chunk {
        assert!(matches!(plan_error("plan-without-chunk"), PlanError::Limit { field: "chunk-tokens", found: 0, .. }));
    }
    "plan-huge-weights" plan_huge_weights {
        let error = plan_error("plan-huge-weights");
        assert!(matches!(error, PlanError::Limit { field: "bytes of weights", .. }), "{error}");
    }
    "plan-huge-scratch" plan_huge_scratch {
        assert!(matches!(plan_error("plan-huge-scratch"), PlanError::Limit { field: "scratch-bytes", .. }));
    }
}

/// What instructions don't bound, the clock does.
#[test]
fn a_guest_that_never_ends_meets_its_deadline() {
    let limits = SandboxLimits { fuel: u64::MAX, deadline: Duration::from_millis(100), ..SandboxLimits::default() };
    let module = Sandbox::new(limits, None).unwrap().load(HOSTILE).unwrap();
    let error = case("endless-loop").record(&module, 16).unwrap_err();
    assert!(matches!(error, SandboxError::Trap { trap: TrapKind::Deadline { ms: 100 }, .. }), "{error}");
}

#[test]
fn an_own_shader_is_recorded_where_an_adapter_runs_it() {
    let mut case = case("own-shader");
    case.device = DeviceLimits { own_shaders: true, ..DeviceLimits::FLOOR };
    (case.source, case.target) =
        (ViewStrides::dense(case.pair.source(), 16), ViewStrides::dense(case.pair.target(), 16));
    let recording = case.record(&MODULE, 16).unwrap();
    assert_eq!((recording.pipelines.len(), recording.steps.len()), (1, 6));
    let Step::Dispatch { workgroups, bindings, .. } = &recording.steps[5] else { panic!("not a dispatch") };
    assert_eq!((*workgroups, bindings[0].size), ([4, 1, 1], 2 * 16 * 8 * 4));
    assert_eq!(bindings[0].buffer, BufferId::Target { layer: 2, value: true });
}

/// A shader of its own could write anywhere in its binding: between the rows of a chunk lie other tokens.
#[test]
fn an_own_shader_gets_no_view_with_gaps() {
    let mut case = case("own-shader");
    case.device = DeviceLimits { own_shaders: true, ..DeviceLimits::FLOOR };
    let error = case.record(&MODULE, 16).unwrap_err();
    let SandboxError::Fault { fault, .. } = &error else { panic!("{error}") };
    assert!(matches!(**fault, Fault::Foreign { step: 0, index: 0, element: 128, .. }), "{error}");
}

/// What a plan doesn't promise, the host bounds by itself.
#[test]
fn a_good_recording_meets_tight_budgets_too() {
    let folder = tempfile::tempdir().unwrap();
    let compiled = folder.path().join("modules");
    let defaults = SandboxLimits::default;
    for (limits, expected) in [
        (SandboxLimits { invocations: 1000, ..defaults() }, "invocations"),
        (SandboxLimits { runs: 4, ..defaults() }, "pieces of strided ranges"),
        (SandboxLimits { params_bytes: 100, ..defaults() }, "bytes of parameters"),
    ] {
        let module = Sandbox::new(limits, Some(&compiled)).unwrap().load(HOSTILE).unwrap();
        let error = case("good").record(&module, 16).unwrap_err();
        let SandboxError::Fault { fault, .. } = &error else { panic!("{error}") };
        assert!(matches!(**fault, Fault::Budget { what, .. } if what == expected), "{error}");
    }
}
