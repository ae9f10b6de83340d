//! From a choice to an open device that passed its self-test.

use std::sync::Arc;

use super::{CpuDevice, Device, DeviceChoice, DeviceError, GpuDevice, list, selftest};
use crate::gpu::{self, Adapter, AdapterKind};

pub(super) fn open(choice: &DeviceChoice) -> Result<Device, DeviceError> {
    match choice {
        DeviceChoice::Cpu => Ok(Device::Cpu(CpuDevice::default())),
        DeviceChoice::Auto => {
            // Nobody asked for this GPU by name: one that does not work is passed over, and `kvmig devices` says why.
            let hardware = gpu::adapters().iter().filter(|adapter| adapter.kind == AdapterKind::Hardware);
            let first = hardware.map(open_adapter).find_map(Result::ok);
            Ok(first.unwrap_or(Device::Cpu(CpuDevice::default())))
        }
        explicit => {
            let names: Vec<Named> = gpu::adapters().iter().map(Named::from).collect();
            match pick(explicit, &names) {
                Some(index) => open_adapter(&gpu::adapters()[index]),
                None => Err(DeviceError::NotFound {
                    asked: explicit.to_string(),
                    found: found(&names),
                    mend: list::mend(explicit),
                }),
            }
        }
    }
}

/// Opens one adapter and tests it.
pub(super) fn open_adapter(adapter: &Adapter) -> Result<Device, DeviceError> {
    let context = gpu::Context::open(adapter)?;
    let device = Device::Gpu(GpuDevice { context: Arc::new(context), info: list::adapter_info(adapter) });
    selftest::require(&device, adapter)?;
    Ok(device)
}

/// What a choice is compared with.
#[derive(Debug)]
struct Named {
    kind: AdapterKind,
    backend: &'static str,
    /// Name and driver, lower case.
    text: String,
}

impl From<&Adapter> for Named {
    fn from(adapter: &Adapter) -> Named {
        let text = format!("{} {}", adapter.info.name, adapter.driver()).to_lowercase();
        Named { kind: adapter.kind, backend: adapter.backend(), text }
    }
}

/// Index of the adapter that is meant; the adapters are ordered hardware first.
fn pick(choice: &DeviceChoice, adapters: &[Named]) -> Option<usize> {
    let first = |wanted: &dyn Fn(&Named) -> bool| adapters.iter().position(wanted);
    match choice {
        DeviceChoice::Auto | DeviceChoice::Cpu => None,
        DeviceChoice::Gpu => first(&|adapter| adapter.kind == AdapterKind::Hardware),
        DeviceChoice::Index(index) => (*index < adapters.len()).then_some(*index),
        DeviceChoice::Named(name) => match name.as_str() {
            "vulkan" | "gl" | "metal" | "dx12" => first(&|adapter| adapter.backend == name),
            "opengl" | "gles" => first(&|adapter| adapter.backend == "gl"),
            "lavapipe" | "llvmpipe" | "swiftshader" | "warp" => {
                first(&|adapter| adapter.kind.software_name() == Some(name))
            }
            part => first(&|adapter| adapter.text.contains(part)),
        },
    }
}

fn found(adapters: &[Named]) -> String {
    let mut names = vec!["cpu".to_owned()];
    names.extend(adapters.iter().enumerate().map(|(i, adapter)| match adapter.kind.software_name() {
        Some(name) => format!("gpu:{i} ({name})"),
        None => format!("gpu:{i} ({}, {})", adapter.text, adapter.backend),
    }));
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapters() -> Vec<Named> {
        let named = |kind, backend, text: &str| Named { kind, backend, text: text.to_owned() };
        vec![
            named(AdapterKind::Hardware, "vulkan", "nvidia h200 nvidia 570"),
            named(AdapterKind::Lavapipe, "vulkan", "llvmpipe (llvm 15) llvmpipe mesa 22"),
            named(AdapterKind::SwiftShader, "vulkan", "swiftshader device (subzero)"),
            named(AdapterKind::Llvmpipe, "gl", "llvmpipe (llvm 15)"),
        ]
    }

    fn picked(name: &str) -> Option<usize> {
        pick(&name.parse().expect("a choice"), &adapters())
    }

    #[test]
    fn names_find_their_adapter() {
        assert_eq!(picked("gpu"), Some(0));
        assert_eq!(picked("vulkan"), Some(0));
        assert_eq!(picked("nvidia"), Some(0));
        assert_eq!(picked("lavapipe"), Some(1));
        assert_eq!(picked("gpu:2"), Some(2));
        assert_eq!(picked("swiftshader"), Some(2));
        assert_eq!(picked("llvmpipe"), Some(3));
        assert_eq!(picked("gl"), Some(3));
    }

    #[test]
    fn what_is_missing_is_not_replaced() {
        assert_eq!(picked("gpu:4"), None);
        assert_eq!(picked("metal"), None);
        assert_eq!(picked("radeon"), None);
        let software = &adapters()[1..];
        assert_eq!(pick(&DeviceChoice::Gpu, software), None);
    }

    #[test]
    fn a_missing_device_is_an_error_with_a_mend() {
        let error = open(&"no-such-adapter".parse().expect("a choice")).expect_err("no such adapter");
        assert!(matches!(error, DeviceError::NotFound { .. }), "{error}");
        assert!(error.to_string().contains("cpu"), "{error}");
    }
}
