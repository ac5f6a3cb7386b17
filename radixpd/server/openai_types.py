"""What OpenAI clients send: the bodies of both routes, and the sampling fields under their OpenAI names.

Fields of a body fall into five sets: of the route's struct, sampling (translated to native names), options (as on the native route),
harmless (accepted, no effect on any answer) and refused by name (admission's table `LATER`); anything else is unknown: ignored, with one
warning in the log.
Invariant: a field we accept acts. The model's name picks nothing: one model is served. Called by the two OpenAI routes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from radixpd.errors import BadRequest
from radixpd.runtime.admission import CHATS, LATER, read, refuse_later
from radixpd.server.replies import warn_unknown
from radixpd.server.response_format import constraint

__all__ = ["HARMLESS", "WISHES", "ChatBody", "CompletionBody", "StreamOptions", "Wishes", "split"]

# OpenAI's (and other servers') name -> ours. Where two names mean one thing, they may not differ.
SAMPLING_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
    "stop": "stop",
    "stop_regex": "stop_regex",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "n": "n",
    "seed": "sampling_seed",
    "sampling_seed": "sampling_seed",
    "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
    "include_stop_str_in_output": "no_stop_trim",
    "no_stop_trim": "no_stop_trim",
    "stream_interval": "stream_interval",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "structural_tag": "structural_tag",
}
OPTION_NAMES = frozenset(("rid", "priority", "extra_key", "cache_salt", "truncate_prompt_tokens", "no_logs", "log_metrics"))
WISHES = {**SAMPLING_NAMES, **{name: name for name in sorted(OPTION_NAMES)}}  # for the description of the routes
HARMLESS = frozenset(
    ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"]
)

Body = TypeVar("Body", bound="CompletionBody | ChatBody")


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CompletionBody(msgspec.Struct, kw_only=True):
    """What only `/v1/completions` reads. A list of names, priorities, keys, salts or rooms holds one for each prompt."""

    model: str | None = None
    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    rid: str | list[str] | None = None
    priority: int | list[int] | None = None
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ChatBody(msgspec.Struct, kw_only=True):
    """What only `/v1/chat/completions` reads. A list of rooms holds one for each sample."""

    model: str | None = None
    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


@dataclass(frozen=True, slots=True)
class Wishes:
    """Sampling and options under native names, and how the client called them."""

    sampling: dict[str, Any]
    options: dict[str, Any]
    names: dict[str, str]


def split(raw: dict[str, Any], kind: type[Body]) -> tuple[Body, Wishes]:
    """A raw body as the route's struct and the wishes that admission reads."""
    refuse_later(raw, chat=kind is ChatBody)
    warn_unknown(raw, {*kind.__struct_fields__, *SAMPLING_NAMES, *OPTION_NAMES, *HARMLESS, *LATER, *CHATS})
    if raw.get("stream_options") is not None and not raw.get("stream"):
        raise BadRequest("stream_options is allowed only with stream: true", param="stream_options")
    sampling: dict[str, Any] = {}
    names: dict[str, str] = {}
    for given, ours in SAMPLING_NAMES.items():
        if raw.get(given) is None:
            continue
        # False is no 0.
        if ours in sampling and (type(sampling[ours]), sampling[ours]) != (type(raw[given]), raw[given]):
            raise BadRequest(f"{given} and {names[ours]} mean the same: give one of them, or the same value twice", param=given)
        sampling[ours], names[ours] = raw[given], given
    for given in SAMPLING_NAMES:
        names.setdefault(SAMPLING_NAMES[given], given)
    options = {name: raw[name] for name in OPTION_NAMES if name in raw}
    body = read(kind, raw)
    for ours, value in constraint(body.response_format).items():
        if ours in sampling:
            raise BadRequest(f"response_format and {ours} mean the same: give one of them", param="response_format")
        sampling[ours], names[ours] = value, "response_format"
    return body, Wishes(sampling, options, names)
