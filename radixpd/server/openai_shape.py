"""The pieces that both OpenAI answers share: ids, usage, finish reasons, log-probabilities, stream chunks.

Usage counts a prompt once however many samples it has, and never more cached tokens than prompt tokens. Called by the completions and
chat routes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from radixpd.core.request import Finish
from radixpd.core.step import TokenLogprobs
from radixpd.errors import BadRequest
from radixpd.runtime.output import Generation, Output
from radixpd.server.docs import Schema
from radixpd.server.native_shape import finite, prompt_scores
from radixpd.server.openai_types import ChatBody, CompletionBody, StreamOptions
from radixpd.text.tokenizer import Tokenizer

__all__ = [
    "Envelope", "HEADERS", "Ids", "Usage", "chat_logprobs", "completion_logprobs", "ending", "ids_of", "output_entries", "prompt_entries",
    "token_names", "wants_journey",
]  # fmt: skip

Entry = tuple[int, float | None, np.ndarray, np.ndarray]  # token id, logprob, top ids, top logprobs
JOURNEY = "X-Radixpd-Journey"
HEADERS: dict[str, Schema] = {JOURNEY: {"description": "1: the answer's usage has a kv_journey", "enum": ["0", "1"]}}
NO_IDS = np.empty(0, dtype=np.int32)
NO_LOGPROBS = np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every answer and chunk of one request carries."""

    prefix: str
    object: str
    chunk: str
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def answer(self, choices: list[dict[str, Any]], usage: dict[str, Any], extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A plain answer."""
        return {**self._head(self.object), **(extra or {}), "choices": choices, "usage": usage}

    def chunk_head(self, extra: Mapping[str, Any] | None = None) -> bytes:
        """The beginning of an event, up to the list of choices; without `extra` that of every event."""
        return b"data: " + msgspec.json.encode({**self._head(self.chunk), **(extra or {})})[:-1] + b',"choices":['

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"{self.prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; `report`: whether cached tokens are told, `journeys`: whether the outputs' journeys are, at the end;
    `thoughts` counts the tokens of thoughts, where they are told apart."""

    generation: Generation
    report: bool
    options: StreamOptions | None = None
    journeys: bool = False
    thoughts: Callable[[], int] | None = None

    def count(self) -> dict[str, Any]:
        """Usage so far."""
        groups = self.generation.groups
        prompt = sum(len(group[0].prompt) for group in groups)
        completion = sum(len(output.ids) for output in self.generation.outputs)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        if self.report:
            cached = sum(min(len(group[0].prompt), *(output.cached for output in group)) for group in groups)
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if self.thoughts is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.thoughts()}
        if self.journeys and all(output.finish is not None for output in self.generation.outputs):
            found = [output.journey for output in self.generation.outputs]
            usage["kv_journey"] = found if len(found) > 1 else found[0]
        return usage

    def tail(self) -> bytes:
        """What stands behind the choices of a chunk."""
        if self.options is None or not (self.options.include_usage or self.options.continuous_usage_stats):
            return b"]}\n\n"
        usage = self.count() if self.options.continuous_usage_stats else None
        return b'],"usage":' + msgspec.json.encode(usage) + b"}\n\n"

    def last_chunk(self, head: bytes) -> bytes:
        """The chunk without choices that ends a stream when the client asked for usage."""
        if self.options is None or not self.options.include_usage:
            return b""
        return head + b'],"usage":' + msgspec.json.encode(self.count()) + b"}\n\n"


@dataclass(frozen=True, slots=True)
class Ids:
    """Which token ids an answer shows besides its text."""

    prompt: bool
    output: bool

    def of_prompt(self, output: Output) -> dict[str, Any]:
        """The prompt's ids, if they were asked for."""
        return {"prompt_token_ids": output.prompt.tolist()} if self.prompt else {}

    def of_output(self, output: Output, start: int, stop: int) -> dict[str, Any]:
        """The ids `[start, stop)` of an output, if they were asked for."""
        return {"token_ids": output.ids[start:stop]} if self.output else {}


def wants_journey(request: web.Request) -> bool:
    """Whether the usage of the answer is to have the journey."""
    wish = request.headers.get(JOURNEY, "0")
    if wish not in ("0", "1"):
        raise BadRequest(f"{JOURNEY} must be 0 or 1, got {wish[:40]!r}", param=JOURNEY)
    return wish == "1"


def ids_of(body: ChatBody | CompletionBody) -> Ids:
    """What a request asks for, under vLLM's name for both and SGLang's for the prompt."""
    both = body.return_token_ids is True
    return Ids(prompt=both or body.return_prompt_token_ids is True, output=both)


def token_names(tokenizer: Tokenizer, body: ChatBody | CompletionBody) -> Callable[[int], str]:
    """What a token is called in log-probabilities: its text, or `token_id:ID`, which tells tokens with the same text apart."""
    return (lambda id: f"token_id:{id}") if body.return_tokens_as_token_ids else tokenizer.token_text


def ending(finish: Finish | None) -> dict[str, Any]:
    """`finish_reason`, and `matched_stop` with what ended a `stop`."""
    if finish is None:
        return {"finish_reason": None}
    return {"finish_reason": finish.kind, "matched_stop": finish.matched}


def prompt_entries(output: Output) -> list[Entry]:
    """Every prompt token with its score; the first has none."""
    scores = prompt_scores(output)
    none = (None, NO_IDS, NO_LOGPROBS, NO_LOGPROBS)
    return [(token, *scores.get(position, none)[:3]) for position, token in enumerate(output.prompt.tolist())]


def output_entries(ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> list[Entry]:
    """Sampled tokens with their log-probabilities."""
    return [
        (token, entry.logprob, entry.top_ids, entry.top_logprobs) if entry else (token, None, NO_IDS, NO_LOGPROBS)
        for token, entry in zip(ids, logprobs)
    ]


def completion_logprobs(
    tokenizer: Tokenizer, name: Callable[[int], str], entries: list[Entry], *, top: int, offset: int
) -> tuple[dict[str, Any], int]:
    """The completions shape, and the characters up to its end. `offset`: characters before the first entry. With `top` 0 there are no
    alternatives."""
    offsets: list[int] = []
    for token, *_ in entries:
        offsets.append(offset)
        offset += len(tokenizer.token_text(token))
    fields = {
        "tokens": [name(token) for token, *_ in entries],
        "token_logprobs": [None if logprob is None else finite(logprob) for _, logprob, *_ in entries],
        "top_logprobs": [_alternatives(name, entry) for entry in entries] if top else None,
        "text_offset": offsets,
    }
    return fields, offset


def chat_logprobs(tokenizer: Tokenizer, name: Callable[[int], str], entries: list[Entry]) -> dict[str, Any]:
    """The chat shape."""

    def shown(token: int, logprob: float | None) -> dict[str, Any]:
        value = None if logprob is None else finite(logprob)
        return {"token": name(token), "logprob": value, "bytes": list(tokenizer.token_bytes(token))}

    content = [
        {**shown(token, logprob), "top_logprobs": [shown(int(other), value) for other, value in zip(top_ids, top_logprobs.tolist())]}
        for token, logprob, top_ids, top_logprobs in entries
    ]
    return {"content": content, "refusal": None}


def _alternatives(name: Callable[[int], str], entry: Entry) -> dict[str, float] | None:
    """Text -> logprob, the token itself included; of two tokens with one text the likelier counts."""
    token, logprob, top_ids, top_logprobs = entry
    if logprob is None:
        return None
    found: dict[str, float] = {}
    for other, value in [*zip(top_ids.tolist(), top_logprobs.tolist()), (token, logprob)]:
        text = name(other)
        found[text] = max(found.get(text, finite(value)), finite(value))
    return found
