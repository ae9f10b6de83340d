//! What the gate demands before anything migrates.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::{
    Digest, DigestBuilder, Metric,
    parse::{self, ParseError},
};

/// A policy as it is written: a TOML file in which every field may be left out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicySettings {
    /// The figure that is promised.
    pub metric: Metric,
    /// The worst value of the metric that may be promised, in its own unit. Left out: 0.25 nats of KL; the other metrics
    /// have no default.
    pub floor: Option<f64>,
    /// Share of requests whose realised quality may fall short of what was promised.
    pub alpha: f64,
    /// Chance of a false alarm at which a (pair, mapper) is quarantined. This and the next two are written down with every
    /// decision, and acted on by nobody yet: there is no recalibration and no sampled audit.
    pub delta: f64,
    /// Share of requests that are audited after the answer went out.
    pub audit_rate: f64,
    /// Step of adaptive conformal inference, γ of arXiv:2106.00170.
    pub aci_gamma: f64,
    /// Fewest held-out documents that a bound may rest on.
    pub min_evidence: usize,
    /// How many times quicker than the re-prefill a handoff has to be; 0 asks for nothing.
    pub latency_factor: f64,
    /// Whether the mapped cache has to be closer to the target than the source model itself is.
    pub beats_source: bool,
    /// Whether the mapped cache has to be closer than the same native head and tail with the middle dropped.
    pub beats_ends_only: bool,
    /// How many times longer than the longest held-out document, or shorter than the shortest, a request may be.
    pub max_extrapolation: f64,
    /// Most mappings that a cache may go through; the evidence is about the first.
    pub max_hops: u32,
    /// Seconds after which a ticket that was neither settled nor given up counts as abandoned.
    pub lease_seconds: u64,
}

impl Default for PolicySettings {
    fn default() -> PolicySettings {
        PolicySettings {
            metric: Metric::KlNats,
            floor: None,
            alpha: 0.1,
            delta: 0.01,
            audit_rate: 0.05,
            aci_gamma: 0.02,
            min_evidence: 30,
            latency_factor: 2.0,
            beats_source: true,
            beats_ends_only: true,
            max_extrapolation: 8.0,
            max_hops: 1,
            lease_seconds: 3600,
        }
    }
}

/// A policy whose every field was checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    settings: PolicySettings,
    floor: f64,
}

impl Policy {
    /// Reads a policy file.
    ///
    /// # Errors
    ///
    /// When it can't be read, holds an unknown field, or a value outside its range.
    pub fn load(path: &Path) -> Result<Policy, PolicyError> {
        let text = fs::read_to_string(path).map_err(|source| PolicyError::Read { path: path.to_owned(), source })?;
        Policy::from_toml(&text).map_err(|source| PolicyError::In { path: path.to_owned(), source: Box::new(source) })
    }

    /// Parses a policy.
    ///
    /// # Errors
    ///
    /// When it is no TOML, holds an unknown field, or a value outside its range.
    pub fn from_toml(text: &str) -> Result<Policy, PolicyError> {
        Policy::try_from(parse::from_toml::<PolicySettings>(text)?)
    }

    /// The settings in full: the floor's default, which depends on the metric, is filled in.
    pub fn settings(&self) -> &PolicySettings {
        &self.settings
    }

    /// The worst value of the metric that may be promised, in the metric's unit.
    pub fn floor(&self) -> f64 {
        self.floor
    }

    /// How long a permit, and after it a receipt, may be held.
    pub(crate) fn lease(&self) -> Duration {
        Duration::from_secs(self.settings.lease_seconds)
    }

    /// What every ledger row names; two policies of one digest decide alike.
    pub fn digest(&self) -> Digest {
        DigestBuilder::new("policy").field("json", self.to_json().as_bytes()).finish()
    }

    /// The checked policy in full, defaults included, as the ledger keeps it.
    pub(crate) fn to_json(&self) -> String {
        serde_json::to_string(&self.settings).expect("a checked policy holds only finite numbers")
    }
}

impl Default for Policy {
    fn default() -> Policy {
        Policy::try_from(PolicySettings::default()).expect("the defaults are in their ranges, as a test shows")
    }
}

impl TryFrom<PolicySettings> for Policy {
    type Error = PolicyError;

    fn try_from(settings: PolicySettings) -> Result<Policy, PolicyError> {
        let floor = match (settings.metric, settings.floor) {
            (_, Some(floor)) => floor,
            (Metric::KlNats, None) => 0.25,
            (metric, None) => return Err(PolicyError::NoFloor { metric: metric.name() }),
        };
        let in_range = |field, found: f64, expected, holds: bool| {
            if holds { Ok(()) } else { Err(PolicyError::OutOfRange { field, found, expected }) }
        };
        let open_unit = |x: f64| x > 0.0 && x < 1.0;
        match settings.metric {
            Metric::Agreement => {
                in_range("floor", floor, "a share in [0, 1]", (0.0..=1.0).contains(&floor))?;
            }
            Metric::KlNats => in_range("floor", floor, "nats ≥ 0", floor >= 0.0 && floor.is_finite())?,
            Metric::NllGapNats => in_range("floor", floor, "a finite number of nats", floor.is_finite())?,
        }
        in_range("alpha", settings.alpha, "a share between 0 and 1, both excluded", open_unit(settings.alpha))?;
        in_range("delta", settings.delta, "a share between 0 and 1, both excluded", open_unit(settings.delta))?;
        in_range("audit_rate", settings.audit_rate, "a share in [0, 1]", (0.0..=1.0).contains(&settings.audit_rate))?;
        in_range("aci_gamma", settings.aci_gamma, "a step in [0, 1]", (0.0..=1.0).contains(&settings.aci_gamma))?;
        in_range("min_evidence", settings.min_evidence as f64, "at least 1 document", settings.min_evidence >= 1)?;
        in_range(
            "latency_factor",
            settings.latency_factor,
            "a finite number ≥ 0",
            settings.latency_factor >= 0.0 && settings.latency_factor.is_finite(),
        )?;
        in_range(
            "max_extrapolation",
            settings.max_extrapolation,
            "a finite factor ≥ 1",
            settings.max_extrapolation >= 1.0 && settings.max_extrapolation.is_finite(),
        )?;
        in_range("max_hops", f64::from(settings.max_hops), "at least 1 mapping", settings.max_hops >= 1)?;
        in_range(
            "lease_seconds",
            settings.lease_seconds as f64,
            "1 to 31536000 (a year)",
            (1..=31_536_000).contains(&settings.lease_seconds),
        )?;
        Ok(Policy { settings: PolicySettings { floor: Some(floor), ..settings }, floor })
    }
}

/// Why a policy was not taken.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// The file can't be read.
    #[error("policy {}: {source}", path.display())]
    Read {
        /// The policy file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file was read, and refused.
    #[error("policy {}: {source}", path.display())]
    In {
        /// The policy file.
        path: PathBuf,
        /// Why.
        source: Box<PolicyError>,
    },
    /// No TOML, a field of another type, or an unknown one.
    #[error(transparent)]
    Parse(#[from] ParseError),
    /// A metric without a default floor.
    #[error("field `floor`: found none, and metric `{metric}` has no default; state the worst value that you accept")]
    NoFloor {
        /// The metric's name.
        metric: &'static str,
    },
    /// A value that means nothing.
    #[error("field `{field}`: found {found}, expected {expected}")]
    OutOfRange {
        /// The field.
        field: &'static str,
        /// Its value.
        found: f64,
        /// What it may be.
        expected: &'static str,
    },
}
