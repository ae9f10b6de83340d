//! Cases whose heads have products of their own: the recordings of head-matched and MLP mappers.

use kvmig_shaders::{Kernel, params::HeadsParams};

use super::{
    cases::{Case, Form},
    fixture::{Fixture, Map, Panels, Product, rope_bytes, whole},
};
use crate::{
    device::{ViewStrides, reference},
    sandbox::recording::{BufferId, Step},
};

/// Shape of a weight tensor: `[depth, width]`, or one such matrix for each of several heads.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    heads: Option<usize>,
    pub(super) depth: usize,
    width: usize,
}

impl Shape {
    pub(super) fn count(self) -> usize {
        self.depth * self.columns()
    }

    /// Elements of the bias.
    pub(super) fn columns(self) -> usize {
        self.heads.unwrap_or(1) * self.width
    }

    pub(super) fn dimensions(self) -> Vec<usize> {
        self.heads.into_iter().chain([self.depth, self.width]).collect()
    }
}

/// The tensors of a target plane.
pub(super) fn shapes(case: &Case) -> Vec<Shape> {
    let (from, to) = (case.source, case.target);
    let by_head = |depth, width| Shape { heads: Some(to.heads), depth, width };
    match case.form {
        Form::Ridge => vec![Shape { heads: None, depth: case.k * from.width(), width: to.width() }],
        Form::HeadMatched => vec![by_head(case.k * from.d, to.d)],
        Form::Mlp { width } => {
            vec![by_head(case.k * from.width(), width), by_head(width, width), by_head(width, to.d)]
        }
    }
}

/// Bytes of the scratch buffers behind the panels.
pub(super) fn activation_bytes(case: &Case, tokens: usize) -> Vec<u64> {
    match case.form {
        Form::Ridge | Form::HeadMatched => Vec::new(),
        Form::Mlp { width } => vec![4 * (case.target.heads * tokens * width) as u64; 2],
    }
}

/// A target plane's products, for the reference.
pub(super) fn products<'m>(case: &Case, map: &'m Map) -> reference::Products<'m> {
    let product = |Product { weights, bias }: &'m Product| reference::Product { weights, bias };
    match case.form {
        Form::Ridge => reference::Products::Full(product(&map.products[0])),
        form => reference::Products::ByHead {
            matched: form == Form::HeadMatched,
            chain: map.products.iter().map(product).collect(),
        },
    }
}

impl Fixture {
    /// One product for each head of a target plane, or three with a buffer of activations between each two.
    pub(super) fn heads(
        &self,
        panels: &Panels,
        plane: usize,
        map: &Map,
        view: BufferId,
        target: ViewStrides,
    ) -> Vec<Step> {
        let Case { source: from, target: to, form, .. } = *self.case();
        let value = plane % 2 == 1;
        let tokens = panels.tokens as u32;
        let matched = HeadsParams {
            tokens,
            blocks: map.layers.len() as u32,
            block_width: from.d as u32,
            panel_row_stride: panels.row,
            panel_heads: from.heads as u32,
            head_step: from.d as u32,
            heads: to.heads as u32,
            head_dim: to.d as u32,
            rope_dims: if value { 0 } else { to.rope_dims as u32 },
            relu: 0,
            out_offset: 0,
            head_stride: target.head,
            row_stride: target.row,
            first_row: 0,
        };
        let selected: Vec<u32> = map.layers.iter().map(|&layer| panels.layer * layer as u32).collect();
        let panel = (BufferId::Scratch(u32::from(value)), panels.bytes);
        let mapped = (view, target.bytes);
        let calls = match form {
            Form::Ridge => vec![],
            Form::HeadMatched => vec![(matched, selected, panel, mapped)],
            Form::Mlp { width } => {
                let width = width as u32;
                let bytes = 4 * u64::from(matched.heads * tokens * width);
                let [first, second] = [2, 3].map(|index| (BufferId::Scratch(index), bytes));
                let input = HeadsParams {
                    block_width: from.width() as u32,
                    panel_heads: 1,
                    head_step: 0,
                    head_dim: width,
                    rope_dims: 0,
                    relu: 1,
                    head_stride: tokens * width,
                    row_stride: width,
                    ..matched
                };
                let activations = |params| HeadsParams {
                    blocks: 1,
                    block_width: width,
                    panel_row_stride: width,
                    panel_heads: matched.heads,
                    head_step: tokens * width,
                    ..params
                };
                vec![
                    (input, selected, panel, first),
                    (activations(input), vec![0], first, second),
                    (activations(matched), vec![0], second, mapped),
                ]
            }
        };
        let step = |(part, (params, offsets, read, written)): (usize, (HeadsParams, Vec<u32>, _, _))| {
            let (read, written): ((BufferId, u64), (BufferId, u64)) = (read, written);
            let mut bindings = vec![whole(0, read.0, read.1)];
            bindings.extend(self.weights(map, plane, part));
            bindings.push(whole(3, BufferId::TargetRope, rope_bytes(panels.tokens, to.rope_dims)));
            bindings.push(whole(4, written.0, written.1));
            let params = [bytemuck::bytes_of(&params), bytemuck::cast_slice(&offsets)].concat();
            Step::Kernel { kernel: Kernel::Heads, params, bindings }
        };
        calls.into_iter().enumerate().map(step).collect()
    }
}
