//! A guest that misbehaves in every way the sandbox must survive. Its settings are the name of one of [`MODES`], which
//! `describe` lists as its kinds, so that a test can tell whether every mode has one.

mod record;
mod resources;

use kvmig_mapper::{Job, Mapper, Metadata, ModelPair, Refusal, Shader, WorkPlan};

/// What a mode does in `run`.
type Run = fn(&ModelPair, &Job) -> Result<(), Refusal>;

/// Every mode with its `run`.
const MODES: &[(&str, Run)] = &[
    ("good", record::good),
    ("refuses", record::refuses),
    ("endless-loop", resources::endless_loop),
    ("endless-recursion", resources::endless_recursion),
    ("memory-hog", resources::memory_hog),
    ("panic", resources::panic),
    ("log-flood", resources::log_flood),
    ("kernel-flood", resources::kernel_flood),
    ("call-flood", resources::call_flood),
    ("params-flood", resources::params_flood),
    ("handle-flood", resources::handle_flood),
    ("scratch-beyond-plan", resources::scratch_beyond_plan),
    ("out-of-range", record::out_of_range),
    ("offset-overflow", record::offset_overflow),
    ("misaligned", record::misaligned),
    ("aliased", record::aliased),
    ("writes-source", record::writes_source),
    ("uncovered", record::uncovered),
    ("reads-unwritten", record::reads_unwritten),
    ("stride-escape", record::stride_escape),
    ("wrong-params", record::wrong_params),
    ("unknown-kernel", record::unknown_kernel),
    ("unknown-weights", record::unknown_weights),
    ("too-few-bindings", record::too_few_bindings),
    ("goes-on-after-fault", record::goes_on_after_fault),
    ("own-shader", record::own_shader),
    ("own-shader-unknown", record::own_shader_unknown),
    ("plan-works", record::good),
    ("plan-without-chunk", record::good),
    ("plan-huge-weights", record::good),
    ("plan-huge-scratch", record::good),
];

struct Hostile;

kvmig_mapper::export!(Hostile);

impl Mapper for Hostile {
    fn describe() -> Metadata {
        Metadata {
            name: env!("CARGO_PKG_NAME").into(),
            version: env!("CARGO_PKG_VERSION").into(),
            kinds: MODES.iter().map(|(name, _)| (*name).into()).collect(),
            shaders: vec![Shader { name: "fill".into(), wgsl: include_str!("fill.wgsl").into() }],
        }
    }

    fn plan(pair: &ModelPair, settings: &str) -> Result<WorkPlan, Refusal> {
        record::plan(pair, settings)
    }

    fn run(pair: &ModelPair, settings: &str, job: Job) -> Result<(), Refusal> {
        match MODES.iter().find(|(name, _)| *name == settings) {
            Some((_, run)) => run(pair, &job),
            None => Err(Refusal::Invalid(format!("settings: found `{settings}`, expected a mode"))),
        }
    }
}
