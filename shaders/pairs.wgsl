// How affine@1 and heads@1 pair up a head's columns: (i, i + rope_dims / 2) are rotated together, and of the columns that
// aren't rotated the second half is paired with the first. Reads `block.params.rope_dims` and `.head_dim`, `rope` and
// `mapped` of the kernel that it is put in front of.

// Columns (first, second) of pair `pair` of a head, counted within the head; equal where the last one stands alone.
fn columns(pair: u32) -> vec2<u32> {
    let rotated = block.params.rope_dims / 2u;
    if pair < rotated {
        return vec2<u32>(pair, pair + rotated);
    }
    let rest = (block.params.head_dim - block.params.rope_dims + 1u) / 2u;
    let first = block.params.rope_dims + pair - rotated;
    let second = first + rest;
    return vec2<u32>(first, select(first, second, second < block.params.head_dim));
}

// Rotates and stores a pair's sums into the head of token `row` that begins at `dest`.
fn store_pair(dest: u32, row: u32, pair: u32, a: f32, b: f32) {
    let column = columns(pair);
    let rotated = block.params.rope_dims / 2u;
    if pair < rotated {
        let turn = rope[row * rotated + pair];
        mapped[dest + column.x] = a * turn.x - b * turn.y;
        mapped[dest + column.y] = b * turn.x + a * turn.y;
    } else {
        mapped[dest + column.x] = a;
        if column.y != column.x {
            mapped[dest + column.y] = b;
        }
    }
}
