//! Filling a cache from a prompt, chunk by chunk.

use std::{fmt, ops::ControlFlow};

use crate::cache::{Elem, KvCache, KvPlanes};

use super::{
    EngineError, Model, Observer,
    forward::{Batch, Prefix, Want, forward},
};

/// Tokens per pass: large enough that the weights are read for many rows at once, small enough that activations of wide
/// models stay at tens of megabytes.
pub(super) const CHUNK: usize = 512;

/// How far a prefill has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Tokens whose keys and values are in the cache.
    pub done: usize,
    /// Tokens of the prompt.
    pub total: usize,
}

/// How to prefill.
pub struct PrefillOptions<'a> {
    /// Element type of the cache.
    pub elem: Elem,
    /// Tokens per pass; bounds the memory beyond the cache.
    pub chunk: usize,
    /// Tokens to keep room for behind the prompt.
    pub room: usize,
    /// Memory to fill, from [`Model::reserve`]; then `elem` and `room` are what it was made with.
    pub planes: Option<KvPlanes>,
    /// Called after each chunk; `Break` stops with [`EngineError::Cancelled`].
    pub progress: Option<&'a mut (dyn FnMut(Progress) -> ControlFlow<()> + Send)>,
    /// Sees queries and attention outputs of every chunk.
    pub observer: Option<&'a mut (dyn Observer + Send)>,
}

impl Default for PrefillOptions<'_> {
    fn default() -> Self {
        PrefillOptions { elem: Elem::F32, chunk: CHUNK, room: 64, planes: None, progress: None, observer: None }
    }
}

impl fmt::Debug for PrefillOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PrefillOptions { elem, chunk, room, planes, progress, observer } = self;
        f.debug_struct("PrefillOptions")
            .field("elem", elem)
            .field("chunk", chunk)
            .field("room", room)
            .field("planes", planes)
            .field("progress", &progress.is_some())
            .field("observer", &observer.is_some())
            .finish()
    }
}

/// What a prefill leaves.
#[derive(Debug)]
pub struct Prefilled {
    /// Logits behind the last token, `[vocab]`.
    pub logits: Vec<f32>,
    /// Keys and values of the whole prompt.
    pub cache: KvCache,
}

impl Model {
    /// Computes the cache of `tokens` and the logits behind the last of them.
    ///
    /// # Errors
    /// [`EngineError::EmptyPrompt`], [`EngineError::TooLong`], [`EngineError::TokenRange`], [`EngineError::Cancelled`];
    /// [`EngineError::CacheMismatch`] for reserved memory of another layout, or too little of it.
    pub fn prefill(&self, tokens: &[u32], mut options: PrefillOptions<'_>) -> Result<Prefilled, EngineError> {
        self.check_tokens(tokens)?;
        let positions: Vec<u32> = (0..tokens.len() as u32).collect();
        let planes = match options.planes.take() {
            Some(planes) => {
                self.check_reserved(&planes, tokens.len())?;
                planes
            }
            None => KvPlanes::zeros(self.config().layout(options.elem), tokens.len() + options.room),
        };
        let mut cache = KvCache::new(planes, tokens.to_vec(), positions, self.digest());
        let slots: Vec<usize> = (0..tokens.len()).collect();
        let fill = Fill { tokens, positions: &cache.positions, slots: &slots };
        let logits = self.fill(&mut cache.planes, fill, options)?;
        Ok(Prefilled { logits, cache })
    }

    /// Memory for a cache of this model with room for `capacity` tokens, zeroed and resident. A serving engine has it before a
    /// request comes; a prefill fills it, and so does a mapper. The first time, what every text begins with is computed as well.
    pub fn reserve(&self, capacity: usize) -> KvPlanes {
        self.prepare_opening();
        self.on_threads(|| KvPlanes::resident(self.layout().clone(), capacity))
    }

    /// Computes the keys and values of the first `layers` layers of the whole prompt into `planes`, and gives the residual
    /// stream that enters the last of them, `[tokens, hidden]`: what a mapper of the layers above can be told about the text at
    /// the price of `layers − 1` layers. Of one layer, that is the tokens' embeddings.
    ///
    /// # Errors
    /// As [`Model::prefill`]; [`EngineError::CacheMismatch`] for more layers than the model has.
    pub fn lower_layers(&self, tokens: &[u32], planes: &mut KvPlanes, layers: usize) -> Result<Vec<f32>, EngineError> {
        self.check_tokens(tokens)?;
        self.check_reserved(planes, tokens.len())?;
        if !(1..=self.config().layers).contains(&layers) {
            let expected = format!("1 to {}", self.config().layers);
            return Err(EngineError::CacheMismatch { field: "native layers", found: layers.to_string(), expected });
        }
        let positions: Vec<u32> = (0..tokens.len() as u32).collect();
        let slots: Vec<usize> = (0..tokens.len()).collect();
        let firsts = vec![0; CHUNK.min(tokens.len())];
        let mut residual = Vec::with_capacity(tokens.len() * self.config().hidden);
        for start in (0..tokens.len()).step_by(CHUNK) {
            let range = start..tokens.len().min(start + CHUNK);
            let batch = Batch {
                tokens: &tokens[range.clone()],
                positions: &positions[range.clone()],
                slots: &slots[range.clone()],
                firsts: &firsts[..range.len()],
            };
            residual.extend(self.pass(&batch, planes, None, Want::Entering(layers - 1), None)?);
        }
        Ok(residual)
    }

    /// Computes `fill` into `planes`, whose other slots are filled, and returns the last row's logits.
    pub(super) fn fill(
        &self,
        planes: &mut KvPlanes,
        fill: Fill<'_>,
        options: PrefillOptions<'_>,
    ) -> Result<Vec<f32>, EngineError> {
        let PrefillOptions { chunk, mut progress, mut observer, .. } = options;
        let (total, chunk) = (fill.tokens.len(), chunk.max(1));
        let firsts = vec![0; chunk.min(total)];
        let mut logits = Vec::new();
        for start in (0..total).step_by(chunk) {
            let range = start..total.min(start + chunk);
            let batch = Batch {
                tokens: &fill.tokens[range.clone()],
                positions: &fill.positions[range.clone()],
                slots: &fill.slots[range.clone()],
                firsts: &firsts[..range.len()],
            };
            let want = if range.end == total { Want::Last } else { Want::Nothing };
            let observer = observer.as_mut().map(|o| &mut **o as &mut (dyn Observer + Send));
            logits = self.pass(&batch, planes, None, want, observer)?;
            if let Some(progress) = &mut progress {
                let done = range.end;
                if progress(Progress { done, total }).is_break() && done < total {
                    return Err(EngineError::Cancelled { done, total });
                }
            }
        }
        Ok(logits)
    }

    /// [`forward`] on this model's threads.
    pub(super) fn pass(
        &self,
        batch: &Batch<'_>,
        planes: &mut KvPlanes,
        prefix: Option<Prefix<'_>>,
        want: Want,
        observer: Option<&mut (dyn Observer + Send)>,
    ) -> Result<Vec<f32>, EngineError> {
        self.on_threads(|| {
            let observer = observer.map(|o| o as &mut dyn Observer);
            forward(self.config(), &self.weights, batch, planes, prefix, want, observer)
        })
    }
}

/// Tokens to compute and where their keys and values go; slots ascend.
pub(super) struct Fill<'a> {
    pub(super) tokens: &'a [u32],
    pub(super) positions: &'a [u32],
    pub(super) slots: &'a [usize],
}
