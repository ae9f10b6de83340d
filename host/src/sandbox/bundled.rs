//! Modules that come with kvmig.

/// The full-head ridge mapper: the component that `mappers/build` makes of `mappers/ridge`. A pair's settings for it are
/// `{"layers": [[source layers of target layer 0], …]}`, in the order of its weights' blocks; its weights per target layer
/// l and part p (`k`, `v`): `layers.{l}.{p}.weight`, `[blocks * n_kv_s * d_s, n_kv_t * d_t]` f32 or f16, and
/// `layers.{l}.{p}.bias`, `[n_kv_t * d_t]` f32.
pub const RIDGE: &[u8] = include_bytes!("../../../mappers/built/ridge.wasm");

/// The head-matched mapper, `mappers/head-matched`. A pair's settings for it are those of [`RIDGE`]; its weights per target
/// layer l and part p: `layers.{l}.{p}.weight`, `[n_kv_t, blocks * d_s, d_t]` f32 or f16, whose head h has a row for every
/// element of source head ⌊h · n_kv_s / n_kv_t⌋ of each block, and `layers.{l}.{p}.bias`, `[n_kv_t * d_t]` f32.
pub const HEAD_MATCHED: &[u8] = include_bytes!("../../../mappers/built/head-matched.wasm");

/// The MLP mapper, `mappers/mlp`. A pair's settings for it are `{"layers": …, "width": H}`. Its heads are in groups of G, the
/// last one smaller, as many as fit 128 MiB in the longest tensor counted as f32; its weights per target layer l, part p and
/// group g: `layers.{l}.{p}.{g}.in.weight`, `[G, blocks * n_kv_s * d_s, H]`, `.mid.weight`, `[G, H, H]`, and `.out.weight`,
/// `[G, H, d_t]`, f32 or f16; `.in.bias` and `.mid.bias`, `[G * H]`, and `.out.bias`, `[G * d_t]`, f32.
pub const MLP: &[u8] = include_bytes!("../../../mappers/built/mlp.wasm");
