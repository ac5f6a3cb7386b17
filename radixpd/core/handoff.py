"""The handoff of one prompt from a prefill to a decode server: what the two brains say to each other, and to their movers.

A *room* names one handoff; the client's router mints it. Decode reserves its pages and asks (`Reserve`); prefill computes, its mover writes
the pages that decode lacks, and the first token follows (`Arrived`). Decode starts only when its own mover has seen all bytes too
(`Landed`). Whoever gives up says `PeerAbort`; decode's reserved pages stay in quarantine until prefill's mover is known to be quiet
(`Drained`), or its process to be gone (`PeerLost`). All plain data: the scheduler process puts it on sockets.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from radixpd.core.step import PromptScores, TokenLogprobs

__all__ = [
    "Arrived", "CancelRoom", "Drained", "ExpectRoom", "Failure", "HandoffLimits", "Landed", "MoverOrder", "MoverReport", "NotNeeded",
    "PeerAbort", "PeerLost", "PeerMessage", "PeerSilent", "PrefillShare", "Quiet", "Renew", "Reserve", "Room", "TicketDone",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Room:
    """Where a request is handed over. `peer`: the prefill server, as `host:port`, on the decode side; empty on the prefill side."""

    number: int
    peer: str = ""


# ---- decode -> prefill ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reserve:
    """Decode has pages for the prompt. `digest`: of its tokens; `skip`: prompt tokens that it has already (whole pages); `pages`: its page
    ids for the rest, int32; `seconds`: how long it stays without `Renew`; `seed`: that it samples with, drawn by it if the client gave
    none."""

    room: int
    prompt_tokens: int
    skip: int
    pages: np.ndarray
    seconds: float
    digest: bytes
    seed: int


@dataclass(frozen=True, slots=True)
class Renew:
    """Decode still wants the room; it may not have reserved pages yet."""

    room: int
    seconds: float


@dataclass(frozen=True, slots=True)
class NotNeeded:
    """Decode computes the prompt itself."""

    room: int


# ---- prefill -> decode ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefillShare:
    """Prefill's part of the journey: prompt tokens found and computed, pages sent, seconds queued, computing, and since the first page
    was given to the mover."""

    hit: int = 0
    computed: int = 0
    pages: int = 0
    queued: float = 0.0
    seconds: float = 0.0
    sending: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrived:
    """The prompt is computed and every page is on its way. One first token per sample, with its log-probabilities if asked for."""

    room: int
    tokens: np.ndarray  # int32 [n]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    scores: tuple[PromptScores, ...] = ()
    share: PrefillShare = PrefillShare()


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing more will be written into the pages of this room."""

    room: int


# ---- both ways ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerAbort:
    """The room is over. `status`: what the client would be told."""

    room: int
    reason: str
    status: int = 502


PeerMessage = Reserve | Renew | NotNeeded | Arrived | Drained | PeerAbort


# ---- brain <-> its own mover ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExpectRoom:
    """Decode: these pages (of every layer) will be written from outside."""

    room: int
    peer: str
    pages: np.ndarray  # int32


@dataclass(frozen=True, slots=True)
class CancelRoom:
    """Stop sending, or expecting, this room. Answered by `Quiet` once no write of it can happen any more, if the mover ever knows."""

    room: int


MoverOrder = ExpectRoom | CancelRoom


@dataclass(frozen=True, slots=True)
class TicketDone:
    """Prefill: one `Send` of a plan has been written whole, or has failed."""

    ticket: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Quiet:
    """Nothing of this cancelled room is being written any more: by prefill's own mover, or, on decode, by anybody."""

    room: int


@dataclass(frozen=True, slots=True)
class Landed:
    """Decode: every byte of this room is there. `raw`: bytes of KV that were written, `wire`: bytes that it took to bring them; `exact`:
    they are the bytes that prefill has."""

    room: int
    raw: int = 0
    wire: int = 0
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Failure:
    """Decode: what came for this room cannot be used."""

    room: int
    reason: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The peer's process is gone, or it has lost all access to this pool: nothing of it will be written any more."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerSilent:
    """The peer has said nothing for a while. It may come back, and it may still write."""

    peer: str
    reason: str


MoverReport = TicketDone | Quiet | Landed | Failure | PeerLost | PeerSilent


@dataclass(frozen=True, slots=True)
class HandoffLimits:
    """Every wait of a handoff has its limit, in seconds, and every list its bound."""

    body: float = 30.0  # prefill: a room that only one side has spoken of
    lease: float = 10.0  # prefill: without a word from decode, before anything is sent
    last_word: float = 2.0  # prefill: for decode's word on a transfer that has failed; a cancelled room is refused before that comes
    renew: float = 2.0  # decode: between two `Renew`
    reserve: float = 120.0  # decode: until pages could be reserved
    transfer: float = 120.0  # decode: from `Reserve` to the last byte
    tombstone: float = 300.0  # a dead room answers so long that it is dead
    tombstones: int = 10_000
    local_tokens: int = 16  # decode: an uncached rest up to this is computed there
    peer_tokens: int = 65_536  # decode: prompt tokens that one peer may owe at a time
    peer_share: float = 0.5  # decode: of the pool, that one peer may owe or hold in quarantine; more rooms wait
    quarantine_share: float = 0.25  # of the pool, for one peer; beyond it the peer gets no more rooms
    quarantine_patience: float = 2.0  # what has been in quarantine for less is no sign of a peer that does not answer
    fallback: bool = True  # decode computes what prefill failed to deliver
    overlap: bool = True  # prefill sends while it computes; else once all is computed, for comparison
    codec: str = "none"  # decode: what KV may go through on its way (`--disaggregation-transfer-dtype`)

    deadlines: dict[str, str] = field(
        default_factory=lambda: {
            "body": "--disaggregation-bootstrap-timeout",
            "reserve": "--disaggregation-reserve-timeout",
            "transfer": "--disaggregation-transfer-timeout",
        }
    )
