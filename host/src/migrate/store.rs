//! Weights on the device: paged in on first use, the longest unused given up where a budget says so.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use kvmig_gate::Digest;

use crate::device::Device;

use super::{Mapper, MapperError, Offer};

/// The mappers that are resident on one device.
///
/// Whoever maps holds the [`Mapper`] meanwhile, and what somebody holds is not given up: a budget that is too small for what
/// runs at once is an error of the one that comes last, whose request re-prefills.
#[derive(Debug)]
pub struct Store<'d> {
    device: &'d Device,
    budget: Option<u64>,
    slots: Mutex<Vec<Slot>>,
    /// Told when a mapper that was being paged in is there, or is not to be.
    changed: Condvar,
}

/// The place of one artifact. The last used is the last in the list.
#[derive(Debug)]
struct Slot {
    artifact: Digest,
    bytes: u64,
    /// None while it is paged in.
    mapper: Option<Arc<Mapper>>,
}

impl<'d> Store<'d> {
    /// Nothing is resident yet. Without a budget, in bytes of weights, nothing is given up either: no graphics interface says
    /// how much memory an adapter has, and what does not fit is an error of the driver that costs one re-prefill.
    pub fn new(device: &'d Device, budget: Option<u64>) -> Store<'d> {
        Store { device, budget, slots: Mutex::default(), changed: Condvar::new() }
    }

    /// The device.
    pub fn device(&self) -> &'d Device {
        self.device
    }

    /// The mapper of an offer, resident. Of two callers that want it at once, one pages it in and the other waits.
    ///
    /// # Errors
    /// [`MapperError`]; what could not be paged in is tried again when it is wanted again.
    pub fn get(&self, offer: &Offer) -> Result<Arc<Mapper>, MapperError> {
        let artifact = offer.claim().artifact;
        let mut slots = self.lock();
        while let Some(at) = slots.iter().position(|slot| slot.artifact == artifact) {
            if let Some(mapper) = slots[at].mapper.clone() {
                let slot = slots.remove(at);
                slots.push(slot);
                return Ok(mapper);
            }
            slots = self.changed.wait(slots).unwrap_or_else(PoisonError::into_inner);
        }
        slots.push(Slot { artifact, bytes: 0, mapper: None });
        drop(slots);
        Paging { store: self, artifact }.page_in(offer)
    }

    /// Whether an offer's weights are on the device, at once.
    pub fn is_resident(&self, offer: &Offer) -> bool {
        self.lock().iter().any(|slot| slot.artifact == offer.claim().artifact && slot.mapper.is_some())
    }

    /// Artifacts that are resident, the longest unused first, and the bytes of each.
    pub fn resident(&self) -> Vec<(Digest, u64)> {
        let slots = self.lock();
        slots.iter().filter(|slot| slot.mapper.is_some()).map(|slot| (slot.artifact, slot.bytes)).collect()
    }

    /// Reserves `bytes` for the slot of `artifact`, giving up what was not used for the longest time and is not in use.
    fn reserve(&self, offer: &Offer, bytes: u64) -> Result<(), MapperError> {
        let artifact = offer.claim().artifact;
        let (pair, device) = (offer.card().label().to_owned(), self.device.info().name);
        let mut slots = self.lock();
        if let Some(budget) = self.budget {
            if bytes > budget {
                return Err(MapperError::BeyondBudget { pair, bytes, budget, device });
            }
            let is_free = |slot: &Slot| slot.mapper.as_ref().is_some_and(|mapper| Arc::strong_count(mapper) == 1);
            let held = slots.iter().filter(|slot| !is_free(slot)).map(|slot| slot.bytes).sum::<u64>();
            if held + bytes > budget {
                return Err(MapperError::BudgetInUse { pair, bytes, held, budget, device });
            }
            while slots.iter().map(|slot| slot.bytes).sum::<u64>() + bytes > budget {
                let Some(at) = slots.iter().position(is_free) else { break };
                slots.remove(at);
            }
        }
        slots.iter_mut().filter(|slot| slot.artifact == artifact).for_each(|slot| slot.bytes = bytes);
        Ok(())
    }

    /// A list whose holder panicked is whole all the same: each change of it is one step.
    fn lock(&self) -> MutexGuard<'_, Vec<Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A slot that is being filled. Dropped before it is, by an error or a panic, it frees the slot.
struct Paging<'s, 'd> {
    store: &'s Store<'d>,
    artifact: Digest,
}

impl Paging<'_, '_> {
    fn page_in(self, offer: &Offer) -> Result<Arc<Mapper>, MapperError> {
        let (loaded, read_ms) = offer.read()?;
        self.store.reserve(offer, self.store.device.weight_bytes(&loaded))?;
        let mapper = Arc::new(offer.upload(loaded, read_ms, self.store.device)?);
        for slot in self.store.lock().iter_mut().filter(|slot| slot.artifact == self.artifact) {
            slot.mapper = Some(Arc::clone(&mapper));
        }
        Ok(mapper)
    }
}

impl Drop for Paging<'_, '_> {
    fn drop(&mut self) {
        self.store.lock().retain(|slot| slot.artifact != self.artifact || slot.mapper.is_some());
        self.store.changed.notify_all();
    }
}
