"""`/v1/completions` and `/v1/models`.

Without `max_tokens` a completion has 16 tokens, as at OpenAI. `max_tokens` 0 with `echo` returns the prompt's scores alone. `best_of`
computes that many samples and returns the `n` with the highest mean log-probability. Called by the application's router.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from radixpd.core.request import Finish
from radixpd.errors import BadRequest
from radixpd.runtime.admission import CHATS, LATER, MAX_SAMPLES, MAX_TOP_LOGPROBS, Ask, admit
from radixpd.runtime.off_loop import Pace
from radixpd.runtime.output import Output
from radixpd.runtime.tokenizer_manager import TokenizerManager
from radixpd.server.answers import Completion, ModelCard, ModelList
from radixpd.server.batch import MAX_BATCH, check_rid, pick_all, pick_room, refusals_told
from radixpd.server.docs import TOKEN_IDS, Body, Doc, one_or_many
from radixpd.server.openai_shape import (
    HEADERS,
    Envelope,
    Usage,
    completion_logprobs,
    ending,
    ids_of,
    output_entries,
    prompt_entries,
    token_names,
    wants_journey,
)
from radixpd.server.openai_types import HARMLESS, WISHES, CompletionBody, Wishes, split
from radixpd.server.replies import json_reply, read_object
from radixpd.server.response_format import RESPONSE_FORMAT
from radixpd.server.service import Service, service_of
from radixpd.server.stream import DONE, Piece, intervals, stream

__all__ = ["DOCS", "ROUTES"]

PER_PROMPT = ("rid", "priority", "extra_key", "cache_salt")


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    service = service_of(request)
    journeys = wants_journey(request)
    raw, pace = await read_object(request), Pace()
    with refusals_told(raw, service.manager):
        service.manager.check_open()
        body, wishes = split(raw, CompletionBody)
        samples = _check(body, wishes)
        prompts, batch = _prompts(body.prompt)
        asks = []
        for index, prompt in enumerate(prompts):
            asks.append(_ask(body, wishes, prompt, index, len(prompts) if batch else None, service.manager))
            await pace.breathe()
        started = await service.manager.submit(asks)
    shown = service.resolved.settings.generation
    envelope = Envelope("cmpl", "text_completion", "text_completion", service.resolved.served_name)
    async with started as generation:
        usage = Usage(generation, shown.enable_cache_report, body.stream_options, journeys)
        shape = _Shape(service, body, [ask.prompt if isinstance(ask.prompt, str) else None for ask in asks])
        if body.stream:
            frames = _CompletionFrames(shape, envelope, usage, samples=samples)
            return await stream(request, generation, frames, intervals=intervals(asks, shown.stream_interval))
        await generation.finished(aborts=True)
        picked = [output for group in generation.groups for output in _best(group, samples)]
        choices = []
        for index, output in enumerate(picked):
            choices.append(shape.choice(index, index // samples, output))
            await pace.breathe()
        return json_reply(envelope.answer(choices, usage.count()))


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    return json_reply({"object": "list", "data": [_card(service_of(request))]})


async def show_model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}."""
    card, asked = _card(service_of(request)), request.match_info["id"]
    if asked != card["id"]:
        raise BadRequest(
            f"the model {asked!r} does not exist; this server has {card['id']!r}", param="model", code="model_not_found", status=404
        )
    return json_reply(card)


class _Shape:
    """Choices of one request. `texts[i]` is prompt i as the client wrote it, None where it sent ids."""

    def __init__(self, service: Service, body: CompletionBody, texts: list[str | None]) -> None:
        self._tokenizer = service.manager.tokenizer
        self._name = token_names(self._tokenizer, body)
        self._texts = texts
        self._echo = body.echo is True
        self._top = body.logprobs
        self._ids = ids_of(body)

    @property
    def silent(self) -> bool:
        """Whether a chunk without text says nothing."""
        return self._top is None and not self._ids.output

    def echoed(self, prompt: int, output: Output) -> str:
        """The text of prompt number `prompt`, if it is to be shown before its output."""
        if not self._echo:
            return ""
        text = self._texts[prompt]
        return self._tokenizer.decode(output.prompt) if text is None or output.cut else text

    def choice(self, index: int, prompt: int, output: Output) -> dict[str, Any]:
        """A whole choice."""
        text = self.echoed(prompt, output) + output.text
        return self.part(index, output, text, 0, len(output.ids), finish=output.finish, offset=0)[0]

    def part(
        self, index: int, output: Output, text: str, start: int, stop: int, *, finish: Finish | None, offset: int
    ) -> tuple[dict[str, Any], int]:
        """A choice with ids `[start, stop)`; what belongs to the prompt comes with the first of them. `offset`: characters of the tokens
        before; those up to its end are returned too."""
        logprobs = None
        if self._top is not None:
            entries = output_entries(output.ids[start:stop], output.logprobs[start:stop])
            if self._echo and start == 0:
                entries = prompt_entries(output) + entries
            logprobs, offset = completion_logprobs(self._tokenizer, self._name, entries, top=self._top, offset=offset)
        ids = (self._ids.of_prompt(output) if start == 0 else {}) | self._ids.of_output(output, start, stop)
        return {"index": index, "text": text, "logprobs": logprobs, **ids, **ending(finish)}, offset


class _CompletionFrames:
    """Chunks of a completion; `samples` outputs for each prompt."""

    aborts_are_errors = True

    def __init__(self, shape: _Shape, envelope: Envelope, usage: Usage, *, samples: int) -> None:
        self._shape = shape
        self._usage = usage
        self._samples = samples
        self._head = envelope.chunk_head()
        self._offsets: dict[int, int] = {}

    def opening(self) -> bytes:
        return b""

    def frame(self, index: int, output: Output, piece: Piece) -> bytes:
        text = piece.text
        if index not in self._offsets:
            self._offsets[index] = 0
            text = self._shape.echoed(index // self._samples, output) + text
        if not text and piece.finish is None and self._shape.silent:
            return b""
        choice, self._offsets[index] = self._shape.part(
            index, output, text, piece.start, piece.stop, finish=piece.finish, offset=self._offsets[index]
        )
        return self._head + msgspec.json.encode(choice) + self._usage.tail()

    def closing(self) -> bytes:
        return self._usage.last_chunk(self._head) + DONE


def _check(body: CompletionBody, wishes: Wishes) -> int:
    """Checks across fields; the samples to return of each prompt. With `best_of`, `wishes` then ask for that many."""
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_TOP_LOGPROBS:
        raise BadRequest(f"logprobs must be between 0 and {MAX_TOP_LOGPROBS}, got {body.logprobs}", param="logprobs")
    samples: int = wishes.sampling.get("n", 1)
    # An n that is wrong by itself is admission's to refuse.
    if body.best_of is not None and type(samples) is int and samples >= 1:
        if not samples <= body.best_of <= MAX_SAMPLES:
            raise BadRequest(f"best_of must be between n ({samples}) and {MAX_SAMPLES}, got {body.best_of}", param="best_of")
        if body.stream and body.best_of > samples:
            raise BadRequest("best_of above n cannot be streamed: the best are known at the end", param="best_of")
        wishes.sampling["n"], wishes.names["n"] = body.best_of, "best_of"
    return samples


def _ask(body: CompletionBody, wishes: Wishes, prompt: str | list[int], index: int, count: int | None, manager: TokenizerManager) -> Ask:
    ranked = body.best_of is not None and body.best_of > 1
    check_rid(wishes.options.get("rid"), count)
    options = {
        **wishes.options,
        **pick_all({name: getattr(body, name) for name in PER_PROMPT}, index, count),
        **pick_room(body, index, count, wishes.sampling.get("n")),
        "return_logprob": body.logprobs is not None or ranked,
        "top_logprobs_num": body.logprobs or 0,
        "logprob_start_len": 0 if body.echo and body.logprobs is not None else -1,
    }
    names = {**wishes.names, "text": "prompt", "input_ids": "prompt", "top_logprobs_num": "logprobs"}
    special = body.add_special_tokens is not False
    return admit(
        prompt, wishes.sampling, options, limits=manager.limits, names=names, defaults=manager.defaults.completions, special=special
    )


def _prompts(prompt: str | list[Any]) -> tuple[list[str | list[int]], bool]:
    """A string, token ids, or a list of either; and whether it was a list of them."""
    if isinstance(prompt, str):
        return [prompt], False
    kind: Any = list[str] if prompt and isinstance(prompt[0], str) else list[list[int]]
    single = bool(prompt) and isinstance(prompt[0], int)
    try:
        found = [msgspec.convert(prompt, list[int])] if single else msgspec.convert(prompt, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"prompt: {error}", param="prompt") from None
    if not 1 <= len(found) <= MAX_BATCH:
        raise BadRequest(f"prompt must hold between 1 and {MAX_BATCH} prompts, got {len(found)}", param="prompt")
    return list(found), not single


def _best(group: tuple[Output, ...], samples: int) -> list[Output]:
    """The samples with the highest mean log-probability, best first; all of them in order when there is no choice."""
    if len(group) == samples:
        return list(group)

    def mean(output: Output) -> float:
        values = [entry.logprob for entry in output.logprobs if entry is not None]
        return sum(values) / len(values) if values else float("-inf")

    return sorted(group, key=mean, reverse=True)[:samples]


def _card(service: Service) -> dict[str, Any]:
    resolved = service.resolved
    return {
        "id": resolved.served_name,
        "object": "model",
        "created": 0,
        "owned_by": "radixpd",
        "root": resolved.served_name,
        "max_model_len": resolved.longest_request,
    }


ROUTES = (
    web.post("/v1/completions", completions),
    web.get("/v1/models", list_models),
    # A model's name may hold slashes.
    web.get("/v1/models/{id:.+}", show_model),
)
DOCS = {
    completions: Doc(
        "Complete one prompt or many",
        answer=Completion,
        body=Body(
            CompletionBody,
            fields={
                "prompt": {"anyOf": [one_or_many({"type": "string"}, MAX_BATCH), one_or_many(TOKEN_IDS, MAX_BATCH)]},
                "response_format": RESPONSE_FORMAT,
            },
            ranges={"logprobs": (0, MAX_TOP_LOGPROBS)},
            lists=(1, MAX_BATCH),
            wishes=WISHES,
            harmless=HARMLESS,
            refused={**LATER, **CHATS},
        ),
        headers=HEADERS,
        events=Completion,
        errors=(499, 502, 503, 504),
    ),
    list_models: Doc("The served models: one", answer=ModelList),
    show_model: Doc("One model", answer=ModelCard, errors=(404,)),
}
