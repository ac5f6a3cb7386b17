"""The receiving end of one data connection: greets, then takes what the book of arrivals permits, frame after frame.

A connection belongs to one peer (whose token it proved). A frame is checked before its first byte reaches the pool: its room must be
expected from this very peer, its pages must be the room's. A frame for a room that is not known yet waits a moment, since the brain's word
may be slower than the peer; coded pages wait for room in the staging memory that all connections share, and the socket with them.
Invariant: nothing counts as come before the frame's verdict has been read, and nothing is written for a room that has ended. Made by
`reception`.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from radixpd.core.handoff import Failure
from radixpd.kv import frames
from radixpd.kv.arrivals import Expected
from radixpd.kv.staging import Span, Staging
from radixpd.kv.stream import Broken, Stream, Talk, discarded

if TYPE_CHECKING:
    from radixpd.kv.reception import Reception

__all__ = ["Inbound"]

T = TypeVar("T")
Part: TypeAlias = Generator[list[memoryview] | None, None, T]  # of a conversation, with a result


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A frame that may be taken: pages of one layer, as runs, as ids (int64), and where they stand in the room's entry."""

    entry: Expected
    layer: int
    runs: np.ndarray
    pages: np.ndarray
    places: np.ndarray


class Inbound:
    """One connection of a peer."""

    def __init__(self, sock: socket.socket, host: Reception) -> None:
        self.host = host
        self.peer = ""  # until the token is proved
        self.since = host.ground.clock()
        self.waits_for: int | None = None  # a room that is not known yet
        self.waits_until = 0.0
        self.crowded: Expected | None = None  # the room of a frame that waits for staging memory
        self.span: Span | None = None  # what it has of it
        self.said_bye = False
        self.pid = 0  # of the process at the other end, where a transport wants to know
        self.stream = Stream(host.ground.selector, sock, closed=self._closed)

    def talk(self) -> Talk:
        """Greeting, then frame after frame."""
        host = self.host
        challenge = secrets.token_bytes(frames.CHALLENGE)
        self.stream.write(memoryview(frames.GREETING.pack(frames.MAGIC, frames.VERSION, challenge)))
        answer = bytearray(frames.CHALLENGE + frames.PROOF)
        yield [memoryview(answer)]
        challenges = challenge + answer[: frames.CHALLENGE]
        self.peer = host.recognise(self, bytes(challenges), bytes(answer[frames.CHALLENGE :]))
        host.greet(self, frames.proof(host.tokens[self.peer], "receiver", bytes(challenges), host.fingerprint))
        head = bytearray(frames.HEAD.size)
        while True:
            yield [memoryview(head)]
            kind, layer, count, room, number = frames.HEAD.unpack(head)
            if kind in (frames.DATA, frames.CODED):
                yield from self._frame(kind, layer, count, room, number)
            elif kind == frames.FORGET:
                entry = host.ground.arrivals.find(room)
                if entry is None or entry.peer == self.peer:
                    host.ground.arrivals.end(room)
                self._answer(number, frames.TAKEN)
            elif kind == frames.BYE:
                self.said_bye = True
            else:
                raise Broken(f"a frame of unknown kind {kind}")

    def stop(self) -> None:
        """The room of the frame that is being read is over."""
        self.stream.divert()
        self._let_go()

    def _let_go(self) -> None:
        if self.span is not None:
            self.span.release()
            self.span = None

    def _frame(self, kind: int, layer: int, count: int, room: int, number: int) -> Talk:
        host = self.host
        if layer >= host.ground.arrivals.layers or not 1 <= count <= host.pages:
            raise Broken(f"a frame of layer {layer} with {count} runs")
        coding, listed = bytearray(frames.CODING.size if kind == frames.CODED else 0), bytearray(8 * count)
        yield [memoryview(coding), memoryview(listed)]
        runs = np.frombuffer(listed, dtype=frames.RUN)
        total = int(runs[:, 1].sum(dtype=np.uint64))
        if not 1 <= total <= host.pages:
            raise Broken(f"a frame of {total} pages")
        yield from self._until_known(room)
        wanted, status = self._check(room, layer, runs)
        if kind == frames.CODED:
            field, size = frames.CODING.unpack(coding)
            status = yield from self._coded(wanted, status, frames.codec_of(field), size, total)
        else:
            status = yield from self._plain(wanted, status, layer, total)
        self._answer(number, status)

    def _plain(self, wanted: Wanted | None, status: int, layer: int, total: int) -> Part[int]:
        """Bytes as they lie in the pool go there at once."""
        host = self.host
        if wanted is not None:
            wanted.entry.writing.append(self.stop)
        if host.rows is not None:
            size = host.rows[layer].shape[1]
            yield self._targets(host.rows[layer], wanted.runs) if wanted is not None else discarded(total * size)
            host.ground.counters.bytes_in += total * size
        verdict = yield from self._verdict()
        if wanted is None:
            return status
        wanted.entry.writing.remove(self.stop)
        return self._refusal(wanted, verdict) or self._count(wanted)

    def _coded(self, wanted: Wanted | None, status: int, codec: str, size: int, total: int) -> Part[int]:
        """Coded bytes go into staging memory, and from there into the pool when they are whole."""
        host, decoder = self.host, self.host.ground.decoder
        if wanted is not None and (decoder is None or not decoder.takes(codec)):
            reason = f"{self.peer} sends {codec}, which this server does not take (--disaggregation-transfer-dtype)"
            status = self._give_up(wanted.entry, reason, frames.CODEC)
            wanted = None
        if wanted is None or decoder is None:
            yield discarded(size)
            yield from self._verdict()
            return status
        if size != decoder.size(codec, total) or size > decoder.capacity:
            raise Broken(f"a frame of {size} bytes of {codec} for {total} pages")
        yield from self._seat(wanted.entry, decoder.staging, size)
        yield [self.span.view] if self.span is not None else discarded(size)
        host.ground.counters.bytes_in += size
        verdict = yield from self._verdict()
        span, self.span = self.span, None
        if span is None:
            return frames.UNKNOWN
        try:
            wanted.entry.writing.remove(self.stop)
            if refusal := self._refusal(wanted, verdict):
                return refusal
            decoder.decode(codec, span.bytes, wanted.layer, wanted.pages)
        except ValueError as error:
            return self._give_up(wanted.entry, f"what came cannot be decoded: {error}", frames.DAMAGED)
        finally:
            span.release()
        return self._count(wanted, coded=size)

    def _seat(self, entry: Expected, staging: Staging, size: int) -> Talk:
        """Wait for staging memory; in vain if the room ends before."""
        self.crowded = entry
        while self.host.ground.arrivals.find(entry.room) is entry:
            self.span = staging.take(size, self)
            if self.span is not None:
                entry.writing.append(self.stop)
                break
            yield None
        self.crowded = None
        staging.leave(self)

    def _verdict(self) -> Part[bytes]:
        verdict = bytearray(1)
        yield [memoryview(verdict)]
        self.host.ground.counters.frames_in += 1
        return bytes(verdict)

    def _until_known(self, room: int) -> Talk:
        arrivals, clock = self.host.ground.arrivals, self.host.ground.clock
        self.waits_for, self.waits_until = room, clock() + self.host.ground.options.patience
        while arrivals.find(room) is None and not arrivals.has_ended(room) and clock() < self.waits_until:
            yield None
        self.waits_for = None

    def _check(self, room: int, layer: int, runs: np.ndarray) -> tuple[Wanted | None, int]:
        """Whether the frame may be taken; if not, the status that says why."""
        host = self.host
        entry = host.ground.arrivals.find(room)
        if entry is None or entry.peer != self.peer:
            host.ground.counters.refused += 1
            return None, frames.UNKNOWN
        inside = bool((runs.astype(np.int64).sum(axis=1) <= host.pages).all())
        pages = frames.pages_of(runs) if inside else None
        places = entry.places(pages) if pages is not None else None
        if pages is None or places is None:
            return None, self._give_up(entry, "the peer wanted to write pages that are not this room's", frames.FOREIGN)
        return Wanted(entry, layer, runs, pages, places), frames.TAKEN

    def _give_up(self, entry: Expected, reason: str, status: int) -> int:
        """What comes for this room is of no use: it is over, and its brain hears why."""
        host = self.host
        host.ground.counters.refused += 1
        host.ground.arrivals.end(entry.room)
        host.news.append(Failure(entry.room, reason))
        return status

    def _refusal(self, wanted: Wanted, verdict: bytes) -> int:
        """Why a frame that has been read counts for nothing; 0 if it counts."""
        if self.host.ground.arrivals.find(wanted.entry.room) is not wanted.entry:
            return frames.UNKNOWN
        return 0 if verdict == frames.GOOD else frames.WITHDRAWN

    def _count(self, wanted: Wanted, *, coded: int | None = None) -> int:
        """The frame's pages are in the pool."""
        host, entry = self.host, wanted.entry
        entry.came(wanted.layer, wanted.places, coded)
        host.ground.counters.raw_in += len(wanted.places) * entry.page_bytes
        if not entry.left:
            host.ground.arrivals.end(entry.room)
            host.news.append(entry.landed)
        return frames.TAKEN

    @staticmethod
    def _targets(rows: np.ndarray, runs: np.ndarray) -> list[memoryview]:
        """Where the bytes go: one buffer a run."""
        whole, size = rows.reshape(-1).data, rows.shape[1]
        return [whole[first * size : (first + count) * size] for first, count in runs.tolist()]

    def _answer(self, number: int, status: int) -> None:
        self.stream.write(memoryview(frames.ANSWER.pack(number, status)))

    def _closed(self, reason: str) -> None:
        for entry in self.host.ground.arrivals.all():
            if self.stop in entry.writing:
                entry.writing.remove(self.stop)
        self._let_go()
        self.crowded = None
        if self.host.ground.decoder is not None:
            self.host.ground.decoder.staging.leave(self)
        self.host.left(self, reason)
