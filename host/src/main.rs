//! The `kvmig` program.
fn main() {}
