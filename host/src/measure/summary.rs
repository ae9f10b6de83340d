//! What the documents of a domain amount to: means with intervals, side by side for every arm.

use kvmig_gate::{DocumentOutcome, Quality};
use serde::{Deserialize, Serialize};

use super::statistics::Interval;

/// The name under which all domains together are reported.
pub const ALL: &str = "all";

/// One domain's figures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DomainSummary {
    /// The domain, or [`ALL`].
    pub domain: String,
    /// Documents.
    pub n: usize,
    /// Tokens of a document's prefix.
    pub tokens: Interval,
    /// Through the mapped cache.
    pub mapped: ArmSummary,
    /// Through the native ends alone.
    pub ends_only: ArmSummary,
    /// Without any prefix.
    pub no_prefix: ArmSummary,
    /// By the source model.
    pub source: ArmSummary,
    /// Share of the prefix' worth that the mapped cache keeps, in NLL; left out where the prefix is not surely worth anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worth_kept: Option<Interval>,
    /// Share of the gap between source and target that the migration recovers, in NLL; negative where staying on the source
    /// is better, left out where there is not surely a gap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gap_recovered: Option<Interval>,
    /// Attention-output cosine over layers and heads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cosine_mean: Option<Interval>,
    /// The worst layer's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cosine_worst_layer: Option<Interval>,
    /// Milliseconds of the handoff.
    pub handoff_ms: Interval,
    /// Milliseconds of the prefill it replaces.
    pub reprefill_ms: Interval,
}

/// One arm's distance from the target itself.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArmSummary {
    /// Top-1 agreement, in [0, 1].
    pub agreement: Interval,
    /// KL(target ‖ arm), nats per token.
    pub kl_nats: Interval,
    /// NLL beyond the target's own, nats per token.
    pub nll_gap_nats: Interval,
}

/// The four arms of one document on its own next tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextArms {
    /// Through the mapped cache.
    pub mapped: Quality,
    /// Through the native ends alone.
    pub ends_only: Quality,
    /// Without any prefix.
    pub no_prefix: Quality,
    /// By the source model.
    pub source: Quality,
}

/// One domain's figures on the documents' own next tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextSummary {
    /// The domain, or [`ALL`].
    pub domain: String,
    /// Documents that went on for long enough.
    pub n: usize,
    /// Through the mapped cache.
    pub mapped: ArmSummary,
    /// Through the native ends alone.
    pub ends_only: ArmSummary,
    /// Without any prefix.
    pub no_prefix: ArmSummary,
    /// By the source model.
    pub source: ArmSummary,
}

/// [`summarise`] for the documents' own next tokens: (domain, arms) of each.
pub fn summarise_texts(documents: &[(String, TextArms)]) -> Vec<TextSummary> {
    let of = |name: &str, own: &[&TextArms]| -> Option<TextSummary> {
        let arm = |quality: fn(&TextArms) -> &Quality| arm_summary(own.iter().map(|arms| quality(arms)));
        Some(TextSummary {
            domain: name.to_owned(),
            n: own.len(),
            mapped: arm(|a| &a.mapped)?,
            ends_only: arm(|a| &a.ends_only)?,
            no_prefix: arm(|a| &a.no_prefix)?,
            source: arm(|a| &a.source)?,
        })
    };
    let mut domains: Vec<&str> = Vec::new();
    for (domain, _) in documents {
        if !domains.contains(&domain.as_str()) {
            domains.push(domain);
        }
    }
    let own = |name: &str| documents.iter().filter(|(d, _)| d == name).map(|(_, arms)| arms).collect::<Vec<_>>();
    let each = domains.iter().filter_map(|name| of(name, &own(name)));
    let all: Vec<&TextArms> = documents.iter().map(|(_, arms)| arms).collect();
    each.chain((domains.len() > 1).then(|| of(ALL, &all)).flatten()).collect()
}

fn arm_summary<'q>(qualities: impl Iterator<Item = &'q Quality> + Clone) -> Option<ArmSummary> {
    let of = |value: fn(&Quality) -> f64| Interval::of(&qualities.clone().map(value).collect::<Vec<f64>>());
    Some(ArmSummary {
        agreement: of(|q| q.agreement)?,
        kl_nats: of(|q| q.kl_nats)?,
        nll_gap_nats: of(|q| q.nll_gap_nats)?,
    })
}

/// Each domain in the order of its first document, then all of them together where there are several.
pub fn summarise(documents: &[DocumentOutcome]) -> Vec<DomainSummary> {
    let mut domains: Vec<&str> = Vec::new();
    for document in documents {
        if !domains.contains(&document.domain.as_str()) {
            domains.push(&document.domain);
        }
    }
    let several = domains.len() > 1;
    let of_domain = |name: &&str| {
        let own: Vec<&DocumentOutcome> = documents.iter().filter(|d| d.domain == **name).collect();
        domain(name, &own)
    };
    let all = several.then(|| domain(ALL, &documents.iter().collect::<Vec<_>>())).flatten();
    domains.iter().filter_map(of_domain).chain(all).collect()
}

fn domain(name: &str, documents: &[&DocumentOutcome]) -> Option<DomainSummary> {
    let each = |value: &dyn Fn(&DocumentOutcome) -> f64| documents.iter().map(|d| value(d)).collect::<Vec<f64>>();
    let of = |value: &dyn Fn(&DocumentOutcome) -> f64| Interval::of(&each(value));
    let arm = |quality: fn(&DocumentOutcome) -> &Quality| arm_summary(documents.iter().map(|d| quality(d)));
    // A cosine that some documents lack is not a figure over these documents.
    let cosine = |value: fn(&Quality) -> Option<f64>| {
        let values: Option<Vec<f64>> = documents.iter().map(|d| value(&d.mapped)).collect();
        values.and_then(|values| Interval::of(&values))
    };
    let gap = |quality: fn(&DocumentOutcome) -> &Quality| each(&|d| quality(d).nll_gap_nats);
    let against = |whole: fn(&DocumentOutcome) -> &Quality| {
        let kept: Vec<f64> = gap(whole).iter().zip(gap(|d| &d.mapped)).map(|(whole, mapped)| whole - mapped).collect();
        Interval::of_ratio(&kept, &gap(whole))
    };
    Some(DomainSummary {
        domain: name.to_owned(),
        n: documents.len(),
        tokens: of(&|d| d.tokens as f64)?,
        mapped: arm(|d| &d.mapped)?,
        ends_only: arm(|d| &d.ends_only)?,
        no_prefix: arm(|d| &d.no_prefix)?,
        source: arm(|d| &d.source)?,
        worth_kept: against(|d| &d.no_prefix),
        gap_recovered: against(|d| &d.source),
        cosine_mean: cosine(|q| q.cosine_mean),
        cosine_worst_layer: cosine(|q| q.cosine_worst_layer),
        handoff_ms: of(&|d| d.handoff_ms)?,
        reprefill_ms: of(&|d| d.reprefill_ms)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quality(gap: f64) -> Quality {
        let (cosine_mean, cosine_worst_layer) = (Some(0.9), None);
        Quality { agreement: 0.5, kl_nats: gap / 2.0, nll_gap_nats: gap, cosine_mean, cosine_worst_layer, n: 32 }
    }

    fn document(id: usize, domain: &str, mapped: f64, source: f64) -> DocumentOutcome {
        DocumentOutcome {
            id: format!("{domain}-{id}"),
            domain: domain.to_owned(),
            tokens: 100,
            mapped: quality(mapped),
            ends_only: quality(0.8),
            no_prefix: quality(1.0),
            source: quality(source),
            handoff_ms: 10.0,
            reprefill_ms: 40.0,
        }
    }

    #[test]
    fn per_domain_and_over_all() {
        let documents = [
            document(0, "prose", 0.1, 0.4),
            document(0, "code", 0.3, 0.2),
            document(1, "prose", 0.3, 0.6),
            document(1, "code", 0.3, 0.2),
        ];
        let summaries = summarise(&documents);
        let names: Vec<(&str, usize)> = summaries.iter().map(|s| (s.domain.as_str(), s.n)).collect();
        assert_eq!(names, [("prose", 2), ("code", 2), (ALL, 4)]);
        let close = |found: Option<Interval>, expected: f64| {
            assert!((found.unwrap().mean - expected).abs() < 1e-12, "{found:?}, expected {expected}");
        };
        close(Some(summaries[0].mapped.kl_nats), 0.1);
        close(summaries[0].worth_kept, 0.8);
        // Ratio of means (0.3 / 0.5), not mean of ratios.
        close(summaries[0].gap_recovered, 0.6);
        close(summaries[1].gap_recovered, -0.5);
        close(summaries[2].cosine_mean, 0.9);
        assert_eq!(summaries[2].cosine_worst_layer, None);
    }

    #[test]
    fn texts_are_summarised_alike() {
        let arms = |gap| {
            let (mapped, other) = (quality(gap), quality(1.0));
            TextArms { mapped, ends_only: other, no_prefix: other, source: other }
        };
        let documents =
            [("code".to_owned(), arms(0.25)), ("prose".to_owned(), arms(0.5)), ("code".to_owned(), arms(0.75))];
        let found: Vec<(String, usize, f64)> =
            summarise_texts(&documents).into_iter().map(|s| (s.domain, s.n, s.mapped.nll_gap_nats.mean)).collect();
        assert_eq!(found, [("code".into(), 2, 0.5), ("prose".into(), 1, 0.5), (ALL.into(), 3, 0.5)]);
        assert!(summarise_texts(&[]).is_empty());
    }

    #[test]
    fn one_domain_has_no_total() {
        assert_eq!(summarise(&[document(0, "code", 0.3, 0.2)]).len(), 1);
        assert!(summarise(&[]).is_empty());
    }
}
