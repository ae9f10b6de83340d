//! Placeholder: engine.
