//! What `kvmig run` says to a person: the report on stderr, the answer on stdout.

use std::io::{self, Write};

use kvmig_gate::{Quality, parse::printable};

use crate::migrate::{Ask, Offer, Record, Setup};

use super::say;

/// Prints a run as it goes.
pub(super) struct Report {
    head: Vec<String>,
    several: bool,
    shown: bool,
    spoke: bool,
}

impl Report {
    /// A report on `ask`; a silent one where a record is printed instead.
    pub(super) fn new(setup: &Setup<'_>, ask: &Ask<'_>, shown: bool) -> Report {
        let device = setup.store.device().info();
        // With several mappers to choose from, the decision says which.
        let mapper = |offer: &Offer| format!("{}, k = {}", offer.card().mapper(), offer.card().manifest().fit.k);
        let mappers: Vec<String> = setup.offers.iter().map(mapper).collect();
        let head = vec![
            line("models", &format!("{} → {}", setup.source.name(), setup.target.name())),
            line("pair", &format!("{}: {}", setup.pair, mappers.join("; "))),
            line("device", &format!("{} ({}, {})", device.name, device.backend, device.driver)),
            line("prompt", &format!("{} tokens", grouped(ask.tokens.len()))),
        ];
        Report { head, several: mappers.len() > 1, shown, spoke: false }
    }

    /// The decision and its cost, when the first token is there.
    pub(super) fn ready(&mut self, record: &Record) {
        if !self.shown {
            return;
        }
        let mut lines = std::mem::take(&mut self.head);
        let by = if self.several { format!(" ({})", record.mapper) } else { String::new() };
        lines.push(line("decision", &format!("{}{by}: {}", record.decision, record.reason_text)));
        let t = &record.tokens;
        if record.decision == "migrate" {
            let share = 100.0 * t.mapped as f64 / t.prompt as f64;
            let text = format!(
                "{} mapped ({share:.0} %), {} + {} native (head + tail)",
                grouped(t.mapped),
                t.native_head,
                t.native_tail
            );
            lines.push(line("tokens", &text));
        }
        let ms = &record.ms;
        lines.push(line("source", &format!("prefill {}", duration(ms.source_prefill))));
        if record.decision == "migrate" {
            let stages = [
                ("gate", ms.gate),
                ("weights", ms.weights),
                ("module", ms.module),
                ("upload", ms.upload),
                ("map", ms.map),
                ("readback", ms.readback),
                ("install", ms.install),
                ("native layers", ms.native_layers),
                ("native ends", ms.native_ends),
                ("other", ms.other),
            ];
            // Most pairs have no native layers.
            let stages = stages.iter().filter(|(name, ms)| *name != "native layers" || *ms > 0.0);
            let parts: Vec<String> = stages.map(|(name, ms)| format!("{name} {ms:.1}")).collect();
            lines.push(line("handoff", &format!("{} = {} ms", duration(ms.handoff), parts.join(" + "))));
        } else if let Some(reprefill) = ms.reprefill {
            lines.push(line("target", &format!("ordinary prefill {}", duration(reprefill))));
        }
        say(&format!("{}\n\n", lines.join("\n")));
    }

    /// A piece of the answer.
    pub(super) fn text(&mut self, text: &str) -> io::Result<()> {
        if !self.shown || text.is_empty() {
            return Ok(());
        }
        self.spoke = true;
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()
    }

    /// The answer is complete, the audit begins.
    pub(super) fn auditing(&mut self) -> io::Result<()> {
        self.end_answer()
    }

    fn end_answer(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.spoke) { writeln!(io::stdout().lock()) } else { Ok(()) }
    }

    /// The end: what an audit found, or that there was nothing to audit.
    pub(super) fn done(&mut self, record: &Record, nothing_to_audit: bool) -> io::Result<()> {
        self.end_answer()?;
        let mut lines = Vec::new();
        if let (Some(realised), Some(reprefill)) = (&record.realised, record.ms.reprefill) {
            lines.push(String::new());
            lines.push(match &record.trial {
                Some(ticket) => line("audit", &format!("what was refused, tried and not served: ticket {ticket}")),
                None => {
                    let text = format!(
                        "{} for the prefill it replaced: {:.1}x the handoff's time (limit by FLOPs {:.1}x)",
                        duration(reprefill),
                        reprefill / record.ms.handoff,
                        record.flops.limit
                    );
                    line("re-prefill", &text)
                }
            });
            lines.push(line("quality", &quality(realised)));
            if let Some(predicted) = &record.predicted {
                let verdict = match record.miss {
                    Some(true) => "MISSED",
                    Some(false) => "held",
                    None => "not judged",
                };
                let text = format!(
                    "{} {:.3} expected, bound {:.3} {verdict}, floor {:.3} (n = {})",
                    predicted.metric, predicted.value, predicted.bound, predicted.floor, predicted.n
                );
                lines.push(line("predicted", &text));
            }
        }
        if nothing_to_audit {
            lines.push(line("audit", "nothing was mapped, nothing to audit"));
        }
        lines.push(line("ticket", &record.ticket));
        say(&(lines.join("\n") + "\n"));
        Ok(())
    }
}

fn line(label: &str, text: &str) -> String {
    format!("{label:<11} {}", printable(text))
}

fn quality(q: &Quality) -> String {
    let mut text = format!(
        "KL {:.3} nats/token, agreement {:.2}, NLL gap {:+.3} nats/token over {} tokens of the target's own continuation",
        q.kl_nats, q.agreement, q.nll_gap_nats, q.n
    );
    if let (Some(mean), Some(worst)) = (q.cosine_mean, q.cosine_worst_layer) {
        text.push_str(&format!("; attention cosine {mean:.3}, worst layer {worst:.3}"));
    }
    text
}

fn duration(ms: f64) -> String {
    if ms >= 10_000.0 { format!("{:.1} s", ms / 1e3) } else { format!("{ms:.1} ms") }
}

/// `1529` as `1,529`.
fn grouped(n: usize) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
