//! `kvmig pair`: what pairs there are, what each is worth, whether it is whole, and away with it.

mod diagnostics;
mod list;
mod remove;
mod show;
mod verify;

use clap::Subcommand;

use super::Ending;

/// List, show, verify and remove pairs
///
/// `kvmig pair FOLDER` shows one, as `kvmig pair show FOLDER` does.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true, arg_required_else_help = true)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    show: show::Args,
}

#[derive(Debug, Subcommand)]
enum Command {
    List(list::Args),
    Show(show::Args),
    Verify(verify::Args),
    Remove(remove::Args),
}

pub(super) fn run(args: Args) -> anyhow::Result<Ending> {
    match args.command {
        Some(Command::List(args)) => list::run(args),
        Some(Command::Verify(args)) => verify::run(args),
        Some(Command::Remove(args)) => remove::run(args),
        Some(Command::Show(show)) => show::run(show),
        None => show::run(args.show),
    }
}
