//! `kvmig eval`: what mappers are worth, side by side on held-out documents.

use std::{
    io::{self, Write},
    path::PathBuf,
    sync::Arc,
};

use anyhow::bail;

use crate::{
    eval::{self, ArmName, Domain, Ends, EvalOptions, On, Results, Row, Verdict, summarise},
    fit::{CorpusFile, Progress, Stage},
    pair::Stored,
};

use super::{
    Ending, bytes,
    evidence::interval,
    interrupt,
    ledger::{LedgerArgs, PolicyArgs},
    models::{DeviceArgs, EngineArgs, ModelArg, PairArg, models_of},
    progress::FitProgress,
};

/// Measure mappers side by side on held-out documents: every pair with every choice of native ends
///
/// Each document is run through both models once; every arm is then compared with the target's own prefill: on the target's greedy
/// continuation, which is what the gate judges by, and on the document's own next tokens. Beside the mappers stand the arms they have to
/// beat: staying on the source, no prefix at all, and the native ends alone. Nothing is served, and no pair's evidence changes.
/// Whoever chooses a mapper or ends by these figures has to measure the choice on other documents: each interval is of its row alone.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvmig eval --held-out prose=novels.txt                       the bundled pair's mappers on your own text
  kvmig eval --pair P --pair Q --source small.gguf --target large.gguf \\
    --held-out code=code.txt --held-out wiki=wiki.txt --ends 4+32 --ends 1+64 --out result.jsonl")]
pub(super) struct Args {
    /// Pair folder, or a folder of pair folders; may be given several times [default: the bundled pair]
    #[arg(long = "pair", value_name = "FOLDER")]
    pairs: Vec<PairArg>,
    /// Model whose caches are mapped: a Hugging Face folder, a GGUF file or bundled:NAME
    #[arg(long, value_name = "MODEL", requires = "pairs")]
    source: Option<ModelArg>,
    /// Model they are mapped for
    #[arg(long, value_name = "MODEL", requires = "pairs")]
    target: Option<ModelArg>,
    /// Text to measure on, and the domain it stands for [default domain: the file's stem]; may be given several times. Documents are
    /// separated by lines of `<|end|>`; those that a pair was fitted on are left out where it is the very file
    #[arg(long = "held-out", value_name = "[NAME=]FILE", required = true)]
    held_out: Vec<CorpusFile>,
    /// Native ends to try every mapper with, first and last tokens as HEAD+TAIL; may be given several times [default: each pair's own]
    #[arg(long = "ends", value_name = "HEAD+TAIL")]
    ends: Vec<Ends>,
    /// Documents of each text at most
    #[arg(long, value_name = "N", default_value_t = 30)]
    documents: usize,
    /// Tokens of a document's prefix
    #[arg(long, value_name = "N", default_value_t = 384)]
    context: usize,
    /// Seed of the draw of documents
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Bytes that mappers' weights may take on the device, such as 12GiB [default: as many as there are]
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse)]
    device_budget: Option<u64>,
    /// Keep results there as they come in (JSON lines): the same command goes on from them
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print the figures as JSON instead of tables
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    policy: PolicyArgs,
    #[command(flatten)]
    ledger: LedgerArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

pub(super) fn run(args: Args) -> anyhow::Result<Ending> {
    let mut pairs = args.pairs.clone();
    if pairs.is_empty() {
        pairs.push(PairArg::DEFAULT);
    }
    let (source, target) = models_of(&pairs[0], (&args.source, &args.target))?;
    args.held_out.iter().try_for_each(CorpusFile::check)?;
    let mut mappers: Vec<Stored> = Vec::new();
    for pair in &pairs {
        mappers.extend_from_slice(pair.open()?.stored());
    }
    let policy = args.policy.load()?;
    let engine = args.engine.options()?;
    let device = args.device.open()?;
    let (source, target) = (source.load(engine)?, target.load(engine)?);
    let gate = Arc::new(args.ledger.open_gate(policy)?);
    interrupt::listen(&gate);
    let mut ends: Vec<Ends> = Vec::new();
    args.ends.into_iter().for_each(|choice| {
        if !ends.contains(&choice) {
            ends.push(choice);
        }
    });
    let options = EvalOptions {
        held_out: args.held_out,
        documents: args.documents,
        context: args.context,
        seed: args.seed,
        device_budget: args.device_budget,
        ends,
        out: args.out,
    };
    let mut shown = FitProgress::new();
    let results = eval::evaluate(&options, &mappers, (&source, &target), &gate, &device, &mut |done, total| {
        shown.show(Progress { stage: Stage::Evidence, done, total })
    });
    shown.clear();
    let results = match results {
        Err(stopped @ eval::EvalError::Interrupted { .. }) => bail!("interrupted: {stopped}"),
        other => other?,
    };
    let mut out = io::stdout().lock();
    let tables = [On::Greedy, On::Text].map(|on| (on, summarise(&results, on)));
    if args.json {
        let [greedy, text] = tables.map(|(_, domains)| domains);
        let json = serde_json::json!({ "subject": results.subject, "greedy": greedy, "own_text": text });
        serde_json::to_writer_pretty(&mut out, &json)?;
        writeln!(out)?;
        return Ok(Ending::Done);
    }
    mappings(&mut out, &results)?;
    for (on, domains) in &tables {
        if domains.is_empty() {
            continue;
        }
        let on = match on {
            On::Greedy => "the target's own greedy continuation (what the gate judges by)",
            On::Text => "the documents' own next tokens",
        };
        writeln!(out, "\non {on}:")?;
        domains.iter().try_for_each(|domain| table(&mut out, &results, domain))?;
    }
    Ok(Ending::Done)
}

/// What was measured.
fn mappings(out: &mut impl Write, results: &Results) -> io::Result<()> {
    writeln!(
        out,
        "{:<48} {:>12} {:>8} {:>10}",
        "mapper, source layers read, native layers, ends", "MFLOP/token", "MB", "FLOP limit"
    )?;
    for (i, mapping) in results.subject.mappings.iter().enumerate() {
        writeln!(
            out,
            "{:<48} {:>12.1} {:>8.1} {:>9.1}x",
            label(results, ArmName::Mapped(i)),
            mapping.mflops,
            mapping.weight_bytes as f64 / 1e6,
            mapping.flop_limit,
        )?;
    }
    Ok(())
}

fn table(out: &mut impl Write, results: &Results, domain: &Domain) -> io::Result<()> {
    let Domain { domain, n, reprefill_ms, rows } = domain;
    let context = results.subject.context;
    writeln!(out, "\n{domain}: {n} documents of {context} tokens, re-prefill {reprefill_ms:.0} ms")?;
    writeln!(
        out,
        "  {:<48} {:<23} {:<19} {:<24} {:<22} {:<10} handoff",
        "arm", "KL, nats/token", "agreement", "NLL gap, nats/token", "gap recovered", "to staying"
    )?;
    for row in rows {
        let Row { arm, kl_nats, agreement, nll_gap_nats, gap_recovered, handoff_ms, speed_up, .. } = row;
        let recovered = gap_recovered.as_ref().map_or("–".to_owned(), |share| interval(share, 2));
        let verdict = match row.verdict() {
            None => "",
            Some(Verdict::Better) => "better",
            Some(Verdict::Worse) => "WORSE",
            Some(Verdict::Undecided) => "undecided",
        };
        let handoff = handoff_ms.zip(*speed_up).map_or(String::new(), |(ms, x)| format!("{ms:.0} ms, {x:.1}x"));
        let line = format!(
            "  {:<48} {:<23} {:<19} {:<24} {:<22} {:<10} {handoff}",
            label(results, *arm),
            interval(kl_nats, 3),
            interval(agreement, 2),
            interval(nll_gap_nats, 3),
            recovered,
            verdict,
        );
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

/// What people call an arm.
fn label(results: &Results, arm: ArmName) -> String {
    match arm {
        ArmName::Source => "source (stay)".to_owned(),
        ArmName::NoPrefix => "no prefix".to_owned(),
        ArmName::EndsOnly(ends) => format!("ends only, {ends}"),
        ArmName::Mapped(index) => {
            let mapping = &results.subject.mappings[index];
            let reads = mapping.rank.map_or_else(|| format!("k = {}", mapping.k), |rank| format!("rank {rank}"));
            let behind = match mapping.native_layers {
                0 => String::new(),
                layers => format!(" behind {layers}"),
            };
            format!("{}: {}, {reads}{behind}, {}", mapping.pair, mapping.kind, mapping.ends)
        }
    }
}
