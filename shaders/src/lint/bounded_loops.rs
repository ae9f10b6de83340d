//! **What**: every loop counts. It leaves on an ordered comparison between a local variable that the loop changes only by
//! constant steps and a bound that the loop can't change (constants, arguments, uniforms, read-only storage, locals it
//! doesn't store to), tested on every turn.
//!
//! **Why**: the host knows what a dispatch costs from its parameters alone, so that it can slice it before a watchdog ends it.
//! Data must not decide how long a kernel runs: it may be poison.
//!
//! **What breaks it**: `loop { if done { break; } … }`, a bound loaded from a `read_write` buffer, a step of `i *= 2u`. Steps
//! that run away from their bound are not found: they end when the counter wraps.

use std::collections::HashSet;

use naga::{
    AddressSpace, BinaryOperator, Block, Expression, Function, Handle, Literal, LocalVariable, Module, Statement,
    StorageAccess,
};

use super::{Finding, inner_blocks, root};
use crate::reflect::Parsed;

/// Name of the lint.
pub const NAME: &str = "bounded_loops";

/// Runs the lint.
pub fn check(parsed: &Parsed) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (name, function, _) in parsed.functions() {
        let mut loops = Vec::new();
        collect(&function.body, &mut loops);
        for found in loops {
            if !(Counted { module: &parsed.module, function, found }).holds() {
                findings.push(Finding {
                    lint: NAME,
                    function: name.to_owned(),
                    line: parsed.line(found.span),
                    message:
                        "a loop without a counter and a bound that stays the same; write `for (var i = a; i < n; i += \
                              step)` with n from a constant, a uniform or read-only storage"
                            .to_owned(),
                });
            }
        }
    }
    findings
}

/// A loop statement.
#[derive(Clone, Copy)]
struct Found<'a> {
    body: &'a Block,
    continuing: &'a Block,
    break_if: Option<Handle<Expression>>,
    span: naga::Span,
}

/// All loops of a block, nested ones included.
fn collect<'a>(block: &'a Block, loops: &mut Vec<Found<'a>>) {
    for (statement, span) in block.span_iter() {
        if let Statement::Loop { body, continuing, break_if } = statement {
            loops.push(Found { body, continuing, break_if: *break_if, span: *span });
        }
        for inner in inner_blocks(statement) {
            collect(inner, loops);
        }
    }
}

struct Counted<'a> {
    module: &'a Module,
    function: &'a Function,
    found: Found<'a>,
}

impl Counted<'_> {
    fn holds(&self) -> bool {
        let mut changes = Changes::default();
        changes.collect(self.function, self.found.body);
        changes.collect(self.function, self.found.continuing);
        // Only tests at the top of the body are met on every turn, and only before a `continue` could pass them by.
        let tests = self.found.body.iter().take_while(|s| !skips_on(s)).filter_map(|statement| match statement {
            Statement::If { condition, accept, reject } if breaks(accept) || breaks(reject) => Some(*condition),
            _ => None,
        });
        tests.chain(self.found.break_if).any(|condition| self.bounds(condition, &changes))
    }

    /// Whether `condition` compares a stepped counter with an invariant.
    fn bounds(&self, condition: Handle<Expression>, changes: &Changes) -> bool {
        use BinaryOperator::{Greater, GreaterEqual, Less, LessEqual};
        match self.function.expressions[condition] {
            // `!(i < n)`, as naga writes the test of a `for`.
            Expression::Unary { expr, .. } => self.bounds(expr, changes),
            Expression::Binary { op: Less | LessEqual | Greater | GreaterEqual, left, right } => {
                (self.counter(left, changes) && self.invariant(right, changes))
                    || (self.counter(right, changes) && self.invariant(left, changes))
            }
            _ => false,
        }
    }

    fn counter(&self, expression: Handle<Expression>, changes: &Changes) -> bool {
        let Expression::Load { pointer } = self.function.expressions[expression] else { return false };
        let Expression::LocalVariable(local) = self.function.expressions[pointer] else { return false };
        changes.stepped.contains(&local) && !changes.other.contains(&local)
    }

    fn invariant(&self, expression: Handle<Expression>, changes: &Changes) -> bool {
        let same = |e: Handle<Expression>| self.invariant(e, changes);
        match self.function.expressions[expression] {
            Expression::Literal(_)
            | Expression::Constant(_)
            | Expression::Override(_)
            | Expression::ZeroValue(_)
            | Expression::FunctionArgument(_) => true,
            Expression::GlobalVariable(global) => match self.module.global_variables[global].space {
                AddressSpace::Uniform | AddressSpace::Immediate => true,
                AddressSpace::Storage { access } => !access.contains(StorageAccess::STORE),
                _ => false,
            },
            Expression::LocalVariable(local) => !changes.stepped.contains(&local) && !changes.other.contains(&local),
            Expression::Load { pointer } => same(pointer),
            // Of a runtime-sized array, whose length is fixed whatever is stored in it.
            Expression::ArrayLength(_) => true,
            Expression::AccessIndex { base, .. } => same(base),
            Expression::Access { base, index } => same(base) && same(index),
            Expression::Splat { value, .. } => same(value),
            Expression::Swizzle { vector, .. } => same(vector),
            Expression::Compose { ref components, .. } => components.iter().all(|&c| same(c)),
            Expression::Unary { expr, .. } | Expression::As { expr, .. } => same(expr),
            Expression::Binary { left, right, .. } => same(left) && same(right),
            Expression::Select { condition, accept, reject } => same(condition) && same(accept) && same(reject),
            Expression::Math { arg, arg1, arg2, arg3, .. } => {
                [Some(arg), arg1, arg2, arg3].into_iter().flatten().all(same)
            }
            _ => false,
        }
    }
}

fn breaks(block: &Block) -> bool {
    block.iter().any(|statement| matches!(statement, Statement::Break))
}

/// Whether a statement holds a `continue` of this loop, after which a later test isn't sure to be met.
fn skips_on(statement: &Statement) -> bool {
    match statement {
        Statement::Continue => true,
        Statement::Loop { .. } => false,
        _ => inner_blocks(statement).into_iter().any(|block| block.iter().any(skips_on)),
    }
}

/// Local variables that a loop changes.
#[derive(Default)]
struct Changes {
    /// By adding or subtracting an integer literal.
    stepped: HashSet<Handle<LocalVariable>>,
    /// In any other way.
    other: HashSet<Handle<LocalVariable>>,
}

impl Changes {
    fn collect(&mut self, function: &Function, block: &Block) {
        for statement in block.iter() {
            match statement {
                Statement::Store { pointer, value } => {
                    if let Some(local) = root(function, *pointer) {
                        let set = if steps(function, local, *value) { &mut self.stepped } else { &mut self.other };
                        set.insert(local);
                    }
                }
                // A callee may write through a pointer.
                Statement::Call { arguments, .. } => {
                    self.other.extend(arguments.iter().filter_map(|&argument| root(function, argument)));
                }
                _ => {}
            }
            for inner in inner_blocks(statement) {
                self.collect(function, inner);
            }
        }
    }
}

/// Whether `value` is the variable plus or minus a literal other than 0.
fn steps(function: &Function, local: Handle<LocalVariable>, value: Handle<Expression>) -> bool {
    let Expression::Binary { op: BinaryOperator::Add | BinaryOperator::Subtract, left, right } =
        function.expressions[value]
    else {
        return false;
    };
    let itself = matches!(function.expressions[left], Expression::Load { pointer }
        if matches!(function.expressions[pointer], Expression::LocalVariable(l) if l == local));
    itself
        && matches!(function.expressions[right], Expression::Literal(Literal::U32(step)) if step != 0)
            | matches!(function.expressions[right], Expression::Literal(Literal::I32(step)) if step != 0)
}
