//! Placeholder: fit.
