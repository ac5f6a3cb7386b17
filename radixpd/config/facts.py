"""What the model's files and the machine say about themselves: the facts that `resolve` decides from.

Two small readers and their frozen results. Invariant: facts are numbers read once, before any process of the server starts; every error
is a `ConfigError` that names the flag to change. Called by the supervisor.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from radixpd.errors import ConfigError

__all__ = ["MachineFacts", "ModelFacts", "read_machine_facts", "read_model_facts"]

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # of generation_config.json
HEAD_DIM = {"Qwen3ForCausalLM": 128}  # where a config names none, these do not mean hidden / heads


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The part of `config.json` and `generation_config.json` that sizes a server. `dtype` is the checkpoint's."""

    architecture: str
    vocab_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    context_length: int
    dtype: str
    tied: bool
    eos_ids: tuple[int, ...]
    sampling: dict[str, Any] = field(default_factory=dict)  # what the model's authors recommend

    @property
    def parameters(self) -> int:
        """Weights of a dense decoder of this shape (norms and biases left out: under 1 %)."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.vocab_size * self.hidden * (1 if self.tied else 2)


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """`available_memory`: bytes that a new process can take without swapping; `cores`: CPUs this process may run on."""

    available_memory: int
    cores: int


def read_model_facts(directory: str | Path) -> ModelFacts:
    """Facts of a model directory in Hugging Face's format."""
    config = _read_json(Path(directory), "config.json")
    generation = _read_json(Path(directory), "generation_config.json", optional=True)
    where = f"--model-path: config.json in {directory}"
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ConfigError(f"{where} names no architecture")
    hidden, heads = _positive(config, "hidden_size", where), _positive(config, "num_attention_heads", where)
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    return ModelFacts(
        architecture=str(architectures[0]),
        vocab_size=_positive(config, "vocab_size", where),
        layers=_positive(config, "num_hidden_layers", where),
        heads=heads,
        kv_heads=_positive(config, "num_key_value_heads", where, default=heads),
        head_dim=_positive(config, "head_dim", where, default=HEAD_DIM.get(architectures[0], max(1, hidden // heads))),
        hidden=hidden,
        intermediate=_positive(config, "intermediate_size", where),
        context_length=_positive(config, "max_position_embeddings", where),
        dtype=str(dtype).removeprefix("torch."),
        tied=bool(config.get("tie_word_embeddings", False)),
        eos_ids=_eos_ids(generation, where) or _eos_ids(config, where),
        sampling={name: generation[name] for name in SAMPLING if generation.get(name) is not None},
    )


def read_machine_facts() -> MachineFacts:
    """Free memory and cores, as limited by the container if there is one."""
    free = _meminfo_available()
    limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return MachineFacts(available_memory=free, cores=len(os.sched_getaffinity(0)))


def _read_json(directory: Path, name: str, *, optional: bool = False) -> dict[str, Any]:
    try:
        data = json.loads((directory / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        raise ConfigError(f"--model-path: no {name} in {directory}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model-path: cannot read {name} in {directory}: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"--model-path: {name} in {directory} is not a JSON object")
    return data


def _positive(config: dict[str, Any], name: str, where: str, *, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        problem = f"has no {name}" if value is None else f"has {name} {value!r}; it must be a positive integer"
        raise ConfigError(f"{where} {problem}")
    return value


def _eos_ids(config: dict[str, Any], where: str) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ConfigError(f"{where} has eos_token_id {value!r}; it must be an id or a list of ids")
    return tuple(ids)


def _meminfo_available() -> int:
    for line in MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo has no MemAvailable line; give --max-total-tokens on a newer kernel")


def _cgroup_number(name: str) -> int | None:
    try:
        text = (CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
