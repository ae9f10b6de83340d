//! A pair's settings, which reach a module as JSON.

use alloc::format;

use serde::de::DeserializeOwned;

use crate::Refusal;

/// Parses settings into a type that derives `serde::Deserialize`; let it carry `#[serde(deny_unknown_fields)]`, so that a
/// setting nobody reads is said rather than ignored.
///
/// # Errors
/// [`Refusal::Invalid`] with what the parser found where.
pub fn parse_settings<T: DeserializeOwned>(settings: &str) -> Result<T, Refusal> {
    serde_json::from_str(settings).map_err(|why| Refusal::Invalid(format!("settings: {why}")))
}
