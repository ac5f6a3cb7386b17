"""What the balancer reads in answers: whole events of a stream, the first generated text, token counts.

Invariant: only whole events are passed on, so that an error event can follow whatever came before it; nothing is changed, and an answer
that cannot be read is passed on all the same. Pure; called by the proxy.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from radixpd.mini_lb.load_report import Count

__all__ = ["Figures", "Reader", "read_figures"]

ENDS = (b"\n\n", b"\r\n\r\n")
LONGEST_END = max(map(len, ENDS))
DATA = b"data:"
DONE = b"data: [DONE]\n\n"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def generated(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content or delta.tool_calls)))


class _Meta(msgspec.Struct):
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    cached_tokens: Count | None = None


class _Details(msgspec.Struct):
    cached_tokens: Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    """An answer, or an event of one, of any route: native (text, output_ids, meta_info) or OpenAI's (choices, usage)."""

    text: str | None = None
    output_ids: list[msgspec.Raw] | None = None
    meta_info: _Meta | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None

    @property
    def generated(self) -> bool:
        return bool(self.text or self.output_ids or any(choice.generated for choice in self.choices or ()))


@dataclass(frozen=True, slots=True)
class Figures:
    """Token counts of an answer; `cached` None where the worker does not say."""

    output_tokens: int = 0
    cached: int | None = None
    prompt_tokens: int = 0


_DECODER = msgspec.json.Decoder(list[_Answer] | _Answer)


def _answers(data: bytes) -> list[_Answer]:
    try:
        found = _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return []
    return found if isinstance(found, list) else [found]


def read_figures(data: bytes) -> Figures:
    """Of a plain answer, or of the data of one event."""
    prompt, tokens, cached = 0, 0, None
    for answer in _answers(data):
        if (meta := answer.meta_info) is not None:
            prompt += meta.prompt_tokens
            tokens += meta.completion_tokens
            cached = _sum(cached, meta.cached_tokens)
        if (usage := answer.usage) is not None:
            prompt += usage.prompt_tokens
            tokens += usage.completion_tokens
            cached = _sum(cached, usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None)
    return Figures(tokens, cached, prompt)


def _sum(one: int | None, other: int | None) -> int | None:
    return one if other is None else (one or 0) + other


class Reader:
    """Reads one stream as it passes."""

    def __init__(self) -> None:
        self._rest = bytearray()  # of an event that is not whole
        self._last = b""  # the newest whole events but a lone [DONE]
        self.generated = False  # whether text has been seen

    def feed(self, data: bytes) -> bytes:
        """The whole events that are now there."""
        start = max(0, len(self._rest) - LONGEST_END + 1)  # the end of an event may come in two pieces
        self._rest += data
        cut = max((at + len(end) for end in ENDS if (at := self._rest.rfind(end, start)) >= 0), default=0)
        if not cut:
            return b""
        events = bytes(self._rest[:cut])
        del self._rest[:cut]
        if not self.generated:
            self.generated = any(answer.generated for part in _data(events) for answer in _answers(part))
        if events != DONE:
            self._last = events
        return events

    def rest(self) -> bytes:
        """The stream has ended: what is left."""
        return bytes(self._rest)

    def figures(self) -> Figures:
        """Of the last event that has any."""
        found = Figures()
        for part in _data(self._last):
            figures = read_figures(part)
            found = figures if figures != Figures() else found
        return found


def _data(events: bytes) -> list[bytes]:
    return [line[len(DATA) :].strip() for line in events.splitlines() if line.startswith(DATA)]
