//! `kvmig conform`: every device's kernels against f64 references.

use std::io::Write;

use serde_json::json;

use crate::device::{
    Device, DeviceChoice,
    conform::{Status, conform},
    devices,
};

use super::Ending;

/// Hold every device's kernels against f64 references
///
/// Exit codes: 0 every case passed, or failed as it is known to; 1 a case failed; 2 a device could not be opened.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Device to check: all, or as `kvmig run --device` takes it; may be repeated
    #[arg(long, value_name = "DEVICE", default_value = "all")]
    device: Vec<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args) -> anyhow::Result<Ending> {
    let choices: Vec<DeviceChoice> = if args.device.iter().any(|name| name == "all") {
        devices().devices.into_iter().map(|device| device.choice).collect()
    } else {
        args.device.iter().map(|name| name.parse()).collect::<Result<_, _>>()?
    };
    let open = |choice: &DeviceChoice| Ok((choice.to_string(), Device::open(choice)?));
    let opened = choices.iter().map(open).collect::<anyhow::Result<Vec<_>>>()?;
    let cases = conform(opened.iter().map(|(name, device)| (name.clone(), device)));
    let failed = cases.iter().filter(|case| case.status == Status::Fail).count();
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &json!({ "cases": cases }))?;
        writeln!(out)?;
    } else {
        for case in &cases {
            let status = match case.status {
                Status::Pass => "pass",
                Status::Fail => "FAIL",
                Status::Known => "known",
            };
            write!(out, "{status:<6} {:<10} {:<28}", case.backend, case.case)?;
            if let (Some(error), Some(bound)) = (case.error, case.bound) {
                write!(out, " error {error:.2e}, bound {bound:.2e}")?;
            }
            if let Some(message) = &case.message {
                write!(out, " {message}")?;
            }
            writeln!(out)?;
        }
        writeln!(out, "{} cases on {} device(s), {failed} failed", cases.len(), opened.len())?;
    }
    Ok(if failed > 0 { Ending::Negative } else { Ending::Done })
}
