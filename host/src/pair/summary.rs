//! The evidence's summary in the manifest, held against the documents it summarises.

use serde::Serialize;
use serde_json::Value;

use super::EvidenceRecord;
use crate::measure::summary::summarise;

/// How far two roundings of one figure may lie apart, relative to the larger: sums of a few thousand terms.
const ROUNDING: f64 = 1e-9;

/// The first figure that is not what the documents give: its field, what was found and what was expected.
///
/// The intervals are made again with [`statistics`](crate::measure::statistics)' number of resamples and seed: whoever changes
/// either counts [`FORMAT`](super::FORMAT) up.
pub(super) fn lie(record: &EvidenceRecord, evidence: &kvmig_gate::Evidence) -> Option<(String, String, String)> {
    let (found, expected) = (json(&record.domains), json(&summarise(&evidence.documents)));
    difference("evidence.domains", &found, &expected).or_else(|| own_text(record))
}

/// The documents' outcomes on their own text are not kept, so that only their number can be told to be wrong.
fn own_text(record: &EvidenceRecord) -> Option<(String, String, String)> {
    record.own_text.iter().enumerate().find_map(|(i, text)| {
        let field = |name: &str| format!("evidence.own_text[{i}].{name}");
        let Some(domain) = record.domains.iter().find(|domain| domain.domain == text.domain) else {
            let known: Vec<&str> = record.domains.iter().map(|domain| domain.domain.as_str()).collect();
            return Some((field("domain"), text.domain.clone(), format!("one of {}", known.join(", "))));
        };
        (text.n > domain.n).then(|| (field("n"), text.n.to_string(), format!("at most {}", domain.n)))
    })
}

fn json<T: Serialize>(value: &T) -> Value {
    serde_json::to_value(value).expect("a summary holds strings and numbers only")
}

fn difference(field: &str, found: &Value, expected: &Value) -> Option<(String, String, String)> {
    match (found, expected) {
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            a.iter().zip(b).enumerate().find_map(|(i, (a, b))| difference(&format!("{field}[{i}]"), a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            let inner = |name: &str| format!("{field}.{name}");
            let other = b.iter().find_map(|(name, b)| difference(&inner(name), a.get(name).unwrap_or(&Value::Null), b));
            other.or_else(|| {
                let (name, more) = a.iter().find(|(name, _)| !b.contains_key(*name))?;
                Some((inner(name), more.to_string(), "nothing".to_owned()))
            })
        }
        (Value::Number(a), Value::Number(b)) => {
            let (x, y) = (a.as_f64().unwrap_or(f64::NAN), b.as_f64().unwrap_or(f64::NAN));
            let close = (x - y).abs() <= ROUNDING * x.abs().max(y.abs());
            (!close).then(|| (field.to_owned(), a.to_string(), b.to_string()))
        }
        (Value::Array(a), Value::Array(b)) => {
            Some((field.to_owned(), format!("{} entries", a.len()), format!("{} entries", b.len())))
        }
        (a, b) => (a != b).then(|| (field.to_owned(), shown(a), shown(b))),
    }
}

fn shown(value: &Value) -> String {
    if value.is_null() { "nothing".to_owned() } else { value.to_string() }
}
