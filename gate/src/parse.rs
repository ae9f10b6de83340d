//! Texts that people write or copy (policies, manifests, evidence): where one is wrong, and how, in one line.

use serde::de::DeserializeOwned;

/// Why a text was not taken: place, field, what was found and what was expected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}{}: {message}", in_field(.field))]
pub struct ParseError {
    /// Line, counted from 1.
    pub line: usize,
    /// Column, counted from 1.
    pub column: usize,
    /// The field, dotted; empty where the text breaks off outside of any.
    pub field: String,
    /// What was found and what was expected.
    pub message: String,
}

fn in_field(field: &str) -> String {
    if field.is_empty() { String::new() } else { format!(", field `{field}`") }
}

impl ParseError {
    fn new(line: usize, column: usize, path: &serde_path_to_error::Path, message: &str) -> ParseError {
        // The path of what is wrong with the text itself is `.`; of a key that nobody can read, `?`.
        let field = path.to_string();
        let field = if field == "." { String::new() } else { printable(&field) };
        ParseError { line, column, field, message: printable(message) }
    }
}

/// Reads a TOML text.
///
/// # Errors
///
/// When it is no TOML, or not of this type.
pub fn from_toml<T: DeserializeOwned>(text: &str) -> Result<T, ParseError> {
    let wrong = |path: &serde_path_to_error::Path, error: &toml::de::Error| {
        let (line, column) = position(text, error.span().map_or(0, |span| span.start));
        ParseError::new(line, column, path, error.message())
    };
    let mut track = serde_path_to_error::Track::new();
    let parsed = match toml::Deserializer::parse(text) {
        Ok(document) => T::deserialize(serde_path_to_error::Deserializer::new(document, &mut track)),
        Err(error) => Err(error),
    };
    parsed.map_err(|error| wrong(&track.path(), &error))
}

/// Reads a JSON text.
///
/// # Errors
///
/// When it is no JSON, or not of this type.
pub fn from_json<T: DeserializeOwned>(text: &[u8]) -> Result<T, ParseError> {
    let mut document = serde_json::Deserializer::from_slice(text);
    let mut track = serde_path_to_error::Track::new();
    let parsed = T::deserialize(serde_path_to_error::Deserializer::new(&mut document, &mut track));
    parsed.and_then(|value| document.end().map(|()| value)).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        let message = error.to_string();
        // It says the place itself, at its end.
        let place = format!(" at line {line} column {column}");
        ParseError::new(line, column, &track.path(), message.strip_suffix(&place).unwrap_or(&message))
    })
}

/// Line and column of a byte, counted from 1.
fn position(text: &str, at: usize) -> (usize, usize) {
    let before = text.get(..at).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    (line, column)
}

/// The text in one line, with every character written out that a terminal would obey: control characters, and those that
/// reorder the text around them.
pub fn printable(text: &str) -> String {
    let obeyed = |c: char| {
        c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let mut printed = String::with_capacity(text.len());
    for c in text.chars() {
        if obeyed(c) {
            printed.extend(c.escape_default());
        } else {
            printed.push(c);
        }
    }
    printed
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Outer {
        inner: Vec<Inner>,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Inner {
        count: u32,
    }

    fn toml_error(text: &str) -> String {
        from_toml::<Outer>(text).unwrap_err().to_string()
    }

    fn json_error(text: &str) -> String {
        from_json::<Outer>(text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn what_is_right_is_read() {
        let outer = Outer { inner: vec![Inner { count: 3 }] };
        assert_eq!(from_toml::<Outer>("[[inner]]\ncount = 3").unwrap(), outer);
        assert_eq!(from_json::<Outer>(b"{\"inner\": [{\"count\": 3}]}\n").unwrap(), outer);
    }

    #[test]
    fn the_place_and_the_field_are_named() {
        let expected = "line 3, column 9, field `inner[0].count`: invalid type: string \"x\", expected u32";
        assert_eq!(toml_error("\n[[inner]]\ncount = \"x\""), expected);
        let expected = "line 2, column 13, field `inner[0].count`: invalid type: string \"x\", expected u32";
        assert_eq!(json_error("{\"inner\": [\n{\"count\": \"x\"}]}"), expected);
    }

    #[test]
    fn unknown_and_missing_fields() {
        let error = toml_error("[[inner]]\ncount = 3\ncuont = 3");
        assert!(error.starts_with("line 3, column 1, field `inner[0].cuont`: unknown field `cuont`"), "{error}");
        let error = json_error("{\"inner\": [{}]}");
        assert!(error.contains("field `inner[0]`: missing field `count`"), "{error}");
    }

    #[test]
    fn what_is_no_toml_or_json_at_all() {
        let error = toml_error("inner = 1\nand then\n");
        assert!(error.starts_with("line 2, column") && !error.contains('\n'), "{error}");
        for (text, place) in [("", "line 1, column 0"), ("{\"inner\": []} }", "line 1, column 15")] {
            let error = json_error(text);
            assert!(error.starts_with(place), "{error}");
        }
    }

    #[test]
    fn what_a_terminal_would_obey_is_written_out() {
        assert_eq!(printable("a\nb\u{1b}[2Jc\u{202e}d\u{9b}é"), r"a\nb\u{1b}[2Jc\u{202e}d\u{9b}é");
    }

    /// A file that was sent to somebody writes nothing into their terminal.
    #[test]
    fn control_characters_are_written_out() {
        let error = json_error("{\"\\u001b[2J\\n\": 1}");
        assert!(error.contains("\\u{1b}[2J\\n") && !error.contains('\u{1b}'), "{error}");
    }
}
