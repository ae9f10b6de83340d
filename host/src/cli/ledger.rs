//! Options that open a gate, or look into its ledger.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use kvmig_gate::{Gate, LedgerView, Policy};

/// By what the gate decides.
#[derive(Clone, Debug, Args)]
pub(super) struct PolicyArgs {
    /// The gate's policy, a TOML file; see `kvmig gate policy` [default: the shipped one]
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
}

impl PolicyArgs {
    /// The policy of the file, or the shipped one.
    pub(super) fn load(&self) -> anyhow::Result<Policy> {
        Ok(match &self.policy {
            Some(path) => Policy::load(path)?,
            None => Policy::default(),
        })
    }
}

/// Where the ledger is.
#[derive(Clone, Debug, Args)]
pub(super) struct LedgerArgs {
    /// The gate's ledger [default: kvmig/ledger.sqlite in the platform's data folder]
    #[arg(long, value_name = "FILE")]
    ledger: Option<PathBuf>,
}

impl LedgerArgs {
    /// The file, whether it is there or not.
    pub(super) fn path(&self) -> anyhow::Result<PathBuf> {
        if let Some(path) = &self.ledger {
            return Ok(path.clone());
        }
        let dirs = directories::ProjectDirs::from("", "", "kvmig")
            .context("this platform names no data folder (is HOME set?): give --ledger FILE")?;
        Ok(dirs.data_dir().join("ledger.sqlite"))
    }

    /// The one place where a gate is opened; the ledger is made where it is missing.
    pub(super) fn open_gate(&self, policy: Policy) -> anyhow::Result<Gate> {
        Ok(Gate::open(policy, &self.path()?)?)
    }

    /// Looks into the ledger; `None` where no decision was recorded yet.
    pub(super) fn look(&self) -> anyhow::Result<Option<LedgerView>> {
        Ok(LedgerView::open(&self.path()?)?)
    }

    /// What to say where [`LedgerArgs::look`] finds nothing.
    pub(super) fn nothing(&self) -> anyhow::Result<String> {
        Ok(format!("no decision was recorded yet at {}", self.path()?.display()))
    }
}
