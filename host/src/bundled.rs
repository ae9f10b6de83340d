//! The small family that comes with the program, so that it works offline and out of the box.

use crate::{
    engine::ModelSource,
    pair::{Pair, PairError, PairFiles, Stored},
    sandbox::bundled::RIDGE,
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

/// The default pair, fitted by `kvmig fit` on the bundled texts (the command is in docs/MEASUREMENTS.md).
///
/// # Errors
/// None in a program that was built whole: what is compiled in is checked like any other pair.
pub fn default_pair() -> Result<Pair, PairError> {
    stored_pair()?.load()
}

/// The default pair with its weights unread.
///
/// # Errors
/// As of [`default_pair`].
pub fn stored_pair() -> Result<Stored, PairError> {
    Stored::from_static(
        "bundled pair",
        PairFiles {
            manifest: include_bytes!("../assets/pair/pair.toml"),
            module: RIDGE,
            weights: include_bytes!("../assets/pair/weights.safetensors"),
            evidence: Some(include_bytes!("../assets/pair/evidence.json")),
            diagnostics: None,
        },
    )
}
