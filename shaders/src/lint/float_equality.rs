//! **What**: no `==` or `!=` between floats.
//!
//! **Why**: WGSL lets a compiler assume that NaN and infinity don't occur, so `x != x` may fold to false; and poison is a NaN,
//! which equals nothing. Compare bit patterns, `bitcast<u32>(x)`, or use an ordered comparison.
//!
//! **What breaks it**: `if x != x { … }` as a NaN test, `if scale == 0.0 { … }`.

use naga::{BinaryOperator, Expression, ScalarKind};

use super::Finding;
use crate::reflect::Parsed;

/// Name of the lint.
pub const NAME: &str = "float_equality";

/// Runs the lint.
pub fn check(parsed: &Parsed) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (name, function, info) in parsed.functions() {
        for (handle, expression) in function.expressions.iter() {
            let Expression::Binary { op: BinaryOperator::Equal | BinaryOperator::NotEqual, left, .. } = *expression
            else {
                continue;
            };
            if info[left].ty.inner_with(&parsed.module.types).scalar_kind() == Some(ScalarKind::Float) {
                findings.push(Finding {
                    lint: NAME,
                    function: name.to_owned(),
                    line: parsed.line(function.expressions.get_span(handle)),
                    message: "equality of floats; compare bitcast<u32>(…) patterns instead".to_owned(),
                });
            }
        }
    }
    findings
}
