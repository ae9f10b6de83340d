//! Finished layers, a file each, so that an interrupted training goes on with the next one.

use std::{
    collections::HashMap,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use kvmig_gate::{Digest, DigestBuilder};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde::{Deserialize, Serialize};

use super::{LayerNetworks, MlpError, Network, Part, Settings};

/// Version of the files' form.
const FORMAT: &str = "kvmig-fit-mlp-1";

/// Name of the metadata entry that holds the [`Header`].
const METADATA: &str = "kvmig";

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    format: String,
    /// What the layer was trained on, and how.
    subject: Digest,
    r2: [f64; 2],
    epochs: [usize; 2],
    /// Digest of the tensors.
    sha256: Digest,
}

/// The folder of finished layers.
#[derive(Debug)]
pub(super) struct Kept {
    folder: PathBuf,
    rows: Digest,
    settings: Settings,
}

impl Kept {
    pub(super) fn new(folder: &Path, rows: Digest, settings: &Settings) -> Kept {
        Kept { folder: folder.to_owned(), rows, settings: settings.clone() }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    fn file(&self, layer: usize) -> PathBuf {
        self.folder.join(format!("layer-{layer:03}.safetensors"))
    }

    fn subject(&self, layer: usize, sources: &[usize]) -> Digest {
        let Settings { width, epochs, batch, seed } = self.settings;
        let mut digest = DigestBuilder::new("fit-mlp").field("rows", self.rows.as_bytes());
        for number in [layer, width, epochs, batch].iter().chain(sources) {
            digest = digest.field("number", &(*number as u64).to_le_bytes());
        }
        digest.field("seed", &seed.to_le_bytes()).finish()
    }

    /// Writes a finished layer beside its file and renames it there.
    pub(super) fn save(&self, networks: &LayerNetworks) -> Result<(), MlpError> {
        let file = self.file(networks.layer);
        let failed = |source| MlpError::Io { file: file.clone(), source };
        let tensors = tensors(networks);
        let header = Header {
            format: FORMAT.to_owned(),
            subject: self.subject(networks.layer, &networks.sources),
            r2: Part::BOTH.map(|part| networks.part(part).r2),
            epochs: Part::BOTH.map(|part| networks.part(part).epochs),
            sha256: seal(tensors.iter().map(|(name, _, bytes)| (name.as_str(), bytes.as_slice()))),
        };
        let header = serde_json::to_string(&header).expect("a header holds strings and numbers only");
        let views = tensors
            .iter()
            .map(|(name, dtype, bytes)| {
                let elements = 8 * bytes.len() / dtype.bitsize();
                TensorView::new(*dtype, vec![elements], bytes).map(|view| (name, view))
            })
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| failed(io::Error::other(error)))?;
        fs::create_dir_all(&self.folder).map_err(failed)?;
        let draft = tempfile::NamedTempFile::new_in(&self.folder).map_err(failed)?;
        let metadata = HashMap::from([(METADATA.to_owned(), header)]);
        safetensors::serialize_to_file(views, Some(metadata), draft.path())
            .map_err(|error| failed(io::Error::other(error)))?;
        File::open(draft.path()).and_then(|file| file.sync_all()).map_err(failed)?;
        draft.persist(&file).map_err(|error| failed(error.error))?;
        Ok(())
    }

    /// A finished layer of these rows, source layers and settings; `None` where there is none.
    pub(super) fn load(&self, layer: usize, sources: &[usize]) -> Result<Option<LayerNetworks>, MlpError> {
        let file = self.file(layer);
        let bytes = match fs::read(&file) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(MlpError::Io { file, source }),
        };
        let read = || -> Result<Option<LayerNetworks>, String> {
            let said = |error: safetensors::SafeTensorError| error.to_string();
            let (_, metadata) = SafeTensors::read_metadata(&bytes).map_err(said)?;
            let text =
                metadata.metadata().as_ref().and_then(|entries| entries.get(METADATA)).map_or("", String::as_str);
            let header: Header = serde_json::from_str(text).map_err(|error| error.to_string())?;
            if header.format != FORMAT {
                return Err(format!("format {}, expected {FORMAT}", header.format));
            }
            if header.subject != self.subject(layer, sources) {
                return Ok(None);
            }
            let file = SafeTensors::deserialize(&bytes).map_err(said)?;
            let mut found = file.tensors();
            found.sort_by(|(a, _), (b, _)| a.cmp(b));
            if seal(found.iter().map(|(name, view)| (name.as_str(), view.data()))) != header.sha256 {
                return Err("its digest is another than when it was written".to_owned());
            }
            let network = |part: Part| {
                let tensor = |name: &str, dtype: Dtype| {
                    let name = format!("{}.{name}", part.letter());
                    let view = file.tensor(&name).map_err(said)?;
                    if view.dtype() == dtype {
                        Ok(view.data().to_vec())
                    } else {
                        Err(format!("{name}: {:?}", view.dtype()))
                    }
                };
                let f32s = |name: &str| {
                    let bytes = tensor(name, Dtype::F32)?;
                    Ok::<_, String>(
                        bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
                    )
                };
                let mean = tensor("mean", Dtype::F64)?;
                let whole = |b: &[u8]| f64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]);
                Ok::<_, String>(Network {
                    weights: [f32s("weight.0")?, f32s("weight.1")?, f32s("weight.2")?],
                    biases: [f32s("bias.0")?, f32s("bias.1")?, f32s("bias.2")?],
                    source_mean: mean.chunks_exact(8).map(whole).collect(),
                    r2: header.r2[part as usize],
                    epochs: header.epochs[part as usize],
                })
            };
            let (keys, values) = (network(Part::Keys)?, network(Part::Values)?);
            Ok(Some(LayerNetworks { layer, sources: sources.to_vec(), keys, values }))
        };
        read().map_err(|found| MlpError::Foreign { file: file.clone(), found })
    }
}

/// Every tensor, by its name.
fn tensors(networks: &LayerNetworks) -> Vec<(String, Dtype, Vec<u8>)> {
    let mut tensors = Vec::new();
    for part in Part::BOTH {
        let network = networks.part(part);
        for (kind, numbers) in [("bias", &network.biases), ("weight", &network.weights)] {
            tensors.extend(numbers.iter().enumerate().map(|(i, numbers)| {
                let bytes = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
                (format!("{}.{kind}.{i}", part.letter()), Dtype::F32, bytes)
            }));
        }
        let mean = network.source_mean.iter().flat_map(|x| x.to_le_bytes()).collect();
        tensors.push((format!("{}.mean", part.letter()), Dtype::F64, mean));
    }
    tensors.sort_by(|(a, ..), (b, ..)| a.cmp(b));
    tensors
}

/// Digest of tensors in the order of their names.
fn seal<'a>(tensors: impl Iterator<Item = (&'a str, &'a [u8])>) -> Digest {
    let fields = DigestBuilder::new("fit-mlp-layer");
    tensors.fold(fields, |digest, (name, bytes)| digest.field("name", name.as_bytes()).field("bytes", bytes)).finish()
}

/// Removes the finished layers; what else is in the folder stays, and so does it then.
///
/// # Errors
/// The file or folder that can't be removed, and why.
pub(in crate::fit) fn remove(folder: &Path) -> Result<(), (PathBuf, io::Error)> {
    let failed = |error| (folder.to_owned(), error);
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    let mut others = false;
    for entry in entries {
        let (path, ours) = {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            (entry.path(), name.starts_with("layer-") && name.ends_with(".safetensors"))
        };
        match ours {
            true => fs::remove_file(&path).map_err(|error| (path, error))?,
            false => others = true,
        }
    }
    if others { Ok(()) } else { fs::remove_dir(folder).map_err(failed) }
}
