"""A small llama model whose tokenizer is a SentencePiece one, as Mistral's and Llama 2's files carry it, with its own answers."""

import io
import json

import numpy as np
import sentencepiece
from gguf import GGUFWriter

HIDDEN, HEADS, FFN = 32, 2, 32
STRINGS = [
    "the ship and the lamp", " two  spaces   and a tab\tend ", "line\nends\n\n  and  indents", "naïve café, 你好 🙂", "1234 + 5.6e7",
    "def f(x):\n    return x  # in a text", "", " ", "   ", "a", "aaaaaaaaaaaaaaaa", "thethethethe", "\u00a0nbsp\u200bzero",
]


def make(root, text):
    """Writes sentencepiece.gguf and sentencepiece.json."""
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()), model_writer=trained, model_type="bpe", vocab_size=700, byte_fallback=True,
        character_coverage=0.995, normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
        allow_whitespace_only_pieces=True, num_threads=1, minloglevel=2)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    ids = range(pieces.get_piece_size())
    kind = lambda i: 2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 6 if pieces.is_byte(i) else 1  # noqa: E731
    writer = GGUFWriter(root / "sentencepiece.gguf", "llama")
    writer.add_name("random llama with pieces")
    for add, value in [
        (writer.add_context_length, 256), (writer.add_embedding_length, HIDDEN), (writer.add_block_count, 1),
        (writer.add_feed_forward_length, FFN), (writer.add_head_count, HEADS), (writer.add_head_count_kv, HEADS),
        (writer.add_rope_freq_base, 10000.0), (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_vocab_size, len(ids)),
        (writer.add_rope_dimension_count, HIDDEN // HEADS), (writer.add_tokenizer_model, "llama"),
        (writer.add_tokenizer_pre, "default"), (writer.add_token_list, [pieces.id_to_piece(i) for i in ids]),
        (writer.add_token_scores, [pieces.get_score(i) for i in ids]), (writer.add_token_types, [kind(i) for i in ids]),
        (writer.add_bos_token_id, pieces.bos_id()), (writer.add_eos_token_id, pieces.eos_id()),
        (writer.add_unk_token_id, pieces.unk_id()),
    ]:
        add(value)
    random = np.random.default_rng(7)
    shapes = {"token_embd": (len(ids), HIDDEN), "output": (len(ids), HIDDEN), "output_norm": (HIDDEN,)}
    for part, shape in {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN, HIDDEN),
                        "attn_v": (HIDDEN, HIDDEN), "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (FFN, HIDDEN),
                        "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN)}.items():
        shapes[f"blk.0.{part}"] = shape
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", (random.standard_normal(shape) * 0.1).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    # A long text too, of the kind that it was not trained on.
    strings = STRINGS + ["".join(chr(33 + (i * i * 7) % 90) if i % 7 else " " for i in range(600))]
    answers = [{"text": s, "ids": pieces.encode(s)} for s in strings]
    assert all(pieces.decode(a["ids"]) == a["text"] for a in answers)
    (root / "sentencepiece.json").write_text(json.dumps(answers, indent=None, ensure_ascii=True).replace("}, {", "},\n {") + "\n")
