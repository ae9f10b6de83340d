//! Placeholder: pair.
