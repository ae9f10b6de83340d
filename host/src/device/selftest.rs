//! The known-answer test that every adapter passes before it is used, once per process.
//!
//! Wrong results without an error are the failure to fear: barriers, reductions and large products were seen to go wrong
//! on one vendor's driver while all others were right (wgpu#4500, wgpu#7904, burn#4966, llama.cpp#10809). Answers come
//! from f64, so that no driver vouches for another.

use std::{
    collections::HashMap,
    sync::{Mutex, OnceLock, PoisonError},
    time::Instant,
};

use kvmig_gate::WeightElem;
use kvmig_shaders::tolerance::Comparison;
use serde::Serialize;

use super::{Device, DeviceError, Pacing, conform};
use crate::gpu::Adapter;

/// Figures of a self-test that passed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SelfTest {
    /// Error of the element that is worst against its own bound.
    pub error: f64,
    /// The bound of that element.
    pub bound: f64,
    /// Milliseconds it took, the compilation of the kernels included.
    pub ms: f64,
}

/// What was found, kept per adapter: its figures, or (case, error, bound) of a failure.
type Verdict = Result<SelfTest, (&'static str, f64, f64)>;

/// The verdict on a device that was opened on `adapter`.
///
/// # Errors
/// [`DeviceError::SelfTest`] with the figure; an error of the device itself, which is not kept.
pub(super) fn require(device: &Device, adapter: &Adapter) -> Result<SelfTest, DeviceError> {
    static VERDICTS: OnceLock<Mutex<HashMap<String, Verdict>>> = OnceLock::new();
    let verdicts = VERDICTS.get_or_init(Mutex::default);
    // Two cards of one model are two adapters: the bus tells them apart.
    let key = format!("{} {} {}", adapter.title(), adapter.driver(), adapter.info.device_pci_bus_id);
    let known = verdicts.lock().unwrap_or_else(PoisonError::into_inner).get(&key).copied();
    let verdict = match known {
        Some(verdict) => verdict,
        None => {
            let verdict = test(device)?;
            verdicts.lock().unwrap_or_else(PoisonError::into_inner).insert(key, verdict);
            verdict
        }
    };
    refuse(device, verdict)
}

/// Runs the test now.
///
/// # Errors
/// As [`require`].
pub(super) fn run(device: &Device) -> Result<SelfTest, DeviceError> {
    refuse(device, test(device)?)
}

fn refuse(device: &Device, verdict: Verdict) -> Result<SelfTest, DeviceError> {
    verdict.map_err(|(case, error, bound)| DeviceError::SelfTest {
        device: device.info().name,
        case: case.to_owned(),
        error,
        bound,
    })
}

/// Every kernel, with f32 weights and with halves in the form this adapter gets them.
fn test(device: &Device) -> Result<Verdict, DeviceError> {
    let begin = Instant::now();
    let mut passed = SelfTest { error: 0.0, bound: 0.0, ms: 0.0 };
    for case in &conform::SELF_TESTS {
        for weights in [WeightElem::F32, WeightElem::F16] {
            let outcome = conform::run(case, weights, device, Pacing::default())?;
            match judge(case.name, &outcome.comparison) {
                // The ratios are compared, for the cases' bounds differ.
                Ok((error, bound)) if error * passed.bound >= passed.error * bound => {
                    passed = SelfTest { error, bound, ms: 0.0 };
                }
                Ok(_) => {}
                Err(failed) => return Ok(Err(failed)),
            }
        }
    }
    passed.ms = begin.elapsed().as_secs_f64() * 1e3;
    Ok(Ok(passed))
}

/// Error and bound of a comparison, or the figures of its failure.
fn judge(case: &'static str, found: &Comparison) -> Result<(f64, f64), (&'static str, f64, f64)> {
    let (error, bound) = (found.worst_ratio * found.worst_bound, found.worst_bound);
    if found.passes() { Ok((error, bound)) } else { Err((case, error, bound)) }
}

#[cfg(test)]
mod tests {
    use kvmig_shaders::tolerance::Expected;

    use super::*;

    #[test]
    fn a_wrong_element_is_refused_with_its_figure() {
        let expected = Expected { value: 1.0, bound: 1e-6 };
        let right = Comparison::new([(1.0, expected), (1.000_000_1, expected)]);
        assert!(judge("right", &right).is_ok());
        for wrong in [1.01, 0.0, f32::NAN, f32::INFINITY] {
            let found = Comparison::new([(1.0, expected), (wrong, expected)]);
            let (case, error, bound) = judge("wrong", &found).expect_err("refused");
            assert_eq!((case, bound), ("wrong", 1e-6));
            assert!(error > bound, "{error} for {wrong}");
        }
        assert!(judge("empty", &Comparison::new([])).is_err(), "nothing compared proves nothing");
    }

    #[test]
    fn the_cpu_passes() {
        let device = Device::Cpu(super::super::CpuDevice::default());
        let passed = run(&device).expect("passes");
        assert!(passed.error <= 1e-4, "{passed:?}");
    }
}
