"""The table of dense decoder families: what one architecture does differently from the generic decoder.

Every row names the architecture as `config.json` does. `None` in a bias column means that the config's own flag decides. A new dense
family is one more row; `spec` reads the table, nothing else does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FAMILIES", "Family"]


@dataclass(frozen=True, slots=True)
class Family:
    """One row. `head_dim`: used where the config names none (None = hidden / heads).

    `window`: how the config switches sliding-window attention on: "never", by a "flag" (`use_sliding_window` and `max_window_layers`),
    or by the "value" of `sliding_window` alone (absent means 4096).
    """

    qkv_bias: bool | None = None  # None: attention_bias
    o_bias: bool | None = None  # None: attention_bias
    mlp_bias: bool | None = False  # None: mlp_bias
    qk_norm: bool = False
    head_dim: int | None = None
    window: Literal["never", "flag", "value"] = "never"


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(mlp_bias=None),
    "MistralForCausalLM": Family(qkv_bias=False, o_bias=False, window="value"),
    "Qwen2ForCausalLM": Family(qkv_bias=True, o_bias=False, window="flag"),
    "Qwen3ForCausalLM": Family(qk_norm=True, head_dim=128, window="flag"),
}
