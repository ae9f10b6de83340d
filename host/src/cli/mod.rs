//! The command line: parse, then resolve, then act. One file a command.

mod bytes;
mod conform;
mod devices;
mod eval;
mod evidence;
mod fit;
mod gate;
mod interrupt;
mod ledger;
mod models;
mod pair;
mod progress;
mod report;
mod run;

use std::{io::Write, process::ExitCode};

use clap::{Parser, Subcommand};
use kvmig_gate::parse::printable;

/// Hands a conversation from one language model to its sibling by mapping its KV cache.
///
/// `kvmig run` without arguments shows it on a small family of models that comes with the program. For your own models: `kvmig
/// fit` makes a pair folder from some text, `kvmig run --pair` uses it.
///
/// Exit codes: 0 done, whatever the gate decided (`run` gives an answer also where it re-prefills or stays on the source);
/// 1 done, and the answer is no: `run --require-migration` migrated nothing, a case of `conform` failed, `pair verify` found something wrong; 2 an error, and
/// nothing is left half-written; 130 interrupted twice.
#[derive(Debug, Parser)]
#[command(name = "kvmig", version, propagate_version = true, subcommand_required = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(Box<run::Args>),
    Fit(Box<fit::Args>),
    Eval(Box<eval::Args>),
    Pair(Box<pair::Args>),
    Devices(devices::Args),
    Conform(conform::Args),
    Gate(gate::Args),
}

/// How a command ended, short of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// What was asked for was done.
    Done,
    /// It was done, and the answer is no: the gate refused under `--require-migration`, a conformance case failed, a pair is not whole.
    Negative,
}

/// Runs the program with the process's arguments.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let ended = match cli.command {
        Command::Run(args) => run::run(*args),
        Command::Fit(args) => fit::run(*args),
        Command::Eval(args) => eval::run(*args),
        Command::Pair(args) => pair::run(*args),
        Command::Devices(args) => devices::run(args),
        Command::Conform(args) => conform::run(args),
        Command::Gate(args) => gate::run(args),
    };
    match ended {
        Ok(Ending::Done) => ExitCode::SUCCESS,
        Ok(Ending::Negative) => ExitCode::from(1),
        Err(error) => {
            // A reader that closed standard output has had enough; that is no error of ours.
            if is_broken_pipe(&error) {
                return ExitCode::SUCCESS;
            }
            say(&format!("error: {}\n", printable(&one_message(&error))));
            ExitCode::from(2)
        }
    }
}

/// Writes to standard error, as it is. Nobody reads it where it is closed, and what was asked for is no worse for that.
fn say(text: &str) {
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

/// Says what a person should know and what stops nothing.
fn warn(text: &str) {
    say(&format!("warning: {}\n", printable(text)));
}

/// Whether standard output was closed: the one pipe whose errors get this far. Everything else that is written is a file, or
/// goes through [`say`].
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let kind = |cause: &(dyn std::error::Error + 'static)| match cause.downcast_ref::<serde_json::Error>() {
        Some(json) => json.io_error_kind(),
        None => cause.downcast_ref::<std::io::Error>().map(std::io::Error::kind),
    };
    error.chain().filter_map(kind).any(|kind| kind == std::io::ErrorKind::BrokenPipe)
}

/// An error with its causes, each said once: most of ours tell their cause themselves.
fn one_message(error: &anyhow::Error) -> String {
    error
        .chain()
        .skip(1)
        .map(ToString::to_string)
        .fold(error.to_string(), |text, cause| if text.contains(&cause) { text } else { format!("{text}: {cause}") })
}
