//! `kvmig fit`: a pair folder from two models and some text.

use std::{io::Write, path::PathBuf, sync::Arc};

use anyhow::Context;
use kvmig_gate::Policy;

use crate::{
    cache::Elem,
    fit::{
        self, CorpusFile, FitOptions, MapperKind,
        head_matched::Weighting,
        mlp,
        ridge::{Lambda, LambdaConvention},
    },
    pair::{AblationPoint, EndsPoint, FitRecord, Pair, WidthPoint, check_name},
    sandbox::bundled::{HEAD_MATCHED, MLP, RIDGE},
};

use super::{
    Ending,
    evidence::{Forecasts, evidence_table},
    interrupt,
    ledger::{LedgerArgs, PolicyArgs},
    models::{DeviceArgs, EngineArgs, ModelArg},
    progress::FitProgress,
    warn,
};

/// Fit a mapper for a pair of models from text, and measure it on held-out documents
///
/// The documents of a text file are separated by lines of `<|end|>`. Documents to calibrate on, to choose k on and to measure
/// on are kept apart. Interrupted and run again, a fit goes on where it was. It ends with what the policy would say of the new
/// pair, for each domain.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  kvmig fit --source small.gguf --target large.gguf --corpus code=code.txt --corpus prose=novels.txt --out my-pair")]
pub(super) struct Args {
    /// Model whose caches will be mapped: a Hugging Face folder, a GGUF file or bundled:NAME
    #[arg(long, value_name = "MODEL")]
    source: ModelArg,
    /// Model they will be mapped for
    #[arg(long, value_name = "MODEL")]
    target: ModelArg,
    /// Text to fit on, and the domain it stands for [default domain: the file's stem]; may be given several times
    #[arg(long = "corpus", value_name = "[NAME=]FILE", required = true)]
    corpora: Vec<CorpusFile>,
    /// Text to measure on, instead of documents held out of --corpus; may be given several times
    #[arg(long = "held-out", value_name = "[NAME=]FILE")]
    held_out: Vec<CorpusFile>,
    /// Pair folder to make
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
    /// Mapper to fit
    #[arg(long, value_enum, default_value_t = Mapper::Ridge)]
    mapper: Mapper,
    /// head-matched: let all rows count alike, instead of as the target's attention has it
    #[arg(long)]
    uniform: bool,
    /// mlp: units of a hidden layer
    #[arg(long, value_name = "N", default_value_t = mlp::Settings::default().width)]
    width: usize,
    /// mlp: times to go through the rows, at most
    #[arg(long, value_name = "N", default_value_t = mlp::Settings::default().epochs)]
    epochs: usize,
    /// mlp: rows of a step
    #[arg(long, value_name = "N", default_value_t = mlp::Settings::default().batch)]
    batch: usize,
    /// Name of the pair [default: the folder's]
    #[arg(long)]
    name: Option<String>,
    /// Tokens of a calibration sequence, and of the prefix of a document to measure on
    #[arg(long, value_name = "N", default_value_t = 384)]
    context: usize,
    /// Calibration tokens; a text that has fewer is refused
    #[arg(long, value_name = "N", default_value_t = 16_384)]
    tokens: usize,
    /// Take every N-th position as a row
    #[arg(long, value_name = "N", default_value_t = 1)]
    stride: usize,
    /// First positions that the target computes itself
    #[arg(long, value_name = "N", default_value_t = 4)]
    head: usize,
    /// Last prompt tokens that the target computes itself
    #[arg(long, value_name = "N", default_value_t = 32)]
    tail: usize,
    /// First layers that the target computes itself for every token; what it knows of the text then is a feature. 1 costs next
    /// to nothing (the embeddings); each more costs a layer of the prefill
    #[arg(long, value_name = "N", default_value_t = 0)]
    native_layers: usize,
    /// Predict keys from keys and values (and values from both), rather than each from its own
    #[arg(long)]
    joint: bool,
    /// Project the features of all source layers to N columns that every target layer reads: a cheaper map
    #[arg(long, value_name = "N", conflicts_with_all = ["k", "max_k"])]
    rank: Option<usize>,
    /// Choose λ along with k (and the rank), from a hundredth to ten times the given one, the width of an mlp from half to twice
    /// the given one, and then the native ends, all on the selection documents; prints what was found of each
    #[arg(long)]
    sweep: bool,
    /// Find out what each part of the fit is worth: leave it out or put it wrong, and try that on the selection documents
    #[arg(long)]
    ablate: bool,
    /// Source layers per target layer [default: chosen on documents kept for it]
    #[arg(long, value_name = "K")]
    k: Option<usize>,
    /// The largest k to choose
    #[arg(long, value_name = "K", conflicts_with = "k")]
    max_k: Option<usize>,
    /// Strength of the ridge
    #[arg(long, value_name = "X", default_value_t = Lambda::default().value)]
    lambda: f64,
    /// What λ multiplies: per-token, per-token-relative, sum or standardised
    #[arg(long, value_name = "NAME", default_value = "per-token-relative")]
    lambda_convention: LambdaConvention,
    /// Element type of the weights: f16 or f32
    #[arg(long, value_name = "TYPE", default_value = "f16", value_parser = elem)]
    weights: Elem,
    /// Documents per corpus to choose k on, and for the diagnostics
    #[arg(long, value_name = "N", default_value_t = 4)]
    selection: usize,
    /// Documents per corpus to measure on; the gate's shipped policy asks for 30
    #[arg(long, value_name = "N", default_value_t = 30)]
    evidence: usize,
    /// Seed of the split, and of a training
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Keep what was captured, for another fit of the same text (another k or λ) in the same place
    #[arg(long)]
    keep_state: bool,
    /// Print the manifest as JSON instead of a table
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

/// What `--mapper` takes.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Mapper {
    /// One affine map for all heads of a layer
    Ridge,
    /// An affine map per head, from one head of each source layer
    HeadMatched,
    /// A small network per head
    Mlp,
    /// All three from one capture, each into a folder of its own in --out: the gate picks
    All,
}

pub(super) fn run(args: Args) -> anyhow::Result<Ending> {
    let all = args.all_options()?;
    args.corpora.iter().chain(&args.held_out).try_for_each(CorpusFile::check)?;
    let policy = args.policy.load()?;
    too_little_evidence(args.evidence, &policy);
    let engine = args.engine.options()?;
    let device = args.device.open()?;
    let (source, target) = (args.source.load(engine)?, args.target.load(engine)?);
    let gate = Arc::new(args.ledger.open_gate(policy)?);
    interrupt::listen(&gate);
    let mut shown = FitProgress::new();
    let pairs = {
        let watch = &mut |progress| shown.show(progress);
        match all.as_slice() {
            [one] if one.base.is_none() => {
                fit::fit(one, &source, &target, &gate, &device, watch).map(|pair| vec![pair])
            }
            several => fit::fit_all(several, &source, &target, &gate, &device, watch),
        }
    };
    shown.clear();
    let pairs = pairs?;
    let mut out = std::io::stdout().lock();
    if args.json {
        match pairs.as_slice() {
            [one] => serde_json::to_writer_pretty(&mut out, one.manifest())?,
            several => {
                let manifests: Vec<_> = several.iter().map(Pair::manifest).collect();
                serde_json::to_writer_pretty(&mut out, &manifests)?;
            }
        }
        writeln!(out)?;
        return Ok(Ending::Done);
    }
    for (pair, options) in pairs.iter().zip(&all) {
        let fit = &pair.manifest().fit;
        let (name, mapper, folder) = (pair.name(), pair.mapper(), options.out.display());
        writeln!(out, "{name}: {mapper}, k = {}, {} rows, written to {folder}\n", fit.k, fit.rows)?;
        sweep_table(&mut out, fit)?;
        widths_table(&mut out, fit)?;
        ends_table(&mut out, pair)?;
        ablation_table(&mut out, fit)?;
        evidence_table(&mut out, pair.card())?;
        Forecasts::new(pair.name(), &[pair.card()], gate.policy()).table(&mut out)?;
        if pairs.len() > 1 {
            writeln!(out)?;
        }
    }
    Ok(Ending::Done)
}

/// What the choice was made from, the chosen one marked.
fn sweep_table(out: &mut impl Write, fit: &FitRecord) -> std::io::Result<()> {
    if fit.sweep.is_empty() {
        return Ok(());
    }
    writeln!(out, "chosen on {} documents that are used for nothing else:", fit.sweep[0].documents)?;
    writeln!(
        out,
        "    {:>3} {:>6} {:>9} {:>13} {:>7} {:>11}",
        "k", "rank", "λ", "MFLOP/token", "cosine", "worst layer"
    )?;
    for point in &fit.sweep {
        let chosen = (point.k, point.lambda, point.rank) == (fit.k, fit.lambda.value, fit.rank);
        writeln!(
            out,
            "  {} {:>3} {:>6} {:>9} {:>13.1} {:>7.4} {:>11.4}",
            if chosen { "*" } else { " " },
            point.k,
            point.rank.map_or("-".to_owned(), |rank| rank.to_string()),
            point.lambda,
            point.mflops,
            point.cosine_mean,
            point.cosine_worst_layer
        )?;
    }
    writeln!(out)
}

/// What widths of networks are worth and cost, the chosen one marked.
fn widths_table(out: &mut impl Write, fit: &FitRecord) -> std::io::Result<()> {
    let Some(first) = fit.widths.first() else { return Ok(()) };
    writeln!(out, "widths on {} documents that are used for choices alone:", first.documents)?;
    writeln!(out, "    {:>5} {:>12} {:>9} {:>9} {:>10}", "width", "MFLOP/token", "KL, nats", "agreement", "handoff")?;
    for WidthPoint { width, mflops, kl_nats, agreement, handoff_ms, .. } in &fit.widths {
        let chosen = fit.training.as_ref().is_some_and(|training| training.width == *width);
        let mark = if chosen { "*" } else { " " };
        writeln!(out, "  {mark} {width:>5} {mflops:>12.1} {kl_nats:>9.3} {agreement:>9.2} {handoff_ms:>7.1} ms")?;
    }
    writeln!(out)
}

/// What the native ends are worth and cost, the chosen ones marked.
fn ends_table(out: &mut impl Write, pair: &Pair) -> std::io::Result<()> {
    let points = &pair.manifest().fit.ends;
    let Some(first) = points.first() else { return Ok(()) };
    writeln!(out, "native ends on the same documents (re-prefill {:.0} ms):", first.reprefill_ms)?;
    writeln!(out, "    {:>4} {:>4} {:>9} {:>9} {:>10}", "head", "tail", "KL, nats", "agreement", "handoff")?;
    for EndsPoint { head, tail, kl_nats, agreement, handoff_ms, .. } in points {
        let mark = if (*head, *tail) == (pair.head(), pair.tail()) { "*" } else { " " };
        writeln!(out, "  {mark} {head:>4} {tail:>4} {kl_nats:>9.3} {agreement:>9.2} {handoff_ms:>7.1} ms")?;
    }
    writeln!(out)
}

/// What each part of the fit is worth.
fn ablation_table(out: &mut impl Write, fit: &FitRecord) -> std::io::Result<()> {
    let Some(first) = fit.ablations.first() else { return Ok(()) };
    writeln!(out, "ablations on {} documents that are used for choices alone:", first.documents)?;
    writeln!(out, "  {:<44} {:>9} {:>9} {:>7} {:>11}", "arm", "KL, nats", "agreement", "cosine", "worst layer")?;
    let shown = |value: Option<f64>, places: usize| value.map_or("-".to_owned(), |value| format!("{value:.places$}"));
    for AblationPoint { arm, kl_nats, agreement, cosine_mean, cosine_worst_layer, .. } in &fit.ablations {
        let (kl, agreement) = (shown(*kl_nats, 3), shown(*agreement, 2));
        let (cosine, worst) = (shown(*cosine_mean, 3), shown(*cosine_worst_layer, 3));
        writeln!(out, "  {arm:<44} {kl:>9} {agreement:>9} {cosine:>7} {worst:>11}")?;
    }
    writeln!(out)
}

/// Said before hours are spent on a pair that the gate will have nothing to judge by.
fn too_little_evidence(documents: usize, policy: &Policy) {
    let needed = policy.settings().min_evidence;
    if documents < needed {
        warn(&format!(
            "--evidence {documents}: the policy's min_evidence is {needed} documents, of the domain that a request names or of \
             all domains together; with fewer the gate refuses"
        ));
    }
}

impl Args {
    /// The kinds of mapper to fit.
    fn mappers(&self) -> Vec<MapperKind> {
        let Args { width, epochs, batch, seed, .. } = *self;
        let weighting = if self.uniform { Weighting::Uniform } else { Weighting::Attention };
        let head_matched = MapperKind::HeadMatched(weighting);
        let mlp = MapperKind::Mlp(mlp::Settings { width, epochs, batch, seed });
        match self.mapper {
            Mapper::Ridge => vec![MapperKind::Ridge],
            Mapper::HeadMatched => vec![head_matched],
            Mapper::Mlp => vec![mlp],
            Mapper::All => vec![MapperKind::Ridge, head_matched, mlp],
        }
    }

    /// The options of every mapper to fit, which are one capture's.
    fn all_options(&self) -> anyhow::Result<Vec<FitOptions>> {
        let options = self.options()?;
        let one = |mapper: MapperKind| {
            let mut one = FitOptions { module: module(&mapper).to_vec(), mapper, ..options.clone() };
            if matches!(self.mapper, Mapper::All) {
                one.base = Some(self.out.clone());
                one.out = self.out.join(one.mapper.name());
                // Settings of the ridge alone.
                if one.mapper != MapperKind::Ridge {
                    (one.joint, one.rank) = (false, None);
                }
            }
            one
        };
        Ok(self.mappers().into_iter().map(one).collect())
    }

    fn options(&self) -> anyhow::Result<FitOptions> {
        let name = match &self.name {
            Some(name) => name.clone(),
            None => {
                let stem = self.out.file_name().context("--out names no folder: give --out FOLDER")?;
                stem.to_string_lossy().into_owned()
            }
        };
        check_name(&name).context("the pair's name: give --name NAME")?;
        let mut options = FitOptions::new(&name, self.out.clone(), self.corpora.clone(), RIDGE.to_vec());
        options.held_out = self.held_out.clone();
        options.context = self.context;
        options.tokens = self.tokens;
        options.stride = self.stride;
        options.head = self.head;
        options.tail = self.tail;
        options.k = self.k;
        options.max_k = self.max_k;
        options.native_layers = self.native_layers;
        options.joint = self.joint;
        options.rank = self.rank;
        options.sweep = self.sweep;
        options.ablate = self.ablate;
        options.lambda = Lambda { value: self.lambda, convention: self.lambda_convention };
        options.elem = self.weights;
        options.selection = self.selection;
        options.evidence = self.evidence;
        options.seed = self.seed;
        options.keep_state = self.keep_state;
        Ok(options)
    }
}

/// The module that runs a kind of mapper.
fn module(mapper: &MapperKind) -> &'static [u8] {
    match mapper {
        MapperKind::Ridge => RIDGE,
        MapperKind::HeadMatched(_) => HEAD_MATCHED,
        MapperKind::Mlp(_) => MLP,
    }
}

fn elem(text: &str) -> Result<Elem, String> {
    match text {
        "f16" => Ok(Elem::F16),
        "f32" => Ok(Elem::F32),
        other => Err(format!("`{other}`: expected f16 or f32")),
    }
}
