"""The pieces that both OpenAI answers share: ids, usage, finish reasons, log-probabilities, stream chunks.

Usage counts a prompt once however many samples it has, and never more cached tokens than prompt tokens. Called by the completions and
chat routes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from radixpd.core.request import Finish
from radixpd.core.step import TokenLogprobs
from radixpd.runtime.output import Generation, Output
from radixpd.server.native_shape import finite, prompt_scores
from radixpd.server.openai_types import StreamOptions
from radixpd.text.tokenizer import Tokenizer

__all__ = ["Envelope", "Usage", "chat_logprobs", "completion_logprobs", "ending", "prompt_entries"]

Entry = tuple[int, float | None, np.ndarray, np.ndarray]  # token id, logprob, top ids, top logprobs
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

    def answer(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """A plain answer."""
        return {**self._head(self.object), "choices": choices, "usage": usage}

    def chunk_head(self) -> bytes:
        """The constant beginning of every event, up to the list of choices."""
        return b"data: " + msgspec.json.encode(self._head(self.chunk))[:-1] + b',"choices":['

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"{self.prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; `report` says whether cached tokens are told."""

    generation: Generation
    report: bool
    options: StreamOptions | None = None

    def count(self) -> dict[str, Any]:
        """Usage so far."""
        groups = self.generation.groups
        prompt = sum(len(group[0].prompt) for group in groups)
        completion = sum(len(output.ids) for output in self.generation.outputs)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        if self.report:
            cached = sum(min(len(group[0].prompt), *(output.cached for output in group)) for group in groups)
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
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


def completion_logprobs(tokenizer: Tokenizer, entries: list[Entry], *, top: int, offset: int) -> dict[str, Any]:
    """The completions shape. `offset`: characters before the first entry. With `top` 0 there are no alternatives."""
    tokens = [tokenizer.token_text(token) for token, *_ in entries]
    offsets: list[int] = []
    for text in tokens:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": [None if logprob is None else finite(logprob) for _, logprob, *_ in entries],
        "top_logprobs": [_alternatives(tokenizer, entry) for entry in entries] if top else None,
        "text_offset": offsets,
    }


def chat_logprobs(tokenizer: Tokenizer, entries: list[Entry]) -> dict[str, Any]:
    """The chat shape."""
    content = [
        {
            **_chat_token(tokenizer, token, logprob),
            "top_logprobs": [_chat_token(tokenizer, int(other), value) for other, value in zip(top_ids, top_logprobs.tolist())],
        }
        for token, logprob, top_ids, top_logprobs in entries
    ]
    return {"content": content, "refusal": None}


def _alternatives(tokenizer: Tokenizer, entry: Entry) -> dict[str, float] | None:
    """Text -> logprob, the token itself included; of two tokens with one text the likelier counts."""
    token, logprob, top_ids, top_logprobs = entry
    if logprob is None:
        return None
    found: dict[str, float] = {}
    for other, value in [*zip(top_ids.tolist(), top_logprobs.tolist()), (token, logprob)]:
        text = tokenizer.token_text(other)
        found[text] = max(found.get(text, finite(value)), finite(value))
    return found


def _chat_token(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    value = None if logprob is None else finite(logprob)
    return {"token": tokenizer.token_text(token), "logprob": value, "bytes": list(tokenizer.token_bytes(token))}
