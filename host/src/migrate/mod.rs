//! Placeholder: migrate.
