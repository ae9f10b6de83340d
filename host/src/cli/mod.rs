//! Placeholder: cli.
