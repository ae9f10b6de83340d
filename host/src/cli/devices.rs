//! `kvmig devices`: what is there, what is missing, and the mend.

use std::io::Write;

use crate::device::{SelfTestStatus, devices};

use super::Ending;

/// List the devices that can map, what is missing, and how to get it
///
/// Every adapter is opened and held against a known answer; one that computes wrong numbers is refused.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
The first column is what `kvmig run --device` takes. `--device auto` takes a hardware GPU where there is one, else the CPU; software
adapters (lavapipe, SwiftShader, llvmpipe) are for checking results and run only by name.")]
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
    for device in &list.devices {
        let name = device.alias.map_or_else(|| device.choice.to_string(), str::to_owned);
        let kind = if device.hardware { "" } else { ", software: only by name" };
        writeln!(out, "{name:<12} {} ({}, {}{kind})", device.info.name, device.info.backend, device.info.driver)?;
        match &device.self_test {
            SelfTestStatus::Passed(_) => writeln!(out, "{:<12} passes its self-test", "")?,
            SelfTestStatus::Refused { reason } => writeln!(out, "{:<12} REFUSED: {reason}", "")?,
        }
    }
    for missing in &list.missing {
        writeln!(out, "{:<12} not here: {}", missing.name, missing.mend)?;
    }
    Ok(Ending::Done)
}
