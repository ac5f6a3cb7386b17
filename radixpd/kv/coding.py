"""Compression in the mover's hands: what `--disaggregation-transfer-dtype` means for one pool, for what is sent and for what comes.

`Coding` is the flag's value made of codecs, one a mover. An `Encoder` (one a peer that is written to) chooses the codec of each send and
makes a `Parcel` of each piece, with its bytes in staging memory until the receiver has answered; without a codec the pool's own bytes go.
The `Decoder` (one a mover) has the staging memory in which coded pieces arrive, and puts them into the pool. Invariants: staging is
bounded, and whoever finds it full waits; a span is given back however its piece ends; nothing but what the flag lists is sent or taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from radixpd.kv.codec import build_codec, measure
from radixpd.kv.codec_choice import NONE, Chooser, Speed, listed
from radixpd.kv.codec_grouped import KEY_TOKENS
from radixpd.kv.link_speed import LinkSpeed
from radixpd.kv.outbox import Piece
from radixpd.kv.pool import Pool
from radixpd.kv.staging import Span, Staging

__all__ = ["PIECE", "Coded", "Coding", "Decoder", "Encoder", "Parcel"]

PIECE = 2 << 20  # bytes of KV handed to a transport at once
OUTGOING = 8 << 20  # bytes of staging for one peer that is written to
INCOMING = 32 << 20  # bytes of staging for all peers that write here


@dataclass(frozen=True, slots=True)
class Coded:
    """Pages of one layer as a codec has written them."""

    codec: str
    span: Span


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """A piece as it goes: `size` bytes on the wire, coded or straight from the pool. `taken`, `limit`: see `LinkSpeed.confirmed`."""

    piece: Piece
    size: int
    taken: float
    limit: float = math.inf
    coded: Coded | None = None


class Coding:
    """Raises ConfigError for a value that makes no sense."""

    def __init__(self, pool: Pool, value: str) -> None:
        layout = pool.layout
        names = listed(value)
        self.pool = pool
        self.codecs = {name: build_codec(name, layout) for name in names if name != NONE}
        # Key scales are shared by `KEY_TOKENS` tokens; a piece of twice as many can be cut anywhere in its middle.
        self.least = -(-KEY_TOKENS // layout.page_size)
        self.most = max(2 * self.least, PIECE // layout.page_bytes)
        self.largest = max((codec.encoded_bytes(self.most) for codec in self.codecs.values()), default=0)
        self.fixed = names[0] if value in names else ""  # "": one of several, by their speeds
        self.speeds: dict[str, Speed] = {}
        if not self.fixed:
            self.speeds = {name: measure(build_codec(name, layout), layout, pages=self.most) for name in (NONE, *self.codecs)}


class Encoder:
    """Of one peer."""

    def __init__(self, coding: Coding) -> None:
        self.speed = LinkSpeed()
        self.staging = Staging(max(OUTGOING, coding.largest)) if coding.codecs else None
        self._coding = coding
        self._chooser = Chooser(tuple(coding.speeds.values()))

    def choose(self, pages: int) -> str:
        """The codec of a send of so many pages."""
        return self._coding.fixed or self._chooser.pick(pages * self._coding.pool.layout.page_bytes, self.speed.now)

    def cut(self, codec: str, size: int) -> tuple[int, int]:
        """How many pages to take for `size` bytes on the wire: at most, and how many to leave at least, if any."""
        coding = self._coding
        if codec == NONE:
            return max(1, size // coding.pool.layout.page_bytes), 1
        share = coding.codecs[codec].encoded_bytes(coding.most) / coding.most
        return max(2 * coding.least, min(coding.most, int(size / share))), coding.least

    def has_room(self, codec: str) -> bool:
        """Whether a piece could be wrapped now."""
        return codec == NONE or (self.staging is not None and self.staging.fits(self._coding.largest))

    def wrap(self, piece: Piece, now: float) -> Parcel:
        """Code it, if its send is coded."""
        coding, name, pages = self._coding, piece.job.codec, piece.end - piece.start
        if name == NONE:
            return Parcel(piece, pages * coding.pool.layout.page_bytes, now)
        codec, size = coding.codecs[name], coding.codecs[name].encoded_bytes(pages)
        span = self.staging.take(size, self) if self.staging is not None else None
        assert span is not None, "no room: has_room was not asked"
        try:
            codec.encode_into(_pages(coding.pool.layers[piece.layer], piece.source), span.bytes)
        except BaseException:
            span.release()
            raise
        return Parcel(piece, size, now, self._limit(name), Coded(name, span))

    def unwrap(self, parcel: Parcel, now: float, *, arrived: bool) -> None:
        """The receiver has answered, or will not."""
        if parcel.coded is not None:
            parcel.coded.span.release()
        if arrived:
            self.speed.confirmed(parcel.size, now, taken=parcel.taken, limit=parcel.limit)

    def _limit(self, name: str) -> float:
        """Half of what the codec brings onto a wire: above, it may have been what was slow."""
        speed = self._coding.speeds.get(name)
        return math.inf if speed is None else min(speed.encode, speed.decode) * speed.ratio / 2


class Decoder:
    """Of one mover."""

    def __init__(self, coding: Coding) -> None:
        self.staging = Staging(max(INCOMING, coding.largest))
        self._coding = coding

    @property
    def capacity(self) -> int:
        """Bytes of the longest frame that can come."""
        return len(self.staging.memory)

    def takes(self, codec: str) -> bool:
        """Whether pages may come through this codec."""
        return codec in self._coding.codecs

    def size(self, codec: str, pages: int) -> int:
        """Bytes of so many pages."""
        return self._coding.codecs[codec].encoded_bytes(pages)

    def decode(self, codec: str, data: torch.Tensor, layer: int, pages: np.ndarray) -> None:
        """Put them into the pool. ValueError, before the first write, for bytes that this codec did not write."""
        self._coding.codecs[codec].decode_into(data, self._coding.pool.layers[layer], torch.from_numpy(pages))


def _pages(layer: torch.Tensor, ids: np.ndarray) -> torch.Tensor:
    """Those pages of a layer, copied only if they are scattered."""
    first = int(ids[0])
    if bool((np.diff(ids) == 1).all()):
        return layer[first : first + len(ids)]
    return layer[torch.from_numpy(ids.astype(np.int64))]
