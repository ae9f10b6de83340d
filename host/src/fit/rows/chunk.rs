//! One chunk: its head, with a digest of every section, then the sections.

use std::{
    fs::File,
    io::{self, Read as _, Seek as _, SeekFrom},
};

use kvmig_gate::{Digest, DigestBuilder};

use super::{Extent, Of, Part, RowChunk, RowShape};

/// What a chunk says of itself.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Head {
    pub(super) rows: usize,
    /// Digest of the sequence's tokens.
    pub(super) sequence: [u8; 32],
    digests: Vec<[u8; 32]>,
    /// Digest of all that, and of what it was captured on.
    pub(super) seal: [u8; 32],
    /// Where its sections begin.
    payload: u64,
}

impl Head {
    /// The head at `at`; `None` where there is no whole one.
    pub(super) fn read(mut file: &File, at: u64, basis: Digest, shape: RowShape) -> io::Result<Option<Head>> {
        let mut bytes = vec![0; bytes(shape)];
        file.seek(SeekFrom::Start(at))?;
        match file.read_exact(&mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            read => read?,
        }
        let (count, digests) = bytes.split_at(8);
        let rows = u64::from_le_bytes(count.try_into().expect("split at 8"));
        let mut digests: Vec<[u8; 32]> = digests.as_chunks::<32>().0.to_vec();
        let (Some(seal), false) = (digests.pop(), digests.is_empty()) else { return Ok(None) };
        let sequence = digests.remove(0);
        let Ok(rows) = usize::try_from(rows) else { return Ok(None) };
        let head = Head { rows, sequence, digests, seal, payload: at + bytes.len() as u64 };
        Ok((head.sealed(basis) == seal).then_some(head))
    }

    pub(super) fn bytes(&self, basis: Digest) -> Vec<u8> {
        debug_assert_eq!(self.seal, self.sealed(basis), "sealed when it was made");
        let mut bytes = (self.rows as u64).to_le_bytes().to_vec();
        bytes.extend(self.sequence);
        bytes.extend(self.digests.as_flattened());
        bytes.extend(self.seal);
        bytes
    }

    fn sealed(&self, basis: Digest) -> [u8; 32] {
        let rows = (self.rows as u64).to_le_bytes();
        let digest = DigestBuilder::new("fit-rows").field("basis", basis.as_bytes()).field("rows", &rows);
        let digest = digest.field("sequence", &self.sequence).field("sections", self.digests.as_flattened());
        *digest.finish().as_bytes()
    }

    /// Where the chunk ends.
    pub(super) fn end(&self, shape: RowShape) -> u64 {
        self.payload + 4 * self.rows as u64 * (2 * part_width(shape)) as u64
    }

    /// Where a section lies, and its bytes.
    pub(super) fn section(&self, shape: RowShape, of: Of, part: Part, layer: usize) -> (u64, usize) {
        let RowShape { source, target } = shape;
        let within = match of {
            Of::Source => layer * source.width(),
            Of::Target => source.layers * source.width() + layer * target.width(),
            Of::Mass => source.layers * source.width() + target.layers * target.width() + layer * target.kv_heads,
        };
        let before = part as usize * part_width(shape) + within;
        (self.payload + 4 * (self.rows * before) as u64, 4 * self.rows * width(shape, of))
    }

    pub(super) fn digest(&self, shape: RowShape, of: Of, part: Part, layer: usize) -> &[u8; 32] {
        let RowShape { source, target } = shape;
        let within = match of {
            Of::Source => layer,
            Of::Target => source.layers + layer,
            Of::Mass => source.layers + target.layers + layer,
        };
        &self.digests[part as usize * sections(shape) / 2 + within]
    }
}

/// Numbers per row in a section.
fn width(shape: RowShape, of: Of) -> usize {
    match of {
        Of::Source => shape.source.width(),
        Of::Target => shape.target.width(),
        Of::Mass => shape.target.kv_heads,
    }
}

/// Numbers per row in all sections of keys, or of values.
fn part_width(RowShape { source, target }: RowShape) -> usize {
    source.layers * source.width() + target.layers * (target.width() + target.kv_heads)
}

fn sections(shape: RowShape) -> usize {
    2 * (shape.source.layers + 2 * shape.target.layers)
}

/// Bytes of a head.
fn bytes(shape: RowShape) -> usize {
    8 + 32 * (sections(shape) + 2)
}

/// Head and sections of a chunk that goes to `at`.
pub(super) fn encode(chunk: &RowChunk<'_>, at: u64, basis: Digest, shape: RowShape) -> (Head, Vec<u8>) {
    let rows = chunk.source[0].len() / (shape.source.layers * shape.source.width());
    let mut payload = Vec::with_capacity(4 * rows * 2 * part_width(shape));
    let mut digests = Vec::with_capacity(sections(shape));
    for part in Part::BOTH {
        let (source, target) = (chunk.source[part as usize], chunk.target[part as usize]);
        for (numbers, extent) in [(source, shape.source), (target, shape.target)] {
            let columns = extent.layers * extent.width();
            assert_eq!(numbers.len(), rows * columns, "whole rows, as many of each");
            (0..extent.layers).for_each(|layer| section(&mut payload, &mut digests, layer_of(numbers, extent, layer)));
        }
        let mass = chunk.mass.part(part);
        assert_eq!(mass.len(), rows * shape.target.layers * shape.target.kv_heads, "the mass of as many rows");
        let one = shape.target.kv_heads * rows;
        (0..shape.target.layers)
            .for_each(|l| section(&mut payload, &mut digests, mass[l * one..][..one].iter().copied()));
    }
    let payload_at = at + bytes(shape) as u64;
    let mut head = Head { rows, sequence: *chunk.sequence.as_bytes(), digests, seal: [0; 32], payload: payload_at };
    head.seal = head.sealed(basis);
    (head, payload)
}

fn layer_of(rows: &[f32], extent: Extent, layer: usize) -> impl Iterator<Item = f32> {
    let width = extent.width();
    rows.chunks_exact(extent.layers * width).flat_map(move |row| &row[layer * width..(layer + 1) * width]).copied()
}

fn section(payload: &mut Vec<u8>, digests: &mut Vec<[u8; 32]>, numbers: impl Iterator<Item = f32>) {
    let start = payload.len();
    payload.extend(numbers.flat_map(f32::to_le_bytes));
    digests.push(*Digest::of(&payload[start..]).as_bytes());
}
