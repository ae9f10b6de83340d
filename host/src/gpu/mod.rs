//! Placeholder: gpu.
