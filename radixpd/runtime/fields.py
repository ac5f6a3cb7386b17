"""The fields of a request under their native names: types, ranges, and what is refused because it comes later.

Invariant: every number has a closed, finite range (a NaN is outside of all). `admission` is built on these tables and passes them on to
the routes; nothing else imports this file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from radixpd.errors import BadRequest
from radixpd.runtime.rooms import MAX_ROOM

__all__ = ["CHATS", "LATER", "MAX_SAMPLES", "MAX_TOP_LOGPROBS", "TOKENS", "Options", "Sampling", "check_ranges", "read", "refuse_later"]

MAX_SAMPLES = 128
MAX_TOP_LOGPROBS = 128
TOKENS = 2**31 - 1

RANGES: dict[str, tuple[float, float]] = {
    "max_new_tokens": (0, TOKENS),
    "min_new_tokens": (0, TOKENS),
    "temperature": (0, 100),
    "top_p": (1e-6, 1),
    "top_k": (-1, TOKENS),
    "min_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "repetition_penalty": (0.01, 10),
    "n": (1, MAX_SAMPLES),
    "sampling_seed": (-(2**63), 2**63 - 1),
    "seed": (-(2**63), 2**63 - 1),
    "priority": (-(2**31), 2**31 - 1),
    "logprob_start_len": (-1, TOKENS),
    "top_logprobs_num": (0, MAX_TOP_LOGPROBS),
    "stream_interval": (1, 10**6),
    "truncate_prompt_tokens": (-1, TOKENS),
    "bootstrap_port": (1, 65_535),
    "bootstrap_room": (0, MAX_ROOM),
}
NOTHING: tuple[Any, ...] = (None, False, "", [], {})
# Fields of features that this server does not have, each with the values that ask for nothing besides the usual ones.
LATER: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        [
            # Constrained output.
            "grammar", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
            "guided_decoding_backend", "guided_whitespace_pattern", "structured_outputs",
            # Sampling.
            "use_beam_search", "allowed_token_ids", "bad_words", "custom_params", "custom_logit_processor", "logits_processors",
            # The prompt and what is told about it.
            "prompt_logprobs", "logprob_token_ids", "prompt_embeds", "input_embeds", "suffix", "prediction", "return_hidden_states",
            # Conversations.
            "functions", "documents", "chat_template", "reasoning_effort", "thinking_token_budget", "verbosity",
            "web_search_options", "refusal",
            # Other kinds of input and output.
            "image_data", "video_data", "audio_data", "audio", "mm_processor_kwargs",
            # Adapters, sessions, several servers.
            "lora_path", "session_params", "kv_transfer_params", "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank",
        ],
        (),
    ),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "length_penalty": (1, 1.0),
}  # fmt: skip
# Fields that only a conversation has, refused by the other routes in the same way.
CHATS: dict[str, tuple[Any, ...]] = {"tools": (), "tool_choice": ("none", "auto")}

Struct = TypeVar("Struct", bound=msgspec.Struct)


class Sampling(msgspec.Struct, kw_only=True, frozen=True):
    """Sampling parameters under their native names; null means the default."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[Any, float] | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    sampling_seed: int | None = None
    seed: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    stream_interval: int | None = None


class Options(msgspec.Struct, kw_only=True):
    """What else one prompt may ask for."""

    rid: str | None = None
    priority: int | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    token_ids_logprob: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    no_logs: bool | None = None
    log_metrics: bool | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None


def read(kind: type[Struct], body: Mapping[str, Any], names: Mapping[str, str] | None = None) -> Struct:
    """`body` as a struct, with strict types."""
    try:
        return msgspec.convert(dict(body), kind)
    except msgspec.ValidationError as error:
        found = re.search(r"(.*?) - at `\$\.?(.*)`$", str(error), re.DOTALL)
        if found is None:
            missing = re.search(r"missing required field `(.*)`", str(error))
            raise BadRequest(str(error), param=missing[1] if missing else None) from None
        path = found[2]
        top = re.split(r"[.\[]", path, maxsplit=1)[0]
        shown = (names or {}).get(top, top)
        raise BadRequest(f"{shown}{path[len(top) :]}: {found[1]}", param=shown) from None


def refuse_later(body: Mapping[str, Any], where: str = "", *, chat: bool = False) -> None:
    """Fields of features that this server does not have, unless they ask for nothing. `where`: the place of `body` in the request;
    `chat`: it is a conversation's."""
    for name, value in body.items():
        if name in LATER and not _asks_nothing(value, LATER[name]):
            shown = f"{where}.{name}" if where else name
            raise BadRequest(f"{shown} is not served by this server", param=where.partition("[")[0] or name, code="unsupported_field")
        if name in CHATS and not chat and not _asks_nothing(value, CHATS[name]):
            raise BadRequest(f"{name} is served by /v1/chat/completions only", param=name, code="unsupported_field")


def _asks_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if item is not None}
    # A room 0 is a room, and equals False.
    return any(type(value) is type(other) and value == other for other in (*NOTHING, *neutral))


def check_ranges(part: msgspec.Struct, names: Mapping[str, str]) -> None:
    """Every number within its range."""
    for name in part.__struct_fields__:
        value = getattr(part, name)
        if value is None or name not in RANGES:
            continue
        low, high = RANGES[name]
        # A NaN fails both comparisons.
        if not low <= value <= high:
            shown = names.get(name, name)
            raise BadRequest(f"{shown} must be between {low} and {high}, got {value}", param=shown)
