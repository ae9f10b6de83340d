//! `kvmig pair remove`.

use std::{
    io::{BufRead, IsTerminal, Write},
    path::PathBuf,
};

use anyhow::bail;
use kvmig_gate::parse::printable;

use crate::{
    cli::{Ending, bytes, say},
    pair::{Cards, remove},
};

/// Remove pair folders: the files of a pair, then the empty folder, and nothing else
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Pair folders, or folders of them
    #[arg(value_name = "PAIR", required = true)]
    pairs: Vec<PathBuf>,
    /// Don't ask
    #[arg(long)]
    yes: bool,
    /// Print what was removed as a JSON array
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args) -> anyhow::Result<Ending> {
    let mut removed = Vec::new();
    for folder in &args.pairs {
        // A pair whose weights or evidence are damaged is removed all the same.
        let mappers = match Cards::open(folder) {
            Ok(pair) => pair.stored().iter().filter_map(|stored| stored.folder().map(PathBuf::from)).collect(),
            Err(_) => vec![folder.clone()],
        };
        for mapper in mappers {
            if !args.yes && !confirmed(&mapper)? {
                continue;
            }
            remove(&mapper)?;
            if !args.json {
                say(&format!("removed {}\n", printable(&mapper.display().to_string())));
            }
            removed.push(mapper);
        }
        // What held several mappers goes with the last of them, unless something else is in it.
        if removed.iter().any(|removed| removed.parent() == Some(folder) && removed != folder) {
            let _ = std::fs::remove_dir(folder);
        }
    }
    if args.json {
        let mut out = std::io::stdout().lock();
        serde_json::to_writer_pretty(&mut out, &removed)?;
        writeln!(out)?;
    }
    Ok(Ending::Done)
}

/// Asks on the terminal. Where there is none, nobody can say yes.
fn confirmed(folder: &std::path::Path) -> anyhow::Result<bool> {
    let name = printable(&folder.display().to_string());
    if !std::io::stdin().is_terminal() {
        bail!("{name}: nobody to ask whether to remove it; give --yes");
    }
    let size = Cards::open(folder).ok().and_then(|pair| pair.first().weight_bytes().ok());
    let size = size.map_or(String::new(), |size| format!(" ({} of weights)", bytes::shown(size)));
    say(&format!("remove {name}{size}? [y/N] "));
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
