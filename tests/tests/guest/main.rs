//! Guests in the sandbox: what a good one records, and that no bad one gets further than its own error.

mod bench;
mod head_matched;
mod hostile;
mod load;
mod mlp;
mod ridge;
mod shape;
