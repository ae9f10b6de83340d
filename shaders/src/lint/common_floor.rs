//! **What**: one entry point; at most 256 invocations a workgroup; at most 8 storage buffers, all in bind group 0; no
//! workgroup memory beyond 16 KiB.
//!
//! **Why**: this is the floor that every adapter we run on has (WebGPU's default limits; SwiftShader stops at 256
//! invocations and 10 buffers). Beyond it a pipeline fails on one adapter and not on another.
//!
//! **What breaks it**: `@workgroup_size(32, 16)`, a ninth buffer, `@group(1)`, a second `@compute fn`.

use naga::AddressSpace;

use super::Finding;
use crate::reflect::{Parsed, Space};

/// Name of the lint.
pub const NAME: &str = "common_floor";
/// Invocations of a workgroup.
pub const MAX_INVOCATIONS: u64 = 256;
/// Storage buffers of an entry point.
pub const MAX_STORAGE_BUFFERS: usize = 8;
/// Bytes of workgroup memory of a module.
pub const MAX_WORKGROUP_BYTES: u64 = 16 << 10;

/// Runs the lint.
pub fn check(parsed: &Parsed) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut object = |function: &str, message: String| {
        findings.push(Finding { lint: NAME, function: function.to_owned(), line: None, message });
    };
    if parsed.entries().len() != 1 {
        object("module", format!("one entry point is expected, found {}", parsed.entries().len()));
    }
    for entry in parsed.entries() {
        let invocations: u64 = entry.workgroup_size.iter().map(|&n| u64::from(n)).product();
        if invocations > MAX_INVOCATIONS {
            object(&entry.name, format!("{invocations} invocations a workgroup; at most {MAX_INVOCATIONS}"));
        }
        let buffers = entry.bindings.iter().filter(|b| b.space == Space::Storage).count();
        if buffers > MAX_STORAGE_BUFFERS {
            object(&entry.name, format!("{buffers} storage buffers; at most {MAX_STORAGE_BUFFERS}"));
        }
        for binding in entry.bindings.iter().filter(|b| b.group != 0) {
            object(
                &entry.name,
                format!("`{}` is in bind group {}; only group 0 is bound", binding.name, binding.group),
            );
        }
    }
    let shared: u64 = (parsed.module.global_variables.iter())
        .filter(|(_, v)| v.space == AddressSpace::WorkGroup)
        .map(|(_, v)| {
            parsed.module.types[v.ty].inner.try_size(parsed.module.to_ctx()).map_or(u64::from(u32::MAX), u64::from)
        })
        .sum();
    if shared > MAX_WORKGROUP_BYTES {
        object("module", format!("{shared} bytes of workgroup memory; at most {MAX_WORKGROUP_BYTES}"));
    }
    findings
}
