"""Tiny random models on disk, made by transformers: the oracle of the model tests, and food for any test that needs a real model folder.

`save_tiny` writes `config.json` and `model.safetensors` and returns the transformers model. Norm weights and biases are random too, since a
fresh model has ones and zeros there, which would hide a forgotten one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

__all__ = ["FAMILIES", "ROPES", "save_tiny", "tiny_model"]

COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32},  # not hidden / heads
}
ROPES: dict[str, dict[str, Any]] = {
    "none": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 5000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "mscale": 1.5,
        "mscale_all_dim": 0.7,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
}


def tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A transformers model of `family` ("llama", "mistral", "qwen2", "qwen3"), float32; `overrides` go into its config."""
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def save_tiny(directory: Path, family: str, *, seed: int = 0, max_shard_size: str = "1GB", **overrides: Any) -> PreTrainedModel:
    """Write the model folder; a small `max_shard_size` ("50KB") makes several shards with an index."""
    model = tiny_model(family, seed=seed, **overrides)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model
