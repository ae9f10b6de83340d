//! `kvmig pair show`.

use std::io::Write;

use anyhow::Context;

use crate::{
    cli::{
        Ending, bytes,
        evidence::{Forecasts, evidence_table},
        ledger::PolicyArgs,
        models::PairArg,
    },
    pair::{Card, PairError, Stored},
};

use super::diagnostics;

/// Show what a pair folder holds, what it is worth, and what a policy would make of it
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The pair folder, a folder of them, or `bundled`
    #[arg(value_name = "FOLDER", required = true)]
    pair: Option<PairArg>,
    /// Print the manifest, the evidence of every document and the policy's answers as JSON; of several mappers, an array
    #[arg(long)]
    json: bool,
    /// Show what the fit saw of its own work too: which source layers explain what, where errors lie (JSON always has it)
    #[arg(long)]
    diagnostics: bool,
    #[command(flatten)]
    policy: PolicyArgs,
}

pub(super) fn run(args: Args) -> anyhow::Result<Ending> {
    let policy = args.policy.load()?;
    // `kvmig pair` takes these arguments or a command, so that it can't be a type's to demand it.
    let pair = args.pair.context("which pair? Give its folder")?.open()?;
    let cards: Vec<&Card> = pair.stored().iter().map(Stored::card).collect();
    let mut out = std::io::stdout().lock();
    if args.json {
        let one = |stored: &Stored| -> Result<serde_json::Value, PairError> {
            let card = stored.card();
            Ok(serde_json::json!({
                "manifest": card.manifest(),
                "evidence": card.evidence(),
                "forecasts": Forecasts::new(card.name(), &[card], &policy).json(),
                "diagnostics": stored.diagnostics()?,
            }))
        };
        let all = pair.stored().iter().map(one).collect::<Result<Vec<_>, _>>()?;
        match all.as_slice() {
            [one] => serde_json::to_writer_pretty(&mut out, one)?,
            several => serde_json::to_writer_pretty(&mut out, several)?,
        }
        writeln!(out)?;
        return Ok(Ending::Done);
    }
    let identity = cards[0].identity();
    writeln!(out, "pair       {}", pair.name())?;
    for (label, model) in [("source", &identity.source), ("target", &identity.target)] {
        let l = &model.layout;
        writeln!(
            out,
            "{label:<10} {}: {} layers, {} KV heads of {}, model {}",
            model.name,
            l.layers,
            l.kv_heads,
            l.head_dim,
            model.digest.short()
        )?;
    }
    for stored in pair.stored() {
        mapper(&mut out, stored)?;
        if args.diagnostics {
            diagnostics::show(&mut out, stored.diagnostics()?.as_ref())?;
        }
    }
    Forecasts::new(pair.name(), &cards, &policy).table(&mut out)?;
    Ok(Ending::Done)
}

fn mapper(out: &mut impl Write, stored: &Stored) -> anyhow::Result<()> {
    let card = stored.card();
    let (identity, fit) = (card.identity(), &card.manifest().fit);
    let size = bytes::shown(stored.weight_bytes()?);
    writeln!(out, "mapper     {}, k = {}, {size} of weights", identity.mapper.kind, fit.k)?;
    let file = identity.mapper.module.short();
    let (_, module) = stored.module()?;
    writeln!(out, "module     {} in tickets; mapper.wasm has SHA-256 {file}", module.short())?;
    writeln!(out, "ends       first {} and last {} tokens native", identity.head, identity.tail)?;
    let corpora: Vec<String> = fit.corpora.iter().map(|c| format!("{} ({})", c.name, c.file)).collect();
    writeln!(
        out,
        "fit        {} rows of {} sequences from {}; R² {}: keys {:.2}, values {:.2}",
        fit.rows,
        fit.sequences,
        corpora.join(", "),
        if fit.training.is_some() { "held out" } else { "in sample" },
        fit.r2_keys,
        fit.r2_values
    )?;
    writeln!(out)?;
    evidence_table(out, card)?;
    Ok(())
}
