//! `kvmig pair verify`.

use std::io::Write;

use kvmig_gate::parse::printable;

use crate::{
    cli::{Ending, models::PairArg},
    device::{Device, DeviceChoice},
    migrate::{MapperError, Offer},
    pair::Stored,
};

/// Check every file of pairs: digests, shapes, numbers, and that the module loads and plans
///
/// Exit code 1 if any is wrong.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Pair folders, folders of them, or `bundled`
    #[arg(value_name = "PAIR", required = true)]
    pairs: Vec<PairArg>,
    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args) -> anyhow::Result<Ending> {
    let device = Device::open(&DeviceChoice::Cpu)?;
    let mut out = std::io::stdout().lock();
    let mut all = Vec::new();
    for arg in &args.pairs {
        let checked: Vec<(String, Option<String>)> = match arg.open() {
            Ok(pair) => pair
                .stored()
                .iter()
                .map(|stored| (stored.card().label().to_owned(), whole(stored, &device).err().map(|e| e.to_string())))
                .collect(),
            Err(error) => vec![(arg.to_string(), Some(error.to_string()))],
        };
        for (pair, wrong) in checked {
            if !args.json {
                match &wrong {
                    None => writeln!(out, "ok     {}", printable(&pair))?,
                    Some(error) => writeln!(out, "wrong  {}", printable(error))?,
                }
            }
            all.push((pair, wrong));
        }
    }
    if args.json {
        let json = |(pair, wrong): &(String, Option<String>)| serde_json::json!({ "pair": pair, "ok": wrong.is_none(), "error": wrong });
        serde_json::to_writer_pretty(&mut out, &all.iter().map(json).collect::<Vec<_>>())?;
        writeln!(out)?;
    }
    Ok(if all.iter().all(|(_, wrong)| wrong.is_none()) { Ending::Done } else { Ending::Negative })
}

fn whole(stored: &Stored, device: &Device) -> Result<(), MapperError> {
    let pair = stored.verify()?;
    Ok(Offer::of(&pair, device)?.check_weights(pair.loaded())?)
}
