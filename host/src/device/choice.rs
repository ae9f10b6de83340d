//! Which device: what `--device` takes.

use std::{fmt, str::FromStr};

use serde::Serialize;

/// A device, as a person asks for it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(into = "String")]
pub enum DeviceChoice {
    /// The first hardware GPU that passes its self-test, else the CPU. Software adapters are never chosen.
    #[default]
    Auto,
    /// The CPU: the kernels' mirrors.
    Cpu,
    /// The first hardware GPU; an error where there is none.
    Gpu,
    /// The adapter of this index in the list of `kvmig devices`.
    Index(usize),
    /// By backend (`vulkan`, `gl`, `metal`, `dx12`), by software driver (`lavapipe`, `swiftshader`, `llvmpipe`, `warp`), or
    /// by a part of the adapter's name; lower case.
    Named(String),
}

/// A text that names no device.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "--device `{0}`: expected auto, cpu, gpu, gpu:N, a backend (vulkan, gl, metal, dx12), a software driver (lavapipe, \
     swiftshader, llvmpipe, warp) or a part of an adapter's name; `kvmig devices` lists them"
)]
pub struct ParseDeviceChoiceError(String);

impl FromStr for DeviceChoice {
    type Err = ParseDeviceChoiceError;

    fn from_str(s: &str) -> Result<DeviceChoice, ParseDeviceChoiceError> {
        let name = s.trim().to_lowercase();
        match name.as_str() {
            "" => Err(ParseDeviceChoiceError(s.to_owned())),
            "auto" => Ok(DeviceChoice::Auto),
            "cpu" => Ok(DeviceChoice::Cpu),
            "gpu" => Ok(DeviceChoice::Gpu),
            _ => match name.strip_prefix("gpu:") {
                Some(index) => index.parse().map(DeviceChoice::Index).map_err(|_| ParseDeviceChoiceError(s.to_owned())),
                None => Ok(DeviceChoice::Named(name)),
            },
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Auto => f.write_str("auto"),
            DeviceChoice::Cpu => f.write_str("cpu"),
            DeviceChoice::Gpu => f.write_str("gpu"),
            DeviceChoice::Index(index) => write!(f, "gpu:{index}"),
            DeviceChoice::Named(name) => f.write_str(name),
        }
    }
}

impl From<DeviceChoice> for String {
    fn from(choice: DeviceChoice) -> String {
        choice.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_reads_back() {
        for text in ["auto", "cpu", "gpu", "gpu:3", "lavapipe", "geforce"] {
            let choice: DeviceChoice = text.parse().expect("a device");
            assert_eq!(choice.to_string(), text);
        }
        assert_eq!("Vulkan".parse(), Ok(DeviceChoice::Named("vulkan".into())));
        assert!("gpu:one".parse::<DeviceChoice>().is_err());
        assert!(" ".parse::<DeviceChoice>().is_err());
    }
}
