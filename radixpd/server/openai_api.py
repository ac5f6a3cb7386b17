"""`/v1/completions` and `/v1/models`.

Without `max_tokens` a completion has 16 tokens, as at OpenAI. `max_tokens` 0 with `echo` returns the prompt's scores alone. `best_of`
computes that many samples and returns the `n` with the highest mean log-probability. Called by the application's router.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from radixpd.errors import BadRequest
from radixpd.runtime.admission import LATER, MAX_SAMPLES, MAX_TOP_LOGPROBS, Ask, admit
from radixpd.runtime.output import Output
from radixpd.server.answers import Completion, ModelCard, ModelList
from radixpd.server.docs import TOKEN_IDS, Body, Doc, one_or_many
from radixpd.server.openai_shape import Envelope, Usage, completion_logprobs, ending, output_entries, prompt_entries
from radixpd.server.openai_types import HARMLESS, WISHES, CompletionBody, Wishes, split
from radixpd.server.replies import json_reply, read_object
from radixpd.server.service import Service, service_of
from radixpd.server.stream import DONE, Piece, stream

__all__ = ["DOCS", "ROUTES"]

DEFAULT_TOKENS = 16
MAX_PROMPTS = 4096


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    service = service_of(request)
    service.manager.check_open()
    body, wishes = split(await read_object(request), CompletionBody)
    samples = _check(body, wishes)
    asks = [_ask(body, wishes, prompt, service) for prompt in _prompts(body.prompt)]
    if len(asks) > 1 and wishes.options.get("rid") is not None:
        raise BadRequest("rid names one prompt: send one prompt, or no rid", param="rid")
    shown = service.resolved.settings.generation
    envelope = Envelope("cmpl", "text_completion", "text_completion", service.resolved.served_name)
    async with await service.manager.submit(asks) as generation:
        usage = Usage(generation, shown.enable_cache_report, body.stream_options)
        shape = _Shape(service, body, [ask.prompt if isinstance(ask.prompt, str) else None for ask in asks], asks[0].params.n)
        if body.stream:
            return await stream(request, generation, _CompletionFrames(shape, envelope, usage), interval=shown.stream_interval)
        await generation.finished(aborts=True)
        picked = [output for group in generation.groups for output in _best(group, samples)]
        choices = [shape.choice(index, output) for index, output in enumerate(picked)]
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
    """Choices of one request. `texts[i]` is prompt i as the client wrote it, None where it sent ids; `samples` per prompt."""

    def __init__(self, service: Service, body: CompletionBody, texts: list[str | None], samples: int) -> None:
        self._tokenizer = service.manager.tokenizer
        self._texts = texts
        self._samples = samples
        self._echo = body.echo is True
        self._top = body.logprobs

    def echoed(self, index: int, output: Output) -> str:
        """The prompt's text, if it is to be shown before output `index`."""
        if not self._echo:
            return ""
        text = self._texts[index // self._samples]
        return self._tokenizer.decode(output.prompt) if text is None else text

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        """A whole choice."""
        echoed = self.echoed(index, output)
        logprobs = self.logprobs(output, start=0, stop=len(output.ids), offset=0)
        return {"index": index, "text": echoed + output.text, "logprobs": logprobs, **ending(output.finish)}

    def logprobs(self, output: Output, *, start: int, stop: int, offset: int) -> dict[str, Any] | None:
        """Log-probabilities of ids `[start, stop)`, preceded by the prompt's when it is echoed and `start` is 0."""
        if self._top is None:
            return None
        entries = output_entries(output.ids[start:stop], output.logprobs[start:stop])
        if self._echo and start == 0:
            entries = prompt_entries(output) + entries
        return completion_logprobs(self._tokenizer, entries, top=self._top, offset=offset)


class _CompletionFrames:
    """Chunks of a completion."""

    aborts_are_errors = True

    def __init__(self, shape: _Shape, envelope: Envelope, usage: Usage) -> None:
        self._shape = shape
        self._usage = usage
        self._head = envelope.chunk_head()
        self._offsets: dict[int, int] = {}
        self._begun: set[int] = set()

    def opening(self) -> bytes:
        return b""

    def frame(self, index: int, output: Output, piece: Piece) -> bytes:
        text = piece.text
        if index not in self._begun:
            self._begun.add(index)
            text = self._shape.echoed(index, output) + text
        logprobs = self._shape.logprobs(output, start=piece.start, stop=piece.stop, offset=self._offsets.get(index, 0))
        if logprobs and logprobs["tokens"]:
            self._offsets[index] = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
        if not text and logprobs is None and piece.finish is None:
            return b""
        choice = {"index": index, "text": text, "logprobs": logprobs, **ending(piece.finish)}
        return self._head + msgspec.json.encode(choice) + self._usage.tail()

    def closing(self) -> bytes:
        return self._usage.last_chunk(self._head) + DONE


def _check(body: CompletionBody, wishes: Wishes) -> int:
    """Checks across fields; the samples to return of each prompt. With `best_of`, `wishes` then ask for that many."""
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_TOP_LOGPROBS:
        raise BadRequest(f"logprobs must be between 0 and {MAX_TOP_LOGPROBS}, got {body.logprobs}", param="logprobs")
    samples: int = wishes.sampling.get("n", 1)
    if body.best_of is not None:
        if not isinstance(samples, int) or not max(1, samples) <= body.best_of <= MAX_SAMPLES:
            raise BadRequest(f"best_of must be between n ({samples}) and {MAX_SAMPLES}, got {body.best_of}", param="best_of")
        if body.stream and body.best_of > samples:
            raise BadRequest("best_of above n cannot be streamed: the best are known at the end", param="best_of")
        wishes.sampling["n"] = body.best_of
    return samples


def _ask(body: CompletionBody, wishes: Wishes, prompt: str | list[int], service: Service) -> Ask:
    ranked = body.best_of is not None and body.best_of > 1
    options = {
        **wishes.options,
        "return_logprob": body.logprobs is not None or ranked,
        "top_logprobs_num": body.logprobs or 0,
        "logprob_start_len": 0 if body.echo and body.logprobs is not None else -1,
    }
    names = {**wishes.names, "text": "prompt", "input_ids": "prompt", "top_logprobs_num": "logprobs"}
    return admit(prompt, wishes.sampling, options, limits=service.manager.limits, names=names, default_tokens=DEFAULT_TOKENS)


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """A string, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    kind: Any = list[str] if prompt and isinstance(prompt[0], str) else list[list[int]]
    single = bool(prompt) and isinstance(prompt[0], int)
    try:
        found = [msgspec.convert(prompt, list[int])] if single else msgspec.convert(prompt, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"prompt: {error}", param="prompt") from None
    if not 1 <= len(found) <= MAX_PROMPTS:
        raise BadRequest(f"prompt must hold between 1 and {MAX_PROMPTS} prompts, got {len(found)}", param="prompt")
    return list(found)


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
            fields={"prompt": {"anyOf": [one_or_many({"type": "string"}, MAX_PROMPTS), one_or_many(TOKEN_IDS, MAX_PROMPTS)]}},
            ranges={"logprobs": (0, MAX_TOP_LOGPROBS), "best_of": (1, MAX_SAMPLES)},
            wishes=WISHES,
            harmless=HARMLESS,
            refused=LATER,
        ),
        events=Completion,
        errors=(499, 503),
    ),
    list_models: Doc("The served models: one", answer=ModelList),
    show_model: Doc("One model", answer=ModelCard, errors=(404,)),
}
