"""Running a batch on the engine's loop, whole or as a stream of events.

Invariants: every prompt of a batch is tokenized and known to fit before the first one starts; at most `room` outputs are in the engine,
whoever asks for them, first come, first served; a batch that is cancelled or fails has aborted what it started, and waits a little for the
engine to have let it go. Called by `llm`, through `Embedded` where it says `async`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from radixpd.errors import BadRequest, RadixpdError
from radixpd.offline.batch import Batch, Messages, Prompts, admit_conversations, admit_prompts, naming
from radixpd.offline.progress import Progress
from radixpd.runtime.admission import Ask
from radixpd.runtime.off_loop import Pace
from radixpd.runtime.output import Generation, Output
from radixpd.runtime.tokenizer_manager import Prepared
from radixpd.server.messages import rendered
from radixpd.server.native_shape import NativeShape
from radixpd.server.service import Service
from radixpd.server.stream import Cursor, intervals

__all__ = ["Runs", "Stream"]

ABORT_SECONDS = 4.0  # for the engine to let go what was given up
QUEUED = 3  # outputs that wait in the engine, for each that can run: enough for every policy to choose from


class Runs:
    """All batches of one engine."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._manager = service.manager
        self.room = service.manager.limits.max_running * (1 + QUEUED)
        self._free = asyncio.Semaphore(self.room)
        self._turn = asyncio.Lock()

    def prompts(
        self,
        prompts: Prompts | None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
        sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> Batch:
        """See `batch.admit_prompts`."""
        return admit_prompts(self._manager, prompts, input_ids, sampling, options)

    def conversations(
        self,
        messages: Messages | Sequence[Messages],
        sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
        rendering: Mapping[str, Any],
    ) -> Batch:
        """See `batch.admit_conversations`."""
        return admit_conversations(self._manager, messages, sampling, options, rendering)

    def stream(self, batch: Batch) -> Stream:
        """Events as `/generate` sends them."""
        return Stream(self._events(batch))

    async def answers(self, batch: Batch, progress: Progress | None = None) -> list[dict[str, Any]]:
        """Answers in the order of the prompts."""
        prepared = await self._prepare(batch)
        found: list[list[dict[str, Any]]] = [[] for _ in prepared]
        try:
            async with asyncio.TaskGroup() as tasks:
                for index, item in enumerate(prepared):
                    samples = len(item.message.rids)
                    await self._take(samples)
                    task = tasks.create_task(self._answer(batch, item, index, found))
                    # Not in the task: one that is cancelled before its first step runs no line of its own.
                    task.add_done_callback(partial(self._give, samples))
                    if progress is not None:
                        task.add_done_callback(progress.count)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return [answer for answers in found for answer in answers]

    async def _events(self, batch: Batch) -> AsyncGenerator[list[dict[str, Any]], None]:
        if batch.samples > self.room:
            raise BadRequest(f"a stream may have at most {self.room} outputs at once, got {batch.samples}", param="stream")
        prepared = await self._prepare(batch)
        await self._take(batch.samples)
        try:
            async with self._started(prepared) as generation:
                async for news in self._news(batch, generation):
                    yield news
        finally:
            self._give(batch.samples)

    async def _prepare(self, batch: Batch) -> list[Prepared]:
        now, pace = time.monotonic(), Pace()
        prepared = []
        for index, ask in enumerate(batch.asks):
            with naming(index, batch.many):
                if batch.conversations:
                    talk = batch.conversations[index]
                    ask = replace(ask, prompt=await rendered(self._service, talk.messages, **talk.rendering))
                prepared.append(await self._manager.prepare(ask, now))
            await pace.breathe()
        return prepared

    @contextlib.asynccontextmanager
    async def _started(self, prepared: list[Prepared]) -> AsyncIterator[Generation]:
        """Prompts in the engine, which counts their time from now; at the end they are not there any more."""
        now = time.monotonic()
        generation = self._manager.start([replace(item, message=msgspec.structs.replace(item.message, arrived=now)) for item in prepared])
        try:
            async with generation:
                yield generation
        finally:
            # At once when all has ended; else it has just been aborted.
            with contextlib.suppress(TimeoutError, RadixpdError):
                await asyncio.wait_for(generation.finished(), ABORT_SECONDS)

    async def _answer(self, batch: Batch, item: Prepared, index: int, found: list[list[dict[str, Any]]]) -> None:
        """One prompt's answers."""
        async with self._started([item]) as generation:
            with naming(index, batch.many):
                await generation.finished()
        shape = self._shape(batch, item.ask, generation.outputs[0])
        found[index] = [shape.answer(output, upto=len(output.ids), text=output.text, finish=output.finish) for output in generation.outputs]

    async def _news(self, batch: Batch, generation: Generation) -> AsyncIterator[list[dict[str, Any]]]:
        shown = self._service.resolved.settings.generation
        whole = not shown.incremental_streaming_output
        shapes = [shape for ask, group in zip(batch.asks, generation.groups) for shape in [self._shape(batch, ask, group[0])] * len(group)]
        steps = intervals(batch.asks, shown.stream_interval)
        cursors = [Cursor(output, step) for output, step in zip(generation.outputs, steps, strict=True)]
        async for _ in generation.changes():
            generation.raise_error()
            news = []
            for index, (shape, cursor) in enumerate(zip(shapes, cursors)):
                output = cursor.output
                if (piece := cursor.advance()) is not None:
                    edge = piece.start == 0 or piece.finish is not None
                    start, text = (0, output.text) if whole else (piece.start, piece.text)
                    answer = shape.answer(output, start=start, upto=piece.stop, text=text, finish=piece.finish, with_prompt=edge)
                    news.append(answer | {"index": index} if batch.many else answer)
            if news:
                yield news

    def _shape(self, batch: Batch, ask: Ask, first: Output) -> NativeShape:
        return NativeShape(self._manager.tokenizer, first, wish=ask.params.logprobs, texts=batch.texts, prompt_ids=batch.prompt_ids)

    async def _take(self, samples: int) -> None:
        async with self._turn:
            for taken in range(samples):
                try:
                    await self._free.acquire()
                except asyncio.CancelledError:
                    self._give(taken)
                    raise

    def _give(self, samples: int, _: object = None) -> None:
        for _ in range(samples):
            self._free.release()


class Stream:
    """The events of one batch, pulled from another thread or loop. A pull that was given up has ended before the stream is closed."""

    def __init__(self, events: AsyncGenerator[list[dict[str, Any]], None]) -> None:
        self._events = events
        self._pulling = asyncio.Lock()

    async def next(self) -> list[dict[str, Any]] | None:
        """News; None at the end."""
        async with self._pulling:
            return await anext(self._events, None)

    async def close(self) -> None:
        """Give up what still runs."""
        async with self._pulling:
            await self._events.aclose()
