//! Ctrl-C: a command that runs for long ends at its next safe place, with what it did written down.

use std::sync::atomic::{AtomicBool, Ordering};

static STOP: AtomicBool = AtomicBool::new(false);

/// Takes Ctrl-C from now on.
pub(super) fn listen() {
    // Fails only where a handler is installed already, as in a process that runs several commands; that one serves.
    let _ = ctrlc::set_handler(|| STOP.store(true, Ordering::Relaxed));
}

/// Whether it was pressed.
pub(super) fn came() -> bool {
    STOP.load(Ordering::Relaxed)
}
