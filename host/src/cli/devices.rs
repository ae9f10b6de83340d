//! `kvmig devices`: what is there, what is missing, and the mend.

use std::io::Write;

use crate::device::{SelfTestStatus, devices};

use super::Ending;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args) -> anyhow::Result<Ending> {
    let list = devices();
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &list)?;
        writeln!(out)?;
        return Ok(Ending::Done);
    }
    write!(out, "{list}")?;
    let failed = list.devices.iter().any(|device| matches!(device.self_test, SelfTestStatus::Failed { .. }));
    if failed {
        writeln!(out, "a device that fails its self-test is refused")?;
    }
    Ok(Ending::Done)
}
