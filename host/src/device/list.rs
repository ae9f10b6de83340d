//! What there is, what is missing, and the mend: `kvmig devices`.

use serde::Serialize;

use super::{Device, DeviceChoice, DeviceInfo, DeviceKind, Limits, SelfTest, open, selftest};
use crate::gpu::{self, Adapter, AdapterKind};

/// The devices of this machine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceList {
    /// What is there: the CPU, then hardware GPUs, then software adapters.
    pub devices: Vec<DeviceEntry>,
    /// What kvmig could use and is not there.
    pub missing: Vec<Missing>,
}

/// One device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceEntry {
    /// What `--device` takes for exactly this one.
    pub choice: DeviceChoice,
    /// A name for people, where there is a shorter one: `lavapipe`.
    pub alias: Option<&'static str>,
    /// Whether it is hardware; the CPU is.
    pub hardware: bool,
    /// What it is.
    #[serde(flatten)]
    pub info: DeviceInfo,
    /// Features that matter to kernels.
    pub features: Vec<String>,
    /// What a module may count on there; absent where the device can't be opened.
    pub limits: Option<Limits>,
    /// Whether it computes right.
    pub self_test: SelfTestStatus,
}

/// Outcome of a self-test.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "status", rename_all = "kebab-case")]
pub enum SelfTestStatus {
    /// Passed, with its figures.
    Passed(SelfTest),
    /// The device is refused; the message names the figure or the driver's reason.
    Refused {
        /// Why.
        reason: String,
    },
}

/// A device that is not there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Missing {
    /// What `--device` would take for it.
    pub name: &'static str,
    /// What would make it appear.
    pub mend: String,
}

/// Lists the devices; every adapter is opened and tested.
pub fn devices() -> DeviceList {
    let adapters = gpu::adapters();
    let mut devices = vec![cpu_entry()];
    devices.extend(adapters.iter().enumerate().map(|(index, adapter)| entry(index, adapter)));
    let mut missing = Vec::new();
    if !adapters.iter().any(|adapter| adapter.kind == AdapterKind::Hardware) {
        missing.push("gpu");
    }
    if cfg!(target_os = "linux") {
        for kind in [AdapterKind::Lavapipe, AdapterKind::SwiftShader, AdapterKind::Llvmpipe] {
            if !adapters.iter().any(|adapter| adapter.kind == kind) {
                missing.extend(kind.software_name());
            }
        }
    }
    let missing = missing
        .into_iter()
        .map(|name| {
            let choice = if name == "gpu" { DeviceChoice::Gpu } else { DeviceChoice::Named(name.to_owned()) };
            Missing { name, mend: mend(&choice) }
        })
        .collect();
    DeviceList { devices, missing }
}

fn cpu_entry() -> DeviceEntry {
    let device = Device::Cpu(super::CpuDevice::default());
    DeviceEntry {
        choice: DeviceChoice::Cpu,
        alias: None,
        hardware: true,
        info: cpu_info(),
        features: vector_features().into_iter().map(str::to_owned).collect(),
        limits: Some(device.limits()),
        self_test: match selftest::run(&device) {
            Ok(test) => SelfTestStatus::Passed(test),
            Err(error) => SelfTestStatus::Refused { reason: error.to_string() },
        },
    }
}

fn entry(index: usize, adapter: &Adapter) -> DeviceEntry {
    let opened = open::open_adapter(adapter);
    DeviceEntry {
        choice: DeviceChoice::Index(index),
        alias: adapter.kind.software_name(),
        hardware: adapter.kind == AdapterKind::Hardware,
        info: adapter_info(adapter),
        features: adapter.features().into_iter().map(str::to_owned).collect(),
        limits: opened.as_ref().ok().map(Device::limits),
        self_test: match opened.and_then(|device| selftest::require(&device, adapter)) {
            Ok(test) => SelfTestStatus::Passed(test),
            Err(error) => SelfTestStatus::Refused { reason: error.to_string() },
        },
    }
}

pub(super) fn adapter_info(adapter: &Adapter) -> DeviceInfo {
    DeviceInfo {
        kind: DeviceKind::Gpu,
        name: adapter.info.name.clone(),
        backend: adapter.backend().to_owned(),
        driver: adapter.driver(),
    }
}

pub(super) fn cpu_info() -> DeviceInfo {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    DeviceInfo {
        kind: DeviceKind::Cpu,
        name: format!("{} CPU, {threads} threads", std::env::consts::ARCH),
        backend: "cpu".to_owned(),
        driver: vector_features().join(" "),
    }
}

/// The vector instructions that the matrix product chooses between.
fn vector_features() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        let mut features = Vec::new();
        if std::is_x86_feature_detected!("avx512f") {
            features.push("avx512f");
        }
        if std::is_x86_feature_detected!("fma") {
            features.push("fma");
        }
        if std::is_x86_feature_detected!("f16c") {
            features.push("f16c");
        }
        features
    }
    #[cfg(target_arch = "aarch64")]
    {
        vec!["neon"]
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        Vec::new()
    }
}

/// What would make a missing device appear.
pub(super) fn mend(choice: &DeviceChoice) -> String {
    let driver_files = match std::env::var("VK_DRIVER_FILES").or_else(|_| std::env::var("VK_ICD_FILENAMES")) {
        Ok(files) => format!(" VK_DRIVER_FILES limits Vulkan to {files}: add its .json there, or unset it."),
        Err(_) => String::new(),
    };
    let name = match choice {
        DeviceChoice::Named(name) => name.as_str(),
        DeviceChoice::Gpu => "gpu",
        _ => "",
    };
    match name {
        "lavapipe" => format!("Debian and Ubuntu: apt-get install mesa-vulkan-drivers libvulkan1.{driver_files}"),
        "swiftshader" => format!(
            "Debian: .ci/install-drivers FOLDER extracts it from the chromium package and prints the VK_DRIVER_FILES line \
             to export.{driver_files}"
        ),
        "llvmpipe" | "gl" | "gles" | "opengl" => {
            "Debian and Ubuntu: apt-get install libegl1 libgl1-mesa-dri.".to_owned()
        }
        "vulkan" | "gpu" => format!(
            "Install the vendor's driver and the Vulkan loader (Debian and Ubuntu: apt-get install libvulkan1; Mesa's \
             drivers for AMD and Intel: mesa-vulkan-drivers), or use --device cpu.{driver_files}"
        ),
        "metal" => "Metal is there on macOS only; use --device cpu.".to_owned(),
        "dx12" | "warp" => "Direct3D is there on Windows only; use --device cpu.".to_owned(),
        _ => format!("`kvmig devices` lists what there is and what is missing.{driver_files}"),
    }
}
