//! The small family that comes with the program, so that it works offline and out of the box.

use crate::{
    engine::ModelSource,
    pair::{Cards, Pair, PairError, PairFiles, Stored},
    sandbox::bundled::{HEAD_MATCHED, MLP, RIDGE},
};

/// A member of the bundled family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Member {
    /// 8 layers, hidden 192; 4.3 M parameters.
    Large,
    /// 6 layers, hidden 128; 1.9 M parameters.
    Medium,
    /// As `Medium`, trained on with code.
    MediumCode,
}

impl Member {
    /// All of them.
    pub const ALL: [Member; 3] = [Member::Large, Member::Medium, Member::MediumCode];

    /// What `--source` and `--target` call it.
    pub fn name(self) -> &'static str {
        match self {
            Member::Large => "bundled:large",
            Member::Medium => "bundled:medium",
            Member::MediumCode => "bundled:medium-code",
        }
    }

    /// The member of that name.
    pub fn from_name(name: &str) -> Option<Member> {
        Member::ALL.into_iter().find(|member| member.name() == name)
    }

    /// Its files.
    pub fn source(self) -> ModelSource {
        let (config, weights): (&'static [u8], &'static [&'static [u8]]) = match self {
            Member::Large => (
                include_bytes!("../assets/family/large/config.json"),
                &[include_bytes!("../assets/family/large/model.safetensors")],
            ),
            Member::Medium => (
                include_bytes!("../assets/family/medium/config.json"),
                &[include_bytes!("../assets/family/medium/model.safetensors")],
            ),
            Member::MediumCode => (
                include_bytes!("../assets/family/medium-code/config.json"),
                &[include_bytes!("../assets/family/medium-code/model.safetensors")],
            ),
        };
        let tokenizer = include_bytes!("../assets/family/tokenizer.json");
        let tokenizer_config: Option<&'static [u8]> = Some(include_bytes!("../assets/family/tokenizer_config.json"));
        ModelSource::Embedded { name: self.name(), config, weights, tokenizer, tokenizer_config }
    }
}

/// The default prompt: a passage of a public-domain novel, long enough that re-prefilling it costs something.
pub const PROMPT: &str = include_str!("../assets/prompt.txt");

/// The members of the default pair: source and target.
pub const DEFAULT: (Member, Member) = (Member::Medium, Member::Large);

/// A pair of members that comes with its mappers, fitted by `kvmig fit` (the commands are in docs/MEASUREMENTS.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BundledPair {
    /// The default: from small to large, by every kind of mapper.
    MediumLarge,
    /// From large to small, by a ridge and head by head.
    LargeMedium,
    /// From the member that was trained on with code, by a ridge that never saw code: on code it degrades.
    MediumCodeLarge,
}

/// The files of one mapper, in `assets/pairs`.
macro_rules! mapper {
    ($folder:literal, $module:expr) => {
        (
            concat!("bundled ", $folder),
            PairFiles {
                manifest: include_bytes!(concat!("../assets/pairs/", $folder, "/pair.toml")),
                module: $module,
                weights: include_bytes!(concat!("../assets/pairs/", $folder, "/weights.safetensors")),
                evidence: Some(include_bytes!(concat!("../assets/pairs/", $folder, "/evidence.json"))),
                diagnostics: None,
            },
        )
    };
}

impl BundledPair {
    /// All of them.
    pub const ALL: [BundledPair; 3] =
        [BundledPair::MediumLarge, BundledPair::LargeMedium, BundledPair::MediumCodeLarge];

    /// What `--pair` calls it; `bundled` is the first.
    pub fn name(self) -> &'static str {
        match self {
            BundledPair::MediumLarge => "bundled:medium-large",
            BundledPair::LargeMedium => "bundled:large-medium",
            BundledPair::MediumCodeLarge => "bundled:medium-code-large",
        }
    }

    /// The pair of that name.
    pub fn from_name(name: &str) -> Option<BundledPair> {
        let named = || BundledPair::ALL.into_iter().find(|pair| pair.name() == name);
        if name == "bundled" { Some(BundledPair::MediumLarge) } else { named() }
    }

    /// Source and target.
    pub fn members(self) -> (Member, Member) {
        match self {
            BundledPair::MediumLarge => DEFAULT,
            BundledPair::LargeMedium => (Member::Large, Member::Medium),
            BundledPair::MediumCodeLarge => (Member::MediumCode, Member::Large),
        }
    }

    /// Its mappers, their weights unread.
    ///
    /// # Errors
    /// As of [`default_pair`].
    pub fn cards(self) -> Result<Cards, PairError> {
        let files: &[(&str, PairFiles<'static>)] = match self {
            BundledPair::MediumLarge => &[
                mapper!("medium-large/ridge", RIDGE),
                mapper!("medium-large/head-matched", HEAD_MATCHED),
                mapper!("medium-large/mlp", MLP),
            ],
            BundledPair::LargeMedium => {
                &[mapper!("large-medium/ridge", RIDGE), mapper!("large-medium/head-matched", HEAD_MATCHED)]
            }
            BundledPair::MediumCodeLarge => &[mapper!("medium-code-large/ridge", RIDGE)],
        };
        let stored = files.iter().map(|(label, files)| Stored::from_static(label, *files));
        Cards::new(self.name(), stored.collect::<Result<_, _>>()?)
    }
}

/// The default pair's ridge.
///
/// # Errors
/// None in a program that was built whole: what is compiled in is checked like any other pair.
pub fn default_pair() -> Result<Pair, PairError> {
    stored_pair()?.load()
}

/// The default pair's ridge with its weights unread.
///
/// # Errors
/// As of [`default_pair`].
pub fn stored_pair() -> Result<Stored, PairError> {
    Ok(BundledPair::MediumLarge.cards()?.of_kind("ridge")?.first().clone())
}
