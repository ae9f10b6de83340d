//! What a guest says it needs, checked against what there is.

use std::collections::BTreeMap;

use kvmig_gate::{Loaded, WeightElem};

use super::{SandboxLimits, bindings::types, words::one_line};

/// A weight tensor that a guest needs, row-major.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightSpec {
    /// Its name in the pair's weights.
    pub name: String,
    /// Its element type, if the guest cares.
    pub elem: Option<WeightElem>,
    /// Its shape.
    pub shape: Vec<u32>,
}

/// A weight tensor that a pair has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightShape {
    /// Element type.
    pub elem: WeightElem,
    /// Extent of each dimension, row-major.
    pub shape: Vec<usize>,
}

/// The shapes of a pair's weights, by name.
pub fn weight_shapes(loaded: &Loaded) -> BTreeMap<String, WeightShape> {
    let shape = |w: &kvmig_gate::WeightTensor| WeightShape { elem: w.elem(), shape: w.shape().to_vec() };
    loaded.weights().iter().map(|(name, weight)| (name.clone(), shape(weight))).collect()
}

/// A plan within the host's limits: names are distinct, nothing is zero, sums don't overflow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkPlan {
    kind: String,
    weights: Vec<WeightSpec>,
    chunk_tokens: u32,
    scratch_bytes: u64,
    max_steps: u32,
}

/// A plan or a description that can't be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// A number beyond the host's limits.
    #[error("found {field} {found}, expected {least} to {most}")]
    Limit {
        /// The field.
        field: &'static str,
        /// Its value.
        found: u64,
        /// The least it may be.
        least: u64,
        /// The most it may be.
        most: u64,
    },
    /// A kind that the module's description doesn't list.
    #[error("found kind `{found}`, expected one of {expected:?}")]
    Kind {
        /// The kind.
        found: String,
        /// Those in the description.
        expected: Vec<String>,
    },
    /// Two of the same name.
    #[error("found {what} `{name}` twice, expected each once")]
    Twice {
        /// Weights, shader or kind.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// A weight tensor that the pair lacks.
    #[error("weights `{name}` {expected:?}: not in the pair; fit it anew with this module")]
    Missing {
        /// The name.
        name: String,
        /// The shape the plan gives.
        expected: Vec<u32>,
    },
    /// A weight tensor of another shape or type.
    #[error("weights `{name}`: found {found}, expected {expected}; fit the pair anew with this module")]
    Weight {
        /// The name.
        name: String,
        /// Element type and shape in the pair.
        found: String,
        /// Element type and shape in the plan.
        expected: String,
    },
}

impl WorkPlan {
    /// Mapper kind, one of the module's.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Weight tensors that a recording may name.
    pub fn weights(&self) -> &[WeightSpec] {
        &self.weights
    }

    /// Tokens of a chunk.
    pub fn chunk_tokens(&self) -> u32 {
        self.chunk_tokens
    }

    /// Bytes of scratch that a recording may ask for.
    pub fn scratch_bytes(&self) -> u64 {
        self.scratch_bytes
    }

    /// Steps that a recording may have.
    pub fn max_steps(&self) -> u32 {
        self.max_steps
    }

    /// Whether a pair has the weights that the plan names.
    ///
    /// # Errors
    /// [`PlanError::Missing`] or [`PlanError::Weight`], for the first that it hasn't.
    pub fn check_weights(&self, weights: &BTreeMap<String, WeightShape>) -> Result<(), PlanError> {
        for spec in &self.weights {
            let Some(found) = weights.get(&spec.name) else {
                return Err(PlanError::Missing { name: spec.name.clone(), expected: spec.shape.clone() });
            };
            let same_shape = found.shape.len() == spec.shape.len()
                && found.shape.iter().zip(&spec.shape).all(|(&found, &expected)| found == expected as usize);
            if !same_shape || spec.elem.is_some_and(|elem| elem != found.elem) {
                let elem = spec.elem.map_or("F32 or F16".to_owned(), |elem| format!("{elem:?}"));
                return Err(PlanError::Weight {
                    name: spec.name.clone(),
                    found: format!("{:?} {:?}", found.elem, found.shape),
                    expected: format!("{elem} {:?}", spec.shape),
                });
            }
        }
        Ok(())
    }

    pub(super) fn check(
        plan: types::WorkPlan,
        kinds: &[String],
        limits: &SandboxLimits,
    ) -> Result<WorkPlan, PlanError> {
        if !kinds.contains(&plan.kind) {
            return Err(PlanError::Kind { found: one_line(&plan.kind), expected: kinds.to_vec() });
        }
        within("chunk-tokens", plan.chunk_tokens.into(), 1, MOST_CHUNK_TOKENS)?;
        within("scratch-bytes", plan.scratch_bytes, 0, limits.scratch_bytes)?;
        within("max-dispatches", plan.max_dispatches.into(), 1, limits.steps.into())?;
        within("weights", plan.weights.len() as u64, 0, limits.weights.into())?;
        let mut left = limits.weight_bytes;
        let mut weights: Vec<WeightSpec> = Vec::with_capacity(plan.weights.len());
        let mut names = std::collections::HashSet::new();
        for spec in plan.weights {
            within("length of a weight's name", spec.name.len() as u64, 1, 256)?;
            within("dimensions of a weight", spec.shape.len() as u64, 1, 4)?;
            let bytes = spec.shape.iter().try_fold(4u64, |bytes, &extent| bytes.checked_mul(extent.into()));
            let bytes = bytes.unwrap_or(u64::MAX);
            within("bytes of weights", bytes, 4, left)?;
            left -= bytes;
            if !names.insert(spec.name.clone()) {
                return Err(PlanError::Twice { what: "weights", name: one_line(&spec.name) });
            }
            let elem = spec.elem.map(|elem| match elem {
                types::Dtype::Float32 => WeightElem::F32,
                types::Dtype::Float16 => WeightElem::F16,
            });
            weights.push(WeightSpec { name: spec.name, elem, shape: spec.shape });
        }
        Ok(WorkPlan {
            kind: plan.kind,
            weights,
            chunk_tokens: plan.chunk_tokens,
            scratch_bytes: plan.scratch_bytes,
            max_steps: plan.max_dispatches,
        })
    }
}

/// Tokens of a chunk at most: the longest context kvmig maps.
const MOST_CHUNK_TOKENS: u64 = 32_768;

pub(super) fn within(field: &'static str, found: u64, least: u64, most: u64) -> Result<(), PlanError> {
    if (least..=most).contains(&found) { Ok(()) } else { Err(PlanError::Limit { field, found, least, most }) }
}
