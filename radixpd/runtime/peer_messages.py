"""What prefill and decode schedulers put on the wire: msgpack structs, arrays as raw little-endian bytes, never pickle.

*Frames* are what a socket carries: three of the handshake (`Knock`, `Welcome`, `Confirm`), `Stranger`, and `Sealed`, whose *body* is an
`Offer` or a message of `core.handoff`. Invariant: what `read_body` returns has counts and seconds in range and int32 / float32 arrays of
the stated shape, whatever the bytes were; else it raises `msgspec.MsgspecError`. The frames of the handshake and the fields of `Head` stay
as they are in every protocol version, so that any two versions can tell each other apart. Called by `peer_*`.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from radixpd.core.handoff import Arrived, Drained, NotNeeded, PeerAbort, PeerMessage, PrefillShare, Renew, Reserve
from radixpd.core.step import PromptScores, TokenLogprobs

__all__ = [
    "BODY_OVERHEAD", "VERSION", "Confirm", "Frame", "Head", "Hello", "Knock", "Layout", "Offer", "Sealed", "Stranger", "Welcome",
    "read_body", "read_frame", "write", "write_body",
]  # fmt: skip

VERSION = 2
BODY_OVERHEAD = 1024  # bytes of a frame around its body, at most
MAX_SECONDS = 86_400.0
REASON_LETTERS = 2_000  # what is told of why a room ended

Count = Annotated[int, Meta(ge=0, lt=2**31)]
Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Text = Annotated[str, Meta(max_length=REASON_LETTERS)]
Name = Annotated[str, Meta(max_length=256)]
Bytes16 = Annotated[bytes, Meta(min_length=16, max_length=16)]
Bytes32 = Annotated[bytes, Meta(min_length=32, max_length=32)]


# ---- the handshake --------------------------------------------------------------------------------------------------------------


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What every version of `Hello` holds."""

    version: int
    incarnation: Bytes16
    nonce: Bytes32


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of KV memory (`kv.layout.KVLayout`); `fingerprint` names it whole."""

    layers: Count
    kv_heads: Count
    head_dim: Count
    page_size: Count
    dtype: Name
    order: Name
    fingerprint: Name


class Hello(Head, frozen=True, kw_only=True):
    """Who a process is. `incarnation`: random, one per process. `name`: one per server, the same after a restart. `called`: how it calls
    the other one, empty if it does not. `model`: fingerprint. `codecs`: transfer dtypes that it sends, or takes."""

    role: Name
    name: Name
    called: Name
    secured: bool
    model: Name
    layout: Layout
    tp: Count
    codecs: Annotated[tuple[Name, ...], Meta(max_length=16)]


class Knock(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Decode -> prefill: its encoded `Hello`."""

    hello: Annotated[bytes, Meta(max_length=8192)]


class Welcome(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Prefill -> decode: its encoded `Hello`, and the proof over both that it knows the secret."""

    hello: Annotated[bytes, Meta(max_length=8192)]
    proof: Bytes32


class Confirm(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Decode -> prefill: decode's own proof. The session begins."""

    proof: Bytes32


class Stranger(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Prefill -> decode: this session is not known here (any more). Not authenticated: it causes a new handshake, nothing else."""

    session: Bytes16


class Sealed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Everything else. `counter` grows with every frame; `number` counts messages (0: a heartbeat), `ack` those received."""

    session: Bytes16
    incarnation: Bytes16
    counter: Number
    ack: Number
    number: Number
    body: bytes
    mac: Bytes32


Frame = Knock | Welcome | Confirm | Stranger | Sealed


# ---- bodies ---------------------------------------------------------------------------------------------------------------------


class Offer(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Both ways, first of all: by name of the transport, where and how this side takes part in it."""

    transports: dict[str, dict[str, Any]]


class _Reserve(msgspec.Struct, tag="Reserve", array_like=True, frozen=True):
    room: Number
    prompt_tokens: Count
    skip: Count
    pages: bytes  # int32
    seconds: Seconds
    digest: Bytes32
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class _Renew(msgspec.Struct, tag="Renew", array_like=True, frozen=True):
    room: Number
    seconds: Seconds


class _NotNeeded(msgspec.Struct, tag="NotNeeded", array_like=True, frozen=True):
    room: Number


class _Logprobs(msgspec.Struct, array_like=True, frozen=True):
    logprob: float
    top_ids: bytes  # int32 [top]
    top_logprobs: bytes  # float32 [top]
    asked: bytes  # float32


class _Scores(msgspec.Struct, array_like=True, frozen=True):
    first: Count
    logprobs: bytes  # float32 [k]
    top_ids: bytes  # int32 [k, top]
    top_logprobs: bytes  # float32 [k, top]
    asked: bytes  # float32 [k, n]


class _Share(msgspec.Struct, array_like=True, frozen=True):
    hit: Count
    computed: Count
    pages: Count
    queued: Seconds
    seconds: Seconds
    sending: Seconds


class _Arrived(msgspec.Struct, tag="Arrived", array_like=True, frozen=True):
    room: Number
    tokens: bytes  # int32 [samples]
    logprobs: list[_Logprobs | None]
    scores: list[_Scores]
    share: _Share


class _Drained(msgspec.Struct, tag="Drained", array_like=True, frozen=True):
    room: Number


class _PeerAbort(msgspec.Struct, tag="PeerAbort", array_like=True, frozen=True):
    room: Number
    reason: Text
    status: Annotated[int, Meta(ge=400, le=599)]


_Body = Offer | _Reserve | _Renew | _NotNeeded | _Arrived | _Drained | _PeerAbort

_frames = msgspec.msgpack.Decoder(Frame)
_bodies = msgspec.msgpack.Decoder(_Body)


def write(struct: msgspec.Struct) -> bytes:
    """A frame, or a `Hello`, as bytes."""
    return msgspec.msgpack.encode(struct)


def read_frame(data: bytes | memoryview) -> Frame:
    """One frame; `msgspec.MsgspecError` for anything else."""
    return _frames.decode(data)


def write_body(message: PeerMessage | Offer) -> bytes:
    """The body of a `Sealed`."""
    return msgspec.msgpack.encode(_to_wire(message))


def read_body(data: bytes) -> PeerMessage | Offer:
    """What a body says; `msgspec.MsgspecError` for anything that is none."""
    try:
        return _from_wire(_bodies.decode(data))
    except ValueError as error:  # an array of the wrong size; msgspec's own errors are among these too
        raise msgspec.ValidationError(str(error)) from None


def _to_wire(message: PeerMessage | Offer) -> _Body:
    match message:
        case Offer():
            return message
        case Reserve(room, tokens, skip, pages, seconds, digest, seed):
            return _Reserve(room, tokens, skip, _raw(pages, "<i4"), _seconds(seconds), digest, seed)
        case Renew(room, seconds):
            return _Renew(room, _seconds(seconds))
        case NotNeeded(room):
            return _NotNeeded(room)
        case Arrived(room, tokens, logprobs, scores, share):
            return _Arrived(
                room,
                _raw(tokens, "<i4"),
                [None if each is None else _logprobs_to_wire(each) for each in logprobs],
                [_scores_to_wire(each) for each in scores],
                _Share(share.hit, share.computed, share.pages, _seconds(share.queued), _seconds(share.seconds), _seconds(share.sending)),
            )
        case Drained(room):
            return _Drained(room)
        case PeerAbort(room, reason, status):
            return _PeerAbort(room, reason[:REASON_LETTERS], status if 400 <= status <= 599 else 502)


def _from_wire(body: _Body) -> PeerMessage | Offer:
    match body:
        case Offer():
            return body
        case _Reserve():
            return Reserve(body.room, body.prompt_tokens, body.skip, _ids(body.pages), body.seconds, body.digest, body.seed)
        case _Renew():
            return Renew(body.room, body.seconds)
        case _NotNeeded():
            return NotNeeded(body.room)
        case _Arrived():
            share = body.share
            return Arrived(
                body.room,
                _ids(body.tokens),
                tuple(None if each is None else _logprobs_from_wire(each) for each in body.logprobs),
                tuple(_scores_from_wire(each) for each in body.scores),
                PrefillShare(share.hit, share.computed, share.pages, share.queued, share.seconds, share.sending),
            )
        case _Drained():
            return Drained(body.room)
        case _PeerAbort():
            return PeerAbort(body.room, body.reason, body.status)


def _logprobs_to_wire(each: TokenLogprobs) -> _Logprobs:
    return _Logprobs(each.logprob, _raw(each.top_ids, "<i4"), _raw(each.top_logprobs, "<f4"), _raw(each.asked, "<f4"))


def _logprobs_from_wire(each: _Logprobs) -> TokenLogprobs:
    top = _ids(each.top_ids)
    return TokenLogprobs(each.logprob, top, _floats(each.top_logprobs, len(top)), _floats(each.asked))


def _scores_to_wire(each: PromptScores) -> _Scores:
    return _Scores(
        each.first, _raw(each.logprobs, "<f4"), _raw(each.top_ids, "<i4"), _raw(each.top_logprobs, "<f4"), _raw(each.asked, "<f4")
    )


def _scores_from_wire(each: _Scores) -> PromptScores:
    logprobs, top = _floats(each.logprobs), _ids(each.top_ids)
    rows = len(logprobs)
    return PromptScores(
        each.first, logprobs, _rows(top, rows), _rows(_floats(each.top_logprobs, len(top)), rows), _rows(_floats(each.asked), rows)
    )


def _seconds(value: float) -> float:
    return min(max(value, 0.0), MAX_SECONDS) if math.isfinite(value) else MAX_SECONDS


def _raw(array: np.ndarray, dtype: str) -> bytes:
    return array.astype(dtype, copy=False).tobytes()


def _ids(data: bytes) -> np.ndarray:
    array = np.frombuffer(data, "<i4").astype(np.int32, copy=False)
    if len(array) and array.min() < 0:
        raise ValueError("a negative id")
    return array


def _floats(data: bytes, size: int | None = None) -> np.ndarray:
    array = np.frombuffer(data, "<f4").astype(np.float32, copy=False)
    if size is not None and len(array) != size:
        raise ValueError(f"{len(array)} numbers where {size} are due")
    return array


def _rows(array: np.ndarray, rows: int) -> np.ndarray:
    return array.reshape(rows, -1) if rows else array.reshape(0, 0)
