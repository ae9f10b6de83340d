//! Input that no fit can use: an error that names it and the mend, and nothing of it kept.

use std::{
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use kvmig::{
    engine::{LoadOptions, Model, ModelSource},
    fit::{FitError, MapperKind, Progress, head_matched::Weighting},
};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use super::{Setup, family};

fn never(_: Progress) -> ControlFlow<()> {
    panic!("a model ran")
}

fn assert_says(error: &FitError, words: &[&str]) {
    let message = error.to_string();
    for word in words {
        assert!(message.contains(word), "`{message}` does not say `{word}`");
    }
}

/// A copy of the bundled large model, in a folder of that name, that may be changed.
fn copy_of_large(folder: &Path) -> PathBuf {
    let copy = folder.join("large");
    fs::create_dir(&copy).unwrap();
    for name in ["large/config.json", "large/model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        let from = family().join(name);
        fs::copy(&from, copy.join(from.file_name().unwrap())).unwrap();
    }
    copy
}

fn load(folder: &Path) -> Model {
    Model::load(&ModelSource::from(folder.to_owned()), LoadOptions::default()).unwrap()
}

#[test]
fn a_corpus_smaller_than_asked_is_refused_before_a_model_runs() {
    let setup = Setup::new();
    let mut options = setup.options("pair");
    options.tokens = 100_000;
    let error = setup.fit(&options, never).unwrap_err();
    assert_says(&error, &["calibration tokens", "expected at least 100000", "larger corpus", "--tokens "]);
    // What it names is what there is.
    let message = error.to_string();
    options.tokens = message.rsplit(' ').next().unwrap().parse().unwrap();
    let mut total = 0;
    let stopped = setup.fit(&options, |progress| {
        total = progress.total;
        ControlFlow::Break(())
    });
    assert!(matches!(stopped, Err(FitError::Interrupted { .. })), "{stopped:?}");
    assert_eq!(total, options.tokens);
    options.tokens += 1;
    assert_says(&setup.fit(&options, never).unwrap_err(), &["expected at least"]);
}

#[test]
fn a_tokenizer_that_differs_in_one_token_is_refused_before_a_model_runs() {
    let mut setup = Setup::new();
    let copy = copy_of_large(setup.folder.path());
    let file = copy.join("tokenizer.json");
    let mut tokenizer: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    // The last merge makes another token under the same number.
    let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let id = vocab.remove("\u{120}rev").unwrap();
    assert!(vocab.insert("\u{120}rez".to_owned(), id).is_none());
    let merge = tokenizer["model"]["merges"].as_array_mut().unwrap().last_mut().unwrap();
    assert_eq!(*merge, serde_json::json!(["\u{120}re", "v"]));
    merge[1] = "z".into();
    fs::write(&file, serde_json::to_vec(&tokenizer).unwrap()).unwrap();
    setup.target = load(&copy);
    let error = setup.fit(&setup.options("pair"), never).unwrap_err();
    assert!(matches!(error, FitError::Tokenizers(_)), "{error}");
    assert_says(&error, &["large/tokenizer.json", "tokenizer: found", "expected", "sibling of the source"]);
}

/// Weights that are finite, and keys that are not.
#[test]
fn activations_that_are_not_finite_are_kept_out() {
    let mut setup = Setup::new();
    let copy = copy_of_large(setup.folder.path());
    let file = copy.join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let name = "model.layers.3.self_attn.k_proj.weight";
    let huge = f32::MAX.to_le_bytes().repeat(128 * 192);
    let mut views = tensors.tensors();
    let (_, keys) = views.iter_mut().find(|(found, _)| found == name).unwrap();
    *keys = TensorView::new(Dtype::F32, vec![128, 192], &huge).unwrap();
    safetensors::serialize_to_file(views, None, &file).unwrap();

    for (mapper, words) in [
        (MapperKind::Ridge, ["large", "calibration sequence 0 (prose)", "are not finite"]),
        (MapperKind::HeadMatched(Weighting::Attention), ["large", "calibration sequence 0 (prose)", "overflows"]),
    ] {
        setup.target = load(&copy);
        let mut options = setup.options("pair");
        (options.k, options.mapper) = (Some(2), mapper);
        let error = setup.fit(&options, |_| ControlFlow::Continue(())).unwrap_err();
        assert!(matches!(error, FitError::NotFinite { sequence: 0, .. }), "{error}");
        assert_says(&error, &words);
        assert!(!options.out.exists() && !options.state_file().exists(), "nothing of it is kept");
        // And nothing is in the way of the model as it should be.
        setup.target = load(&family().join("large"));
        let stopped = setup.fit(&options, |progress| match progress.done {
            0 => ControlFlow::Continue(()),
            _ => ControlFlow::Break(()),
        });
        assert!(matches!(stopped, Err(FitError::Interrupted { .. })), "{stopped:?}");
        fs::remove_file(options.state_file()).unwrap();
    }
}
