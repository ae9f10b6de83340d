//! A pair's evidence as a table, and what a policy makes of it.

use std::io::{self, Write};

use kvmig_gate::{
    CacheFacts, Candidate, Digest, DocumentOutcome, Evidence, Forecast, Policy, Request, parse::printable,
};

use crate::{
    measure::{statistics::Interval, summary::ArmSummary},
    pair::Card,
};

/// Every arm side by side, per domain: means over documents with their 95 % bootstrap intervals.
pub(super) fn evidence_table(out: &mut impl Write, pair: &Card) -> io::Result<()> {
    let Some(evidence) = &pair.manifest().evidence else {
        return writeln!(out, "no evidence: the gate admits nothing; fit the pair again");
    };
    for domain in &evidence.domains {
        writeln!(
            out,
            "{}: {} held-out documents of {:.0} tokens on average",
            domain.domain, domain.n, domain.tokens.mean
        )?;
        writeln!(out, "  {:<14} {:<23} {:<21} NLL gap, nats/token", "arm", "KL, nats/token", "agreement")?;
        arms(out, [&domain.mapped, &domain.ends_only, &domain.no_prefix, &domain.source])?;
        let shares = [
            ("context's worth kept", &domain.worth_kept),
            ("gap recovered", &domain.gap_recovered),
            ("attention cosine", &domain.cosine_mean),
            ("… worst layer", &domain.cosine_worst_layer),
        ];
        for (name, share) in shares {
            match share {
                Some(share) => writeln!(out, "  {name:<21} {}", interval(share, 2))?,
                None => writeln!(out, "  {name:<21} – (nothing to compare with)")?,
            }
        }
        let speed = domain.reprefill_ms.mean / domain.handoff_ms.mean;
        writeln!(
            out,
            "  handoff {:.0} ms, re-prefill {:.0} ms: {speed:.1}x\n",
            domain.handoff_ms.mean, domain.reprefill_ms.mean
        )?;
    }
    if !evidence.own_text.is_empty() {
        writeln!(out, "on the documents' own next tokens, as the fit reported it (the outcomes are not kept):")?;
    }
    for text in &evidence.own_text {
        writeln!(out, "{}: {} documents", text.domain, text.n)?;
        arms(out, [&text.mapped, &text.ends_only, &text.no_prefix, &text.source])?;
    }
    Ok(())
}

/// The four arms, in the order of [`DocumentOutcome`].
fn arms(out: &mut impl Write, arms: [&ArmSummary; 4]) -> io::Result<()> {
    for (name, arm) in ["mapped", "ends only", "no prefix", "source (stay)"].into_iter().zip(arms) {
        let (kl, nll) = (interval(&arm.kl_nats, 3), interval(&arm.nll_gap_nats, 3));
        writeln!(out, "  {name:<14} {kl:<23} {:<21} {nll}", interval(&arm.agreement, 2))?;
    }
    Ok(())
}

pub(super) fn interval(i: &Interval, digits: usize) -> String {
    format!("{:.digits$} [{:.digits$}, {:.digits$}]", i.mean, i.low, i.high)
}

/// What the policy would answer to a request like the held-out documents: for each domain, and for a request that names none.
pub(super) struct Forecasts<'a>(Vec<(Option<&'a str>, Forecast)>);

impl<'a> Forecasts<'a> {
    /// `pair`: the mappers that the policy would choose between, called `name`.
    pub(super) fn new(name: &str, pair: &[&'a Card], policy: &Policy) -> Forecasts<'a> {
        let Some(evidence) = pair.iter().find_map(|card| card.evidence()) else { return Forecasts(Vec::new()) };
        let answer = |domain: Option<&'a str>| {
            let of_domain = |document: &&DocumentOutcome| domain.is_none_or(|domain| document.domain == domain);
            // Summed wide: lengths are whatever the file says.
            let tokens: Vec<u128> = evidence.documents.iter().filter(of_domain).map(|d| d.tokens as u128).collect();
            let mean = tokens.iter().sum::<u128>() / tokens.len().max(1) as u128;
            (domain, policy.forecast(&like(name, pair, evidence, domain, mean as usize)))
        };
        Forecasts(evidence.domains().into_iter().map(Some).chain([None]).map(answer).collect())
    }

    /// The answer to a request that names no domain.
    pub(super) fn of_any(&self) -> Option<&Forecast> {
        self.0.iter().find(|(domain, _)| domain.is_none()).map(|(_, forecast)| forecast)
    }

    /// A line for each.
    pub(super) fn table(&self, out: &mut impl Write) -> io::Result<()> {
        if !self.0.is_empty() {
            writeln!(out, "\nthe policy's answer to a request like these documents, where and as they were measured:")?;
        }
        for (domain, answer) in &self.0 {
            let label = domain.map_or("no domain named".to_owned(), |domain| format!("--domain {domain}"));
            writeln!(out, "  {label:<20} {}: {}", answer.decision, printable(&answer.reason.to_string()))?;
        }
        Ok(())
    }

    /// The same for scripts, named as in the record of a run.
    pub(super) fn json(&self) -> serde_json::Value {
        let one = |(domain, answer): &(Option<&str>, Forecast)| {
            serde_json::json!({
                "domain": domain,
                "decision": answer.decision,
                "reason": answer.reason.name(),
                "reason_text": answer.reason.to_string(),
                "predicted": answer.prediction,
            })
        };
        self.0.iter().map(one).collect()
    }
}

fn like<'a>(
    name: &'a str,
    pair: &[&'a Card],
    evidence: &'a Evidence,
    domain: Option<&'a str>,
    tokens: usize,
) -> Request<'a> {
    let candidate = |card: &&'a Card| {
        Some(Candidate { mapper: card.mapper(), claim: card.claim()?, evidence: card.evidence(), latency: None })
    };
    let candidates: Vec<Candidate<'a>> = pair.iter().filter_map(candidate).collect();
    let models = pair.first().map(|card| (card.identity().source.digest, card.identity().target.digest));
    let (source, target) = models.unwrap_or((Digest::of(b""), Digest::of(b"")));
    Request {
        pair: name,
        cache: CacheFacts { model: source, digest: Digest::of(b""), serial: 0, tokens, hops: 0 },
        target,
        domain,
        backend: &evidence.backend,
        precision: &evidence.precision,
        mismatch: None,
        candidates,
    }
}
