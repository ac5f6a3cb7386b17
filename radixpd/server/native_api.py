"""`/generate`: the native route, one prompt or a list of prompts, plain or streamed.

Each streamed event carries the whole answer so far (text, output_ids, meta_info), or with `--incremental-streaming-output` what is new of
it; what belongs to the prompt comes with the first and the last event of an output. Fields of features that this server lacks are refused
by name. Called by the application's router.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from radixpd.errors import BadRequest
from radixpd.grammar.requests import FIELDS
from radixpd.runtime.admission import CHATS, LATER, MAX_LIST, Ask, Sampling, admit, read, refuse_later
from radixpd.runtime.off_loop import Pace
from radixpd.runtime.output import Generation, Output
from radixpd.runtime.tokenizer_manager import TokenizerManager
from radixpd.server.answers import Generated
from radixpd.server.batch import MAX_BATCH, check_rid, pick, pick_all, pick_room, refusals_told
from radixpd.server.docs import TOKEN_IDS, Body, Doc, exactly_one, one_or_many, or_null, ref
from radixpd.server.faults import event
from radixpd.server.native_shape import NativeShape
from radixpd.server.replies import json_reply, read_object, warn_unknown
from radixpd.server.service import Service, service_of
from radixpd.server.stream import DONE, Piece, intervals, stream

__all__ = ["DOCS", "PER_PROMPT", "ROUTES", "SHARED", "GenerateBody", "token_ids"]

HARMLESS = frozenset(("custom_labels", "routing_key", "model"))
PER_PROMPT = ("rid", "return_logprob", "logprob_start_len", "top_logprobs_num", "priority", "extra_key", "cache_salt")
SHARED = ("truncate_prompt_tokens", "no_logs", "log_metrics")

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
    return_prompt_token_ids: bool | None = None
    stream: bool | None = None
    priority: int | list[int] | None = None
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None
    truncate_prompt_tokens: int | None = None
    no_logs: bool | None = None
    log_metrics: bool | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None


async def generate(request: web.Request) -> web.StreamResponse:
    """POST or PUT /generate."""
    service = service_of(request)
    raw, pace = await read_object(request), Pace()
    with refusals_told(raw, service.manager):
        service.manager.check_open()
        refuse_later(raw)
        _check_places(raw)
        warn_unknown(raw, {*GenerateBody.__struct_fields__, *HARMLESS, *LATER, *CHATS})
        body = read(GenerateBody, raw)
        prompts, batch = _prompts(body)
        asks = []
        for index, prompt in enumerate(prompts):
            asks.append(_ask(body, prompt, index, len(prompts) if batch else None, service.manager))
            await pace.breathe()
        started = await service.manager.submit(asks)
    shown = service.resolved.settings.generation
    async with started as generation:
        shapes = _shapes(body, service, asks, generation)
        if body.stream:
            frames = _NativeFrames(shapes, many=batch or len(shapes) > 1, whole=not shown.incremental_streaming_output)
            return await stream(request, generation, frames, intervals=intervals(asks, shown.stream_interval))
        await generation.finished()
        answers = []
        for shape, output in zip(shapes, generation.outputs):
            answers.append(shape.answer(output, upto=len(output.ids), text=output.text, finish=output.finish))
            await pace.breathe()
    return json_reply(answers if batch or len(answers) > 1 else answers[0])


class _NativeFrames:
    """Events of `/generate`: `whole` answers so far or what is new, with `index` when there are several outputs."""

    aborts_are_errors = False

    def __init__(self, shapes: list[NativeShape], *, many: bool, whole: bool) -> None:
        self._shapes = shapes
        self._many = many
        self._whole = whole

    def opening(self) -> bytes:
        return b""

    def frame(self, index: int, output: Output, piece: Piece) -> bytes:
        edge = piece.start == 0 or piece.finish is not None
        start, text = (0, output.text) if self._whole else (piece.start, piece.text)
        answer = self._shapes[index].answer(output, start=start, upto=piece.stop, text=text, finish=piece.finish, with_prompt=edge)
        if self._many:
            answer["index"] = index
        return event(answer)

    def closing(self) -> bytes:
        return DONE


def _shapes(body: GenerateBody, service: Service, asks: list[Ask], generation: Generation) -> list[NativeShape]:
    """One shape per output; the samples of one prompt share theirs. Where a decode server goes on, it tells the prompt's scores: routers
    put both servers' lists together."""
    tokenizer = service.manager.tokenizer
    texts, ids = body.return_text_in_logprobs is True, body.return_prompt_token_ids is True
    shapes: list[NativeShape] = []
    for ask, group in zip(asks, generation.groups):
        wish = ask.params.logprobs
        if wish is not None and ask.continued:
            wish = replace(wish, start=-1)
        shapes += [NativeShape(tokenizer, group[0], wish=wish, texts=texts, prompt_ids=ids)] * len(group)
    return shapes


def _check_places(raw: dict[str, Any]) -> None:
    """A constraint in the wrong place must not be ignored like any unknown field."""
    for name in ("response_format", *FIELDS):
        if raw.get(name) is not None:
            where = "is one of sampling_params" if name in FIELDS else "is for the OpenAI routes; here it is sampling_params.json_schema"
            raise BadRequest(f"{name} {where}", param=name)


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


def _ask(body: GenerateBody, prompt: str | list[int], index: int, count: int | None, manager: TokenizerManager) -> Ask:
    check_rid(body.rid, count)
    sampling: dict[str, Any] = pick(body.sampling_params, index, count, "sampling_params") or {}
    refuse_later(sampling)
    warn_unknown(sampling, {*Sampling.__struct_fields__, *LATER, *CHATS})
    options = pick_all({name: getattr(body, name) for name in PER_PROMPT}, index, count)
    options |= {name: getattr(body, name) for name in SHARED}
    options |= pick_room(body, index, count, sampling.get("n"))
    options["token_ids_logprob"] = token_ids(body.token_ids_logprob, index, count)
    names = {} if isinstance(prompt, str) else {"text": "input_ids"}
    return admit(prompt, sampling, options, limits=manager.limits, names=names, defaults=manager.defaults.native)


def token_ids(value: list[Any] | None, index: int, count: int | None) -> Any:
    """One list of ids for all prompts, or a list of lists, one for each."""
    per_prompt = value is not None and any(isinstance(item, list) or item is None for item in value)
    return pick(value, index, count, "token_ids_logprob") if per_prompt else value


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
            refused={**LATER, **CHATS},
            rule=exactly_one("text", "input_ids"),
            lists=(1, MAX_BATCH),
        ),
        events=Generated,
        errors=(502, 503, 504),
    ),
}
