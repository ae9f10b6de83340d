//! `kvmig pair list`.

use std::{io::Write, path::PathBuf};

use kvmig_gate::{Policy, parse::printable};

use crate::{
    cli::{Ending, bytes, evidence::Forecasts, ledger::PolicyArgs},
    pair::{Cards, Found, PairError, find},
};

/// List the pairs below a folder, and what a policy would make of them
///
/// Weights are not read: `kvmig pair verify` does that. What is damaged is listed with the reason.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Where to look
    #[arg(value_name = "FOLDER", default_value = ".")]
    folder: PathBuf,
    /// Print a JSON array
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    policy: PolicyArgs,
}

/// What is said of a pair.
struct Row {
    folder: PathBuf,
    pair: Result<Whole, PairError>,
}

struct Whole {
    name: String,
    models: [String; 2],
    mappers: Vec<String>,
    bytes: u64,
    documents: Vec<usize>,
    decision: &'static str,
    reason: &'static str,
}

pub(super) fn run(args: Args) -> anyhow::Result<Ending> {
    let policy = args.policy.load()?;
    let rows: Vec<Row> = find(&args.folder)?.into_iter().map(|found| Row::new(found, &policy)).collect();
    let mut out = std::io::stdout().lock();
    if args.json {
        let json: Vec<_> = rows.iter().map(Row::json).collect();
        serde_json::to_writer_pretty(&mut out, &json)?;
        writeln!(out)?;
    } else if rows.is_empty() {
        writeln!(out, "no pair below {}; `kvmig fit` makes one", printable(&args.folder.display().to_string()))?;
    } else {
        table(&mut out, &rows)?;
    }
    Ok(Ending::Done)
}

impl Row {
    fn new(found: Found, policy: &Policy) -> Row {
        Row { folder: found.folder, pair: found.pair.and_then(|pair| Whole::new(&pair, policy)) }
    }

    fn json(&self) -> serde_json::Value {
        match &self.pair {
            Ok(Whole { name, models: [source, target], mappers, bytes, documents, decision, reason }) => {
                serde_json::json!({
                    "folder": self.folder, "name": name, "source": source, "target": target, "mappers": mappers,
                    "bytes": bytes, "documents": documents, "decision": decision, "reason": reason,
                })
            }
            Err(error) => serde_json::json!({ "folder": self.folder, "error": error.to_string() }),
        }
    }
}

impl Whole {
    fn new(pair: &Cards, policy: &Policy) -> Result<Whole, PairError> {
        let cards: Vec<_> = pair.stored().iter().map(|stored| stored.card()).collect();
        let forecasts = Forecasts::new(pair.name(), &cards, policy);
        let (decision, reason) = match forecasts.of_any() {
            Some(forecast) => (forecast.decision, forecast.reason.name()),
            None => ("reprefill", "no_evidence"),
        };
        let identity = pair.first().card().identity();
        let documents = cards.iter().map(|card| card.evidence().map_or(0, |evidence| evidence.documents.len()));
        Ok(Whole {
            name: pair.name().to_owned(),
            models: [&identity.source, &identity.target].map(|model| model.name.clone()),
            mappers: cards.iter().map(|card| card.mapper().to_owned()).collect(),
            bytes: pair.stored().iter().map(|stored| stored.weight_bytes()).sum::<Result<u64, _>>()?,
            documents: documents.collect(),
            decision,
            reason,
        })
    }
}

fn table(out: &mut impl Write, rows: &[Row]) -> std::io::Result<()> {
    let mut lines = vec![["name", "source → target", "mappers", "size", "n", "verdict", "folder"].map(str::to_owned)];
    let mut damaged = Vec::new();
    for Row { folder, pair } in rows {
        let folder = printable(&folder.display().to_string());
        match pair {
            Ok(pair) => {
                let verdict = match pair.decision {
                    "migrate" => "migrate".to_owned(),
                    decision => format!("{decision}: {}", pair.reason),
                };
                // One number where all mappers were measured on as many documents.
                let mut documents = pair.documents.clone();
                documents.dedup();
                let documents: Vec<String> = documents.iter().map(usize::to_string).collect();
                lines.push([
                    pair.name.clone(),
                    pair.models.join(" → "),
                    pair.mappers.join(", "),
                    bytes::shown(pair.bytes),
                    documents.join(", "),
                    verdict,
                    folder,
                ]);
            }
            Err(error) => damaged.push(printable(&error.to_string())),
        }
    }
    let mut widths = [0; 7];
    for line in &lines {
        widths.iter_mut().zip(line).for_each(|(width, cell)| *width = (*width).max(cell.chars().count()));
    }
    if lines.len() > 1 {
        for line in lines {
            let cells: Vec<String> = line.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
            writeln!(out, "{}", cells.join("  ").trim_end())?;
        }
    }
    damaged.iter().try_for_each(|error| writeln!(out, "damaged: {error}"))
}
