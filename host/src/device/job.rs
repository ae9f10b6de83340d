//! What a device is asked to do, and what it says it did.

use std::{fmt, ops::Range, time::Duration};

use serde::Serialize;

use super::{DeviceError, ResidentWeights};
use crate::{
    cache::{CacheLayout, KvPlanes, Pairing},
    sandbox::recording::{BufferId, Recording},
};

/// One mapping: slots of a source cache through recordings into the same slots of a target cache.
#[derive(Debug)]
pub struct Job<'a> {
    /// The recording of a chunk; replayed `slots.len() / full.tokens` times.
    pub full: &'a Recording,
    /// The recording of the remaining `slots.len() % full.tokens` tokens; needed only where there are some.
    pub rest: Option<&'a Recording>,
    /// The artifact's weights, resident on the device that executes the job.
    pub weights: &'a ResidentWeights,
    /// Source keys and values; their layout's RoPE is the rotation that the keys carry.
    pub source: &'a KvPlanes,
    /// Target keys and values, allocated for at least `slots.end` tokens; only `slots` are written.
    pub target: &'a mut KvPlanes,
    /// What the target computed itself, where it did.
    pub lower: Option<Lower<'a>>,
    /// Slots to map.
    pub slots: Range<usize>,
    /// Position of each of these slots, in tokens.
    pub positions: &'a [u32],
    /// How long and in which portions.
    pub pacing: Pacing,
}

/// The target's own first layers: their keys and values are in its planes for every slot of the job.
#[derive(Clone, Copy, Debug)]
pub struct Lower<'a> {
    /// How many; the layers from there on are mapped.
    pub layers: usize,
    /// Its residual stream as it enters the last of them, of the job's slots: `[slots.len(), width]`.
    pub hidden: &'a [f32],
    /// Width of the residual stream.
    pub width: usize,
}

/// Bounds on time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pacing {
    /// The longest wait for one submission to a GPU; a device that misses it is given up.
    pub deadline: Duration,
    /// Longest estimated time of one GPU dispatch; longer ones are sliced by tokens. Watchdogs stop dispatches that run
    /// for seconds, some of them without an error.
    pub dispatch: Duration,
}

impl Default for Pacing {
    fn default() -> Pacing {
        // A tenth of the shortest watchdog in the field (2 s, Windows): the estimate may be wrong by that much.
        Pacing { deadline: Duration::from_secs(60), dispatch: Duration::from_millis(200) }
    }
}

/// What a job cost. The three times follow each other and add up to the whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Chunks replayed.
    pub chunks: u32,
    /// Dispatches (kernel calls on the CPU), slices counted singly, the host's scan left out.
    pub dispatches: u64,
    /// Multiplications and additions of the host's kernels.
    pub flops: u64,
    /// Milliseconds to prepare the recordings and bring the source and the RoPE tables to the device; on the CPU to poison
    /// the outputs.
    pub upload_ms: f64,
    /// Milliseconds of the kernels; on a GPU the time the host took to hand them over and waited for them.
    pub map_ms: f64,
    /// Milliseconds to scan the outputs and bring them into the target's planes.
    pub readback_ms: f64,
    /// Bytes copied to the device; 0 where the planes are used in place.
    pub uploaded_bytes: u64,
    /// Bytes copied back.
    pub readback_bytes: u64,
}

/// Strides of one layer's view as a guest sees it; in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ViewStrides {
    /// From one head to the next.
    pub head: u32,
    /// From one token to the next.
    pub row: u32,
    /// Bytes of the view, f32 elements: from the first head's first element past the last head's last.
    pub bytes: u64,
}

impl ViewStrides {
    /// Strides of `tokens` rows of `layout` whose heads lie `head` elements apart.
    ///
    /// # Errors
    /// [`DeviceError::Job`] if `head` or the view does not fit 32 bits, the width of the kernels' indices.
    pub(crate) fn new(layout: &CacheLayout, head: usize, tokens: u32) -> Result<ViewStrides, DeviceError> {
        if layout.kv_heads == 0 || layout.head_dim == 0 {
            return Err(DeviceError::Job {
                field: "a layer's view",
                found: format!("{} heads of {} dimensions", layout.kv_heads, layout.head_dim),
                expected: "at least one of each".into(),
            });
        }
        let elements = (layout.kv_heads - 1) * head + tokens as usize * layout.head_dim;
        let narrow = |n: usize| {
            u32::try_from(n).map_err(|_| DeviceError::Job {
                field: "a layer's view",
                found: format!("{n} elements"),
                expected: format!("at most {}; use a cache of smaller capacity", u32::MAX),
            })
        };
        narrow(elements)?;
        Ok(ViewStrides { head: narrow(head)?, row: narrow(layout.head_dim)?, bytes: 4 * elements as u64 })
    }
}

/// A [`BufferId`] as messages name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferName(pub BufferId);

impl fmt::Display for BufferName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let half = |value: bool| if value { "values" } else { "keys" };
        match self.0 {
            BufferId::Source { layer, value } => write!(f, "{} of source layer {layer}", half(value)),
            BufferId::Target { layer, value } => write!(f, "{} of target layer {layer}", half(value)),
            BufferId::SourceRope => f.write_str("the source's RoPE table"),
            BufferId::Hidden => f.write_str("the target's hidden state"),
            BufferId::TargetRope => f.write_str("the target's RoPE table"),
            BufferId::Weights(index) => write!(f, "weight tensor {index}"),
            BufferId::Scratch(index) => write!(f, "scratch {index}"),
            BufferId::Params(index) => write!(f, "constants {index}"),
        }
    }
}

/// One replay of a recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// The remainder rather than a full chunk.
    pub(crate) rest: bool,
    /// Its slots.
    pub(crate) slots: Range<usize>,
}

impl<'a> Job<'a> {
    /// The target's layers that are mapped.
    pub(crate) fn mapped_layers(&self) -> Range<usize> {
        self.lower.map_or(0, |lower| lower.layers)..self.target.layout().layers
    }

    /// Width of the hidden state; 0 where there is none.
    pub(crate) fn hidden_width(&self) -> usize {
        self.lower.map_or(0, |lower| lower.width)
    }

    /// The hidden state of some of the job's slots.
    pub(crate) fn hidden(&self, slots: &Range<usize>) -> &'a [f32] {
        let Some(Lower { hidden, width, .. }) = self.lower else { return &[] };
        &hidden[(slots.start - self.slots.start) * width..(slots.end - self.slots.start) * width]
    }

    /// The recording that a chunk replays.
    pub(crate) fn recording(&self, chunk: &Chunk) -> &'a Recording {
        // A remainder without a recording does not leave `chunks`.
        if chunk.rest { self.rest.unwrap_or(self.full) } else { self.full }
    }

    /// The chunks in order.
    ///
    /// # Errors
    /// [`DeviceError::Job`] where the parts of the job disagree.
    pub(crate) fn chunks(&self) -> Result<Vec<Chunk>, DeviceError> {
        let wrong = |field, found: String, expected: String| Err(DeviceError::Job { field, found, expected });
        let tokens = self.slots.len();
        if self.positions.len() != tokens {
            return wrong(
                "positions",
                format!("{} long", self.positions.len()),
                format!("one for each of {tokens} slots"),
            );
        }
        if let Some(Lower { layers, hidden, width }) = self.lower {
            let most = self.target.layout().layers;
            if layers >= most {
                return wrong("native layers", layers.to_string(), format!("fewer than the target's {most}"));
            }
            if hidden.len() != tokens * width {
                let found = format!("{} elements", hidden.len());
                return wrong("the hidden state", found, format!("{tokens} slots of {width}"));
            }
        }
        for (slots, rope, planes) in [
            ("slots of the source", "the source's RoPE", self.source),
            ("slots of the target", "the target's RoPE", &*self.target),
        ] {
            if self.slots.end > planes.capacity() {
                return wrong(
                    slots,
                    format!("{:?}", self.slots),
                    format!("within its capacity of {}", planes.capacity()),
                );
            }
            let layout = planes.layout();
            if layout.rope.pairing != Pairing::HalfSplit {
                return wrong(
                    rope,
                    "in adjacent pairs".into(),
                    "half-split: convert the cache when it is imported".into(),
                );
            }
            if !layout.rope.dims.is_multiple_of(2) || layout.rope.dims > layout.head_dim {
                let expected = format!("an even number of the head's {} dimensions", layout.head_dim);
                return wrong(rope, format!("over {} dimensions", layout.rope.dims), expected);
            }
        }
        let chunk = self.full.tokens as usize;
        if chunk == 0 {
            return wrong("tokens of the recording", "0".into(), "at least 1".into());
        }
        let (whole, left) = (tokens / chunk, tokens % chunk);
        let start = self.slots.start;
        let full = |i| Chunk { rest: false, slots: start + i * chunk..start + (i + 1) * chunk };
        let mut chunks: Vec<_> = (0..whole).map(full).collect();
        if left > 0 {
            match self.rest.map(|rest| rest.tokens as usize) {
                Some(rest) if rest == left => {
                    chunks.push(Chunk { rest: true, slots: self.slots.end - left..self.slots.end })
                }
                Some(rest) => return wrong("tokens of the remainder's recording", rest.to_string(), left.to_string()),
                None => return wrong("the remainder's recording", "absent".into(), format!("one of {left} tokens")),
            }
        }
        Ok(chunks)
    }
}
