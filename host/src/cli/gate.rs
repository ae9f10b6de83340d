//! `kvmig gate`: the ledger, and settling tickets of engines outside this process.

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, bail};
use clap::Subcommand;
use kvmig_gate::{
    GateError, LedgerError, LedgerView, Policy, Quality, State, Ticket, TicketFilter, TicketRow,
    parse::{from_json, printable},
};

use super::{
    Ending,
    ledger::{LedgerArgs, PolicyArgs},
    progress::span,
};

/// Look into the gate's ledger, or settle a ticket
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Decisions and what came of them, newest first; reads alone, and makes no ledger
    Log {
        #[command(flatten)]
        ledger: LedgerArgs,
        /// Only this pair
        #[arg(long, value_name = "NAME")]
        pair: Option<String>,
        /// At most so many
        #[arg(short = 'n', long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
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
    /// Print the policy in force, as TOML: a start for one of your own. With --policy: check that file, and print it with every
    /// default filled in
    Policy {
        #[command(flatten)]
        policy: PolicyArgs,
    },
}

pub(super) fn run(args: Args) -> anyhow::Result<Ending> {
    let mut out = io::stdout().lock();
    match args.command {
        Command::Log { ledger, pair, limit, json } => log(&mut out, &ledger, pair, limit, json)?,
        Command::Show { ticket, ledger } => {
            let Some(view) = ledger.look()? else { bail!("ticket {ticket}: {}", ledger.nothing()?) };
            serde_json::to_writer_pretty(&mut out, &view.ticket(&ticket)?)?;
            writeln!(out)?;
        }
        Command::Settle { ticket, realised, ledger } => settle(&mut out, &ticket, &realised, &ledger)?,
        Command::Policy { policy } => write!(out, "{}", toml::to_string(policy.load()?.settings())?)?,
    }
    Ok(Ending::Done)
}

fn log(out: &mut impl Write, ledger: &LedgerArgs, pair: Option<String>, limit: u32, json: bool) -> anyhow::Result<()> {
    let view = ledger.look()?;
    let filter = TicketFilter { pair, limit: Some(limit), ..TicketFilter::default() };
    let rows = view.as_ref().map(|view| view.tickets(&filter)).transpose()?.unwrap_or_default();
    if json {
        serde_json::to_writer_pretty(&mut *out, &rows)?;
        writeln!(out)?;
    } else if view.is_none() {
        writeln!(out, "{}", ledger.nothing()?)?;
    } else if rows.is_empty() {
        writeln!(out, "no tickets{}", filter.pair.map(|pair| format!(" of pair {pair}")).unwrap_or_default())?;
    } else {
        table(out, &rows)?;
        in_flight(out, &rows)?;
    }
    Ok(())
}

fn table(out: &mut impl Write, rows: &[TicketRow]) -> io::Result<()> {
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
        writeln!(
            out,
            "{:<22} {:<10} {:<10} {:<10} {:>7} {:<5} {}",
            row.ticket.as_str(),
            printable(&row.decision),
            row.state.name(),
            printable(row.mapper.as_deref().unwrap_or("-")),
            row.tokens,
            miss,
            printable(&row.reason)
        )?;
    }
    Ok(())
}

/// What to do about tickets that wait for their end.
fn in_flight(out: &mut impl Write, rows: &[TicketRow]) -> io::Result<()> {
    let waiting: Vec<&TicketRow> = rows.iter().filter(|row| row.state == State::InFlight).collect();
    if waiting.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nin flight: settle with `kvmig gate settle TICKET --realised FILE` before the lease ends")?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    for row in waiting {
        let left = row.lease_ms.map_or(0.0, |ms| ms as f64 / 1e3) - now;
        let lease = match left > 0.0 {
            true => format!("its lease ends in {}", span(left)),
            false => format!("its lease ended {} ago: it will be written down as abandoned", span(-left)),
        };
        writeln!(out, "{:<22} {lease}", row.ticket.as_str())?;
    }
    Ok(())
}

fn settle(out: &mut impl Write, ticket: &Ticket, file: &Path, ledger: &LedgerArgs) -> anyhow::Result<()> {
    let named = || format!("--realised {}", file.display());
    let bytes = std::fs::read(file).with_context(named)?;
    let realised: Quality = from_json(&bytes).with_context(named)?;
    match LedgerView::open(&ledger.path()?) {
        Ok(None) => bail!("ticket {ticket}: {}", ledger.nothing()?),
        // Opened to be written, it is brought up to date.
        Ok(Some(_)) | Err(LedgerError::Older { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    // What the promise was is in the ticket; no policy decides here.
    let gate = ledger.open_gate(Policy::default())?;
    let settled = match gate.settle_ticket(ticket, &realised) {
        Err(error @ GateError::Impossible { .. }) => return Err(error).with_context(named),
        other => other?,
    };
    let verdict = match settled.miss {
        Some(true) => "a miss: worse than its bound",
        Some(false) => "within its bound",
        None => "a trial, nothing was promised",
    };
    writeln!(out, "{ticket} settled: {verdict}")?;
    Ok(())
}
