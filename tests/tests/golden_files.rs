//! The files of known answers are whole, and say what their README says.

use kvmig_tests::golden::{self, Answer, GoldenError, Location};

/// The scripts promise that no greedy step is a near tie.
const MARGIN: f32 = 5e-3;

fn check(name: &str, answer: &Answer) {
    assert!(!answer.tokens.is_empty() && answer.greedy.len() >= 32, "{name}: too short to tell anything");
    assert!(answer.greedy_margin.iter().all(|&margin| margin >= MARGIN), "{name}: a greedy step is a near tie");
    assert_eq!(answer.last.ids.len(), answer.last.logits.len(), "{name}");

    // The first greedy token, the last row and the patch's last row are one and the same row.
    let best = match answer.last.top.first() {
        Some(&(id, _)) => id,
        None => {
            let best = answer.last.logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
            best.map(|(id, _)| id as u32).unwrap()
        }
    };
    assert_eq!(best, answer.greedy[0], "{name}");
    let end = answer.tokens.len() - 1;
    let mut met = 0;
    for (row, id, logit) in answer.logits.iter().filter(|&(row, ..)| row == end) {
        if let Ok(at) = answer.last.ids.binary_search(&(id as u32)) {
            assert_eq!(logit, answer.last.logits[at], "{name}: row {row}, token {id}");
            met += 1;
        }
    }
    assert!(met > 0, "{name}: the sample leaves out the last row");

    let kv = &answer.kv;
    let rows = kv.layers.len() * kv.kv_heads * kv.positions.len();
    assert_eq!(kv.rows().count(), rows, "{name}");
    assert!(kv.rows().all(|row| row.k.len() == kv.head_dim && row.v.len() == kv.head_dim), "{name}");
    let ends = (kv.positions.first(), kv.positions.last());
    assert_eq!(ends, (Some(&0), Some(&(end as u32))), "{name}: the first or last position is left out");
}

#[test]
fn engine_cases_are_whole() {
    let cases = golden::engine().unwrap();
    assert!(cases.iter().any(|case| matches!(case.model, Location::Family(_)) && case.answer.tokens.len() >= 200));
    for case in &cases {
        check(&case.name, &case.answer);
        if let Location::Path(folder) = &case.model {
            assert!(folder.join("config.json").is_file() && folder.join("tokenizer.json").is_file(), "{}", case.name);
        }
    }
}

#[test]
fn gguf_cases_are_whole() {
    let cases = golden::gguf().unwrap();
    assert_eq!(cases.len(), 2);
    for case in &cases {
        check(&case.name, &case.answer);
        assert!(!case.strings.is_empty(), "{}", case.name);
    }
    let (file, values) = golden::elements().unwrap();
    assert!(file.is_file());
    assert_eq!(values.len(), 11, "one tensor of every element type that the engine reads");
}

#[test]
fn real_models_have_answers() {
    for model in golden::real_models().unwrap() {
        assert_eq!(model.sha256.len(), 64, "{}", model.model);
        for case in &model.cases {
            let answer = case.answer().unwrap();
            check(&case.name, &answer);
            assert_eq!(answer.about["prompt"], case.prompt, "{}", case.name);
            assert_eq!(answer.about["continuation"], case.continuation, "{}", case.name);
        }
    }
}

#[test]
fn refused_configurations_stand_without_weights() {
    for case in golden::refused().unwrap() {
        assert!(case.model.join("config.json").is_file(), "{}", case.name);
        assert!(!case.model.join("model.safetensors").exists(), "{}: weights would hide a late refusal", case.name);
        assert!(!case.must_name.is_empty(), "{}", case.name);
    }
}

#[test]
fn a_missing_answer_names_its_file() {
    let file = golden::folder().join("engine/answers/no-such-case.safetensors");
    let error = Answer::read(&file).unwrap_err();
    assert!(matches!(error, GoldenError::Read { .. }));
    assert!(error.to_string().contains("no-such-case.safetensors"), "{error}");
}
