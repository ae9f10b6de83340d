//! `kvmig run`: one prompt, handed from the source to the target.

use std::{
    io::{IsTerminal, Read, Write},
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use anyhow::{Context, bail};
use indicatif::{ProgressBar, ProgressStyle};
use kvmig_gate::{Gate, Policy};

use crate::{
    bundled,
    engine::Sampling,
    migrate::{Answered, Ask, Event, HandoffError, Mapper, Setup, run as hand_over},
    pair::Pair,
};

use super::{
    Ending, interrupt,
    models::{DeviceArgs, EngineArgs, LedgerArgs, ModelArg},
    report::Report,
};

/// Without --pair, --source and --target: the bundled family, medium to large.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvmig run                                         the bundled family and a long passage of a novel
  kvmig run --prompt-file notes.txt -n 200          your own text on the bundled family
  kvmig run --pair P --source small.gguf --target large.gguf --prompt-file talk.txt --audit
  kvmig run --json --audit | jq .realised           for scripts: the record of the run")]
pub(super) struct Args {
    /// Pair folder that `kvmig fit` made
    #[arg(long, value_name = "FOLDER", requires = "source", requires = "target")]
    pair: Option<PathBuf>,
    /// Model that has the conversation: a Hugging Face folder, a GGUF file or bundled:NAME
    #[arg(long, value_name = "MODEL", requires = "pair")]
    source: Option<ModelArg>,
    /// Model that shall answer
    #[arg(long, value_name = "MODEL", requires = "pair")]
    target: Option<ModelArg>,
    /// File with the prompt; - for standard input
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompt_file: Option<PathBuf>,
    /// The prompt itself
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Tokens to generate at most
    #[arg(short = 'n', long = "tokens", value_name = "N", default_value_t = 48)]
    n: usize,
    /// Domain of the prompt, such as code: the gate then judges by the evidence of that domain alone
    #[arg(long, value_name = "NAME")]
    domain: Option<String>,
    /// After the answer, re-prefill as well and report the realised quality and time (always done on the bundled default)
    #[arg(long)]
    audit: bool,
    /// End with exit code 1 if the gate refuses to migrate; the answer is given all the same
    #[arg(long)]
    require_migration: bool,
    /// The gate's policy, a TOML file; see `kvmig gate policy` [default: the shipped one]
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// Print the record of the run as JSON instead of text
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ledger: LedgerArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

pub(super) fn run(args: Args) -> anyhow::Result<Ending> {
    let prompt = prompt(&args)?;
    if prompt.is_empty() {
        bail!("the prompt is empty: give --prompt TEXT or --prompt-file FILE");
    }
    let policy = policy(args.policy.as_deref())?;
    let clock = Instant::now();
    let options = args.engine.options()?;
    let device = args.device.open()?;
    let (source, target, pair) = match &args.pair {
        Some(folder) => {
            let model = |arg: &Option<ModelArg>| arg.clone().context("--pair needs --source and --target");
            (model(&args.source)?, model(&args.target)?, Pair::open(folder)?)
        }
        None => {
            let (source, target) = bundled::DEFAULT;
            (ModelArg::Bundled(source), ModelArg::Bundled(target), bundled::default_pair()?)
        }
    };
    let (source, target) = (source.load(options)?, target.load(options)?);
    let gate = Arc::new(open_gate(policy, &args.ledger.path()?)?);
    let mapper = Mapper::load(&pair, &device)?;
    let tokens = source.tokenizer().encode(&prompt)?;
    let load_ms = clock.elapsed().as_secs_f64() * 1e3;
    let setup =
        Setup { gate: &gate, device: &device, source: &source, target: &target, pair: &pair, mapper: &mapper, load_ms };
    // What the bundled default is there for is to show all of it.
    let audit = args.audit || args.pair.is_none();
    let ask =
        Ask { tokens: &tokens, domain: args.domain.as_deref(), generate: args.n, sampling: Sampling::Greedy, audit };

    interrupt::watch(&gate);
    let mut report = Report::new(&setup, &ask, !args.json);
    let bar = bar(tokens.len(), source.name());
    let mut failed = None;
    let answered = hand_over(&setup, ask, &mut |event| {
        let done = match event {
            Event::Prefilled { done, .. } => {
                bar.set_position(done as u64);
                Ok(())
            }
            Event::Reprefilled { .. } => Ok(()),
            Event::Ready { record, .. } => {
                bar.finish_and_clear();
                report.ready(record)
            }
            Event::Text(text) => report.text(text),
            Event::Auditing => report.auditing(),
        };
        if let Err(error) = done {
            failed.get_or_insert(error);
        }
        failed.is_none() && !interrupt::asked()
    });
    bar.finish_and_clear();
    if let Some(error) = failed {
        return Err(error.into());
    }
    let Answered { record, stopped, trouble } = match answered {
        // A report that can't be printed stops the run too, and was told above.
        Err(stopped @ HandoffError::Stopped { .. }) => bail!("interrupted: {stopped}"),
        other => other?,
    };
    // The answer first: what went wrong beside it has not made it worse.
    if args.json {
        let mut out = std::io::stdout().lock();
        serde_json::to_writer_pretty(&mut out, &record)?;
        writeln!(out)?;
    } else {
        report.done(&record)?;
    }
    if let Some(trouble) = trouble {
        return Err(trouble.into());
    }
    if stopped {
        bail!("interrupted; ticket {} is ended, its record holds the answer so far", record.ticket);
    }
    let refused = record.decision != "migrate";
    Ok(if refused && args.require_migration { Ending::Negative } else { Ending::Done })
}

fn prompt(args: &Args) -> anyhow::Result<String> {
    match (&args.prompt, &args.prompt_file) {
        (Some(text), _) => Ok(text.clone()),
        (None, Some(path)) if path.as_os_str() == "-" => {
            let mut text = String::new();
            std::io::stdin().lock().read_to_string(&mut text).context("standard input: expected UTF-8 text")?;
            Ok(text)
        }
        (None, Some(path)) => {
            let bytes = std::fs::read(path).with_context(|| format!("--prompt-file {}", path.display()))?;
            String::from_utf8(bytes)
                .with_context(|| format!("--prompt-file {}: expected UTF-8 text; convert it first", path.display()))
        }
        (None, None) if args.pair.is_some() => {
            bail!("what shall be answered? Give --prompt TEXT or --prompt-file FILE")
        }
        (None, None) => Ok(bundled::PROMPT.to_owned()),
    }
}

/// The policy of a file, or the shipped one.
pub(super) fn policy(path: Option<&Path>) -> anyhow::Result<Policy> {
    Ok(match path {
        Some(path) => Policy::load(path)?,
        None => Policy::default(),
    })
}

/// The one place where a gate is opened.
pub(super) fn open_gate(policy: Policy, ledger: &Path) -> anyhow::Result<Gate> {
    Ok(Gate::open(policy, ledger)?)
}

/// A bar for the source's prefill; drawn only on a terminal, and only once it takes a while.
fn bar(tokens: usize, model: &str) -> ProgressBar {
    let bar = if std::io::stderr().is_terminal() { ProgressBar::new(tokens as u64) } else { ProgressBar::hidden() };
    let style = ProgressStyle::with_template("prefill on {msg} {bar:32} {pos}/{len} tokens, {eta} left")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.with_style(style).with_message(model.to_owned())
}
