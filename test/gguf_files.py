"""Tiny GGUF files for tests: a whole model of random weights with a byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS, CONTEXT = 64, 4, 2, 96, 2, 128
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
SPECIALS = ["<|end|>", "<|start|>"]


def byte_alphabet() -> list[str]:
    """The 256 letters of byte-level BPE, by byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, extra = [], 256
    for byte in range(256):
        letters.append(chr(byte) if byte in printable else chr(extra))
        extra += byte not in printable
    return letters


MERGES = ["Ġ Ġ", "ĠĠ Ġ", "Ġ 1", "ĉ ĉ", "Ċ Ċ", "1 2", "a b", "Ġ a", "č Ċ"]
TOKENS = [*SPECIALS, *byte_alphabet(), *("".join(merge.split(" ")) for merge in MERGES), "<user>"]


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """What the GGUF converters do to q and k of the llama architecture."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def weights(*, seed: int = 0, architecture: str = "llama", tied: bool = False) -> dict[str, np.ndarray]:
    """Hugging Face names -> float32 arrays."""
    rng = np.random.default_rng(seed)
    head_dim = HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(TOKENS), HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (len(TOKENS), HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        rows = {"q_proj": HIDDEN, "k_proj": KV_HEADS * head_dim, "v_proj": KV_HEADS * head_dim}
        for name, size in rows.items():
            shapes[f"{prefix}self_attn.{name}.weight"] = (size, HIDDEN)
            if architecture == "qwen2":
                shapes[f"{prefix}self_attn.{name}.bias"] = (size,)
        if architecture == "qwen3":
            shapes[f"{prefix}self_attn.q_norm.weight"] = shapes[f"{prefix}self_attn.k_norm.weight"] = (head_dim,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{prefix}mlp.gate_proj.weight"] = shapes[f"{prefix}mlp.up_proj.weight"] = (FFN, HIDDEN)
        shapes[f"{prefix}mlp.down_proj.weight"] = (HIDDEN, FFN)
        shapes[f"{prefix}input_layernorm.weight"] = shapes[f"{prefix}post_attention_layernorm.weight"] = (HIDDEN,)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


GGUF_PARTS = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """`model.layers.0.mlp.up_proj.weight` -> `blk.0.ffn_up.weight`."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_PARTS[part]}.{kind}"
    return f"{GGUF_PARTS[stem]}.{kind}"


def write_gguf(
    path: Path,
    *,
    tensors: Mapping[str, np.ndarray] | None = None,
    architecture: str = "llama",
    keys: Mapping[str, Any] | None = None,
    pre: str = "smollm",
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    quantized: Sequence[str] = (),
    template: str | None = "{{ messages[0].content }}",
) -> Path:
    """Write a model; `keys` are added below the architecture's name, `quantized` names are written as Q8_0."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in (keys or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(f"{architecture}.{key}", value)
    add_tokenizer(writer, pre=pre, template=template)
    for name, values in {**(weights(architecture=architecture) if tensors is None else tensors)}.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        rows = permute(values, heads) if heads and architecture == "llama" else values
        if name in quantized:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(rows, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(rows))
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    finish(writer)
    return path


def add_tokenizer(writer: gguf.GGUFWriter, *, pre: str, template: str | None) -> None:
    """A byte-level tokenizer with two control tokens and a user-defined one."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([*[CONTROL] * len(SPECIALS), *[NORMAL] * (len(TOKENS) - len(SPECIALS) - 1), USER_DEFINED])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    if template is not None:
        writer.add_chat_template(template)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
