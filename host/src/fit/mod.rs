//! Fits the weights of a pair: capture → moments → selection → k → ridge → pair folder with held-out evidence.
//!
//! Reading order: [`fit`], [`moments`], [`select`], [`ridge`]. Documents to calibrate, to choose k and to measure on are
//! disjoint. Interrupted and called again with the same options, a fit goes on from what it had captured and measured.

mod ablate;
pub mod attention;
mod capture;
mod choose;
mod content;
pub mod corpus;
pub mod design;
mod diagnose;
pub mod diagnostics;
mod ends;
mod error;
mod evidence;
mod fitted;
pub mod head_matched;
pub mod linalg;
pub mod local;
mod lock;
pub mod mlp;
pub mod moments;
mod options;
mod plan;
mod product;
mod rank;
pub mod ridge;
pub mod rows;
pub mod select;
pub mod state;
mod tap;
mod widths;

use std::{fs, io, ops::ControlFlow, path::Path};

use kvmig_gate::{Digest, Gate};

pub use corpus::{CorpusFile, DomainError};
pub use error::FitError;
pub use lock::LockError;
pub use options::{FitOptions, MapperKind, Progress, Stage};
pub(crate) use plan::{Prompt, TEXT};

use crate::{
    device::Device,
    engine::Model,
    measure::Log,
    pair::{
        self, AblationPoint, Draft, EndsPoint, FitRecord, Identity, Manifest, MapperRecord, ModelRecord, Pair,
        PairError, SweepPoint, WeightsRecord, WidthPoint,
    },
};
use ablate::Ablation;
use capture::Captured;
use choose::{Candidate, Trial};
use design::{Design, RidgeMaps};
use ends::Document;
use evidence::{Bench, Entry, Subject};
use fitted::Fitted;
use local::Heads;
use lock::Lock;
use moments::Moments;
use plan::Plan;
use ridge::Lambda;
use rows::RowFile;
use select::Scores;

/// Fits a pair, measures it on held-out documents, and writes its folder.
///
/// `watch` is told how far it has come and may answer `Break`: what was captured and measured is then kept for the next call.
///
/// # Errors
/// [`FitError`]; the pair folder is whole or not there.
pub fn fit(
    options: &FitOptions,
    source: &Model,
    target: &Model,
    gate: &Gate,
    device: &Device,
    watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Pair, FitError> {
    let _lock = Lock::take(options.lock_file())?;
    check(options, source, target)?;
    let plan = Plan::new(options, source, target)?;
    let Captured { state, rows } = capture::capture(options, &plan, source, target, watch)?;
    let scores = Scores::new(&state.moments, source.layout(), target.layout())?;
    let (chosen, sweep) = choose(options, &plan, &state.moments, &scores, source, target, watch)?;
    let captured = state.moments.rows();
    let make = |fitted: &Fitted, (head, tail): (usize, usize), found: Found<'_>| {
        let options = FitOptions { head, tail, ..options.clone() };
        draft(&options, &plan, captured, fitted, (&chosen, found), source, target)
    };
    let tools = ends::Tools { gate, device, source, target };
    let documents = match options.sweep || options.ablate {
        true => Document::run_all(tools, &plan.selection, watch)?,
        false => Vec::new(),
    };
    let (of_width, widths) = match &options.mapper {
        MapperKind::Mlp(settings) if options.sweep => {
            let train = |options: &FitOptions, watch: &mut dyn FnMut(Progress) -> ControlFlow<()>| {
                solve(options, &state.moments, rows.as_ref(), &chosen, watch)
            };
            let try_out = |fitted: &Fitted| make(fitted, (options.head, options.tail), Found::default());
            widths::choose((options, settings), tools, &documents, &train, &try_out, watch)?
        }
        _ => (options.clone(), Vec::new()),
    };
    let fitted = solve(&of_width, &state.moments, rows.as_ref(), &chosen, watch)?;
    let mut found = Found { sweep: &sweep, widths: &widths, ends: &[], ablations: &[] };
    let ablations = match &rows {
        Some(rows) if options.ablate => {
            let try_out = |fitted: &Fitted, head, tail| make(fitted, (head, tail), Found::default());
            let (plan, moments, scores, chosen) = (&plan, &state.moments, &scores, &chosen);
            let (options, fitted) = (&of_width, &fitted);
            Ablation { tools, options, plan, moments, rows, scores, chosen, fitted, draft: &try_out }
                .run(&documents, watch)?
        }
        _ => Vec::new(),
    };
    found.ablations = &ablations;
    let mut diagnostics = diagnose::diagnose(&state.moments, &scores, &chosen, &fitted)?;
    drop((state, rows));
    let (ends, points);
    if options.sweep {
        let try_out = |head, tail| make(&fitted, (head, tail), Found::default());
        (ends, points) = ends::choose(tools, options, &documents, &try_out, watch)?;
        found.ends = &points;
    } else {
        ends = (options.head, options.tail);
    }
    let draft = make(&fitted, ends, found)?;
    diagnose::observe(tools, &draft, &plan.selection, &mut diagnostics, watch)?;
    let draft = draft.with_diagnostics(diagnostics);
    let bench = Bench { gate, device, source, target, pair: draft.pair() };
    let (evidence, texts) = bench.measure(options, &plan.evidence, watch)?;
    let pair = draft.write(&options.out, Some(evidence), &texts)?;
    if !options.keep_state {
        forget(options)?;
    }
    Ok(pair)
}

/// Fits several mappers of one pair of models from one capture, each into the `out` of its options, which have one `base`.
/// Those that an interrupted call had finished are opened instead.
///
/// # Errors
/// As [`fit`], for the first that fails; the pairs before it are written.
pub fn fit_all(
    all: &[FitOptions],
    source: &Model,
    target: &Model,
    gate: &Gate,
    device: &Device,
    watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Vec<Pair>, FitError> {
    let mut pairs = Vec::with_capacity(all.len());
    for options in all {
        // Without a state beside it, what is there is no part of this fit.
        let pair = if options.out.exists() && options.state_file().exists() {
            Pair::open(&options.out)?
        } else {
            fit(&FitOptions { keep_state: true, spill: true, ..options.clone() }, source, target, gate, device, watch)?
        };
        pairs.push(pair);
    }
    for options in all.iter().filter(|options| !options.keep_state) {
        forget(options)?;
    }
    Ok(pairs)
}

/// Removes what a finished fit needs no more.
fn forget(options: &FitOptions) -> Result<(), FitError> {
    for file in [options.state_file(), options.rows_file(), options.evidence_log()] {
        remove(&file)?;
    }
    let leftover = |(file, source)| FitError::Leftover { file, source };
    let MapperKind::Mlp(settings) = &options.mapper else { return Ok(()) };
    let widths = if options.sweep { widths::widths(settings.width) } else { vec![settings.width] };
    widths.into_iter().try_for_each(|width| mlp::kept::remove(&options.networks_folder(width)).map_err(leftover))
}

fn solve(
    options: &FitOptions,
    moments: &Moments,
    rows: Option<&RowFile>,
    Candidate { design, lambda, .. }: &Candidate,
    watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Fitted, FitError> {
    let selection = &design.layers;
    let rows = || rows.expect("captured for the kinds that need them");
    match &options.mapper {
        MapperKind::Ridge => {
            step(watch, Stage::Solve, 0, 1)?;
            Ok(Fitted::ridge(&RidgeMaps::fit(moments, design, *lambda)?, options.elem))
        }
        MapperKind::HeadMatched(weighting) => {
            let maps = head_matched::fit(rows(), selection, *lambda, *weighting, watch)?;
            Ok(Fitted::head_matched(&maps, options.elem))
        }
        MapperKind::Mlp(settings) => {
            let networks = mlp::fit(rows(), selection, settings, &options.networks_folder(settings.width), watch)?;
            Ok(Fitted::mlp(&networks, options.elem))
        }
    }
}

/// What can be told before anything runs.
fn check(options: &FitOptions, source: &Model, target: &Model) -> Result<(), FitError> {
    if let Some((field, found, expected)) = options.fault() {
        return Err(FitError::Setting { field, found, expected });
    }
    let layers = source.layout().layers;
    if let Some(k) = options.k.filter(|&k| k > layers) {
        let expected = format!("1 to {layers}, the layers of {}", source.name());
        return Err(FitError::Setting { field: "k", found: k.to_string(), expected });
    }
    let most = target.layout().layers - 1;
    if options.native_layers > most {
        let expected = format!("at most {most}, one less than {} has", target.name());
        return Err(FitError::Setting { field: "native-layers", found: options.native_layers.to_string(), expected });
    }
    let most = most_columns(options, source, target);
    if let Some(rank) = options.rank.filter(|&rank| rank > most) {
        let expected = format!("at most {most}: there are no more features, or no more to predict");
        return Err(FitError::Setting { field: "rank", found: rank.to_string(), expected });
    }
    if let MapperKind::Mlp(settings) = &options.mapper {
        let features = options.k.or(options.max_k).unwrap_or(layers).min(layers) * source.layout().width();
        let widest = if options.sweep { settings.width.saturating_mul(2) } else { settings.width };
        mlp::check_width(widest, features, target.layout().head_dim)?;
    }
    if options.out.exists() {
        return Err(PairError::Exists(options.out.clone()).into());
    }
    Log::<Entry>::check::<Subject>(&options.evidence_log())?;
    Ok(target.tokenizer().check_sibling(source.tokenizer())?)
}

/// Columns that a projection can have at most: it has no more than its features, nor than what is predicted.
fn most_columns(options: &FitOptions, source: &Model, target: &Model) -> usize {
    let sides = if options.joint { 2 } else { 1 };
    let (from, to) = (source.layout(), target.layout());
    let hidden = if options.native_layers > 0 { target.config().hidden } else { 0 };
    (sides * from.layers * from.width() + hidden).min(sides * (to.layers - options.native_layers) * to.width())
}

/// What is fitted, and how it was chosen where it was not given.
fn choose(
    options: &FitOptions,
    plan: &Plan,
    moments: &Moments,
    scores: &Scores,
    source: &Model,
    target: &Model,
    watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<(Candidate, Vec<SweepPoint>), FitError> {
    let mut candidates = candidates(options, scores, source, target);
    let rows = |candidate: &Candidate| enough_rows(candidate, moments);
    if let Some(first) = candidates.first() {
        rows(first)?;
    }
    candidates.retain(|candidate| rows(candidate).is_ok());
    if !options.chooses() {
        return Ok((candidates.remove(0), Vec::new()));
    }
    let natively = (options.head, options.tail, options.native_layers);
    let mut trials = Vec::new();
    for (done, prompt) in plan.selection.iter().enumerate() {
        step(watch, Stage::Selection, done, plan.selection.len())?;
        trials.push(Trial::run(prompt, natively, source, target)?);
    }
    let (chosen, sweep) = choose::choose(moments, &candidates, &trials, watch)?;
    Ok((candidates.swap_remove(chosen), sweep))
}

/// What may be fitted, the cheapest first.
fn candidates(options: &FitOptions, scores: &Scores, source: &Model, target: &Model) -> Vec<Candidate> {
    let all = source.layout().layers;
    let largest = options.max_k.unwrap_or(usize::MAX);
    let ks = match (options.k, options.rank) {
        (Some(k), _) => vec![k],
        (None, Some(_)) => vec![all],
        (None, None) => select::sweep(all).into_iter().filter(|&k| k <= largest).collect(),
    };
    let ranks = match options.rank {
        Some(rank) if options.sweep => vec![Some(rank.div_ceil(2)), Some(rank), Some(2 * rank)],
        rank => vec![rank],
    };
    let most = most_columns(options, source, target);
    // Networks have no λ: it is the ridge's that stands in for them where k is chosen.
    let chooses_lambda = options.sweep && !matches!(options.mapper, MapperKind::Mlp(_));
    let factors: &[f64] = if chooses_lambda { &[0.01, 0.1, 1.0, 10.0] } else { &[1.0] };
    let heads = Heads { source: source.layout().kv_heads, target: target.layout().kv_heads };
    let mut candidates = Vec::new();
    for &k in &ks {
        for &rank in &ranks {
            // Twice the given rank may be more than there is.
            if rank.is_some_and(|rank| rank > most) {
                continue;
            }
            let layers = (options.native_layers..target.layout().layers).map(|layer| scores.top(layer, k)).collect();
            let design = Design {
                native_layers: options.native_layers,
                layers,
                joint: options.joint,
                hidden: options.native_layers > 0 && options.mapper == MapperKind::Ridge,
                rank,
                heads: matches!(options.mapper, MapperKind::HeadMatched(_)).then_some(heads),
            };
            candidates.extend(factors.iter().map(|factor| {
                let lambda = Lambda { value: factor * options.lambda.value, ..options.lambda };
                Candidate { k, design: design.clone(), lambda }
            }));
        }
    }
    candidates
}

fn enough_rows(&Candidate { k, ref design, .. }: &Candidate, moments: &Moments) -> Result<(), FitError> {
    let (rows, shape) = (moments.rows(), moments.shape());
    let (features, expected) = (design.features(&shape), design.least_rows(&shape));
    if rows >= expected as u64 { Ok(()) } else { Err(FitError::TooFewRows { rows, k, features, expected }) }
}

/// Tells `watch`; nothing is lost by stopping in these short stages but themselves.
fn step(
    watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    stage: Stage,
    done: usize,
    total: usize,
) -> Result<(), FitError> {
    let stopped = watch(Progress { stage, done, total }).is_break();
    if stopped { Err(FitError::Stopped { stage: stage.name() }) } else { Ok(()) }
}

/// What was found out on the way.
#[derive(Clone, Copy, Default)]
struct Found<'a> {
    sweep: &'a [SweepPoint],
    widths: &'a [WidthPoint],
    ends: &'a [EndsPoint],
    ablations: &'a [AblationPoint],
}

fn draft(
    options: &FitOptions,
    plan: &Plan,
    rows: u64,
    fitted: &Fitted,
    (chosen, found): (&Candidate, Found<'_>),
    source: &Model,
    target: &Model,
) -> Result<Draft, PairError> {
    let weights = pair::encode_weights(&fitted.tensors)?;
    let identity = Identity {
        format: pair::FORMAT,
        head: options.head,
        tail: options.tail,
        native_layers: options.native_layers,
        mapper: MapperRecord {
            kind: options.mapper.name().to_owned(),
            module: Digest::of(&options.module),
            settings: fitted.settings.clone(),
        },
        weights: WeightsRecord { sha256: Digest::of(&weights), elem: options.elem },
        source: ModelRecord::of(source),
        target: ModelRecord::of(target),
    };
    let fit = FitRecord {
        kvmig: env!("CARGO_PKG_VERSION").to_owned(),
        k: fitted.k,
        rank: chosen.design.rank,
        seed: options.seed,
        context: options.context,
        stride: options.stride,
        sequences: plan.sequences.len(),
        rows,
        r2_keys: fitted.r2[0],
        r2_values: fitted.r2[1],
        jitter: fitted.jitter,
        lambda: chosen.lambda,
        weighting: fitted.weighting.clone(),
        training: fitted.training.clone(),
        sweep: found.sweep.to_vec(),
        widths: found.widths.to_vec(),
        ends: found.ends.to_vec(),
        ablations: found.ablations.to_vec(),
        corpora: plan.corpora.clone(),
    };
    let manifest = Manifest { name: options.name.clone(), identity, fit, evidence: None, diagnostics: None };
    Draft::new(manifest, options.module.clone(), weights)
}

/// Digest of a sequence of tokens.
pub(crate) fn digest(tokens: &[u32]) -> Digest {
    Digest::of(&tokens.iter().flat_map(|t| t.to_le_bytes()).collect::<Vec<u8>>())
}

fn remove(file: &Path) -> Result<(), FitError> {
    match fs::remove_file(file) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(FitError::Leftover { file: file.to_owned(), source })
        }
        _ => Ok(()),
    }
}
