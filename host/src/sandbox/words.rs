//! Text that a guest wrote, on its way to a person.

use super::bindings::types;

/// Characters that are kept of a text.
const MOST: usize = 400;

/// The text as one line of printable characters: a guest writes no escape sequences into a terminal and no lines into a
/// log that look like someone else's.
pub(super) fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len().min(MOST));
    for (i, c) in text.trim().chars().enumerate() {
        if i == MOST {
            line.push('…');
            break;
        }
        let printable = !c.is_control() && !is_bidi_control(c);
        line.push(if printable { c } else { ' ' });
    }
    line.truncate(line.trim_end().len());
    line
}

/// Characters that reorder the text around them.
fn is_bidi_control(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Why a guest declined, in its own words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// This pair, whatever the settings.
    #[error("unsupported pair: {0}")]
    Unsupported(String),
    /// These settings.
    #[error("invalid settings: {0}; fit the pair anew, or mend its manifest")]
    Invalid(String),
    /// This device.
    #[error("beyond this device: {0}; try --device cpu")]
    Limit(String),
}

impl From<types::Refusal> for Refusal {
    fn from(refusal: types::Refusal) -> Refusal {
        match refusal {
            types::Refusal::Unsupported(why) => Refusal::Unsupported(one_line(&why)),
            types::Refusal::Invalid(why) => Refusal::Invalid(one_line(&why)),
            types::Refusal::Limit(why) => Refusal::Limit(one_line(&why)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{MOST, one_line};

    #[test]
    fn what_a_terminal_would_obey_is_gone() {
        assert_eq!(one_line("  a\nb\x1b[2Jc\u{202e}d\u{7f} "), "a b [2Jc d");
    }

    #[test]
    fn long_texts_are_cut_at_a_character() {
        let line = one_line(&"é".repeat(10_000));
        assert_eq!((line.chars().count(), line.ends_with('…')), (MOST + 1, true));
    }
}
