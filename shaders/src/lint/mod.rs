//! Lints over the naga module: what validation allows and we don't. The host's own kernels must be free of findings to
//! build; for a module's own WGSL the caller decides.

pub mod bounded_loops;
pub mod common_floor;
pub mod float_equality;
pub mod uniform_barriers;

use std::fmt;

use naga::{Block, Expression, Function, Handle, LocalVariable, Statement};

use crate::reflect::Parsed;

/// A lint: its name and the pass.
pub type Lint = (&'static str, fn(&Parsed) -> Vec<Finding>);

/// All lints.
pub const ALL: [Lint; 4] = [
    (bounded_loops::NAME, bounded_loops::check),
    (common_floor::NAME, common_floor::check),
    (float_equality::NAME, float_equality::check),
    (uniform_barriers::NAME, uniform_barriers::check),
];

/// A place that a lint objects to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Name of the lint.
    pub lint: &'static str,
    /// Function or entry point.
    pub function: String,
    /// Line of the source, from 1, where naga knows it.
    pub line: Option<u32>,
    /// What was found and what to do about it.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.function)?;
        if let Some(line) = self.line {
            write!(f, ", line {line}")?;
        }
        write!(f, ": {} [{}]", self.message, self.lint)
    }
}

/// Runs all lints.
pub fn run(parsed: &Parsed) -> Vec<Finding> {
    ALL.iter().flat_map(|(_, lint)| lint(parsed)).collect()
}

/// The blocks directly inside a statement.
fn inner_blocks(statement: &Statement) -> Vec<&Block> {
    match statement {
        Statement::Block(block) => vec![block],
        Statement::If { accept, reject, .. } => vec![accept, reject],
        Statement::Switch { cases, .. } => cases.iter().map(|case| &case.body).collect(),
        Statement::Loop { body, continuing, .. } => vec![body, continuing],
        _ => Vec::new(),
    }
}

/// The local variable that a pointer points into.
fn root(function: &Function, pointer: Handle<Expression>) -> Option<Handle<LocalVariable>> {
    match function.expressions[pointer] {
        Expression::LocalVariable(local) => Some(local),
        Expression::Access { base, .. } | Expression::AccessIndex { base, .. } => root(function, base),
        _ => None,
    }
}
