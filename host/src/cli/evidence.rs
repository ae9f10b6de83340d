//! A pair's evidence as a table, and what a policy makes of it.

use std::io::{self, Write};

use kvmig_gate::{CacheFacts, Candidate, Digest, DocumentOutcome, Evidence, Policy, Request, parse::printable};

use crate::{
    measure::{statistics::Interval, summary::ArmSummary},
    pair::Pair,
};

/// Every arm side by side, per domain: means over documents with their 95 % bootstrap intervals.
pub(super) fn evidence_table(out: &mut impl Write, pair: &Pair) -> io::Result<()> {
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

fn interval(i: &Interval, digits: usize) -> String {
    format!("{:.digits$} [{:.digits$}, {:.digits$}]", i.mean, i.low, i.high)
}

/// What the policy would say to a request like the held-out documents: a line for each domain, and one for a request that names
/// none.
pub(super) fn forecast(out: &mut impl Write, pair: &Pair, policy: &Policy) -> io::Result<()> {
    let Some(evidence) = pair.evidence() else { return Ok(()) };
    let mut domains: Vec<&str> = Vec::new();
    for document in &evidence.documents {
        if !domains.contains(&document.domain.as_str()) {
            domains.push(&document.domain);
        }
    }
    writeln!(
        out,
        "\nthe policy's answer to a request like these documents, on {} with {} models:",
        evidence.backend, evidence.precision
    )?;
    for domain in domains.into_iter().map(Some).chain([None]) {
        let of_domain = |document: &&DocumentOutcome| domain.is_none_or(|domain| document.domain == domain);
        let tokens: Vec<usize> = evidence.documents.iter().filter(of_domain).map(|document| document.tokens).collect();
        let mean = tokens.iter().sum::<usize>() / tokens.len().max(1);
        let answer = policy.forecast(&like(pair, evidence, domain, mean));
        let label = domain.map_or("no domain named".to_owned(), |domain| format!("--domain {domain}"));
        writeln!(out, "  {label:<20} {}: {}", answer.decision, printable(&answer.reason.to_string()))?;
    }
    Ok(())
}

fn like<'a>(pair: &'a Pair, evidence: &'a Evidence, domain: Option<&'a str>, tokens: usize) -> Request<'a> {
    Request {
        pair: pair.name(),
        cache: CacheFacts { model: pair.source_digest(), digest: Digest::of(b""), serial: 0, tokens, hops: 0 },
        target: pair.target_digest(),
        domain,
        backend: &evidence.backend,
        precision: &evidence.precision,
        mismatch: None,
        candidates: vec![Candidate {
            mapper: pair.mapper(),
            loaded: pair.loaded(),
            evidence: Some(evidence),
            latency: None,
        }],
    }
}
