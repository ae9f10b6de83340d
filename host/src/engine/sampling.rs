//! From logits to the next token.

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sampling {
    /// The most probable one; of equals the one with the lowest id.
    Greedy,
    /// Drawn from the smallest set of tokens that holds `top_p` of the probability (Holtzman et al. 2020), after the logits
    /// are divided by `temperature`.
    TopP {
        /// Divisor of the logits; 0 is greedy.
        temperature: f32,
        /// Probability kept, in (0, 1]; 1 keeps all.
        top_p: f32,
        /// Same seed, same logits, same tokens.
        seed: u64,
    },
}

/// A [`Sampling`] and the state of its random numbers.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    state: u64,
}

impl Sampler {
    /// Starts from the sampling's seed.
    pub fn new(sampling: Sampling) -> Sampler {
        let state = match sampling {
            Sampling::Greedy => 0,
            Sampling::TopP { seed, .. } => seed,
        };
        Sampler { sampling, state }
    }

    /// Chooses the next token.
    pub fn next(&mut self, logits: &[f32]) -> u32 {
        match self.sampling {
            Sampling::TopP { temperature, top_p, .. } if temperature > 0.0 => {
                let uniform = self.uniform();
                draw(logits, temperature, top_p, uniform)
            }
            _ => greedy(logits),
        }
    }

    /// Uniform in [0, 1): SplitMix64 (Steele et al. 2014).
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// The token with the largest logit; of equals the one with the lowest id.
pub(super) fn greedy(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, x) in logits.iter().enumerate() {
        if *x > logits[best] {
            best = i;
        }
    }
    best as u32
}

fn draw(logits: &[f32], temperature: f32, top_p: f32, uniform: f64) -> u32 {
    let peak = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |x: f32| f64::from((x - peak) / temperature).exp();
    let mut order: Vec<(f64, u32)> = logits.iter().enumerate().map(|(i, x)| (weight(*x), i as u32)).collect();
    order.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let total: f64 = order.iter().map(|(w, _)| w).sum();
    let mut kept = 0.0;
    let mut count = 0;
    for (w, _) in &order {
        kept += w;
        count += 1;
        if kept >= f64::from(top_p) * total {
            break;
        }
    }
    let mut left = uniform * kept;
    for (w, token) in &order[..count] {
        left -= w;
        if left < 0.0 {
            return *token;
        }
    }
    order[count - 1].1
}

/// `ln softmax(logits)[token]`, in nats, summed in f64.
pub(super) fn log_prob(logits: &[f32], token: u32) -> f64 {
    let peak = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mass: f64 = logits.iter().map(|x| f64::from(x - peak).exp()).sum();
    f64::from(logits[token as usize] - peak) - mass.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn top_p_leaves_out_the_tail_and_keeps_the_proportions() {
        let logits = [0.5f32.ln(), 0.3f32.ln(), 0.15f32.ln(), 0.05f32.ln()];
        let mut sampler = Sampler::new(Sampling::TopP { temperature: 1.0, top_p: 0.79, seed: 7 });
        let mut counts = [0u32; 4];
        (0..20_000).for_each(|_| counts[sampler.next(&logits) as usize] += 1);
        assert_eq!(counts[2..], [0, 0]);
        let share = f64::from(counts[0]) / 20_000.0;
        assert!((share - 0.625).abs() < 0.02, "{share}");
    }

    #[test]
    fn greedy_takes_the_first_of_equals_and_zero_temperature_is_greedy() {
        let logits = [0.0, 2.0, 2.0, -1.0];
        assert_eq!(greedy(&logits), 1);
        assert_eq!(Sampler::new(Sampling::TopP { temperature: 0.0, top_p: 0.5, seed: 1 }).next(&logits), 1);
    }

    #[test]
    fn one_seed_draws_the_same_tokens_again() {
        let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.37).sin()).collect();
        let draw = |seed| {
            let mut sampler = Sampler::new(Sampling::TopP { temperature: 1.0, top_p: 1.0, seed });
            (0..20).map(|_| sampler.next(&logits)).collect::<Vec<_>>()
        };
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
    }

    #[test]
    fn log_probs_sum_to_one() {
        let logits = [1.0, -2.0, 300.0, 299.0];
        let sum: f64 = (0..4).map(|t| log_prob(&logits, t).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-12);
    }
}
