"""Pages as integers between a group's smallest and largest value: 8 or 4 bits a value, bounds in 16 bits.

Keys are grouped per channel over 32 or more tokens (whole pages; the last group of a send takes the rest, a shorter send is one group):
key channels have large constant parts that differ by channel. Values are grouped per token over 32 to 64 channels of one head. A group
stores its bounds (lo, hi) and codes the range between them evenly; a symmetric group stores hi alone (lo = -hi, and 0 stays 0).

Bounds are float16; a send with numbers that float16 does not hold has bfloat16 bounds instead (flag 1), magnitudes above 2**126 saturate,
NaN becomes 0, infinities saturate. Invariant: a value comes back within half a step and half a unit in the last place of the larger bound.
Used by `codec` only.

Body: key bounds [1 or 2, groups, width], value bounds [1 or 2, tokens, width / channels], key codes, value codes;
width = heads * head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from radixpd.errors import ConfigError
from radixpd.kv.layout import KVLayout

__all__ = ["INT4", "INT8", "Grouped", "Scheme"]

KEY_TOKENS = 32
_LIMIT = 2.0**126  # hi - lo must not overflow float32
_LIMIT_FLOAT16 = 65280.0  # the largest of bfloat16 that float16 holds
_TINY = 2.0**-100  # a smaller step counts as this one: its inverse would overflow
_CHUNK = 1 << 18  # values of K (and of V) worked on at once: enough that torch's cost per call is small, little enough for the caches
_BOUNDS = (torch.float16, torch.bfloat16)  # by flag


@dataclass(frozen=True, slots=True)
class Scheme:
    """`channels`: the wanted size of a value group. Keys are never symmetric."""

    kind: int
    bits: int
    channels: int
    symmetric_values: bool


# Of bfloat16's bytes: codes .5, key bounds .0313, value bounds .0078; two bounds for values would need .547.
INT8 = Scheme(kind=2, bits=8, channels=64, symmetric_values=True)
# Codes .25, key bounds .0313, value bounds .0313. Four bits cannot spare the half range that one-sided groups would waste.
INT4 = Scheme(kind=3, bits=4, channels=32, symmetric_values=False)


@dataclass(frozen=True, slots=True)
class _Body:
    """A body cut into its parts."""

    key_bounds: torch.Tensor  # uint8 [1 or 2, groups, 2 * width]
    value_bounds: torch.Tensor  # uint8 [1 or 2, pages, 2 * page_size * width / channels]
    keys: torch.Tensor  # int8 [pages, page_size, width * bits / 8]
    values: torch.Tensor


class Grouped:
    """`Packing` of one scheme for one layout."""

    def __init__(self, scheme: Scheme, layout: KVLayout) -> None:
        self.kind = scheme.kind
        self._bits = scheme.bits
        self._page_size, self._width = layout.page_size, layout.kv_heads * layout.head_dim
        if self._width * scheme.bits % 8:
            raise ConfigError(f"--disaggregation-transfer-dtype: {self._width} values a token cannot be packed two to a byte")
        self._channels = group_channels(layout.head_dim, scheme.channels)
        self._symmetric = scheme.symmetric_values
        self._group = -(-KEY_TOKENS // layout.page_size)  # pages of a key group

    def size(self, pages: int) -> int:
        """Bytes of the body."""
        return int(sum(self._sizes(pages)))

    def spans(self, pages: int) -> list[tuple[int, int]]:
        """Page ranges that are coded one after the other, each of whole key groups of one size."""
        whole = pages // self._group
        regular = whole if pages == whole * self._group else max(whole - 1, 0)
        stride = self._group * max(1, _CHUNK // (self._group * self._page_size * self._width))
        end = regular * self._group
        spans = [(first, min(first + stride, end)) for first in range(0, end, stride)]
        return spans if end == pages else [*spans, (end, pages)]

    def pack(self, pages: torch.Tensor, body: torch.Tensor) -> int:
        """Fill `body`; returns the flags."""
        return next(flag for flag in range(len(_BOUNDS)) if self._pack_with(flag, pages, self._parts(body, len(pages))))

    def check(self, body: torch.Tensor, flags: int, pages: int, limit: float) -> None:
        """ValueError for bounds that would put something not finite, or above `limit`, into a pool."""
        if flags >= len(_BOUNDS):
            raise ValueError(f"integer body with unknown flags {flags}")
        parts, limit = self._parts(body, pages), min(limit, _LIMIT)
        for stored in (parts.key_bounds, parts.value_bounds):
            bounds = _stored(stored, flags, (len(stored), -1))
            hi = bounds[-1]
            lo = bounds[0] if len(bounds) == 2 else -hi
            if not (bounds.abs().amax() <= limit and (hi - lo).amin() >= 0):  # false for NaN too
                raise ValueError("integer body with impossible bounds")
        if self._symmetric and int(parts.values.amin()) == -(2 ** (self._bits - 1)):
            raise ValueError("integer body with a code beyond its bounds")

    def unpack(self, body: torch.Tensor, flags: int, pages: int, span: tuple[int, int], out: torch.Tensor) -> None:
        """Fill `out` [last - first, 2, page_size, kv_heads, head_dim] with pages `first .. last`."""
        parts, (first, last) = self._parts(body, pages), span
        groups = self._groups(span, pages)
        count = groups.stop - groups.start
        keys = self._whole(parts.keys[first:last]).view(count, -1, self._width)
        values = self._whole(parts.values[first:last]).view(-1, self._channels)
        for half, x, stored, shape in (
            (out[:, 0], keys, parts.key_bounds[:, groups], (-1, count, 1, self._width)),
            (out[:, 1], values, parts.value_bounds[:, first:last], (-1, len(values), 1)),
        ):
            middle, step = _scale(_stored(stored, flags, shape), self._bits)
            half.copy_(x.mul_(step).add_(middle).view(half.shape))

    def _sizes(self, pages: int) -> tuple[int, int, int, int]:
        tokens = pages * self._page_size
        value_bounds: int = 2 * tokens * (self._width // self._channels) * (1 if self._symmetric else 2)
        codes = tokens * self._width * self._bits // 8
        return 2 * 2 * max(1, pages // self._group) * self._width, value_bounds, codes, codes

    def _parts(self, body: torch.Tensor, pages: int) -> _Body:
        key_bounds, value_bounds, keys, values = torch.split(body, list(self._sizes(pages)))
        return _Body(
            key_bounds.view(2, -1, 2 * self._width),
            value_bounds.view(1 if self._symmetric else 2, pages, -1),
            keys.view(torch.int8).view(pages, self._page_size, -1),
            values.view(torch.int8).view(pages, self._page_size, -1),
        )

    def _groups(self, span: tuple[int, int], pages: int) -> slice:
        """Key groups of a span."""
        start = span[0] // self._group
        return slice(start, max(1, pages // self._group) if span[1] == pages else span[1] // self._group)

    def _pack_with(self, flag: int, pages: torch.Tensor, parts: _Body) -> bool:
        """False: these bounds do not hold the send's numbers, and the body is not to be used."""
        spans = self.spans(len(pages))
        scratch = torch.empty(2, max(last - first for first, last in spans) * self._page_size * self._width)
        for span in spans:
            first, last = span
            groups = self._groups(span, len(pages))
            keys = _loaded(pages[first:last, 0], scratch[0], flag).view(groups.stop - groups.start, -1, self._width)
            values = _loaded(pages[first:last, 1], scratch[1], flag).view(-1, self._channels)
            for x, symmetric, stored, codes in (
                (keys, False, parts.key_bounds[:, groups], parts.keys[first:last]),
                (values, self._symmetric, parts.value_bounds[:, first:last], parts.values[first:last]),
            ):
                bounds = _bounds(x, symmetric=symmetric).to(_BOUNDS[flag])
                if not math.isfinite(bounds.abs().amax()):
                    return False
                stored.copy_(bounds.view(torch.uint8).view(stored.shape))
                _quantise(x, bounds.float(), self._bits)
                self._store(x.view(*codes.shape[:2], self._width), codes)
        return True

    def _store(self, x: torch.Tensor, codes: torch.Tensor) -> None:
        """x: whole numbers, in the order of `codes`."""
        if self._bits == 4:
            # Byte = 16 * high + low + 8, summed as floats: torch's shifts of bytes are several times as slow.
            low, high = x.chunk(2, dim=-1)
            x = low.add_(8).add_(high, alpha=16)
        codes.copy_(x)

    def _whole(self, codes: torch.Tensor) -> torch.Tensor:
        """`_store` undone: float32 [pages, page_size, width]."""
        if self._bits == 8:
            return codes.to(torch.float32)
        x = torch.empty(*codes.shape[:2], self._width)
        low, high = x.chunk(2, dim=-1)
        low.copy_(codes.bitwise_and(15)).sub_(8)
        high.copy_(codes.bitwise_and(-16)).mul_(1 / 16)
        return x


def group_channels(head_dim: int, wanted: int) -> int:
    """Channels of a value group: a divisor of `head_dim` from 32 to 64, as near to `wanted` as there is; else the whole head."""
    fitting = [size for size in range(32, 65) if head_dim % size == 0]
    return min(fitting, key=lambda size: abs(size - wanted), default=head_dim)


def _loaded(half: torch.Tensor, scratch: torch.Tensor, flag: int) -> torch.Tensor:
    """A float32 copy of strided pages; one buffer serves all spans, since fresh memory costs page faults."""
    x = scratch[: half.numel()].view(half.shape).copy_(half)
    if not flag:
        return x
    limit = _LIMIT_FLOAT16 if half.dtype == torch.float16 else _LIMIT
    return x.nan_to_num_(0.0, limit, -limit).clamp_(-limit, limit)


def _bounds(x: torch.Tensor, *, symmetric: bool) -> torch.Tensor:
    """Smallest and largest along dimension 1, kept: [2, ...]; symmetric: the largest magnitude, [1, ...]."""
    lo, hi = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    return torch.maximum(lo.neg_(), hi)[None] if symmetric else torch.stack((lo, hi))


def _quantise(x: torch.Tensor, bounds: torch.Tensor, bits: int) -> None:
    """x becomes codes. Bounds are those that were stored: what they cut off by rounding is clamped."""
    middle, step = _scale(bounds, bits)
    inverse = step.clamp_min(_TINY).reciprocal_()
    lowest = -(2 ** (bits - 1)) + (1 if len(bounds) == 1 else 0)
    x.sub_(middle).mul_(inverse).round_().clamp_(lowest, 2 ** (bits - 1) - 1)


def _scale(bounds: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(middle, step): value = middle + code * step. Two bounds: all codes are used. One: the middle is 0, so the lowest code is not."""
    hi = bounds[-1]
    if len(bounds) == 1:
        return torch.zeros_like(hi), hi / (2 ** (bits - 1) - 1)
    step = (hi - bounds[0]) / (2**bits - 1)
    return bounds[0] + step * 2 ** (bits - 1), step


def _stored(stored: torch.Tensor, flag: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Bounds as float32; by a copy, because the buffer may be at an odd address."""
    return stored.contiguous().clone().view(_BOUNDS[flag]).view(shape).to(torch.float32)
