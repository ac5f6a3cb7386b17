"""Where weights come from: safetensors files, read tensor by tensor, or a seeded random fill.

Only safetensors is read, so no file can run code, and shard names must be plain file names of the model's own folder. A GGUF model is
first converted into such a folder (see `gguf`). The runner calls `load_decoder`; `fingerprint` names the model's KV namespace.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from radixpd.errors import ConfigError
from radixpd.models.decoder import Decoder
from radixpd.models.layers import Parallel
from radixpd.models.spec import ModelSpec

__all__ = ["dummy", "fingerprint", "load_decoder", "read_config", "resolve_dtype", "stream"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SAMPLE_BYTES = 1024


def load_decoder(
    directory: Path,
    *,
    dtype: str = "auto",
    load_format: str = "auto",
    seed: int = 0,
    parallel: Parallel,
    device: torch.device | str = "cpu",
) -> Decoder:
    """Build the decoder of a model folder and fill it; `load_format` dummy needs its `config.json` only."""
    config = read_config(directory)
    decoder = Decoder(ModelSpec.from_config(config), parallel, resolve_dtype(config, dtype), device)
    decoder.load(dummy(decoder.shapes(), seed) if load_format == "dummy" else stream(directory))
    return decoder


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` of a model folder."""
    return _read_json(directory / "config.json")


def resolve_dtype(config: Mapping[str, Any], asked: str) -> torch.dtype:
    """`auto` is the checkpoint's own precision; float16 becomes bfloat16, which has float32's range and is the fast one on CPUs."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if asked == "auto":
        stored = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        asked = "bfloat16" if stored == "float16" else stored
    if asked not in known:
        raise ConfigError(f"--dtype {asked} is not supported (supported: auto, {', '.join(known)})")
    return known[asked]


def stream(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the folder's safetensors files, one at a time."""
    for path, names in _files(directory).items():
        try:
            with safe_open(path, framework="pt") as file:
                present = set(file.keys())
                for name in names or sorted(present):
                    if name not in present:
                        raise ConfigError(f"--model-path: {_INDEX} places {name} in {path.name}, which does not hold it")
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"--model-path: cannot read {path}: {error}") from error


def dummy(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Random weights that depend on seed and name alone, scaled so that activations stay near 1 and outputs depend on the context."""
    for name, shape in shapes.items():
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            yield name, noise.mul_(shape[1] ** -0.5)
        else:
            yield name, noise.mul_(0.1).add_(0.0 if name.endswith("bias") else 1.0)


def fingerprint(directory: Path, *, dtype: str = "auto", load_format: str = "auto", seed: int = 0) -> str:
    """A name that two hosts agree on exactly when they serve the same weights in the same precision.

    SHA-256 over the config, the safetensors headers (names, shapes, offsets) and the first bytes of every tensor: cheap, independent
    of paths and times, and different for any two trainings.
    """
    precision = resolve_dtype(read_config(directory), dtype)
    digest = hashlib.sha256((directory / "config.json").read_bytes() + str(precision).encode())
    if load_format == "dummy":
        digest.update(b"dummy" + str(seed).encode())
        return digest.hexdigest()
    for path in sorted(_files(directory)):
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = file.read(min(length, 100 << 20))
                digest.update(path.name.encode() + header)
                for entry in json.loads(header).values():
                    if "data_offsets" in entry:
                        first, end = entry["data_offsets"]
                        file.seek(8 + length + first)
                        digest.update(file.read(min(end - first, _SAMPLE_BYTES)))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"--model-path: cannot read {path}: {error}") from error
    return digest.hexdigest()


def _files(directory: Path) -> dict[Path, list[str]]:
    """Safetensors file -> the tensors the index places in it (an empty list: all it holds)."""
    if not (directory / _INDEX).is_file():
        if not (directory / _SINGLE).is_file():
            raise ConfigError(f"--model-path: {directory} has neither {_SINGLE} nor {_INDEX}; only safetensors weights are read")
        return {directory / _SINGLE: []}
    placed = _read_json(directory / _INDEX).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ConfigError(f"--model-path: {_INDEX} has no weight_map")
    files: defaultdict[Path, list[str]] = defaultdict(list)
    for name, shard in placed.items():
        # A path in the index could name any file of the machine. Links inside the folder are fine: hub caches are made of them.
        if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise ConfigError(f"--model-path: {_INDEX} names the shard {shard!r}; only *.safetensors files of the model's folder are read")
        files[directory / shard].append(name)
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model-path: cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--model-path: {path} does not hold a JSON object")
    return value
