//! What a fit has captured so far, as one file: moments and the log of consumed sequences change together or not at all.
//!
//! The file is safetensors with f64 sums; its metadata names what it belongs to (models and settings, the log), and a digest
//! of it all, so that a damaged or foreign state is refused rather than mixed in.

use std::{
    borrow::Cow,
    collections::HashMap,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use kvmig_gate::{Digest, DigestBuilder};
use safetensors::{Dtype, SafeTensorError, SafeTensors, View};
use serde::{Deserialize, Serialize};

use super::{
    linalg::Matrix,
    moments::{MomentShape, Moments, Rows, Sums},
};

/// Version of the file's form.
const FORMAT: &str = "kvmig-fit-state-2";

/// Name of the metadata entry that holds the [`Header`].
const METADATA: &str = "kvmig";

/// The metadata.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    format: String,
    basis: Digest,
    log: Vec<Digest>,
    rows: u64,
    shape: MomentShape,
    /// See [`seal`].
    sha256: Digest,
}

/// A state that can't be used or kept.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The file can't be read.
    #[error("{}: can't be read: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file can't be written.
    #[error(
        "{}: can't be written: {source}; what was kept there before is untouched: make room and run the same command again, or \
         choose an --out on another disk",
        file.display()
    )]
    Write {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is not a state, or is damaged.
    #[error("{}: {field}: found {found}, expected {expected}; remove the file to start over", file.display())]
    Damaged {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        field: String,
        /// What is there.
        found: String,
        /// What should be.
        expected: String,
    },
    /// The state belongs to another fit.
    #[error("{}: was captured with {what}: remove the file to start over, or choose another --out", file.display())]
    Foreign {
        /// The file.
        file: PathBuf,
        /// What is not as it was.
        what: String,
    },
}

/// Moments and the log of the calibration sequences that they are of.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// Digest of what every row depends on beside its sequence: models and settings.
    pub basis: Digest,
    /// Digests of the sequences consumed, in order. A fit that wants these first and then more goes on from here.
    pub log: Vec<Digest>,
    /// Their moments.
    pub moments: Moments,
}

impl State {
    /// Nothing captured yet.
    pub fn new(basis: Digest, shape: MomentShape) -> State {
        State { basis, log: Vec::new(), moments: Moments::new(shape) }
    }

    /// Adds the rows of a sequence.
    pub(super) fn add(&mut self, sequence: Digest, keys: Rows<'_>, values: Rows<'_>, hidden: &[f32]) {
        self.moments.add_with(keys, values, hidden);
        self.log.push(sequence);
    }

    /// Writes the state beside `file` and renames it there.
    ///
    /// # Errors
    /// [`StateError::Write`].
    pub fn save(&self, file: &Path) -> Result<(), StateError> {
        let failed = |source| StateError::Write { file: file.to_owned(), source };
        let tensors = tensors(&self.moments);
        let header = Header {
            format: FORMAT.to_owned(),
            basis: self.basis,
            log: self.log.clone(),
            rows: self.moments.rows(),
            shape: self.moments.shape(),
            sha256: seal(&tensors, self),
        };
        let header = serde_json::to_string(&header).expect("a header holds strings and numbers only");
        // One entry: several would be written in the order of a hash map, and equal states would differ in their bytes.
        let metadata = HashMap::from([(METADATA.to_owned(), header)]);
        let parent = file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::create_dir_all(parent).map_err(failed)?;
        let draft = tempfile::NamedTempFile::new_in(parent).map_err(failed)?;
        let views = tensors.iter().map(|t| (t.name.as_str(), t));
        safetensors::serialize_to_file(views, Some(metadata), draft.path()).map_err(|error| match error {
            SafeTensorError::IoError(error) => failed(error),
            error => failed(io::Error::other(error)),
        })?;
        File::open(draft.path()).and_then(|file| file.sync_all()).map_err(failed)?;
        draft.persist(file).map_err(|error| failed(error.error))?;
        Ok(())
    }

    /// Reads a state on `basis` whose log is the beginning of `sequences`; `None` where there is no file.
    ///
    /// # Errors
    /// [`StateError`] for a damaged file, or one of another fit.
    pub fn load(
        file: &Path,
        basis: Digest,
        shape: MomentShape,
        sequences: &[Digest],
    ) -> Result<Option<State>, StateError> {
        let bytes = match fs::read(file) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(StateError::Read { file: file.to_owned(), source }),
        };
        Reader::new(file, &bytes)?.state(basis, shape, sequences).map(Some)
    }
}

/// One tensor of the file.
struct Tensor<'a> {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Cow<'a, [u8]>,
}

impl View for &Tensor<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Every tensor in a fixed order.
fn tensors(moments: &Moments) -> Vec<Tensor<'_>> {
    let sums = &moments.sums;
    let mut tensors = Vec::new();
    let mut f64s = |name: String, shape: Vec<usize>, numbers| {
        let bytes = little_endian(numbers, f64::to_le_bytes);
        tensors.push(Tensor { name, dtype: Dtype::F64, shape, bytes });
    };
    for (name, numbers) in
        [("source_sum", &sums.source_sum), ("target_sum", &sums.target_sum), ("target_squares", &sums.target_squares)]
    {
        f64s(name.to_owned(), vec![numbers.len()], numbers);
    }
    for (kind, matrices) in [("gram", &sums.gram), ("cross", &sums.cross)] {
        for (block, matrix) in matrices.iter().enumerate() {
            f64s(format!("{kind}.{block:03}"), vec![matrix.rows(), matrix.cols()], matrix.as_slice());
        }
    }
    for (name, numbers) in [("source_shift", &sums.source_shift), ("target_shift", &sums.target_shift)] {
        let bytes = little_endian(numbers, f32::to_le_bytes);
        let (name, dtype, shape) = (name.to_owned(), Dtype::F32, vec![numbers.len()]);
        tensors.push(Tensor { name, dtype, shape, bytes });
    }
    tensors
}

/// The bytes of safetensors: as they lie in memory where that is little endian, since a state may be gigabytes.
fn little_endian<T: bytemuck::NoUninit, const N: usize>(numbers: &[T], bytes: fn(T) -> [u8; N]) -> Cow<'_, [u8]> {
    if cfg!(target_endian = "little") {
        Cow::Borrowed(bytemuck::cast_slice(numbers))
    } else {
        Cow::Owned(numbers.iter().flat_map(|&x| bytes(x)).collect())
    }
}

/// Digest of the tensors and of what they are of.
fn seal(tensors: &[Tensor<'_>], state: &State) -> Digest {
    let rows = state.moments.rows().to_le_bytes();
    let mut digest = DigestBuilder::new("fit-state").field("basis", state.basis.as_bytes()).field("rows", &rows);
    for sequence in &state.log {
        digest = digest.field("sequence", sequence.as_bytes());
    }
    for tensor in tensors {
        digest = digest.field("name", tensor.name.as_bytes()).field("bytes", &tensor.bytes);
    }
    digest.finish()
}

/// A file being read.
struct Reader<'a> {
    file: &'a Path,
    tensors: SafeTensors<'a>,
    header: Header,
}

impl<'a> Reader<'a> {
    fn new(file: &'a Path, bytes: &'a [u8]) -> Result<Reader<'a>, StateError> {
        let damaged = |field: &str, found: String, expected: &str| StateError::Damaged {
            file: file.to_owned(),
            field: field.to_owned(),
            found,
            expected: expected.to_owned(),
        };
        let no_tensors = |error: safetensors::SafeTensorError| damaged("file", error.to_string(), "a safetensors file");
        let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(no_tensors)?;
        let text = metadata.metadata().as_ref().and_then(|entries| entries.get(METADATA)).map_or("", String::as_str);
        let header: Header = serde_json::from_str(text)
            .map_err(|error| damaged(METADATA, error.to_string(), "the header of a captured state"))?;
        if header.format != FORMAT {
            return Err(damaged("format", header.format, FORMAT));
        }
        Ok(Reader { file, tensors: SafeTensors::deserialize(bytes).map_err(no_tensors)?, header })
    }

    fn state(&self, basis: Digest, shape: MomentShape, sequences: &[Digest]) -> Result<State, StateError> {
        let Header { basis: found, log, rows, sha256, .. } = &self.header;
        let foreign = |what| StateError::Foreign { file: self.file.to_owned(), what };
        if *found != basis {
            return Err(foreign("other models or settings".to_owned()));
        }
        if !sequences.starts_with(log) {
            let same = log.iter().zip(sequences).take_while(|(found, wanted)| found == wanted).count();
            return Err(foreign(format!("other texts (from calibration sequence {same} on)")));
        }
        if self.header.shape != shape {
            return Err(self.damaged("shape", format!("{:?}", self.header.shape), format!("{shape:?}")));
        }
        let moments = Moments::from_parts(shape, *rows, self.sums(shape)?);
        let state = State { basis, log: log.clone(), moments };
        let found = seal(&tensors(&state.moments), &state);
        if found != *sha256 {
            return Err(self.damaged("sha256", found, sha256));
        }
        Ok(state)
    }

    fn sums(&self, shape: MomentShape) -> Result<Sums, StateError> {
        let (n, m) = (shape.features(), shape.outputs());
        let blank = Sums::new(shape);
        let matrices = |kind: &str, of: &[Matrix]| {
            let one = |(block, like): (usize, &Matrix)| {
                let (rows, cols) = (like.rows(), like.cols());
                let numbers = self.f64s(&format!("{kind}.{block:03}"), &[rows, cols])?;
                Ok(Matrix::from_vec(rows, cols, numbers))
            };
            of.iter().enumerate().map(one).collect::<Result<Vec<Matrix>, StateError>>()
        };
        Ok(Sums {
            source_shift: self.f32s("source_shift", n)?,
            target_shift: self.f32s("target_shift", m)?,
            source_sum: self.f64s("source_sum", &[n])?,
            target_sum: self.f64s("target_sum", &[m])?,
            target_squares: self.f64s("target_squares", &[m])?,
            gram: matrices("gram", &blank.gram)?,
            cross: matrices("cross", &blank.cross)?,
        })
    }

    fn f64s(&self, name: &str, shape: &[usize]) -> Result<Vec<f64>, StateError> {
        let bytes = self.bytes(name, Dtype::F64, shape)?;
        let whole = |b: &[u8]| f64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]);
        Ok(bytes.chunks_exact(8).map(whole).collect())
    }

    fn f32s(&self, name: &str, len: usize) -> Result<Vec<f32>, StateError> {
        let bytes = self.bytes(name, Dtype::F32, &[len])?;
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    fn bytes(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<&[u8], StateError> {
        let expected = format!("{dtype:?} {shape:?}");
        let view = self.tensors.tensor(name).map_err(|_| self.damaged(name, "nothing", &expected))?;
        if view.dtype() != dtype || view.shape() != shape {
            return Err(self.damaged(name, format!("{:?} {:?}", view.dtype(), view.shape()), expected));
        }
        Ok(view.data())
    }

    fn damaged(&self, field: &str, found: impl ToString, expected: impl ToString) -> StateError {
        let (found, expected) = (found.to_string(), expected.to_string());
        StateError::Damaged { file: self.file.to_owned(), field: field.to_owned(), found, expected }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::random::Random;

    const SHAPE: MomentShape =
        MomentShape { source_layers: 2, source_width: 3, target_layers: 2, target_width: 4, hidden: 0 };

    fn add(state: &mut State, seed: u64) {
        let mut random = Random::new(seed);
        let mut normal = |n: usize| -> Vec<f32> { (0..n).map(|_| random.normal() as f32).collect() };
        let (x, y, v, u) = (normal(7 * 6), normal(7 * 8), normal(7 * 6), normal(7 * 8));
        let (keys, values) = (Rows { source: &x, target: &y }, Rows { source: &v, target: &u });
        state.add(Digest::of(&seed.to_le_bytes()), keys, values, &[]);
    }

    fn sequences(count: u64) -> Vec<Digest> {
        (0..count).map(|seed| Digest::of(&seed.to_le_bytes())).collect()
    }

    /// Stopped after any sequence, kept, read and continued: byte for byte what an uninterrupted run keeps.
    #[test]
    fn resumed_equals_uninterrupted() {
        let folder = tempfile::tempdir().unwrap();
        let basis = Digest::of(b"basis");
        let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
        let mut state = State::new(basis, SHAPE);
        (0..4).for_each(|seed| add(&mut state, seed));
        state.save(&whole).unwrap();
        for seed in 0..4 {
            // Each run wants one sequence more than the one before.
            let kept = State::load(&parts, basis, SHAPE, &sequences(seed + 1)).unwrap();
            let mut state = kept.unwrap_or(State::new(basis, SHAPE));
            assert_eq!(state.log.len(), seed as usize);
            add(&mut state, seed);
            state.save(&parts).unwrap();
        }
        assert_eq!(fs::read(&whole).unwrap(), fs::read(&parts).unwrap());
        assert_eq!(State::load(&parts, basis, SHAPE, &sequences(4)).unwrap().unwrap(), state);
    }

    #[test]
    fn every_damaged_byte_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let (basis, file) = (Digest::of(b"basis"), folder.path().join("state"));
        let mut state = State::new(basis, SHAPE);
        add(&mut state, 0);
        let load = || State::load(&file, basis, SHAPE, &sequences(1));
        state.save(&file).unwrap();
        let good = fs::read(&file).unwrap();
        for at in (0..good.len()).step_by(7) {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            fs::write(&file, bad).unwrap();
            let read = load();
            assert!(read.is_err() || read.unwrap().unwrap() == state, "byte {at} was changed unnoticed");
        }
        for cut in [0, 7, good.len() / 2, good.len() - 1] {
            fs::write(&file, &good[..cut]).unwrap();
            assert!(matches!(load(), Err(StateError::Damaged { .. })), "cut at {cut}");
        }
    }

    #[test]
    fn another_fits_state_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (basis, file) = (Digest::of(b"basis"), folder.path().join("state"));
        let mut state = State::new(basis, SHAPE);
        add(&mut state, 0);
        add(&mut state, 1);
        state.save(&file).unwrap();
        let said = |basis: Digest, sequences: &[Digest]| {
            let error = State::load(&file, basis, SHAPE, sequences).unwrap_err();
            assert!(matches!(error, StateError::Foreign { .. }), "{error}");
            error.to_string()
        };
        assert!(said(Digest::of(b"other"), &sequences(2)).contains("other models or settings"));
        assert!(said(basis, &sequences(1)).contains("from calibration sequence 1 on"), "fewer than it holds");
        let mut changed = sequences(3);
        changed[0] = Digest::of(b"changed");
        assert!(said(basis, &changed).contains("from calibration sequence 0 on"));
        let wider = MomentShape { target_width: 5, ..SHAPE };
        assert!(matches!(State::load(&file, basis, wider, &sequences(2)), Err(StateError::Damaged { .. })));
        assert_eq!(State::load(&folder.path().join("none"), basis, SHAPE, &[]).unwrap(), None);
    }
}
