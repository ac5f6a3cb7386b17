"""Compression on the wire: pages of one layer into one run of bytes, and back into pages of a pool.

    codec = build_codec("int4", layout)
    nbytes = codec.encode_into(pages, staging)               # pages [n, 2, page_size, kv_heads, head_dim]; == codec.encoded_bytes(n)
    codec.decode_into(staging[:nbytes], layer, page_ids)     # layer: the whole pool of that layer, page_ids int64 [n]

A buffer is a 12-byte header (magic, kind, flags, pages, CRC-32 of header and body) and a body that a `Packing` writes; `none` is the
plain bytes, for callers that do not care which. Scales belong to a send, so a buffer needs nothing else to be read. Invariants: sizes
depend on the page count alone, the same pages give the same bytes, and a buffer that is damaged, too short, too long or of another codec
is a ValueError before the first write to the pool. The CRC finds damage, not forgery: peers are authenticated by the control channel.
The mover owns one codec of each name; objects hold no state between calls.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from radixpd.errors import ConfigError
from radixpd.kv.codec_choice import NAMES, Speed
from radixpd.kv.codec_float8 import Float8
from radixpd.kv.codec_grouped import INT4, INT8, Grouped
from radixpd.kv.layout import KVLayout
from radixpd.kv.pool import DTYPES

__all__ = ["HEADER_BYTES", "Codec", "Packing", "build_codec", "measure"]

_HEADER = struct.Struct("<2sBBII")
_MAGIC = b"kv"
HEADER_BYTES = _HEADER.size


class Codec(Protocol):
    """What the mover sees."""

    name: str

    def encoded_bytes(self, pages: int) -> int:
        """Size of a buffer of that many pages of one layer."""
        ...

    def encode_into(self, pages: torch.Tensor, out: torch.Tensor) -> int:
        """Write pages [n, 2, page_size, kv_heads, head_dim] to the start of `out` (uint8); returns the number of bytes."""
        ...

    def decode_into(self, data: torch.Tensor, layer: torch.Tensor, page_ids: torch.Tensor) -> None:
        """Write the pages in `data` (uint8, exactly one buffer) to `layer[page_ids]`."""
        ...


class Packing(Protocol):
    """How a lossy codec lays out a body; buffers are cut to size, checked by CRC and handed over by `Framed`."""

    kind: int

    def size(self, pages: int) -> int: ...

    def spans(self, pages: int) -> list[tuple[int, int]]: ...

    def pack(self, pages: torch.Tensor, body: torch.Tensor) -> int: ...

    def check(self, body: torch.Tensor, flags: int, pages: int, limit: float) -> None: ...

    def unpack(self, body: torch.Tensor, flags: int, pages: int, span: tuple[int, int], out: torch.Tensor) -> None: ...


class Plain:
    """`none`: the bytes of the pages."""

    name = "none"

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout

    def encoded_bytes(self, pages: int) -> int:
        return pages * self._layout.page_bytes

    def encode_into(self, pages: torch.Tensor, out: torch.Tensor) -> int:
        size = self.encoded_bytes(_count(pages, self._layout))
        _room(out, size).copy_(pages.contiguous().view(torch.uint8).flatten())
        return size

    def decode_into(self, data: torch.Tensor, layer: torch.Tensor, page_ids: torch.Tensor) -> None:
        _check_target(layer, page_ids, self._layout)
        _check_size(data, self.encoded_bytes(len(page_ids)))
        _scatter(data.view(len(page_ids), -1), layer, page_ids)


class Framed:
    """A packing behind the header."""

    def __init__(self, name: str, layout: KVLayout, packing: Packing) -> None:
        self.name = name
        self._layout, self._packing = layout, packing

    def encoded_bytes(self, pages: int) -> int:
        return HEADER_BYTES + self._packing.size(pages)

    def encode_into(self, pages: torch.Tensor, out: torch.Tensor) -> int:
        count = _count(pages, self._layout)
        buffer = _room(out, self.encoded_bytes(count))
        flags = self._packing.pack(pages, buffer[HEADER_BYTES:])
        head = (_MAGIC, self._packing.kind, flags, count)
        header = _HEADER.pack(*head, _crc(_HEADER.pack(*head, 0), buffer))
        buffer[:HEADER_BYTES] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        return len(buffer)

    def decode_into(self, data: torch.Tensor, layer: torch.Tensor, page_ids: torch.Tensor) -> None:
        _check_target(layer, page_ids, self._layout)
        count = len(page_ids)
        _check_size(data, self.encoded_bytes(count))
        flags = self._checked_flags(data, count)
        body = data[HEADER_BYTES:]
        self._packing.check(body, flags, count, torch.finfo(layer.dtype).max)
        spans = self._packing.spans(count)
        scratch = torch.empty((max(last - first for first, last in spans), *layer.shape[1:]), dtype=layer.dtype)
        for first, last in spans:
            pages = scratch[: last - first]
            self._packing.unpack(body, flags, count, (first, last), pages)
            _scatter(pages, layer, page_ids[first:last])

    def _checked_flags(self, data: torch.Tensor, count: int) -> int:
        magic, kind, flags, pages, crc = _HEADER.unpack(data[:HEADER_BYTES].numpy().tobytes())
        if (magic, kind, pages) != (_MAGIC, self._packing.kind, count):
            raise ValueError(f"not an {self.name} buffer of {count} pages: magic {magic!r}, kind {kind}, {pages} pages")
        if crc != _crc(_HEADER.pack(magic, kind, flags, pages, 0), data):
            raise ValueError(f"{self.name} buffer of {count} pages is damaged: its checksum differs")
        return int(flags)


_BUILDERS: dict[str, Callable[[KVLayout], Codec]] = {
    "none": Plain,
    "fp8_e4m3": lambda layout: Framed("fp8_e4m3", layout, Float8(layout)),
    "int8": lambda layout: Framed("int8", layout, Grouped(INT8, layout)),
    "int4": lambda layout: Framed("int4", layout, Grouped(INT4, layout)),
}


def build_codec(name: str, layout: KVLayout) -> Codec:
    """The codec of that name for pools of that layout."""
    if name not in _BUILDERS:
        raise ConfigError(f"--disaggregation-transfer-dtype {name} is not known (known: {', '.join(NAMES)})")
    return _BUILDERS[name](layout)


def measure(codec: Codec, layout: KVLayout, *, pages: int = 64, repeats: int = 3) -> Speed:
    """Time the codec on this machine, on one thread's worth of made-up pages: the best of `repeats`, for `codec_choice.choose`."""
    shape = (pages, 2, layout.page_size, layout.kv_heads, layout.head_dim)
    layer = torch.linspace(-8.0, 8.0, pages * layout.page_bytes).resize_(shape).to(DTYPES[layout.dtype])
    data, ids = torch.empty(codec.encoded_bytes(pages), dtype=torch.uint8), torch.arange(pages)
    raw, encode, decode = pages * layout.page_bytes, float("inf"), float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        codec.encode_into(layer, data)
        middle = time.perf_counter()
        codec.decode_into(data, layer, ids)
        encode, decode = min(encode, middle - start), min(decode, time.perf_counter() - middle)
    return Speed(codec.name, encode=raw / encode, decode=raw / decode, ratio=len(data) / raw)


def _count(pages: torch.Tensor, layout: KVLayout) -> int:
    """Number of pages, of the layout's shape and dtype."""
    shape = (2, layout.page_size, layout.kv_heads, layout.head_dim)
    if tuple(pages.shape[1:]) != shape or pages.dtype != DTYPES[layout.dtype] or not len(pages):
        raise ValueError(f"pages of {layout.dtype} {[*shape]} expected, not {pages.dtype} {list(pages.shape)}")
    return len(pages)


def _room(out: torch.Tensor, size: int) -> torch.Tensor:
    if out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous() or len(out) < size:
        raise ValueError(f"a run of at least {size} bytes expected, not {out.dtype} {list(out.shape)}")
    return out[:size]


def _check_size(data: torch.Tensor, size: int) -> None:
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous() or len(data) != size:
        raise ValueError(f"a buffer of exactly {size} bytes expected, not {data.dtype} {list(data.shape)}")


def _check_target(layer: torch.Tensor, page_ids: torch.Tensor, layout: KVLayout) -> None:
    _count(layer, layout)
    if page_ids.dtype != torch.int64 or page_ids.dim() != 1 or not len(page_ids):
        raise ValueError(f"page ids int64 [n] expected, not {page_ids.dtype} {list(page_ids.shape)}")
    low, high = page_ids.aminmax()
    if low < 0 or high >= len(layer):
        raise ValueError(f"page ids {int(low)} .. {int(high)} do not fit a pool of {len(layer)} pages")


def _scatter(pages: torch.Tensor, layer: torch.Tensor, page_ids: torch.Tensor) -> None:
    """layer[page_ids] = pages, a page at a time by memcpy: torch's index_copy_ goes value by value, and that costs half of a decode."""
    page = np.dtype((np.void, layer[0].numel() * layer.element_size()))
    rows = layer.view(torch.uint8).view(len(layer), -1).numpy().view(page)[:, 0]
    rows[page_ids.numpy()] = pages.view(torch.uint8).view(len(pages), -1).numpy().view(page)[:, 0]


def _crc(header: bytes, buffer: torch.Tensor) -> int:
    """Over the header with a checksum of 0, then the body."""
    return zlib.crc32(buffer[HEADER_BYTES:].numpy().data, zlib.crc32(header))
