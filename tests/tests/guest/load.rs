//! Which bytes are loaded at all, and that compiled code is kept.

use kvmig::sandbox::{LoadError, Origin, Sandbox, SandboxError, SandboxLimits, bundled};

use crate::bench::{Case, HEAD_MATCHED, HOSTILE, MLP, RIDGE, SANDBOX};

fn load_error(bytes: &[u8]) -> LoadError {
    match SANDBOX.load(bytes) {
        Err(SandboxError::Load { error, .. }) => error,
        other => panic!("expected a load error, found {other:?}"),
    }
}

/// A component that does nothing but import an instance without functions.
fn importing(name: &str) -> Vec<u8> {
    let mut bytes = b"\0asm\x0d\0\x01\0".to_vec();
    bytes.extend([7, 3, 1, 0x42, 0]); // type section: one instance type, no declarations
    let name = name.as_bytes();
    bytes.extend([10, name.len() as u8 + 5, 1, 0, name.len() as u8]); // import section: one name
    bytes.extend(name);
    bytes.extend([5, 0]); // an instance of type 0
    bytes
}

#[test]
fn every_built_guest_is_tested() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../mappers/built");
    let mut built: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".wasm"))
        .collect();
    built.sort();
    assert_eq!(
        built,
        ["head-matched.wasm", "hostile.wasm", "mlp.wasm", "ridge.wasm"],
        "a guest was added: give it a test, then name it here"
    );
}

/// What was built is what the record of its building says.
#[test]
fn the_built_guests_are_those_of_their_provenance() {
    let provenance = include_str!("../../../mappers/built/PROVENANCE.toml");
    for (name, bytes) in [
        ("head-matched.wasm", bundled::HEAD_MATCHED),
        ("hostile.wasm", HOSTILE),
        ("mlp.wasm", bundled::MLP),
        ("ridge.wasm", bundled::RIDGE),
    ] {
        let line = format!("\"{name}\" = \"{}\"", kvmig_gate::Digest::of(bytes));
        assert!(provenance.lines().any(|found| found == line), "{line}: not in mappers/built/PROVENANCE.toml");
    }
}

#[test]
fn the_modules_say_what_they_are() {
    for (module, bytes, kind) in [
        (&RIDGE, bundled::RIDGE, "ridge"),
        (&HEAD_MATCHED, bundled::HEAD_MATCHED, "head-matched"),
        (&MLP, bundled::MLP, "mlp"),
    ] {
        let metadata = module.metadata();
        assert_eq!((&metadata.name, &metadata.kinds), (&format!("kvmig-{kind}"), &vec![kind.to_owned()]));
        assert_eq!(module.digest(), kvmig_gate::Digest::of(bytes));
    }
}

#[test]
fn what_is_no_component_is_refused() {
    let truncated = &bundled::RIDGE[..bundled::RIDGE.len() - 100];
    let core_module = b"\0asm\x01\0\0\0";
    for bytes in [b"".as_slice(), b"not wasm", core_module, truncated] {
        let error = load_error(bytes);
        assert!(matches!(error, LoadError::Invalid { .. }), "{error}");
        assert!(!error.to_string().contains('\n'), "{error}");
    }
}

#[test]
fn a_component_that_is_too_long_is_refused() {
    let limits = SandboxLimits { component_bytes: 1000, ..SandboxLimits::default() };
    let error = Sandbox::new(limits, None).unwrap().load(bundled::RIDGE).unwrap_err();
    assert!(matches!(error, SandboxError::Load { error: LoadError::TooLong { most: 1000, .. }, .. }), "{error}");
}

#[test]
fn imports_beyond_the_contract_are_refused_by_name() {
    for name in ["wasi:cli/environment@0.2.0", "kvmig:mapper/gpu@0.2.0", "kvmig:mapper/cache@0.1.0"] {
        let error = load_error(&importing(name));
        let LoadError::Import { import, .. } = &error else { panic!("{error}") };
        assert_eq!(import, name);
    }
}

#[test]
fn a_component_without_the_contracts_functions_is_refused() {
    for bytes in [b"\0asm\x0d\0\x01\0".to_vec(), importing("kvmig:mapper/gpu@0.1.0")] {
        let error = load_error(&bytes);
        assert!(matches!(error, LoadError::Contract { .. }), "{error}");
    }
}

#[test]
fn compiled_code_is_loaded_the_second_time_and_records_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let sandbox = || Sandbox::new(SandboxLimits::default(), Some(&folder.path().join("modules"))).unwrap();
    let first = sandbox().load(bundled::RIDGE).unwrap();
    let second = sandbox().load(bundled::RIDGE).unwrap();
    assert_eq!((first.origin(), second.origin()), (Origin::Compiled, Origin::Stored));
    let case = Case::qwen();
    assert_eq!(case.record(&first, 100).unwrap(), case.record(&second, 100).unwrap());
}
