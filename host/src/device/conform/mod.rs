//! The conformance cases: small mappings whose answers are computed in f64, run on any device.
//!
//! A case goes the whole way of a job: weights loaded, source staged or used in place, recordings replayed in chunks with
//! a remainder, outputs poisoned, scanned and installed. Its recordings are those of a ridge, a head-matched or an MLP mapper,
//! made by the host.

mod cases;
mod fixture;
mod heads;

use std::fmt;

use kvmig_gate::WeightElem;
use kvmig_shaders::tolerance::Comparison;
use serde::Serialize;

pub(super) use cases::SELF_TESTS;
pub use cases::{CASES, Case, Side};
pub use fixture::Fixture;

use super::{Device, DeviceError, Pacing};

/// How a case came out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Every element of the target against its bound.
    pub comparison: Comparison,
}

impl Outcome {
    /// Whether every error is explained by rounding.
    pub fn passes(&self) -> bool {
        self.comparison.passes()
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let c = &self.comparison;
        write!(
            f,
            "{} elements, error at most {:.3e}, {:.3e} on average; worst at element {}: {:.2} times its bound of {:.3e}",
            c.count, c.max_error, c.mean_error, c.worst_index, c.worst_ratio, c.worst_bound
        )
    }
}

/// One line of `kvmig conform --json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CaseReport {
    /// The case, with the type of the weights: `affine_k3_f16`.
    pub case: String,
    /// Whose recordings ran: the host's own, in a mapper's form.
    pub mapper: &'static str,
    /// The device as `--device` names it.
    pub backend: String,
    /// Outcome.
    pub status: Status,
    /// Error of the element that is worst against its own bound; absent where the case ended in an error.
    pub error: Option<f64>,
    /// The bound of that element.
    pub bound: Option<f64>,
    /// The error, or the reason of a known failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Outcome of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Every error is explained by rounding.
    Pass,
    /// Some is not, or the device failed.
    Fail,
    /// Fails for a reason that is known; see [`KNOWN`].
    Known,
}

/// A failure that is known: it must fail, and says so when it no longer does.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// Case, or a prefix of several.
    pub case: &'static str,
    /// Backend, as [`super::DeviceInfo`] names it.
    pub backend: &'static str,
    /// A part of the driver's name and version.
    pub driver: &'static str,
    /// Why.
    pub reason: &'static str,
}

/// Known failures of drivers.
pub const KNOWN: &[Known] = &[];

/// The known failure that a case on a device falls under.
pub fn known(case: &Case, device: &Device) -> Option<&'static Known> {
    let info = device.info();
    KNOWN.iter().find(|known| {
        case.name.starts_with(known.case) && known.backend == info.backend && info.driver.contains(known.driver)
    })
}

/// Runs every case with both weight types on every device given, named as `--device` names it.
pub fn conform<'d>(devices: impl IntoIterator<Item = (String, &'d Device)>) -> Vec<CaseReport> {
    let mut reports = Vec::new();
    for (backend, device) in devices {
        for case in CASES {
            for (elem, suffix) in [(WeightElem::F32, "f32"), (WeightElem::F16, "f16")] {
                let outcome = run(case, elem, device, Pacing::default());
                let passes = outcome.as_ref().is_ok_and(Outcome::passes);
                let known = known(case, device);
                let (status, message) = match (passes, known) {
                    (true, None) => (Status::Pass, None),
                    (false, Some(known)) => (Status::Known, Some(known.reason.to_owned())),
                    (true, Some(known)) => {
                        (Status::Fail, Some(format!("passes, but is listed as a known failure: {}", known.reason)))
                    }
                    (false, None) => (Status::Fail, outcome.as_ref().err().map(ToString::to_string)),
                };
                let comparison = outcome.ok().map(|outcome| outcome.comparison);
                reports.push(CaseReport {
                    case: format!("{}_{suffix}", case.name),
                    mapper: "host",
                    backend: backend.clone(),
                    status,
                    error: comparison.map(|c| c.worst_ratio * c.worst_bound),
                    bound: comparison.map(|c| c.worst_bound),
                    message,
                });
            }
        }
    }
    reports
}

/// Runs one case.
///
/// # Errors
/// What [`Device::execute`] fails with.
pub fn run(case: &Case, weights: WeightElem, device: &Device, pacing: Pacing) -> Result<Outcome, DeviceError> {
    let fixture = Fixture::new(case, weights);
    let target = fixture.map(device, pacing)?;
    Ok(Outcome { comparison: Comparison::new(fixture.found(&target).zip(fixture.expected(device))) })
}
