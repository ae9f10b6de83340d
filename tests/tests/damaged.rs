//! Models whose files are absent, cut off, damaged or of another model: an error that names file and field, never a panic.

use std::{
    fs,
    path::{Path, PathBuf},
};

use kvmig::engine::{EngineError, LoadOptions, Model, ModelSource};
use tempfile::TempDir;

/// A copy of the bundled medium that may be damaged.
struct Copy(TempDir);

impl Copy {
    fn new() -> Copy {
        let family = Path::new(env!("CARGO_MANIFEST_DIR")).join("../host/assets/family");
        let copy = tempfile::tempdir().unwrap();
        for name in ["medium/config.json", "medium/model.safetensors", "tokenizer.json"] {
            let from = family.join(name);
            fs::copy(&from, copy.path().join(from.file_name().unwrap())).unwrap();
        }
        Copy(copy)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn edit(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = fs::read(self.file(name)).unwrap();
        change(&mut bytes);
        fs::write(self.file(name), bytes).unwrap();
    }

    fn set(&self, field: &str, value: serde_json::Value) {
        self.edit("config.json", |bytes| {
            let mut config: serde_json::Value = serde_json::from_slice(bytes).unwrap();
            config[field] = value;
            *bytes = serde_json::to_vec(&config).unwrap();
        });
    }

    /// The error of loading it, which has to name `words`.
    fn error(&self, words: &[&str]) -> EngineError {
        load_error(self.0.path(), words)
    }
}

fn load_error(path: &Path, words: &[&str]) -> EngineError {
    let error = Model::load(&ModelSource::from(path), LoadOptions::default()).expect_err("the model is damaged");
    let message = error.to_string();
    for word in words {
        assert!(message.contains(word), "`{message}` does not name `{word}`");
    }
    error
}

#[test]
fn absent_files_are_named_with_the_mend() {
    let nowhere = Path::new("/nowhere/model.gguf");
    assert!(matches!(load_error(nowhere, &["/nowhere/model.gguf"]), EngineError::Absent { .. }));
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        let copy = Copy::new();
        fs::remove_file(copy.file(name)).unwrap();
        assert!(matches!(copy.error(&[name]), EngineError::Absent { .. }));
    }
}

#[test]
fn truncated_weights_say_how_long_they_should_be() {
    let whole = Copy::new();
    let length = fs::metadata(whole.file("model.safetensors")).unwrap().len();
    for kept in [0, 7, 100, length / 2, length - 1] {
        let copy = Copy::new();
        copy.edit("model.safetensors", |bytes| bytes.truncate(kept as usize));
        let error = copy.error(&["model.safetensors", "truncated"]);
        let EngineError::Truncated { found, expected, .. } = error else { panic!("{kept}: {error}") };
        assert_eq!(found, kept);
        assert!(expected > kept && expected <= length);
    }
}

#[test]
fn a_nan_weight_is_named() {
    let copy = Copy::new();
    // The last two bytes belong to some tensor's last f16.
    copy.edit("model.safetensors", |bytes| {
        let end = bytes.len();
        bytes[end - 2..].copy_from_slice(&[0x00, 0x7e]);
    });
    assert!(matches!(copy.error(&["model.safetensors", "tensor", "NaN"]), EngineError::NotFinite { .. }));
}

#[test]
fn damaged_json_names_file_and_place() {
    for (name, bytes) in
        [("config.json", &b"{\"model_type\": \"lla"[..]), ("config.json", b"[1]"), ("config.json", b"\xff\xfe")]
    {
        let copy = Copy::new();
        fs::write(copy.file(name), bytes).unwrap();
        assert!(matches!(copy.error(&[name, "JSON"]), EngineError::Malformed { .. }));
    }
    let copy = Copy::new();
    fs::write(copy.file("tokenizer.json"), "{").unwrap();
    copy.error(&["tokenizer.json"]);
    let copy = Copy::new();
    copy.edit("model.safetensors", |bytes| bytes[8..16].fill(b'x'));
    assert!(matches!(copy.error(&["model.safetensors", "header"]), EngineError::Malformed { .. }));
}

#[test]
fn a_field_of_another_kind_is_named() {
    for (field, value) in [
        ("hidden_size", serde_json::json!("128")),
        ("num_hidden_layers", serde_json::json!(-6)),
        ("rms_norm_eps", serde_json::json!([])),
        ("num_key_value_heads", serde_json::json!(3)),
        ("head_dim", serde_json::json!(31)),
        ("eos_token_id", serde_json::json!("end")),
    ] {
        let copy = Copy::new();
        copy.set(field, value);
        assert!(matches!(copy.error(&["config.json", field]), EngineError::Malformed { .. }));
    }
}

#[test]
fn weights_of_another_configuration_are_refused() {
    let wider = Copy::new();
    wider.set("intermediate_size", 353.into());
    assert!(matches!(wider.error(&["model.safetensors", "mlp", "353"]), EngineError::Shape { .. }));
    let deeper = Copy::new();
    deeper.set("num_hidden_layers", 7.into());
    assert!(matches!(deeper.error(&["model.layers.6"]), EngineError::MissingTensor { .. }));
    let absurd = Copy::new();
    absurd.set("num_hidden_layers", 4_000_000_000u32.into());
    assert!(matches!(absurd.error(&["model.layers."]), EngineError::MissingTensor { .. }));
    let shallower = Copy::new();
    shallower.set("num_hidden_layers", 5.into());
    assert!(matches!(shallower.error(&["model.layers.5"]), EngineError::Unsupported { .. }));
    let own_head = Copy::new();
    own_head.set("tie_word_embeddings", false.into());
    assert!(matches!(own_head.error(&["lm_head.weight"]), EngineError::MissingTensor { .. }));
}

#[test]
fn a_tokenizer_of_another_model_is_refused() {
    let copy = Copy::new();
    copy.edit("tokenizer.json", |bytes| {
        let mut tokenizer: serde_json::Value = serde_json::from_slice(bytes).unwrap();
        tokenizer["model"]["vocab"]["one-too-many"] = 4096.into();
        *bytes = serde_json::to_vec(&tokenizer).unwrap();
    });
    assert!(matches!(copy.error(&["tokenizer.json", "4096"]), EngineError::Tokenizer { .. }));
}

#[test]
fn a_missing_shard_is_named_and_an_index_can_not_lead_elsewhere() {
    let copy = Copy::new();
    fs::remove_file(copy.file("model.safetensors")).unwrap();
    let index = |file: &str| serde_json::json!({"weight_map": {"model.norm.weight": file}}).to_string();
    fs::write(copy.file("model.safetensors.index.json"), index("model-00001-of-00001.safetensors")).unwrap();
    assert!(matches!(copy.error(&["model-00001-of-00001.safetensors"]), EngineError::Absent { .. }));
    fs::write(copy.file("model.safetensors.index.json"), index("../../etc/passwd")).unwrap();
    assert!(matches!(copy.error(&["weight_map.model.norm.weight"]), EngineError::Malformed { .. }));
}

fn gguf() -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/gguf/qwen2.gguf")).unwrap()
}

#[test]
fn a_gguf_file_cut_off_anywhere_is_truncated() {
    let whole = gguf();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cut.gguf");
    let header = (0..2000).step_by(37);
    let rest = (2000..whole.len()).step_by(whole.len() / 40);
    for kept in header.chain(rest).chain([whole.len() - 1]) {
        fs::write(&file, &whole[..kept]).unwrap();
        let error = load_error(&file, &["cut.gguf"]);
        assert!(matches!(error, EngineError::Truncated { .. }), "{kept} bytes: {error}");
    }
}

#[test]
fn a_gguf_file_with_any_damaged_byte_is_refused_or_read_but_never_panics() {
    let whole = gguf();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("damaged.gguf");
    for i in 0..400 {
        let mut bytes = whole.clone();
        // The header in steps, each byte another way.
        let at = i * 11 % 4400;
        bytes[at] ^= [0xff, 0x01, 0x80, 0x3c][i % 4];
        fs::write(&file, &bytes).unwrap();
        if let Err(error) = Model::load(&ModelSource::from(file.as_path()), LoadOptions::default()) {
            assert!(error.to_string().contains("damaged.gguf"), "byte {at}: {error}");
        }
    }
}

#[test]
fn a_file_that_is_no_model_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("notes.txt");
    fs::write(&file, "not a model").unwrap();
    assert!(matches!(load_error(&file, &["notes.txt", "magic"]), EngineError::Malformed { .. }));
}

/// A GGUF file of nothing but the divisors of the RoPE frequencies, which are read before any shape is known.
fn rope_freqs(kind: u32, extents: &[u64]) -> Vec<u8> {
    let name = b"rope_freqs.weight";
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    bytes.extend([1u64, 0].map(u64::to_le_bytes).concat());
    bytes.extend((name.len() as u64).to_le_bytes());
    bytes.extend(name);
    bytes.extend((extents.len() as u32).to_le_bytes());
    bytes.extend(extents.iter().flat_map(|extent| extent.to_le_bytes()));
    bytes.extend(kind.to_le_bytes());
    bytes.extend(0u64.to_le_bytes());
    bytes
}

#[test]
fn a_gguf_tensor_of_no_elements_or_of_too_many_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("extents.gguf");
    let (f32, q8_0, most) = (0, 8, u64::from(u32::MAX));
    fs::write(&file, rope_freqs(f32, &[most; 4])).unwrap();
    assert!(matches!(load_error(&file, &["extents.gguf", "rope_freqs.weight"]), EngineError::Truncated { .. }));
    for (kind, extents) in [(q8_0, &[0][..]), (f32, &[0]), (q8_0, &[most - 31, 0])] {
        fs::write(&file, rope_freqs(kind, extents)).unwrap();
        let error = load_error(&file, &["extents.gguf", "rope_freqs.weight", "at least one element"]);
        assert!(matches!(error, EngineError::Malformed { .. }), "{error}");
    }
}
