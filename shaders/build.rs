//! Validates, lints and translates every kernel, and writes the table that `src/table.rs` includes. What a kernel declares
//! is read off the WGSL, so that a binding or a workgroup size is typed once.

#[path = "src/lint/mod.rs"]
#[expect(unreachable_pub, reason = "the library's own file: public there")]
mod lint;
#[path = "src/reflect.rs"]
#[expect(dead_code, unreachable_pub, reason = "the library's own file: public there, and used in full")]
mod reflect;
#[path = "build/translate.rs"]
mod translate;

use std::{env, error::Error, fmt::Write as _, fs, path::Path, process::ExitCode};

use reflect::{Features, Parsed};

/// A module: its name in the table, the files it is put together from, and what it needs of an adapter.
const MODULES: [(&str, &[&str], Features); 8] = [
    ("gather", &["gather.wgsl"], Features { f16: false }),
    ("affine_f32", &["weights_f32.wgsl", "pairs.wgsl", "affine.wgsl"], Features { f16: false }),
    ("affine_f16", &["weights_f16.wgsl", "pairs.wgsl", "affine.wgsl"], Features { f16: true }),
    ("affine_packed", &["weights_packed.wgsl", "pairs.wgsl", "affine.wgsl"], Features { f16: false }),
    ("heads_f32", &["weights_f32.wgsl", "pairs.wgsl", "heads.wgsl"], Features { f16: false }),
    ("heads_f16", &["weights_f16.wgsl", "pairs.wgsl", "heads.wgsl"], Features { f16: true }),
    ("heads_packed", &["weights_packed.wgsl", "pairs.wgsl", "heads.wgsl"], Features { f16: false }),
    ("scan", &["scan.wgsl"], Features { f16: false }),
];

fn main() -> ExitCode {
    match write_table() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Reports from naga have lines: printed as they are, not as a debug string.
            println!("cargo::error={}", error.to_string().replace('\n', "\ncargo::error="));
            ExitCode::FAILURE
        }
    }
}

fn write_table() -> Result<(), Box<dyn Error>> {
    for watched in ["build.rs", "build", "src/reflect.rs", "src/lint"] {
        println!("cargo:rerun-if-changed={watched}");
    }
    let mut table = String::from("&[\n");
    for (name, files, features) in MODULES {
        let mut source = String::new();
        for file in files {
            println!("cargo:rerun-if-changed={file}");
            source += &fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?;
        }
        table += &module(name, &source, features)?;
    }
    table += "]\n";
    fs::write(Path::new(&env::var("OUT_DIR")?).join("kernels.rs"), table)?;
    Ok(())
}

fn module(name: &str, source: &str, features: Features) -> Result<String, Box<dyn Error>> {
    let parsed = Parsed::new(name, source, features)?;
    let findings = lint::run(&parsed);
    if !findings.is_empty() {
        let lines: Vec<String> = findings.iter().map(ToString::to_string).collect();
        return Err(format!("shader {name}:\n{}", lines.join("\n")).into());
    }
    let backends = translate::all(name, &parsed.module, &parsed.info, features)?;
    let [entry] = parsed.entries() else {
        return Err(format!("shader {name}: one entry point expected, found {}", parsed.entries().len()).into());
    };

    let mut row = String::new();
    writeln!(row, "Shader {{ name: {name:?}, source: {source:?}, entry: {:?},", entry.name)?;
    writeln!(row, "    workgroup_size: {:?}, f16: {}, backends: &{backends:?},", entry.workgroup_size, features.f16)?;
    writeln!(row, "    bindings: &[")?;
    for b in &entry.bindings {
        if b.group != 0 || b.space != reflect::Space::Storage {
            return Err(format!("shader {name}: `{}` is not a storage buffer of group 0", b.name).into());
        }
        writeln!(
            row,
            "        Slot {{ index: {}, name: {:?}, access: Access::{:?}, declared_writable: {}, element: Element::{:?}, \
             min_bytes: {} }},",
            b.index, b.name, b.access, b.declared_writable, b.element, b.min_bytes
        )?;
    }
    writeln!(row, "    ],\n    structs: &[")?;
    for s in parsed.structs() {
        let members: Vec<String> = s.members.iter().map(|(name, offset)| format!("({name:?}, {offset})")).collect();
        writeln!(
            row,
            "        Layout {{ name: {:?}, span: {}, members: &[{}] }},",
            s.name,
            s.span,
            members.join(", ")
        )?;
    }
    writeln!(row, "    ],\n}},")?;
    Ok(row)
}
