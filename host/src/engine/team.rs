//! The threads that share the loops between a pass's matrix products.
//!
//! A product and the loops around it must run on the same threads. The tensor library's workers stay awake for a while after a
//! product: loops on other threads would contend with them for the cores, and would have to be woken some ten times a layer.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{Mutex, PoisonError},
};

use candle_core::utils::barrier_pool;
use rayon::prelude::*;

/// Which threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Team {
    /// The calling Rayon pool's, where products are ours.
    Rayon,
    /// The tensor library's, where weights are quantised.
    Tensor,
}

impl Team {
    /// How many they are.
    pub(super) fn threads(self) -> usize {
        match self {
            Team::Rayon => rayon::current_num_threads(),
            // The caller works too.
            Team::Tensor => barrier_pool().n_workers() + 1,
        }
    }

    /// Calls `work` once for each item, in any order; returns when all are done. `work` must neither multiply a quantised matrix
    /// nor call a team: the tensor library's pool serves one loop at a time, and one inside it would wait for itself.
    ///
    /// # Panics
    /// If `work` does.
    pub(super) fn each<T: Send>(self, items: Vec<T>, work: impl Fn(T) + Sync) {
        if items.len() < 2 {
            return items.into_iter().for_each(work);
        }
        match self {
            Team::Rayon => items.into_par_iter().with_max_len(1).for_each(&work),
            Team::Tensor => {
                // The pool hands out shared ranges of indices; each item is taken by the one who gets its index.
                let items: Vec<Mutex<Option<T>>> = items.into_iter().map(|item| Mutex::new(Some(item))).collect();
                let take = |item: &Mutex<Option<T>>| item.lock().unwrap_or_else(PoisonError::into_inner).take();
                // A panic on its way through the pool would leave it unusable for the rest of the process.
                let panic = Mutex::new(None);
                barrier_pool().execute_chunked(items.len(), |range| {
                    let work = || items[range].iter().filter_map(take).for_each(&work);
                    if let Err(payload) = catch_unwind(AssertUnwindSafe(work)) {
                        panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
                    }
                });
                if let Some(payload) = panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
                    resume_unwind(payload);
                }
            }
        }
    }

    /// Calls `work` on pieces of `to` and `from`, which hold equally many rows, of `to_width` and `from_width` elements.
    pub(super) fn rows(
        self,
        (to, to_width): (&mut [f32], usize),
        (from, from_width): (&[f32], usize),
        work: impl Fn(&mut [f32], &[f32]) + Sync,
    ) {
        // Below this many elements, waking others costs more than they save.
        const ALONE: usize = 8 * 1024;
        if to.len() < ALONE {
            return work(to, from);
        }
        debug_assert_eq!(to.len() / to_width, from.len() / from_width, "rows of both sides");
        let piece = (to.len() / to_width).div_ceil(2 * self.threads()).max(1);
        let pieces = to.chunks_mut(piece * to_width).zip(from.chunks(piece * from_width)).collect();
        self.each(pieces, |(to, from): (&mut [f32], &[f32])| work(to, from));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_the_callers_and_leaves_the_team_usable() {
        for team in [Team::Rayon, Team::Tensor] {
            let boom = |i: usize| assert!(i != 3, "item {i}");
            let caught = catch_unwind(|| team.each((0..16).collect(), boom)).unwrap_err();
            assert_eq!(caught.downcast_ref::<String>().map(String::as_str), Some("item 3"), "{team:?}");
            team.each((0..16).collect(), |_: usize| ());
        }
    }

    #[test]
    fn every_item_is_worked_on_once() {
        for team in [Team::Rayon, Team::Tensor] {
            for n in [0, 1, 2, 1000] {
                let mut counts = vec![0; n];
                team.each(counts.iter_mut().collect(), |count| *count += 1);
                assert_eq!(counts, vec![1; n], "{team:?}");
            }
        }
    }

    #[test]
    fn rows_meet_their_own() {
        for team in [Team::Rayon, Team::Tensor] {
            for rows in [1, 3, 4097] {
                let from: Vec<f32> = (0..rows).map(|row| row as f32).collect();
                let mut to = vec![-1.0; rows * 3];
                team.rows((&mut to, 3), (&from, 1), |to, from| {
                    to.chunks_exact_mut(3).zip(from).for_each(|(to, from)| to.fill(*from));
                });
                assert!(to.iter().enumerate().all(|(i, x)| *x == (i / 3) as f32), "{team:?}, {rows} rows");
            }
        }
    }
}
