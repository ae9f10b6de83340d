use std::io::ErrorKind;

use super::*;
use crate::measure::random::Random;

const SHAPE: RowShape = RowShape {
    source: Extent { layers: 2, kv_heads: 1, head_dim: 3 },
    target: Extent { layers: 3, kv_heads: 2, head_dim: 2 },
};

struct Captured {
    sequence: Digest,
    source: [Vec<f32>; 2],
    target: [Vec<f32>; 2],
    mass: Mass,
}

impl Captured {
    /// `3 + seed` rows.
    fn new(seed: u64) -> Captured {
        let mut random = Random::new(seed);
        let rows = 3 + seed as usize;
        let mut normal = |n: usize| -> Vec<f32> { (0..n * rows).map(|_| random.normal() as f32).collect() };
        let (source, target) = ([normal(6), normal(6)], [normal(12), normal(12)]);
        let mass = Mass { keys: normal(6), values: normal(6) };
        Captured { sequence: Digest::of(&seed.to_le_bytes()), source, target, mass }
    }

    fn chunk(&self) -> RowChunk<'_> {
        RowChunk {
            sequence: self.sequence,
            source: [&self.source[0], &self.source[1]],
            target: [&self.target[0], &self.target[1]],
            mass: &self.mass,
        }
    }
}

fn basis() -> Digest {
    Digest::of(b"basis")
}

fn sequences(count: u64) -> Vec<Digest> {
    (0..count).map(|seed| Captured::new(seed).sequence).collect()
}

fn open(path: &Path, count: u64) -> RowFile {
    RowFile::resume(path, basis(), SHAPE, &sequences(count)).unwrap()
}

fn append(rows: &mut RowFile, seeds: std::ops::Range<u64>) {
    seeds.for_each(|seed| rows.append(&Captured::new(seed).chunk()).unwrap());
}

/// Every section of every chunk is what went in.
fn check(rows: &RowFile) {
    for chunk in 0..rows.chunks() {
        let captured = Captured::new(chunk as u64);
        assert_eq!(rows.chunk(chunk).unwrap(), [captured.source.clone(), captured.target.clone()]);
        for part in Part::BOTH {
            for (of, numbers, layers, width) in
                [(Of::Source, &captured.source, 2, 3), (Of::Target, &captured.target, 3, 4)]
            {
                for layer in 0..layers {
                    let all = numbers[part as usize].chunks_exact(layers * width);
                    let expected: Vec<f32> = all.flat_map(|row| row[layer * width..][..width].to_vec()).collect();
                    assert_eq!(rows.read(chunk, of, part, layer).unwrap(), expected);
                }
            }
            let one = 2 * rows.rows_of(chunk);
            for (layer, expected) in captured.mass.part(part).chunks_exact(one).enumerate() {
                assert_eq!(rows.read(chunk, Of::Mass, part, layer).unwrap(), expected);
            }
        }
    }
}

#[test]
fn resumed_equals_uninterrupted() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
    append(&mut open(&whole, 4), 0..4);
    append(&mut open(&parts, 4), 0..3);
    let good = fs::read(&parts).unwrap();
    // Cut anywhere, it goes on from the last whole chunk.
    for cut in (0..good.len()).step_by(61) {
        fs::write(&parts, &good[..cut]).unwrap();
        // A first line without its end is no more than a file that somebody else began.
        let Ok(mut rows) = RowFile::resume(&parts, basis(), SHAPE, &sequences(4)) else {
            assert!((1..good.iter().position(|&b| b == b'\n').unwrap()).contains(&cut), "cut at {cut}");
            continue;
        };
        let kept = rows.chunks() as u64;
        assert!(kept < 3, "cut at {cut}");
        append(&mut rows, kept..4);
        assert_eq!(fs::read(&parts).unwrap(), fs::read(&whole).unwrap(), "cut at {cut}");
    }
    check(&open(&parts, 4));
    assert_eq!(open(&parts, 4).rows(), 3 + 4 + 5 + 6);
}

/// The file is cut back to the sequences that the moments are of.
#[test]
fn only_the_wanted_sequences_stay() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows");
    append(&mut open(&path, 4), 0..4);
    assert_eq!(open(&path, 2).chunks(), 2);
    assert_eq!(open(&path, 4).chunks(), 2, "the others are gone");
    let mut other = sequences(2);
    other[1] = Digest::of(b"another text");
    assert_eq!(RowFile::resume(&path, basis(), SHAPE, &other).unwrap().chunks(), 1);
    assert_eq!(RowFile::resume(&path, Digest::of(b"other"), SHAPE, &sequences(2)).unwrap().chunks(), 0);
    append(&mut open(&path, 4), 0..4);
    check(&open(&path, 4));
}

#[test]
fn every_damaged_byte_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows");
    append(&mut open(&path, 2), 0..2);
    let good = fs::read(&path).unwrap();
    let line = good.iter().position(|&b| b == b'\n').unwrap();
    for at in (line + 1..good.len()).step_by(7) {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        fs::write(&path, bad).unwrap();
        let rows = open(&path, 2);
        let sections = |part| {
            let layers = [(Of::Source, 2), (Of::Target, 3), (Of::Mass, 3)];
            layers.into_iter().flat_map(move |(of, layers)| (0..layers).map(move |layer| (of, part, layer)))
        };
        let damaged = (0..rows.chunks())
            .flat_map(|chunk| Part::BOTH.into_iter().flat_map(sections).map(move |section| (chunk, section)))
            .any(|(chunk, (of, part, layer))| {
                matches!(rows.read(chunk, of, part, layer), Err(RowsError::Damaged { .. }))
            });
        assert!(damaged || rows.chunks() < 2, "byte {at} was changed unnoticed");
    }
}

#[test]
fn somebody_elses_file_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    for content in [&b"my notes\n"[..], b"{\"format\":1}\n", b"\xff\xfe", b"{"] {
        let path = folder.path().join("notes");
        fs::write(&path, content).unwrap();
        let error = RowFile::resume(&path, basis(), SHAPE, &[]).unwrap_err();
        assert!(matches!(error, RowsError::Foreign { .. }), "{error}");
        assert_eq!(fs::read(&path).unwrap(), content);
    }
}

/// A disk that takes so many bytes more.
struct Full<'a> {
    file: &'a File,
    left: usize,
}

impl Write for Full<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.left == 0 {
            return Err(ErrorKind::StorageFull.into());
        }
        let written = self.file.write(&bytes[..bytes.len().min(self.left)])?;
        self.left -= written;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_full_disk_loses_nothing_earlier() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows");
    let mut rows = open(&path, 3);
    append(&mut rows, 0..2);
    let before = fs::read(&path).unwrap();
    for left in [0, 5, 700] {
        let captured = Captured::new(2);
        let full = rows.append_through(&captured.chunk(), |file| Box::new(Full { file, left }));
        let said = full.unwrap_err().to_string();
        for part in ["rows", "can't be written", "make room", "the 2 sequences before it are kept"] {
            assert!(said.contains(part), "`{said}` does not say `{part}`");
        }
        assert_eq!(fs::read(&path).unwrap(), before);
    }
    // There is room again.
    append(&mut rows, 2..3);
    check(&rows);
    check(&open(&path, 3));
}
