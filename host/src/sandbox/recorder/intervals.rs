//! Sets of elements, as the runs they consist of.

use std::{collections::BTreeMap, ops::Range};

use kvmig_shaders::Footprint;

/// A set of elements. Runs are disjoint and don't touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Intervals {
    /// Start of a run to its end.
    runs: BTreeMap<u64, u64>,
}

impl Intervals {
    /// Adds a run.
    pub(super) fn insert(&mut self, run: Range<u64>) {
        if run.is_empty() {
            return;
        }
        let Range { mut start, mut end } = run;
        while let Some((&before, &until)) = self.runs.range(..=end).next_back() {
            if until < start {
                break;
            }
            (start, end) = (start.min(before), end.max(until));
            self.runs.remove(&before);
        }
        self.runs.insert(start, end);
    }

    /// The first element of a run that isn't in the set.
    pub(super) fn first_gap(&self, run: Range<u64>) -> Option<u64> {
        if run.is_empty() {
            return None;
        }
        match self.runs.range(..=run.start).next_back() {
            Some((_, &until)) if until >= run.end => None,
            Some((_, &until)) if until > run.start => Some(until),
            _ => Some(run.start),
        }
    }

    /// The runs, ascending.
    pub(super) fn runs(&self) -> impl Iterator<Item = Range<u64>> {
        self.runs.iter().map(|(&start, &end)| start..end)
    }
}

/// A footprint as adjacent pieces, `shift` elements on. Rows and planes that touch are one piece.
pub(super) fn pieces(footprint: Footprint, shift: u64) -> Pieces {
    let Footprint { first, mut planes, plane_stride, mut rows, row_stride, cols, .. } = footprint;
    let mut len = u64::from(cols);
    if rows == 1 || u64::from(row_stride) == len {
        len *= u64::from(rows);
        rows = 1;
        if planes == 1 || u64::from(plane_stride) == len {
            len *= u64::from(planes);
            planes = 1;
        }
    }
    let (plane_stride, row_stride) = (plane_stride.into(), row_stride.into());
    Pieces { first: shift + u64::from(first), planes, plane_stride, rows, row_stride, len }
}

/// Pieces of equal length at two strides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pieces {
    first: u64,
    planes: u32,
    plane_stride: u64,
    rows: u32,
    row_stride: u64,
    len: u64,
}

impl Pieces {
    /// How many there are.
    pub(super) fn count(&self) -> u64 {
        u64::from(self.planes) * u64::from(self.rows)
    }

    /// Each as a run of elements.
    pub(super) fn runs(self) -> impl Iterator<Item = Range<u64>> {
        let plane = move |p: u32| self.first + u64::from(p) * self.plane_stride;
        let row = move |start: u64, r: u32| start + u64::from(r) * self.row_stride;
        (0..self.planes).flat_map(move |p| {
            (0..self.rows).map(move |r| {
                let start = row(plane(p), r);
                start..start + self.len
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use kvmig_shaders::Footprint;
    use std::collections::BTreeSet;

    use super::{Intervals, pieces};

    #[test]
    fn runs_that_touch_or_overlap_become_one() {
        let mut set = Intervals::default();
        for run in [10..20, 30..40, 20..25, 5..6, 24..31, 0..0] {
            set.insert(run);
        }
        assert_eq!(set.runs().collect::<Vec<_>>(), [5..6, 10..40]);
        set.insert(0..100);
        assert!(set.runs().eq(std::iter::once(0..100)));
    }

    #[test]
    fn against_a_set_of_single_elements() {
        // A fixed linear congruential sequence: 500 random runs over 200 elements.
        let mut state = 7u64;
        let mut next = |n: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % n
        };
        for _ in 0..50 {
            let (mut set, mut plain) = (Intervals::default(), BTreeSet::new());
            for _ in 0..10 {
                let start = next(200);
                let run = start..start + next(20);
                plain.extend(run.clone());
                set.insert(run);
                let start = next(200);
                let asked = start..start + next(30);
                let gap = asked.clone().find(|element| !plain.contains(element));
                assert_eq!(set.first_gap(asked.clone()), gap, "{asked:?} in {set:?}");
            }
        }
    }

    #[test]
    fn pieces_cover_the_footprint() {
        let cases = [
            (2, 100, 3, 10, 4),
            (2, 30, 3, 10, 10),
            (2, 12, 3, 4, 4),
            (1, 0, 5, 7, 7),
            (3, 5, 1, 0, 5),
            (2, 9, 2, 0, 3),
        ];
        for (planes, plane_stride, rows, row_stride, cols) in cases {
            let footprint = Footprint { binding: 0, first: 3, planes, plane_stride, rows, row_stride, cols };
            let mut expected = BTreeSet::new();
            for (p, r, c) in (0..planes).flat_map(|p| (0..rows).flat_map(move |r| (0..cols).map(move |c| (p, r, c)))) {
                expected.insert(1000 + 3 + u64::from(p * plane_stride + r * row_stride + c));
            }
            let pieces = pieces(footprint, 1000);
            assert!(pieces.count() <= u64::from(planes * rows));
            assert_eq!(pieces.runs().flatten().collect::<BTreeSet<_>>(), expected, "{footprint:?}");
        }
    }
}
