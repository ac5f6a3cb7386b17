"""A model's shape as plain data, read once from a Hugging Face `config.json`.

`ModelSpec.from_config` either returns a spec that the generic decoder computes exactly, or raises `ConfigError` naming what it cannot
compute (unknown architecture, sliding window, rope type, activation, quantised weights). No torch here: loaders, the runner and tests
read it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from radixpd.errors import ConfigError
from radixpd.models.families import FAMILIES, Family

__all__ = ["ModelSpec", "RopeSpec"]

Config = Mapping[str, Any]

MAX_SIZE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. `attention_factor` scales cos and sin (yarn; 1 elsewhere), already resolved from mscale."""

    theta: float = 10000.0
    kind: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_context: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # yarn


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything the generic decoder needs to know. Sizes are of the whole model, before any sharding."""

    architecture: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context_length: int
    rms_eps: float
    rope: RopeSpec
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def from_config(cls, config: Config) -> ModelSpec:
        """Read a `config.json`, in the form of transformers 4 (`rope_scaling`, `rope_theta`) or 5 (`rope_parameters`)."""
        architecture, family = _family(config)
        if config.get("quantization_config"):
            raise ConfigError("config.json: quantization_config is not supported; use unquantised weights")
        if (activation := config.get("hidden_act", "silu")) != "silu":
            raise ConfigError(f"config.json: hidden_act {activation!r} is not supported (only silu)")
        context_length = _size(config, "max_position_embeddings")
        _refuse_sliding_window(config, family, context_length)
        heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
        kv_heads = _size(config, "num_key_value_heads", heads)
        head_dim = _size(config, "head_dim", family.head_dim or hidden // heads)
        if heads % kv_heads:
            raise ConfigError(f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        if head_dim % 2:
            raise ConfigError(f"config.json: head_dim {head_dim} is odd; rotary embedding needs an even one")
        attention_bias = _flag(config, "attention_bias")
        return cls(
            architecture=architecture,
            vocab_size=_size(config, "vocab_size"),
            hidden=hidden,
            layers=_size(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=_size(config, "intermediate_size"),
            context_length=context_length,
            rms_eps=_number(config, "rms_norm_eps", 1e-6),
            rope=_rope(config, context_length),
            tied=_flag(config, "tie_word_embeddings"),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.o_bias is None else family.o_bias,
            mlp_bias=_flag(config, "mlp_bias") if family.mlp_bias is None else family.mlp_bias,
            qk_norm=family.qk_norm,
        )


def _family(config: Config) -> tuple[str, Family]:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(f"config.json: architecture {name!r} is not supported (supported: {', '.join(FAMILIES)})")
    return name, FAMILIES[name]


def _refuse_sliding_window(config: Config, family: Family, context_length: int) -> None:
    """A window as long as the context never cuts anything, so only shorter ones are refused."""
    layers = config.get("layer_types") or []
    if not isinstance(layers, list):
        raise ConfigError(f"config.json: layer_types must be a list, not {layers!r}")
    kinds = set(map(str, layers)) - {"full_attention"}
    if kinds:
        raise ConfigError(f"config.json: layer_types {', '.join(sorted(kinds))} is not supported (only full_attention)")
    if family.window == "never" or config.get("sliding_window", 4096) is None:
        return
    window = _size(config, "sliding_window", 4096)
    if window >= context_length:
        return
    by_flag = _flag(config, "use_sliding_window") and _whole(config, "max_window_layers", 28) < _size(config, "num_hidden_layers")
    if family.window == "value" or by_flag:
        raise ConfigError(f"config.json: sliding_window {window} (context {context_length}) is not supported; only full attention is")


def _rope(config: Config, context_length: int) -> RopeSpec:
    given = _mapping(config, "rope_parameters") or _mapping(config, "rope_scaling")
    # Transformers 5 may nest one set per layer type; all layers here are full attention.
    given = _mapping(given, "full_attention") or given
    theta = _number(given, "rope_theta", _number(config, "rope_theta", 10000.0))
    for source in (given, config):
        if _number(source, "partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError("config.json: partial_rotary_factor is not supported (only 1.0)")
    kind = given.get("rope_type", given.get("type", "default")) or "default"
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise ConfigError(f"config.json: rope type {kind!r} is not supported (supported: default, linear, llama3, yarn)")
    if kind == "linear":
        return RopeSpec(theta=theta, kind="linear", factor=_number(given, "factor"))
    original = _size(config, "original_max_position_embeddings", _size(given, "original_max_position_embeddings", context_length))
    if kind == "llama3":
        if _number(given, "high_freq_factor") <= _number(given, "low_freq_factor"):
            raise ConfigError("config.json: rope high_freq_factor must be greater than low_freq_factor")
        return RopeSpec(
            theta=theta,
            kind="llama3",
            factor=_number(given, "factor"),
            original_context=original,
            low_freq_factor=_number(given, "low_freq_factor"),
            high_freq_factor=_number(given, "high_freq_factor"),
        )
    factor = _number(given, "factor", context_length / original)
    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=_number(given, "beta_fast", 32.0),
        beta_slow=_number(given, "beta_slow", 1.0),
        truncate=_flag(given, "truncate", default=True),
        attention_factor=_yarn_attention_factor(given, factor),
    )


def _yarn_attention_factor(given: Config, factor: float) -> float:
    """The explicit value, else the ratio of the two mscales where both are given, else the paper's 0.1 ln(factor) + 1."""
    if given.get("attention_factor") is not None:
        return _number(given, "attention_factor")
    growth = math.log(factor) if factor > 1 else 0.0
    # A zero counts as absent.
    if given.get("mscale") and given.get("mscale_all_dim"):
        return (0.1 * _number(given, "mscale") * growth + 1) / (0.1 * _number(given, "mscale_all_dim") * growth + 1)
    return 0.1 * growth + 1


def _mapping(config: Config, key: str) -> Config:
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"config.json: {key} must be an object, not {value!r}")
    return value or {}


def _flag(config: Config, key: str, *, default: bool = False) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"config.json: {key} must be true or false, not {value!r}")
    return default if value is None else value


def _size(config: Config, key: str, default: int | None = None) -> int:
    value = _whole(config, key, default)
    if value < 1:
        raise ConfigError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def _whole(config: Config, key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_SIZE:
        raise ConfigError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def _number(config: Config, key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise ConfigError(f"config.json: {key} must be a positive number, not {value!r}")
    return float(value)
