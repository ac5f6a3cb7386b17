"""The decoder's building blocks: plain objects over plain tensors, no autograd.

A layer is built empty and says which checkpoint tensors it wants (`targets`); filling the last one readies it. Matrices that read the
same input are stacked, so that each costs one GEMM. On a CPU a full matrix is packed for oneDNN at once (1.4 to 2.4 times faster than
`F.linear` here) and its plain copy dropped. Sharding is the layer's own affair: it takes `Parallel` at construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch.nn import functional

from radixpd.models.rope import Rotation

__all__ = [
    "Attend",
    "ColumnLinear",
    "Embedding",
    "Gemm",
    "HeadNorm",
    "MLP",
    "Parallel",
    "Place",
    "RMSNorm",
    "Rotation",
    "RowLinear",
    "Target",
    "Targets",
    "can_pack",
    "packed_linear",
    "plain_linear",
]

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]) -> [tokens, heads, head_dim]."""

Apply = Callable[[torch.Tensor], torch.Tensor]


class Parallel(Protocol):
    """One rank of a tensor-parallel group. A column-sharded matrix needs `rank` and `size`, a row-sharded one also `all_reduce`."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks; may reuse `tensor`."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where and how a layer lives: its shard, its precision, its device."""

    parallel: Parallel
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor that a layer wants from the checkpoint: its whole (unsharded) shape, and what to do with it."""

    shape: tuple[int, ...]
    fill: Callable[[torch.Tensor], None]


Targets = Iterator[tuple[str, Target]]


def can_pack(weight: torch.Tensor) -> bool:
    """Does oneDNN take this matrix?"""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def plain_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Apply:
    """The reference: x W^T + b."""
    return lambda x: functional.linear(x, weight, bias)


def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Apply:
    """The same on a copy of `weight` in oneDNN's own order; one packing serves every number of rows."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    linear = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: linear(x, packed, bias, "none", [], "")


class Gemm:
    """One rank's dense matrix [outputs, inputs] with optional bias, filled piece by piece."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, place: Place) -> None:
        self._weight: torch.Tensor | None = torch.empty(outputs, inputs, dtype=place.dtype, device=place.device)
        self._bias = torch.empty(outputs, dtype=place.dtype, device=place.device) if bias else None
        self._rows_left = outputs * (2 if bias else 1)
        self._apply: Apply | None = None

    def fill_weight(self, first: int, rows: torch.Tensor) -> None:
        """Take weight rows `first ..`."""
        assert self._weight is not None, "filled already"
        self._weight[first : first + len(rows)] = rows
        self._filled(len(rows))

    def fill_bias(self, first: int, rows: torch.Tensor) -> None:
        """Take bias entries `first ..`."""
        assert self._bias is not None, "has no bias"
        self._bias[first : first + len(rows)] = rows
        self._filled(len(rows))

    def _filled(self, rows: int) -> None:
        self._rows_left -= rows
        if self._rows_left or self._weight is None:
            return
        prepare = packed_linear if can_pack(self._weight) else plain_linear
        self._apply = prepare(self._weight, self._bias)
        self._weight = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, inputs] -> [rows, outputs]."""
        assert self._apply is not None, "not loaded"
        return self._apply(x)


class ColumnLinear:
    """Stacked matrices `parts` (checkpoint name -> outputs) over one input; each is sharded along its outputs."""

    def __init__(self, inputs: int, parts: Mapping[str, int], *, bias: bool, place: Place) -> None:
        self._inputs, self._parts, self._bias = inputs, dict(parts), bias
        self._rank, self._size = place.parallel.rank, place.parallel.size
        self._gemm = Gemm(inputs, sum(parts.values()) // self._size, bias=bias, place=place)

    def targets(self) -> Targets:
        """`<part>.weight`, and `<part>.bias` where there is one."""
        first = 0
        for name, outputs in self._parts.items():
            count = outputs // self._size
            mine = slice(self._rank * count, (self._rank + 1) * count)
            yield f"{name}.weight", Target((outputs, self._inputs), partial(_fill_slice, self._gemm.fill_weight, first, mine))
            if self._bias:
                yield f"{name}.bias", Target((outputs,), partial(_fill_slice, self._gemm.fill_bias, first, mine))
            first += count

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, inputs] -> [rows, this rank's outputs of all parts side by side]."""
        return self._gemm(x)


def _fill_slice(fill: Callable[[int, torch.Tensor], None], first: int, mine: slice, tensor: torch.Tensor) -> None:
    fill(first, tensor[mine])


class RowLinear:
    """One matrix sharded along its inputs; the ranks' results are summed. The bias is added by rank 0 alone."""

    def __init__(self, name: str, inputs: int, outputs: int, *, bias: bool, place: Place) -> None:
        self._name, self._shape, self._bias = name, (outputs, inputs), bias
        self._parallel = place.parallel
        self._gemm = Gemm(inputs // place.parallel.size, outputs, bias=bias, place=place)

    def targets(self) -> Targets:
        """`<name>.weight`, and `<name>.bias` where there is one."""
        yield f"{self._name}.weight", Target(self._shape, self._fill_weight)
        if self._bias:
            yield f"{self._name}.bias", Target(self._shape[:1], self._fill_bias)

    def _fill_weight(self, tensor: torch.Tensor) -> None:
        count = tensor.shape[1] // self._parallel.size
        self._gemm.fill_weight(0, tensor[:, self._parallel.rank * count : (self._parallel.rank + 1) * count])

    def _fill_bias(self, tensor: torch.Tensor) -> None:
        self._gemm.fill_bias(0, tensor if self._parallel.rank == 0 else torch.zeros_like(tensor))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, this rank's inputs] -> [rows, outputs]."""
        return self._parallel.all_reduce(self._gemm(x))


def _copy(into: torch.Tensor, tensor: torch.Tensor) -> None:
    into.copy_(tensor)


class Embedding:
    """Token vectors, whole on every rank."""

    def __init__(self, vocab_size: int, hidden: int, *, place: Place) -> None:
        self._weight = torch.empty(vocab_size, hidden, dtype=place.dtype, device=place.device)

    def fill(self, tensor: torch.Tensor) -> None:
        """Take the whole table."""
        self._weight.copy_(tensor)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden], a fresh tensor."""
        return functional.embedding(tokens, self._weight)


class RMSNorm:
    """x / rms(x) * weight, accumulated in float32."""

    def __init__(self, name: str, size: int, eps: float, *, place: Place) -> None:
        self._name, self._eps, self._shape = name, eps, (size,)
        self._weight = torch.empty(size, dtype=place.dtype, device=place.device)

    def targets(self) -> Targets:
        """`<name>.weight`."""
        yield f"{self._name}.weight", Target(self._shape, partial(_copy, self._weight))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        return functional.rms_norm(x, self._shape, self._weight, self._eps)


class HeadNorm:
    """RMS norm of every query and key head (Qwen3): both in one pass, with a weight row per head."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, eps: float, *, place: Place) -> None:
        self._heads, self._eps, self._shape = heads, eps, (head_dim,)
        self._weight = torch.empty(heads + kv_heads, head_dim, dtype=place.dtype, device=place.device)

    def targets(self) -> Targets:
        """`q_norm.weight`, `k_norm.weight`."""
        yield "q_norm.weight", Target(self._shape, partial(_copy, self._weight[: self._heads]))
        yield "k_norm.weight", Target(self._shape, partial(_copy, self._weight[self._heads :]))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads + kv_heads, head_dim] -> the same shape."""
        return functional.rms_norm(x, self._shape, eps=self._eps) * self._weight


class MLP:
    """down(silu(gate(x)) * up(x)), gate and up in one GEMM."""

    def __init__(self, hidden: int, intermediate: int, *, bias: bool, place: Place) -> None:
        self._gate_up = ColumnLinear(hidden, {"gate_proj": intermediate, "up_proj": intermediate}, bias=bias, place=place)
        self._down = RowLinear("down_proj", intermediate, hidden, bias=bias, place=place)

    def targets(self) -> Targets:
        """Of the three matrices."""
        yield from self._gate_up.targets()
        yield from self._down.targets()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(functional.silu(gate).mul_(up))
