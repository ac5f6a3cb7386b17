"""Server-sent events: one loop for every streaming route.

The status line waits for the first news of the outputs, so an error that is known before the first token is a plain HTTP error. A failure
in mid-stream is one error event, then the end of the stream. `Cursor` remembers what a stream has shown of one output: the only place
where deltas are computed. Called by the native and the OpenAI routes, which say what a frame looks like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from radixpd.core.request import Finish
from radixpd.errors import RadixpdError
from radixpd.runtime.admission import Ask
from radixpd.runtime.output import Generation, Output
from radixpd.server.faults import STREAM, event, send
from radixpd.server.replies import error_body

__all__ = ["DONE", "Cursor", "Frames", "Piece", "intervals", "stream"]

DONE = b"data: [DONE]\n\n"
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of an output: text, ids `[start, stop)`, and the end if this is it."""

    text: str
    start: int
    stop: int
    finish: Finish | None


class Cursor:
    """How much of one output a stream has shown; `interval` tokens make a chunk."""

    __slots__ = ("_done", "_ids", "_interval", "_text", "output")

    def __init__(self, output: Output, interval: int) -> None:
        self.output = output
        self._interval = interval
        self._text = 0
        self._ids = 0
        self._done = False

    def advance(self) -> Piece | None:
        """The next chunk, or None when there is not enough for one."""
        output, done = self.output, self.output.finish is not None
        ids = len(output.ids)
        enough = ids - self._ids >= (self._interval if self._ids else 1)
        if self._done or not (done or enough):
            return None
        text = output.text
        piece = Piece(text[self._text :], self._ids, ids, output.finish)
        self._text, self._ids, self._done = len(text), ids, done
        return piece


class Frames(Protocol):
    """What one route sends."""

    aborts_are_errors: bool

    def opening(self) -> bytes:
        """Events before the first piece."""

    def frame(self, index: int, output: Output, piece: Piece) -> bytes:
        """Events for one piece of output `index`; may be empty."""

    def closing(self) -> bytes:
        """Events after the last piece."""


def intervals(asks: Sequence[Ask], default: int) -> list[int]:
    """Tokens of a chunk, for each output of a request."""
    return [ask.interval or default for ask in asks for _ in range(ask.params.n)]


async def stream(request: web.Request, generation: Generation, frames: Frames, *, intervals: Sequence[int]) -> web.StreamResponse:
    """Send a generation as it grows."""
    cursors = [Cursor(output, interval) for output, interval in zip(generation.outputs, intervals, strict=True)]
    response: web.StreamResponse | None = None
    parts: list[bytes] = []
    async for _ in generation.changes():
        if response is None:
            generation.raise_error(aborts=frames.aborts_are_errors)
            response = web.StreamResponse(headers=HEADERS)
            request[STREAM] = response
            await response.prepare(request)
            parts.append(frames.opening())
        for index, cursor in enumerate(cursors):
            if (error := cursor.output.error(aborts=frames.aborts_are_errors)) is not None:
                return await _end_with(request, response, parts, error)
            if (piece := cursor.advance()) is not None:
                parts.append(frames.frame(index, cursor.output, piece))
        if data := b"".join(parts):
            await send(request, response, data)
        parts.clear()
    assert response is not None
    await send(request, response, frames.closing())
    await response.write_eof()
    return response


async def _end_with(request: web.Request, response: web.StreamResponse, parts: list[bytes], error: RadixpdError) -> web.StreamResponse:
    await send(request, response, b"".join([*parts, event(error_body(error))]))
    await response.write_eof()
    return response
