//! The networks of all heads of one target layer's keys or values, in training.

use candle_core::{Device, Tensor, Var};

use super::{
    EpochError, Network, PATIENCE, Random, Settings,
    adam::Adam,
    data::{Data, Window},
    product::product,
};

/// Rows that are looked at together where nothing is learnt.
const ROWS: usize = 4_096;

/// Parameters of the three products.
struct Parameters {
    /// `[in, heads · H]`: the heads read the same rows, so that their first products are one.
    first: Var,
    /// `[heads, H, H]`.
    second: Var,
    /// `[heads, H, d_t]`.
    third: Var,
    /// `[heads · H]`, `[heads, 1, H]`, `[heads, 1, d_t]`.
    biases: [Var; 3],
}

/// Sizes of the networks.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    heads: usize,
    inputs: usize,
    width: usize,
    outputs: usize,
}

/// A training.
pub(super) struct Trainer<'a> {
    data: Data<'a>,
    sizes: Sizes,
    batch: usize,
    random: Random,
    parameters: Parameters,
    optimiser: Adam,
    best: Best,
}

/// The weights with the least loss on what is held out.
struct Best {
    loss: f64,
    epoch: usize,
    epochs_since: usize,
    /// The three products, then their biases.
    numbers: Vec<Vec<f32>>,
    r2: f64,
}

impl<'a> Trainer<'a> {
    pub(super) fn new(data: Data<'a>, settings: &Settings, mut random: Random) -> candle_core::Result<Trainer<'a>> {
        let sizes = Sizes {
            heads: data.heads(),
            inputs: data.source.mean.len(),
            width: settings.width,
            outputs: data.target.mean.len() / data.heads(),
        };
        let parameters = Parameters::draw(sizes, &mut random)?;
        let optimiser = Adam::new(&parameters.all());
        let best = Best { loss: f64::INFINITY, epoch: 0, epochs_since: 0, numbers: Vec::new(), r2: 0.0 };
        Ok(Trainer { data, sizes, batch: settings.batch, random, parameters, optimiser, best })
    }

    /// Whether more epochs would change nothing.
    pub(super) fn done(&self) -> bool {
        self.best.epochs_since >= PATIENCE
    }

    /// Goes through the rows once, then looks at those held out.
    pub(super) fn epoch(&mut self, epoch: usize) -> Result<(), EpochError> {
        if self.done() {
            return Ok(());
        }
        let (parameters, optimiser, sizes, batch) = (&self.parameters, &mut self.optimiser, self.sizes, self.batch);
        self.data.training(&mut self.random, |window, random| {
            let mut order: Vec<usize> = (0..window.rows).collect();
            random.shuffle(&mut order);
            for rows in order.chunks(batch) {
                let (x, y) = sizes.batch(window, rows)?;
                // The mean over rows and coordinates, summed over heads: each trains as if it were alone.
                let loss =
                    ((parameters.forward(&x, sizes)? - y)?.sqr()?.sum_all()? / (rows.len() * sizes.outputs) as f64)?;
                optimiser.step(&loss.backward()?)?;
            }
            Ok::<_, EpochError>(())
        })?;
        let (loss, r2) = self.look()?;
        if !loss.is_finite() {
            return Err(EpochError::Diverged);
        }
        if loss < self.best.loss {
            let parameters = self.parameters.all();
            let numbers = parameters.iter().map(|var| var.flatten_all()?.to_vec1());
            let numbers = numbers.collect::<candle_core::Result<Vec<Vec<f32>>>>()?;
            self.best = Best { loss, epoch: epoch + 1, epochs_since: 0, numbers, r2 };
        } else {
            self.best.epochs_since += 1;
        }
        Ok(())
    }

    /// Loss and R² on the rows held out.
    fn look(&self) -> Result<(f64, f64), EpochError> {
        let columns = self.data.target.mean.len();
        let (mut errors, mut sum, mut squares) = (vec![0.0; columns], vec![0.0; columns], vec![0.0; columns]);
        let mut count = 0.0;
        self.data.held_out(|window| {
            let rows: Vec<usize> = (0..window.rows).collect();
            for rows in rows.chunks(ROWS) {
                let (x, y) = self.sizes.batch(window, rows)?;
                let wrong = (self.parameters.forward(&x, self.sizes)?.detach() - y)?.sqr()?.sum(1)?;
                let wrong = wrong.flatten_all()?.to_vec1::<f32>()?;
                errors.iter_mut().zip(wrong).for_each(|(sum, x)| *sum += f64::from(x));
            }
            for row in window.y.chunks_exact(columns) {
                sum.iter_mut().zip(row).for_each(|(sum, &y)| *sum += f64::from(y));
                squares.iter_mut().zip(row).for_each(|(sum, &y)| *sum += f64::from(y) * f64::from(y));
            }
            count += window.rows as f64;
            Ok::<_, EpochError>(())
        })?;
        let loss = errors.iter().sum::<f64>() / (count * columns as f64);
        // In the units of the rows themselves.
        let (mut residual, mut total) = (0.0, 0.0);
        for (i, spread) in self.data.target.spread.iter().enumerate() {
            residual += errors[i] * spread * spread;
            total += (squares[i] - sum[i] * sum[i] / count) * spread * spread;
        }
        Ok((loss, if total > 0.0 { 1.0 - residual / total } else { 0.0 }))
    }

    /// The best weights, for rows as they are.
    pub(super) fn finish(self) -> Network {
        let Sizes { heads, inputs, width, outputs } = self.sizes;
        let Best { epoch, r2, numbers, .. } = self.best;
        let mut numbers = numbers.into_iter();
        let mut next = || numbers.next().unwrap_or_default();
        let (first, second, mut third) = (next(), next(), next());
        let mut biases = [next(), next(), next()];
        let (source, target) = (&self.data.source, &self.data.target);
        let mut by_head = Vec::with_capacity(first.len());
        for head in 0..heads {
            for (row, spread) in first.chunks_exact(heads * width).zip(&source.spread) {
                by_head.extend(row[head * width..(head + 1) * width].iter().map(|&w| (f64::from(w) / spread) as f32));
            }
        }
        for (head, weight) in third.chunks_exact_mut(width * outputs).enumerate() {
            let spread = &target.spread[head * outputs..(head + 1) * outputs];
            for row in weight.chunks_exact_mut(outputs) {
                row.iter_mut().zip(spread).for_each(|(w, s)| *w = (f64::from(*w) * s) as f32);
            }
        }
        let columns = target.mean.iter().zip(&target.spread);
        biases[2].iter_mut().zip(columns).for_each(|(b, (mean, s))| *b = (f64::from(*b) * s + mean) as f32);
        debug_assert_eq!(by_head.len(), heads * inputs * width, "all first products");
        let source_mean = source.mean.clone();
        Network { weights: [by_head, second, third], biases, source_mean, r2, epochs: epoch }
    }
}

impl Parameters {
    /// Weights uniform in ±√(6 / inputs) where a ReLU follows and ±√(3 / inputs) at the end (He et al. 2015), so that what flows
    /// through keeps its variance; biases 0.
    fn draw(sizes: Sizes, random: &mut Random) -> candle_core::Result<Parameters> {
        let Sizes { heads, inputs, width, outputs } = sizes;
        let mut drawn = |count: usize, shape: &[usize], limit: f64| {
            let numbers: Vec<f32> = (0..count).map(|_| ((2.0 * random.uniform() - 1.0) * limit) as f32).collect();
            Var::from_tensor(&Tensor::from_vec(numbers, shape, &Device::Cpu)?)
        };
        let zeros = |shape: &[usize]| Var::zeros(shape, candle_core::DType::F32, &Device::Cpu);
        let limit = |numerator: f64, inputs: usize| (numerator / inputs as f64).sqrt();
        Ok(Parameters {
            first: drawn(inputs * heads * width, &[inputs, heads * width], limit(6.0, inputs))?,
            second: drawn(heads * width * width, &[heads, width, width], limit(6.0, width))?,
            third: drawn(heads * width * outputs, &[heads, width, outputs], limit(3.0, width))?,
            biases: [zeros(&[heads * width])?, zeros(&[heads, 1, width])?, zeros(&[heads, 1, outputs])?],
        })
    }

    fn all(&self) -> [Var; 6] {
        let [a, b, c] = self.biases.clone();
        [self.first.clone(), self.second.clone(), self.third.clone(), a, b, c]
    }

    /// `[rows, in]` to `[heads, rows, d_t]`.
    fn forward(&self, x: &Tensor, Sizes { heads, width, .. }: Sizes) -> candle_core::Result<Tensor> {
        let [first, second, third] = &self.biases;
        let hidden = product(x, &self.first)?.broadcast_add(first)?.relu()?;
        let hidden = hidden.reshape((x.dim(0)?, heads, width))?.transpose(0, 1)?.contiguous()?;
        let hidden = hidden.matmul(&self.second)?.broadcast_add(second)?.relu()?;
        hidden.matmul(&self.third)?.broadcast_add(third)
    }
}

impl Sizes {
    /// `[rows, in]` and `[heads, rows, d_t]` of the given rows.
    fn batch(self, window: &Window, rows: &[usize]) -> candle_core::Result<(Tensor, Tensor)> {
        let Sizes { heads, inputs, outputs, .. } = self;
        let x: Vec<f32> = rows.iter().flat_map(|row| &window.x[row * inputs..(row + 1) * inputs]).copied().collect();
        let head = |head: usize| {
            rows.iter().flat_map(move |row| &window.y[(row * heads + head) * outputs..][..outputs]).copied()
        };
        let y: Vec<f32> = (0..heads).flat_map(head).collect();
        Ok((
            Tensor::from_vec(x, (rows.len(), inputs), &Device::Cpu)?,
            Tensor::from_vec(y, (heads, rows.len(), outputs), &Device::Cpu)?,
        ))
    }
}
