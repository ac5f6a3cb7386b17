"""GGUF weights -> config.json and model.safetensors (float32) as Hugging Face's own files would be.

Invariant: the written tensors equal the original model's names and row order; in particular the rotary permutation that the `llama`
architecture's q and k rows carry in GGUF is undone. One tensor at a time is in memory. Called once per file by `runtime.model_files`.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize

from radixpd.errors import ConfigError

__all__ = ["open_gguf", "write_gguf_model"]

# GGUF architecture -> (Hugging Face class, model type)
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # how GGUF keeps Llama 3.1's rope scaling: factors, not parameters
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, slots=True)
class _Source:
    """One open file with its architecture's keys at hand."""

    path: Path
    reader: gguf.GGUFReader
    architecture: str

    def get(self, key: str, default: Any = None) -> Any:
        field = self.reader.get_field(f"{self.architecture}.{key}")
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{self.path.name} lacks the key {self.architecture}.{key}; see --model-path")
        if isinstance(value, list):
            raise ConfigError(f"{self.path.name}: {self.architecture}.{key} differs by layer, which is not supported; see --model-path")
        return value

    def tensor(self, name: str) -> gguf.ReaderTensor | None:
        return next((tensor for tensor in self.reader.tensors if tensor.name == name), None)


def open_gguf(path: Path) -> gguf.GGUFReader:
    """Open a file, or say in one line why not."""
    try:
        return gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"{path} cannot be read as GGUF ({error}); see --model-path") from error


def write_gguf_model(reader: gguf.GGUFReader, path: Path, directory: Path) -> None:
    """Write config.json and model.safetensors of the file at `path`, open as `reader`, into `directory`."""
    source = _source(reader, path)
    config = _config(source)
    plan = [(_target_name(source, tensor.name), tensor) for tensor in reader.tensors if tensor.name != ROPE_FACTORS]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]} if source.architecture == "llama" else {}
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    _write_safetensors(directory / "model.safetensors", plan, heads)


def _source(reader: gguf.GGUFReader, path: Path) -> _Source:
    field = reader.get_field("general.architecture")
    architecture = None if field is None else str(field.contents())
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{path.name}: GGUF architecture {architecture!r} is not supported (supported: {known}); see --model-path")
    source = _Source(path=path, reader=reader, architecture=architecture)
    if source.get("expert_count", 0):
        raise ConfigError(f"{path.name} is a mixture-of-experts model, which is not supported from GGUF; see --model-path")
    parts = reader.get_field("split.count")
    if parts is not None and parts.contents() > 1:
        raise ConfigError(f"{path.name} is one of {parts.contents()} parts; merge them into one GGUF file for --model-path")
    return source


def _config(source: _Source) -> dict[str, Any]:
    class_name, model_type = ARCHITECTURES[source.architecture]
    embedding = source.tensor("token_embd.weight")
    if embedding is None:
        raise ConfigError(f"{source.path.name} has no token_embd.weight: it is not a whole language model; see --model-path")
    hidden, heads = int(source.need("embedding_length")), int(source.need("attention.head_count"))
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": int(source.need("feed_forward_length")),
        "num_hidden_layers": int(source.need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(source.get("attention.head_count_kv", heads)),
        "head_dim": int(source.get("attention.key_length", hidden // heads)),
        "max_position_embeddings": int(source.need("context_length")),
        # GGUF keeps these as float32; the shortest decimal of that is what the original config said.
        "rms_norm_eps": _decimal(source.need("attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(source.get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(source),
        "vocab_size": int(embedding.shape[1]),
        "tie_word_embeddings": source.tensor("output.weight") is None,
        "hidden_act": "silu",
        "attention_bias": source.tensor("blk.0.attn_q.bias") is not None,
        "mlp_bias": source.tensor("blk.0.ffn_up.bias") is not None,
        # Quantised values are exact in float32 and not in bfloat16, so `auto` takes float32.
        "torch_dtype": "float32",
    }
    for name in ("bos", "eos"):
        field = source.reader.get_field(f"tokenizer.ggml.{name}_token_id")
        config[f"{name}_token_id"] = None if field is None else int(field.contents())
    return config


def _decimal(value: float) -> float:
    return float(str(np.float32(value)))


def _rope_scaling(source: _Source) -> dict[str, Any] | None:
    factors = source.tensor(ROPE_FACTORS)
    if factors is not None:
        return _llama3_scaling(source, np.asarray(factors.data, dtype=np.float64).ravel())
    kind = source.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{source.path.name}: rope scaling {kind!r} is not supported (supported: linear, yarn, llama3); see --model-path")
    scaling = {"rope_type": kind, "factor": _decimal(source.need("rope.scaling.factor"))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = int(source.need("rope.scaling.original_context_length"))
    return scaling


def _llama3_scaling(source: _Source, factors: np.ndarray) -> dict[str, Any]:
    """The parameters behind the factors: the largest factor is `factor`, the others are the same in all Llama 3 models."""
    factor = float(factors.max())
    theta = float(source.get("rope.freq_base", 10000.0))
    inverse = theta ** -(np.arange(len(factors)) / len(factors))
    low, high, length = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"], LLAMA3_ROPE["original_max_position_embeddings"]
    wavelength = 2 * np.pi / inverse
    smooth = np.clip((length / wavelength - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if not np.allclose(factors, expected, rtol=1e-3):
        raise ConfigError(f"{source.path.name}: its rope frequency factors are not those of Llama 3; see --model-path")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}


def _target_name(source: _Source, name: str) -> str:
    match name.split("."):
        case [part, "weight"] if part in TOP:
            return f"{TOP[part]}.weight"
        case ["blk", layer, part, ("weight" | "bias") as kind] if part in LAYER:
            return f"model.layers.{layer}.{LAYER[part]}.{kind}"
    raise ConfigError(f"{source.path.name}: tensor {name} has no place in the {source.architecture} architecture; see --model-path")


def _write_safetensors(path: Path, plan: list[tuple[str, gguf.ReaderTensor]], heads: dict[str, int]) -> None:
    """Write the header from the shapes, then each tensor as it is dequantized."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in plan:
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF writes shapes fastest axis first
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # keeps the data aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for _, tensor in plan:
            _float32(tensor, heads).tofile(file)


def _float32(tensor: gguf.ReaderTensor, heads: dict[str, int]) -> np.ndarray:
    try:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except NotImplementedError as error:
        raise ConfigError(f"tensor {tensor.name} has the type {tensor.tensor_type.name}, which cannot be read; see --model-path") from error
    part = tensor.name.split(".")[-2]
    if part in heads:
        values = _unpermute(values, heads[part])
    return np.ascontiguousarray(values)


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """[heads * head_dim, ...]: GGUF interleaves the two rotary halves of each head; Hugging Face keeps them apart."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
