"""`/generate`: the native route, one prompt or a list of prompts, plain or streamed.

Each streamed event carries the whole answer so far (text, output_ids, meta_info); the prompt's log-probabilities come with the first and
the last event of an output. Fields of features that this server lacks are refused by name. Called by the application's router.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from aiohttp import web

from radixpd.errors import BadRequest
from radixpd.runtime.admission import LATER, MAX_LIST, Ask, Limits, Sampling, admit, read, refuse_later
from radixpd.runtime.output import Generation, Output
from radixpd.server.answers import Generated
from radixpd.server.docs import TOKEN_IDS, Body, Doc, exactly_one, one_or_many, or_null, ref
from radixpd.server.native_shape import NativeShape
from radixpd.server.replies import json_reply, read_object, warn_unknown
from radixpd.server.service import Service, service_of
from radixpd.server.stream import DONE, Piece, event, stream

__all__ = ["DOCS", "ROUTES"]

MAX_BATCH = 4096
HARMLESS = frozenset(("log_metrics", "no_logs", "custom_labels", "routing_key", "model"))

Item = TypeVar("Item")


class GenerateBody(msgspec.Struct, kw_only=True):
    """The body of `/generate`. A list holds one value per prompt."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[Any] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    priority: int | list[int] | None = None
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None


async def generate(request: web.Request) -> web.StreamResponse:
    """POST or PUT /generate."""
    service = service_of(request)
    service.manager.check_open()
    raw = await read_object(request)
    refuse_later(raw)
    warn_unknown(raw, {*GenerateBody.__struct_fields__, *HARMLESS, *LATER})
    body = read(GenerateBody, raw)
    prompts, batch = _prompts(body)
    asks = [_ask(body, prompt, index, len(prompts) if batch else None, service.manager.limits) for index, prompt in enumerate(prompts)]
    async with await service.manager.submit(asks) as generation:
        shapes = _shapes(service, asks, generation, texts=body.return_text_in_logprobs is True)
        if body.stream:
            frames = _NativeFrames(shapes, many=batch or len(shapes) > 1)
            return await stream(request, generation, frames, interval=service.resolved.settings.generation.stream_interval)
        await generation.finished()
        answers = [
            shape.answer(output, upto=len(output.ids), text=output.text, finish=output.finish)
            for shape, output in zip(shapes, generation.outputs)
        ]
    return json_reply(answers if batch or len(answers) > 1 else answers[0])


class _NativeFrames:
    """Events of `/generate`: cumulative answers, with `index` when there are several outputs."""

    aborts_are_errors = False

    def __init__(self, shapes: list[NativeShape], *, many: bool) -> None:
        self._shapes = shapes
        self._many = many

    def opening(self) -> bytes:
        return b""

    def frame(self, index: int, output: Output, piece: Piece) -> bytes:
        edge = piece.start == 0 or piece.finish is not None
        answer = self._shapes[index].answer(output, upto=piece.stop, text=output.text, finish=piece.finish, with_prompt=edge)
        if self._many:
            answer["index"] = index
        return event(answer)

    def closing(self) -> bytes:
        return DONE


def _shapes(service: Service, asks: list[Ask], generation: Generation, *, texts: bool) -> list[NativeShape]:
    """One shape per output; the samples of one prompt share theirs."""
    tokenizer = service.manager.tokenizer
    shapes: list[NativeShape] = []
    for ask, group in zip(asks, generation.groups):
        shapes += [NativeShape(tokenizer, group[0], wish=ask.params.logprobs, texts=texts)] * len(group)
    return shapes


def _prompts(body: GenerateBody) -> tuple[list[str | list[int]], bool]:
    """The prompts, and whether the client sent a list of them."""
    if (body.text is None) == (body.input_ids is None):
        raise BadRequest("give either text or input_ids", param="text")
    if isinstance(body.text, str):
        return [body.text], False
    if body.text is not None:
        return _counted(list(body.text), "text"), True
    ids = body.input_ids or []
    if ids and isinstance(ids[0], list):
        return _counted(list(_as(list[list[int]], ids, "input_ids")), "input_ids"), True
    return [_as(list[int], ids, "input_ids")], False


def _counted(prompts: list[str | list[int]], name: str) -> list[str | list[int]]:
    if not 1 <= len(prompts) <= MAX_BATCH:
        raise BadRequest(f"{name} must hold between 1 and {MAX_BATCH} prompts, got {len(prompts)}", param=name)
    return prompts


def _ask(body: GenerateBody, prompt: str | list[int], index: int, count: int | None, limits: Limits) -> Ask:
    if count is not None and isinstance(body.rid, str):
        raise BadRequest("rid must be a list, one for each prompt", param="rid")
    sampling: dict[str, Any] = _pick(body.sampling_params, index, count, "sampling_params") or {}
    refuse_later(sampling)
    warn_unknown(sampling, {*Sampling.__struct_fields__, *LATER})
    options = {
        name: _pick(getattr(body, name), index, count, name)
        for name in ("rid", "return_logprob", "logprob_start_len", "top_logprobs_num", "priority", "extra_key", "cache_salt")
    }
    options["token_ids_logprob"] = _token_ids(body.token_ids_logprob, index, count)
    names = {} if isinstance(prompt, str) else {"text": "input_ids"}
    return admit(prompt, sampling, options, limits=limits, names=names)


def _pick(value: Item | list[Item] | None, index: int, count: int | None, name: str) -> Item | None:
    if not isinstance(value, list):
        return value
    if len(value) != (1 if count is None else count):
        raise BadRequest(f"{name} holds {len(value)} values for {1 if count is None else count} prompts", param=name)
    return value[index]


def _token_ids(value: list[Any] | None, index: int, count: int | None) -> Any:
    """One list of ids for all prompts, or a list of lists, one for each."""
    per_prompt = value is not None and any(isinstance(item, list) or item is None for item in value)
    return _pick(value, index, count, "token_ids_logprob") if per_prompt else value


def _as(kind: type[Item], value: Any, name: str) -> Item:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{name}: {error}", param=name) from None


ROUTES = (web.post("/generate", generate), web.put("/generate", generate))
DOCS = {
    generate: Doc(
        "Generate from one prompt or many; fields hold one value for all prompts or a list with one for each",
        answer=Generated | list[Generated],
        body=Body(
            GenerateBody,
            fields={
                "input_ids": or_null(one_or_many(TOKEN_IDS, MAX_BATCH)),
                "sampling_params": or_null(one_or_many(ref("Sampling"), MAX_BATCH)),
                "token_ids_logprob": or_null(one_or_many(or_null({**TOKEN_IDS, "minItems": 0, "maxItems": MAX_LIST}), MAX_BATCH)),
            },
            harmless=HARMLESS,
            refused=LATER,
            rule=exactly_one("text", "input_ids"),
            lists=(1, MAX_BATCH),
        ),
        events=Generated,
        errors=(503,),
    ),
}
