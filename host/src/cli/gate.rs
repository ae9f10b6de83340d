//! `kvmig gate`: the ledger, and settling tickets of engines outside this process.

use std::{io::Write, path::PathBuf};

use anyhow::Context;
use clap::Subcommand;
use kvmig_gate::{Gate, Policy, Quality, Ticket, TicketFilter, TicketRow};

use super::{Ending, models::LedgerArgs};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Decisions and what came of them, newest first
    Log {
        #[command(flatten)]
        ledger: LedgerArgs,
        /// Only this pair
        #[arg(long, value_name = "NAME")]
        pair: Option<String>,
        /// At most so many
        #[arg(short = 'n', long, value_name = "N", default_value_t = 20)]
        limit: u32,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// One ticket, whole
    Show {
        /// The ticket
        ticket: Ticket,
        #[command(flatten)]
        ledger: LedgerArgs,
    },
    /// Write down the realised quality of a ticket in flight, measured by an engine outside this process
    Settle {
        /// The ticket
        ticket: Ticket,
        /// The realised quality: a JSON file {"agreement", "kl_nats", "nll_gap_nats", "n"}
        #[arg(long, value_name = "FILE")]
        realised: PathBuf,
        #[command(flatten)]
        ledger: LedgerArgs,
    },
    /// Print the policy in force, as TOML: a start for one of your own
    Policy {
        /// Check this file instead and print it with every default filled in
        #[arg(long, value_name = "FILE")]
        policy: Option<PathBuf>,
    },
}

pub(super) fn run(args: Args) -> anyhow::Result<Ending> {
    let mut out = std::io::stdout().lock();
    match args.command {
        Command::Log { ledger, pair, limit, json } => {
            let gate = super::run::open_gate(Policy::default(), &ledger.path()?)?;
            let filter = TicketFilter { pair, limit: Some(limit), ..TicketFilter::default() };
            let rows = gate.tickets(&filter)?;
            if json {
                serde_json::to_writer_pretty(&mut out, &rows)?;
                writeln!(out)?;
            } else {
                log(&mut out, &rows)?;
            }
        }
        Command::Show { ticket, ledger } => {
            let gate = super::run::open_gate(Policy::default(), &ledger.path()?)?;
            serde_json::to_writer_pretty(&mut out, &gate.ticket(&ticket)?)?;
            writeln!(out)?;
        }
        Command::Settle { ticket, realised, ledger } => settle(&mut out, &ticket, &realised, &ledger)?,
        Command::Policy { policy } => {
            let policy = super::run::policy(policy.as_deref())?;
            write!(out, "{}", toml::to_string(policy.settings())?)?;
        }
    }
    Ok(Ending::Done)
}

fn log(out: &mut impl Write, rows: &[TicketRow]) -> anyhow::Result<()> {
    if rows.is_empty() {
        writeln!(out, "no tickets")?;
        return Ok(());
    }
    writeln!(
        out,
        "{:<22} {:<10} {:<10} {:<10} {:>7} {:<5} reason",
        "ticket", "decision", "state", "mapper", "tokens", "miss"
    )?;
    for row in rows {
        let miss = match row.miss {
            Some(true) => "yes",
            Some(false) => "no",
            None => "-",
        };
        let mapper = row.mapper.as_deref().unwrap_or("-");
        writeln!(
            out,
            "{:<22} {:<10} {:<10} {:<10} {:>7} {:<5} {}",
            row.ticket.as_str(),
            row.decision,
            row.state.name(),
            mapper,
            row.tokens,
            miss,
            row.reason
        )?;
    }
    Ok(())
}

fn settle(out: &mut impl Write, ticket: &Ticket, file: &PathBuf, ledger: &LedgerArgs) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(file).with_context(|| format!("{}", file.display()))?;
    let realised: Quality = serde_json::from_str(&text).with_context(|| {
        format!("{}: expected {{\"agreement\", \"kl_nats\", \"nll_gap_nats\", \"n\"}}", file.display())
    })?;
    let gate: Gate = super::run::open_gate(Policy::default(), &ledger.path()?)?;
    let settled = gate.settle_ticket(ticket, &realised)?;
    let verdict = match settled.miss {
        Some(true) => "a miss: worse than its bound",
        Some(false) => "within its bound",
        None => "a trial, nothing was promised",
    };
    writeln!(out, "{ticket} settled: {verdict}")?;
    Ok(())
}
