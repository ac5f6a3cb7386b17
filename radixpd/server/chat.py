"""`/v1/chat/completions`: messages through the model's chat template, then an ordinary generation.

Without `max_tokens` an answer may fill the rest of the context. A conversation that ends with an assistant message gets a new assistant
turn unless `continue_final_message` asks to go on with that message. Streams send the role first, then content, then the finish reason
in a chunk of its own. Called by the application's router.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from aiohttp import web

from radixpd.errors import BadRequest
from radixpd.runtime.admission import LATER, MAX_SAMPLES, Ask, admit, refuse_later
from radixpd.runtime.output import Output
from radixpd.server.answers import ChatChunk, ChatCompletion
from radixpd.server.batch import pick_room, refusals_told
from radixpd.server.docs import Body, Doc, Schema, or_null, ref
from radixpd.server.openai_shape import (
    HEADERS,
    Envelope,
    Usage,
    chat_logprobs,
    ending,
    ids_of,
    output_entries,
    token_names,
    wants_journey,
)
from radixpd.server.openai_types import HARMLESS, WISHES, ChatBody, Wishes, split
from radixpd.server.replies import json_reply, read_object
from radixpd.server.response_format import RESPONSE_FORMAT
from radixpd.server.service import Service, service_of
from radixpd.server.stream import DONE, Piece, intervals, stream
from radixpd.text.chat import render_arguments

__all__ = ["DOCS", "MESSAGES", "ROLES", "ROUTES", "rendered"]

MAX_MESSAGES = 4096
MAX_TOP = 20
ROLES = ("system", "developer", "user", "assistant")
LATER_ROLES = ("tool", "function")
TEXT_PART: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
MESSAGES: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "allOf": [ref("Unserved")],
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": or_null({"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART}]}),
        },
        "required": ["role"],
    },
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
}


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    service = service_of(request)
    journeys = wants_journey(request)
    raw = await read_object(request)
    with refusals_told(raw, service.manager):
        service.manager.check_open()
        body, wishes = split(raw, ChatBody)
        _check(body)
        ask = await _ask(body, wishes, service)
        started = await service.manager.submit([ask])
    shown = service.resolved.settings.generation
    envelope = Envelope("chatcmpl", "chat.completion", "chat.completion.chunk", service.resolved.served_name)
    async with started as generation:
        usage = Usage(generation, shown.enable_cache_report, body.stream_options, journeys)
        shape = _Shape(service, body)
        ids = ids_of(body).of_prompt(generation.outputs[0])
        if body.stream:
            frames = _ChatFrames(shape, envelope, usage, samples=ask.params.n, ids=ids)
            return await stream(request, generation, frames, intervals=intervals([ask], shown.stream_interval))
        await generation.finished(aborts=True)
        choices = [shape.choice(index, output) for index, output in enumerate(generation.outputs)]
        return json_reply(envelope.answer(choices, usage.count(), ids))


async def rendered(
    service: Service,
    messages: list[dict[str, Any]],
    *,
    generation: bool | None = None,
    continued: bool = False,
    continues: tuple[str, ...] = ("assistant",),
    template_kwargs: dict[str, Any] | None = None,
) -> str:
    """The prompt text of a conversation. `continued`: it ends with the last message's text, which is by one of `continues`."""
    _check_messages(messages)
    if continued and generation:
        raise BadRequest("add_generation_prompt and continue_final_message exclude each other", param="continue_final_message")
    if continued and messages[-1]["role"] not in continues:
        raise BadRequest("continue_final_message needs an assistant message at the end", param="continue_final_message")
    return await service.manager.render(
        **render_arguments(messages, generation=generation, continued=continued, template_kwargs=template_kwargs)
    )


class _Shape:
    """Choices of one request. `echoed` is shown before each answer."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        self._tokenizer = service.manager.tokenizer
        self._name = token_names(self._tokenizer, body)
        self._wanted = body.logprobs is True
        self._ids = ids_of(body)
        self.echoed = _last_answer(body.messages) if body.echo else ""

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        """A whole choice."""
        message = {"role": "assistant", "content": self.echoed + output.text, "refusal": None}
        return {"index": index, "message": message, **self.parts(output, 0, len(output.ids)), **ending(output.finish)}

    def parts(self, output: Output, start: int, stop: int) -> dict[str, Any]:
        """What a choice tells of the ids `[start, stop)` besides their text."""
        logprobs = None
        if self._wanted:
            entries = output_entries(output.ids[start:stop], output.logprobs[start:stop])
            logprobs = chat_logprobs(self._tokenizer, self._name, entries)
        return {"logprobs": logprobs, **self._ids.of_output(output, start, stop)}

    def says(self, piece: Piece) -> bool:
        """Whether a chunk with this piece says anything."""
        return bool(piece.text) or ((self._wanted or self._ids.output) and piece.stop > piece.start)


class _ChatFrames:
    """Chunks of a chat completion. `ids`: what the first chunk tells of the prompt."""

    aborts_are_errors = True

    def __init__(self, shape: _Shape, envelope: Envelope, usage: Usage, *, samples: int, ids: dict[str, Any]) -> None:
        self._shape = shape
        self._usage = usage
        self._samples = samples
        self._head = envelope.chunk_head()
        self._first_head = envelope.chunk_head(ids)

    def opening(self) -> bytes:
        chunks = [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self._samples)]
        chunks[0] = self._first_head + chunks[0].removeprefix(self._head)
        if self._shape.echoed:
            chunks += [self._chunk(index, {"content": self._shape.echoed}) for index in range(self._samples)]
        return b"".join(chunks)

    def frame(self, index: int, output: Output, piece: Piece) -> bytes:
        chunks = b""
        if self._shape.says(piece):
            chunks = self._chunk(index, {"content": piece.text}, parts=self._shape.parts(output, piece.start, piece.stop))
        if piece.finish is not None:
            chunks += self._chunk(index, {}, end=ending(piece.finish))
        return chunks

    def closing(self) -> bytes:
        return self._usage.last_chunk(self._head) + DONE

    def _chunk(self, index: int, delta: dict[str, Any], *, parts: dict[str, Any] | None = None, end: dict[str, Any] | None = None) -> bytes:
        choice = {"index": index, "delta": delta, **(parts or {"logprobs": None}), **(end or ending(None))}
        return self._head + msgspec.json.encode(choice) + self._usage.tail()


def _last_answer(messages: list[dict[str, Any]]) -> str:
    """The text of a last message by the assistant."""
    if messages[-1].get("role") != "assistant":
        return ""
    content = messages[-1].get("content") or ""
    return content if isinstance(content, str) else " ".join(part["text"] for part in content)


def _check(body: ChatBody) -> None:
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_TOP:
        raise BadRequest(f"top_logprobs must be between 0 and {MAX_TOP}, got {body.top_logprobs}", param="top_logprobs")
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")


def _check_messages(messages: list[dict[str, Any]]) -> None:
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise BadRequest(f"messages must hold between 1 and {MAX_MESSAGES} messages, got {len(messages)}", param="messages")
    for index, message in enumerate(messages):
        role = message.get("role")
        refuse_later(message, f"messages[{index}]")
        if role in LATER_ROLES:
            raise BadRequest(f"messages[{index}].role {role} is not served by this server", param="messages", code="unsupported_field")
        if role not in ROLES:
            raise BadRequest(f"messages[{index}].role must be one of {', '.join(ROLES)}, got {str(role)[:40]!r}", param="messages")


async def _ask(body: ChatBody, wishes: Wishes, service: Service) -> Ask:
    options = {
        **wishes.options,
        **pick_room(body, 0, None, wishes.sampling.get("n")),
        "return_logprob": body.logprobs,
        "top_logprobs_num": body.top_logprobs,
    }
    names = {**wishes.names, "text": "messages", "top_logprobs_num": "top_logprobs"}
    # Admission comes first: a request that is wrong anyway should not cost a template run.
    manager = service.manager
    special = body.add_special_tokens is True
    ask = admit("", wishes.sampling, options, limits=manager.limits, names=names, defaults=manager.defaults.chat, special=special)
    prompt = await rendered(
        service,
        body.messages,
        generation=body.add_generation_prompt,
        continued=body.continue_final_message is True,
        template_kwargs=body.chat_template_kwargs,
    )
    return replace(ask, prompt=prompt)


ROUTES = (web.post("/v1/chat/completions", chat_completions),)
DOCS = {
    chat_completions: Doc(
        "Answer a conversation",
        answer=ChatCompletion,
        body=Body(
            ChatBody,
            fields={"messages": MESSAGES, "response_format": RESPONSE_FORMAT},
            ranges={"top_logprobs": (0, MAX_TOP)},
            lists=(1, MAX_SAMPLES),
            wishes=WISHES,
            harmless=HARMLESS,
            refused=LATER,
        ),
        headers=HEADERS,
        events=ChatChunk,
        errors=(499, 502, 503, 504),
    ),
}
