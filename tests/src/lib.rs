//! What the suites of kvmig share.
#![forbid(unsafe_code)]

pub mod golden;
