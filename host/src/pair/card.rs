//! What a pair says of itself, by which a gate decides before its weights are read.

use std::sync::OnceLock;

use kvmig_gate::{Claim, Digest, Evidence, Loaded, Loader, PairIdentity};

use super::{Identity, MODULE, Manifest, ModelRecord, PairError, WEIGHTS, check, file, weights};
use crate::{
    engine::Model,
    sandbox::{HostError, Module, Sandbox, SandboxError, SandboxLimits},
};

/// Manifest and evidence of a pair, which fit each other.
#[derive(Clone, Debug)]
pub struct Card {
    manifest: Manifest,
    evidence: Option<Evidence>,
    label: String,
}

impl Card {
    /// Checks the two files; `label` is what messages call the pair.
    ///
    /// # Errors
    /// [`PairError`], naming file, field, what was found and what was expected.
    pub fn parse(label: &str, manifest: &[u8], evidence: Option<&[u8]>) -> Result<Card, PairError> {
        let manifest = check::parse(label, manifest)?;
        check::identity(label, &manifest)?;
        let evidence = check::evidence(label, &manifest, evidence)?;
        Ok(Card { manifest, evidence, label: label.to_owned() })
    }

    /// What people and the ledger call it.
    pub fn name(&self) -> &str {
        &self.manifest.name
    }

    /// What messages call it: its folder.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// The whole manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    pub(super) fn into_manifest(self) -> Manifest {
        self.manifest
    }

    /// What the mapper computes.
    pub fn identity(&self) -> &Identity {
        &self.manifest.identity
    }

    /// Kind of mapper, such as `ridge`.
    pub fn mapper(&self) -> &str {
        &self.manifest.identity.mapper.kind
    }

    /// The JSON that its module is set with.
    pub fn settings(&self) -> &str {
        &self.manifest.identity.mapper.settings
    }

    /// What it did on held-out documents.
    pub fn evidence(&self) -> Option<&Evidence> {
        self.evidence.as_ref()
    }

    /// The artifact that its evidence is about, which is what its files have to be; none without evidence.
    pub fn claim(&self) -> Option<Claim> {
        let Identity { source, target, head, tail, .. } = self.identity();
        let artifact = self.evidence.as_ref()?.artifact;
        Some(Claim { artifact, module: None, source: source.digest, target: target.digest, head: *head, tail: *tail })
    }

    /// Whether the two models that are there are of the kind that the pair was fitted for, whatever their weights: where they
    /// are not, nobody can mean to use them with it.
    ///
    /// # Errors
    /// [`PairError::Disagreement`] for another tokenizer, shape or rotation.
    pub fn check_kind(&self, source: &Model, target: &Model) -> Result<(), PairError> {
        check::kinds(&self.label, self.identity(), &ModelRecord::of(source), &ModelRecord::of(target))
    }

    /// Holds the pair against the two models that are there.
    ///
    /// # Errors
    /// [`PairError::Disagreement`] for another model, tokenizer, shape or rotation than the pair was fitted for.
    pub fn check(&self, source: &Model, target: &Model) -> Result<(), PairError> {
        self.check_kind(source, target)?;
        check::models(&self.label, self.identity(), &ModelRecord::of(source), &ModelRecord::of(target))
    }

    /// [`Card::check`] as the sentence a gate writes down.
    pub fn mismatch(&self, source: &Model, target: &Model) -> Option<String> {
        self.check(source, target).err().map(|error| error.to_string())
    }

    /// Compiles the component that the manifest names.
    pub(super) fn read_module(&self, component: &[u8]) -> Result<Module, PairError> {
        check::digest(&self.label, MODULE, Digest::of(component), self.identity().mapper.module)?;
        let wrong =
            |error: SandboxError| PairError::Module { file: file(&self.label, MODULE), source: Box::new(error) };
        sandbox().map_err(|error| wrong(error.into()))?.load(component).map_err(wrong)
    }

    /// Digest of component and shaders, as tickets name it.
    pub(super) fn module_digest(&self, component: &[u8], module: &Module) -> Digest {
        self.loader(component, module).finish().module()
    }

    /// Copies component and weights into memory of their own, hashes the copies, and holds them to the manifest.
    pub(super) fn read_weights(&self, component: &[u8], module: &Module, bytes: &[u8]) -> Result<Loaded, PairError> {
        let mut loader = self.loader(component, module);
        let loaded = weights::load(&file(&self.label, WEIGHTS), bytes, &mut loader).map(|()| loader.finish());
        // The artifact's digest, made on the way, covers every tensor. The file's own is as long again to make: it is asked for
        // what has no evidence to be held to, and for the word on what is wrong.
        let proven = matches!((&loaded, &self.evidence), (Ok(loaded), Some(e)) if loaded.artifact() == e.artifact);
        if !proven {
            check::digest(&self.label, WEIGHTS, Digest::of(bytes), self.identity().weights.sha256)?;
        }
        let loaded = loaded?;
        check::weights(&self.label, &self.manifest, &loaded)?;
        check::artifact(&self.label, &self.manifest, &loaded)?;
        Ok(loaded)
    }

    /// The artifact but its weights. The module's shaders are in its description: it is asked for them, so that they are part
    /// of the artifact too.
    fn loader(&self, component: &[u8], module: &Module) -> Loader {
        let identity = self.identity();
        let pair = PairIdentity {
            source: identity.source.digest,
            target: identity.target.digest,
            head: identity.head,
            tail: identity.tail,
            details: &identity.bytes(),
        };
        let mut loader = Loader::new(component.to_vec(), &pair);
        for (name, wgsl) in module.metadata().shaders.iter() {
            loader.shader(name, wgsl);
        }
        loader
    }
}

/// One engine for every module of the process.
fn sandbox() -> Result<&'static Sandbox, HostError> {
    static SHARED: OnceLock<Sandbox> = OnceLock::new();
    if let Some(sandbox) = SHARED.get() {
        return Ok(sandbox);
    }
    let sandbox = match Sandbox::new(SandboxLimits::default(), Sandbox::user_folder().as_deref()) {
        // The folder only saves the time to compile.
        Err(HostError::Store(_)) => Sandbox::new(SandboxLimits::default(), None),
        other => other,
    }?;
    Ok(SHARED.get_or_init(|| sandbox))
}
