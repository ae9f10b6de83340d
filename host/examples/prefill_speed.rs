//! Speed of the engine: `cargo run -p kvmig --example prefill_speed -- MODEL TOKENS [ROUNDS] [dequantised]`.
//!
//! Prints the medians over interleaved rounds of a prefill of TOKENS tokens, of the native ends (4 + 32 rows over the same
//! context) and of decoded tokens; compare it with another engine in the same sitting, machines differ from minute to
//! minute.
#![expect(clippy::print_stdout, reason = "a measurement prints its result")]

use std::{env, time::Instant};

use anyhow::{Context, bail};
use kvmig::engine::{LoadOptions, Model, ModelSource, Precision, PrefillOptions};

const HEAD: usize = 4;
const TAIL: usize = 32;
const DECODED: usize = 16;

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [path, tokens, rest @ ..] = &args[..] else {
        bail!("usage: prefill_speed MODEL TOKENS [ROUNDS] [dequantised]")
    };
    let tokens: usize = tokens.parse().context("TOKENS")?;
    let rounds: usize = rest.first().map_or(Ok(3), |rounds| rounds.parse()).context("ROUNDS")?;
    let precision = if rest.iter().any(|a| a == "dequantised") { Precision::Dequantised } else { Precision::Quantised };
    let begun = Instant::now();
    let model = Model::load(&ModelSource::from(path), LoadOptions { precision, threads: None })?;
    println!("load        {:>8.2} s    {precision:?}", begun.elapsed().as_secs_f64());
    let vocab = model.config().vocab as u32;
    let prompt: Vec<u32> = (0..tokens as u32).map(|i| (i * 7919 + 13) % vocab.min(20_000)).collect();
    let (mut prefill, mut ends, mut decode) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=rounds {
        let begun = Instant::now();
        let prefilled = model.prefill(&prompt, PrefillOptions::default())?;
        let prefilled_in = begun.elapsed().as_secs_f64();
        // The same rows as native ends compute; over a mapped middle they attend to TOKENS slots instead.
        let begun = Instant::now();
        model.ends_only(&prompt, HEAD, TAIL, prefilled.cache.layout().elem)?;
        let ends_in = begun.elapsed().as_secs_f64();
        let mut session = model.session(prefilled)?;
        let begun = Instant::now();
        for i in 0..DECODED as u32 {
            session.step(i)?;
        }
        let decoded_in = begun.elapsed().as_secs_f64();
        // The first round warms caches and packs weights.
        if round > 0 {
            prefill.push(prefilled_in);
            ends.push(ends_in);
            decode.push(decoded_in);
        }
    }
    let (prefill, ends, decode) = (median(prefill), median(ends), median(decode));
    println!("prefill     {:>8.1} tokens/s    {:.3} s for {tokens}", tokens as f64 / prefill, prefill);
    println!("native ends {:>8.1} tokens/s    {:.3} s for {}", (HEAD + TAIL) as f64 / ends, ends, HEAD + TAIL);
    println!("decode      {:>8.1} tokens/s", DECODED as f64 / decode);
    println!("prefill / native ends {:.1}", prefill / ends);
    Ok(())
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}
