//! Ctrl-C: once, and a command ends as soon as it can do so in order; twice, and it ends at once.

use std::{
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use kvmig_gate::Gate;

/// What shells report of a program that SIGINT ended.
const EXIT_CODE: i32 = 130;

static ASKED: AtomicBool = AtomicBool::new(false);

/// Whether the command was asked to end.
pub(super) fn asked() -> bool {
    ASKED.load(Ordering::Relaxed)
}

/// Listens from now on. Files are written whole or not at all, whenever the process ends; what remains to be done at the second
/// time is to leave no ticket in flight.
pub(super) fn watch(gate: &Arc<Gate>) {
    let gate = Arc::clone(gate);
    // Fails only where a handler is installed already, as in a process that runs several commands; that one serves.
    let _ = ctrlc::set_handler(move || {
        if ASKED.swap(true, Ordering::Relaxed) {
            // Of a ledger that can't be written nobody would read here; it finds the ticket by its lease.
            let _ = gate.abandon_open("interrupted");
            process::exit(EXIT_CODE);
        }
    });
}
