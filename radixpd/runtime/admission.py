"""The one admission function: every route's request becomes an `Ask`, or a `BadRequest` that names the field and the range.

All ranges are closed and finite, all lists are capped; what passes here cannot hurt the engine. Routes translate their own names into the
native ones (`Sampling`, `Options`) and hand over `names`, so that an error speaks of the field that the client wrote. Whether a prompt fits
the context is known only after tokenizing: the tokenizer manager checks that. Called by the routes and by the offline interface.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from radixpd.core.handoff import Room
from radixpd.core.page_hash import namespace
from radixpd.core.request import Grammar, LogprobParams, SamplingParams
from radixpd.errors import BadRequest
from radixpd.grammar.errors import GrammarError
from radixpd.grammar.requests import FIELDS, MAX_SOURCE, grammar_of
from radixpd.runtime.fields import (
    CHATS,
    LATER,
    MAX_SAMPLES,
    MAX_TOP_LOGPROBS,
    NOTHING,
    RANGES,
    TOKENS,
    Options,
    Sampling,
    check_ranges,
    read,
    refuse_later,
)
from radixpd.runtime.rooms import MAX_HOST, NO_ROOMS, RoomRule
from radixpd.text.stop import StopRules
from radixpd.text.stop_pattern import MAX_PATTERN

__all__ = [
    "CHATS", "LATER", "MAX_BIAS", "MAX_HOST", "MAX_LIST", "MAX_NAME", "MAX_PATTERN", "MAX_PATTERNS", "MAX_SAMPLES", "MAX_SOURCE",
    "MAX_STOP_LENGTH", "MAX_TOP_LOGPROBS", "NEUTRAL", "NOTHING", "RANGES", "TOKENS", "Ask", "Limits", "Options", "Sampling", "admit",
    "read", "refuse_later", "too_long",
]  # fmt: skip

MAX_LIST = 128  # stop strings, stop token ids, token_ids_logprob
MAX_STOP_LENGTH = 1024
MAX_PATTERNS = 16
MAX_BIAS = 1024
MAX_NAME = 1024  # characters of rid, extra_key, cache_salt
GREEDY_BELOW = 1e-6
NEUTRAL = Sampling(max_new_tokens=128)


@dataclass(frozen=True, slots=True)
class Limits:
    """What this server can hold. `auto_truncate`: what is too long is cut instead of refused; `rooms`: what it does with
    `bootstrap_*`; `grammars`: whether output can be constrained."""

    vocab_size: int
    context_length: int
    pool_tokens: int
    max_running: int
    auto_truncate: bool = False
    rooms: RoomRule = NO_ROOMS
    grammars: bool = True

    @property
    def longest(self) -> int:
        """Prompt plus output of one request."""
        return min(self.context_length, self.pool_tokens)


@dataclass(frozen=True, slots=True)
class Ask:
    """One admitted prompt. `clamp`: the output limit is a default, to be cut to what fits; `seeded`: the client chose the seed;
    `special`: a text prompt gets the tokenizer's own first tokens; `rules`: the texts that end an output; `interval`: tokens of a streamed
    chunk, if not the server's; `truncate`: the prompt is cut to its last so many tokens (-1: to what fits); `names`: native name -> the
    name that the client used."""

    prompt: str | np.ndarray
    params: SamplingParams
    special: bool
    clamp: bool
    seeded: bool
    rid: str | None
    priority: int
    namespace: bytes
    skip_special: bool
    keep_stop: bool
    rules: StopRules
    interval: int | None
    truncate: int | None
    names: Mapping[str, str]
    no_logs: bool = False  # no line in the request log, nothing in a crash dump
    log_metrics: bool = True  # counts in the latencies of /metrics
    room: Room | None = None  # where it is handed over between servers

    @property
    def continued(self) -> bool:
        """Whether this server computes the prompt only: a decode server answers the client, also about the prompt."""
        return self.room is not None and not self.room.peer


def admit(
    prompt: str | list[int],
    sampling: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    limits: Limits,
    names: Mapping[str, str],
    defaults: Sampling = NEUTRAL,
    special: bool = True,
) -> Ask:
    """Validate everything about one prompt. `defaults` stand for what the request does not say; its minimum raises the default limit."""
    wish, extra = read(Sampling, sampling, names), read(Options, options, names)
    for part in (wish, extra):
        check_ranges(part, names)
    if wish.spaces_between_special_tokens is False:
        raise BadRequest("spaces_between_special_tokens: false is not offered", param="spaces_between_special_tokens")
    given, wish = wish, _with_defaults(wish, defaults)
    params = _params(wish, _logprobs(extra, limits, names), limits=limits, names=names, clamp=given.max_new_tokens is None)
    parts = {tag: value for tag in ("extra_key", "cache_salt") if (value := _name(extra, tag, names))}
    return Ask(
        prompt=prompt if isinstance(prompt, str) else _prompt_ids(prompt, limits, names, whole=extra.truncate_prompt_tokens is None),
        params=params,
        special=special,
        clamp=given.max_new_tokens is None,
        seeded=wish.sampling_seed is not None,
        rid=_name(extra, "rid", names),
        priority=extra.priority or 0,
        namespace=namespace(parts),
        skip_special=wish.skip_special_tokens is not False,
        keep_stop=wish.no_stop_trim is True,
        rules=_rules(params),
        interval=wish.stream_interval,
        truncate=_truncate(extra),
        names=names,
        no_logs=extra.no_logs is True,
        log_metrics=extra.log_metrics is not False,
        room=limits.rooms.room(extra.bootstrap_host, extra.bootstrap_port, extra.bootstrap_room),
    )


def too_long(limits: Limits, prompt: int, wanted: int, *, param: str) -> BadRequest:
    """The refusal of a prompt and output that do not fit this server."""
    what = "maximum context length" if limits.longest == limits.context_length else "KV pool"
    return BadRequest(
        f"this server's {what} is {limits.longest} tokens, but the request needs {prompt + wanted}: {prompt} in the prompt and {wanted} to "
        "generate",
        param=param,
        code="context_length_exceeded",
    )


def _with_defaults(wish: Sampling, defaults: Sampling) -> Sampling:
    """The request's wishes over the defaults, with one name for the seed."""
    if wish.sampling_seed is None:
        wish = msgspec.structs.replace(wish, sampling_seed=wish.seed)
    elif wish.seed is not None and wish.seed != wish.sampling_seed:
        raise BadRequest("seed and sampling_seed mean the same: give one of them, or the same value twice", param="seed")
    given = {name: value for name in wish.__struct_fields__ if (value := getattr(wish, name)) is not None}
    if wish.max_new_tokens is not None and wish.min_new_tokens is None and defaults.min_new_tokens:
        given["min_new_tokens"] = min(wish.max_new_tokens, defaults.min_new_tokens)
    return msgspec.structs.replace(defaults, **given)


def _params(wish: Sampling, logprobs: LogprobParams | None, *, limits: Limits, names: Mapping[str, str], clamp: bool) -> SamplingParams:
    most, least = wish.max_new_tokens or 0, wish.min_new_tokens or 0
    if least > most and not clamp:
        shown = names.get("min_new_tokens", "min_new_tokens")
        raise BadRequest(f"{shown} must be at most {names.get('max_new_tokens', 'max_new_tokens')} ({most}), got {least}", param=shown)
    samples = wish.n or 1
    if samples > limits.max_running:
        shown = names.get("n", "n")
        raise BadRequest(f"{shown} must be at most {limits.max_running}, the requests that run at once here, got {samples}", param=shown)
    temperature = 1.0 if wish.temperature is None else wish.temperature
    greedy = temperature < GREEDY_BELOW or wish.top_k == 1
    return SamplingParams(
        max_new_tokens=max(most, least),
        min_new_tokens=least,
        temperature=0.0 if greedy else temperature,
        top_p=1.0 if wish.top_p is None else wish.top_p,
        top_k=wish.top_k or -1,
        min_p=wish.min_p or 0.0,
        frequency_penalty=wish.frequency_penalty or 0.0,
        presence_penalty=wish.presence_penalty or 0.0,
        repetition_penalty=1.0 if wish.repetition_penalty is None else wish.repetition_penalty,
        logit_bias=_bias(wish, limits, names),
        stop=_stop(wish),
        stop_regex=_patterns(wish),
        stop_token_ids=_ids(wish.stop_token_ids or [], "stop_token_ids", limits, names),
        ignore_eos=wish.ignore_eos is True,
        n=samples,
        seed=wish.sampling_seed or 0,
        grammar=_grammar(wish, limits, names),
        logprobs=logprobs,
    )


def _grammar(wish: Sampling, limits: Limits, names: Mapping[str, str]) -> Grammar | None:
    given = [field for field in FIELDS if getattr(wish, field) is not None]
    if not given:
        return None
    shown = names.get(given[0], given[0])
    if len(given) > 1:
        raise BadRequest(f"{shown} and {names.get(given[1], given[1])}: an output follows one grammar", param=shown)
    if not limits.grammars:
        raise BadRequest(f"{shown} is not served by this server (--grammar-backend none)", param=shown, code="unsupported_field")
    try:
        return grammar_of(given[0], getattr(wish, given[0]))
    except GrammarError as error:
        raise BadRequest(f"{shown}: {error}", param=shown) from None


def _logprobs(extra: Options, limits: Limits, names: Mapping[str, str]) -> LogprobParams | None:
    ids = _ids(extra.token_ids_logprob or [], "token_ids_logprob", limits, names)
    top = extra.top_logprobs_num or 0
    if not extra.return_logprob:
        return None
    start = -1 if extra.logprob_start_len is None else extra.logprob_start_len
    return LogprobParams(top=min(top, limits.vocab_size), start=start, token_ids=ids)


def _ids(ids: list[int], name: str, limits: Limits, names: Mapping[str, str]) -> tuple[int, ...]:
    shown = names.get(name, name)
    if len(ids) > MAX_LIST:
        raise BadRequest(f"{shown} may hold at most {MAX_LIST} ids, got {len(ids)}", param=shown)
    for token in ids:
        if not 0 <= token < limits.vocab_size:
            raise BadRequest(f"{shown}: ids must be between 0 and {limits.vocab_size - 1}, got {token}", param=shown)
    return tuple(ids)


def _bias(wish: Sampling, limits: Limits, names: Mapping[str, str]) -> tuple[tuple[int, float], ...]:
    bias = wish.logit_bias or {}
    if len(bias) > MAX_BIAS:
        raise BadRequest(f"logit_bias may hold at most {MAX_BIAS} entries, got {len(bias)}", param="logit_bias")
    pairs: dict[int, float] = {}
    for key, value in bias.items():
        if not re.fullmatch(r"[0-9]{1,10}", str(key), re.ASCII) or int(key) >= limits.vocab_size:
            raise BadRequest(
                f"logit_bias: keys are token ids between 0 and {limits.vocab_size - 1}, got {str(key)[:40]!r}", param="logit_bias"
            )
        if not math.isfinite(value) or not -100 <= value <= 100:
            raise BadRequest(f"logit_bias: values must be between -100 and 100, got {value}", param="logit_bias")
        pairs[int(key)] = value
    return tuple(sorted(pairs.items()))


def _stop(wish: Sampling) -> tuple[str, ...]:
    stop = [wish.stop] if isinstance(wish.stop, str) else wish.stop or []
    if len(stop) > MAX_LIST:
        raise BadRequest(f"stop may hold at most {MAX_LIST} strings, got {len(stop)}", param="stop")
    for text in stop:
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise BadRequest(f"stop: strings must have between 1 and {MAX_STOP_LENGTH} characters, got {len(text)}", param="stop")
    return tuple(dict.fromkeys(stop))


def _patterns(wish: Sampling) -> tuple[str, ...]:
    patterns = [wish.stop_regex] if isinstance(wish.stop_regex, str) else wish.stop_regex or []
    if len(patterns) > MAX_PATTERNS:
        raise BadRequest(f"stop_regex may hold at most {MAX_PATTERNS} patterns, got {len(patterns)}", param="stop_regex")
    for source in patterns:
        if not 1 <= len(source) <= MAX_PATTERN:
            raise BadRequest(
                f"stop_regex: patterns must have between 1 and {MAX_PATTERN} characters, got {len(source)}", param="stop_regex"
            )
    return tuple(dict.fromkeys(patterns))


def _rules(params: SamplingParams) -> StopRules:
    """Stop strings and patterns, compiled."""
    try:
        return StopRules(params.stop, params.stop_regex)
    except ValueError as error:
        raise BadRequest(f"stop_regex: {error}", param="stop_regex") from None


def _truncate(extra: Options) -> int | None:
    keep = extra.truncate_prompt_tokens
    if keep == 0:
        raise BadRequest(f"truncate_prompt_tokens must be -1 or between 1 and {TOKENS}, got 0", param="truncate_prompt_tokens")
    return keep


def _name(extra: Options, field: str, names: Mapping[str, str]) -> str | None:
    value: str | None = getattr(extra, field)
    if value is not None and (len(value) > MAX_NAME or (field == "rid" and not value)):
        shown = names.get(field, field)
        raise BadRequest(f"{shown} must have between 1 and {MAX_NAME} characters, got {len(value)}", param=shown)
    return value


def _prompt_ids(ids: list[int], limits: Limits, names: Mapping[str, str], *, whole: bool) -> np.ndarray:
    shown = names.get("input_ids", "input_ids")
    if not ids:
        raise BadRequest(f"{shown} is empty", param=shown)
    if whole and not limits.auto_truncate and len(ids) > limits.longest:
        # Before anything is done with millions of numbers.
        raise too_long(limits, len(ids), 1, param=shown)
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        bad = min(ids) if min(ids) < 0 else max(ids)
        raise BadRequest(f"{shown}: ids must be between 0 and {limits.vocab_size - 1}, got {bad}", param=shown)
    return np.asarray(ids, dtype=np.int32)
