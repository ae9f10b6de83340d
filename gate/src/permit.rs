//! Proof that the gate allowed one migration, and what becomes of it.
//!
//! `Permit → Redeemed → (Migrated | Trialled, Receipt) → settled | unaudited | failed`. Each arrow consumes the value on its
//! left; dropping any of them on the way writes the ticket down as abandoned.

use std::{fmt, marker::PhantomData, ops::Range, time::Duration};

use crate::{
    CacheFacts, Claim, Digest, Loaded, Ticket,
    ledger::{LedgerError, lease::Lease},
};

/// What a permit is for: [`Live`] or [`Trial`], and nothing else.
pub trait Purpose: sealed::Sealed {
    /// The form in which a mapped cache leaves the migration.
    type Outcome<T>;

    /// Wraps what a redeemed permit made; nobody else can make a [`sealed::Made`].
    #[doc(hidden)]
    fn outcome<T>(made: sealed::Made<T>) -> Self::Outcome<T>;
}

/// A migration whose cache will be decoded from.
#[derive(Debug)]
pub enum Live {}

/// A migration that is only measured: held-out evaluation, or the audit of a refused request.
#[derive(Debug)]
pub enum Trial {}

mod sealed {
    use super::{Digest, Live, Ticket, Trial};

    pub trait Sealed {}
    impl Sealed for Live {}
    impl Sealed for Trial {}

    /// A mapped cache on its way from a redeemed permit into its outcome.
    #[derive(Debug)]
    pub struct Made<T> {
        pub(super) cache: T,
        pub(super) artifact: Digest,
        pub(super) ticket: Ticket,
    }
}

impl Purpose for Live {
    type Outcome<T> = Migrated<T>;

    fn outcome<T>(made: sealed::Made<T>) -> Migrated<T> {
        Migrated(made)
    }
}

impl Purpose for Trial {
    type Outcome<T> = Trialled<T>;

    fn outcome<T>(made: sealed::Made<T>) -> Trialled<T> {
        Trialled(made)
    }
}

/// Leave to run one artifact against one cache, once.
///
/// Minted only by [`Gate::decide`](crate::Gate::decide) and [`Gate::trial`](crate::Gate::trial).
#[must_use = "a permit that is dropped is written down as abandoned"]
pub struct Permit<P: Purpose> {
    lease: Lease,
    terms: Terms,
    purpose: PhantomData<P>,
}

/// What a permit is bound to. The numbers that source and target compute in, and the device, are not in it: they say whether
/// evidence applies, and are judged with the request. Which model the cache is mapped for, and which of its slots, is not written here a second time:
/// the pair's identity fixes it, and the artifact's digest the identity.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// The component, shaders, weights and pair that were decided on, as they were claimed to be.
    pub(crate) claim: Claim,
    /// The source cache that was decided on.
    pub(crate) cache: CacheFacts,
}

impl<P: Purpose> Permit<P> {
    pub(crate) fn mint(lease: Lease, terms: Terms) -> Permit<P> {
        Permit { lease, terms, purpose: PhantomData }
    }

    /// The ticket under which the ledger knows this migration.
    pub fn ticket(&self) -> &Ticket {
        self.lease.ticket()
    }

    /// Digest of the artifact that may run.
    pub fn artifact(&self) -> Digest {
        self.terms.claim.artifact
    }

    /// Mappings the cache will have gone through after this one.
    pub fn hops(&self) -> u32 {
        self.terms.cache.next_hop()
    }

    /// Exchanges the permit for the right to map `cache` for the model `target` with `loaded`.
    ///
    /// The redeemed permit lends `loaded` out again: an executor that asks it what to run, and on which slots, does what was
    /// decided.
    ///
    /// # Errors
    ///
    /// When artifact, cache or target is not the one decided on; the ticket then ends as failed. When the lease ran out before,
    /// or the ledger can't be written.
    pub fn redeem<'a>(
        mut self,
        loaded: &'a Loaded,
        cache: CacheFacts,
        target: Digest,
    ) -> Result<Redeemed<'a, P>, RedeemError> {
        let Terms { claim, cache: decided_on } = self.terms;
        let swapped = if loaded.artifact() != claim.artifact {
            Some(RedeemError::ArtifactSwapped { expected: claim.artifact, found: loaded.artifact() })
        } else if let Some((field, found, expected)) = claim.lie(loaded) {
            Some(RedeemError::FalseClaim { artifact: claim.artifact, field, found, expected })
        } else if cache != decided_on {
            Some(RedeemError::CacheSwapped { expected: Box::new(decided_on), found: Box::new(cache) })
        } else if target != loaded.target() {
            Some(RedeemError::TargetSwapped { expected: loaded.target(), found: target })
        } else {
            None
        };
        if let Some(error) = swapped {
            self.lease.fail(&error.to_string())?;
            return Err(error);
        }
        self.lease.take_off()?;
        Ok(Redeemed { lease: self.lease, terms: self.terms, loaded, purpose: PhantomData })
    }

    /// Gives the permit back unused because something it needs went wrong before it could run.
    ///
    /// # Errors
    ///
    /// When the ledger can't be written.
    pub fn fail(self, why: &str) -> Result<Ticket, LedgerError> {
        self.lease.fail(why)
    }
}

/// A permit whose artifact, cache and target were found to be the ones decided on.
#[must_use = "a redeemed permit that is dropped is written down as abandoned"]
pub struct Redeemed<'a, P: Purpose> {
    lease: Lease,
    terms: Terms,
    loaded: &'a Loaded,
    purpose: PhantomData<P>,
}

impl<'a, P: Purpose> Redeemed<'a, P> {
    /// The ticket under which the ledger knows this migration.
    pub fn ticket(&self) -> &Ticket {
        self.lease.ticket()
    }

    /// The artifact that may run.
    pub fn loaded(&self) -> &'a Loaded {
        self.loaded
    }

    /// The model that the cache is mapped for.
    pub fn target(&self) -> Digest {
        self.loaded.target()
    }

    /// The slots of the cache to map, at least one; every other one is the target's own to compute.
    pub fn slots(&self) -> Range<usize> {
        self.loaded.middle(self.terms.cache.tokens)
    }

    /// Mappings the cache will have gone through after this one.
    pub fn hops(&self) -> u32 {
        self.terms.cache.next_hop()
    }

    /// Wraps the mapped cache, after the caller has checked that the device reported no error and every output was written.
    /// The gate can't look into it: a cache says itself under which ticket it was made, and the decoder compares.
    pub fn complete<T>(self, cache: T) -> (P::Outcome<T>, Receipt) {
        let made = sealed::Made { cache, artifact: self.terms.claim.artifact, ticket: self.lease.ticket().clone() };
        (P::outcome(made), Receipt { lease: self.lease })
    }

    /// Ends the migration as failed: there is no cache, and the ordinary prefill runs.
    ///
    /// # Errors
    ///
    /// When the ledger can't be written.
    pub fn fail(self, why: &str) -> Result<Ticket, LedgerError> {
        self.lease.fail(why)
    }
}

/// The result of a permitted migration; the only form in which a mapped cache reaches a decoder.
#[must_use = "a mapped cache that is not resumed was mapped for nothing"]
#[derive(Debug)]
pub struct Migrated<T>(sealed::Made<T>);

impl<T> Migrated<T> {
    /// Digest of the artifact (module, weights, pair) that mapped it.
    pub fn artifact(&self) -> Digest {
        self.0.artifact
    }

    /// The ticket it was mapped under.
    pub fn ticket(&self) -> &Ticket {
        &self.0.ticket
    }

    /// Hands the cache to a decoder. Only `engine::resume` of the host calls this.
    pub fn release(self) -> T {
        self.0.cache
    }
}

/// The result of a trial: it may be scored, and is another type than what a decoder serves from.
#[must_use = "a trial that is not measured was run for nothing"]
#[derive(Debug)]
pub struct Trialled<T>(sealed::Made<T>);

impl<T> Trialled<T> {
    /// Digest of the artifact (module, weights, pair) that mapped it.
    pub fn artifact(&self) -> Digest {
        self.0.artifact
    }

    /// The ticket it was mapped under.
    pub fn ticket(&self) -> &Ticket {
        &self.0.ticket
    }

    /// Hands the cache to a measurement. Only the host's scoring calls this.
    pub fn release(self) -> T {
        self.0.cache
    }
}

/// What is owed to the ledger for a completed migration.
#[must_use = "a receipt that is dropped is written down as abandoned: settle it, or say that it goes unaudited"]
pub struct Receipt {
    lease: Lease,
}

impl Receipt {
    /// The ticket under which the ledger knows this migration.
    pub fn ticket(&self) -> &Ticket {
        self.lease.ticket()
    }

    /// Keeps the ticket in flight while its cache is in use, however long that takes. To be called more often than twice a
    /// lease; the ledger is written only once half of it is over.
    ///
    /// # Errors
    ///
    /// When the lease ran out before, or the ledger can't be written.
    pub fn renew(&mut self) -> Result<(), LedgerError> {
        self.lease.renew()
    }

    /// Leaves the ticket in flight for another process, which settles it by name within `lease`.
    ///
    /// # Errors
    ///
    /// When the earlier lease ran out before, or the ledger can't be written.
    pub fn hand_over(self, lease: Duration) -> Result<Ticket, LedgerError> {
        self.lease.hand_over(lease)
    }

    pub(crate) fn into_lease(self) -> Lease {
        self.lease
    }
}

/// Why a permit could not be redeemed.
#[derive(Debug, thiserror::Error)]
pub enum RedeemError {
    /// The module, a shader, a weight or the pair's identity changed after the decision.
    #[error(
        "the artifact about to run is {}, the permit is for {}: a module, shader, weight or manifest changed after \
         the decision; load the pair again and ask anew",
        found.short(), expected.short()
    )]
    ArtifactSwapped {
        /// What was decided on.
        expected: Digest,
        /// What was about to run.
        found: Digest,
    },
    /// The artifact is the one decided on, and is for other models or ends than the request said.
    #[error(
        "artifact {}: {field}: found {found}, expected {expected} as the request claimed; load the pair again and ask anew",
        artifact.short()
    )]
    FalseClaim {
        /// The artifact.
        artifact: Digest,
        /// What was claimed wrongly.
        field: &'static str,
        /// What the artifact has.
        found: String,
        /// What was claimed.
        expected: String,
    },
    /// The cache is not the one decided on.
    #[error("the cache is {found}, the permit is for {expected}: ask anew for this cache")]
    CacheSwapped {
        /// What was decided on.
        expected: Box<CacheFacts>,
        /// What was about to be mapped.
        found: Box<CacheFacts>,
    },
    /// The target is not the one decided on.
    #[error("the target is model {}, the permit is for {}: ask anew for this model", found.short(), expected.short())]
    TargetSwapped {
        /// What was decided on.
        expected: Digest,
        /// What was about to get the cache.
        found: Digest,
    },
    /// The ledger could not be written, or had given the ticket up.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

impl<P: Purpose> fmt::Debug for Permit<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit").field("ticket", self.ticket()).field("terms", &self.terms).finish_non_exhaustive()
    }
}

impl<P: Purpose> fmt::Debug for Redeemed<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redeemed").field("ticket", self.ticket()).field("terms", &self.terms).finish_non_exhaustive()
    }
}

impl fmt::Debug for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Receipt").field(self.ticket()).finish()
    }
}
