//! `kvmig pair`: what a pair folder holds and what it is worth.

use std::io::Write;

use super::{
    Ending,
    evidence::{Forecasts, evidence_table},
    ledger::PolicyArgs,
    models::PairArg,
};

/// Show what a pair folder holds, what it is worth, and what a policy would make of it
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The pair folder, or `bundled`
    #[arg(value_name = "FOLDER")]
    pair: PairArg,
    /// Print the manifest, the evidence of every document and the policy's answers as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    policy: PolicyArgs,
}

pub(super) fn run(args: Args) -> anyhow::Result<Ending> {
    let policy = args.policy.load()?;
    let pair = args.pair.open()?;
    let forecasts = Forecasts::new(&pair, &policy);
    let mut out = std::io::stdout().lock();
    if args.json {
        let all = serde_json::json!({
            "manifest": pair.manifest(), "evidence": pair.evidence(), "forecasts": forecasts.json()
        });
        serde_json::to_writer_pretty(&mut out, &all)?;
        writeln!(out)?;
        return Ok(Ending::Done);
    }
    let (identity, fit) = (pair.identity(), &pair.manifest().fit);
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
    writeln!(out, "mapper     {}, k = {}", identity.mapper.kind, fit.k)?;
    let (module, file) = (pair.loaded().module().short(), identity.mapper.module.short());
    writeln!(out, "module     {module} in tickets; mapper.wasm has SHA-256 {file}")?;
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
    evidence_table(&mut out, &pair)?;
    forecasts.table(&mut out)?;
    Ok(Ending::Done)
}
