//! A mapper before its weights are there, and after: everything about a migration that does not depend on the request.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use kvmig_gate::{Candidate, Claim, Digest, Loaded};
use serde::Serialize;

use crate::{
    device::{Device, DeviceError, ResidentWeights},
    pair::{Card, Pair, PairError, Stored},
    sandbox::{
        DeviceLimits, Module, PairShape, PlanError, SandboxError, ShapeError, WeightShape, WorkPlan, weight_shapes,
    },
};

use super::handoff::millis;

/// A mapper that the gate may choose: its module with its plan for one pair and device, and where its weights are to be had.
#[derive(Debug)]
pub struct Offer {
    card: Card,
    claim: Claim,
    module: Module,
    module_digest: Digest,
    plan: WorkPlan,
    shape: PairShape,
    limits: DeviceLimits,
    weights: Weights,
}

/// Where the bytes are.
#[derive(Debug)]
enum Weights {
    Stored(Stored),
    Loaded(Arc<Loaded>),
}

/// A mapper whose weights are in the device's memory.
#[derive(Debug)]
pub struct Mapper {
    pub(super) loaded: Arc<Loaded>,
    pub(super) module: Module,
    pub(super) plan: WorkPlan,
    pub(super) shape: PairShape,
    pub(super) settings: String,
    pub(super) weights: BTreeMap<String, WeightShape>,
    pub(super) resident: ResidentWeights,
    pub(super) limits: DeviceLimits,
    page_in: PageIn,
}

/// What it took to bring a mapper's weights onto the device.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PageIn {
    /// Bytes they take there.
    pub bytes: u64,
    /// Reading, checking and hashing them, in milliseconds.
    pub read_ms: f64,
    /// Bringing them onto the device, in milliseconds.
    pub upload_ms: f64,
}

/// A mapper that can't be made ready.
#[derive(Debug, thiserror::Error)]
pub enum MapperError {
    /// The pair's files are not what its card says.
    #[error(transparent)]
    Pair(#[from] PairError),
    /// The module can't be loaded, or declines the pair.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// The pair's caches have a shape no mapper can be asked about.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The weights have other shapes than the module's plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The weights don't fit the device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The weights alone are beyond the budget.
    #[error(
        "{pair}: its weights take {bytes} bytes on {device}, the budget is {budget}: raise --device-budget, or fit the pair \
         with a smaller k"
    )]
    BeyondBudget {
        /// The pair.
        pair: String,
        /// Bytes of its weights.
        bytes: u64,
        /// Bytes there may be.
        budget: u64,
        /// The device.
        device: String,
    },
    /// What fills the budget is being used.
    #[error(
        "{pair}: its weights take {bytes} bytes on {device}, and jobs that run hold {held} of the budget of {budget}: raise \
         --device-budget, or let fewer jobs run at once"
    )]
    BudgetInUse {
        /// The pair.
        pair: String,
        /// Bytes of its weights.
        bytes: u64,
        /// Bytes that can't be given up now.
        held: u64,
        /// Bytes there may be.
        budget: u64,
        /// The device.
        device: String,
    },
}

impl Offer {
    /// Reads a stored pair's module and asks it for its plan; its weights too where it has no evidence to say which they are.
    ///
    /// # Errors
    /// [`MapperError`].
    pub fn new(stored: &Stored, device: &Device) -> Result<Offer, MapperError> {
        match stored.card().claim() {
            Some(claim) => {
                let (module, digest) = stored.module()?;
                let claim = Claim { module: Some(digest), ..claim };
                Offer::put_together(stored.card(), claim, module, Weights::Stored(stored.clone()), device)
            }
            None => Offer::of(&stored.load()?, device),
        }
    }

    /// A pair that is in memory.
    ///
    /// # Errors
    /// [`MapperError`].
    pub fn of(pair: &Pair, device: &Device) -> Result<Offer, MapperError> {
        let loaded = Arc::clone(pair.loaded());
        Offer::put_together(pair.card(), loaded.claim(), pair.module().clone(), Weights::Loaded(loaded), device)
    }

    fn put_together(
        card: &Card,
        claim: Claim,
        module: Module,
        weights: Weights,
        device: &Device,
    ) -> Result<Offer, MapperError> {
        let identity = card.identity();
        let shape = PairShape::new(&identity.source.layout, &identity.target.layout)?
            .with_native_layers(identity.native_layers, identity.target.hidden)?;
        let limits = limits(device);
        let plan = module.plan(&shape, card.settings(), &limits)?;
        let module_digest = claim.module.unwrap_or_else(|| module.digest());
        Ok(Offer { card: card.clone(), claim, module, module_digest, plan, shape, limits, weights })
    }

    /// What the pair says of itself.
    pub fn card(&self) -> &Card {
        &self.card
    }

    /// What the gate is told it would run.
    pub fn claim(&self) -> Claim {
        self.claim
    }

    /// The same with its evidence.
    pub fn candidate(&self) -> Candidate<'_> {
        let Offer { card, claim, .. } = self;
        Candidate { mapper: card.mapper(), claim: *claim, evidence: card.evidence(), latency: None }
    }

    /// Holds weights to the shapes that the module's plan names.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn check_weights(&self, loaded: &Loaded) -> Result<(), PlanError> {
        self.plan.check_weights(&weight_shapes(loaded))
    }

    /// Digest of component and shaders.
    pub fn module_digest(&self) -> Digest {
        self.module_digest
    }

    /// Multiplications and additions a mapped token costs: two for each element of a weight matrix, of every head where
    /// heads have matrices of their own.
    pub fn flops_per_token(&self) -> f64 {
        let shapes = self.plan.weights().iter().map(|spec| &spec.shape).filter(|shape| shape.len() > 1);
        shapes.map(|shape| 2.0 * shape.iter().map(|&extent| f64::from(extent)).product::<f64>()).sum()
    }

    /// The weights in this process's memory, hashed and checked, and the milliseconds that took.
    pub(super) fn read(&self) -> Result<(Arc<Loaded>, f64), MapperError> {
        let clock = Instant::now();
        let loaded = match &self.weights {
            Weights::Stored(stored) => Arc::clone(stored.load()?.loaded()),
            Weights::Loaded(loaded) => Arc::clone(loaded),
        };
        Ok((loaded, millis(clock)))
    }

    /// Brings weights that were read onto the device.
    pub(super) fn upload(&self, loaded: Arc<Loaded>, read_ms: f64, device: &Device) -> Result<Mapper, MapperError> {
        let clock = Instant::now();
        let resident = device.load_weights(&loaded)?;
        let page_in = PageIn { bytes: resident.bytes(), read_ms, upload_ms: millis(clock) };
        Ok(Mapper {
            module: self.module.clone(),
            plan: self.plan.clone(),
            shape: self.shape,
            settings: self.card.settings().to_owned(),
            weights: weight_shapes(&loaded),
            resident,
            limits: self.limits,
            loaded,
            page_in,
        })
    }
}

impl Mapper {
    /// Asks the pair's module for its plan, and makes the weights resident.
    ///
    /// # Errors
    /// [`MapperError`].
    pub fn load(pair: &Pair, device: &Device) -> Result<Mapper, MapperError> {
        Offer::of(pair, device)?.upload(Arc::clone(pair.loaded()), 0.0, device)
    }

    /// The artifact that a permit has to be for.
    pub fn loaded(&self) -> &Arc<Loaded> {
        &self.loaded
    }

    /// What it took to make the weights resident, once.
    pub fn page_in(&self) -> PageIn {
        self.page_in
    }
}

fn limits(device: &Device) -> DeviceLimits {
    let crate::device::Limits { max_binding_bytes, offset_align, max_bindings, half, own_shaders } = device.limits();
    DeviceLimits { max_binding_bytes, offset_align, max_bindings, half, own_shaders }
}
