//! Names of decisions.

use std::{
    fmt,
    hash::{BuildHasher as _, RandomState},
    str::FromStr,
};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Lower-case Crockford base 32: no `i`, `l`, `o`, `u`, and in the order of ASCII.
const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
const TIME_DIGITS: usize = 9;
const RANDOM_DIGITS: usize = 7;

/// The name of one decision: 9 digits of time, a hyphen, 7 random digits, in base 32. Tickets sort by the millisecond they
/// were issued in.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(String);

impl Ticket {
    /// A fresh ticket; `now` in milliseconds since 1970.
    ///
    /// 45 bits of time last until the year 3084. 35 random bits are not proof against a collision in one millisecond; the
    /// ledger's primary key is, and asks for another.
    pub(crate) fn issue(now: u64) -> Ticket {
        // The standard library seeds every hasher from the operating system.
        let random = RandomState::new().hash_one(now);
        let mut text = String::with_capacity(TIME_DIGITS + 1 + RANDOM_DIGITS);
        push_digits(&mut text, now, TIME_DIGITS);
        text.push('-');
        push_digits(&mut text, random, RANDOM_DIGITS);
        Ticket(text)
    }

    /// The ticket's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

fn push_digits(text: &mut String, value: u64, digits: usize) {
    for place in (0..digits).rev() {
        text.push(ALPHABET[(value >> (5 * place)) as usize % 32] as char);
    }
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ticket({})", self.0)
    }
}

/// A text that is not a ticket.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not a ticket: expected something like `01jdw3k8x-7q2m9ab`, as printed by a run")]
pub struct ParseTicketError(String);

impl FromStr for Ticket {
    type Err = ParseTicketError;

    fn from_str(s: &str) -> Result<Ticket, ParseTicketError> {
        let well_formed = s.len() == TIME_DIGITS + 1 + RANDOM_DIGITS
            && s.bytes().enumerate().all(|(i, b)| if i == TIME_DIGITS { b == b'-' } else { ALPHABET.contains(&b) });
        if well_formed { Ok(Ticket(s.to_owned())) } else { Err(ParseTicketError(s.to_owned())) }
    }
}

impl Serialize for Ticket {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Ticket {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Ticket, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tickets_sort_by_time_and_read_back() {
        let early = Ticket::issue(1_800_000_000_000);
        let late = Ticket::issue(1_800_000_000_001);
        assert!(early < late);
        assert_ne!(early, Ticket::issue(1_800_000_000_000), "the same millisecond gives two tickets");
        assert_eq!(early.to_string().parse::<Ticket>().unwrap(), early);
        for wrong in ["", "01jdw3k8x7q2m9ab", "01JDW3K8X-7Q2M9AB", "01jdw3k8x-7q2m9abc", "01jdw3k8x-7q2m9aé"] {
            assert!(wrong.parse::<Ticket>().is_err(), "{wrong}");
        }
    }
}
