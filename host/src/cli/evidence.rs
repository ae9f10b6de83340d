//! A pair's evidence as a table.

use std::io::{self, Write};

use crate::{measure::statistics::Interval, pair::Pair};

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
        writeln!(out, "  {:<14} {:<23} {:<21} {:<23}", "arm", "KL, nats/token", "agreement", "NLL gap, nats/token")?;
        let arms = [
            ("mapped", &domain.mapped),
            ("ends only", &domain.ends_only),
            ("no prefix", &domain.no_prefix),
            ("source (stay)", &domain.source),
        ];
        for (name, arm) in arms {
            let (kl, nll) = (interval(&arm.kl_nats, 3), interval(&arm.nll_gap_nats, 3));
            writeln!(out, "  {name:<14} {kl:<23} {:<21} {nll:<23}", interval(&arm.agreement, 2))?;
        }
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
    for text in &evidence.own_text {
        let arms = [
            ("mapped", &text.mapped),
            ("ends only", &text.ends_only),
            ("no prefix", &text.no_prefix),
            ("source", &text.source),
        ];
        writeln!(out, "{} on the documents' own next tokens: {} documents", text.domain, text.n)?;
        for (name, arm) in arms {
            let (kl, nll) = (interval(&arm.kl_nats, 3), interval(&arm.nll_gap_nats, 3));
            writeln!(out, "  {name:<14} {kl:<23} {:<21} {nll:<23}", interval(&arm.agreement, 2))?;
        }
    }
    Ok(())
}

fn interval(i: &Interval, digits: usize) -> String {
    format!("{:.digits$} [{:.digits$}, {:.digits$}]", i.mean, i.low, i.high)
}
