"""What a chat answers with: choices of a plain answer, chunks of a stream, both out of the same `Reading` of each output.

Invariant: the chunks of a choice add up to the plain choice. Log-probabilities and ids of a piece stand in its chunk, whichever field its
text goes to, also where it has none yet. Called by the chat route.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from radixpd.core.request import Finish
from radixpd.runtime.output import Output
from radixpd.server.openai_shape import Envelope, Ids, Usage, chat_logprobs, ending, output_entries
from radixpd.server.stream import DONE, Piece
from radixpd.text.reading import News, Reading
from radixpd.text.tokenizer import Tokenizer

__all__ = ["ChatFrames", "Style", "Turn"]

CONTEXT_IDS = 16  # prompt ids before an output, as its detokenizer sees them


@dataclass(frozen=True, slots=True)
class Style:
    """What one request wants to see. `name`: of a token in log-probabilities; `echoed`: stands before each answer; `thoughts`: whether
    thoughts have a field; `flowing`: whether they are streamed as they come; `id_length`: of a call's id."""

    tokenizer: Tokenizer
    name: Callable[[int], str]
    logprobs: bool
    ids: Ids
    echoed: str = ""
    thoughts: bool = False
    flowing: bool = True
    id_length: int | None = None


class Turn:
    """One choice as it comes. Its output is read piece by piece, once."""

    def __init__(self, index: int, output: Output, reading: Reading, style: Style, *, skip_special: bool) -> None:
        self._index = index
        self._output = output
        self._reading = reading
        self._style = style
        self._call_ids: list[str] = []
        self._held = ""  # of a thought that is told at its end
        self._tokens = style.tokenizer.stream(output.prompt[-CONTEXT_IDS:], skip_special=skip_special)
        self._counted = self._characters = 0

    def whole(self) -> dict[str, Any]:
        """The choice of a plain answer."""
        self._number(self._reading.feed(self._output.text, last=True))
        reading, style = self._reading, self._style
        content: str | None = style.echoed + reading.content
        message: dict[str, Any] = {"role": "assistant", "content": None if reading.calls and not content else content, "refusal": None}
        if style.thoughts:
            message["reasoning_content"] = reading.thought or None
        if reading.calls:
            named = [(id, {"name": call.name, "arguments": call.arguments}) for id, call in zip(self._call_ids, reading.calls)]
            message["tool_calls"] = [{"id": id, "type": "function", "function": function} for id, function in named]
        assert self._output.finish is not None
        parts = self._parts(0, len(self._output.ids))
        return {"index": self._index, "message": message, **parts, **self._ending(self._output.finish)}

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Choices of the stream's next chunks."""
        delta = self._delta(self._reading.feed(piece.text, last=piece.finish is not None), last=piece.finish is not None)
        found = []
        if delta or ((self._style.logprobs or self._style.ids.output) and piece.stop > piece.start):
            parts = self._parts(piece.start, piece.stop)
            found.append({"index": self._index, "delta": delta, **parts, **ending(None)})
        if piece.finish is not None:
            found.append({"index": self._index, "delta": {}, "logprobs": None, **self._ending(piece.finish)})
        return found

    def thought_tokens(self) -> int:
        """Tokens so far that are no answer."""
        ids = self._output.ids
        if self._reading.thinking:
            return len(ids)
        while self._characters < self._reading.unanswered and self._counted < len(ids):
            self._characters += len(self._tokens.push(ids[self._counted]))
            self._counted += 1
        return self._counted

    def _delta(self, news: News, *, last: bool) -> dict[str, Any]:
        self._number(news)
        self._held += news.thought
        delta: dict[str, Any] = {}
        if self._held and (self._style.flowing or last or not self._reading.thinking):
            delta["reasoning_content"], self._held = self._held, ""
        if news.content:
            delta["content"] = news.content
        if news.calls:
            delta["tool_calls"] = [self._call_delta(at, name, arguments) for at, (name, arguments) in news.calls.items()]
        return delta

    def _call_delta(self, at: int, name: str | None, arguments: str) -> dict[str, Any]:
        if name is None:
            return {"index": at, "function": {"arguments": arguments}}
        return {"index": at, "id": self._call_ids[at], "type": "function", "function": {"name": name, "arguments": arguments}}

    def _number(self, news: News) -> None:
        """Ids for the calls that begin."""
        for _ in range(sum(name is not None for name, _ in news.calls.values())):
            drawn, length = uuid.uuid4().hex, self._style.id_length
            self._call_ids.append(drawn[:length] if length else f"call_{drawn[:24]}")

    def _ending(self, finish: Finish) -> dict[str, Any]:
        calls = {"finish_reason": "tool_calls"} if finish.kind == "stop" and self._reading.called else {}
        return {**ending(finish), **calls}

    def _parts(self, start: int, stop: int) -> dict[str, Any]:
        """What is told of the ids `[start, stop)` besides their text."""
        output, style, logprobs = self._output, self._style, None
        if style.logprobs:
            entries = output_entries(output.ids[start:stop], output.logprobs[start:stop])
            logprobs = chat_logprobs(style.tokenizer, style.name, entries)
        return {"logprobs": logprobs, **style.ids.of_output(output, start, stop)}


class ChatFrames:
    """Chunks of a chat completion. `ids`: what the first chunk tells of the prompt."""

    aborts_are_errors = True

    def __init__(self, turns: Sequence[Turn], envelope: Envelope, usage: Usage, *, echoed: str, ids: dict[str, Any]) -> None:
        self._turns = turns
        self._usage = usage
        self._echoed = echoed
        self._head = envelope.chunk_head()
        self._first_head = envelope.chunk_head(ids)

    def opening(self) -> bytes:
        chunks = [self._opener(index, {"role": "assistant", "content": ""}) for index in range(len(self._turns))]
        chunks[0] = self._first_head + chunks[0].removeprefix(self._head)
        if self._echoed:
            chunks += [self._opener(index, {"content": self._echoed}) for index in range(len(self._turns))]
        return b"".join(chunks)

    def frame(self, index: int, output: Output, piece: Piece) -> bytes:
        return b"".join(map(self._chunk, self._turns[index].chunks(piece)))

    def closing(self) -> bytes:
        return self._usage.last_chunk(self._head) + DONE

    def _opener(self, index: int, delta: dict[str, Any]) -> bytes:
        return self._chunk({"index": index, "delta": delta, "logprobs": None, **ending(None)})

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._head + msgspec.json.encode(choice) + self._usage.tail()
