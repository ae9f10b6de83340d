//! Which adapters there are, and which of them are hardware.

use std::sync::OnceLock;

/// Hardware, or which program pretends to be one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AdapterKind {
    /// A GPU.
    Hardware,
    /// Mesa's Vulkan on the CPU.
    Lavapipe,
    /// Mesa's OpenGL on the CPU.
    Llvmpipe,
    /// Google's Vulkan on the CPU.
    SwiftShader,
    /// Microsoft's Direct3D on the CPU.
    Warp,
    /// Another program on the CPU.
    Software,
}

impl AdapterKind {
    /// From what the driver says of itself. Drivers disagree on which field names the program, and some report a CPU as
    /// "other" or as a virtual GPU, so that the type alone does not tell.
    fn of(info: &wgpu::AdapterInfo) -> AdapterKind {
        let text = format!("{} {} {}", info.name, info.driver, info.driver_info).to_lowercase();
        if text.contains("swiftshader") {
            AdapterKind::SwiftShader
        } else if text.contains("llvmpipe") || text.contains("lavapipe") {
            if info.backend == wgpu::Backend::Vulkan { AdapterKind::Lavapipe } else { AdapterKind::Llvmpipe }
        } else if text.contains("microsoft basic render") || text.split(' ').any(|word| word == "warp") {
            AdapterKind::Warp
        } else if info.device_type == wgpu::DeviceType::Cpu
            || ["softpipe", "software rasterizer"].iter().any(|name| text.contains(name))
        {
            AdapterKind::Software
        } else {
            AdapterKind::Hardware
        }
    }

    /// The name that `--device` takes for a software driver.
    pub(crate) fn software_name(self) -> Option<&'static str> {
        match self {
            AdapterKind::Hardware | AdapterKind::Software => None,
            AdapterKind::Lavapipe => Some("lavapipe"),
            AdapterKind::Llvmpipe => Some("llvmpipe"),
            AdapterKind::SwiftShader => Some("swiftshader"),
            AdapterKind::Warp => Some("warp"),
        }
    }
}

/// An adapter and what it says of itself.
#[derive(Debug)]
pub(crate) struct Adapter {
    /// Hardware or not.
    pub(crate) kind: AdapterKind,
    /// Name, backend and driver in its own words.
    pub(crate) info: wgpu::AdapterInfo,
    pub(super) inner: wgpu::Adapter,
}

impl Adapter {
    /// Backend in lower case, as `--device` takes it.
    pub(crate) fn backend(&self) -> &'static str {
        match self.info.backend {
            wgpu::Backend::Vulkan => "vulkan",
            wgpu::Backend::Metal => "metal",
            wgpu::Backend::Dx12 => "dx12",
            wgpu::Backend::Gl => "gl",
            wgpu::Backend::BrowserWebGpu => "webgpu",
            wgpu::Backend::Noop => "noop",
        }
    }

    /// Driver and its version.
    pub(crate) fn driver(&self) -> String {
        format!("{} {}", self.info.driver, self.info.driver_info).trim().to_owned()
    }

    /// Name for messages: `llvmpipe (LLVM 15.0.6, 256 bits) [vulkan]`.
    pub(crate) fn title(&self) -> String {
        format!("{} [{}]", self.info.name, self.backend())
    }

    /// The adapter's own limits.
    pub(crate) fn limits(&self) -> wgpu::Limits {
        self.inner.limits()
    }

    /// Whether shaders may compute in half precision.
    pub(crate) fn half(&self) -> bool {
        self.inner.features().contains(wgpu::Features::SHADER_F16)
    }

    /// Names of the features that matter to kernels.
    pub(crate) fn features(&self) -> Vec<&'static str> {
        let has = self.inner.features();
        [
            (wgpu::Features::SHADER_F16, "shader-f16"),
            (wgpu::Features::SUBGROUP, "subgroup"),
            (wgpu::Features::TIMESTAMP_QUERY, "timestamp-query"),
        ]
        .into_iter()
        .filter_map(|(feature, name)| has.contains(feature).then_some(name))
        .collect()
    }

    /// Whether the adapter can run compute shaders at all (old OpenGL can't).
    pub(crate) fn computes(&self) -> bool {
        self.inner.get_downlevel_capabilities().flags.contains(wgpu::DownlevelFlags::COMPUTE_SHADERS)
    }
}

/// Every adapter of every native backend, hardware first, in the order in which the drivers list them.
///
/// Asked once per process: drivers take up to a second to load.
pub(crate) fn adapters() -> &'static [Adapter] {
    static ADAPTERS: OnceLock<Vec<Adapter>> = OnceLock::new();
    ADAPTERS.get_or_init(|| {
        let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
        // The default depends on debug assertions: a driver's validation layer must not come and go with the profile.
        descriptor.flags = wgpu::InstanceFlags::empty().with_env();
        let instance = wgpu::Instance::new(descriptor);
        let found = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()));
        let mut adapters: Vec<_> = found
            .into_iter()
            .map(|inner| {
                let info = inner.get_info();
                Adapter { kind: AdapterKind::of(&info), info, inner }
            })
            .collect();
        adapters.sort_by_key(|adapter| adapter.kind != AdapterKind::Hardware);
        adapters
    })
}
