//! Rows spilled to disk, for the fits that need them again: weighted ones and trained networks.
//!
//! One file beside the captured moments, a chunk per calibration sequence, only ever appended to. A chunk holds one section per
//! layer of each model and part (keys with their rotation stripped, values), layer by layer, so that a fit reads the layers
//! it wants and nothing else; and the attention mass of its rows ([`super::attention`]). Each section has a digest of its
//! own. What an interrupt left of the last chunk is cut off, and the capture goes on from the last whole one.

mod chunk;

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write},
    path::{Path, PathBuf},
};

use kvmig_gate::Digest;
use serde::{Deserialize, Serialize};

use super::attention::Mass;
use crate::cache::CacheLayout;
use chunk::Head;

/// Version of the file's form.
const FORMAT: &str = "kvmig-fit-rows-1";

/// Bytes that the first line may have at most: more, and the file is somebody else's.
const LONGEST_LINE: u64 = 4096;

/// Layers of a model's cache and their width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Extent {
    /// Layers.
    pub layers: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

impl Extent {
    /// A cache's.
    pub fn of(layout: &CacheLayout) -> Extent {
        Extent { layers: layout.layers, kv_heads: layout.kv_heads, head_dim: layout.head_dim }
    }

    /// Columns of one layer.
    pub fn width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// What a row is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowShape {
    /// The source's layers.
    pub source: Extent,
    /// The target's.
    pub target: Extent,
}

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Keys, their rotation stripped.
    Keys,
    /// Values.
    Values,
}

impl Part {
    /// Both, in the order of the file.
    pub const BOTH: [Part; 2] = [Part::Keys, Part::Values];

    /// As tensors are named.
    pub fn letter(self) -> char {
        match self {
            Part::Keys => 'k',
            Part::Values => 'v',
        }
    }
}

/// What a section holds of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of {
    /// The source's rows, `[rows, n_kv · d]`.
    Source,
    /// The target's, likewise.
    Target,
    /// The attention mass of the rows in the target's KV heads, `[n_kv, rows]`.
    Mass,
}

/// One sequence's rows as they are captured: `[rows, layers · n_kv · d]` each.
#[derive(Clone, Copy, Debug)]
pub struct RowChunk<'a> {
    /// Digest of the sequence's tokens.
    pub sequence: Digest,
    /// Source rows: keys, then values.
    pub source: [&'a [f32]; 2],
    /// Target rows.
    pub target: [&'a [f32]; 2],
    /// What the target's attention makes of them.
    pub mass: &'a Mass,
}

/// Rows that can't be kept or read.
#[derive(Debug, thiserror::Error)]
pub enum RowsError {
    /// The file can't be read.
    #[error("{}: can't be read: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file can't be written: a full disk, most often.
    #[error(
        "{}: can't be written: {source}; {needed} bytes for the next sequence: make room and run the same command again, or choose \
         an --out on another disk; the {kept} sequences before it are kept",
        file.display()
    )]
    Write {
        /// The file.
        file: PathBuf,
        /// Bytes that had to fit.
        needed: u64,
        /// Sequences that are in the file.
        kept: usize,
        /// Why.
        source: io::Error,
    },
    /// The file is not one of rows, so that it is left alone.
    #[error("{}: begins like no rows of this version: remove it, or choose another --out", file.display())]
    Foreign {
        /// The file.
        file: PathBuf,
    },
    /// A section is not what was written.
    #[error(
        "{}: {part:?} of {of:?} layer {layer} in sequence {chunk}: the digest is another than when it was written: remove the \
         file and run the same command again, which captures the rows anew",
        file.display()
    )]
    Damaged {
        /// The file.
        file: PathBuf,
        /// Number of the sequence.
        chunk: usize,
        /// Whose rows.
        of: Of,
        /// Keys or values.
        part: Part,
        /// The layer.
        layer: usize,
    },
}

/// The first line.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    format: String,
    basis: Digest,
    shape: RowShape,
}

/// Rows on disk. Only the chunks' heads are in memory.
#[derive(Debug)]
pub struct RowFile {
    path: PathBuf,
    file: File,
    basis: Digest,
    shape: RowShape,
    chunks: Vec<Head>,
    end: u64,
}

impl RowFile {
    /// Opens the rows at `path` that were captured on `basis`, or begins them. Whole chunks that `sequences` begin with stay;
    /// what comes behind them, and rows of another basis or shape, are cut off.
    ///
    /// # Errors
    /// [`RowsError`] where the file is somebody else's, or the system fails.
    pub fn resume(path: &Path, basis: Digest, shape: RowShape, sequences: &[Digest]) -> Result<RowFile, RowsError> {
        let read = |source| RowsError::Read { file: path.to_owned(), source };
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::create_dir_all(parent).map_err(read)?;
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(read)?;
        let header = Header { format: FORMAT.to_owned(), basis, shape };
        let length = file.metadata().map_err(read)?.len();
        let mut reader = BufReader::new(&file);
        let mut line = Vec::new();
        (&mut reader).take(LONGEST_LINE).read_until(b'\n', &mut line).map_err(read)?;
        let found = serde_json::from_slice::<Header>(&line).ok().filter(|found| found.format == FORMAT);
        let (mut end, mut chunks) = (0, Vec::new());
        match found {
            None if length > 0 => return Err(RowsError::Foreign { file: path.to_owned() }),
            Some(found) if found == header => {
                end = line.len() as u64;
                for sequence in sequences {
                    let Some(head) = Head::read(&file, end, basis, shape).map_err(read)? else { break };
                    if head.sequence != *sequence.as_bytes() || head.end(shape) > length {
                        break;
                    }
                    end = head.end(shape);
                    chunks.push(head);
                }
            }
            _ => {}
        }
        let mut rows = RowFile { path: path.to_owned(), file, basis, shape, chunks, end };
        rows.cut().map_err(read)?;
        if end == 0 {
            let mut line = serde_json::to_vec(&header).expect("a header holds strings and numbers only");
            line.push(b'\n');
            if let Err(source) = (&rows.file).write_all(&line) {
                // A part of it would be taken for somebody else's file.
                let _ = rows.file.set_len(0);
                return Err(rows.unwritten(line.len() as u64, source));
            }
            rows.end = line.len() as u64;
        }
        Ok(rows)
    }

    /// Some of the chunks, to be read alone.
    ///
    /// # Errors
    /// [`RowsError::Read`].
    ///
    /// # Panics
    /// If there is no such chunk.
    pub fn only(&self, chunks: &[usize]) -> Result<RowFile, RowsError> {
        let RowFile { ref path, basis, shape, end, .. } = *self;
        // Opened to read: what is appended to a part would overwrite the rest.
        let file = File::open(path).map_err(|source| RowsError::Read { file: path.clone(), source })?;
        let chunks = chunks.iter().map(|&chunk| self.chunks[chunk].clone()).collect();
        Ok(RowFile { path: path.clone(), file, basis, shape, chunks, end })
    }

    /// Drops what lies behind the last whole chunk.
    fn cut(&self) -> io::Result<()> {
        self.file.set_len(self.end)?;
        (&self.file).seek(SeekFrom::Start(self.end)).map(drop)
    }

    /// Adds a sequence's rows, which must have been captured on the basis that the file was opened with. Where that fails, the
    /// file is as it was before.
    ///
    /// # Errors
    /// [`RowsError::Write`].
    ///
    /// # Panics
    /// If the slices are not as many rows each.
    pub fn append(&mut self, chunk: &RowChunk<'_>) -> Result<(), RowsError> {
        self.append_through(chunk, |file| Box::new(file))
    }

    /// [`RowFile::append`] through what `through` makes of the file.
    fn append_through(
        &mut self,
        chunk: &RowChunk<'_>,
        through: impl for<'a> FnOnce(&'a File) -> Box<dyn Write + 'a>,
    ) -> Result<(), RowsError> {
        let (head, payload) = chunk::encode(chunk, self.end, self.basis, self.shape);
        let write = || {
            // Whoever read in between moved the file's position.
            (&self.file).seek(SeekFrom::Start(self.end))?;
            let mut out = through(&self.file);
            out.write_all(&head.bytes(self.basis)).and_then(|()| out.write_all(&payload)).and_then(|()| out.flush())
        };
        if let Err(source) = write() {
            let error = self.unwritten(head.end(self.shape) - self.end, source);
            // What can't be cut off now is cut off when the file is opened again.
            let _ = self.cut();
            return Err(error);
        }
        self.end = head.end(self.shape);
        self.chunks.push(head);
        Ok(())
    }

    fn unwritten(&self, needed: u64, source: io::Error) -> RowsError {
        RowsError::Write { file: self.path.clone(), needed, kept: self.chunks.len(), source }
    }

    /// Waits until the disk has what was appended.
    ///
    /// # Errors
    /// [`RowsError::Write`].
    pub fn sync(&self) -> Result<(), RowsError> {
        self.file.sync_data().map_err(|source| self.unwritten(0, source))
    }

    /// What the rows are made of.
    pub fn shape(&self) -> RowShape {
        self.shape
    }

    /// Chunks, one per sequence.
    pub fn chunks(&self) -> usize {
        self.chunks.len()
    }

    /// Rows of one chunk.
    pub fn rows_of(&self, chunk: usize) -> usize {
        self.chunks[chunk].rows
    }

    /// Rows of all chunks.
    pub fn rows(&self) -> usize {
        self.chunks.iter().map(|head| head.rows).sum()
    }

    /// Digest of everything in the file.
    pub fn digest(&self) -> Digest {
        let heads: Vec<u8> = self.chunks.iter().flat_map(|head| head.seal).collect();
        Digest::of(&heads)
    }

    /// A chunk as it was captured: keys and values of the source, and of the target.
    ///
    /// # Errors
    /// As [`RowFile::read`].
    pub fn chunk(&self, chunk: usize) -> Result<[[Vec<f32>; 2]; 2], RowsError> {
        let all = |of: Of, extent: Extent, part: Part| {
            let (width, columns) = (extent.width(), extent.layers * extent.width());
            let mut rows = vec![0.0; self.rows_of(chunk) * columns];
            for layer in 0..extent.layers {
                let section = self.read(chunk, of, part, layer)?;
                for (row, from) in rows.chunks_exact_mut(columns).zip(section.chunks_exact(width)) {
                    row[layer * width..(layer + 1) * width].copy_from_slice(from);
                }
            }
            Ok(rows)
        };
        let RowShape { source, target } = self.shape;
        let both = |of, extent| Ok([all(of, extent, Part::Keys)?, all(of, extent, Part::Values)?]);
        Ok([both(Of::Source, source)?, both(Of::Target, target)?])
    }

    /// One layer's section of one chunk.
    ///
    /// # Errors
    /// [`RowsError::Damaged`] where it is not what was written, [`RowsError::Read`] where the system fails.
    pub fn read(&self, chunk: usize, of: Of, part: Part, layer: usize) -> Result<Vec<f32>, RowsError> {
        let head = &self.chunks[chunk];
        let (at, len) = head.section(self.shape, of, part, layer);
        let mut bytes = vec![0; len];
        // A shared file has one position, and one reader: chunks are read in turn.
        let mut file = &self.file;
        let read = file.seek(SeekFrom::Start(at)).and_then(|_| file.read_exact(&mut bytes));
        read.map_err(|source| RowsError::Read { file: self.path.clone(), source })?;
        if Digest::of(&bytes).as_bytes() != head.digest(self.shape, of, part, layer) {
            return Err(RowsError::Damaged { file: self.path.clone(), chunk, of, part, layer });
        }
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }
}

#[cfg(test)]
mod tests;
