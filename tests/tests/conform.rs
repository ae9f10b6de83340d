//! Every conformance case on every backend, against f64: `<case>_<backend>_<weights>`; modules against known answers.
//!
//! The bodies are in `kvmig::device::conform`, where `kvmig conform` runs them too. A backend that is not there is shown
//! as ignored on a newcomer's machine, with what to install on stderr; where `CI` is set it fails.
#![expect(clippy::print_stderr, reason = "a skipped backend must be seen, and a test program has no other voice")]

#[path = "conform/known_answers.rs"]
mod known_answers;
#[path = "conform/own_shader.rs"]
mod own_shader;
#[path = "conform/residency.rs"]
mod residency;

use std::{process::ExitCode, sync::Arc, time::Duration};

use kvmig::{
    device::{
        Device, DeviceError, Pacing,
        conform::{self, CASES, Case, Fixture},
    },
    sandbox::recording::{BufferId, Step},
};
use kvmig_gate::WeightElem;
use libtest_mimic::{Arguments, Failed, Trial};

const BACKENDS: [&str; 4] = ["cpu", "lavapipe", "swiftshader", "llvmpipe"];

/// What a test does with a device.
type Body = fn(&Device) -> Result<(), Failed>;

/// A backend, or why it is not there.
#[derive(Clone)]
struct Backend {
    name: &'static str,
    device: Result<Arc<Device>, Arc<DeviceError>>,
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let backends: Vec<Backend> = BACKENDS.iter().copied().map(Backend::open).collect();
    let mut trials = Vec::new();
    for backend in &backends {
        for case in CASES {
            for (elem, suffix) in [(WeightElem::F32, "f32"), (WeightElem::F16, "f16")] {
                let name = format!("{}_{}_{suffix}", case.name, backend.name);
                trials.push(backend.trial(name, move |device| conforms(case, elem, device)));
            }
        }
        let bodies: [(&str, Body); 10] = [
            ("slices_give_identical_bytes", slices_give_identical_bytes),
            ("an_unwritten_output_is_found", an_unwritten_output_is_found),
            ("nan_and_infinity_are_found", nan_and_infinity_are_found),
            ("only_the_mapped_slots_are_written", only_the_mapped_slots_are_written),
            ("own_shaders_need_a_gpu", own_shaders_need_a_gpu),
            ("a_pair_folder_carries_a_shader", own_shader::a_pair_folder_carries_a_shader),
            ("jobs_share_a_device", jobs_share_a_device),
            ("weights_are_paged_under_a_budget", residency::weights_are_paged_under_a_budget),
            ("head_matched_gives_known_answers", known_answers::head_matched),
            ("mlp_gives_known_answers", known_answers::mlp),
        ];
        for (name, body) in bodies {
            trials.push(backend.trial(format!("{name}_{}", backend.name), body));
        }
    }
    // Against the CPU's weights: the CPU, which knows them, has none to be tried against.
    for backend in backends.iter().filter(|backend| backend.name != "cpu") {
        let name = format!("weights_of_another_device_are_refused_{}", backend.name);
        trials.push(backend.trial(name, weights_of_another_device_are_refused));
    }
    // OpenGL reports its work done when it is submitted, so that there is nothing to wait for.
    for backend in backends.iter().filter(|backend| ["lavapipe", "swiftshader"].contains(&backend.name)) {
        let name = backend.name;
        trials.push(backend.trial(format!("a_missed_deadline_is_an_error_{name}"), move |_| a_missed_deadline(name)));
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

impl Backend {
    fn open(name: &'static str) -> Backend {
        let device = name
            .parse()
            .map_err(|error| panic!("`{name}` names no device: {error}"))
            .and_then(|choice| Device::open(&choice).map(Arc::new).map_err(Arc::new));
        if let Err(error) = &device {
            eprintln!("conform: {name} is skipped. {error}");
        }
        Backend { name, device }
    }

    fn trial(&self, name: String, body: impl Fn(&Device) -> Result<(), Failed> + Send + 'static) -> Trial {
        match self.device.clone() {
            Ok(device) => Trial::test(name, move || body(&device)),
            Err(error) => {
                // Only what is not installed is a reason to skip; an adapter that is there must work.
                let skip = matches!(*error, DeviceError::NotFound { .. }) && std::env::var_os("CI").is_none();
                Trial::test(name, move || Err(error.to_string().into())).with_ignored_flag(skip)
            }
        }
    }
}

/// The body of every case.
fn conforms(case: &Case, weights: WeightElem, device: &Device) -> Result<(), Failed> {
    let outcome = conform::run(case, weights, device, Pacing::default());
    let passes = outcome.as_ref().is_ok_and(|outcome| outcome.passes());
    match (passes, conform::known(case, device)) {
        (true, None) | (false, Some(_)) => Ok(()),
        (true, Some(known)) => Err(format!("passes; take it off the known failures: {}", known.reason).into()),
        (false, None) => Err(match outcome {
            Ok(outcome) => outcome.to_string().into(),
            Err(error) => error.to_string().into(),
        }),
    }
}

fn case(name: &str) -> &'static Case {
    CASES.iter().find(|case| case.name == name).unwrap_or_else(|| panic!("no case `{name}`"))
}

fn slices_give_identical_bytes(device: &Device) -> Result<(), Failed> {
    let fixture = Fixture::new(case("tokens_257"), WeightElem::F32);
    let whole = fixture.map(device, Pacing::default())?;
    let sliced = fixture.map(device, Pacing { dispatch: Duration::ZERO, ..Pacing::default() })?;
    for layer in 0..whole.layout().layers {
        if whole.layer(layer) != sliced.layer(layer) {
            return Err(format!("layer {layer} differs").into());
        }
    }
    Ok(())
}

fn an_unwritten_output_is_found(device: &Device) -> Result<(), Failed> {
    let fixture = Fixture::new(case("affine_k3"), WeightElem::F32);
    let dropped = fixture.map_with(device, Pacing::default(), |mut recording| {
        recording.steps.pop();
        recording
    });
    match dropped {
        // 33 tokens of 2 heads of 32: every element of the last plane and nothing else.
        Err(DeviceError::Output { buffer, poison, non_finite, .. }) => {
            assert_eq!(buffer.0, BufferId::Target { layer: 1, value: true });
            assert_eq!((poison, non_finite), (33 * 2 * 32, 0));
            Ok(())
        }
        other => Err(format!("expected an output error, got {other:?}").into()),
    }
}

fn nan_and_infinity_are_found(device: &Device) -> Result<(), Failed> {
    for planted in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut fixture = Fixture::new(case("affine_k3"), WeightElem::F16);
        fixture.plant(planted);
        match fixture.map(device, Pacing::default()) {
            Err(DeviceError::Output { poison: 0, non_finite, .. }) if non_finite > 0 => {}
            other => return Err(format!("{planted}: expected an output error, got {other:?}").into()),
        }
    }
    Ok(())
}

fn only_the_mapped_slots_are_written(device: &Device) -> Result<(), Failed> {
    let fixture = Fixture::new(case("slots_from_5"), WeightElem::F32);
    let target = fixture.map(device, Pacing::default())?;
    let d = target.layout().head_dim;
    for layer in 0..target.layout().layers {
        for plane in [&target.layer(layer).k, &target.layer(layer).v] {
            for head in 0..target.layout().kv_heads {
                let mut row = vec![1.0; d];
                for slot in (0..5).chain(5 + 33..target.capacity()) {
                    plane.read(target.offset(head, slot), &mut row);
                    assert!(row.iter().all(|&x| x == 0.0), "layer {layer}, head {head}, slot {slot} was written");
                }
            }
        }
    }
    Ok(())
}

/// A module's shader that does the last product's place: it writes the number of the element.
const OWN: &str = "
@group(0) @binding(0) var<storage, read_write> mapped: array<f32>;
@compute @workgroup_size(64)
fn number(@builtin(global_invocation_id) id: vec3<u32>) {
    if id.x < arrayLength(&mapped) { mapped[id.x] = f32(id.x); }
}";

fn own_shaders_need_a_gpu(device: &Device) -> Result<(), Failed> {
    let fixture = Fixture::with_shader(case("affine_k3"), WeightElem::F32, "own", OWN);
    let elements = 33 * 2 * 32u32;
    let mapped = fixture.map_with(device, Pacing::default(), |mut recording| {
        recording.pipelines.push(kvmig::sandbox::recording::PipelineSpec {
            shader: "own".into(),
            entry: "number".into(),
            constants: Vec::new(),
        });
        if let Some(Step::Kernel { bindings, .. }) = recording.steps.pop() {
            let mut output = bindings[4];
            output.index = 0;
            let workgroups = [elements.div_ceil(64), 1, 1];
            recording.steps.push(Step::Dispatch { pipeline: 0, bindings: vec![output], workgroups });
        }
        recording
    });
    match (device, mapped) {
        (Device::Cpu(_), Err(DeviceError::NeedsGpu { shader, .. })) if shader == "own" => Ok(()),
        (Device::Gpu(_), Ok(target)) => {
            let mut values = vec![0.0; 33 * 32];
            target.layer(1).v.read(target.offset(1, 0), &mut values);
            let expected: Vec<f32> = (33 * 32..2 * 33 * 32).map(|i| i as f32).collect();
            assert_eq!(values, expected);
            Ok(())
        }
        (_, other) => Err(format!("{other:?}").into()),
    }
}

fn weights_of_another_device_are_refused(device: &Device) -> Result<(), Failed> {
    let fixture = Fixture::new(case("tokens_1"), WeightElem::F32);
    let other = Device::open(&"cpu".parse()?)?;
    match fixture.map_on(device, &other.load_weights(fixture.loaded())?, Pacing::default(), |recording| recording) {
        Err(DeviceError::Job { field: "weights", .. }) => Ok(()),
        other => Err(format!("expected a job error, got {other:?}").into()),
    }
}

/// One job's wait for the device runs the callbacks of another: that other must wait for them, not only for its work.
fn jobs_share_a_device(device: &Device) -> Result<(), Failed> {
    let fixture = Fixture::new(case("tokens_1"), WeightElem::F32);
    let job = || (0..24).try_for_each(|_| fixture.map(device, Pacing::default()).map(drop));
    std::thread::scope(|scope| {
        let jobs: Vec<_> = (0..8).map(|_| scope.spawn(job)).collect();
        jobs.into_iter().try_for_each(|job| job.join().expect("no job panics"))
    })?;
    Ok(())
}

fn a_missed_deadline(name: &str) -> Result<(), Failed> {
    // A device of its own, for it is given up.
    let device = Device::open(&name.parse()?)?;
    let fixture = Fixture::new(case("tokens_257"), WeightElem::F32);
    match fixture.map(&device, Pacing { deadline: Duration::ZERO, ..Pacing::default() }) {
        Err(DeviceError::Deadline { .. }) => {}
        other => return Err(format!("expected a missed deadline, got {other:?}").into()),
    }
    match fixture.map(&device, Pacing::default()) {
        Err(DeviceError::Lost { .. }) => Ok(()),
        other => Err(format!("expected the device to be given up, got {other:?}").into()),
    }
}
