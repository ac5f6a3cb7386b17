"""Tool calls of earlier turns, as chat templates want them: some write a call's arguments as text, some as an object.

`Arguments` is both: a dictionary that, wherever a template makes text of it, is the text that the client sent. Invariant: a call that
cannot be read as an object stays the text that it is. Called by `chat`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["Arguments", "shown_calls"]


class Arguments(dict[str, Any]):
    """See the module."""

    def __init__(self, value: Mapping[str, Any], text: str) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, text: str) -> str:
        return self._text + text

    def __radd__(self, text: str) -> str:
        return text + self._text


def shown_calls(calls: Any) -> Any:
    """`tool_calls` of a message, with arguments for templates of either kind."""
    if not isinstance(calls, list):
        return calls
    return [_shown(call) if isinstance(call, Mapping) else call for call in calls]


def _shown(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(given: Any) -> Any:
    try:
        text = json.dumps(given, ensure_ascii=False) if isinstance(given, Mapping) else given or "{}"
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):  # ValueError: also half a character, which no prompt can hold
        return given
    return Arguments(value, text) if isinstance(value, dict) else given
