//! Modules that come with kvmig.

/// The full-head ridge mapper: the component that `mappers/build` makes of `mappers/ridge`. A pair's settings for it are
/// `{"layers": [[source layers of target layer 0], …]}`, in the order of its weights' blocks; its weights per target layer
/// l and part p (`k`, `v`): `layers.{l}.{p}.weight`, `[blocks * n_kv_s * d_s, n_kv_t * d_t]` f32 or f16, and
/// `layers.{l}.{p}.bias`, `[n_kv_t * d_t]` f32.
pub const RIDGE: &[u8] = include_bytes!("../../../mappers/built/ridge.wasm");
