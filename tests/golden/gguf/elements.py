"""A GGUF file with one tensor of every element type, and what gguf makes of each."""

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Type, GGUFWriter, dequantize
from safetensors.numpy import save_file

# type: where a block's f16 scales lie (bytes); every other bit of a block may be anything
SCALES = {
    Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0],
    Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208],
}
PLAIN = {Type.F32: np.float32, Type.F16: np.float16}
SHAPE = (3, 512)
"""Rows, columns: two blocks of the widest type in a row, an odd number of rows."""


# kind: (where the offset's scale lies, offset / scale that centres the values)
CENTRED = {Type.Q4_1: (2, -7.5), Type.Q5_1: (2, -15.5), Type.Q4_K: (2, 7.5), Type.Q5_K: (2, 15.5)}


def random_tensor(kind, shape, random, scale=1.0, centred=False):
    """Bytes [rows, row bytes] of a tensor of `kind`: random blocks whose values spread about `scale`.

    The types with an offset of their own get values about 0 where `centred`, as a model's weights are.
    """
    rows, columns = shape
    if kind in PLAIN:
        return (random.standard_normal(shape) * scale).astype(PLAIN[kind]).view(np.uint8)
    if kind == Type.BF16:
        wide = (random.standard_normal(shape) * scale).astype(np.float32)
        return (wide.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    block, size = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    for at in SCALES[kind]:
        d = random.uniform(0.5, 1.0, len(blocks)) * np.where(random.random(len(blocks)) < 0.25, -1, 1)
        blocks[:, at:at + 2] = d.astype(np.float16).view(np.uint8).reshape(-1, 2)
    if centred and kind in CENTRED:
        at, ratio = CENTRED[kind]
        d = blocks[:, 0:2].copy().view(np.float16).astype(np.float32) * ratio
        blocks[:, at:at + 2] = d.astype(np.float16).view(np.uint8).reshape(-1, 2)
    # One more pass brings the values to the scale asked for without leaving the type.
    spread = dequantize(blocks, kind).std()
    for at in SCALES[kind]:
        d = blocks[:, at:at + 2].copy().view(np.float16).astype(np.float32) * (scale / spread)
        blocks[:, at:at + 2] = d.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def make(root):
    """Writes elements.gguf and elements.safetensors (f32, `[rows, columns]`, by the same names)."""
    random = np.random.default_rng(20)
    writer = GGUFWriter(root / "elements.gguf", "llama")
    answers = {}
    for kind in [*PLAIN, Type.BF16, *SCALES]:
        name = kind.name.lower()
        data = random_tensor(kind, SHAPE, random)
        writer.add_tensor(name, data, raw_dtype=kind, raw_shape=data.shape)
        answers[name] = np.ascontiguousarray(dequantize(data, kind).astype(np.float32).reshape(SHAPE))
        assert np.isfinite(answers[name]).all()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(answers, str(root / "elements.safetensors"))
