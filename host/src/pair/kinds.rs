//! The kinds of mapper that come with kvmig: what their settings say, and the weights that follow from them.

use kvmig_gate::Loaded;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{
    Identity, MANIFEST, Manifest, PairError, WEIGHTS,
    check::{disagree, same},
    file,
};
use crate::fit::mlp;

const MEND: &str = "fit the pair again";
const SETTINGS: &str = "identity.mapper.settings";

/// Settings of the ridge module.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RidgeSettings {
    /// Source layers that each mapped target layer reads, in the order of its weights' rows.
    pub layers: Vec<Vec<usize>>,
    /// Keys and values are both features of each.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub joint: bool,
    /// The target's hidden state behind its native layers is a feature.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hidden: bool,
    /// Columns that all features are projected to first; 0 for no projection.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub rank: usize,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
pub(super) fn is_zero(number: &usize) -> bool {
    *number == 0
}

impl RidgeSettings {
    /// Keys from the keys and values from the values of these layers.
    pub fn plain(layers: Vec<Vec<usize>>) -> RidgeSettings {
        RidgeSettings { layers, joint: false, hidden: false, rank: 0 }
    }

    /// The JSON a module is handed.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("settings hold numbers only")
    }
}

/// Settings of the MLP module.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MlpSettings {
    /// Source layers that each mapped target layer reads, in the order of its weights' rows.
    pub layers: Vec<Vec<usize>>,
    /// Neurons of each hidden layer.
    pub width: usize,
}

impl MlpSettings {
    /// The JSON a module is handed.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("settings hold numbers only")
    }
}

/// Settings of the head-matched module.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HeadMatchedSettings {
    layers: Vec<Vec<usize>>,
}

/// A kind of mapper whose weights we know.
pub(super) struct Kind {
    name: &'static str,
    /// Settings as messages show them.
    example: &'static str,
    read: fn(&str, &Identity) -> Result<Contents, Fault>,
}

/// What settings come to.
struct Contents {
    /// Source layers of each mapped target layer.
    layers: Vec<Vec<usize>>,
    products: Vec<Product>,
}

/// A matrix, or one for each of several heads, and its bias.
struct Product {
    name: String,
    weight: Vec<usize>,
    bias: usize,
}

/// Settings that are none, or that contradict the pair's identity.
enum Fault {
    Json(serde_json::Error),
    /// (field of the settings, found, expected)
    Field(&'static str, String, String),
}

impl From<serde_json::Error> for Fault {
    fn from(error: serde_json::Error) -> Fault {
        Fault::Json(error)
    }
}

const KINDS: [Kind; 3] = [
    Kind { name: "ridge", example: "{\"layers\": [[0, …], …]}", read: ridge },
    Kind { name: "head-matched", example: "{\"layers\": [[0, …], …]}", read: head_matched },
    Kind { name: "mlp", example: "{\"layers\": [[0, …], …], \"width\": …}", read: mlp },
];

impl Kind {
    /// The kind of that name, if it is one of ours.
    pub(super) fn named(name: &str) -> Option<&'static Kind> {
        KINDS.iter().find(|kind| kind.name == name)
    }

    /// Settings, layouts and weights fit each other.
    pub(super) fn check(&self, label: &str, manifest: &Manifest, loaded: &Loaded) -> Result<(), PairError> {
        let identity = &manifest.identity;
        let (source, target) = (&identity.source.layout, &identity.target.layout);
        let contents = (self.read)(&identity.mapper.settings, identity).map_err(|fault| match fault {
            Fault::Json(error) => disagree(label, MANIFEST, SETTINGS, error, self.example, MEND),
            Fault::Field(field, found, expected) => {
                disagree(label, MANIFEST, &format!("{SETTINGS}.{field}"), found, expected, MEND)
            }
        })?;
        let manifest_file = file(label, MANIFEST);
        let (found, expected) = (contents.layers.len(), target.layers - identity.native_layers);
        same(&manifest_file, &format!("{SETTINGS}.layers"), found, expected, MEND)?;
        for (l, layers) in contents.layers.iter().enumerate() {
            if layers.is_empty() || layers.iter().any(|&layer| layer >= source.layers) {
                let expected = format!("some of the source's layers 0 to {}", source.layers - 1);
                let field = format!("{SETTINGS}.layers[{l}]");
                return Err(disagree(label, MANIFEST, &field, format!("{layers:?}"), expected, MEND));
            }
        }
        let weights = file(label, WEIGHTS);
        for Product { name, weight, bias } in &contents.products {
            for (part, expected) in [("weight", weight), ("bias", &vec![*bias])] {
                let name = format!("{name}.{part}");
                let found = loaded.weights().get(&name).map_or("nothing".to_owned(), |t| format!("{:?}", t.shape()));
                same(&weights, &name, found, format!("{expected:?}"), MEND)?;
            }
        }
        for layers in &contents.layers {
            same(&manifest_file, "fit.k", manifest.fit.k, layers.len(), MEND)?;
        }
        same(&weights, "tensors", loaded.weights().len(), 2 * contents.products.len(), MEND)
    }
}

fn parse<T: DeserializeOwned>(settings: &str) -> Result<T, Fault> {
    Ok(serde_json::from_str(settings)?)
}

/// What the weights of a mapped layer's keys and values are called, with as many source layers as it reads.
fn sides<'a>(identity: &'a Identity, layers: &'a [Vec<usize>]) -> impl Iterator<Item = (String, usize)> + 'a {
    layers.iter().enumerate().flat_map(|(l, selected)| {
        ["k", "v"].map(|part| (format!("layers.{}.{part}", identity.native_layers + l), selected.len()))
    })
}

fn ridge(settings: &str, identity: &Identity) -> Result<Contents, Fault> {
    let settings: RidgeSettings = parse(settings)?;
    let (source, target) = (&identity.source.layout, &identity.target.layout);
    if settings.hidden && identity.native_layers == 0 {
        return Err(Fault::Field("hidden", "true".to_owned(), "false without native layers".to_owned()));
    }
    let of_keys_and_values = if settings.joint { 2 } else { 1 };
    let hidden = if settings.hidden { identity.target.hidden } else { 0 };
    let features = |selected: usize| of_keys_and_values * selected * source.width() + hidden;
    let full = |name: String, rows: usize, columns: usize| Product { name, weight: vec![rows, columns], bias: columns };
    let mut products = Vec::new();
    if let Some(layers) = settings.layers.first().filter(|_| settings.rank > 0) {
        let parts: &[&str] = if settings.joint { &["kv"] } else { &["k", "v"] };
        let project = |part| full(format!("projection.{part}"), features(layers.len()), settings.rank);
        products.extend(parts.iter().map(project));
    }
    products.extend(sides(identity, &settings.layers).map(|(name, selected)| {
        let rows = if settings.rank > 0 { settings.rank } else { features(selected) };
        full(name, rows, target.width())
    }));
    Ok(Contents { layers: settings.layers, products })
}

fn head_matched(settings: &str, identity: &Identity) -> Result<Contents, Fault> {
    let HeadMatchedSettings { layers } = parse(settings)?;
    let (source, target) = (&identity.source.layout, &identity.target.layout);
    let product = |(name, selected)| Product {
        name,
        weight: vec![target.kv_heads, selected * source.head_dim, target.head_dim],
        bias: target.width(),
    };
    let products = sides(identity, &layers).map(product).collect();
    Ok(Contents { layers, products })
}

/// Neurons at most: one head's square matrix of more doesn't fit a tensor.
const MOST_WIDTH: usize = 5_792;

fn mlp(settings: &str, identity: &Identity) -> Result<Contents, Fault> {
    let MlpSettings { layers, width } = parse(settings)?;
    if !(1..=MOST_WIDTH).contains(&width) {
        return Err(Fault::Field("width", width.to_string(), format!("1 to {MOST_WIDTH}")));
    }
    let (source, target) = (&identity.source.layout, &identity.target.layout);
    let (heads, outputs) = (target.kv_heads, target.head_dim);
    let mut products = Vec::new();
    for (name, selected) in sides(identity, &layers) {
        let inputs = selected * source.width();
        let group = mlp::group(heads, inputs, width, outputs);
        for (g, first) in (0..heads).step_by(group).enumerate() {
            let count = group.min(heads - first);
            for (part, rows, columns) in [("in", inputs, width), ("mid", width, width), ("out", width, outputs)] {
                let (name, weight) = (format!("{name}.{g}.{part}"), vec![count, rows, columns]);
                products.push(Product { name, weight, bias: count * columns });
            }
        }
    }
    Ok(Contents { layers, products })
}
