//! Timings of kvmig; everything is in `benches/`.
#![forbid(unsafe_code)]
