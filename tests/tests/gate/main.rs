//! The gate: what it admits, what it refuses, and what it remembers.

mod crash;
mod decisions;
mod ledger;
mod permits;
mod policy;

use std::path::PathBuf;

use kvmig_gate::{Decision, Gate, Live, Loaded, Permit, Policy, PolicySettings, Redeemed, Request};
use tempfile::TempDir;

/// A gate with a ledger of its own.
struct Scene {
    gate: Gate,
    path: PathBuf,
    _folder: TempDir,
}

fn scene() -> Scene {
    scene_with(PolicySettings::default())
}

fn scene_with(settings: PolicySettings) -> Scene {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.sqlite");
    let gate = Gate::open(Policy::try_from(settings).unwrap(), &path).unwrap();
    Scene { gate, path, _folder: folder }
}

fn permit(gate: &Gate, request: &Request<'_>) -> Permit<Live> {
    match gate.decide(request).unwrap() {
        Decision::Migrate { permit, .. } => permit,
        refused => panic!("refused: {}", refused.reason()),
    }
}

fn redeem<'a>(gate: &Gate, request: &Request<'_>, loaded: &'a Loaded) -> Redeemed<'a, Live> {
    permit(gate, request).redeem(loaded, request.cache, request.target).unwrap()
}
