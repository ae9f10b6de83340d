//! What each part of a fit is worth: the same documents with one part left out or put wrong.
//!
//! Arms that are mappers of their own are tried as they would run, through the gate's trial route. Those that no module computes
//! (a rotation left as it is, another document's cache) are tried on the numbers alone: their attention-output cosine says
//! what they are worth, and no KL.

use std::ops::ControlFlow;

use kvmig_gate::Quality;

use super::{
    FitError, FitOptions, MapperKind, Progress, Stage,
    choose::{Candidate, Rotations, Trial},
    content::Rotation,
    design::{Design, RidgeMaps},
    ends::{Document, Tools, attempt},
    fitted::Fitted,
    head_matched::{self, Weighting},
    mlp::{self, MlpError},
    moments::{Moments, Rows},
    plan::Plan,
    ridge::Lambda,
    rows::RowFile,
    select::Scores,
    step,
};
use crate::{
    engine::Model,
    pair::{AblationPoint, Draft, PairError},
};

/// Disjoint draws of the calibration sequences, for the spread between them.
const DRAWS: usize = 3;

/// The share of the calibration sequences that a starved fit gets.
const STARVED: usize = 10;

/// What the arms are made from.
pub(super) struct Ablation<'a> {
    pub(super) tools: Tools<'a>,
    pub(super) options: &'a FitOptions,
    pub(super) plan: &'a Plan,
    pub(super) moments: &'a Moments,
    pub(super) rows: &'a RowFile,
    pub(super) scores: &'a Scores,
    pub(super) chosen: &'a Candidate,
    /// What it was fitted to.
    pub(super) fitted: &'a Fitted,
    /// Makes a pair of fitted maps with these ends.
    pub(super) draft: &'a dyn Fn(&Fitted, usize, usize) -> Result<Draft, PairError>,
}

/// A mapper to be tried, with its ends.
struct Arm {
    name: String,
    made: Made,
    head: usize,
    tail: usize,
}

/// How an arm's mapper comes about.
enum Made {
    /// It is the one that was chosen.
    Chosen,
    /// It is that one with every head's map in the place of another's.
    Shifted,
    /// It is fitted anew.
    Anew(Recipe),
}

/// A fit that differs from the chosen one in something.
struct Recipe {
    /// Calibration sequences; all of them where there are none named.
    part: Option<Vec<usize>>,
    design: Design,
    lambda: Lambda,
    mapper: MapperKind,
}

impl Ablation<'_> {
    /// Tries every arm on the selection documents.
    pub(super) fn run(
        &self,
        documents: &[Document<'_>],
        watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Vec<AblationPoint>, FitError> {
        let Tools { source, target, .. } = self.tools;
        let mut points = self.controls(documents)?;
        let arms = self.arms();
        for (done, arm) in arms.iter().enumerate() {
            step(watch, Stage::Ablate, done, arms.len())?;
            let anew;
            let fitted = match &arm.made {
                Made::Chosen => self.fitted,
                Made::Shifted => {
                    anew = self.fitted.shifted(target.layout().kv_heads);
                    &anew
                }
                Made::Anew(recipe) => match self.fit(recipe, watch) {
                    Ok(fitted) => {
                        anew = fitted;
                        &anew
                    }
                    // Fewer rows than features, or no penalty, may leave no solution, and one sequence nothing to hold out: a result as well,
                    // and no arm.
                    Err(FitError::Linalg(_) | FitError::Mlp(MlpError::TooFewSequences { .. })) => continue,
                    Err(error) => return Err(error),
                },
            };
            let (outcomes, _) = attempt(self.tools, &(self.draft)(fitted, arm.head, arm.tail)?, documents)?;
            points.push(point(&arm.name, &outcomes));
        }
        if self.options.mapper == MapperKind::Ridge {
            points.extend(self.on_numbers(source, target)?);
        }
        Ok(points)
    }

    /// What the ends alone, and the source alone, make of the documents.
    fn controls(&self, documents: &[Document<'_>]) -> Result<Vec<AblationPoint>, FitError> {
        let FitOptions { head, tail, .. } = *self.options;
        let (mut ends, mut stay) = (Vec::new(), Vec::new());
        for document in documents {
            let target = self.tools.target;
            let session = target.ends_only(&document.tokens, head, tail, target.layout().elem)?;
            ends.push(document.native.quality_of("ends_only", &session)?);
            let prefilled = self.tools.source.prefill(&document.tokens, crate::engine::PrefillOptions::default())?;
            stay.push(document.native.quality_of("source", &self.tools.source.session(prefilled)?)?);
        }
        Ok(vec![point("ends only", &ends), point("source (stay)", &stay)])
    }

    /// The arms that are mappers.
    fn arms(&self) -> Vec<Arm> {
        let FitOptions { head, tail, ref mapper, .. } = *self.options;
        let Candidate { design, lambda, .. } = self.chosen;
        let mut arms = Vec::new();
        let mut push = |name: &str, made: Made, head: usize, tail: usize| {
            arms.push(Arm { name: name.to_owned(), made, head, tail });
        };
        let as_chosen =
            || Recipe { part: None, design: design.clone(), lambda: *lambda, mapper: self.options.mapper.clone() };
        push("as chosen", Made::Chosen, head, tail);
        push("no native head", Made::Chosen, 0, tail);
        push("no native tail", Made::Chosen, head, 1);
        push("heads shifted cyclically", Made::Shifted, head, tail);
        let layers = (design.native_layers..self.scores.keys.len()).map(|layer| self.scores.top(layer, 1)).collect();
        let one = Design { layers, rank: None, ..design.clone() };
        push("k = 1", Made::Anew(Recipe { design: one, ..as_chosen() }), head, tail);
        if !matches!(mapper, MapperKind::Mlp(_)) {
            let none = Lambda { value: 0.0, ..*lambda };
            push("no ridge", Made::Anew(Recipe { lambda: none, ..as_chosen() }), head, tail);
        }
        if *mapper == MapperKind::HeadMatched(Weighting::Attention) {
            let uniform = MapperKind::HeadMatched(Weighting::Uniform);
            push("uniform weights", Made::Anew(Recipe { mapper: uniform, ..as_chosen() }), head, tail);
        }
        // Rows on disk have no hidden state.
        if !design.hidden {
            for (name, part) in self.parts() {
                push(&name, Made::Anew(Recipe { part: Some(part), ..as_chosen() }), head, tail);
            }
        }
        arms
    }

    /// Parts of the calibration sequences: a tenth, each domain alone where there are several, disjoint draws.
    fn parts(&self) -> Vec<(String, Vec<usize>)> {
        let all = self.rows.chunks();
        // Counted within its domain, since the domains take turns: every n-th sequence of all could be of one domain alone.
        let number = |i: usize| self.plan.domains[..i].iter().filter(|domain| **domain == self.plan.domains[i]).count();
        let every = |n: usize, from: usize| (0..all).filter(|&i| number(i) % n == from).collect::<Vec<usize>>();
        let mut parts = vec![(format!("1/{STARVED} of the rows"), every(STARVED, 0))];
        let mut domains = self.plan.domains.clone();
        domains.sort();
        domains.dedup();
        if domains.len() > 1 {
            parts.extend(domains.into_iter().map(|domain| {
                let of = (0..all).filter(|&i| self.plan.domains[i] == domain).collect();
                (format!("calibrated on {domain} alone"), of)
            }));
        }
        parts.extend((0..DRAWS).map(|draw| (format!("draw {} of {DRAWS}", draw + 1), every(DRAWS, draw))));
        parts
    }

    fn fit(
        &self,
        Recipe { part, design, lambda, mapper }: &Recipe,
        watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Fitted, FitError> {
        let elem = self.options.elem;
        let few = part.as_ref().map(|part| self.rows.only(part)).transpose()?;
        let rows = few.as_ref().unwrap_or(self.rows);
        match mapper {
            MapperKind::Ridge => {
                let few = part.as_ref().map(|part| self.moments_of(part, None)).transpose()?;
                Ok(Fitted::ridge(&RidgeMaps::fit(few.as_ref().unwrap_or(self.moments), design, *lambda)?, elem))
            }
            MapperKind::HeadMatched(weighting) => {
                let maps = head_matched::fit(rows, &design.layers, *lambda, *weighting, watch)?;
                Ok(Fitted::head_matched(&maps, elem))
            }
            MapperKind::Mlp(settings) => {
                // Networks of an arm are of no use to the fit: they are kept for no longer than it takes.
                let kept = tempfile::tempdir().map_err(FitError::Scratch)?;
                let networks = mlp::fit(rows, &design.layers, settings, kept.path(), watch)?;
                Ok(Fitted::mlp(&networks, elem))
            }
        }
    }

    /// Moments of some of the sequences, with their rotation where `rotated`.
    fn moments_of(&self, part: &[usize], rotated: Option<(&Model, &Model)>) -> Result<Moments, FitError> {
        let shape = super::moments::MomentShape { hidden: 0, ..self.moments.shape() };
        let mut moments = Moments::new(shape);
        for &index in part {
            let [[mut source_keys, source_values], [mut target_keys, target_values]] = self.rows.chunk(index)?;
            if let Some((source, target)) = rotated {
                let positions: Vec<u32> = (self.options.head..self.plan.sequences[index].len())
                    .step_by(self.options.stride)
                    .map(|position| position as u32)
                    .collect();
                for (model, keys) in [(source, &mut source_keys), (target, &mut target_keys)] {
                    let layout = model.layout();
                    let rotation = Rotation::new(&layout.rope, &positions);
                    let row = layout.layers * layout.width();
                    for (i, row) in keys.chunks_exact_mut(row).enumerate() {
                        row.chunks_exact_mut(layout.head_dim).for_each(|head| rotation.apply(i, head));
                    }
                }
            }
            let keys = Rows { source: &source_keys, target: &target_keys };
            moments.add(keys, Rows { source: &source_values, target: &target_values });
        }
        Ok(moments)
    }

    /// The arms that no module computes, by their cosines alone: at the length of the fit, and at four times that where there are
    /// documents so long.
    fn on_numbers(&self, source: &Model, target: &Model) -> Result<Vec<AblationPoint>, FitError> {
        let FitOptions { head, tail, native_layers, .. } = *self.options;
        let Candidate { design, lambda, .. } = self.chosen;
        let maps = RidgeMaps::fit(self.moments, design, *lambda)?;
        let rotated = if design.hidden {
            None
        } else {
            let all: Vec<usize> = (0..self.rows.chunks()).collect();
            Some(RidgeMaps::fit(&self.moments_of(&all, Some((source, target)))?, design, *lambda)?)
        };
        let mut points = Vec::new();
        for (length, prompts) in [("", &self.plan.selection), (" at 4x the length", &self.plan.long)] {
            let run = |prompt| Trial::run(prompt, (head, tail, native_layers), source, target);
            let trials: Vec<Trial> = prompts.iter().map(run).collect::<Result<_, _>>()?;
            if trials.is_empty() {
                continue;
            }
            let mut arm = |name: &str, maps: &RidgeMaps, rotations: Rotations, others: bool| {
                let of = |i: usize| {
                    let other = others.then(|| &trials[(i + 1) % trials.len()]);
                    trials[i].cosines_with(maps, &self.moments.shape(), rotations, other)
                };
                let cosines: Vec<_> = (0..trials.len()).map(of).collect();
                let n = cosines.len() as f64;
                points.push(AblationPoint {
                    arm: format!("{name}{length}"),
                    kl_nats: None,
                    agreement: None,
                    cosine_mean: Some(cosines.iter().map(|c| c.mean()).sum::<f64>() / n),
                    cosine_worst_layer: Some(cosines.iter().map(|c| c.worst_layer()).sum::<f64>() / n),
                    documents: cosines.len(),
                });
            };
            if !length.is_empty() {
                arm("as chosen", &maps, Rotations::Handled, false);
            }
            arm("no RoPE handling at inference", &maps, Rotations::Ignored, false);
            if let Some(rotated) = &rotated {
                arm("fitted on rotated keys", rotated, Rotations::Ignored, false);
            }
            if trials.len() > 1 {
                arm("another document's cache", &maps, Rotations::Handled, true);
            }
        }
        Ok(points)
    }
}

fn point(name: &str, outcomes: &[Quality]) -> AblationPoint {
    let n = outcomes.len() as f64;
    let mean = |value: &dyn Fn(&Quality) -> f64| outcomes.iter().map(value).sum::<f64>() / n;
    let cosine =
        |value: fn(&Quality) -> Option<f64>| outcomes.iter().map(value).sum::<Option<f64>>().map(|total| total / n);
    AblationPoint {
        arm: name.to_owned(),
        kl_nats: Some(mean(&|quality| quality.kl_nats)),
        agreement: Some(mean(&|quality| quality.agreement)),
        cosine_mean: cosine(|quality| quality.cosine_mean),
        cosine_worst_layer: cosine(|quality| quality.cosine_worst_layer),
        documents: outcomes.len(),
    }
}
