//! Caches as safetensors files: planes `layers.{l}.k` and `.v` of `[n_kv, T, d]`, `tokens` and `positions` of `[T]`, and
//! a description in the metadata that says whose the cache is.
//!
//! A mapped cache is written with every hop it went through, and [`read`], which makes native caches, refuses it. The
//! description is a label and no seal: who writes files by hand can call anything native.

use std::{
    borrow::Cow,
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
};

use half::f16;
use safetensors::{Dtype, SafeTensors, View};
use serde::{Deserialize, Serialize};

use super::{CacheLayout, Elem, KvCache, KvPlanes, MappedCache, Plane, Provenance};

const METADATA_KEY: &str = "kvmig.cache";
const FORMAT: u32 = 1;

/// A cache file that can't be written, read or trusted.
#[derive(Debug, thiserror::Error)]
pub enum CacheFileError {
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// Not a safetensors file, or cut short.
    #[error("{}: not a whole safetensors file ({detail}); write it again", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What the parser found.
        detail: String,
    },
    /// A field says something else than it must.
    #[error("{}: `{field}` is {found}, expected {expected}", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// Field or tensor.
        field: String,
        /// What stands there.
        found: String,
        /// What should.
        expected: String,
    },
    /// The cache is not native.
    #[error(
        "{}: this cache was mapped ({hops} hop(s), last ticket {ticket}); a mapped cache is never read as a native one: \
         prefill the prompt again, or resume it under its own permit",
        path.display()
    )]
    Mapped {
        /// The file.
        path: PathBuf,
        /// Mappings it went through.
        hops: usize,
        /// Ticket of the last one.
        ticket: String,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    format: u32,
    layout: CacheLayout,
    provenance: Provenance,
}

/// Writes a native cache; the file appears whole or not at all.
///
/// # Errors
/// If the file can't be written.
pub fn write(cache: &KvCache, path: &Path) -> Result<(), CacheFileError> {
    let provenance = Provenance { model: cache.model, hops: Vec::new() };
    write_planes(&cache.planes, &cache.tokens, &cache.positions, provenance, path)
}

/// Writes a mapped cache, with the history that marks it as one.
///
/// # Errors
/// If the file can't be written.
pub fn write_mapped(cache: &MappedCache, path: &Path) -> Result<(), CacheFileError> {
    write_planes(&cache.planes, &cache.tokens, &cache.positions, cache.provenance.clone(), path)
}

fn write_planes(
    planes: &KvPlanes,
    tokens: &[u32],
    positions: &[u32],
    provenance: Provenance,
    path: &Path,
) -> Result<(), CacheFileError> {
    let io = |source| CacheFileError::Io { path: path.to_owned(), source };
    let layout = planes.layout();
    let mut tensors: Vec<(String, Tensor<'_>)> = vec![
        ("tokens".into(), Tensor { dtype: Dtype::U32, shape: vec![tokens.len()], part: Part::Words(tokens) }),
        ("positions".into(), Tensor { dtype: Dtype::U32, shape: vec![positions.len()], part: Part::Words(positions) }),
    ];
    for layer in 0..layout.layers {
        let kv = planes.layer(layer);
        for (name, plane) in [("k", &kv.k), ("v", &kv.v)] {
            let dtype = match layout.elem {
                Elem::F32 => Dtype::F32,
                Elem::F16 => Dtype::F16,
            };
            let shape = vec![layout.kv_heads, tokens.len(), layout.head_dim];
            let part = Part::Plane { plane, head_stride: planes.head_stride() };
            tensors.push((format!("layers.{layer}.{name}"), Tensor { dtype, shape, part }));
        }
    }
    let description = Description { format: FORMAT, layout: layout.clone(), provenance };
    let description = serde_json::to_string(&description).expect("a description has no map with non-string keys");
    let metadata = HashMap::from([(METADATA_KEY.to_owned(), description)]);
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let draft = tempfile::Builder::new().prefix(".kvmig-").tempfile_in(folder).map_err(io)?;
    safetensors::serialize_to_file(tensors, Some(metadata), draft.path()).map_err(|e| match e {
        safetensors::SafeTensorError::IoError(source) => io(source),
        other => io(std::io::Error::other(other.to_string())),
    })?;
    draft.as_file().sync_all().map_err(io)?;
    draft.persist(path).map_err(|e| io(e.error))?;
    Ok(())
}

enum Part<'a> {
    Words(&'a [u32]),
    Plane { plane: &'a Plane, head_stride: usize },
}

struct Tensor<'a> {
    dtype: Dtype,
    shape: Vec<usize>,
    part: Part<'a>,
}

impl View for Tensor<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        match self.part {
            Part::Words(words) => bytemuck::cast_slice(words).into(),
            Part::Plane { plane, head_stride } => {
                let (heads, filled) = (self.shape[0], self.shape[1] * self.shape[2]);
                let mut bytes = Vec::with_capacity(self.data_len());
                for head in 0..heads {
                    let at = head * head_stride;
                    bytes.extend_from_slice(match plane {
                        Plane::F32(v) => bytemuck::cast_slice(&v[at..at + filled]),
                        Plane::F16(v) => bytemuck::cast_slice(&v[at..at + filled]),
                    });
                }
                bytes.into()
            }
        }
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

/// Reads a native cache of the model `expected` (its digest and layout).
///
/// # Errors
/// If the file is absent, cut short, of another model or layout, mapped, or holds a NaN or an infinity.
pub fn read(
    path: &Path,
    expected: kvmig_gate::Digest,
    expected_layout: &CacheLayout,
) -> Result<KvCache, CacheFileError> {
    let bytes = fs::read(path).map_err(|source| CacheFileError::Io { path: path.to_owned(), source })?;
    let malformed = |detail: String| CacheFileError::Malformed { path: path.to_owned(), detail };
    let field = |field: &str, found: String, expected: String| CacheFileError::Field {
        path: path.to_owned(),
        field: field.to_owned(),
        found,
        expected,
    };
    let (_, metadata) = SafeTensors::read_metadata(&bytes).map_err(|e| malformed(e.to_string()))?;
    let file = SafeTensors::deserialize(&bytes).map_err(|e| malformed(e.to_string()))?;
    let description = metadata
        .metadata()
        .as_ref()
        .and_then(|m| m.get(METADATA_KEY))
        .ok_or_else(|| field(METADATA_KEY, "absent".into(), "the description that kvmig writes".into()))?;
    let description: Description = serde_json::from_str(description)
        .map_err(|e| field(METADATA_KEY, e.to_string(), format!("a description of format {FORMAT}")))?;
    if description.format != FORMAT {
        return Err(field("format", description.format.to_string(), FORMAT.to_string()));
    }
    if let Some(last) = description.provenance.hops.last() {
        let hops = description.provenance.hops.len();
        return Err(CacheFileError::Mapped { path: path.to_owned(), hops, ticket: last.ticket.clone() });
    }
    if description.provenance.model != expected {
        let found = description.provenance.model.short();
        return Err(field("provenance.model", found, format!("{} (the model given)", expected.short())));
    }
    // The element type is the file's own business; everything else has to be the model's.
    let comparable = CacheLayout { elem: description.layout.elem, ..expected_layout.clone() };
    if description.layout != comparable {
        return Err(field("layout", format!("{:?}", description.layout), format!("{comparable:?}")));
    }
    let tokens = words(&file, "tokens", path)?;
    let positions = words(&file, "positions", path)?;
    if positions.len() != tokens.len() {
        return Err(field("positions", format!("{} entries", positions.len()), format!("{} (tokens)", tokens.len())));
    }
    if !positions.is_sorted_by(|a, b| a < b) {
        return Err(field("positions", "not increasing".into(), "strictly increasing positions".into()));
    }
    let mut planes = KvPlanes::zeros(description.layout, tokens.len());
    for layer in 0..planes.layout().layers {
        let layout = planes.layout().clone();
        let kv = planes.layer_mut(layer);
        for (name, plane) in [("k", &mut kv.k), ("v", &mut kv.v)] {
            read_plane(&file, &format!("layers.{layer}.{name}"), &layout, tokens.len(), plane, path)?;
        }
    }
    Ok(KvCache::new(planes, tokens, positions, expected))
}

fn tensor<'f>(
    file: &'f SafeTensors<'_>,
    name: &str,
    dtype: Dtype,
    shape: Option<&[usize]>,
    path: &Path,
) -> Result<Cow<'f, [u8]>, CacheFileError> {
    let field = |found: String, expected: String| CacheFileError::Field {
        path: path.to_owned(),
        field: name.to_owned(),
        found,
        expected,
    };
    let view = file.tensor(name).map_err(|_| field("absent".into(), "a tensor".into()))?;
    if view.dtype() != dtype {
        return Err(field(format!("{:?}", view.dtype()), format!("{dtype:?}")));
    }
    match shape {
        Some(shape) if view.shape() != shape => Err(field(format!("{:?}", view.shape()), format!("{shape:?}"))),
        None if view.shape().len() != 1 => Err(field(format!("{:?}", view.shape()), "one dimension".into())),
        _ => Ok(view.data().to_vec().into()),
    }
}

fn words(file: &SafeTensors<'_>, name: &str, path: &Path) -> Result<Vec<u32>, CacheFileError> {
    let bytes = tensor(file, name, Dtype::U32, None, path)?;
    Ok(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

fn read_plane(
    file: &SafeTensors<'_>,
    name: &str,
    layout: &CacheLayout,
    tokens: usize,
    plane: &mut Plane,
    path: &Path,
) -> Result<(), CacheFileError> {
    let dtype = match layout.elem {
        Elem::F32 => Dtype::F32,
        Elem::F16 => Dtype::F16,
    };
    let shape = [layout.kv_heads, tokens, layout.head_dim];
    let bytes = tensor(file, name, dtype, Some(&shape), path)?;
    let finite = match plane {
        Plane::F32(values) => {
            for (to, b) in values.iter_mut().zip(bytes.chunks_exact(4)) {
                *to = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
            values.iter().all(|x| x.is_finite())
        }
        Plane::F16(values) => {
            for (to, b) in values.iter_mut().zip(bytes.chunks_exact(2)) {
                *to = f16::from_le_bytes([b[0], b[1]]);
            }
            values.iter().all(|x| x.is_finite())
        }
    };
    if finite {
        return Ok(());
    }
    Err(CacheFileError::Field {
        path: path.to_owned(),
        field: name.to_owned(),
        found: "a NaN or an infinity".into(),
        expected: "finite numbers".into(),
    })
}

#[cfg(test)]
mod tests {
    use kvmig_gate::Digest;

    use super::*;
    use crate::cache::{Hop, Pairing, Rope, RopeScaling};

    fn layout(elem: Elem) -> CacheLayout {
        let rope = Rope { theta: 1e4, dims: 8, pairing: Pairing::HalfSplit, scaling: RopeScaling::None };
        CacheLayout { layers: 2, kv_heads: 3, head_dim: 8, rope, elem }
    }

    /// A cache whose planes have more room than tokens, every element distinct.
    fn cache(elem: Elem) -> KvCache {
        let (tokens, positions) = (vec![5, 6, 7], vec![0, 1, 9]);
        let mut planes = KvPlanes::zeros(layout(elem), 5);
        let mut next = 0.0;
        for layer in 0..2 {
            for value in [false, true] {
                for head in 0..3 {
                    for slot in 0..3 {
                        let at = planes.offset(head, slot);
                        let kv = planes.layer_mut(layer);
                        let row: Vec<f32> = (0..8).map(|i| next + i as f32).collect();
                        if value { &mut kv.v } else { &mut kv.k }.write(at, &row);
                        next += 8.0;
                    }
                }
            }
        }
        KvCache::new(planes, tokens, positions, Digest::of(b"model"))
    }

    #[test]
    fn a_cache_comes_back_as_it_went() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.safetensors");
        for elem in [Elem::F32, Elem::F16] {
            let before = cache(elem);
            write(&before, &path).unwrap();
            let after = read(&path, before.model, &layout(Elem::F32)).unwrap();
            assert_eq!((after.tokens(), after.positions()), (before.tokens(), before.positions()));
            for layer in 0..2 {
                for head in 0..3 {
                    let (mut a, mut b) = ([0.0; 24], [0.0; 24]);
                    before.planes.layer(layer).v.read(before.planes.offset(head, 0), &mut a);
                    after.planes.layer(layer).v.read(after.planes.offset(head, 0), &mut b);
                    assert_eq!(a, b);
                }
            }
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no draft is left behind");
    }

    #[test]
    fn a_mapped_cache_is_not_read_as_a_native_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        let KvCache { planes, tokens, positions, model, .. } = cache(Elem::F32);
        let hop = Hop { source: model, pair: model, module: model, ticket: "T1".into() };
        let provenance = Provenance { model, hops: vec![hop] };
        write_mapped(&MappedCache { planes, tokens, positions, slots: 1..2, provenance }, &path).unwrap();
        let error = read(&path, model, &layout(Elem::F32)).unwrap_err();
        assert!(matches!(error, CacheFileError::Mapped { hops: 1, .. }), "{error}");
    }

    #[test]
    fn what_disagrees_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.safetensors");
        let c = cache(Elem::F32);
        write(&c, &path).unwrap();
        let other = read(&path, Digest::of(b"other"), &layout(Elem::F32)).unwrap_err().to_string();
        assert!(other.contains("provenance.model") && other.contains("c.safetensors"), "{other}");
        let mut wider = layout(Elem::F32);
        wider.rope.theta = 5e5;
        let rope = read(&path, c.model, &wider).unwrap_err().to_string();
        assert!(rope.contains("500000"), "{rope}");
        let whole = fs::read(&path).unwrap();
        for cut in [0, 7, 100, whole.len() / 2, whole.len() - 1] {
            fs::write(&path, &whole[..cut]).unwrap();
            assert!(matches!(read(&path, c.model, &layout(Elem::F32)), Err(CacheFileError::Malformed { .. })));
        }
        let mut nan = whole;
        let at = nan.len() - 2 * 3 * 4 - 4; // before `positions` and `tokens`: the last value of the last plane
        nan[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
        fs::write(&path, &nan).unwrap();
        let nan = read(&path, c.model, &layout(Elem::F32)).unwrap_err().to_string();
        assert!(nan.contains("NaN"), "{nan}");
    }
}
