"""The three ways to ask a server: native `/generate`, completions, chat. A backend makes request bodies and reads answers into a `Record`.

What has been said before (`Said`: questions and answers of a conversation) goes in front of the prompt in the way of the route. A reader
decodes of a streamed event only what it needs. Called by `client` (readers) and `driver` (bodies).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from benchmark.timeline import Failure, Record

__all__ = ["BACKENDS", "Ask", "Backend", "Reader", "Said"]

Prompt = str | list[int]
Said = Sequence[tuple[Prompt, Prompt]]  # question, answer


@dataclass(frozen=True, slots=True)
class Ask:
    """What all requests of a run have in common. `extra` is merged into every body and wins."""

    model: str = "default"
    stream: bool = True
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)


class Reader(Protocol):
    """Reads one answer. Events come in order; `finished` says whether the server has ended the answer properly."""

    finished: bool

    def event(self, payload: bytes, now: float) -> None:
        """One streamed event."""
        ...

    def whole(self, payload: bytes, now: float) -> None:
        """A whole answer that was not streamed."""
        ...

    def close(self) -> None:
        """No more events."""
        ...


class Backend(Protocol):
    """A route and its two directions."""

    path: str
    takes_ids: bool
    gives_ids: bool

    def body(self, ask: Ask, said: Said, prompt: Prompt, output_len: int) -> dict[str, Any]: ...

    def reader(self, record: Record) -> Reader: ...


class NativeMeta(msgspec.Struct):
    """`meta_info` of a native answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: dict[str, Any] | None = None


class NativeEvent(msgspec.Struct):
    """A native event without its text: that is read once, from the last one."""

    meta_info: NativeMeta = msgspec.field(default_factory=NativeMeta)
    error: Any = None


class NativeAnswer(msgspec.Struct):
    """The texts of a native answer."""

    text: str = ""
    output_ids: list[int] = []


class NativeReader:
    """Events are whole answers so far: a chunk's tokens are what the count grew by."""

    _event = msgspec.json.Decoder(NativeEvent)
    _answer = msgspec.json.Decoder(NativeAnswer)

    def __init__(self, record: Record) -> None:
        self._record = record
        self._last = b""
        self.finished = False

    def event(self, payload: bytes, now: float) -> None:
        event, record = self._event.decode(payload), self._record
        if event.error is not None:
            record.failure = Failure("error in the stream", _words(event.error))
            return
        meta = event.meta_info
        if (fresh := meta.completion_tokens - record.completion_tokens) > 0:
            record.times.append(now)
            record.counts.append(fresh)
            record.completion_tokens = meta.completion_tokens
        record.end = now
        record.prompt_tokens, record.cached_tokens = meta.prompt_tokens, meta.cached_tokens
        self._last = payload
        if meta.finish_reason is not None:
            self.finished = True
            if meta.finish_reason.get("type") == "abort":
                record.failure = Failure("aborted by the server", str(meta.finish_reason.get("message") or ""))

    def whole(self, payload: bytes, now: float) -> None:
        self.event(payload, now)
        self._record.times.clear()
        self._record.counts.clear()

    def close(self) -> None:
        if self._last:
            answer = self._answer.decode(self._last)
            self._record.text, self._record.output_ids = answer.text, answer.output_ids


class Native:
    """SGLang's `/generate`, which radixpd serves too."""

    path = "/generate"
    takes_ids = True
    gives_ids = True

    def body(self, ask: Ask, said: Said, prompt: Prompt, output_len: int) -> dict[str, Any]:
        sampling = {"temperature": 0.0, "max_new_tokens": output_len, "ignore_eos": ask.ignore_eos, **ask.extra.get("sampling_params", {})}
        whole = _joined(said, prompt)
        key = "text" if isinstance(whole, str) else "input_ids"
        return {**ask.extra, key: whole, "sampling_params": sampling, "stream": ask.stream}

    def reader(self, record: Record) -> Reader:
        return NativeReader(record)


class Details(msgspec.Struct):
    """`prompt_tokens_details`."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """`usage` of an OpenAI answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None


class Message(msgspec.Struct):
    """A chat message, or what a chunk adds to it."""

    content: str | None = None
    reasoning_content: str | None = None

    @property
    def said(self) -> str:
        return (self.reasoning_content or "") + (self.content or "")


class Choice(msgspec.Struct):
    """A completion's or chat's choice, whole or a chunk."""

    text: str | None = None
    message: Message | None = None
    delta: Message | None = None
    finish_reason: str | None = None


class OpenAIEvent(msgspec.Struct):
    """An OpenAI answer or chunk."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


class OpenAIReader:
    """Events are deltas. How many tokens a chunk has is not told: it counts as one, and `usage` tells the sum."""

    _event = msgspec.json.Decoder(OpenAIEvent)

    def __init__(self, record: Record) -> None:
        self._record = record
        self._parts: list[str] = []
        self._counted = False
        self.finished = False

    def event(self, payload: bytes, now: float) -> None:
        event, record = self._event.decode(payload), self._record
        if event.error is not None:
            record.failure = Failure("error in the stream", _words(event.error))
            return
        for choice in event.choices[:1]:
            text = choice.delta.said if choice.delta is not None else choice.text or ""
            # A completion's chunk without text still brings a token (half a character, say), unless all it brings is the end.
            if text or (choice.delta is None and choice.finish_reason is None):
                record.times.append(now)
                record.counts.append(1)
                self._parts.append(text)
            record.end = now
            self.finished |= choice.finish_reason is not None
        self._count(event.usage)

    def whole(self, payload: bytes, now: float) -> None:
        answer = self._event.decode(payload)
        self._record.end = now
        for choice in answer.choices[:1]:
            self._parts.append(choice.message.said if choice.message is not None else choice.text or "")
            self.finished = choice.finish_reason is not None
        self._count(answer.usage)

    def close(self) -> None:
        self._record.text = "".join(self._parts)
        if not self._counted:
            self._record.completion_tokens, self._record.counted_by_server = len(self._record.times), False

    def _count(self, usage: Usage | None) -> None:
        if usage is None:
            return
        record, self._counted = self._record, True
        record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            record.cached_tokens = usage.prompt_tokens_details.cached_tokens


class Completions:
    """OpenAI's `/v1/completions`."""

    path = "/v1/completions"
    takes_ids = True
    gives_ids = False

    def body(self, ask: Ask, said: Said, prompt: Prompt, output_len: int) -> dict[str, Any]:
        return {**_openai(ask, output_len), "prompt": _joined(said, prompt), **ask.extra}

    def reader(self, record: Record) -> Reader:
        return OpenAIReader(record)


class Chat:
    """OpenAI's `/v1/chat/completions`."""

    path = "/v1/chat/completions"
    takes_ids = False
    gives_ids = False

    def body(self, ask: Ask, said: Said, prompt: Prompt, output_len: int) -> dict[str, Any]:
        turns = [(role, text) for pair in said for role, text in zip(("user", "assistant"), pair)]
        messages = [{"role": role, "content": text} for role, text in [*turns, ("user", prompt)]]
        return {**_openai(ask, output_len), "messages": messages, **ask.extra}

    def reader(self, record: Record) -> Reader:
        return OpenAIReader(record)


def _openai(ask: Ask, output_len: int) -> dict[str, Any]:
    body = {"model": ask.model, "temperature": 0.0, "max_tokens": output_len, "ignore_eos": ask.ignore_eos, "stream": ask.stream}
    return {**body, "stream_options": {"include_usage": True}} if ask.stream else body


def _joined(said: Said, prompt: Prompt) -> Prompt:
    """History and prompt as one text, or one list of ids."""
    if isinstance(prompt, str):
        return "".join([str(part) for pair in said for part in pair]) + prompt
    return [*(token for pair in said for part in pair for token in part if isinstance(token, int)), *prompt]


def _words(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)


NATIVE, COMPLETIONS, CHAT = Native(), Completions(), Chat()
BACKENDS: dict[str, Backend] = {
    "radixpd": NATIVE,
    "radixpd-oai": COMPLETIONS,
    "radixpd-oai-chat": CHAT,
    "sglang": NATIVE,
    "sglang-native": NATIVE,
    "sglang-oai": COMPLETIONS,
    "sglang-oai-chat": CHAT,
    "vllm": COMPLETIONS,
    "vllm-chat": CHAT,
    "lmdeploy": COMPLETIONS,
    "lmdeploy-chat": CHAT,
}
