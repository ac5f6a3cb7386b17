"""One output per sample: text, ids, log-probabilities, hold-back and finish in a single place.

Two parties can end an output: the brain (ids, lengths, aborts) and the detokenizer (stop strings). `Output` takes the earlier position,
cuts ids, log-probabilities and usage there, and alone writes `finish`, once; whatever comes later is dropped. Streaming and plain answers
are views of it. The client feeds it; `Generation` is the set of outputs that one HTTP request waits for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from radixpd.core.effects import Finished, Prefilled
from radixpd.core.journey import Journey
from radixpd.core.request import Finish, SamplingParams
from radixpd.core.step import PromptScores, TokenLogprobs
from radixpd.errors import BadRequest, EngineFailed, Overloaded, PeerFailed, RadixpdError
from radixpd.runtime.messages import Stop
from radixpd.text.detokenizer import Detokenizer

__all__ = ["CLIENT_CLOSED", "Generation", "Observer", "Output"]

CLIENT_CLOSED = 499  # status of an abort that the client asked for


class Observer(Protocol):
    """Who measures latencies."""

    def first_token(self, output: Output) -> None:
        """The first token came just now (`output.first`)."""

    def next_tokens(self, seconds: float, count: int) -> None:
        """`count` more tokens came `seconds` after the previous ones."""

    def ended(self, output: Output) -> None:
        """The output has its finish."""

    def left(self, output: Output, retractions: int) -> None:
        """The brain let the request go: its journey is whole, and it had been retracted so often."""


@dataclass(slots=True, eq=False)
class Output:
    """One sample while it lives and after. `group` is the client's rid; `params`, `priority` and `salted` (it has a namespace of its own)
    are for those who report about it. `on_end` is called once, when the finish stands; without an `observer` nothing is measured; what is
    not `kept` leaves no trace after its end.
    """

    rid: str
    group: str
    sample: int
    prompt: np.ndarray  # int32
    detokenizer: Detokenizer
    wake: Callable[[bool], None]  # called after each change; True with the end
    observer: Observer | None = None
    on_end: tuple[Callable[[Output], None], ...] = ()
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    salted: bool = False
    keep_stop: bool = False
    kept: bool = True
    cut: int = 0  # tokens that the prompt has lost at its beginning
    arrived: float = field(default_factory=time.monotonic)
    sent: float = field(default_factory=time.monotonic)  # its prompt is tokenized, the request leaves for the scheduler
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    scores: list[PromptScores] = field(default_factory=list)
    text: str = ""  # all that is safe to show; after the end: all
    cached: int = 0
    journey: Journey | None = None  # once the prompt is computed, or the end has come
    finish: Finish | None = None
    queued: float | None = None  # seconds from arrival to the first plan
    first: float = 0.0
    last: float = 0.0
    ended: float = 0.0
    _shown: int = 0  # ids that the detokenizer has seen
    _end: Finished | None = None

    def start(self, effect: Prefilled) -> None:
        """The prompt is computed."""
        self.cached, self.journey = effect.cached, effect.journey
        self.queued = effect.queued

    def receive(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """One more token; `settle` follows once the whole batch has been received."""
        if self.finish is None:
            self.ids.append(token)
            self.logprobs.append(logprobs)

    def end(self, effect: Finished) -> None:
        """The brain's last word; `settle` follows."""
        self._end = effect
        self.journey = effect.journey
        if self.finish is None:
            self.cached = effect.cached
        if self.observer is not None:
            self.observer.left(self, effect.retractions)

    def fail(self, message: str) -> None:
        """The engine is gone."""
        self._finish(len(self.ids), Finish("abort", message=message, status=EngineFailed.status))

    def settle(self) -> Stop | None:
        """Turn what was received into text and, maybe, the end. A returned `Stop` tells the brain about a stop string."""
        if self.finish is not None:
            return None
        end = self._end
        if end is not None and end.completion < len(self.ids):
            self._cut(end.completion)
        self._measure()
        upto = len(self.ids)
        if end is not None and end.finish.kind == "stop" and isinstance(end.finish.matched, int) and not self.keep_stop:
            # The token that ended the output is counted but not shown.
            upto -= 1
        if upto > self._shown:
            self.text += self.detokenizer.push(self.ids[self._shown : upto])
            self._shown = upto
        if end is not None and self.detokenizer.match is None:
            self.text += self.detokenizer.finish()
        match = self.detokenizer.match
        if match is not None:
            self._finish(match.kept, Finish("stop", matched=match.stop))
            return None if end is not None else Stop(self.rid, match.kept, match.stop)
        if end is not None:
            self._finish(len(self.ids), end.finish)
        else:
            self.wake(False)
        return None

    def error(self, *, aborts: bool = False) -> RadixpdError | None:
        """The error that an answer reports. An abort that the client asked for counts only with `aborts`."""
        finish = self.finish
        if finish is None or finish.kind != "abort" or (finish.status == CLIENT_CLOSED and not aborts):
            return None
        if finish.status in (429, 503):
            return Overloaded(finish.message, status=finish.status)
        if finish.status < 500:
            return BadRequest(finish.message, status=finish.status)
        if finish.status in (502, 504):
            return PeerFailed(finish.message, status=finish.status)
        return EngineFailed(finish.message)

    def _cut(self, keep: int) -> None:
        del self.ids[keep:]
        del self.logprobs[keep:]

    def _finish(self, keep: int, finish: Finish) -> None:
        if self.finish is not None:
            return
        self._cut(keep)
        self.finish = finish
        self.ended = time.monotonic()
        if self.observer is not None:
            self.observer.ended(self)
        for told in self.on_end:
            told(self)
        self.wake(True)

    def _measure(self) -> None:
        fresh = len(self.ids) - self._shown
        if fresh <= 0:
            return
        now = time.monotonic()
        if not self.first:
            self.first = now
            if self.observer is not None:
                self.observer.first_token(self)
            fresh -= 1
        if fresh and self.observer is not None:
            self.observer.next_tokens(now - (self.last or now), fresh)
        self.last = now


class Generation:
    """The outputs of one HTTP request: `groups[i]` are the samples of prompt i.

    Used as an async context manager: whatever leaves the block early (a client that hung up, an error) aborts what still runs.
    """

    def __init__(self, abort: Callable[[str], None]) -> None:
        self.groups: tuple[tuple[Output, ...], ...] = ()
        self._abort = abort
        self._open = 0  # outputs that have not ended; counted, since a request may have thousands that end at once
        self._changed = asyncio.Event()
        self._done = asyncio.Event()

    def hold(self, groups: Iterable[tuple[Output, ...]]) -> None:
        """Take the outputs, before any of them can end."""
        self.groups = tuple(groups)
        self._open = sum(map(len, self.groups))

    @property
    def outputs(self) -> Sequence[Output]:
        """All outputs, prompt by prompt."""
        return [output for group in self.groups for output in group]

    def wake(self, ended: bool) -> None:
        """Called by each output when it changed, once with `ended`."""
        self._changed.set()
        self._open -= ended
        if ended and not self._open:
            self._done.set()

    async def finished(self, *, aborts: bool = False) -> None:
        """Wait until every output has ended; raises the first error among them."""
        await self._done.wait()
        self.raise_error(aborts=aborts)

    async def changes(self) -> AsyncIterator[bool]:
        """Yields after each change; True with the last one."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            done = self._done.is_set()
            yield done
            if done:
                return

    def raise_error(self, *, aborts: bool = False) -> None:
        """Raise the first error that an output has ended with; see `Output.error`."""
        for output in self.outputs:
            if (error := output.error(aborts=aborts)) is not None:
                raise error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for output in self.outputs:
            if output.finish is None:
                self._abort(output.rid)
