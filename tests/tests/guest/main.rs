//! Guests in the sandbox: what a good one records, and that no bad one gets further than its own error.

mod bench;
mod hostile;
mod load;
mod ridge;
mod shape;
