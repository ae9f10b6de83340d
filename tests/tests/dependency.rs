//! Who may depend on what: the layout is the architecture.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Names of everything that `package` is built from on this machine, itself included; without what only its tests or build
/// scripts use. (For other machines' crates cargo would have to fetch them.)
fn built_from(package: &str) -> BTreeSet<String> {
    let output = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .current_dir(workspace())
        .args(["tree", "--package", package, "--edges", "normal", "--prefix", "none"])
        .args(["--format", "{p}", "--locked", "--offline"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let tree = String::from_utf8(output.stdout).unwrap();
    let names: BTreeSet<_> = tree.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect();
    assert!(names.contains(package), "{tree}");
    names
}

/// Families of crates, by the beginning of their names.
const GPU: &[&str] = &["wgpu", "naga", "ash", "glow", "metal", "gpu-", "khronos", "windows"];
const WASM: &[&str] = &["wasm", "cranelift", "wit-", "regalloc2"];
const TENSOR: &[&str] = &["candle", "gemm", "kvmig-gemm", "safetensors", "tokenizers", "half", "ndarray"];

fn assert_free_of(package: &str, families: &[&[&str]]) {
    let names = built_from(package);
    let found: Vec<_> =
        names.iter().filter(|name| families.iter().copied().flatten().any(|family| name.starts_with(family))).collect();
    assert!(found.is_empty(), "{package} is built from {found:?}");
}

#[test]
fn the_gate_knows_no_gpu_no_wasm_and_no_tensors() {
    assert_free_of("kvmig-gate", &[GPU, WASM, TENSOR]);
}

#[test]
fn the_gate_points_at_nothing_of_ours() {
    let ours: Vec<_> = built_from("kvmig-gate").into_iter().filter(|name| name.starts_with("kvmig")).collect();
    assert_eq!(ours, ["kvmig-gate"]);
}

#[test]
fn unsafe_helpers_know_no_gate() {
    for package in ["kvmig-raw", "kvmig-gemm"] {
        assert!(!built_from(package).contains("kvmig-gate"), "{package}");
    }
}

#[test]
fn shaders_are_data_for_whatever_gpu_api() {
    let names = built_from("kvmig-shaders");
    let found: Vec<_> =
        names.iter().filter(|name| name.starts_with("wgpu") || name.starts_with("kvmig-gate")).collect();
    assert!(found.is_empty(), "kvmig-shaders is built from {found:?}");
    assert_free_of("kvmig-shaders", &[WASM]);
}

/// The search finds what is there: were its families misspelt, the tests above would pass for nothing.
#[test]
fn the_host_is_built_from_all_of_them() {
    let names = built_from("kvmig");
    for family in ["wgpu", "naga", "wasm", "cranelift", "candle", "gemm", "safetensors", "tokenizers", "kvmig-gate"] {
        assert!(names.iter().any(|name| name.starts_with(family)), "{family}");
    }
}

/// Rust files below `folder`, relative to the workspace, with `/` between their parts.
fn sources(folder: &str) -> Vec<(String, String)> {
    let root = workspace();
    let mut folders = vec![root.join(folder)];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name: Vec<_> =
                    path.strip_prefix(&root).unwrap().iter().map(|part| part.to_str().unwrap()).collect();
                found.push((name.join("/"), fs::read_to_string(&path).unwrap()));
            }
        }
    }
    assert!(!found.is_empty(), "no source below {folder}");
    found
}

/// Whether code names a crate: a path that begins with it (`wgpu::`, `wgpu_core::`) or its import (`use wgpu;`,
/// `use wgpu as`). Prose about it, in a comment or a message, is no dependency.
fn names_crate(source: &str, family: &str) -> bool {
    source.lines().map(|line| line.split("//").next().unwrap_or_default()).any(|code| {
        code.match_indices(family).any(|(start, _)| {
            let is_part = |c: char| c.is_alphanumeric() || c == '_';
            let begins = !code[..start].ends_with(is_part);
            let rest = code[start..].trim_start_matches(is_part);
            let imported = code[..start].trim_end().ends_with("use") || code[..start].trim_end().ends_with("crate");
            begins && (rest.starts_with("::") || imported && (rest.starts_with(';') || rest.starts_with(" as ")))
        })
    })
}

#[test]
fn the_search_tells_code_from_prose() {
    for code in [
        "use wgpu::Device;",
        "let x: wgpu_types::Y;",
        "use wgpu;",
        "use wgpu as gpu;",
        "f(&wgpu::Z)",
        "extern crate wgpu;",
    ] {
        assert!(names_crate(code, "wgpu"), "{code}");
    }
    for prose in ["// wgpu::Device", "\"needs wgpu 30\"", "my_wgpu::x", "let wgpu = 1;", "wgpu_adapter(1)"] {
        assert!(!names_crate(prose, "wgpu"), "{prose}");
    }
}

const ALL_SOURCES: &[&str] = &["host", "gate", "shaders", "tests/src", "tests/tests", "benches"];
/// It quotes what it looks for.
const THIS_FILE: &str = "tests/tests/dependency.rs";

fn assert_only_in(family: &str, rooms: &[&str]) {
    let outside: Vec<_> = ALL_SOURCES
        .iter()
        .flat_map(|folder| sources(folder))
        .filter(|(file, _)| file != THIS_FILE && !rooms.iter().any(|room| file.starts_with(room)))
        .filter(|(_, source)| names_crate(source, family))
        .map(|(file, _)| file)
        .collect();
    assert!(outside.is_empty(), "{family} is named outside {rooms:?}: {outside:?}");
}

#[test]
fn wgpu_is_named_in_one_room() {
    assert_only_in("wgpu", &["host/src/gpu/", "host/src/gpu.rs"]);
}

#[test]
fn wasmtime_is_named_in_one_room() {
    assert_only_in("wasmtime", &["host/src/sandbox/", "host/src/sandbox.rs", "host/raw/"]);
}

#[test]
fn candle_is_named_in_the_engine_and_the_mlp_fit() {
    assert_only_in("candle", &["host/src/engine/", "host/src/engine.rs", "host/src/fit/mlp"]);
}

#[test]
fn rusqlite_is_named_in_the_ledger_and_its_tests() {
    // Its tests look into it; those of the handoff break it on the way.
    assert_only_in("rusqlite", &["gate/src/ledger/", "tests/tests/gate/", "tests/tests/handoff/"]);
}

#[test]
fn the_ledger_is_opened_in_one_place() {
    let places: Vec<_> = sources("host/src")
        .into_iter()
        .filter(|(_, source)| source.contains("Gate::open("))
        .map(|(file, source)| (file, source.matches("Gate::open(").count()))
        .collect();
    assert!(matches!(places.as_slice(), [(_, 1)]), "expected one call of Gate::open, found {places:?}");
}

/// Crates that may hold unsafe code, each with its soundness argument.
const UNSAFE: &[&str] = &["host/raw/", "shaders/gemm/"];

#[test]
fn unsafe_code_is_in_two_crates() {
    for root in ["gate/src/lib.rs", "host/src/lib.rs", "shaders/src/lib.rs", "tests/src/lib.rs"] {
        let source = fs::read_to_string(workspace().join(root)).unwrap();
        assert!(source.contains("#![forbid(unsafe_code)]"), "{root}");
    }
    // Binaries are crates of their own, which a library's attribute says nothing of.
    let is_unsafe = |source: &str| {
        source.lines().map(|line| line.split("//").next().unwrap_or_default()).any(|code| {
            ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern", "unsafe trait"]
                .iter()
                .any(|use_| code.contains(use_))
        })
    };
    let holders: BTreeSet<_> = ALL_SOURCES
        .iter()
        .flat_map(|folder| sources(folder))
        .filter(|(file, source)| file != THIS_FILE && is_unsafe(source))
        .map(|(file, _)| file)
        .filter(|file| !UNSAFE.iter().any(|room| file.starts_with(room)))
        .collect();
    assert!(holders.is_empty(), "unsafe code outside {UNSAFE:?}: {holders:?}");
}
