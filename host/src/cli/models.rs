//! Options that several commands share: models, pairs, devices.

use std::{ffi::OsString, path::PathBuf};

use anyhow::Context;
use clap::{
    Args, ValueEnum,
    builder::{OsStringValueParser, TypedValueParser as _, ValueParser, ValueParserFactory},
};

use crate::{
    bundled::{BundledPair, Member},
    device::{Device, DeviceChoice},
    engine::{LoadOptions, Model, ModelSource, Precision},
    pair::{Cards, PairError},
};

/// How to load the models.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct EngineArgs {
    /// Compute with quantised weights as they are, or with all weights as f32 (exact, four bytes a weight)
    #[arg(long, value_enum, default_value_t = PrecisionArg::Quantised)]
    precision: PrecisionArg,
    /// Threads to compute with, in engine and mapper alike; models of quantised weights take theirs from the environment
    /// (RAYON_NUM_THREADS) [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PrecisionArg {
    Quantised,
    Dequantised,
}

impl EngineArgs {
    /// As the engine takes it. The number of threads is the process's: engine, mirrors and fit share one pool, which must not
    /// have been used before.
    pub(super) fn options(self) -> anyhow::Result<LoadOptions> {
        if let Some(threads) = self.threads {
            rayon::ThreadPoolBuilder::new()
                .num_threads(threads.into())
                .build_global()
                .with_context(|| format!("--threads {threads}"))?;
        }
        let precision = match self.precision {
            PrecisionArg::Quantised => Precision::Quantised,
            PrecisionArg::Dequantised => Precision::Dequantised,
        };
        Ok(LoadOptions { precision, threads: None })
    }
}

/// A model as a person names it: a folder, a GGUF file, or `bundled:NAME`.
#[derive(Clone, Debug)]
pub(super) enum ModelArg {
    Bundled(Member),
    Path(PathBuf),
}

impl std::str::FromStr for ModelArg {
    type Err = String;

    fn from_str(text: &str) -> Result<ModelArg, String> {
        if let Some(member) = Member::from_name(text) {
            return Ok(ModelArg::Bundled(member));
        }
        if text.starts_with("bundled:") {
            let names: Vec<_> = Member::ALL.iter().map(|m| m.name()).collect();
            return Err(format!("no such bundled model; there are {}", names.join(", ")));
        }
        Ok(ModelArg::Path(text.into()))
    }
}

impl std::fmt::Display for ModelArg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ModelArg::Bundled(member) => f.write_str(member.name()),
            ModelArg::Path(path) => write!(f, "{}", path.display()),
        }
    }
}

impl ModelArg {
    /// Loads it.
    pub(super) fn load(&self, options: LoadOptions) -> anyhow::Result<Model> {
        let source = match self {
            ModelArg::Bundled(member) => member.source(),
            ModelArg::Path(path) => ModelSource::Path(path.clone()),
        };
        Ok(Model::load(&source, options)?)
    }
}

/// A pair as a person names it: a folder, or one of the bundled pairs.
#[derive(Clone, Debug)]
pub(super) enum PairArg {
    Bundled(BundledPair),
    Folder(PathBuf),
}

impl PairArg {
    /// The pair that comes first.
    pub(super) const DEFAULT: PairArg = PairArg::Bundled(BundledPair::MediumLarge);
}

impl ValueParserFactory for PairArg {
    type Parser = ValueParser;

    fn value_parser() -> ValueParser {
        ValueParser::new(OsStringValueParser::new().try_map(PairArg::parse))
    }
}

impl std::fmt::Display for PairArg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            PairArg::Bundled(pair) => f.write_str(pair.name()),
            PairArg::Folder(folder) => write!(f, "{}", folder.display()),
        }
    }
}

impl PairArg {
    /// A name that begins as those of bundled pairs do is no folder's.
    fn parse(text: OsString) -> Result<PairArg, String> {
        match text.to_str().map(|name| (name, BundledPair::from_name(name))) {
            Some((_, Some(pair))) => Ok(PairArg::Bundled(pair)),
            Some((name, None)) if name.starts_with("bundled:") => {
                let names: Vec<_> = BundledPair::ALL.iter().map(|pair| pair.name()).collect();
                Err(format!("no such bundled pair; there are {}", names.join(", ")))
            }
            _ => Ok(PairArg::Folder(text.into())),
        }
    }

    /// Reads its cards.
    pub(super) fn open(&self) -> Result<Cards, PairError> {
        match self {
            PairArg::Bundled(pair) => pair.cards(),
            PairArg::Folder(folder) => Cards::open(folder),
        }
    }
}

/// The source and target given, or those that a bundled pair brings.
pub(super) fn models_of(
    pair: &PairArg,
    (source, target): (&Option<ModelArg>, &Option<ModelArg>),
) -> anyhow::Result<(ModelArg, ModelArg)> {
    let brought = match pair {
        PairArg::Bundled(pair) => Some(pair.members()),
        PairArg::Folder(_) => None,
    };
    let needed = "a pair folder needs --source MODEL and --target MODEL, those it was fitted for";
    let or_brought = |given: &Option<ModelArg>, member: Option<Member>| {
        given.clone().or(member.map(ModelArg::Bundled)).context(needed)
    };
    Ok((or_brought(source, brought.map(|(source, _)| source))?, or_brought(target, brought.map(|(_, target)| target))?))
}

/// Which device maps.
#[derive(Clone, Debug, Args)]
pub(super) struct DeviceArgs {
    /// Device that maps: auto (a hardware GPU, else the CPU), cpu, gpu, gpu:N, or a backend or driver by name
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: DeviceChoice,
}

impl DeviceArgs {
    /// Opens it.
    pub(super) fn open(&self) -> anyhow::Result<Device> {
        Ok(Device::open(&self.device)?)
    }
}
