//! Recordings that were made before.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use kvmig_gate::Digest;

use super::Recording;

/// Recordings kept: a pair needs two (chunk and remainder) for each length of remainder.
const MOST: usize = 32;

/// The recordings used last, by what they depend on.
#[derive(Default)]
pub(super) struct Kept {
    /// The one used last is at the back.
    recordings: Mutex<VecDeque<(Digest, Arc<Recording>)>>,
}

impl Kept {
    pub(super) fn get(&self, key: Digest) -> Option<Arc<Recording>> {
        let mut recordings = self.recordings.lock().unwrap_or_else(PoisonError::into_inner);
        let at = recordings.iter().position(|(kept, _)| *kept == key)?;
        let entry = recordings.remove(at)?;
        let recording = Arc::clone(&entry.1);
        recordings.push_back(entry);
        Some(recording)
    }

    pub(super) fn put(&self, key: Digest, recording: &Arc<Recording>) {
        let mut recordings = self.recordings.lock().unwrap_or_else(PoisonError::into_inner);
        recordings.retain(|(kept, _)| *kept != key);
        if recordings.len() == MOST {
            recordings.pop_front();
        }
        recordings.push_back((key, Arc::clone(recording)));
    }
}
