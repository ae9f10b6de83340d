//! `fit` on the bundled family, from text to a pair folder: with the real module, the real gate, and the CPU device.

mod bad_input;

use std::{
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use kvmig::{
    device::{Device, DeviceChoice},
    engine::{LoadOptions, Model, ModelSource},
    fit::{self, CorpusFile, FitError, FitOptions, MapperKind, Progress, Stage, head_matched::Weighting, mlp},
    pair::{Pair, WEIGHTS},
    sandbox::bundled::{HEAD_MATCHED, MLP, RIDGE},
};
use kvmig_gate::{Gate, Policy, State, TicketFilter};

/// Models, gate and text of one test.
struct Setup {
    source: Model,
    target: Model,
    gate: Gate,
    device: Device,
    folder: tempfile::TempDir,
}

impl Setup {
    fn new() -> Setup {
        let family = family();
        let load = |member| Model::load(&ModelSource::from(family.join(member)), LoadOptions::default()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        // The first passage of each of 26 books, shortened: 2 to choose k on, 6 to measure on, 18 to calibrate on.
        let text = fs::read_to_string(family.join("texts/prose.calib.txt")).unwrap();
        let passages = text.split("\n<|end|>\n").take(26);
        let short: Vec<String> = passages.map(|p| p.trim_start().chars().take(900).collect()).collect();
        fs::write(folder.path().join("prose.txt"), short.join("\n<|end|>\n")).unwrap();
        let gate = Gate::open(Policy::default(), &folder.path().join("ledger.sqlite")).unwrap();
        let device = Device::open(&"cpu".parse::<DeviceChoice>().unwrap()).unwrap();
        Setup { source: load("medium"), target: load("large"), gate, device, folder }
    }

    fn options(&self, out: &str) -> FitOptions {
        let corpus = CorpusFile { name: "prose".into(), path: self.folder.path().join("prose.txt") };
        let mut options = FitOptions::new("medium-to-large", self.out(out), vec![corpus], RIDGE.to_vec());
        (options.context, options.tokens, options.tail, options.evidence, options.selection) = (96, 3_000, 8, 6, 2);
        options
    }

    fn out(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    #[expect(clippy::result_large_err, reason = "an error here ends a test")]
    fn fit(&self, options: &FitOptions, mut watch: impl FnMut(Progress) -> ControlFlow<()>) -> Result<Pair, FitError> {
        fit::fit(options, &self.source, &self.target, &self.gate, &self.device, &mut watch)
    }
}

/// The folder of the bundled models.
fn family() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../host/assets/family")
}

/// A watch that stops the second time it sees `stage` half done.
fn stop_in(stage: Stage) -> impl FnMut(Progress) -> ControlFlow<()> {
    move |progress| {
        let there = progress.stage == stage && progress.done * 2 >= progress.total && progress.done < progress.total;
        if there { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

#[test]
fn a_fitted_pair_is_read_measured_and_better_than_its_controls() {
    let setup = Setup::new();
    let out = setup.out("pair");
    setup.fit(&setup.options("pair"), |_| ControlFlow::Continue(())).unwrap();
    let pair = Pair::open(&out).unwrap();
    assert_eq!(pair.card().mismatch(&setup.source, &setup.target), None);
    assert!(pair.card().mismatch(&setup.target, &setup.source).is_some(), "a pair has a direction");
    let manifest = pair.manifest();
    let corpus = &manifest.fit.corpora[0];
    assert_eq!((corpus.selection.len(), corpus.evidence.len()), (2, 6));
    assert_eq!(manifest.fit.sweep.iter().map(|point| point.k).collect::<Vec<_>>(), [1, 2, 4, 6]);
    let evidence = pair.evidence().unwrap();
    assert_eq!((evidence.documents.len(), evidence.backend.as_str()), (6, "cpu"));
    let domain = &manifest.evidence.as_ref().unwrap().domains[0];
    let kl = |arm: &kvmig::measure::summary::ArmSummary| arm.kl_nats.mean;
    assert!(kl(&domain.mapped) < kl(&domain.ends_only), "{domain:?}");
    assert!(kl(&domain.ends_only) < kl(&domain.no_prefix), "{domain:?}");
    assert!(kl(&domain.mapped) < 0.5 * kl(&domain.source), "{domain:?}");
    let text = &manifest.evidence.as_ref().unwrap().own_text[0];
    assert_eq!(text.n, 6);
    assert!(kl(&text.mapped) < kl(&text.ends_only) && kl(&text.ends_only) < kl(&text.no_prefix), "{text:?}");
    // Every held-out document went through the gate's trial route, and none of its tickets is left open.
    let tickets = setup.gate.tickets(&TicketFilter::default()).unwrap();
    let of = |state: State| tickets.iter().filter(|ticket| ticket.state == state).count();
    // What the diagnostics look at is not measured.
    assert_eq!((tickets.len(), of(State::Settled), of(State::Unaudited)), (8, 6, 2), "{tickets:?}");
    let leftover: Vec<_> = fs::read_dir(setup.folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("pair.") || name.starts_with('.'))
        .collect();
    assert!(leftover.is_empty(), "left behind: {leftover:?}");
}

#[test]
fn interrupted_and_run_again_it_makes_the_same_pair() {
    let setup = Setup::new();
    let mut whole = setup.options("whole");
    whole.k = Some(2);
    let mut parts = setup.options("parts");
    parts.k = Some(2);
    let uninterrupted = setup.fit(&whole, |_| ControlFlow::Continue(())).unwrap();

    let stopped = setup.fit(&parts, stop_in(Stage::Capture)).unwrap_err();
    assert!(matches!(&stopped, FitError::Interrupted { file, .. } if file.exists()), "{stopped}");
    assert!(!setup.out("parts").exists(), "nothing half-written");
    let mut first = None;
    let stopped = setup.fit(&parts, |progress| {
        if progress.stage == Stage::Capture {
            first.get_or_insert(progress.done);
        }
        stop_in(Stage::Evidence)(progress)
    });
    assert!(first.unwrap() > 0, "the captured sequences are captured again");
    assert!(matches!(stopped, Err(FitError::Interrupted { stage: "evidence", .. })), "{stopped:?}");
    let mut measured = 0;
    setup
        .fit(&parts, |progress| {
            measured += usize::from(progress.stage == Stage::Evidence && progress.done < progress.total);
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(measured, 3, "half of the six documents are measured again");

    let bytes = |out: &str| fs::read(setup.out(out).join(WEIGHTS)).unwrap();
    assert_eq!(bytes("whole"), bytes("parts"));
    let resumed = Pair::open(&setup.out("parts")).unwrap();
    assert_eq!(resumed.loaded().artifact(), uninterrupted.loaded().artifact());
    let qualities = |pair: &Pair| pair.evidence().unwrap().documents.iter().map(|d| d.mapped).collect::<Vec<_>>();
    assert_eq!(qualities(&resumed), qualities(&uninterrupted));
}

#[test]
fn a_changed_text_does_not_mix_with_what_was_captured() {
    let setup = Setup::new();
    let options = setup.options("pair");
    setup.fit(&options, stop_in(Stage::Capture)).unwrap_err();
    let text = setup.folder.path().join("prose.txt");
    let changed = fs::read_to_string(&text).unwrap().replace("the", "thy");
    fs::write(&text, changed).unwrap();
    let error = setup.fit(&options, |_| ControlFlow::Continue(())).unwrap_err().to_string();
    for part in ["pair.state", "other texts", "remove the file"] {
        assert!(error.contains(part), "`{error}` does not say `{part}`");
    }
}

/// A larger budget goes on from what a smaller one captured.
#[test]
fn more_tokens_go_on_from_fewer() {
    let setup = Setup::new();
    let mut options = setup.options("pair");
    options.k = Some(2);
    options.tokens = 1_000;
    setup.fit(&options, stop_in(Stage::Evidence)).unwrap_err();
    options.tokens = 3_000;
    let mut first = None;
    let pair = setup.fit(&options, |progress| {
        first.get_or_insert(progress.done);
        ControlFlow::Continue(())
    });
    assert!((1_000..1_096).contains(&first.unwrap()), "captured anew: {first:?}");
    let mut whole = setup.options("whole");
    whole.k = Some(2);
    let whole = setup.fit(&whole, |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(pair.unwrap().loaded().artifact(), whole.loaded().artifact());
}

#[test]
fn what_can_be_told_beforehand_is_told_beforehand() {
    let setup = Setup::new();
    let never = |_: Progress| -> ControlFlow<()> { panic!("a model ran") };
    let refused = |options: &FitOptions, wanted: &[&str]| {
        let error = setup.fit(options, never).unwrap_err().to_string();
        for part in wanted {
            assert!(error.contains(part), "`{error}` does not say `{part}`");
        }
    };
    let mut options = setup.options("pair");
    options.context = 20;
    refused(&options, &["context", "found 20", "expected at least"]);
    let mut options = setup.options("pair");
    options.lambda.value = f64::NAN;
    refused(&options, &["lambda", "NaN"]);
    let mut options = setup.options("pair");
    options.corpora[0].path = setup.out("absent.txt");
    refused(&options, &["absent.txt", "can't be read"]);
    let mut options = setup.options("pair");
    options.held_out = options.corpora.clone();
    refused(&options, &["prose.txt", "have to differ"]);
    let mut options = setup.options("pair");
    options.context = 4_000;
    options.tokens = 8_000;
    refused(&options, &["prose.txt", "4000 tokens", "smaller --context"]);
    fs::create_dir(setup.out("there")).unwrap();
    refused(&setup.options("there"), &["there", "exists already"]);
}

#[test]
fn too_few_rows_for_the_features_are_refused() {
    let setup = Setup::new();
    let mut options = setup.options("pair");
    (options.tokens, options.k) = (400, Some(6));
    let error = setup.fit(&options, |_| ControlFlow::Continue(())).unwrap_err();
    assert!(matches!(error, FitError::TooFewRows { k: 6, features: 768, .. }), "{error}");
}

/// Rows and moments belong together, whatever came in between: an interrupt, moments that were kept without rows, a crash
/// after rows were written and before the moments were.
#[test]
fn rows_and_moments_agree_however_they_came() {
    let setup = Setup::new();
    let head_matched = |out: &str| {
        let mut options = setup.options(out);
        (options.k, options.mapper) = (Some(2), MapperKind::HeadMatched(Weighting::Attention));
        options
    };
    let solved = |options: &FitOptions| {
        let stopped = setup.fit(options, |progress| match progress.stage {
            Stage::Solve => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        });
        assert!(matches!(stopped, Err(FitError::Stopped { stage: "solve" })), "{stopped:?}");
        (fs::read(options.state_file()).unwrap(), fs::read(options.rows_file()).unwrap())
    };
    let whole = solved(&head_matched("whole"));

    let parts = head_matched("parts");
    setup.fit(&parts, stop_in(Stage::Capture)).unwrap_err();
    assert!(fs::metadata(parts.rows_file()).unwrap().len() < whole.1.len() as u64);
    assert_eq!(solved(&parts), whole, "interrupted");

    let mut ridge = setup.options("ridge");
    ridge.k = Some(2);
    setup.fit(&ridge, stop_in(Stage::Evidence)).unwrap_err();
    assert!(ridge.state_file().exists() && !ridge.rows_file().exists(), "a ridge needs no rows");
    assert_eq!(fs::read(ridge.state_file()).unwrap(), whole.0);
    assert_eq!(solved(&head_matched("ridge")), whole, "moments first");

    let crashed = head_matched("crashed");
    setup.fit(&crashed, stop_in(Stage::Capture)).unwrap_err();
    fs::remove_file(crashed.state_file()).unwrap();
    assert_eq!(solved(&crashed), whole, "rows first");
}

/// A head-matched map and networks through their own modules: quicker to tell from nothing than from each other on so little
/// text, so they are held against the ends alone.
#[test]
fn every_kind_is_fitted_for_its_module() {
    let setup = Setup::new();
    let settings = mlp::Settings { width: 32, epochs: 12, batch: 32, seed: 1 };
    for (name, mapper, module, native_layers) in [
        ("local", MapperKind::HeadMatched(Weighting::Attention), HEAD_MATCHED, 0),
        ("local-behind-2", MapperKind::HeadMatched(Weighting::Uniform), HEAD_MATCHED, 2),
        ("networks", MapperKind::Mlp(settings.clone()), MLP, 0),
        ("networks-behind-3", MapperKind::Mlp(settings.clone()), MLP, 3),
    ] {
        let mut options = setup.options(name);
        (options.mapper, options.module, options.k) = (mapper, module.to_vec(), Some(2));
        (options.native_layers, options.tail, options.evidence) = (native_layers, 2, 4);
        setup.fit(&options, |_| ControlFlow::Continue(())).unwrap();
        let pair = Pair::open(&options.out).unwrap();
        let manifest = pair.manifest();
        assert_eq!(manifest.identity.mapper.kind, options.mapper.name());
        let is_mlp = matches!(options.mapper, MapperKind::Mlp(_));
        assert_eq!(manifest.fit.training.is_some(), is_mlp);
        assert_eq!(manifest.fit.weighting.is_some(), name == "local");
        let domain = &manifest.evidence.as_ref().unwrap().domains[0];
        let (mapped, ends_only) = (domain.mapped.kl_nats.mean, domain.ends_only.kl_nats.mean);
        assert!(mapped < 0.8 * ends_only, "{name}: {mapped} against {ends_only} nats");
        let cards = kvmig::pair::Cards::open(&options.out).unwrap();
        let diagnostics = cards.first().diagnostics().unwrap().unwrap();
        let (own, mapped) = diagnostics.cosine.split_at(native_layers);
        assert_eq!(own.len() + mapped.len(), 8);
        assert!(own.iter().all(|cosine| *cosine > 0.9999), "the target's own layers: {own:?}");
        assert!(mapped.iter().all(|cosine| (0.3..0.9999).contains(cosine)), "{name}: {mapped:?}");
        let evidence = pair.evidence().unwrap();
        let worst =
            evidence.documents.iter().map(|document| document.mapped.cosine_worst_layer.unwrap()).sum::<f64>() / 4.0;
        let here = mapped.iter().copied().fold(1.0, f64::min);
        assert!((here - worst).abs() < 0.1, "{name}: {here}, on other documents {worst}");
        let concentration = diagnostics.concentration.unwrap();
        assert_eq!([&concentration.keys, &concentration.values].map(Vec::len), [8 - native_layers; 2]);
        let all = concentration.keys.iter().chain(&concentration.values);
        assert!(all.clone().all(|x| (0.1..10.0).contains(x)), "{name}: {concentration:?}");
        let leftover: Vec<_> = fs::read_dir(setup.folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|file| file.starts_with(&format!("{name}.")))
            .collect();
        assert!(leftover.is_empty(), "left behind: {leftover:?}");
    }
}

/// What a ridge may read beyond its source layers, all of it at once, and what a sweep and an ablation find out.
#[test]
fn a_ridge_through_a_projection_behind_native_layers() {
    let setup = Setup::new();
    let mut options = setup.options("projected");
    (options.native_layers, options.joint, options.rank) = (1, true, Some(24));
    (options.sweep, options.selection, options.evidence, options.tail) = (true, 3, 4, 2);
    let pair = setup.fit(&options, |_| ControlFlow::Continue(())).unwrap();
    let manifest = pair.manifest();
    assert_eq!(manifest.identity.native_layers, 1);
    let settings: serde_json::Value = serde_json::from_str(&manifest.identity.mapper.settings).unwrap();
    assert_eq!((&settings["joint"], &settings["hidden"]), (&true.into(), &true.into()));
    assert_eq!(settings["layers"].as_array().unwrap().len(), 7, "layer 0 of 8 is not mapped");
    let fit = &manifest.fit;
    assert_eq!(settings["rank"], fit.rank.unwrap());
    let ranks: Vec<_> = fit.sweep.iter().filter_map(|point| point.rank).collect();
    assert_eq!(ranks, [[12; 4], [24; 4], [48; 4]].concat(), "each rank with four penalties, the cheapest first");
    assert!(fit.sweep[0].mflops < fit.sweep[11].mflops);
    assert!(fit.ends.iter().any(|point| (point.head, point.tail) == (pair.head(), pair.tail())));
    let domain = &manifest.evidence.as_ref().unwrap().domains[0];
    let (mapped, ends_only) = (domain.mapped.kl_nats.mean, domain.ends_only.kl_nats.mean);
    assert!(mapped < 0.8 * ends_only, "{mapped} against {ends_only} nats");
    // What it tells of its own work is read back with the folder.
    let cards = kvmig::pair::Cards::open(&options.out).unwrap();
    let diagnostics = cards.first().diagnostics().unwrap().unwrap();
    let heat = diagnostics.r2.unwrap();
    assert_eq!((heat.keys.len(), heat.values[0].len()), (8, 6), "target layers by source layers");
    assert!(heat.keys.iter().flatten().all(|r2| (-1e-6..=1.0).contains(r2)));
    assert_eq!(diagnostics.forward.len(), 7);
    assert!(diagnostics.forward.iter().all(|curve| curve.keys.is_sorted()), "each layer adds something");
    assert_eq!(diagnostics.cosine.len(), 8);
    assert!(diagnostics.cosine[0] > 0.9999, "layer 0 is the target's own: {:?}", diagnostics.cosine);
    assert!(diagnostics.cosine[1..].iter().all(|cosine| (0.3..0.9999).contains(cosine)), "{:?}", diagnostics.cosine);
    // Without the projection, 1,728 features would ask for two rows each.
    assert!((1.1..2.0).contains(&diagnostics.rows_per_feature.unwrap()));
    let concentration = diagnostics.concentration.unwrap();
    assert_eq!((concentration.keys.len(), concentration.values.len()), (7, 7));
    assert!(
        concentration.keys.iter().chain(&concentration.values).all(|x| (0.01..100.0).contains(x)),
        "{concentration:?}"
    );
}

#[test]
fn an_ablation_tells_what_matters() {
    let setup = Setup::new();
    let mut options = setup.options("ablated");
    (options.k, options.ablate, options.selection, options.evidence) = (Some(2), true, 3, 1);
    let pair = setup.fit(&options, |_| ControlFlow::Continue(())).unwrap();
    let arms = &pair.manifest().fit.ablations;
    let of = |name: &str| {
        arms.iter().find(|arm| arm.arm == name).unwrap_or_else(|| panic!("no arm `{name}` among {arms:?}"))
    };
    let (whole, shifted) = (of("as chosen"), of("heads shifted cyclically"));
    assert!(whole.kl_nats < shifted.kl_nats && whole.cosine_mean > shifted.cosine_mean, "{whole:?}, {shifted:?}");
    for worse in ["another document's cache", "no RoPE handling at inference"] {
        assert!(of(worse).kl_nats.is_none() && of(worse).cosine_mean < whole.cosine_mean, "{:?}", of(worse));
    }
    for there in ["ends only", "source (stay)", "no native head", "no native tail", "k = 1", "no ridge", "draw 3 of 3"]
    {
        assert_eq!(of(there).documents, 3, "{there}");
    }
}

/// Head-matched maps and networks are fitted on parts of the rows as a ridge is.
#[test]
fn an_ablation_of_the_other_kinds() {
    let setup = Setup::new();
    let networks = MapperKind::Mlp(mlp::Settings { width: 16, epochs: 6, batch: 32, seed: 1 });
    for (out, mapper, module) in
        [("heads", MapperKind::HeadMatched(Weighting::Attention), HEAD_MATCHED), ("networks", networks, MLP)]
    {
        let mut options = setup.options(out);
        (options.mapper, options.module) = (mapper, module.to_vec());
        (options.k, options.ablate, options.selection, options.evidence) = (Some(2), true, 2, 1);
        let pair = setup.fit(&options, |_| ControlFlow::Continue(())).unwrap();
        let arms = &pair.manifest().fit.ablations;
        let kl = |name: &str| {
            let arm = arms.iter().find(|arm| arm.arm == name).unwrap_or_else(|| panic!("no arm `{name}` in {arms:?}"));
            arm.kl_nats.unwrap()
        };
        let whole = kl("as chosen");
        // So few rows teach a network no more of two layers than of one.
        for worse in ["heads shifted cyclically", "1/10 of the rows", "ends only"] {
            assert!(whole < kl(worse), "{out}, {worse}: {} against {whole}", kl(worse));
        }
        // A third of the rows is another fit, and no copy of the whole one.
        for draw in ["draw 1 of 3", "draw 2 of 3", "draw 3 of 3"] {
            assert_ne!(kl(draw), whole, "{out}, {draw}");
        }
        assert_eq!(arms.iter().any(|arm| arm.arm == "uniform weights"), out == "heads");
        assert!(out == "networks" || whole < kl("k = 1"));
    }
}

/// Several kinds from one capture: an interrupt keeps those that are done.
#[test]
fn all_kinds_come_from_one_capture() {
    let setup = Setup::new();
    let base = setup.folder.path().join("all");
    let one = |mapper: MapperKind, module: &[u8]| {
        let mut options = setup.options("all");
        (options.k, options.evidence, options.module) = (Some(2), 1, module.to_vec());
        (options.base, options.out) = (Some(base.clone()), base.join(mapper.name()));
        options.mapper = mapper;
        options
    };
    let all = [one(MapperKind::Ridge, RIDGE), one(MapperKind::HeadMatched(Weighting::Attention), HEAD_MATCHED)];
    let mut captured = 0;
    #[expect(clippy::result_large_err, reason = "an error here ends a test")]
    let fit = |watch: &mut dyn FnMut(Progress) -> ControlFlow<()>| {
        fit::fit_all(&all, &setup.source, &setup.target, &setup.gate, &setup.device, watch)
    };
    // The second kind's evidence is not begun.
    let mut evidence = 0;
    let stopped = fit(&mut |progress| {
        captured += usize::from(progress.stage == Stage::Capture && progress.done < progress.total);
        evidence += usize::from(progress.stage == Stage::Evidence && progress.done == 0);
        if evidence == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(stopped.is_err() && captured > 0);
    let first = Pair::open(&all[0].out).unwrap().loaded().artifact();
    let mut again = 0;
    let pairs = fit(&mut |progress| {
        again += usize::from(progress.stage == Stage::Capture && progress.done < progress.total);
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!((again, pairs.len()), (0, 2), "nothing is captured twice");
    assert_eq!(pairs[0].loaded().artifact(), first);
    assert_eq!(pairs[1].mapper(), "head-matched");
    let matrices = |pair: usize| -> usize {
        let bytes = fs::read(all[pair].out.join(WEIGHTS)).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let weights = file.tensors().into_iter().filter(|(name, _)| name.ends_with(".weight"));
        weights.map(|(_, view)| view.shape().iter().product::<usize>()).sum()
    };
    let heads = setup.source.layout().kv_heads;
    assert!(heads > 1);
    assert_eq!(
        matrices(0),
        heads * matrices(1),
        "a head reads one head of each source layer, and nothing for the others"
    );
    assert!(!all[0].state_file().exists() && !all[0].rows_file().exists());
}

/// Interrupted between two layers' trainings, it makes the same pair.
#[test]
fn an_interrupted_training_goes_on() {
    let setup = Setup::new();
    let options = |out: &str| {
        let mut options = setup.options(out);
        let settings = mlp::Settings { width: 8, epochs: 2, batch: 64, seed: 1 };
        (options.mapper, options.module) = (MapperKind::Mlp(settings), MLP.to_vec());
        (options.k, options.evidence) = (Some(1), 1);
        options
    };
    let whole = setup.fit(&options("whole"), |_| ControlFlow::Continue(())).unwrap();
    let stopped = setup.fit(&options("parts"), stop_in(Stage::Train)).unwrap_err();
    assert!(matches!(&stopped, FitError::Interrupted { stage: "training", file } if file.exists()), "{stopped}");
    let mut trained = Vec::new();
    let resumed = setup.fit(&options("parts"), |progress| {
        if progress.stage == Stage::Train {
            trained.push(progress.done);
        }
        ControlFlow::Continue(())
    });
    assert_eq!(resumed.unwrap().loaded().artifact(), whole.loaded().artifact());
    assert_eq!(trained, [0, 2, 4, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16], "finished layers are trained again");
}

#[test]
fn a_width_is_the_narrowest_that_is_as_good() {
    let setup = Setup::new();
    let mut options = setup.options("widths");
    let settings = mlp::Settings { width: 16, epochs: 4, batch: 32, seed: 1 };
    (options.mapper, options.module) = (MapperKind::Mlp(settings), MLP.to_vec());
    (options.k, options.evidence, options.sweep) = (Some(2), 1, true);
    let pair = setup.fit(&options, |_| ControlFlow::Continue(())).unwrap();
    let fit = &pair.manifest().fit;
    let widths: Vec<usize> = fit.widths.iter().map(|point| point.width).collect();
    assert_eq!(widths, [8, 16, 32]);
    assert!(fit.widths.is_sorted_by(|a, b| a.mflops < b.mflops && a.documents == b.documents), "{:?}", fit.widths);
    assert!(fit.sweep.len() == 1, "λ is no part of a network: {:?}", fit.sweep);
    let chosen = fit.training.as_ref().unwrap().width;
    let of = |width: usize| fit.widths.iter().find(|point| point.width == width).unwrap();
    assert!(fit.widths.iter().all(|point| point.width >= chosen || point.kl_nats > of(chosen).kl_nats));
    // The pair runs the chosen one, and nothing is left of the others.
    let settings: serde_json::Value = serde_json::from_str(&pair.identity().mapper.settings).unwrap();
    assert_eq!(settings["width"].as_u64(), Some(chosen as u64));
    let left: Vec<_> = fs::read_dir(setup.folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().contains("mlp-")), "{left:?}");
}
