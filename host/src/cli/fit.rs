//! `kvmig fit`. Placeholder.
use super::Ending;

/// Placeholder.
#[derive(Debug, clap::Args)]
pub(super) struct Args {}

pub(super) fn run(_: Args) -> anyhow::Result<Ending> {
    anyhow::bail!("not yet")
}
