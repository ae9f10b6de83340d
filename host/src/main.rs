//! kvmig
fn main() {}
