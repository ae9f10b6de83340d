//! Rows for one network, standardised, in windows of bounded size.

use super::{HELD_OUT, MlpError, Of, Part, Random, RowFile, RowsError, WINDOW};
use crate::fit::rows::RowShape;

/// Which chunks are trained on and which are held out.
#[derive(Debug)]
pub(super) struct Split {
    training: Vec<usize>,
    pub(super) held_out: Vec<usize>,
}

impl Split {
    /// One in [`HELD_OUT`] sequences is held out, at least one.
    pub(super) fn draw(rows: &RowFile, seed: u64) -> Result<Split, MlpError> {
        let mut training: Vec<usize> = (0..rows.chunks()).filter(|&chunk| rows.rows_of(chunk) > 0).collect();
        if training.len() < 2 {
            return Err(MlpError::TooFewSequences { found: training.len() });
        }
        Random::new(seed).shuffle(&mut training);
        let mut held_out = training.split_off(training.len() - (training.len() / HELD_OUT).max(1));
        training.sort_unstable();
        held_out.sort_unstable();
        Ok(Split { training, held_out })
    }
}

/// Mean and spread of each column.
#[derive(Debug)]
pub(super) struct Scale {
    pub(super) mean: Vec<f64>,
    /// Standard deviation; 1 where a column never varies.
    pub(super) spread: Vec<f64>,
}

/// Standardised rows.
#[derive(Debug, Default)]
pub(super) struct Window {
    /// `[rows, in]`.
    pub(super) x: Vec<f32>,
    /// `[rows, n_kv_t · d_t]`.
    pub(super) y: Vec<f32>,
    pub(super) rows: usize,
}

/// Inputs and outputs of one network.
#[derive(Debug)]
pub(super) struct Data<'a> {
    rows: &'a RowFile,
    split: &'a Split,
    part: Part,
    layer: usize,
    sources: &'a [usize],
    pub(super) source: Scale,
    pub(super) target: Scale,
    /// The rows trained on, where they fit into one window.
    training: Option<Window>,
    held_out: Option<Window>,
}

impl<'a> Data<'a> {
    /// Reads the rows once, for the means and spreads of those that are trained on.
    pub(super) fn new(
        rows: &'a RowFile,
        split: &'a Split,
        part: Part,
        layer: usize,
        sources: &'a [usize],
    ) -> Result<Data<'a>, RowsError> {
        let RowShape { source, target } = rows.shape();
        let (inputs, outputs) = (sources.len() * source.width(), target.width());
        let none = |columns: usize| Scale { mean: vec![0.0; columns], spread: vec![1.0; columns] };
        let (source, target) = (none(inputs), none(outputs));
        let mut data = Data { rows, split, part, layer, sources, source, target, training: None, held_out: None };
        let (mut x, mut y) = (Sums::new(inputs), Sums::new(outputs));
        for &chunk in &split.training {
            let window = data.window(&[chunk])?;
            x.add(&window.x);
            y.add(&window.y);
        }
        (data.source, data.target) = (x.scale(), y.scale());
        let whole = |chunks: &[usize]| data.windows(chunks).len() == 1;
        let kept = |chunks: &[usize]| whole(chunks).then(|| data.window(chunks)).transpose();
        (data.training, data.held_out) = (kept(&split.training)?, kept(&split.held_out)?);
        Ok(data)
    }

    /// KV heads of the target.
    pub(super) fn heads(&self) -> usize {
        self.rows.shape().target.kv_heads
    }

    /// Shows every row to be trained on, window by window, sequences in an order of `random`'s.
    pub(super) fn training<E: From<RowsError>>(
        &self,
        random: &mut Random,
        see: impl FnMut(&Window, &mut Random) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut order = self.split.training.clone();
        random.shuffle(&mut order);
        self.each(&order, self.training.as_ref(), random, see)
    }

    /// Shows every row held out.
    pub(super) fn held_out<E: From<RowsError>>(&self, mut see: impl FnMut(&Window) -> Result<(), E>) -> Result<(), E> {
        self.each(&self.split.held_out, self.held_out.as_ref(), &mut Random::new(0), |window, _| see(window))
    }

    fn each<E: From<RowsError>>(
        &self,
        chunks: &[usize],
        whole: Option<&Window>,
        random: &mut Random,
        mut see: impl FnMut(&Window, &mut Random) -> Result<(), E>,
    ) -> Result<(), E> {
        if let Some(window) = whole {
            return see(window, random);
        }
        for chunks in self.windows(chunks) {
            see(&self.window(chunks)?, random)?;
        }
        Ok(())
    }

    /// As many chunks together as a window holds; a longer one alone.
    fn windows<'b>(&self, chunks: &'b [usize]) -> Vec<&'b [usize]> {
        let bytes = |chunk: usize| 4 * self.rows.rows_of(chunk) * (self.source.mean.len() + self.target.mean.len());
        let (mut windows, mut start, mut held) = (Vec::new(), 0, 0);
        for (i, &chunk) in chunks.iter().enumerate() {
            if i > start && held + bytes(chunk) > WINDOW {
                windows.push(&chunks[start..i]);
                (start, held) = (i, 0);
            }
            held += bytes(chunk);
        }
        windows.push(&chunks[start..]);
        windows
    }

    fn window(&self, chunks: &[usize]) -> Result<Window, RowsError> {
        let count = chunks.iter().map(|&chunk| self.rows.rows_of(chunk)).sum();
        let RowShape { source, target } = self.rows.shape();
        let (width, inputs) = (source.width(), self.source.mean.len());
        let mut window =
            Window { x: vec![0.0; count * inputs], y: Vec::with_capacity(count * target.width()), rows: count };
        let mut first = 0;
        for &chunk in chunks {
            for (i, &layer) in self.sources.iter().enumerate() {
                let section = self.rows.read(chunk, Of::Source, self.part, layer)?;
                for (row, from) in section.chunks_exact(width).enumerate() {
                    let to = (first + row) * inputs + i * width;
                    window.x[to..to + width].copy_from_slice(from);
                }
            }
            window.y.extend(self.rows.read(chunk, Of::Target, self.part, self.layer)?);
            first += self.rows.rows_of(chunk);
        }
        self.source.apply(&mut window.x);
        self.target.apply(&mut window.y);
        Ok(window)
    }
}

impl Scale {
    fn apply(&self, rows: &mut [f32]) {
        for row in rows.chunks_exact_mut(self.mean.len()) {
            let columns = self.mean.iter().zip(&self.spread);
            row.iter_mut().zip(columns).for_each(|(x, (mean, spread))| *x = ((f64::from(*x) - mean) / spread) as f32);
        }
    }
}

/// Sums of a column's numbers without its first, so that a large mean takes no digits from the spread.
struct Sums {
    shift: Option<Vec<f32>>,
    sum: Vec<f64>,
    squares: Vec<f64>,
    count: f64,
}

impl Sums {
    fn new(columns: usize) -> Sums {
        Sums { shift: None, sum: vec![0.0; columns], squares: vec![0.0; columns], count: 0.0 }
    }

    fn add(&mut self, rows: &[f32]) {
        for row in rows.chunks_exact(self.sum.len()) {
            let shift = self.shift.get_or_insert_with(|| row.to_vec());
            let sums = self.sum.iter_mut().zip(&mut self.squares);
            for ((sum, squares), (x, shift)) in sums.zip(row.iter().zip(shift)) {
                let x = f64::from(*x) - f64::from(*shift);
                *sum += x;
                *squares += x * x;
            }
            self.count += 1.0;
        }
    }

    fn scale(self) -> Scale {
        let shift = self.shift.unwrap_or_else(|| vec![0.0; self.sum.len()]);
        let mean = |(sum, shift): (&f64, &f32)| f64::from(*shift) + sum / self.count;
        let spread = |(sum, squares): (&f64, &f64)| {
            let variance = squares / self.count - (sum / self.count).powi(2);
            if variance > 0.0 { variance.sqrt() } else { 1.0 }
        };
        Scale {
            mean: self.sum.iter().zip(&shift).map(mean).collect(),
            spread: self.sum.iter().zip(&self.squares).map(spread).collect(),
        }
    }
}
