//! How close a mapped cache came to the target's own.

use serde::{Deserialize, Serialize};

/// Quality of one continuation of one document.
///
/// Measured on the target's own greedy continuation, teacher-forced through both caches; the same for held-out evidence and
/// for a live audit, so that the two are exchangeable.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quality {
    /// Share of positions at which both name the same most likely token, in [0, 1].
    pub agreement: f64,
    /// Mean KL(target ‖ other), in nats per token.
    pub kl_nats: f64,
    /// Mean negative log-likelihood beyond the target's own, in nats per token.
    pub nll_gap_nats: f64,
    /// Mean cosine of the attention outputs over layers and heads, where it was captured.
    #[serde(default)]
    pub cosine_mean: Option<f64>,
    /// The same of the worst layer.
    #[serde(default)]
    pub cosine_worst_layer: Option<f64>,
    /// Tokens of the continuation.
    pub n: usize,
}

impl Quality {
    /// The first field that no measurement can give (not a number, out of its range, or over no tokens): its name, what was
    /// found, what was expected.
    pub(crate) fn fault(&self) -> Option<(&'static str, f64, &'static str)> {
        // Rounding may push a ratio or a divergence past its end by this much, and no more.
        const SLACK: f64 = 1e-4;
        let within = |low: f64, high: f64, x: f64| x >= low - SLACK && x <= high + SLACK;
        let (cosine_mean, worst_layer) = (self.cosine_mean.unwrap_or(0.0), self.cosine_worst_layer.unwrap_or(0.0));
        let fields = [
            ("agreement", self.agreement, "a share in [0, 1]", within(0.0, 1.0, self.agreement)),
            ("kl_nats", self.kl_nats, "a finite number of nats, at least 0", within(0.0, f64::MAX, self.kl_nats)),
            ("nll_gap_nats", self.nll_gap_nats, "a finite number of nats", self.nll_gap_nats.is_finite()),
            ("cosine_mean", cosine_mean, "a cosine in [-1, 1]", within(-1.0, 1.0, cosine_mean)),
            ("cosine_worst_layer", worst_layer, "a cosine in [-1, 1]", within(-1.0, 1.0, worst_layer)),
            ("n", self.n as f64, "at least 1 token", self.n > 0),
        ];
        fields.into_iter().find(|(.., sound)| !sound).map(|(name, found, expected, _)| (name, found, expected))
    }
}

/// The figure a policy's floor is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// [`Quality::kl_nats`]: lower is better.
    KlNats,
    /// [`Quality::agreement`]: higher is better.
    Agreement,
    /// [`Quality::nll_gap_nats`]: lower is better.
    NllGapNats,
}

impl Metric {
    /// The name in policies and records.
    pub fn name(self) -> &'static str {
        match self {
            Metric::KlNats => "kl_nats",
            Metric::Agreement => "agreement",
            Metric::NllGapNats => "nll_gap_nats",
        }
    }

    /// The metric of that name.
    pub fn from_name(name: &str) -> Option<Metric> {
        [Metric::KlNats, Metric::Agreement, Metric::NllGapNats].into_iter().find(|metric| metric.name() == name)
    }

    /// The metric's value, in its own unit.
    pub fn value(self, quality: &Quality) -> f64 {
        match self {
            Metric::KlNats => quality.kl_nats,
            Metric::Agreement => quality.agreement,
            Metric::NllGapNats => quality.nll_gap_nats,
        }
    }

    /// Whether a quality falls short of `floor`, which is in the metric's own unit. One that is no number always does.
    pub fn falls_short(self, quality: &Quality, floor: f64) -> bool {
        self.worse(self.value(quality), floor)
    }

    /// A value turned so that lower is better; its own inverse.
    pub(crate) fn loss(self, value: f64) -> f64 {
        match self {
            Metric::KlNats | Metric::NllGapNats => value,
            Metric::Agreement => 1.0 - value,
        }
    }

    /// Whether `value` falls short of `limit`. NaN always does.
    pub(crate) fn worse(self, value: f64, limit: f64) -> bool {
        !(match self {
            Metric::KlNats | Metric::NllGapNats => value <= limit,
            Metric::Agreement => value >= limit,
        })
    }
}
