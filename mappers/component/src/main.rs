//! `kvmig-component CORE.wasm COMPONENT.wasm`: turns a guest's core module, which carries its WIT world in a custom
//! section, into a component. Runs on the machine that builds, not in the sandbox.
#![forbid(unsafe_code)]

use std::{error::Error, fs, path::Path, process::ExitCode};

use wit_component::ComponentEncoder;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let [core, component] = &arguments[..] else {
        eprintln!("usage: kvmig-component CORE.wasm COMPONENT.wasm");
        return ExitCode::from(2);
    };
    match encode(core.as_ref(), component.as_ref()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{}: {why}", Path::new(core).display());
            ExitCode::from(2)
        }
    }
}

fn encode(core: &Path, component: &Path) -> Result<(), Box<dyn Error>> {
    let encode = || ComponentEncoder::default().module(&fs::read(core)?)?.validate(true).encode();
    let bytes = encode().map_err(|why| format!("{why:#}"))?;
    Ok(fs::write(component, bytes)?)
}
