//! Speed of one device on the map of Qwen2.5-Coder 0.5B to 1.5B (k = 8), random weights:
//! `cargo run --example map_speed -- DEVICE TOKENS CHUNK ROUNDS [KIND…]`, with KIND `ridge`, `head-matched` or the width of an
//! MLP. Several kinds take turns, after a round that is thrown away, and the first is compared with each of the others.
#![expect(clippy::print_stdout, reason = "an example prints what it measured")]

use kvmig::{
    cache::KvPlanes,
    device::{
        Device, Pacing, ResidentWeights,
        conform::{Case, Fixture, Side},
    },
    measure::statistics::Interval,
};
use kvmig_gate::WeightElem;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [device, tokens, chunk, rounds, kinds @ ..] = arguments.as_slice() else {
        return Err("usage: map_speed DEVICE TOKENS CHUNK ROUNDS [ridge | head-matched | WIDTH]…".into());
    };
    let (tokens, chunk, rounds) = (tokens.parse()?, chunk.parse()?, rounds.parse::<usize>()?);
    let default = ["ridge".to_owned()];
    let kinds = if kinds.is_empty() { &default } else { kinds };
    let device = Device::open(&device.parse()?)?;
    println!("{} on {}, {tokens} tokens, {chunk} per chunk", device.info().name, device.info().backend);
    for elem in [WeightElem::F32, WeightElem::F16] {
        let mut contenders = kinds
            .iter()
            .map(|kind| Contender::new(kind, (tokens, chunk), elem, &device))
            .collect::<Result<Vec<_>, _>>()?;
        for round in 0..=rounds {
            // Whoever comes second finds the machine as the first left it: they take that place in turn.
            let order: &mut dyn Iterator<Item = &mut Contender> =
                if round % 2 == 0 { &mut contenders.iter_mut() } else { &mut contenders.iter_mut().rev() };
            for contender in order {
                contender.run(&device, round > 0)?;
            }
        }
        contenders.iter().for_each(|contender| println!("{elem:?} {}", contender.summary()));
        if let Some((first, others)) = contenders.split_first() {
            others.iter().for_each(|other| println!("{elem:?} {}", first.against(other)));
        }
    }
    Ok(())
}

/// One kind of mapper, and its times.
struct Contender {
    kind: String,
    fixture: Fixture,
    weights: ResidentWeights,
    /// Memory that is resident already, as a serving engine's is.
    planes: KvPlanes,
    flops: u64,
    /// Milliseconds of each round: upload, map, readback.
    rounds: Vec<[f64; 3]>,
}

impl Contender {
    fn new(
        kind: &str,
        (tokens, chunk): (usize, usize),
        elem: WeightElem,
        device: &Device,
    ) -> Result<Contender, Box<dyn std::error::Error>> {
        let (source, target) = (Side::new(24, 2, 64, 64), Side::new(28, 2, 128, 128));
        let ridge = Case::ridge("qwen", source, target, 8, tokens, chunk);
        let case = match kind {
            "ridge" => ridge,
            "head-matched" => ridge.head_matched(),
            width => ridge.mlp(width.parse()?),
        };
        let fixture = Fixture::new(&case, elem);
        let weights = device.load_weights(fixture.loaded())?;
        let planes = fixture.target();
        Ok(Contender { kind: kind.to_owned(), fixture, weights, planes, flops: 0, rounds: Vec::new() })
    }

    fn run(&mut self, device: &Device, counts: bool) -> Result<(), Box<dyn std::error::Error>> {
        let Contender { fixture, weights, planes, .. } = self;
        let report = fixture.execute(device, weights, planes, Pacing::default(), |recording| recording)?;
        self.flops = report.flops;
        if counts {
            self.rounds.push([report.upload_ms, report.map_ms, report.readback_ms]);
        }
        Ok(())
    }

    fn totals(&self) -> Vec<f64> {
        self.rounds.iter().map(|stages| stages.iter().sum()).collect()
    }

    fn summary(&self) -> String {
        let [upload, map, readback] = [0, 1, 2].map(|stage| median(self.rounds.iter().map(|round| round[stage])));
        let totals = self.totals();
        let (least, most) = range(&totals);
        format!(
            "{}: median {:.1} ms ({least:.1} … {most:.1}; upload {upload:.1}, map {map:.1}, readback {readback:.1}), \
             {:.1} GFLOP/s in the map",
            self.kind,
            median(totals.iter().copied()),
            self.flops as f64 / map / 1e6,
        )
    }

    /// How many times as long as `other` it takes.
    fn against(&self, other: &Contender) -> String {
        let (own, others) = (self.totals(), other.totals());
        let ratios: Vec<f64> = own.iter().zip(&others).map(|(own, other)| own / other).collect();
        let shown: Vec<String> = ratios.iter().map(|ratio| format!("{ratio:.2}")).collect();
        let interval = Interval::of_ratio(&own, &others).map_or_else(String::new, |ratio| {
            format!(", of the means {:.2} [{:.2}, {:.2}]", ratio.mean, ratio.low, ratio.high)
        });
        let median = median(ratios.iter().copied());
        format!("{} over {}: median {median:.2}{interval}; by round {}", self.kind, other.kind, shown.join(" "))
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 0 => (values[half - 1] + values[half]) / 2.0,
        _ => values[half],
    }
}

fn range(values: &[f64]) -> (f64, f64) {
    values.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), &x| (least.min(x), most.max(x)))
}
