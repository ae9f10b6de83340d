//! The `kvmig` program.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    quiet_mesa();
    kvmig::cli::main()
}

/// Mesa's device-select layer asks the display which adapter to list first, and prints an error twice where there is none.
/// There, and where nobody has told it which to prefer, it is switched off.
fn quiet_mesa() {
    let told =
        ["XDG_RUNTIME_DIR", "WAYLAND_DISPLAY", "DISPLAY", "DRI_PRIME", "MESA_VK_DEVICE_SELECT", "NODEVICE_SELECT"];
    if told.iter().all(|name| std::env::var_os(name).is_none()) {
        kvmig_raw::environment::set_while_alone("NODEVICE_SELECT", "1");
    }
}
