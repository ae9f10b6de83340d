//! Caches as safetensors files. Placeholder.

/// A cache file that can't be used.
#[derive(Debug, thiserror::Error)]
pub enum CacheFileError {}

/// Reads.
pub fn read() {}

/// Writes.
pub fn write() {}
