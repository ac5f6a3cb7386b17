"""`/v1/chat/completions`: messages through the model's chat template, then an ordinary generation.

Without `max_tokens` an answer may fill the rest of the context. A conversation that ends with an assistant message gets a new assistant
turn unless `continue_final_message` asks to go on with that message. What the model thinks and which tools it calls is read out of its
output (`chat_shape`) if the server has parsers for that. Called by the application's router.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from radixpd.errors import BadRequest
from radixpd.grammar.thinking import behind_thought
from radixpd.runtime.admission import LATER, MAX_SAMPLES, Ask, admit
from radixpd.runtime.output import Output
from radixpd.server.answers import ChatChunk, ChatCompletion
from radixpd.server.batch import pick_room, refusals_told
from radixpd.server.chat_shape import ChatFrames, Style, Turn
from radixpd.server.docs import Body, Doc
from radixpd.server.messages import MESSAGES, rendered
from radixpd.server.openai_shape import HEADERS, Envelope, Usage, ids_of, token_names, wants_journey
from radixpd.server.openai_types import HARMLESS, WISHES, ChatBody, Wishes, split
from radixpd.server.replies import json_reply, read_object
from radixpd.server.response_format import RESPONSE_FORMAT
from radixpd.server.service import Service, service_of
from radixpd.server.stream import intervals, stream
from radixpd.server.tools import TOOL_CHOICE, TOOLS, Tools, tools_of
from radixpd.text.reading import Reading
from radixpd.text.reasoning import PARSERS, Splitter, starts_inside

__all__ = ["DOCS", "ROUTES"]

MAX_TOP = 20
MIXING = ("json_schema", "regex")  # grammars that can stand beside calls


@dataclass(frozen=True, slots=True)
class _Talk:
    """An admitted chat. `tools`: what may be called; `thinks`: the server has a parser for thoughts; `inside`: the output begins in one."""

    ask: Ask
    tools: Tools
    thinks: bool
    inside: bool | None

    def reading(self, body: ChatBody) -> Reading:
        """Of one output."""
        splitter = Splitter(inside=self.inside) if self.thinks else None
        reader = self.tools.format.reader(self.tools.names) if self.tools.format else None
        return Reading(splitter, reader, separate=body.separate_reasoning is not False, most=None if self.tools.many else 1)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    service = service_of(request)
    journeys = wants_journey(request)
    raw = await read_object(request)
    with refusals_told(raw, service.manager):
        service.manager.check_open()
        body, wishes = split(raw, ChatBody)
        _check(body)
        talk = await _talk(body, wishes, service)
        started = await service.manager.submit([talk.ask])
    shown = service.resolved.settings.generation
    envelope = Envelope("chatcmpl", "chat.completion", "chat.completion.chunk", service.resolved.served_name)
    async with started as generation:
        style = _style(service, body, talk)
        turns = [_turn(index, output, talk, body, style) for index, output in enumerate(generation.outputs)]
        thoughts = (lambda: sum(turn.thought_tokens() for turn in turns)) if talk.thinks else None
        usage = Usage(generation, shown.enable_cache_report, body.stream_options, journeys, thoughts)
        ids = style.ids.of_prompt(generation.outputs[0])
        if body.stream:
            frames = ChatFrames(turns, envelope, usage, echoed=style.echoed, ids=ids)
            return await stream(request, generation, frames, intervals=intervals([talk.ask], shown.stream_interval))
        await generation.finished(aborts=True)
        return json_reply(envelope.answer([turn.whole() for turn in turns], usage.count(), ids))


def _style(service: Service, body: ChatBody, talk: _Talk) -> Style:
    tokenizer = service.manager.tokenizer
    return Style(
        tokenizer,
        token_names(tokenizer, body),
        logprobs=body.logprobs is True,
        ids=ids_of(body),
        echoed=_last_answer(body.messages) if body.echo else "",
        thoughts=talk.thinks and body.separate_reasoning is not False,
        flowing=body.stream_reasoning is not False,
        id_length=talk.tools.format.id_length if talk.tools.format else None,
    )


def _turn(index: int, output: Output, talk: _Talk, body: ChatBody, style: Style) -> Turn:
    return Turn(index, output, talk.reading(body), style, skip_special=talk.ask.skip_special)


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


async def _talk(body: ChatBody, wishes: Wishes, service: Service) -> _Talk:
    options = {
        **wishes.options,
        **pick_room(body, 0, None, wishes.sampling.get("n")),
        "return_logprob": body.logprobs,
        "top_logprobs_num": body.top_logprobs,
    }
    names = {**wishes.names, "text": "messages", "top_logprobs_num": "top_logprobs"}
    # Admission comes first: a request that is wrong anyway should not cost a template run.
    manager, shown = service.manager, service.resolved.settings.generation
    special = body.add_special_tokens is True
    ask = admit("", wishes.sampling, options, limits=manager.limits, names=names, defaults=manager.defaults.chat, special=special)
    tools = tools_of(body.tools, body.tool_choice, many=body.parallel_tool_calls, parser=shown.tool_call_parser)
    mixes = any(name in wishes.sampling for name in MIXING)
    grammar = tools.grammar(ask.params.grammar, mixes=mixes, served=manager.limits.grammars)
    prompt = await rendered(
        service,
        body.messages,
        generation=body.add_generation_prompt,
        continued=body.continue_final_message is True,
        template_kwargs=body.chat_template_kwargs,
        tools=body.tools,
        tool_choice=body.tool_choice,
    )
    thinking = PARSERS[shown.reasoning_parser] if shown.reasoning_parser else None
    continues = _last_answer(body.messages) if body.continue_final_message else None
    inside = starts_inside(thinking, prompt, continues=continues) if thinking else None
    if grammar is not None and thinking is not None:
        grammar = behind_thought(grammar, inside=inside)
    # The marks of calls are special tokens in some vocabularies.
    skip_special = ask.skip_special and tools.format is None
    ask = replace(ask, prompt=prompt, params=replace(ask.params, grammar=grammar), skip_special=skip_special)
    return _Talk(ask, tools, thinking is not None, inside)


ROUTES = (web.post("/v1/chat/completions", chat_completions),)
DOCS = {
    chat_completions: Doc(
        "Answer a conversation",
        answer=ChatCompletion,
        body=Body(
            ChatBody,
            fields={"messages": MESSAGES, "response_format": RESPONSE_FORMAT, "tools": TOOLS, "tool_choice": TOOL_CHOICE},
            ranges={"top_logprobs": (0, MAX_TOP)},
            lists=(1, MAX_SAMPLES),
            wishes=WISHES,
            harmless=HARMLESS - {"parallel_tool_calls"},
            refused=LATER,
        ),
        headers=HEADERS,
        events=ChatChunk,
        errors=(499, 502, 503, 504),
    ),
}
