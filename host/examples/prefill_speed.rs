//! Speed of the engine: `cargo run -p kvmig --example prefill_speed -- MODEL TOKENS [ROUNDS] [THREADS] [dequantised]`.
//!
//! Prints the medians over interleaved rounds of a prefill of TOKENS tokens, of native ends (4 + 32 rows, alone and over
//! TOKENS slots) and of decoded tokens; compare it with another engine in the same sitting, machines differ from minute to
//! minute.
#![expect(clippy::print_stdout, reason = "a measurement prints its result")]

use std::{env, time::Instant};

use anyhow::{Context, bail};
use kvmig::engine::{LoadOptions, Model, ModelSource, Observer, Precision, PrefillOptions};

const HEAD: usize = 4;
const TAIL: usize = 32;
const DECODED: usize = 16;

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [path, tokens, rest @ ..] = &args[..] else {
        bail!("usage: prefill_speed MODEL TOKENS [ROUNDS] [THREADS] [dequantised]")
    };
    let tokens: usize = tokens.parse().context("TOKENS")?;
    let rounds: usize = rest.first().map_or(Ok(3), |rounds| rounds.parse()).context("ROUNDS")?;
    let threads = rest.get(1).and_then(|threads| threads.parse().ok());
    let precision = if rest.iter().any(|a| a == "dequantised") { Precision::Dequantised } else { Precision::Quantised };
    let begun = Instant::now();
    let model = Model::load(&ModelSource::from(path), LoadOptions { precision, threads })?;
    println!("load        {:>8.2} s    {precision:?}", begun.elapsed().as_secs_f64());
    let vocab = model.config().vocab as u32;
    let prompt: Vec<u32> = (0..tokens as u32).map(|i| (i * 7919 + 13) % vocab.min(20_000)).collect();
    let (mut prefill, mut ends, mut tail, mut decode) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for round in 0..=rounds {
        let begun = Clock::now();
        let prefilled = model.prefill(&prompt, PrefillOptions::default())?;
        let prefilled_in = begun.elapsed();
        // As many rows as native ends have, over nothing but themselves.
        let begun = Clock::now();
        model.ends_only(&prompt, HEAD, TAIL, prefilled.cache.layout().elem)?;
        let ends_in = begun.elapsed();
        // And over all TOKENS slots, where attention costs what it does behind a mapped middle.
        let mut session = model.session(prefilled)?;
        let begun = Clock::now();
        session.observe(HEAD + TAIL, &mut Blind)?;
        let tail_in = begun.elapsed();
        let begun = Clock::now();
        for i in 0..DECODED as u32 {
            session.step(i)?;
        }
        let decoded_in = begun.elapsed();
        // The first round warms caches and packs weights.
        if round > 0 {
            prefill.push(prefilled_in);
            ends.push(ends_in);
            tail.push(tail_in);
            decode.push(decoded_in);
        }
    }
    println!("{:12} {:>9} {:>9} {:>9} {:>9}", "median of", "tokens", "seconds", "tokens/s", "CPU s");
    let ((prefill, prefill_cpu), (ends, ends_cpu), (tail, tail_cpu), (decode, decode_cpu)) =
        (median(prefill), median(ends), median(tail), median(decode));
    let row = |name, tokens: usize, seconds: f64, cpu: f64| {
        println!("{name:12} {tokens:>9} {seconds:>9.3} {:>9.1} {cpu:>9.2}", tokens as f64 / seconds);
    };
    row("prefill", tokens, prefill, prefill_cpu);
    row("native ends", HEAD + TAIL, ends, ends_cpu);
    row("long tail", HEAD + TAIL, tail, tail_cpu);
    row("decode", DECODED, decode, decode_cpu);
    println!("prefill / native ends {:.1}", prefill / ends);
    Ok(())
}

/// Looks at nothing.
struct Blind;

impl Observer for Blind {
    fn layer(&mut self, _: usize, _: &[u32], _: &[f32], _: &[f32]) {}
}

/// Wall time, and the process's CPU time where the system tells it: on a busy machine only the latter can be compared.
struct Clock(Instant, f64);

impl Clock {
    fn now() -> Clock {
        Clock(Instant::now(), cpu_seconds().unwrap_or(f64::NAN))
    }

    fn elapsed(&self) -> (f64, f64) {
        (self.0.elapsed().as_secs_f64(), cpu_seconds().unwrap_or(f64::NAN) - self.1)
    }
}

/// User and system time in `/proc/self/stat`, in ticks of 10 ms.
fn cpu_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The name in parentheses may hold anything; utime and stime are fields 14 and 15, it is the second.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let ticks: f64 = fields.next()?.parse::<f64>().ok()? + fields.next()?.parse::<f64>().ok()?;
    Some(ticks / 100.0)
}

/// The medians of both times.
fn median(rounds: Vec<(f64, f64)>) -> (f64, f64) {
    let (mut wall, mut cpu): (Vec<f64>, Vec<f64>) = rounds.into_iter().unzip();
    wall.sort_by(f64::total_cmp);
    cpu.sort_by(f64::total_cmp);
    (wall[wall.len() / 2], cpu[cpu.len() / 2])
}
