//! A disk that is full, or rather one that takes no more than so many bytes of a file.

use std::{fs, path::Path, process::Output};

use crate::{kvmig_after, pairs::corpus, stderr, stdout};

/// A small fit into `folder/pair`, on a disk that takes `blocks` of 512 bytes a file, or of twice as many in some shells.
fn fit(folder: &Path, blocks: &str, more: &[&str]) -> Output {
    let [first, second] = corpus(folder);
    // Without the trap, the system ends the program instead of failing the write.
    let mut command = kvmig_after(&format!("trap '' XFSZ; ulimit -f {blocks}"), folder);
    command.args(["fit", "--source", "bundled:medium", "--target", "bundled:large", "--context", "96", "--tail", "8"]);
    // Documents to look into the pair on would be tried, and the ledger has little room too.
    command.args(["--selection", "0", "--evidence", "3", "--device", "cpu", "--corpus", &first, "--corpus", &second]);
    command.arg("--out").arg(folder.join("pair")).args(more).output().unwrap()
}

/// The error of such a fit, which has to name the file that found no room, and the mend.
fn error(output: &Output, file: &str) -> String {
    let said = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    let error = said.lines().last().unwrap();
    for part in [&format!("{file}: can't be written"), "make room and run the same command again"] {
        assert!(error.contains(part), "`{error}` does not say `{part}`");
    }
    error.to_owned()
}

/// What lies in the folder, hidden drafts included.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// First 4 MB, then 8: what fits is kept, and the next run goes on from it.
#[test]
fn no_room_for_rows() {
    let folder = tempfile::tempdir().unwrap();
    let kept = |blocks: &str| {
        let more = ["--mapper", "head-matched", "--k", "1", "--tokens", "1500"];
        let said = error(&fit(folder.path(), blocks, &more), "pair.rows");
        let kept = said.split("the ").find_map(|part| part.split_once(" sequences before it are kept"));
        let (kept, _) = kept.unwrap_or_else(|| panic!("{said}"));
        kept.parse::<usize>().unwrap()
    };
    let (few, more) = (kept("8000"), kept("16000"));
    assert!(few > 0 && more > few, "{few}, then {more}");
    assert!(!folder.path().join("pair").exists());
}

/// What was captured and measured before stays as it was, no draft is left, and with room the same command goes on.
#[test]
fn no_room_for_the_state_the_evidence_or_the_pair() {
    let folder = tempfile::tempdir().unwrap();
    let (folder, pair) = (folder.path(), folder.path().join("pair"));
    let small = ["--k", "4", "--weights", "f32", "--keep-state", "--tokens", "1400"];
    let larger = ["--k", "4", "--weights", "f32", "--keep-state", "--tokens", "1800"];
    let before = {
        let fitted = fit(folder, "unlimited", &small);
        assert!(fitted.status.success(), "{}", stderr(&fitted));
        fs::remove_dir_all(&pair).unwrap();
        names(folder)
    };
    let (state, log) = (folder.join("pair.state"), folder.join("pair.evidence.jsonl"));
    let (kept, measured) = (fs::read(&state).unwrap(), fs::read_to_string(&log).unwrap());

    // Neither 8 nor 16 MB hold the moments.
    error(&fit(folder, "16000", &larger), "pair.state");
    assert_eq!(names(folder), before);
    assert!(fs::read(&state).unwrap() == kept, "the earlier state is untouched");

    // Half a megabyte, or one, is less than the weights.
    error(&fit(folder, "1000", &small), "pair/weights.safetensors");
    assert_eq!(names(folder), before, "no half of a pair");
    assert!(fs::read(&state).unwrap() == kept);

    // Nor is it enough for one more outcome behind very much evidence.
    let (subject, entries) = measured.split_once('\n').unwrap();
    let entry = entries.lines().next().unwrap();
    let many = format!("{subject}\n{}", format!("{entry}\n").repeat(1_500_000 / entry.len()));
    fs::write(&log, &many).unwrap();
    error(&fit(folder, "1000", &small), "pair.evidence.jsonl");
    assert_eq!(names(folder), before);
    assert!(fs::read_to_string(&log).unwrap() == many, "the earlier evidence is untouched");

    let fitted = fit(folder, "unlimited", &small);
    assert!(fitted.status.success(), "{}", stderr(&fitted));
    assert!(stdout(&fitted).contains("written to"));
    // An earlier pair is not overwritten, room or none.
    let earlier = fs::read(pair.join("pair.toml")).unwrap();
    let refused = fit(folder, "1000", &larger);
    assert!(stderr(&refused).contains("exists already; choose another --out"), "{}", stderr(&refused));
    assert!(fs::read(pair.join("pair.toml")).unwrap() == earlier);
}
