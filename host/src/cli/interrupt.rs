//! Ctrl-C: once, and a command that runs for long ends at its next safe place, with what it did written down; twice, and it
//! ends at once.
//!
//! SIGTERM and SIGHUP are left as the system, or `nohup`, set them: a long fit outlives its terminal if it was told to. Ended by
//! one of them, a process leaves nothing half-written either: a fit goes on from what it kept, and the ledger gives an open
//! ticket up once its lease has run out.

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

static STOP: AtomicBool = AtomicBool::new(false);

/// Takes Ctrl-C from now on. Files are written whole or not at all, whenever the process ends; what remains to be done at the
/// second time is to leave no ticket of `gate` in flight.
pub(super) fn listen(gate: &Arc<Gate>) {
    let gate = Arc::clone(gate);
    // Fails only where a handler is installed already, as in a process that runs several commands; that one serves.
    let _ = ctrlc::set_handler(move || {
        if STOP.swap(true, Ordering::Relaxed) {
            // Of a ledger that can't be written nobody would read here; it finds the ticket by its lease.
            let _ = gate.abandon_open("interrupted");
            process::exit(EXIT_CODE);
        }
    });
}

/// Whether it was pressed.
pub(super) fn came() -> bool {
    STOP.load(Ordering::Relaxed)
}
