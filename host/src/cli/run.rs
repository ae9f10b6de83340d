//! `kvmig run`: one prompt, handed from the source to the target.

use std::{
    collections::BTreeSet,
    io::{Read, Write},
    path::PathBuf,
    sync::Arc,
    time::Instant,
};

use anyhow::{Context, bail};
use kvmig_gate::Evidence;

use crate::{
    bundled,
    engine::Sampling,
    migrate::{Answered, Ask, Event, HandoffError, Offer, Setup, Store, run as hand_over},
    pair::{Cards, NameError, check_name},
};

use super::{
    Ending, bytes, interrupt,
    ledger::{LedgerArgs, PolicyArgs},
    models::{DeviceArgs, EngineArgs, ModelArg, PairArg, models_of},
    progress::prefill_bar,
    report::Report,
    warn,
};

/// Answer a prompt: prefill on the source, hand over to the target, decode there
///
/// Without --pair, --source and --target: the bundled family, medium to large.
///
/// Exit codes: 0 an answer was given, by whatever way the gate decided (migrate, re-prefill, or stay on the source); 1 it was
/// given, but nothing was migrated and --require-migration was given; 2 an error: no answer, one that Ctrl-C cut short, or one whose
/// ledger entry or audit failed; 130 Ctrl-C a second time.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvmig run                                         the bundled family and a long passage of a novel
  kvmig run --prompt-file notes.txt -n 200          your own text on the bundled family
  kvmig run --pair bundled:large-medium             the other way round; bundled:medium-code-large is a third pair
  kvmig run --pair P --source small.gguf --target large.gguf --prompt-file talk.txt --audit
  kvmig run --json --audit | jq .realised           for scripts: the record of the run")]
pub(super) struct Args {
    /// Pair folder that `kvmig fit` made, or a folder of such folders, one for each mapper to choose from, with --source and
    /// --target; or `bundled`, which brings its models
    #[arg(long, value_name = "FOLDER")]
    pair: Option<PairArg>,
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
    #[arg(long, value_name = "NAME", value_parser = domain)]
    domain: Option<String>,
    /// Kind of the one mapper that may run, such as ridge [default: of those that the gate admits, the quickest]
    #[arg(long, value_name = "KIND", value_parser = domain)]
    mapper: Option<String>,
    /// Bytes that mappers' weights may take on the device, such as 12GiB [default: as many as there are]
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse)]
    device_budget: Option<u64>,
    /// After the answer, measure what the migration was worth, against a re-prefill; or, where the gate refused it, what it
    /// would have been worth (always done on the bundled default)
    #[arg(long)]
    audit: bool,
    /// End with exit code 1 if the gate refuses to migrate; the answer is given all the same
    #[arg(long)]
    require_migration: bool,
    /// Print the record of the run as JSON instead of text
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
    let prompt = prompt(&args)?;
    if prompt.is_empty() {
        let given =
            args.prompt_file.as_ref().map_or("--prompt".into(), |file| format!("--prompt-file {}", file.display()));
        bail!("{given}: found nothing, expected a text to answer");
    }
    let policy = args.policy.load()?;
    let pair = args.pair.as_ref().unwrap_or(&PairArg::DEFAULT);
    let (source, target) = models_of(pair, (&args.source, &args.target))?;
    let clock = Instant::now();
    let options = args.engine.options()?;
    let device = args.device.open()?;
    let mut pair = pair.open()?;
    if let Some(kind) = &args.mapper {
        pair = pair.of_kind(kind)?;
    }
    if let Some(domain) = &args.domain {
        unknown_domain(domain, &pair);
    }
    let (source, target) = (source.load(options)?, target.load(options)?);
    // Other weights of the same kind are for the gate to refuse; here the answer itself would be nonsense, or is not meant.
    target.tokenizer().check_sibling(source.tokenizer())?;
    pair.first().card().check_kind(&source, &target)?;
    let gate = Arc::new(args.ledger.open_gate(policy)?);
    let offers = pair.stored().iter().map(|stored| Offer::new(stored, &device)).collect::<Result<Vec<_>, _>>()?;
    let store = Store::new(&device, args.device_budget);
    let tokens = source.tokenizer().encode(&prompt)?;
    let load_ms = clock.elapsed().as_secs_f64() * 1e3;
    let setup = Setup {
        gate: &gate,
        source: &source,
        target: &target,
        pair: pair.name(),
        offers: &offers,
        store: &store,
        load_ms,
    };
    // What the bundled default is there for is to show all of it.
    let audit = args.audit || args.is_default();
    let ask =
        Ask { tokens: &tokens, domain: args.domain.as_deref(), generate: args.n, sampling: Sampling::Greedy, audit };

    interrupt::listen(&gate);
    let mut report = Report::new(&setup, &ask, !args.json);
    let mut bar = prefill_bar(tokens.len(), source.name());
    let mut again = false;
    let mut failed = None;
    let answered = hand_over(&setup, ask, &mut |event| {
        let done = match event {
            Event::Prefilled { done, .. } => {
                bar.set_position(done as u64);
                Ok(())
            }
            Event::Reprefilled { done, .. } => {
                if !std::mem::replace(&mut again, true) {
                    bar.finish_and_clear();
                    bar = prefill_bar(tokens.len(), target.name());
                }
                bar.set_position(done as u64);
                Ok(())
            }
            Event::Ready { record, .. } => {
                bar.finish_and_clear();
                report.ready(record);
                Ok(())
            }
            Event::Text(text) => report.text(text),
            Event::Auditing => report.auditing(),
        };
        if let Err(error) = done {
            failed.get_or_insert(error);
        }
        failed.is_none() && !interrupt::came()
    });
    bar.finish_and_clear();
    if let Some(error) = failed {
        return Err(error.into());
    }
    let Answered { record, stopped, nothing_to_audit, trouble } = match answered {
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
        report.done(&record, nothing_to_audit)?;
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

impl Args {
    /// Whether all of it is the bundled default, prompt aside.
    fn is_default(&self) -> bool {
        matches!(self.pair, None | Some(PairArg::Bundled(_))) && self.source.is_none() && self.target.is_none()
    }
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
        (None, None) if !args.is_default() => {
            bail!("what shall be answered? Give --prompt TEXT or --prompt-file FILE")
        }
        (None, None) => Ok(bundled::PROMPT.to_owned()),
    }
}

fn domain(text: &str) -> Result<String, NameError> {
    check_name(text).map(|()| text.to_owned())
}

/// Says so where the pair has no evidence of a domain: the gate will refuse, and a misspelling is soon made.
fn unknown_domain(domain: &str, pair: &Cards) {
    let evidence = pair.stored().iter().filter_map(|stored| stored.card().evidence());
    let known: BTreeSet<&str> = evidence.flat_map(Evidence::domains).collect();
    if !known.is_empty() && !known.contains(domain) {
        let known = known.into_iter().collect::<Vec<_>>().join(", ");
        warn(&format!(
            "--domain {domain}: the pair has evidence of {known} alone; leave --domain out to be judged by all of it"
        ));
    }
}
