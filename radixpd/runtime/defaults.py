"""Sampling parameters of requests that give none, for each kind of route; and what this server can hold.

Of several sources the later wins: neutral values (with the route's own output limit), on OpenAI routes the model's generation_config.json
(`--sampling-defaults model`), everywhere `--preferred-sampling-params`. Invariant: whatever a request could not ask for is a `ConfigError`
before any process starts. Called by the supervisor (to check) and by whoever admits requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from radixpd.config.resolve import Resolved
from radixpd.errors import BadRequest, ConfigError
from radixpd.grammar.requests import FIELDS
from radixpd.runtime.admission import NEUTRAL, TOKENS, Limits, Sampling, admit, read, refuse_later
from radixpd.runtime.disaggregation import mode_of, room_rule_of

__all__ = ["Defaults", "defaults_of", "limits_of"]

COMPLETION = Sampling(max_new_tokens=16)  # as at OpenAI
CHAT = Sampling(max_new_tokens=TOKENS)  # what fits
PER_REQUEST = ("n", "spaces_between_special_tokens", *FIELDS)  # parameters that change what an answer looks like


@dataclass(frozen=True, slots=True)
class Defaults:
    """By route: `/generate`, `/v1/completions`, `/v1/chat/completions`."""

    native: Sampling = NEUTRAL
    completions: Sampling = COMPLETION
    chat: Sampling = CHAT

    def shown(self) -> dict[str, dict[str, Any]]:
        """What is set, by route, for people."""
        routes = {"native": self.native, "completions": self.completions, "chat": self.chat}
        return {route: _given(params) for route, params in routes.items()}


def limits_of(resolved: Resolved) -> Limits:
    """What this server can hold."""
    return Limits(
        vocab_size=resolved.model.vocab_size,
        context_length=resolved.context_length,
        pool_tokens=resolved.pool_tokens,
        max_running=resolved.max_running,
        auto_truncate=resolved.settings.generation.allow_auto_truncate,
        grammars=resolved.settings.engine.grammar_backend != "none",
        rooms=room_rule_of(mode_of(resolved), resolved),
    )


def defaults_of(resolved: Resolved) -> Defaults:
    """The defaults of a server with these settings."""
    settings, limits = resolved.settings.generation, limits_of(resolved)
    preferred = _preferred(settings.preferred_sampling_params, limits)
    model: dict[str, Any] = {}
    if settings.sampling_defaults == "model":
        model = _checked(resolved.model.sampling, limits, "--model-path: generation_config.json", "; --sampling-defaults openai ignores it")
    base = Defaults()
    return Defaults(
        native=msgspec.structs.replace(base.native, **preferred),
        completions=msgspec.structs.replace(base.completions, **model | preferred),
        chat=msgspec.structs.replace(base.chat, **model | preferred),
    )


def _preferred(text: str | None, limits: Limits) -> dict[str, Any]:
    flag = "--preferred-sampling-params"
    if text is None:
        return {}
    try:
        params = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is not JSON: {error}") from None
    known = [name for name in Sampling.__struct_fields__ if name not in PER_REQUEST]
    if not isinstance(params, dict) or not params.keys() <= set(known):
        raise ConfigError(f"{flag} must be a JSON object with keys among {', '.join(known)}")
    return _checked(params, limits, flag, "")


def _checked(params: Mapping[str, Any], limits: Limits, source: str, hint: str) -> dict[str, Any]:
    try:
        refuse_later(params)
        admit([0], params, {}, limits=limits, names={})
    except BadRequest as error:
        raise ConfigError(f"{source}: {error}{hint}") from None
    found = _given(read(Sampling, params))
    if "seed" in found:
        found.setdefault("sampling_seed", found.pop("seed"))
    return found


def _given(params: Sampling) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(params).items() if value is not None}
