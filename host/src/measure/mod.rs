//! Placeholder: measure.
