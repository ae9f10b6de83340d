//! **What**: no barrier (and no `workgroupUniformLoad`) where invocations of a workgroup may have parted ways: under a
//! condition, in a loop or after a return that depends on an invocation's id, on data that other invocations write, or on a
//! local variable set from either. A call counts if the function called holds a barrier.
//!
//! **Why**: WGSL forbids it and naga doesn't look: some drivers hang, some compute garbage, and the validators of browsers
//! refuse the module.
//!
//! **What breaks it**: `if id.x < n { … workgroupBarrier(); … }`, an early `return` for rows beyond the end before a tile is
//! loaded together, a loop bounded by `id.x`. Arguments and results of helper functions count as different for each
//! invocation: a barrier in a helper under a condition on its argument is found even where all callers agree.

use std::collections::HashSet;

use naga::{
    AddressSpace, Binding, Block, BuiltIn, Expression, Function, Handle, LocalVariable, Module, Span, Statement,
    StorageAccess,
};

use super::{Finding, inner_blocks, root};
use crate::reflect::Parsed;

/// Name of the lint.
pub const NAME: &str = "uniform_barriers";

/// Runs the lint.
pub fn check(parsed: &Parsed) -> Vec<Finding> {
    let module = &parsed.module;
    let mut findings = Vec::new();
    for (name, function, _) in parsed.functions() {
        if !synchronises(module, &function.body) {
            continue;
        }
        let is_entry = module.entry_points.iter().any(|entry| std::ptr::eq(&entry.function, function));
        let mut walk = Walk { module, function, is_entry, apart: HashSet::new(), returned: false, found: Vec::new() };
        // A variable found to differ may make another one differ: until nothing is added.
        loop {
            let before = walk.apart.len();
            walk.returned = false;
            walk.found.clear();
            walk.block(&function.body, false);
            if walk.apart.len() == before {
                break;
            }
        }
        findings.extend(
            walk.found.iter().map(|&span| Finding {
                lint: NAME,
                function: name.to_owned(),
                line: parsed.line(span),
                message: "a barrier that not all invocations of the workgroup may reach; move it out of the condition"
                    .to_owned(),
            }),
        );
    }
    findings
}

/// Whether a statement waits for the whole workgroup.
fn is_barrier(module: &Module, statement: &Statement) -> bool {
    match statement {
        Statement::ControlBarrier(_) | Statement::WorkGroupUniformLoad { .. } => true,
        Statement::Call { function, .. } => synchronises(module, &module.functions[*function].body),
        _ => false,
    }
}

fn synchronises(module: &Module, block: &Block) -> bool {
    block.iter().any(|statement| {
        is_barrier(module, statement) || inner_blocks(statement).into_iter().any(|inner| synchronises(module, inner))
    })
}

struct Walk<'a> {
    module: &'a Module,
    function: &'a Function,
    is_entry: bool,
    /// Local variables that may differ between invocations.
    apart: HashSet<Handle<LocalVariable>>,
    /// Some invocations may have returned.
    returned: bool,
    found: Vec<Span>,
}

impl Walk<'_> {
    /// Walks a block that invocations reach together, or (`parted`) not all of them.
    fn block(&mut self, block: &Block, parted: bool) {
        for (statement, span) in block.span_iter() {
            let parted = parted || self.returned;
            if parted && is_barrier(self.module, statement) {
                self.found.push(*span);
            }
            match statement {
                Statement::Store { pointer, value }
                    if parted || !self.agrees(*value) || !self.agrees_on_place(*pointer) =>
                {
                    self.apart.extend(root(self.function, *pointer));
                }
                Statement::Call { arguments, .. } => {
                    self.apart.extend(arguments.iter().filter_map(|&argument| root(self.function, argument)));
                }
                Statement::If { condition, accept, reject } => {
                    let parted = parted || !self.agrees(*condition);
                    self.block(accept, parted);
                    self.block(reject, parted);
                }
                Statement::Switch { selector, cases } => {
                    let parted = parted || !self.agrees(*selector);
                    cases.iter().for_each(|case| self.block(&case.body, parted));
                }
                Statement::Loop { body, continuing, break_if } => {
                    let parted = parted
                        || self.leaves(body, false)
                        || self.leaves(continuing, false)
                        || break_if.is_some_and(|condition| !self.agrees(condition));
                    self.block(body, parted);
                    self.block(continuing, parted);
                }
                Statement::Block(inner) => self.block(inner, parted),
                Statement::Return { .. } | Statement::Kill if parted => self.returned = true,
                _ => {}
            }
        }
    }

    /// Whether some invocations may leave a turn of a loop earlier than others.
    fn leaves(&self, block: &Block, parted: bool) -> bool {
        block.iter().any(|statement| match statement {
            Statement::Break | Statement::Continue | Statement::Return { .. } | Statement::Kill => parted,
            Statement::If { condition, accept, reject } => {
                let parted = parted || !self.agrees(*condition);
                self.leaves(accept, parted) || self.leaves(reject, parted)
            }
            Statement::Switch { selector, cases } => {
                let parted = parted || !self.agrees(*selector);
                cases.iter().any(|case| self.leaves(&case.body, parted))
            }
            // Conservative: a `break` of an inner loop counts for the outer one too.
            _ => inner_blocks(statement).into_iter().any(|inner| self.leaves(inner, parted)),
        })
    }

    /// Whether a pointer's indices are the same for all invocations.
    fn agrees_on_place(&self, pointer: Handle<Expression>) -> bool {
        match self.function.expressions[pointer] {
            Expression::Access { base, index } => self.agrees(index) && self.agrees_on_place(base),
            Expression::AccessIndex { base, .. } => self.agrees_on_place(base),
            _ => true,
        }
    }

    /// Whether an expression has the same value for all invocations of a workgroup.
    fn agrees(&self, expression: Handle<Expression>) -> bool {
        let same = |e: Handle<Expression>| self.agrees(e);
        match self.function.expressions[expression] {
            Expression::Literal(_)
            | Expression::Constant(_)
            | Expression::Override(_)
            | Expression::ZeroValue(_)
            | Expression::ArrayLength(_)
            | Expression::WorkGroupUniformLoadResult { .. } => true,
            Expression::FunctionArgument(index) => {
                let binding = &self.function.arguments[index as usize].binding;
                let shared = matches!(binding, Some(Binding::BuiltIn(BuiltIn::WorkGroupId | BuiltIn::NumWorkGroups)));
                self.is_entry && shared
            }
            Expression::GlobalVariable(global) => match self.module.global_variables[global].space {
                AddressSpace::Uniform | AddressSpace::Immediate => true,
                AddressSpace::Storage { access } => !access.contains(StorageAccess::STORE),
                _ => false,
            },
            Expression::LocalVariable(local) => !self.apart.contains(&local),
            Expression::Load { pointer } => same(pointer),
            Expression::AccessIndex { base, .. } => same(base),
            Expression::Access { base, index } => same(base) && same(index),
            Expression::Splat { value, .. } => same(value),
            Expression::Swizzle { vector, .. } => same(vector),
            Expression::Compose { ref components, .. } => components.iter().all(|&c| same(c)),
            Expression::Unary { expr, .. } | Expression::As { expr, .. } => same(expr),
            Expression::Binary { left, right, .. } => same(left) && same(right),
            Expression::Select { condition, accept, reject } => same(condition) && same(accept) && same(reject),
            Expression::Relational { argument, .. } => same(argument),
            Expression::Math { arg, arg1, arg2, arg3, .. } => {
                [Some(arg), arg1, arg2, arg3].into_iter().flatten().all(same)
            }
            _ => false,
        }
    }
}
