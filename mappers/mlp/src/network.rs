//! The shapes of one target layer's networks, and the groups of heads that their tensors hold.

use kvmig_mapper::{ModelPair, Refusal, WeightSpec, bias, weight};

/// Bytes of a weight tensor at most, counted as float32: the smallest binding limit of the devices there are.
const TENSOR_BYTES: u64 = 128 << 20;

/// The networks of one target layer: one for each KV head, keys and values apart.
pub(crate) struct Network {
    inputs: u32,
    width: u32,
    outputs: u32,
    heads: u32,
    /// Heads of a group; the last group may have fewer.
    group: u32,
}

/// Heads whose weights are in the same tensors.
pub(crate) struct Group {
    index: u32,
    /// The first one.
    pub(crate) first: u32,
    /// How many.
    pub(crate) heads: u32,
}

/// A layer of a network.
#[derive(Clone, Copy)]
pub(crate) enum Part {
    In,
    Mid,
    Out,
}

impl Part {
    pub(crate) const ALL: [Part; 3] = [Part::In, Part::Mid, Part::Out];

    /// Name of the matrices, of `name` = `layers.{l}.{k or v}`.
    pub(crate) fn weight(self, name: &str, group: &Group) -> String {
        format!("{name}.{}.{}.weight", group.index, self.label())
    }

    /// Name of the biases.
    pub(crate) fn bias(self, name: &str, group: &Group) -> String {
        format!("{name}.{}.{}.bias", group.index, self.label())
    }

    fn label(self) -> &'static str {
        match self {
            Part::In => "in",
            Part::Mid => "mid",
            Part::Out => "out",
        }
    }
}

impl Network {
    /// Networks that read `selected` source layers and have `width` neurons in each hidden layer. A group has as many heads
    /// as fit the longest tensor, which is that of one of the three parts: the parts are grouped alike.
    ///
    /// # Errors
    /// [`Refusal::Invalid`] for a width of 0, and for one head's weights beyond a tensor.
    pub(crate) fn new(pair: &ModelPair, selected: usize, width: u32) -> Result<Network, Refusal> {
        if width == 0 {
            return Err(Refusal::Invalid("settings.width: found 0, expected at least 1".into()));
        }
        let inputs = selected as u64 * u64::from(pair.source.kv_heads) * u64::from(pair.source.head_dim);
        let (outputs, heads) = (pair.target.head_dim, pair.target.kv_heads);
        let rows_or_columns = inputs.max(width.into()).max(outputs.into());
        let one = rows_or_columns.saturating_mul(4 * u64::from(width));
        if one > TENSOR_BYTES {
            return Err(Refusal::Invalid(format!(
                "settings.width: found {width} with {inputs} inputs, expected one head's weights to fit {TENSOR_BYTES} bytes"
            )));
        }
        // Both fit 32 bits: an input has a column of `width` weights within the tensor, and so many heads are a count.
        let group = (TENSOR_BYTES / one).min(heads.into()) as u32;
        Ok(Network { inputs: inputs as u32, width, outputs, heads, group })
    }

    /// Neurons of each hidden layer.
    pub(crate) fn width(&self) -> u32 {
        self.width
    }

    /// Activations of one token in the largest group.
    pub(crate) fn group_columns(&self) -> u64 {
        u64::from(self.group) * u64::from(self.width)
    }

    /// The groups, in the order of the heads.
    pub(crate) fn groups(&self) -> impl Iterator<Item = Group> + '_ {
        (0..self.heads.div_ceil(self.group)).map(|index| {
            let first = index * self.group;
            Group { index, first, heads: self.group.min(self.heads - first) }
        })
    }

    /// Weights and biases of the networks of `name` = `layers.{l}.{k or v}`.
    pub(crate) fn weights(&self, name: &str) -> Vec<WeightSpec> {
        let mut specs = Vec::new();
        for group in self.groups() {
            for part in Part::ALL {
                let (rows, columns) = match part {
                    Part::In => (self.inputs, self.width),
                    Part::Mid => (self.width, self.width),
                    Part::Out => (self.width, self.outputs),
                };
                specs.push(weight(part.weight(name, &group), &[group.heads, rows, columns]));
                specs.push(bias(part.bias(name, &group), group.heads * columns));
            }
        }
        specs
    }
}
