//! Figures of each domain, arm by arm.

use kvmig_gate::Quality;
use serde::Serialize;

use super::{Arm, Ends, Measured, Results};
use crate::measure::{
    statistics::{Interval, median},
    summary::ALL,
};

/// Which tokens an arm is measured on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum On {
    /// The target's own greedy continuation: what the gate judges by.
    Greedy,
    /// The document's own next tokens, of documents that have enough.
    Text,
}

/// One domain's figures, or those of all.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Domain {
    /// The domain, or `all`.
    pub domain: String,
    /// Documents.
    pub n: usize,
    /// Median of the target's ordinary prefills, in milliseconds.
    pub reprefill_ms: f64,
    /// The arms: the source, no prefix, the native ends alone, then every mapper.
    pub rows: Vec<Row>,
}

/// One arm's figures: means over documents with 95 % bootstrap intervals.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Which arm.
    pub arm: ArmName,
    /// KL(target ‖ arm), nats per token.
    pub kl_nats: Interval,
    /// Top-1 agreement.
    pub agreement: Interval,
    /// NLL beyond the target's own, nats per token.
    pub nll_gap_nats: Interval,
    /// Share of the NLL gap between source and target that is recovered; none where there is not surely a gap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gap_recovered: Option<Interval>,
    /// KL beyond the source's on the same documents, paired: negative where it is worth leaving the source. None of the source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub beyond_source: Option<Interval>,
    /// Median handoff in milliseconds, of mapped arms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub handoff_ms: Option<f64>,
    /// Median over documents of prefill over handoff.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speed_up: Option<f64>,
}

/// An arm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ArmName {
    /// The source goes on itself.
    Source,
    /// The target without any of the prefix.
    NoPrefix,
    /// These native ends alone.
    EndsOnly(Ends),
    /// A mapper, counted in the subject's mappings.
    Mapped(usize),
}

/// Whether an arm is to be preferred to staying on the source, by KL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The whole interval is below it.
    Better,
    /// The whole interval is beyond it.
    Worse,
    /// The interval holds both.
    Undecided,
}

/// Fewer documents than these give no verdict: of so few, the resampled means are all on one side by chance too often (of five
/// equal signs, once in sixteen).
const FEWEST: usize = 6;

impl Row {
    /// Whether it is surely better or worse than staying on the source.
    pub fn verdict(&self) -> Option<Verdict> {
        self.beyond_source.map(|beyond| match beyond {
            Interval { n, .. } if n < FEWEST => Verdict::Undecided,
            Interval { high, .. } if high < 0.0 => Verdict::Better,
            Interval { low, .. } if low > 0.0 => Verdict::Worse,
            _ => Verdict::Undecided,
        })
    }
}

/// Each domain in the order of its first document, then all together where there are several.
pub fn summarise(results: &Results, on: On) -> Vec<Domain> {
    let measured = |m: &&Measured| on == On::Greedy || m.source.text.is_some();
    let documents: Vec<&Measured> = results.documents.iter().filter(measured).collect();
    let mut names: Vec<&str> = Vec::new();
    for document in &documents {
        if !names.contains(&document.domain.as_str()) {
            names.push(&document.domain);
        }
    }
    let of = |name: &&str| domain(name, on, documents.iter().filter(|m| m.domain == **name).copied().collect());
    let all = (names.len() > 1).then(|| domain(ALL, on, documents.clone())).flatten();
    names.iter().filter_map(of).chain(all).collect()
}

fn domain(name: &str, on: On, documents: Vec<&Measured>) -> Option<Domain> {
    let first = documents.first()?;
    let ends = (0..first.ends_only.len()).map(|i| ArmName::EndsOnly(first.ends_only[i].0));
    let mapped = (0..first.mapped.len()).map(ArmName::Mapped);
    let arms = [ArmName::Source, ArmName::NoPrefix].into_iter().chain(ends).chain(mapped);
    let rows = arms.map(|arm| row(arm, on, &documents)).collect::<Option<Vec<_>>>()?;
    let reprefill: Vec<f64> = documents.iter().map(|m| m.reprefill_ms).collect();
    Some(Domain { domain: name.to_owned(), n: documents.len(), reprefill_ms: median(&reprefill)?, rows })
}

/// None if a document lacks the arm.
fn row(name: ArmName, on: On, documents: &[&Measured]) -> Option<Row> {
    let arms = documents.iter().map(|m| arm(name, m)).collect::<Option<Vec<&Arm>>>()?;
    let qualities = arms.iter().map(|arm| quality(arm, on)).collect::<Option<Vec<&Quality>>>()?;
    let sources = documents.iter().map(|m| quality(&m.source, on)).collect::<Option<Vec<&Quality>>>()?;
    let each = |value: fn(&Quality) -> f64| qualities.iter().map(|q| value(q)).collect::<Vec<f64>>();
    let beyond = |value: fn(&Quality) -> f64| {
        qualities.iter().zip(&sources).map(|(own, source)| value(own) - value(source)).collect::<Vec<f64>>()
    };
    let recovered: Vec<f64> = beyond(|q| q.nll_gap_nats).iter().map(|beyond| -beyond).collect();
    let gap: Vec<f64> = sources.iter().map(|q| q.nll_gap_nats).collect();
    let others = name != ArmName::Source;
    let has_gap = Interval::of(&gap).is_some_and(|gap| gap.low > 0.0);
    let handoffs = arms.iter().map(|arm| arm.handoff_ms).collect::<Option<Vec<f64>>>();
    let ratio = |handoffs: &Vec<f64>| {
        let ratios: Vec<f64> = documents.iter().zip(handoffs).map(|(m, handoff)| m.reprefill_ms / handoff).collect();
        median(&ratios)
    };
    Some(Row {
        arm: name,
        kl_nats: Interval::of(&each(|q| q.kl_nats))?,
        agreement: Interval::of(&each(|q| q.agreement))?,
        nll_gap_nats: Interval::of(&each(|q| q.nll_gap_nats))?,
        // Where the source is the better of the two there is no gap that could be recovered.
        gap_recovered: Interval::of_ratio(&recovered, &gap).filter(|_| others && has_gap),
        beyond_source: Interval::of(&beyond(|q| q.kl_nats)).filter(|_| others),
        handoff_ms: handoffs.as_ref().and_then(|handoffs| median(handoffs)),
        speed_up: handoffs.as_ref().and_then(ratio),
    })
}

fn arm(name: ArmName, document: &Measured) -> Option<&Arm> {
    match name {
        ArmName::Source => Some(&document.source),
        ArmName::NoPrefix => Some(&document.no_prefix),
        ArmName::EndsOnly(ends) => document.ends_only.iter().find(|(own, _)| *own == ends).map(|(_, arm)| arm),
        ArmName::Mapped(index) => document.mapped.get(index),
    }
}

fn quality(arm: &Arm, on: On) -> Option<&Quality> {
    match on {
        On::Greedy => Some(&arm.greedy),
        On::Text => arm.text.as_ref(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::{Mapping, Subject};
    use kvmig_gate::Digest;

    fn arm(kl_nats: f64, nll_gap_nats: f64, text: bool) -> Arm {
        let quality =
            Quality { agreement: 0.5, kl_nats, nll_gap_nats, cosine_mean: None, cosine_worst_layer: None, n: 32 };
        Arm { greedy: quality, text: text.then_some(quality), handoff_ms: None }
    }

    fn results(kls: &[(&str, f64, f64)]) -> Results {
        let ends = Ends { head: 1, tail: 8 };
        let digest = Digest::of(b"");
        let mapping = Mapping {
            pair: "p".into(),
            kind: "ridge".into(),
            k: 1,
            rank: None,
            native_layers: 0,
            ends,
            artifact: digest,
            weight_bytes: 1,
            mflops: 1.0,
            flop_limit: 9.0,
        };
        let document = |(i, &(domain, source, mapped)): (usize, &(&str, f64, f64))| Measured {
            id: format!("{domain}-{i}"),
            domain: domain.into(),
            tokens: digest,
            reprefill_ms: 100.0,
            source: arm(source, source, i > 0),
            no_prefix: arm(2.0, 2.0, i > 0),
            ends_only: vec![(ends, arm(1.0, 1.0, i > 0))],
            mapped: vec![Arm { handoff_ms: Some(10.0 + i as f64), ..arm(mapped, mapped, i > 0) }],
        };
        Results {
            subject: Subject {
                schema: 1,
                kvmig: "0".into(),
                source: digest,
                target: digest,
                backend: "cpu".into(),
                device: "one".into(),
                threads: 1,
                precision: "exact".into(),
                context: 64,
                mappings: vec![mapping],
            },
            documents: kls.iter().enumerate().map(document).collect(),
        }
    }

    #[test]
    fn a_mapper_is_held_against_the_source_document_by_document() {
        // Means differ by little and spread a lot; paired, the mapper is better on every document of code.
        let code = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0].map(|kl| ("code", kl, 0.9 * kl));
        let wiki = [0.1, 0.2, 0.1, 0.3, 0.2, 0.1].map(|kl| ("wiki", kl, 3.0 * kl));
        let few = [("prose", 1.0, 0.9); 5];
        let results = results(&[&code[..], &wiki, &few].concat());
        let domains = summarise(&results, On::Greedy);
        let verdicts: Vec<_> = domains.iter().map(|d| (d.domain.as_str(), d.n, d.rows[3].verdict().unwrap())).collect();
        let expected = [("code", 6, Verdict::Better), ("wiki", 6, Verdict::Worse), ("prose", 5, Verdict::Undecided)];
        assert_eq!(verdicts[..3], expected);
        assert_eq!((verdicts[3].0, verdicts[3].1), (ALL, 17));
        let code = &domains[0].rows;
        assert_eq!(code[0].verdict(), None, "the source is not better than itself");
        assert_eq!(code[2].arm, ArmName::EndsOnly(Ends { head: 1, tail: 8 }));
        let mapped = &code[3];
        assert!((mapped.gap_recovered.unwrap().mean - 0.1).abs() < 1e-12);
        assert_eq!(mapped.handoff_ms, Some(12.5));
    }

    #[test]
    fn there_is_no_gap_to_recover_from_a_better_source() {
        let domains = summarise(&results(&[("code", -1.0, 0.5), ("code", -1.1, 0.6)]), On::Greedy);
        assert_eq!(domains[0].rows[3].gap_recovered, None);
    }

    #[test]
    fn a_document_that_ends_with_its_prefix_has_no_text_of_its_own() {
        let domains = summarise(&results(&[("code", 1.0, 0.9), ("code", 2.0, 1.8)]), On::Text);
        assert_eq!(domains[0].n, 1);
        assert_eq!(domains[0].rows[3].kl_nats.mean, 1.8);
        assert!(summarise(&results(&[("code", 1.0, 0.9)]), On::Text).is_empty());
    }
}
