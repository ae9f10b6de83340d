//! The bytes that will run, hashed while they are copied into memory this process owns.
//!
//! A permit is bound to such a copy: what is on disk may change afterwards, the copy can't.

use std::{collections::BTreeMap, ops::Range};

use crate::{Digest, DigestBuilder};

/// Element type of a weight tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightElem {
    /// IEEE 754 single precision, little endian.
    F32,
    /// IEEE 754 half precision, little endian.
    F16,
}

/// One weight tensor, owned.
#[derive(Debug)]
pub struct WeightTensor {
    elem: WeightElem,
    shape: Vec<usize>,
    /// u64 for its alignment: the bytes may be viewed as f32 or packed halves.
    words: Vec<u64>,
    len: usize,
}

impl WeightTensor {
    /// Element type.
    pub fn elem(&self) -> WeightElem {
        self.elem
    }

    /// Extent of each dimension, row-major.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The bytes, little endian, at an address that is a multiple of 8; their length is padded up to one too, with zeroes.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Length in bytes without the padding.
    pub fn byte_len(&self) -> usize {
        self.len
    }
}

/// What fixes a pair besides module and weights. It is hashed with the artifact: evidence and permits hold for these models
/// and these ends, and nobody is asked for them again.
#[derive(Clone, Copy, Debug)]
pub struct PairIdentity<'a> {
    /// The model whose caches are mapped.
    pub source: Digest,
    /// The model they are mapped for.
    pub target: Digest,
    /// First positions that the target computes itself, in tokens.
    pub head: usize,
    /// Last prompt tokens that the target computes itself.
    pub tail: usize,
    /// Whatever else fixes what the mapper computes (settings, layouts), in the host's own form. Not the evidence, which in
    /// turn names the artifact.
    pub details: &'a [u8],
}

impl PairIdentity<'_> {
    fn digest(&self) -> Digest {
        DigestBuilder::new("pair")
            .field("source", self.source.as_bytes())
            .field("target", self.target.as_bytes())
            .field("head", &(self.head as u64).to_le_bytes())
            .field("tail", &(self.tail as u64).to_le_bytes())
            .field("details", self.details)
            .finish()
    }
}

/// What a candidate says it would run: an artifact by its digest, with what the pair's identity fixes.
///
/// Of bytes in memory it is a fact ([`Loaded::claim`]); of bytes that still lie on a disk it is what the pair's folder says of
/// them. A decision may rest on either, so that gigabytes are read only for what will run: a permit is exchanged for bytes that
/// this crate hashed, and [`Permit::redeem`](crate::Permit::redeem) holds them to the claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// What evidence and permits are bound to: [`Loaded::artifact`].
    pub artifact: Digest,
    /// Digest of component and shaders, where the host has read them; for the ledger, since the artifact's digest covers it.
    pub module: Option<Digest>,
    /// The model whose caches are mapped.
    pub source: Digest,
    /// The model they are mapped for.
    pub target: Digest,
    /// First positions that the target computes itself, in tokens.
    pub head: usize,
    /// Last prompt tokens that the target computes itself.
    pub tail: usize,
}

impl Claim {
    /// The slots that are mapped of a cache of `tokens` tokens: what head and tail leave, which may be nothing.
    pub fn middle(&self, tokens: usize) -> Range<usize> {
        let end = tokens.saturating_sub(self.tail);
        self.head.min(end)..end
    }

    /// The first thing that the claimed artifact has otherwise: field, found, expected.
    pub(crate) fn lie(&self, loaded: &Loaded) -> Option<(&'static str, String, String)> {
        let Claim { artifact: _, module: _, source, target, head, tail } = *self;
        let fields = [
            ("source", loaded.source.short(), source.short()),
            ("target", loaded.target.short(), target.short()),
            ("head", loaded.head.to_string(), head.to_string()),
            ("tail", loaded.tail.to_string(), tail.to_string()),
        ];
        fields.into_iter().find(|(_, found, claimed)| found != claimed)
    }
}

/// A component, its shaders, its weights and its pair's identity, as they will run.
#[derive(Debug)]
pub struct Loaded {
    component: Vec<u8>,
    shaders: Vec<(String, String)>,
    weights: BTreeMap<String, WeightTensor>,
    source: Digest,
    target: Digest,
    head: usize,
    tail: usize,
    module: Digest,
    pair: Digest,
    artifact: Digest,
}

impl Loaded {
    /// The Wasm component.
    pub fn component(&self) -> &[u8] {
        &self.component
    }

    /// The module's own shaders: (name, WGSL).
    pub fn shaders(&self) -> &[(String, String)] {
        &self.shaders
    }

    /// The weights by name.
    pub fn weights(&self) -> &BTreeMap<String, WeightTensor> {
        &self.weights
    }

    /// The model whose caches are mapped.
    pub fn source(&self) -> Digest {
        self.source
    }

    /// The model they are mapped for.
    pub fn target(&self) -> Digest {
        self.target
    }

    /// First positions that the target computes itself, in tokens.
    pub fn head(&self) -> usize {
        self.head
    }

    /// Last prompt tokens that the target computes itself.
    pub fn tail(&self) -> usize {
        self.tail
    }

    /// The slots that are mapped of a cache of `tokens` tokens: what head and tail leave, which may be nothing.
    pub fn middle(&self, tokens: usize) -> Range<usize> {
        self.claim().middle(tokens)
    }

    /// What it is, as a decision takes it.
    pub fn claim(&self) -> Claim {
        let Loaded { source, target, head, tail, module, artifact, .. } = *self;
        Claim { artifact, module: Some(module), source, target, head, tail }
    }

    /// Digest of component and shaders.
    pub fn module(&self) -> Digest {
        self.module
    }

    /// Digest of the pair's identity.
    pub fn pair(&self) -> Digest {
        self.pair
    }

    /// Digest of all of it: what evidence and permits are bound to.
    pub fn artifact(&self) -> Digest {
        self.artifact
    }
}

/// Bytes copied before they are hashed: few enough to be in the cache still, so that memory is read once.
const HASHED_AT_ONCE: usize = 64 << 10;

/// Collects the parts of a [`Loaded`].
#[derive(Debug)]
pub struct Loader {
    loaded: Loaded,
    weight_digests: BTreeMap<String, Digest>,
}

impl Loader {
    /// Starts with the component's bytes and the identity of the pair.
    pub fn new(component: Vec<u8>, pair: &PairIdentity<'_>) -> Loader {
        let PairIdentity { source, target, head, tail, details: _ } = *pair;
        let unhashed = Digest::of(&[]);
        let loaded = Loaded {
            component,
            shaders: Vec::new(),
            weights: BTreeMap::new(),
            source,
            target,
            head,
            tail,
            pair: pair.digest(),
            module: unhashed,
            artifact: unhashed,
        };
        Loader { loaded, weight_digests: BTreeMap::new() }
    }

    /// Adds one of the module's own shaders.
    pub fn shader(&mut self, name: &str, wgsl: &str) {
        self.loaded.shaders.push((name.to_owned(), wgsl.to_owned()));
    }

    /// Copies a weight tensor in and hashes the copy; a second tensor of the same name replaces the first.
    pub fn weight(&mut self, name: &str, elem: WeightElem, shape: &[usize], bytes: &[u8]) {
        let mut words = vec![0u64; bytes.len().div_ceil(8)];
        let mut digest = DigestBuilder::new("weight").field("elem", &[elem as u8]);
        for extent in shape {
            digest = digest.field("extent", &(*extent as u64).to_le_bytes());
        }
        let mut field = digest.long_field("bytes", bytes.len());
        let copy = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..bytes.len()];
        for (to, from) in copy.chunks_mut(HASHED_AT_ONCE).zip(bytes.chunks(HASHED_AT_ONCE)) {
            to.copy_from_slice(from);
            // The copy is hashed, not what it was copied from: a mapped file may change between the two.
            field.update(to);
        }
        let digest = field.finish().finish();
        let tensor = WeightTensor { elem, shape: shape.to_vec(), words, len: bytes.len() };
        self.weight_digests.insert(name.to_owned(), digest);
        self.loaded.weights.insert(name.to_owned(), tensor);
    }

    /// Closes the collection and computes its digests.
    pub fn finish(self) -> Loaded {
        let Loader { mut loaded, weight_digests } = self;
        let mut module = DigestBuilder::new("module").field("component", &loaded.component);
        for (name, wgsl) in &loaded.shaders {
            module = module.field("shader-name", name.as_bytes()).field("shader-wgsl", wgsl.as_bytes());
        }
        loaded.module = module.finish();
        let mut artifact = DigestBuilder::new("artifact")
            .field("module", loaded.module.as_bytes())
            .field("pair", loaded.pair.as_bytes());
        for (name, digest) in &weight_digests {
            artifact = artifact.field("weight-name", name.as_bytes()).field("weight", digest.as_bytes());
        }
        loaded.artifact = artifact.finish();
        loaded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> PairIdentity<'static> {
        let (source, target) = (Digest::of(b"source"), Digest::of(b"target"));
        PairIdentity { source, target, head: 4, tail: 32, details: b"details" }
    }

    fn load(change: impl FnOnce(&mut Loader)) -> Loaded {
        let mut loader = Loader::new(b"component".to_vec(), &identity());
        loader.shader("map", "fn main() {}");
        loader.weight("w", WeightElem::F32, &[2, 2], &[1; 16]);
        change(&mut loader);
        loader.finish()
    }

    #[test]
    fn every_part_counts() {
        let plain = load(|_| {});
        assert_eq!(plain.artifact(), load(|_| {}).artifact());
        let changes: [(&str, Loaded); 7] = [
            (
                "a weight's byte",
                load(|l| l.weight("w", WeightElem::F32, &[2, 2], &[[1; 15].as_slice(), &[0]].concat())),
            ),
            ("a weight's shape", load(|l| l.weight("w", WeightElem::F32, &[4, 1], &[1; 16]))),
            ("a weight's element type", load(|l| l.weight("w", WeightElem::F16, &[2, 2], &[1; 16]))),
            ("a further weight", load(|l| l.weight("x", WeightElem::F32, &[0], &[]))),
            ("a further shader", load(|l| l.shader("map2", "fn main() {}"))),
            (
                "a shader's text moved into its name",
                load(|l| l.loaded.shaders = vec![("mapfn".into(), " main() {}".into())]),
            ),
            ("the component", load(|l| l.loaded.component.push(0))),
        ];
        for (what, changed) in changes {
            assert_ne!(plain.artifact(), changed.artifact(), "{what} leaves the digest as it was");
        }
        let other = Digest::of(b"other");
        let pairs = [
            ("the source", PairIdentity { source: other, ..identity() }),
            ("the target", PairIdentity { target: other, ..identity() }),
            ("source and target exchanged", {
                PairIdentity { source: identity().target, target: identity().source, ..identity() }
            }),
            ("the head", PairIdentity { head: 5, ..identity() }),
            ("the tail", PairIdentity { tail: 31, ..identity() }),
            ("the details", PairIdentity { details: b"Details", ..identity() }),
        ];
        for (what, pair) in pairs {
            let mut loader = Loader::new(b"component".to_vec(), &pair);
            loader.shader("map", "fn main() {}");
            loader.weight("w", WeightElem::F32, &[2, 2], &[1; 16]);
            assert_ne!(plain.artifact(), loader.finish().artifact(), "{what} leaves the digest as it was");
        }
    }

    #[test]
    fn the_middle_is_what_the_ends_leave() {
        let loaded = load(|_| {});
        assert_eq!(loaded.middle(100), 4..68);
        for tokens in [0, 3, 4, 32, 36] {
            assert!(loaded.middle(tokens).is_empty(), "{tokens}");
        }
        let ends = PairIdentity { head: usize::MAX, tail: usize::MAX, ..identity() };
        assert!(Loader::new(Vec::new(), &ends).finish().middle(100).is_empty());
    }

    #[test]
    fn a_weight_is_copied_whole_and_hashed_as_one_field() {
        // Not a multiple of 8, and longer than what is hashed at once.
        let bytes: Vec<u8> = (0..HASHED_AT_ONCE * 2 + 13).map(|i| (i % 251) as u8).collect();
        let mut loader = Loader::new(Vec::new(), &identity());
        loader.weight("w", WeightElem::F16, &[bytes.len() / 2], &bytes);
        let expected = DigestBuilder::new("weight")
            .field("elem", &[WeightElem::F16 as u8])
            .field("extent", &((bytes.len() / 2) as u64).to_le_bytes())
            .field("bytes", &bytes)
            .finish();
        assert_eq!(loader.weight_digests["w"], expected);
        let tensor = &loader.loaded.weights["w"];
        let copy: Vec<u8> = tensor.words().iter().flat_map(|word| word.to_ne_bytes()).collect();
        assert_eq!(tensor.byte_len(), bytes.len());
        assert_eq!(&copy[..bytes.len()], bytes);
        assert_eq!(copy[bytes.len()..], [0; 3]);
    }
}
